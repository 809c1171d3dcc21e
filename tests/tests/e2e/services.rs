//! Datagram services by the connection manager, between two containers, on every backend.

use rocinante_tests::on_each_backend;

on_each_backend!(services::*);
