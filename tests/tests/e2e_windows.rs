//! Memory windows, their keys' beginnings and ends, and regions that are registered anew.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::windows::{
    a_region_is_registered_anew, a_region_with_a_window_stays, a_send_takes_a_window_away,
    a_send_takes_away_no_more_than_it_may, a_window_of_type_1_is_bound_anew,
    a_window_of_type_2_is_one_queue_pairs, a_window_of_type_2_is_used_until_it_is_invalidated,
    a_window_shows_what_it_was_bound_to, a_window_that_is_gone_is_refused, what_cannot_be_bound,
    without_an_address_bytes_count_from_the_first,
};

on_each_backend!(
    a_window_of_type_2_is_used_until_it_is_invalidated,
    a_window_of_type_1_is_bound_anew,
    a_send_takes_a_window_away,
    a_send_takes_away_no_more_than_it_may,
    a_window_shows_what_it_was_bound_to,
    what_cannot_be_bound,
    a_window_of_type_2_is_one_queue_pairs,
    a_region_with_a_window_stays,
    a_window_that_is_gone_is_refused,
    without_an_address_bytes_count_from_the_first,
    a_region_is_registered_anew,
);
