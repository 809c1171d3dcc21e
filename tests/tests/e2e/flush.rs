//! FLUSH and ATOMIC WRITE between two containers.

use rocinante_tests::on_each_backend;

on_each_backend!(flush::*);
