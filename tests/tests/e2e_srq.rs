//! Receives that queue pairs share.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::srq::{
    a_shared_queue_in_use_is_not_destroyed, datagrams_share_receives,
    few_receives_serve_many_senders, queue_pairs_share_receives,
    the_limit_of_a_shared_queue_is_told_once, who_breaks_leaves_what_is_shared,
    without_a_shared_receive_the_sender_waits,
};

on_each_backend!(
    queue_pairs_share_receives,
    datagrams_share_receives,
    without_a_shared_receive_the_sender_waits,
    the_limit_of_a_shared_queue_is_told_once,
    who_breaks_leaves_what_is_shared,
    a_shared_queue_in_use_is_not_destroyed,
    few_receives_serve_many_senders,
);
