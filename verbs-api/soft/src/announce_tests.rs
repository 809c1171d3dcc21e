//! Tests of `announce.rs`, which `tests/models` compiles, too.

use std::iter::once_with;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Wake, Waker};

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{Cqe, WcOpcode, WcStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::announce::{ChannelShared, CqShared, End, Pushed};
use crate::provider::wakers::Woken;

/// A channel and N queues of one entry each.
fn queues<const N: usize>() -> (Arc<ChannelShared>, [CqShared; N]) {
    let channel = Arc::new(ChannelShared::new().unwrap());
    let queues = [(); N].map(|()| CqShared::new(0, 1, Some(channel.clone())));
    (channel, queues)
}

fn is_ready(channel: &ChannelShared) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

pub(super) fn cqe(solicited: bool) -> Cqe {
    Cqe {
        wr_id: 1,
        status: WcStatus::Success,
        opcode: WcOpcode::Recv,
        byte_len: 0,
        imm: None,
        invalidated: None,
        qpn: Qpn::default(),
        context: 0,
        sender: None,
        solicited,
    }
}

fn complete(queue: &CqShared) {
    assert_eq!(queue.push([cqe(false)].into_iter(), &mut Woken::default()), Pushed::All);
    assert!(queue.take_one().is_some());
}

#[test]
fn a_channel_is_readable_until_the_last_event_of_its_queues_is_taken() {
    let (channel, queues) = queues::<3>();
    for _ in 0..3 {
        assert!(!is_ready(&channel));
        for queue in &queues {
            queue.arm(false);
            complete(queue);
            assert!(is_ready(&channel));
        }
        for queue in &queues {
            assert!(is_ready(&channel));
            assert_eq!(channel.next(), Some(queue.number));
        }
        assert!(!is_ready(&channel));
        assert_eq!(channel.next(), None);
    }
}

#[test]
fn of_a_queue_that_goes_away_nobody_hears_and_the_other_events_stay() {
    let (channel, [first, second, third]) = queues();
    for queue in [&first, &second, &third] {
        queue.arm(false);
        complete(queue);
    }
    second.leave_channel();
    assert!(is_ready(&channel));
    assert_eq!([channel.next(), channel.next()], [Some(first.number), Some(third.number)]);
    assert!(!is_ready(&channel));
    first.arm(false);
    complete(&first);
    first.leave_channel();
    assert!(!is_ready(&channel));
    assert_eq!(channel.next(), None);
}

/// A program that arms a queue and then finds it empty gets an event, even if the completion was
/// already on its way.
#[test]
fn a_wish_counts_that_is_made_before_the_completion_is_in_the_queue() {
    for (solicited_only, solicited) in [(false, false), (false, true), (true, true)] {
        let (channel, [queue]) = queues();
        let completion = once_with(|| {
            queue.arm(solicited_only);
            cqe(solicited)
        });
        queue.push(completion, &mut Woken::default());
        assert_eq!(channel.next(), Some(queue.number), "{solicited_only} {solicited}");
    }
}

#[test]
fn two_wishes_make_one_event_and_the_stronger_counts() {
    for wishes in [[true, false], [false, true], [false, false]] {
        let (channel, [queue]) = queues();
        for solicited_only in wishes {
            queue.arm(solicited_only);
        }
        complete(&queue);
        complete(&queue);
        assert_eq!([channel.next(), channel.next()], [Some(queue.number), None], "{wishes:?}");
    }
    let (channel, [queue]) = queues();
    queue.arm(true);
    queue.arm(true);
    complete(&queue);
    assert_eq!(channel.next(), None);
}

#[test]
fn a_full_queue_tells_whoever_waits_and_is_news_once() {
    let (channel, [full, other]) = queues();
    let push = |count| full.push(std::iter::repeat_n(cqe(false), count), &mut Woken::default());
    full.arm(true);
    assert_eq!(push(2), Pushed::Overflow { news: true });
    assert_eq!(push(1), Pushed::Overflow { news: false });
    assert_eq!([channel.next(), channel.next()], [Some(full.number), None]);
    assert!(full.has_ended() && full.end().is_none(), "there is one to take");
    assert!(full.take_one().is_some() && full.end() == Some(End::Overflow));
    assert!(!other.has_ended());
}

/// How often a thread was woken.
#[derive(Default)]
struct Wakes(AtomicU32);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A thread that polls and sleeps for a moment is no reader of the channel: its sleep asks for no
/// event, and takes none.
#[test]
fn threads_that_rest_are_woken_once_by_what_comes_next() {
    let (channel, [queue]) = queues::<1>();
    let wakes = [(); 2].map(|()| Arc::<Wakes>::default());
    let [first, second] = wakes.each_ref().map(|wakes| Waker::from(wakes.clone()));
    let count = || wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed));
    assert!(!queue.rests(&first) && !queue.rests(&first) && !queue.rests(&second));
    complete(&queue);
    assert_eq!(count(), [1, 1]);
    assert!(!is_ready(&channel));
    complete(&queue);
    assert_eq!(count(), [1, 1], "they rest no more");
    queue.push([cqe(false)].into_iter(), &mut Woken::default());
    assert!(queue.rests(&first), "there is something already");
    queue.take_one();
    assert!(!queue.rests(&second));
    queue.gone(&mut Woken::default());
    assert_eq!(count(), [2, 2]);
    assert!(queue.rests(&first), "nothing comes any more");
}
