//! Faults between two containers. Each ends with the status that verbs users know, at both ends,
//! and changes no byte that it should not.

use rocinante_tests::on_each_backend;

on_each_backend!(errors::*);
