//! A path and a path of the guard with the same number, a removed path, and a port that is blocked
//! and temporarily not watched.

use super::*;

/// The guard's id of a path that leaves through it.
fn at_guard(port: &mut PacketPort, path: PathId) -> PathId {
    let Some(Hop::Guard(id)) = port.paths.hop(path) else { panic!("it leaves directly") };
    id
}

#[test]
fn a_failure_at_the_guard_is_told_of_the_path_that_it_is_of() {
    let (pair, mut a, _b) = or_skip!(pair_with_ports());
    // While a datagram of a removed path waits, the guard's number of it is not free.
    let gone = path(&pair.a, &mut a, A4, A4).id;
    commit(&mut a, gone, &[64]);
    a.remove_path(gone);
    let dead = path(&pair.a, &mut a, A4, "10.9.0.77").id;
    assert_ne!(at_guard(&mut a, dead), dead);
    pair.a.sh("ip link set v0 down");
    commit(&mut a, dead, &[64]);
    let mut failures = Vec::new();
    a.flush(|failure| failures.push(failure));
    let [failure] = failures[..] else { panic!("{failures:?}") };
    assert_eq!((failure.path, failure.datagrams, failure.errno), (dead, 1, libc::ENETUNREACH));
}

#[test]
fn a_path_that_goes_takes_its_path_at_the_guard_with_it() {
    let (pair, mut a, _b) = or_skip!(pair_with_ports());
    let dead = path(&pair.a, &mut a, A4, "10.9.0.77").id;
    let id = at_guard(&mut a, dead);
    assert!(a.guard.reserve(id, 8).is_some());
    a.remove_path(dead);
    assert!(a.guard.reserve(id, 8).is_none());
}

#[test]
fn a_failure_of_a_path_that_is_gone_is_of_no_other() {
    let (pair, mut a, _b) = or_skip!(pair_with_ports());
    let [gone, stays] = [(A4, B4), (A6, B6)].map(|(from, to)| path(&pair.a, &mut a, from, to).id);
    [gone, stays].into_iter().for_each(|path| drop(commit(&mut a, path, &[64; 3])));
    a.remove_path(gone);
    assert_eq!(path(&pair.a, &mut a, A4, A4).id, gone, "the id is used again");
    pair.b.sh("ip link del v0");
    let mut failures = Vec::new();
    a.flush(|failure| failures.push((failure.path, failure.datagrams)));
    assert_eq!(failures, [(stays, 3)]);
    assert_eq!(a.stats().tx_failed, 6);
}

#[test]
fn a_blocked_port_is_woken_when_it_can_write_though_it_was_not_watched_for_a_while() {
    let pair = or_skip!(needs(&["tc"]).and_then(|()| Pair::new_in_calm()));
    pair.a.sh("tc qdisc add dev v0 root tbf rate 40mbit burst 70000 limit 16mb");
    let (a, _b) = ports(&pair);
    drop(a);
    let config =
        PortConfig { tx_buffer_bytes: 200_000, force_buffers: false, ..PortConfig::default() };
    let mut a = open_on(&pair.a, "v0", &[A4], &config);
    let to = path(&pair.a, &mut a, A4, B4).id;
    while !a.wants_write() {
        commit(&mut a, to, &[4116; 15]);
        a.flush(crate::testing::no_failure);
    }
    a.watch(false).expect("it is watched at first");
    a.watch(true).expect("room for an entry");
    assert!(arrives(&mut a), "no thread is woken");
    a.flush(crate::testing::no_failure);
}
