//! Multicast groups on every backend, between two namespaces.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::kernel::descriptors;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{self, ip, on_each, open, sides, spec};
use crate::testing::testns::{NetNs, arrives, has_arrivals, or_skip, wait_until};
use crate::udp::sys::Socket;
use crate::{AnyPort, Backend, PathSpec, Port, RxDatagram};

const PATIENCE: Duration = Duration::from_secs(20);

const GROUPS: [(&str, &str, &str); 2] =
    [("10.9.0.1", "10.9.0.2", "239.9.2.3"), ("fd09::1", "fd09::2", "ff15::9:77")];

fn join(ns: &NetNs, port: &mut AnyPort, group: &str) -> io::Result<()> {
    ns.run(|| port.join(ip(group)))
}

/// Sends datagrams of these lengths; each starts with its number.
fn send(ns: &NetNs, port: &mut AnyPort, (local, remote): (&str, &str), lens: &[usize]) {
    let spec = PathSpec { ttl: 33, ..spec(local, remote) };
    let path = ns.run(|| port.add_path(&spec)).expect("a path").id;
    for (number, len) in lens.iter().enumerate() {
        let slot = port.reserve(path, *len).expect("room");
        slot.buf.fill(7);
        slot.buf[0] = number as u8;
        port.commit();
    }
    port.flush(crate::testing::no_failure);
    port.remove_path(path);
}

/// A received datagram: number, length, source and destination.
type Received = (u8, usize, IpAddr, IpAddr);

/// Receives until `want` datagrams have arrived. That takes a while if a neighbour must be resolved
/// on an interface that has just come up.
fn receive(port: &mut AnyPort, want: usize) -> Vec<Received> {
    receive_for(port, want, PATIENCE)
}

/// Asserts that nothing arrives.
fn assert_quiet(port: &mut AnyPort, why: &str) {
    assert_eq!(receive_for(port, 1, Duration::from_millis(200)), [], "{why}");
}

fn receive_for(port: &mut AnyPort, want: usize, patience: Duration) -> Vec<Received> {
    let got = sides::receive_for(port, want, patience);
    assert!(!port.wants_write(), "nothing waits for room");
    got.into_iter().map(|d| (d.payload[0], d.payload.len(), d.src, d.dst)).collect()
}

/// All members receive, the sender included; others do not, and neither do those that have left.
fn members_receive(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    for (from, _, group) in GROUPS {
        let lens = [64, 4116, 4116, 4116, 900];
        let all: Vec<_> =
            (0..).zip(lens).map(|(number, len)| (number, len, ip(from), ip(group))).collect();
        send(&pair.a, &mut a, (from, group), &lens);
        assert_quiet(&mut b, "no port has joined");
        join(&pair.b, &mut b, group).expect("b joins");
        join(&pair.b, &mut b, group).expect("again");
        send(&pair.a, &mut a, (from, group), &lens);
        assert_eq!(receive(&mut b, 5), all);
        assert_quiet(&mut a, "the sender has not joined");
        join(&pair.a, &mut a, group).expect("a joins");
        send(&pair.a, &mut a, (from, group), &lens);
        assert_eq!((receive(&mut a, 5), receive(&mut b, 5)), (all.clone(), all));
        assert_quiet(&mut b, "one copy of each");
        b.leave(ip(group));
        b.leave(ip(group));
        send(&pair.a, &mut a, (from, group), &lens[..1]);
        assert_eq!(receive(&mut a, 1).len(), 1);
        assert_quiet(&mut b, "b has left");
    }
    let stats = b.stats();
    assert_eq!((stats.rx_datagrams, stats.rx_bytes), (20, 4 * (64 + 3 * 4116 + 900)));
    Ok(())
}

/// Datagrams to an own address, to groups, and to another group: each carries its destination.
fn destinations_are_told(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    for (from, to, group) in GROUPS {
        let other = if from.contains(':') { "ff15::9:78" } else { "239.9.2.4" };
        join(&pair.b, &mut b, group).expect("b joins");
        join(&pair.b, &mut b, other).expect("b joins the other");
        for destination in [to, group, other] {
            send(&pair.a, &mut a, (from, destination), &[100]);
            assert_eq!(receive(&mut b, 1), [(0, 100, ip(from), ip(destination))]);
        }
    }
    Ok(())
}

/// The scopes of RFC 4291, 2.7. Members on the sender's machine receive datagrams that stay there,
/// but for scope 0. A group at one interface is not that at another, even if a program joined both.
fn scopes_are_kept(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    pair.a.sh("ip link add w0 type veth peer name w1; ip link set w0 up; ip link set w1 up
               ip address add fd08::1/64 dev w0 nodad");
    let from = GROUPS[1].0;
    let w0 = pair.a.run(|| crate::Interface::by_name("w0").expect("it is there").index);
    let mut elsewhere = Vec::new();
    for (group, is_received, leaves) in [
        ("ff00::9:79", false, false),
        ("ff01::9:79", true, false),
        ("ff11::9:79", true, false),
        ("ff02::9:79", true, true),
        ("ff05::9:79", true, true),
        ("ff1e::9:79", true, true),
    ] {
        join(&pair.a, &mut a, group).expect("a joins");
        join(&pair.b, &mut b, group).expect("b joins");
        send(&pair.a, &mut a, (from, group), &[64]);
        let all = [(0, 64, ip(from), ip(group))];
        for (port, receives) in [(&mut a, is_received), (&mut b, leaves)] {
            match receives {
                true => assert_eq!(receive(port, 1), all, "{group}"),
                false => assert_quiet(port, group),
            }
        }
        elsewhere.push(pair.a.run(|| {
            let socket = std::net::UdpSocket::bind("[fd08::1]:0").expect("a socket");
            let copy = Socket::from(OwnedFd::from(socket.try_clone().expect("a descriptor")));
            copy.bind_to_interface(w0).expect("any program may");
            let IpAddr::V6(group) = ip(group) else { unreachable!("they are of IPv6") };
            socket.join_multicast_v6(&group, w0).expect("it joins");
            let to = std::net::SocketAddrV6::new(group, 4791, 0, w0);
            socket.send_to(b"x", to).expect("sent at w0");
            socket
        }));
    }
    assert_quiet(&mut a, "at another interface");
    Ok(())
}

/// One group with much to read leaves the others their turns.
fn groups_take_turns(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    let groups = ["239.9.4.1", "239.9.4.2", "239.9.4.3"];
    for group in groups {
        join(&pair.b, &mut b, group).expect("b joins");
    }
    for group in groups {
        send(&pair.a, &mut a, ("10.9.0.1", group), &[64, 65, 66, 67]);
    }
    // Each group's have come before the first is read.
    let waiting = || {
        let all = pair.b.run(|| crate::udp::holder::sockets(4791));
        all.iter().filter(|socket| socket.queued_bytes > 0).count()
    };
    wait_until("all groups have something", || waiting() == groups.len());
    let (mut turns, mut first) = (Vec::new(), Vec::new());
    let end = Instant::now() + PATIENCE;
    while turns.len() < 12 && Instant::now() < end {
        descriptors::wait_readable(b.wait_fd(), 20).expect("poll");
        let mut round = Vec::new();
        b.receive_by(1, &mut |d| round.push(d.dst)).expect("alive");
        first.extend(round.first().copied());
        turns.extend(round);
    }
    assert_eq!(turns.len(), 12, "all come");
    let each: std::collections::BTreeSet<IpAddr> = first.iter().take(3).copied().collect();
    assert_eq!(each.len(), groups.len(), "each has had its turn: {first:?}");
    Ok(())
}

on_each! { "groups":
    groups_take_turns: udp Udp;
    members_receive: udp Udp, packet Packet, afxdp Xdp;
    destinations_are_told: udp Udp, packet Packet, afxdp Xdp;
    scopes_are_kept: udp Udp, packet Packet, afxdp Xdp;
}

/// Several ports of one machine all receive, with any backends; but not datagrams to the group at
/// another interface.
#[test]
fn all_members_on_one_machine_receive() {
    let (pair, mut a, mut b) = or_skip!(sides(Backend::Packet));
    pair.b.sh("ip address add 10.9.0.12/24 dev v0; ip link add w0 type veth peer name w1
               ip link set w0 up; ip link set w1 up; ip address add 10.8.0.1/24 dev w0");
    let mut other = or_skip!(open(&pair.b, Backend::Udp, &["10.9.0.12"]));
    let (from, to, group) = GROUPS[0];
    join(&pair.b, &mut b, group).expect("b joins");
    join(&pair.b, &mut other, group).expect("the other joins");
    send(&pair.a, &mut a, (from, group), &[50, 60]);
    assert_eq!((receive(&mut b, 2).len(), receive(&mut other, 2).len()), (2, 2));
    // Also among themselves.
    send(&pair.b, &mut b, (to, group), &[70]);
    assert_eq!((receive(&mut b, 1).len(), receive(&mut other, 1).len()), (1, 1));
    send(&pair.b, &mut other, ("10.9.0.12", group), &[70]);
    assert_eq!((receive(&mut b, 1).len(), receive(&mut other, 1).len()), (1, 1));
    pair.b.run(|| {
        let elsewhere = std::net::UdpSocket::bind("10.8.0.1:0").expect("a socket");
        elsewhere.send_to(b"x", (ip(group), 4791)).expect("sent at w0");
    });
    assert_quiet(&mut other, "at another interface");
}

/// Groups are left and joined again, between small budgets: each datagram is received once, and
/// afterwards nothing is ready.
fn groups_come_and_go(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    let all: Vec<String> = (1..=5).map(|n| format!("239.9.7.{n}")).collect();
    for group in &all {
        join(&pair.b, &mut b, group).expect("b joins");
    }
    let budgeted = |b: &mut AnyPort, budget: usize| {
        let mut heard = Vec::new();
        let end = Instant::now() + PATIENCE;
        while heard.is_empty() && Instant::now() < end {
            descriptors::wait_readable(b.wait_fd(), 20).expect("poll");
            b.receive_by(budget, &mut |d: RxDatagram<'_>| heard.push(d.dst)).expect("alive");
            b.maintain();
        }
        heard
    };
    for (round, left) in [4, 0, 2, 1, 3].into_iter().enumerate() {
        // One datagram to each, received one at a time from the next socket in turn.
        all.iter().for_each(|group| send(&pair.a, &mut a, ("10.9.0.1", group), &[40]));
        assert!(arrives(&mut b), "round {round}: a sender waits for that");
        let mut heard: Vec<IpAddr> = (0..3).flat_map(|_| budgeted(&mut b, 1)).collect();
        // Now fewer groups follow the next one, or it is gone itself.
        b.leave(ip(&all[left]));
        let mut want: Vec<IpAddr> = all.iter().map(|group| ip(group)).collect();
        let is_lost = !heard.contains(&want[left]);
        if is_lost {
            want.remove(left);
        }
        while heard.len() < want.len() {
            let more = budgeted(&mut b, 1);
            assert!(!more.is_empty(), "round {round}: {heard:?} of {want:?}");
            heard.extend(more);
        }
        heard.sort_unstable();
        assert_eq!(heard, want, "round {round}");
        assert_quiet(&mut b, "each once");
        assert!(!has_arrivals(&mut b), "round {round}: nothing is ready");
        send(&pair.a, &mut a, ("10.9.0.1", &all[left]), &[40]);
        assert_quiet(&mut b, "it has left");
        join(&pair.b, &mut b, &all[left]).expect("b joins again");
        send(&pair.a, &mut a, ("10.9.0.1", &all[left]), &[40]);
        assert_eq!(budgeted(&mut b, 9), [ip(&all[left])]);
    }
    // Leaves all groups but one while the last is next.
    all.iter().for_each(|group| send(&pair.a, &mut a, ("10.9.0.1", group), &[40]));
    (0..4).for_each(|_| assert_eq!(budgeted(&mut b, 1).len(), 1));
    all[1..].iter().for_each(|group| b.leave(ip(group)));
    send(&pair.a, &mut a, ("10.9.0.1", &all[0]), &[40]);
    assert_eq!(budgeted(&mut b, 9).last(), Some(&ip(&all[0])));
    Ok(())
}

on_each! { "groups":
    groups_come_and_go: udp Udp, packet Packet, afxdp Xdp;
}

#[test]
fn what_cannot_be_joined_is_refused() {
    let (pair, _, mut b) = or_skip!(sides(Backend::Udp));
    for no_group in ["10.9.0.2", "255.255.255.255", "fd09::2", "::"] {
        join(&pair.b, &mut b, no_group).expect_err(no_group);
    }
    for n in 0..256 {
        join(&pair.b, &mut b, &format!("239.9.1.{n}")).expect("within the limit");
    }
    let error = join(&pair.b, &mut b, "239.9.2.0").expect_err("one too many");
    assert!(error.to_string().contains("256 groups at most"), "{error}");
    b.leave(ip("239.9.1.7"));
    join(&pair.b, &mut b, "239.9.2.0").expect("there is room again");
    drop(b);
    // A program that does not share the port. Between fork and exec, other tests' children hold
    // copies of closed sockets.
    let bind = || std::net::UdpSocket::bind("239.9.2.0:4791");
    let bind = || descriptors::patiently(libc::EADDRINUSE, PATIENCE, bind);
    let taken = pair.b.run(bind).expect("a socket");
    let mut b = open(&pair.b, Backend::Udp, &["10.9.0.2"]).expect("a port");
    let error = join(&pair.b, &mut b, "239.9.2.0").expect_err("taken");
    assert!(error.to_string().contains("without sharing"), "{error}");
    drop(taken);
}
