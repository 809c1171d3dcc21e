//! What objects say of themselves, whom they wake, and memory of the program's own.

use rocinante_tests::on_each_backend;

on_each_backend!(objects::*);
on_each_backend!(register::*);
