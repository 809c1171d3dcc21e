//! Tests of `events.rs`, which `tests/models` compiles, too.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::events::Inbox;
use crate::model::event::AsyncEvent;
use crate::tuning::room::EVENTS;

fn is_readable(inbox: &Inbox) -> bool {
    poll(&mut [PollFd::new(&inbox.fd(), PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
}

/// An object that goes takes its own events along. The descriptor tells whether others are left.
#[test]
fn the_descriptor_is_readable_as_long_as_there_are_events() {
    let inbox = Inbox::new().unwrap();
    let of = |cq: u32| AsyncEvent::CqOverflow { cq };
    for cq in [1, 2, 1, 3] {
        drop(inbox.push(of(cq)));
    }
    inbox.forget(|event| *event == of(1));
    assert!(is_readable(&inbox));
    assert_eq!(inbox.next(), Some(of(2)));
    assert!(is_readable(&inbox));
    inbox.forget(|event| *event == of(3));
    assert!(!is_readable(&inbox) && inbox.next().is_none());
}

/// A program that never polls still gets the first event of each object.
#[test]
fn a_full_queue_takes_what_it_has_not() {
    let inbox = Inbox::new().unwrap();
    let of = |cq: usize| AsyncEvent::CqOverflow { cq: u32::try_from(cq).unwrap() };
    for _ in 0..3 {
        (0..EVENTS + 3).for_each(|cq| drop(inbox.push(of(cq))));
    }
    let all: Vec<_> = std::iter::from_fn(|| inbox.next()).collect();
    assert_eq!(all, (0..EVENTS + 3).map(of).collect::<Vec<_>>());
}
