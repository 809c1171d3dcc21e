//! What objects say of themselves, whom they wake, and memory of the program's own.

use rocinante_tests::on_each_backend;
use rocinante_tests::verbs::objects::{
    a_drained_queue_says_so, a_queue_pair_tells_its_state_and_attributes,
    a_region_tells_what_it_permits, channels_and_events_are_waited_for_together,
};
use rocinante_tests::verbs::register::{
    the_programs_own_memory_is_reached, what_contradicts_itself_is_not_registered,
};

on_each_backend!(
    a_queue_pair_tells_its_state_and_attributes,
    a_region_tells_what_it_permits,
    a_drained_queue_says_so,
    channels_and_events_are_waited_for_together,
    the_programs_own_memory_is_reached,
    what_contradicts_itself_is_not_registered,
);
