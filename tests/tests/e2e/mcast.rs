//! Multicast between two containers, on every backend.

use rocinante_tests::on_each_backend;

on_each_backend!(mcast::*);
