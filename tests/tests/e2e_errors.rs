//! What goes wrong between two containers: each fault with the status that verbs users know, at both ends, and nothing
//! changed that should not.

use rocinante_tests::on_each_backend;

on_each_backend!(errors::*);
