//! Attributes and events of objects, and registration of the program's own memory.

use rocinante_tests::on_each_backend;

on_each_backend!(objects::*);
on_each_backend!(register::*);
