//! What goes wrong between two containers: each fault with the status that verbs users know, at both ends, and nothing
//! changed that should not.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::errors::{
    a_destroyed_queue_pair_ends_its_peer_only, local_memory_is_checked,
    more_reads_than_the_peer_permits, receives_that_do_not_fit, remote_access_is_checked,
    what_the_queue_pair_does_not_permit, without_a_receive_in_time_the_sender_gives_up,
    without_a_receive_the_sender_waits,
};

on_each_backend!(
    remote_access_is_checked,
    what_the_queue_pair_does_not_permit,
    receives_that_do_not_fit,
    local_memory_is_checked,
    without_a_receive_the_sender_waits,
    without_a_receive_in_time_the_sender_gives_up,
    a_destroyed_queue_pair_ends_its_peer_only,
    more_reads_than_the_peer_permits,
);
