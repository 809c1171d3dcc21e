//! Multicast between two containers, on every backend.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::mcast::{
    every_member_receives_ipv4, every_member_receives_ipv6,
    one_member_that_cannot_take_it_is_no_trouble_to_others, what_cannot_be_attached_is_refused,
    who_has_left_hears_no_more, who_sends_to_its_own_group_hears_it,
};

on_each_backend!(
    every_member_receives_ipv4,
    every_member_receives_ipv6,
    who_sends_to_its_own_group_hears_it,
    one_member_that_cannot_take_it_is_no_trouble_to_others,
    who_has_left_hears_no_more,
    what_cannot_be_attached_is_refused,
);
