//! Bursts, budgets, slots that run out, and links that come and go.

use super::*;
use crate::kernel::descriptors::wait_readable;
use crate::testing::ReceiveBy as _;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn a_burst_of_2000_within_the_budget_loses_nothing() {
    let config = config_with(|xdp| xdp.ring_frames = 8192);
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &config));
    if a.capabilities().rx_budget.datagrams < 2000 {
        let why = "RLIMIT_MEMLOCK allows only a smaller budget";
        return crate::testing::testns::skip(
            "xdp::a_burst_of_2000_within_the_budget_loses_nothing",
            &why,
        );
    }
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    for len in [64, 4112] {
        for i in 0..2000 {
            commit(&mut a, path, &pattern(len, i));
        }
        wait_until("all are sent", || {
            a.flush(crate::testing::no_failure);
            !a.wants_write()
        });
        let got = receive(&mut b, 2000);
        assert_eq!(got.len(), 2000, "len {len}: {:?} {:?}", a.stats(), b.stats());
        for (i, got) in got.iter().enumerate() {
            assert!(got.payload == pattern(len, i as u32), "len {len}: datagram {i}");
        }
    }
    assert_eq!(b.stats().rx_queue_drops, 0);
}

/// Sender and receiver on two cores: the kernel's progress appears in the rings in any order.
#[test]
fn a_sender_on_another_thread_within_the_budget_loses_nothing() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    drain(&mut b);
    let window = b.capabilities().rx_budget.datagrams;
    let total = 20_000;
    let len_of = |i: u32| if i.is_multiple_of(3) { 4112 } else { 64 + i as usize % 1000 };
    let received = AtomicU32::new(0);
    let end = Instant::now() + 3 * PATIENCE;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = 0;
            while next < total && Instant::now() < end {
                b.receive_by(32, &mut |d| {
                    assert!(d.payload == pattern(len_of(next), next), "datagram {next}");
                    next += 1;
                })
                .unwrap();
                received.store(next, Ordering::Release);
            }
        });
        let mut sent = 0;
        while sent < total && Instant::now() < end {
            while sent < total && sent - received.load(Ordering::Acquire) < window {
                let Some(slot) = a.reserve(path, len_of(sent)) else { break };
                slot.buf.copy_from_slice(&pattern(len_of(sent), sent));
                a.commit();
                sent += 1;
            }
            a.flush(crate::testing::no_failure);
        }
    });
    assert_eq!(received.into_inner(), total, "{:?} {:?}", a.stats(), b.stats());
    assert_eq!(b.stats().rx_queue_drops, 0);
}

/// Kernels before 6.18 send 32 descriptors per call.
#[test]
fn one_flush_sends_more_than_one_call_may() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    drain(&mut b);
    a.io.tx.set_call_budget(&a.io.socket, 32);
    for count in [1, 15, 16, 17, 33, 100] {
        for i in 0..count {
            commit(&mut a, path, &pattern(4112, i));
        }
        a.flush(crate::testing::no_failure);
        assert!(!a.wants_write());
        assert_eq!(receive(&mut b, count as usize).len(), count as usize);
    }
}

/// The budget is exact: nothing within it is lost, for any mix of sizes, and drops beyond it are
/// counted.
#[test]
fn the_default_budget_holds_and_overruns_are_counted() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let budget = b.capabilities().rx_budget;
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(true, true));
    for large_in_8 in 0..=8 {
        let (mut bytes, mut sent) = (0, 0);
        for i in 0..budget.datagrams {
            let len = if i % 8 < large_in_8 { 4112 } else { 64 };
            if bytes + RxBudget::cost(len) > budget.bytes {
                break;
            }
            bytes += RxBudget::cost(len);
            sent += 1;
            commit(&mut a, path, &pattern(len as usize, i));
        }
        a.flush(crate::testing::no_failure);
        assert_eq!(receive(&mut b, sent).len(), sent, "{large_in_8} of 8 large");
    }
    assert_eq!(b.stats().rx_queue_drops, 0);
    for i in 0..600 {
        send(&mut a, path, &pattern(4112, i));
    }
    let (mut got, end) = (0, Instant::now() + PATIENCE);
    let drops = |b: &XdpPort| b.stats().rx_queue_drops as usize;
    while got + drops(&b) < 600 && Instant::now() < end {
        got += b.receive_by(64, &mut |_| ()).expect("alive");
    }
    let drops = drops(&b);
    assert!(drops > 0, "600 large datagrams do not fit");
    assert_eq!(got + drops, 600, "{:?}", b.stats());
}

#[test]
fn what_cannot_be_sent_is_refused_and_an_uncommitted_slot_is_not_sent() {
    let (pair, mut a, mut b) = or_skip!(pair_with(1500, &PortConfig::default()));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    drain(&mut b);
    assert!(a.reserve(path, 1472).is_some(), "fills the MTU");
    assert!(a.reserve(path, 1473).is_none(), "exceeds the MTU");
    assert!(a.reserve(PathId(77), 64).is_none(), "no such path");
    a.commit();
    a.flush(crate::testing::no_failure);
    assert_eq!(send_all(&mut a, path), 256, "all chunks");
    assert!(a.wants_write(), "a sender waits for a slot");
    a.flush(crate::testing::no_failure);
    assert!(!a.wants_write(), "sent frames have come back");
    assert_eq!(receive(&mut b, 256).len(), 256);
    assert!(a.reserve(path, 64).is_some(), "completions free slots");
}

/// Without a carrier the driver drops each frame.
#[test]
fn dropped_frames_are_reported_with_their_paths() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let [one, two] = [false, true].map(|v6| direct_path(&pair.a, &mut a, &mut b, &spec(v6, true)));
    let before = a.stats();
    pair.b.sh("ip link set v0 down");
    // Of one chunk and of two.
    for (path, len) in [(one, 64), (two, 4112), (one, 4112), (two, 64)] {
        commit(&mut a, path, &pattern(len, 1));
    }
    let mut failures = Vec::new();
    a.flush(|failure| failures.push(failure));
    let expected =
        [one, two, one, two].map(|path| TxFailure { path, datagrams: 1, errno: libc::EBUSY });
    assert_eq!(failures, expected);
    let stats = a.stats();
    assert_eq!((stats.tx_failed, stats.tx_datagrams), (before.tx_failed + 4, before.tx_datagrams));
    // A path that is gone is not reported, nor the one that has its number now.
    commit(&mut a, one, &[1; 64]);
    a.remove_path(one);
    let itself = PathSpec { remote: spec(false, true).local, ..spec(false, true) };
    assert_eq!(pair.a.run(|| a.add_path(&itself)).unwrap().id, one, "the id is used again");
    a.flush(crate::testing::no_failure);
    assert_eq!(a.stats().tx_failed, before.tx_failed + 5);
}

/// A slot that was refused, or reserved and not used, takes no identification.
#[test]
fn identifications_are_those_of_sent_datagrams() {
    let (pair, mut a, mut b) = or_skip!(pair_with(1500, &PortConfig::default()));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    let mut last = commit(&mut a, path, &[1; 64]);
    // They wrap at 128.
    for _ in 0..200 {
        assert!(a.reserve(path, 1473).is_none(), "exceeds the MTU");
        a.reserve(path, 64).expect("and is not committed");
        let id = commit(&mut a, path, &[1; 64]);
        assert_eq!(id, (last + 1) % 128);
        last = id;
        a.flush(crate::testing::no_failure);
        receive(&mut b, 1);
    }
    send_all(&mut a, path);
    assert!(a.reserve(path, 64).is_none(), "no slot");
    a.flush(crate::testing::no_failure);
    let all = receive(&mut b, 256);
    let RxIpId::Exact { id: before, .. } = all.last().expect("some").ip_id else { panic!("IPv4") };
    assert_eq!(commit(&mut a, path, &[1; 64]), (before + 1) % 128);
}

/// Commits datagrams until there is no slot, and returns their number.
fn send_all(port: &mut XdpPort, path: PathId) -> usize {
    let slots = std::iter::from_fn(|| {
        port.reserve(path, 64)?.buf.fill(3);
        port.commit();
        Some(())
    });
    slots.count()
}

/// Frames wait in the ring while the link is down, the driver checks now and then, and they leave
/// when the link is up.
#[test]
fn a_link_that_is_down_for_a_while_only_delays() {
    let config = config_with(|xdp| xdp.ring_frames = 64);
    let (pair, mut a, mut b) = or_skip!(pair_with(1500, &config));
    // Nothing reads the announcements about the link here.
    a.epoll.remove(a.paths.wait_fd()).unwrap();
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    // With and without room for more.
    for count in [1, 64] {
        drain(&mut b);
        pair.a.sh("ip link set v0 down");
        for _ in 0..count {
            commit(&mut a, path, &[3; 64]);
        }
        let (mut wakes, end) = (0, Instant::now() + Duration::from_millis(200));
        while Instant::now() < end || wakes < 2 {
            a.flush(crate::testing::no_failure);
            assert!(a.wants_write() && a.reserve(path, 64).is_some() == (count < 64));
            assert!(wait_readable(a.wait_fd(), 20_000).unwrap(), "the driver is woken");
            wakes += 1;
        }
        assert!((2..100).contains(&wakes), "{wakes} wake-ups in 200 ms");
        assert!(receive_none(&mut a) && receive_none(&mut b), "still alive");
        pair.a.sh("ip link set v0 up");
        wait_until("all are sent", || {
            assert!(wait_readable(a.wait_fd(), 20_000).unwrap(), "the driver is woken");
            a.flush(crate::testing::no_failure);
            !a.wants_write()
        });
        assert_eq!(receive(&mut b, count).len(), count);
        assert!(!wait_readable(a.wait_fd(), 20).unwrap(), "then it is quiet");
    }
}

/// Frames that wait for a link which is down keep no later ones back: these are refused, so that a
/// queue pair counts its repeats.
#[test]
fn a_path_over_a_link_that_is_down_takes_what_fails() {
    let (pair, mut a, mut b) = or_skip!(pair_with(1500, &config_with(|_| ())));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    pair.a.sh("ip link set v0 down");
    // The port has not read that, and gives the kernel a frame.
    send(&mut a, path, &[3; 64]);
    assert!(a.wants_write());
    let mut errno = None;
    wait_until("it fails", || {
        a.maintain();
        if let Some(slot) = a.reserve(path, 64) {
            slot.buf.fill(4);
            a.commit();
        }
        a.flush(|failure| errno = Some(failure.errno));
        errno.is_some()
    });
    assert_eq!(errno, Some(libc::ENETUNREACH));
}

/// The link or the peer fails while frames are in flight: each chunk comes back.
#[test]
fn every_chunk_comes_back_whatever_happens_to_the_link() {
    let config = config_with(|xdp| xdp.ring_frames = 64);
    let (pair, mut a, b) = or_skip!(pair_with(1500, &config));
    let mut b = Some(b);
    let path = direct_path(&pair.a, &mut a, b.as_mut().expect("open"), &spec(false, true));
    let toggle = "ip link set v0 down; ip link set v0 up";
    let address =
        |last| format!("ip link set v0 address 02:00:00:00:09:{last}; ip neigh flush dev v0");
    let change = |round, b: &mut Option<XdpPort>| match round % 5 {
        0 => drop(pair.a.sh(toggle)),
        1 => drop(pair.b.sh(toggle)),
        2 => drop(pair.a.sh(&address("11"))),
        3 => drop(pair.a.sh(&address("01"))),
        _ => {
            *b = None;
            *b = open_in(&pair.b, &config).ok();
        }
    };
    for round in 0..40 {
        let changed = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (b, changed, change) = (&mut b, &changed, &change);
            scope.spawn(move || {
                change(round, b);
                changed.store(true, Ordering::Release);
            });
            while !changed.load(Ordering::Acquire) {
                send_all(&mut a, path);
                a.flush(|_| ());
                a.maintain();
            }
        });
        wait_until(&format!("all chunks after change {round}"), || {
            a.flush(|_| ());
            a.maintain();
            a.io.tx.spare(&mut a.io.umem) >= 64
        });
        assert!(!a.wants_write(), "round {round}");
    }
}
