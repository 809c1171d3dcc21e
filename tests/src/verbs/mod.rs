//! Tests of the API that are the same for the software device and for a device of the kernel:
//! functions of the backend or device that they run [`On`].
//!
//! `tests/tests/e2e` runs them with every backend. [`TESTS`] run on a device of the kernel: on
//! Soft-RoCE in the guest of `interop`, and on a real card by
//! `ROCINANTE_TEST_DEVICE=mlx5_0 ROCINANTE_TEST_ADDRESS=10.0.0.5 cargo test -p rocinante-tests`.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::harness::{Family, On};

/// Declares the modules and lists their public functions, which are tests.
/// [`on_each_backend!`](crate::on_each_backend) runs those of a module, and `module!(on udp)` runs
/// them on that backend alone.
macro_rules! tests {
    ($($module:ident: $($name:ident),+;)+) => {
        $(
            #[allow(
                missing_docs,
                clippy::needless_pass_by_value,
                reason = "the name of a test is a sentence, and all tests have one signature"
            )]
            pub mod $module;

            #[doc(hidden)]
            #[macro_export]
            macro_rules! $module {
                () => {
                    $crate::on_each_backend!($($crate::verbs::$module::$name as $name),+);
                };
                (on udp) => {$(
                    #[test]
                    fn $name() {
                        $crate::require!($crate::need::lab());
                        $crate::verbs::$module::$name($crate::harness::Backend::Udp.into());
                    }
                )+};
            }
        )+

        /// All tests.
        pub static TESTS: &[Test] = &[$($(
            Test { name: concat!(stringify!($module), "::", stringify!($name)), run: $module::$name },
        )+)+];
    };
}

tests! {
    operations: ipv4_256, ipv4_1024, ipv4_4096, ipv6_256, ipv6_1024, ipv6_4096;
    errors:
        remote_access_is_checked,
        what_the_queue_pair_does_not_permit,
        receives_that_do_not_fit,
        local_memory_is_checked,
        without_a_receive_the_sender_waits,
        without_a_receive_in_time_the_sender_gives_up,
        a_destroyed_queue_pair_ends_its_peer_only,
        more_reads_than_the_peer_permits;
    misuse:
        posting_needs_the_right_state,
        a_queue_takes_what_it_was_made_for,
        room_in_a_queue_comes_back_with_completions,
        states_follow_each_other_and_attributes_belong_to_them,
        what_is_in_use_is_not_destroyed,
        a_completion_queue_that_overflows_breaks_its_queue_pairs,
        objects_of_two_devices_do_not_mix;
    memory:
        the_last_byte_of_a_write_comes_last,
        sequence_numbers_wrap,
        a_device_reaches_itself;
    many:
        mixed_operations_on_64_queue_pairs,
        queue_pairs_come_and_go_while_others_work;
    progress:
        a_channel_wakes_its_sleeper,
        a_channel_wakes_a_poll_of_its_descriptor,
        solicited_events_are_for_solicited_sends_and_errors,
        a_passive_target_serves_everything,
        a_receive_that_was_posted_is_there,
        several_threads_share_one_queue_pair,
        asking_questions_loses_no_work,
        events_are_told;
    death: a_killed_peer_is_noticed;
    objects:
        a_queue_pair_tells_its_state_and_attributes,
        a_region_tells_what_it_permits,
        a_drained_queue_says_so,
        a_descriptor_is_ready_until_the_last_event_is_taken,
        a_queue_that_goes_takes_its_event_along,
        channels_and_events_are_waited_for_together;
    srq:
        queue_pairs_share_receives,
        datagrams_share_receives,
        without_a_shared_receive_the_sender_waits,
        the_limit_of_a_shared_queue_is_told_once,
        a_broken_queue_pair_leaves_the_shared_queue,
        a_shared_queue_in_use_is_not_destroyed,
        few_receives_serve_many_senders;
    unreliable:
        datagrams_over_ipv4,
        datagrams_over_ipv6,
        a_datagram_with_another_queue_key_is_lost,
        a_controlled_queue_key_stands_for_the_senders_own,
        a_datagram_without_a_receive_is_lost,
        a_faulty_datagram_stops_sending_only,
        unreliable_connections_carry_sends_and_writes,
        a_message_without_a_receive_is_lost;
    mcast:
        every_member_receives_ipv4,
        every_member_receives_ipv6,
        a_sender_in_the_group_receives_its_own_datagram,
        one_member_that_cannot_take_it_is_no_trouble_to_others,
        a_queue_pair_that_left_the_group_receives_no_more,
        what_cannot_be_attached_is_refused;
    windows:
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
        a_region_is_registered_anew;
    register: the_programs_own_memory_is_reached, what_contradicts_itself_is_not_registered;
    flush:
        an_atomic_write_is_whole_and_behind_what_is_before,
        what_was_written_is_flushed,
        what_may_not_be_flushed_is_refused;
    cm:
        ipv4_connects_exchanges_and_disconnects,
        ipv6_connects_exchanges_and_disconnects,
        a_rejected_peer_gets_the_reason,
        nothing_waits_but_descriptors,
        a_program_without_cm_calls_gets_completions,
        unreliable_connections,
        private_data_of_every_length,
        many_connections_one_after_the_other,
        a_listener_goes_while_a_peer_waits,
        patience_ends,
        the_asking_side_chooses_the_path_mtu;
    services:
        a_service_is_found_and_used_over_ipv4,
        a_service_is_found_and_used_over_ipv6,
        a_rejected_peer_gets_the_reason,
        nothing_waits_but_descriptors;
}

/// The families of which the device has addresses: a card may have no IPv6 address.
fn families(on: &On) -> Vec<Family> {
    let has = |family: &Family| match on {
        On::Software(_) | On::Encrypted => true,
        On::Kernel(device) => *family == Family::V4 || device.address_of(*family).is_ok(),
    };
    [Family::V4, Family::V6].into_iter().filter(has).collect()
}

/// Whether the descriptor becomes readable within this time.
fn readable(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let timeout = Timespec::try_from(patience).expect("no longer than a century");
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).expect("poll") > 0
}

/// A test of the API.
#[derive(Debug)]
pub struct Test {
    /// Its name: `errors::local_memory_is_checked`.
    pub name: &'static str,
    run: fn(On),
}

impl Test {
    /// Runs it. Error: the message of its panic.
    pub fn run(&self, on: On) -> Result<(), String> {
        catch_unwind(AssertUnwindSafe(|| (self.run)(on))).map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()));
            text.unwrap_or_else(|| "it panicked".into())
        })
    }
}

/// The test of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Test> {
    TESTS.iter().find(|test| test.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A change of this number needs a reason: tests do not vanish.
    #[test]
    fn no_test_is_missing() {
        let names: BTreeSet<&str> = TESTS.iter().map(|test| test.name).collect();
        assert_eq!((names.len(), TESTS.len()), (93, 93));
        assert!(names.iter().all(|name| find(name).is_some()));
    }
}
