//! Memory windows, their keys' beginnings and ends, and regions that are registered anew.

use rocinante_tests::on_each_backend;

on_each_backend!(windows::*);
