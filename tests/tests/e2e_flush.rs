//! FLUSH and ATOMIC WRITE between two containers.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::flush::{
    an_atomic_write_is_whole_and_behind_what_is_before, what_may_not_be_flushed_is_refused,
    what_was_written_is_flushed,
};

on_each_backend!(
    an_atomic_write_is_whole_and_behind_what_is_before,
    what_was_written_is_flushed,
    what_may_not_be_flushed_is_refused,
);
