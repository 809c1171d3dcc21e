//! Memory windows, the lifetime of their keys, and regions registered anew.

use rocinante_tests::on_each_backend;

on_each_backend!(windows::*);
