//! Conformance of reliable connections as scripts: packets in, packets out, completions expected.
//!
//! A [script](Script) is the peer of a queue pair, packet by packet, as requester or as responder.
//! At the same time it is the program that owns the queue pair. The runner chooses the [`Subject`]:
//! our engine in virtual time (`stack/tests/scripts.rs`), or Linux Soft-RoCE in a virtual machine
//! (`interop`). A script expects the behaviour of the specification. Where Soft-RoCE is known to
//! differ, the script calls `Talk::departs` with the [`Departure`], and then expects exactly that.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
// Lengths and PSNs of scripts are small.
mod departures;
mod execution;
mod packet;
mod requester;
mod responder;
mod retries;
mod subject;
mod talk;
mod trace;

pub use departures::{DEPARTURES, Departure};
pub use packet::{aeth, atomic_eth, packet, pattern, reth};
pub use subject::{Completion, Options, Range, Remote, Step, Subject};
pub use talk::{REGION, REMOTE, Talk};
pub use trace::describe;

/// A named talk with a queue pair, in which every packet must come as the script says.
pub struct Script {
    /// Its name: the fault or the rule.
    pub name: &'static str,
    /// The talk.
    pub run: fn(&mut Talk<'_>) -> Step,
}

/// Passes the names of all scripts, by module, to the macro `$then`: `module: name, name; module:
/// name;`.
#[macro_export]
macro_rules! each_script {
    ($then:ident) => {
        $then! {
            responder:
                duplicate_send,
                duplicate_write,
                duplicate_packets_of_messages,
                duplicate_that_asks_for_nothing,
                duplicate_read,
                part_of_a_read,
                duplicate_read_of_something_else,
                duplicate_atomic,
                records_wrap,
                late_duplicate_read_of_a_region_that_is_gone,
                half_of_the_numbers_are_old,
                sequence_error_in_mid_message,
                gap_before_reads_and_atomics,
                psn_wraps_in_every_position,
                no_reads_agreed,
                reset_and_reuse_while_old_requests_fly,
                what_is_no_good_is_dropped;
            execution:
                opcode_without_a_beginning,
                opcode_in_the_middle_of_a_send,
                opcode_in_the_middle_of_a_write,
                operation_not_permitted,
                length_of_each_place,
                length_of_a_write,
                longer_than_a_message_may_be,
                payload_where_there_is_none,
                zero_length_everywhere,
                key_of_a_deregistered_region,
                key_of_nothing,
                key_of_a_foreign_region,
                right_that_a_region_lacks,
                range_outside_of_its_region,
                region_gone_in_mid_write,
                unaligned_atomics,
                immediate_without_a_receive,
                immediate_of_a_long_write,
                send_without_a_receive,
                receive_too_small,
                receive_into_memory_that_is_gone,
                receive_of_several_elements;
            requester:
                ghost_ack,
                nak_of_an_acknowledged_packet,
                lost_ack,
                old_ack,
                invalid_aeth,
                refusals,
                sequence_nak_in_mid_message,
                sequence_nak_of_a_write,
                implied_nak_of_a_read,
                implied_nak_of_an_atomic,
                read_in_several_packets,
                partial_read_retried,
                ack_in_the_middle_of_a_read,
                ack_instead_of_a_response,
                response_of_the_wrong_length,
                response_of_another_kind,
                response_with_a_nak,
                reads_outstanding,
                fence,
                zero_length_requests,
                request_psn_wraps_in_every_position;
            retries:
                lost_last_packet,
                acknowledged_while_repeated,
                lost_response,
                retries_exhausted,
                rnr_then_success,
                rnr_exhausted,
                rnr_and_timeouts,
                drained,
                reset_and_reuse_while_old_answers_fly;
        }
    };
}

macro_rules! table {
    ($($module:ident: $($name:ident),*;)*) => {
        /// All scripts.
        pub static SCRIPTS: &[Script] =
            &[$($(Script { name: stringify!($name), run: $module::$name }),*),*];
    };
}

each_script!(table);
