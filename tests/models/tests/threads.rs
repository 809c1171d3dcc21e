//! Every order of the steps of a few threads over one device: no posted request, arriving datagram
//! or deadline is forgotten. A thread that sleeps for ever is a deadlock, which loom reports with
//! the steps that led to it.
//!
//! `LOOM_MAX_PREEMPTIONS=4 LOOM_LOG=trace cargo test -p rocinante-models` looks deeper, or shows
//! more.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use rocinante_models::provider::wake;
use rocinante_models::soft::progress::standby::Pause;
use rocinante_models::soft::shard::cqe;
use rocinante_models::soft::{Device, Peer};
use rocinante_models::{Letters, block_on};
use rocinante_stack::verbs::Cqe;

/// Tries all orders with at most `preemptions` switches away from a thread that could go on.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 5_000;
    builder.check(body);
}

/// A thread that works on the state that it shares with this one.
fn spawn<S: Send + Sync + 'static, T: 'static>(
    shared: &Arc<S>,
    work: impl FnOnce(&S) -> T + 'static,
) -> thread::JoinHandle<T> {
    let shared = shared.clone();
    thread::spawn(move || work(&shared))
}

/// A thread that posts while another drives leaves the request to that one. The driving thread
/// takes it before it stops.
#[test]
fn what_two_threads_post_reaches_the_engine_once_and_in_order() {
    model(2, || {
        let device = Device::new(Peer::Near);
        let other = spawn(&device, |device| {
            device.post_send(1).unwrap();
            device.post_send(2).unwrap();
        });
        device.post_recv(11).unwrap();
        device.post_send(12).unwrap();
        other.join().unwrap();
        let posted = device.posted();
        let of = |range: std::ops::Range<u64>| {
            posted.iter().copied().filter(|id| range.contains(id)).collect::<Vec<_>>()
        };
        assert_eq!((of(1..10), of(10..20)), (vec![1, 2], vec![11, 12]));
        assert_eq!(std::iter::from_fn(|| device.taken()).count(), 3);
    });
}

/// The same while a third thread holds the lock for something else.
#[test]
fn what_is_posted_while_the_shard_is_held_is_made_up_for() {
    model(3, || {
        let device = Device::new(Peer::Near);
        let posting = spawn(&device, |device| device.post_send(1).unwrap());
        device.hold();
        posting.join().unwrap();
        assert_eq!(device.posted(), [1]);
    });
}

/// A reset forgets earlier requests, staged or not, and leaves room for a whole queue.
#[test]
fn a_reset_leaves_no_request_and_no_place_taken() {
    model(3, || {
        let device = Device::new(Peer::Silent);
        let posting = spawn(&device, |device| {
            let _ = device.post_send(1);
            let _ = device.post_send(2);
        });
        device.reset();
        posting.join().unwrap();
        device.set_up_again();
        assert_eq!(device.room(), 8);
        // Requests staged before the reset must not reach the new queue pair.
        assert_eq!(device.posted().iter().filter(|id| **id != 99).count(), 0);
    });
}

/// The program arms, looks and sleeps: each completion after the look makes an event.
#[test]
fn who_arms_then_looks_then_sleeps_misses_nothing() {
    model(3, || {
        let device = Device::new(Peer::Near);
        let completing = spawn(&device, |device| {
            device.complete(&[cqe(1)]);
            device.complete(&[Cqe { solicited: true, ..cqe(2) }]);
        });
        let mut seen = 0;
        while seen < 2 {
            // The second completion is solicited, so it makes an event either way.
            device.arm(seen == 1);
            let before = seen;
            while device.taken().is_some() {
                seen += 1;
            }
            if seen == before {
                device.sleep_for_event();
            }
        }
        completing.join().unwrap();
    });
}

/// Two completions, and a task that polls and sleeps.
#[test]
fn a_task_is_woken_for_each_completion_that_it_does_not_find() {
    model(3, || {
        let device = Device::for_tasks(Peer::Near);
        let completing = spawn(&device, |device| {
            device.complete(&[cqe(1)]);
            device.complete(&[cqe(2)]);
        });
        for id in [1, 2] {
            assert_eq!(block_on(|cx| device.poll_for_task(cx)).wr_id, id);
        }
        completing.join().unwrap();
    });
}

/// Each takes one completion, and no completion is left for a task that sleeps.
#[test]
fn two_tasks_of_one_queue_are_both_woken() {
    model(2, || {
        let device = Device::for_tasks(Peer::Near);
        let other = spawn(&device, |device| block_on(|cx| device.poll_for_task(cx)).wr_id);
        device.complete(&[cqe(1)]);
        device.complete(&[cqe(2)]);
        let ids = [block_on(|cx| device.poll_for_task(cx)).wr_id, other.join().unwrap()];
        assert!(ids == [1, 2] || ids == [2, 1], "{ids:?}");
    });
}

/// The same for threads that poll and sleep between, of a queue with a channel.
#[test]
fn threads_that_rest_are_woken_for_each_completion_that_they_do_not_find() {
    model(2, || {
        let device = Device::new(Peer::Near);
        let other = spawn(&device, |device| block_on(|cx| device.rest(cx)).wr_id);
        device.complete(&[cqe(1)]);
        device.complete(&[cqe(2)]);
        let ids = [block_on(|cx| device.rest(cx)).wr_id, other.join().unwrap()];
        assert!(ids == [1, 2] || ids == [2, 1], "{ids:?}");
    });
}

/// Arming once makes one event. The descriptor is readable exactly while there are events.
#[test]
fn a_wish_makes_one_event_and_the_descriptor_tells_the_truth() {
    model(3, || {
        let device = Device::new(Peer::Near);
        device.arm(false);
        let completing = [1, 2].map(|id| spawn(&device, move |device| device.complete(&[cqe(id)])));
        let mut events = usize::from(device.event());
        for thread in completing {
            thread.join().unwrap();
        }
        assert_eq!(device.channel_fd().is_ready(), events == 0);
        events += usize::from(device.event());
        assert_eq!(events, 1);
        assert!(!device.channel_fd().is_ready());
    });
}

/// Both events are delivered, and the descriptor stays readable for the second.
#[test]
fn of_two_queues_with_one_channel_each_wakes_its_program() {
    model(3, || {
        let device = Device::new(Peer::Near);
        device.arm_both();
        let completing = spawn(&device, |device| {
            device.complete(&[cqe(1)]);
            device.complete_other(&[cqe(2)]);
        });
        let events = [0, 1].map(|_| {
            wake::wait(None, device.channel_fd(), None);
            device.event_number().expect("readable, so there is one")
        });
        assert_ne!(events[0], events[1]);
        completing.join().unwrap();
        assert!(device.event_number().is_none() && !device.channel_fd().is_ready());
    });
}

/// If two threads arm a queue differently, "all completions" prevails over "solicited only".
#[test]
fn who_wants_to_hear_of_all_does() {
    model(3, || {
        let device = Device::new(Peer::Near);
        let other = spawn(&device, |device| device.arm(true));
        device.arm(false);
        other.join().unwrap();
        device.complete(&[cqe(1)]);
        assert!(device.event());
    });
}

/// A device with a background thread, which runs until the device is closed.
fn with_background(peer: Peer, program: impl FnOnce(&Arc<Device>)) {
    let device = Device::new(peer);
    let background = spawn(&device, Device::background);
    program(&device);
    device.shut_down();
    background.join().unwrap();
}

/// In any state at that moment.
#[test]
fn the_background_thread_ends_when_it_is_told_to() {
    model(3, || with_background(Peer::Near, |device| assert!(device.poll().is_none())));
}

/// The program posts and then sleeps. The background thread must learn of the deadline, even if it
/// was about to sleep for longer.
#[test]
fn a_deadline_of_the_programs_is_kept_by_the_background_thread() {
    model(2, || {
        with_background(Peer::Silent, |device| {
            device.arm(false);
            device.post_send(1).unwrap();
            device.sleep_for_event();
            assert_eq!(device.taken().unwrap().wr_id, 2000);
            wait_for_async_event(device);
        });
    });
}

/// The descriptor is readable exactly while there are asynchronous events.
fn wait_for_async_event(device: &Device) {
    wake::wait(None, device.async_fd(), None);
    assert!(device.async_event());
    assert!(!device.async_fd().is_ready());
}

/// Another thread does `what`. If the program finds no completion when it looks, it sleeps until
/// there is one.
fn is_learnt_of(
    what: impl Fn(&Device) + Copy + Send + Sync + 'static,
    look: impl Fn(&Device) -> bool + Send + Sync + 'static,
    sleep: impl Fn(&Device) + Send + Sync + 'static,
) {
    is_learnt_of_within(2, what, look, sleep);
}

/// The same with other bounds.
fn is_learnt_of_within(
    preemptions: usize,
    what: impl Fn(&Device) + Copy + Send + Sync + 'static,
    look: impl Fn(&Device) -> bool + Send + Sync + 'static,
    sleep: impl Fn(&Device) + Send + Sync + 'static,
) {
    model(preemptions, move || {
        with_background(Peer::Near, |device| {
            let other = spawn(device, what);
            device.arm(false);
            if !look(device) {
                sleep(device);
            }
            other.join().unwrap();
        });
    });
}

/// A program drives once and then only sleeps on its channel: the background thread takes over.
#[test]
fn a_datagram_is_received_when_the_program_no_longer_drives() {
    is_learnt_of(
        |device| device.arrive(),
        |device| device.poll().is_some(),
        |device| device.sleep_for_event(),
    );
}

/// A task polls once and then sleeps: the background thread takes over and wakes it.
#[test]
fn a_task_is_woken_by_what_the_background_thread_receives() {
    model(2, || {
        let device = Device::for_tasks(Peer::Near);
        let [background, arriving] =
            [Device::background, Device::arrive].map(|work| spawn(&device, work));
        block_on(|cx| device.poll_for_task(cx));
        arriving.join().unwrap();
        device.shut_down();
        background.join().unwrap();
    });
}

/// Another shard has a command for this one, and no thread drives.
#[test]
fn mail_is_read_whoever_sleeps() {
    is_learnt_of(
        |device| device.leave_mail(),
        |device| device.taken().is_some(),
        |device| device.sleep_for_event(),
    );
}

/// The same while a thread of the program sleeps on the port, and the background thread looks only
/// if it is called.
#[test]
fn mail_is_read_while_the_program_sleeps_on_the_port() {
    for pause in [Pause::Short, Pause::Long, Pause::Rest] {
        is_learnt_of_within(
            1,
            move |device| device.leave_mail(),
            move |device| {
                pause.set();
                wake::clock::stop(Duration::ZERO);
                device.taken().is_some()
            },
            |device| device.wait_event(),
        );
    }
}

/// A program drives and then sleeps on several shards at once: the background thread watches the
/// port, and needs no timeout for that.
#[test]
fn who_sleeps_on_several_shards_is_woken_by_any() {
    is_learnt_of_within(
        1,
        |device| device.arrive(),
        |device| {
            wake::clock::stop(Duration::ZERO);
            device.poll().is_some()
        },
        |device| device.wait_event_of_several(),
    );
}

/// The program polls, so the acknowledgement is left to it. Then it sleeps, and the background
/// thread must send the acknowledgement.
#[test]
fn an_acknowledgement_that_waits_for_the_program_leaves_without_it() {
    for drive in [Device::drive, Device::drive_once] {
        model(2, move || {
            with_background(Peer::Silent, |device| {
                device.arrive();
                drive(device);
                device.sleep_for_acknowledgement();
            });
        });
    }
}

/// A device with a thread of the program that waits on the port for something else, so that the
/// background thread leaves the port to it. It has that when `program` notifies the descriptor, and
/// then does `more`.
fn with_a_thread_that_waits(
    peer: Peer,
    pause: Pause,
    more: impl FnOnce(&Device) + 'static,
    program: impl FnOnce(&Arc<Device>, &wake::OwnedFd),
) {
    pause.set();
    let device = Device::new(peer);
    let end = wake::eventfd().unwrap();
    let ended = end.clone();
    let waiting = spawn(&device, move |device| {
        device.wait_for(&ended);
        more(device);
    });
    while !device.is_waited() {
        thread::yield_now();
    }
    let background = spawn(&device, Device::background);
    while pause != Pause::Short && device.is_driven() {
        thread::yield_now();
    }
    program(&device, &end);
    waiting.join().unwrap();
    device.shut_down();
    background.join().unwrap();
}

/// The acknowledgement leaves while another thread waits, and the background thread looks only if
/// it is called.
#[test]
fn an_acknowledgement_that_waits_for_the_program_leaves_while_another_thread_waits() {
    model(1, || {
        with_a_thread_that_waits(
            Peer::Silent,
            Pause::Rest,
            |_| {},
            |device, end| {
                device.arrive();
                device.drive();
                device.sleep_for_acknowledgement();
                wake::notify(end);
            },
        );
    });
}

/// The thread that waits knows no deadline. The program posts and then sleeps: the background
/// thread must learn of the deadline.
#[test]
fn a_deadline_is_kept_while_another_thread_waits() {
    for pause in [Pause::Short, Pause::Rest] {
        model(1, move || {
            with_a_thread_that_waits(
                Peer::Silent,
                pause,
                |_| {},
                |device, end| {
                    device.arm(false);
                    device.post_send(1).unwrap();
                    if pause == Pause::Short {
                        wake::clock::advance(Duration::from_secs(1));
                    }
                    device.sleep_for_event();
                    wake::notify(end);
                },
            );
        });
    }
}

/// A program sleeps on several shards. The thread that waits leaves the port, and then something
/// arrives.
#[test]
fn who_sleeps_on_several_shards_is_woken_though_no_other_thread_waits_any_more() {
    for pause in [Pause::Long, Pause::Rest] {
        model(1, move || {
            wake::clock::stop(Pause::LONG);
            with_a_thread_that_waits(Peer::Near, pause, Device::arrive, |device, end| {
                wake::notify(end);
                device.sleep_on_several_until_completed(1);
            });
        });
    }
}

/// A thread that sleeps on the port turns its notification on. When it goes, the background thread
/// watches the port again, whether it stands aside, rests, or is about to.
#[test]
fn who_sleeps_on_the_port_gives_it_back() {
    for pause in [Pause::Short, Pause::Long, Pause::Rest] {
        model(1, move || {
            pause.set();
            with_background(Peer::Near, |device| {
                let arriving = spawn(device, |device| {
                    device.arrive();
                    device.arrive();
                });
                let look = || std::iter::from_fn(|| device.taken()).count();
                device.arm(false);
                let mut seen = look();
                if seen == 0 {
                    device.wait_event();
                    device.arm(false);
                    seen += look();
                }
                if seen < 2 {
                    device.sleep_for_event();
                }
                arriving.join().unwrap();
            });
        });
    }
}

/// A program whose only thread waits and leaves, while the background thread rests or is about to.
#[test]
fn the_port_is_watched_when_the_last_thread_leaves_it() {
    model(2, || {
        Pause::Rest.set();
        with_background(Peer::Near, |device| {
            // A thread that waits for something else, and has it.
            device.arm(false);
            device.complete(&[cqe(1)]);
            device.wait_for(device.channel_fd());
            assert!(device.taken().is_some());
            device.arm(false);
            assert!(device.event() || device.taken().is_none());
            device.arrive();
            device.sleep_for_event();
        });
    });
}

/// A device without a background thread: a thread waits on the port while another polls.
#[test]
fn the_port_of_a_thread_that_waits_stays_watched_though_another_polls() {
    model(2, || {
        let device = Device::new(Peer::Near);
        let other = spawn(&device, |device| {
            device.arrive();
            device.drive();
            device.drive();
            device.arrive();
        });
        let mut seen = 0;
        while seen < 2 {
            device.arm(false);
            let before = seen;
            while device.taken().is_some() {
                seen += 1;
            }
            if seen == before {
                device.wait_event();
            }
        }
        other.join().unwrap();
    });
}

/// A request that another thread posts while this one is on its way to sleep on the port.
#[test]
fn what_is_posted_while_a_thread_goes_to_wait_leaves() {
    model(2, || {
        let device = Device::new(Peer::Near);
        device.arm(false);
        let posting = spawn(&device, |device| device.post_send(1).unwrap());
        device.wait_event();
        posting.join().unwrap();
        assert_eq!(device.taken().unwrap().wr_id, 1);
    });
}

/// The program polls, posts while the background thread drives, and then only sleeps. However long
/// the background thread stands aside, it sends the request first.
#[test]
fn what_is_posted_while_the_background_thread_drives_is_not_left_to_its_sleep() {
    model(2, || {
        wake::clock::stop(Duration::ZERO);
        wake::clock::spin(Duration::from_nanos(2));
        with_background(Peer::Near, |device| {
            device.arrive();
            device.drive();
            device.post_send(1).unwrap();
            device.sleep_until_posted(1);
        });
    });
}

/// The mailbox of the connection manager, whenever the program asks for the descriptor.
#[test]
fn a_mailbox_with_letters_is_readable() {
    model(3, || {
        let mailbox = Arc::new(Letters::default());
        let writing = spawn(&mailbox, |mailbox| {
            mailbox.put();
            mailbox.put();
        });
        let mut seen = 0;
        while seen < 2 {
            if mailbox.take() {
                seen += 1;
            } else {
                wake::wait(None, mailbox.fd(), None);
            }
        }
        writing.join().unwrap();
        assert!(!mailbox.fd().is_ready());
    });
}

/// A task that waits for the connection manager.
#[test]
fn a_task_is_woken_by_each_letter_that_it_does_not_find() {
    model(3, || {
        let mailbox = Arc::new(Letters::default());
        let writing = spawn(&mailbox, |mailbox| {
            mailbox.put();
            mailbox.put();
        });
        for _ in 0..2 {
            block_on(|cx| mailbox.poll(cx));
        }
        writing.join().unwrap();
    });
}
