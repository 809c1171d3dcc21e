//! Receives that queue pairs share.

use rocinante_tests::on_each_backend;

on_each_backend!(srq::*);
