//! Tests of `core.rs` and `background.rs`. They are here because the models compile those files
//! without their surroundings.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocinante_netdev::sim::{SimConfig, SimNet};
use rocinante_netdev::{AnyPort, PathSpec, Port};
use rocinante_stack::types::Time;
use rocinante_stack::verbs::CqId;
use rocinante_stack::{Completions as _, Engine, EngineConfig, Urgency};

use super::super::announce::CqShared;
use super::super::announce_tests::cqe;
use super::super::host::Host;
use super::super::limits_tests::shared;
use super::super::router::Router;
use super::super::shard::Shard;
use super::super::{Channel, Device, Inbox};
use super::core::Core;
use super::watch::{Call, Event, State};
use crate::provider::wake::{self, AsFd as _};
use crate::tuning::flood::PAUSE;
use crate::tuning::shard::POLLS;
use crate::tuning::standby;

fn core() -> Core {
    let port = SimNet::new().port(&[[10, 0, 0, 1].into()], &SimConfig::default()).unwrap();
    let engine = Engine::new(EngineConfig::default());
    let shard = Shard::new("test", engine, AnyPort::from(port), Host::new(1), Router::default());
    Core::new(shard, Arc::default()).unwrap()
}

fn state(core: &Core) -> State {
    core.watch.view().state()
}

/// A flood that ends in a second. Returns when the port is looked at again.
fn leave_alone_for_a_second(shard: &mut Shard) -> Time {
    let later = shard.now().after(1_000_000_000);
    shard.flood.add(later, u64::MAX);
    shard.flood.driven(later, true);
    later.after(PAUSE)
}

/// The program may not call again for long, while the peer waits for the acknowledgement.
#[test]
fn a_thread_on_standby_wakes_for_an_acknowledgement_that_is_corked() {
    const NEVER: Duration = Duration::from_secs(20);
    let core = core();
    assert_eq!(core.watch.on(Event::Waits), Call::No);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let start = Instant::now();
            core.park(State::Standby, core.shard.lock(), None, Some(NEVER));
            start.elapsed()
        });
        while state(&core) != State::Standby && !sleeper.is_finished() {
            std::thread::yield_now();
        }
        // Other work may wait: the thread that sleeps on the port does it.
        let mut shard = core.shard.lock();
        core.note_poll();
        leave_alone_for_a_second(&mut shard);
        core.release(shard);
        assert_eq!(state(&core), State::Standby);
        shard = core.shard.lock();
        assert!(shard.cork.keeps(1, false, || Urgency::By(Time(1))));
        core.release(shard);
        assert!(sleeper.join().unwrap() < NEVER);
    });
    // Requests corked before count as well.
    let start = Instant::now();
    core.park(State::Standby, core.shard.lock(), None, Some(NEVER));
    assert!(start.elapsed() < NEVER);
}

/// To set a timer costs a system call.
#[test]
fn a_thread_that_sleeps_is_told_once_of_an_earlier_deadline() {
    let core = core();
    assert!(core.watch.enter(State::Watching));
    let mut shard = core.shard.lock();
    shard.drivers.park_until(Time(u64::MAX));
    let later = leave_alone_for_a_second(&mut shard);
    core.release(shard);
    assert_eq!((state(&core), core.shard.lock().drivers.parked_until()), (State::Watching, later));
}

/// Else each datagram would wake both.
#[test]
fn the_background_thread_rests_while_a_thread_of_the_program_waits() {
    let core = core();
    let event = wake::eventfd().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let waits = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let _end = ShutsDown(&core);
        // A thread that finds the lock taken looks again soon, and waits then.
        scope.spawn(|| {
            while waits.load(Ordering::Relaxed) {
                core.wait(event.as_fd(), None);
            }
        });
        // If it came first, the background thread would watch the port until something happens.
        while !core.watch.view().is_waited() {
            std::thread::yield_now();
        }
        scope.spawn(|| core.background());
        let mut rests = false;
        while !rests && Instant::now() < deadline {
            rests = state(&core) == State::Resting;
            std::thread::yield_now();
        }
        waits.store(false, Ordering::Relaxed);
        wake::notify(&event);
        assert!(rests);
        while state(&core) != State::Watching {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    });
}

/// Else each packet would wake all of them.
#[test]
fn of_threads_that_poll_in_vain_one_sleeps_on_the_port() {
    let core = core();
    let deadline = Instant::now() + Duration::from_secs(60);
    let [first, second] = [(); 2].map(|()| wake::eventfd().unwrap());
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| core.rest(first.as_fd(), deadline));
        while !core.watch.view().is_waited() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        let other = scope.spawn(|| core.rest(second.as_fd(), deadline));
        // It is no second thread that waits on the port, so it does not end the first one's wait.
        wake::notify(&second);
        other.join().unwrap();
        assert!(core.watch.view().is_waited() && !watching.is_finished());
        wake::notify(&first);
        watching.join().unwrap();
        assert!(!core.watch.view().is_waited());
        // The next one has the port again.
        wake::clear(&first);
        let watching = scope.spawn(|| core.rest(first.as_fd(), deadline));
        while !core.watch.view().is_waited() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        wake::notify(&first);
        watching.join().unwrap();
    });
    assert!(Instant::now() < deadline);
}

/// Stops the background thread, so that a failing test does not wait for it.
struct ShutsDown<'a>(&'a Core);

impl Drop for ShutsDown<'_> {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

/// A look of the background thread costs such a program more than anything else that thread does.
#[test]
fn a_program_that_polls_without_pause_is_left_alone_until_it_expects_something_or_stops() {
    let core = core();
    let deadline = Instant::now() + Duration::from_secs(60);
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
        }
    };
    let yields = || state(&core) == State::CallerPolls;
    std::thread::scope(|scope| {
        let _end = ShutsDown(&core);
        scope.spawn(|| core.background());
        until("it polls without pause", &|| {
            core.drive();
            yields()
        });
        // The background thread may have looked once just before `expect`.
        let (begin, mut left_alone) = (Instant::now(), 0);
        core.expect();
        while begin.elapsed() < 60 * standby::STEADY_MAX {
            left_alone += u32::from(yields());
            core.expect();
            core.drive();
        }
        assert!(left_alone <= 1, "{left_alone} times, and it asks for an event before each poll");
        until("it polls without pause again", &|| {
            core.drive();
            yields()
        });
        until("it polls no more", &|| state(&core) == State::Watching);
    });
}

/// Arrivals wake the background thread, unless the program is sure to see them first.
#[test]
fn the_port_is_watched_for_a_program_that_polls_now_and_then() {
    let core = core();
    let is_watched = || core.shard.lock().drivers.is_watched();
    let park = || {
        core.shard.lock().watch(true);
        assert!(core.watch.enter(State::Watching));
    };
    park();
    for _ in 0..10 * POLLS {
        core.drive_once();
        drop(core.hold());
    }
    assert!(is_watched(), "a program that posts may not poll");
    (0..POLLS).for_each(|_| _ = core.drive());
    assert!(is_watched());
    assert_eq!(state(&core), State::Watching);
    core.drive();
    assert!(!is_watched(), "it polls in a loop");
    assert_eq!(state(&core), State::Awake, "it is looked at soon");
    // Each sleep of the background thread starts anew.
    park();
    core.drive();
    assert!(is_watched());
    // A thread that sleeps on several shards would be woken late.
    assert_eq!(core.watch.on(Event::Sleeps), Call::No);
    (0..2 * POLLS).for_each(|_| _ = core.drive());
    assert!(is_watched());
    core.wakes();
    // While the background thread is awake, the port is watched until much has arrived.
    core.watch.wake_up();
    (0..2 * POLLS).for_each(|_| _ = core.drive());
    assert!(is_watched());
}

/// A staged request that fails at once completes while the thread that holds the shard posts it.
/// It may be long until another thread drives.
#[test]
fn what_completed_while_the_shard_was_held_is_delivered_when_it_is_let_go() {
    let core = core();
    let mut held = core.hold();
    let [first, second] = [(); 2].map(|()| {
        let mut made = None;
        held.host.cqs.insert(|id| {
            let cq = Arc::new(CqShared::new(id, 4, None));
            made.insert(cq).clone()
        });
        made.unwrap()
    });
    for cq in [&first, &second, &first] {
        held.host.complete(CqId(cq.id), cqe(false));
    }
    assert_eq!([&first, &second].map(|cq| cq.take_one().is_some()), [false; 2]);
    drop(held);
    let taken = |cq: &CqShared| std::iter::from_fn(|| cq.take_one()).count();
    assert_eq!([&first, &second].map(|cq| taken(cq)), [2, 1]);
}

/// Otherwise each packet of a flood would wake a thread, and other threads on its core would wait
/// for it.
#[test]
fn a_flood_is_left_alone_for_a_moment_and_then_read_at_once() {
    let net = SimNet::new();
    let [own, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
    let [port, mut attacker] =
        [own, other].map(|address| net.port(&[address], &SimConfig::default()).unwrap());
    let engine = Engine::new(EngineConfig::default());
    let mut shard =
        Shard::new("test", engine, AnyPort::from(port), Host::new(1), Router::default());
    let (src_port, tos, ttl, flow_label) = (0xc000, 0, 64, 0);
    let spec = PathSpec { local: other, remote: own, src_port, tos, ttl, flow_label };
    let path = attacker.add_path(&spec).unwrap().id;
    let mut send = |count| {
        for _ in 0..count {
            attacker.reserve(path, 20).unwrap().buf.fill(0xff);
            attacker.commit();
            attacker.flush(|failure| panic!("{failure:?}"));
        }
    };
    send(10);
    assert!(shard.drive(false) && !shard.is_flooded(), "few are looked at when they come");
    send(100);
    assert!(!shard.drive(false) && shard.is_flooded());
    assert_eq!(shard.engine.drops().iter().map(|(_, count)| count).sum::<u64>(), 110);
    let resume = shard.needed().expect("it goes on by itself");
    assert!(resume <= shard.now().after(PAUSE));
    let deadline = Instant::now() + Duration::from_secs(20);
    while shard.is_flooded() {
        assert!(Instant::now() < deadline, "it is over");
        shard.drive(false);
    }
}

/// Where a thread is cancelled in its sleep, only the drop of what it holds says so.
#[test]
fn a_sleep_on_a_channel_lasts_until_it_is_dropped() {
    let (hca, _) = shared();
    let device = Device::new(hca, Arc::new(Inbox::new().unwrap()), true).unwrap();
    let channel = Channel::create(&device).unwrap();
    let is_waited = || device.shards.all().any(|core| core.watch.view().is_waited());
    let sleeps = [channel.sleep(), channel.sleep()];
    assert!(sleeps.iter().all(|sleep| sleep.port().is_some()));
    for sleep in sleeps {
        assert!(is_waited());
        drop(sleep);
    }
    assert!(!is_waited());
}
