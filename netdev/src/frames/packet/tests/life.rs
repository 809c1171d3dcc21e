//! Changes of a port's interface while the port is open, and reasons for a failure to open.

use super::*;
use crate::testing::ReceiveBy as _;

#[test]
fn a_new_ethernet_address_is_followed() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let to_a = path(&pair.b, &mut b, B4, A4);
    let to_b = path(&pair.a, &mut a, A4, B4);
    pair.a.sh("ip link set v0 address 02:00:00:00:09:77");
    pair.b.sh("ip neigh replace 10.9.0.1 lladdr 02:00:00:00:09:77 dev v0");
    for port in [&mut a, &mut b] {
        port.maintain();
    }
    // The sender learns the new address with its next refresh of the neighbour.
    wait_until("frames to the new address are taken", || {
        send(&mut b, to_a.id, &[40]);
        std::thread::sleep(Duration::from_millis(50));
        b.maintain();
        !drain(&mut a).is_empty()
    });
    send(&mut a, to_b.id, &[40]);
    assert_eq!(receive(&mut b, 1).len(), 1);
}

/// Frames cause no wake-up while no thread waits for them.
#[test]
fn what_arrives_is_told_while_it_is_wished() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let to = path(&pair.a, &mut a, A4, B4);
    b.watch(false).expect("as at first");
    send(&mut a, to.id, &[40]);
    assert_eq!(receive(&mut b, 1).len(), 1, "it arrives all the same");
    send(&mut a, to.id, &[40]);
    assert!(!has_arrivals(&mut b));
    b.watch(true).expect("room for an entry");
    assert!(arrives(&mut b), "also of earlier datagrams");
    assert_eq!(receive(&mut b, 1).len(), 1);
    assert!(!has_arrivals(&mut b));
}

#[test]
fn the_end_of_the_interface_ends_the_port() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let to = path(&pair.a, &mut a, A4, B4);
    pair.b.sh("ip link del v0");
    commit(&mut a, to.id, &[64]);
    let mut failures = 0;
    a.flush(|_| failures += 1);
    assert_eq!(failures, 1);
    for port in [&mut a, &mut b] {
        while port.state.dead.is_none() {
            assert!(wait_readable(port.wait_fd(), 20_000).expect("poll"), "it is woken");
            port.maintain();
        }
        let error = port.receive_by(1, &mut |_| {}).expect_err("the interface is gone");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}

#[test]
fn an_interface_that_is_down_is_told_of_once() {
    let (pair, mut a, _b) = or_skip!(pair_with_ports());
    pair.a.sh("ip link set v0 down");
    // The kernel announces "down" and a few consequences; once the port has handled each, nothing
    // is left.
    let told = (0..100).take_while(|_| {
        let ready = wait_readable(a.wait_fd(), 1000).expect("poll");
        a.receive_by(1, &mut |_| {}).expect("it is down, and not gone");
        a.maintain();
        ready
    });
    assert!((1..100).contains(&told.count()));
}

#[test]
fn what_cannot_be_opened_says_what_to_do() {
    let pair = or_skip!(Pair::new());
    let open = |own: &str| {
        let iface = Interface::by_name("v0").expect("v0");
        PacketPort::open(&iface, &[ip(own)], &PortConfig::default())
    };
    let raw = pair.a.run(|| without_capability(CAP_NET_RAW, || open(A4)));
    let message = raw.expect_err("no CAP_NET_RAW").to_string();
    assert!(message.contains("--cap-add NET_RAW"), "{message}");
    let foreign = pair.a.run(|| open("10.9.0.9")).expect_err("not ours").to_string();
    assert!(foreign.contains("ip address show dev v0"), "{foreign}");
    let first = pair.a.run(|| once_free(|| open(A4), |e| e.errno())).expect("a port");
    let second = pair.a.run(|| open(A4)).expect_err("4791 is taken").to_string();
    assert!(second.contains("4791"), "{second}");
    drop(first);
    pair.b.sh("ip link set v0 down");
    let down = pair.a.run(|| open(A4)).expect_err("no carrier").to_string();
    assert!(down.contains("ip link set v0 up"), "{down}");
}

/// The limit applies to super-packets only.
#[test]
fn a_datagram_may_be_longer_than_a_super_packet() {
    let pair = or_skip!(Pair::new());
    pair.a.sh("ip link set v0 gso_max_size 3000 gso_max_segs 1");
    let (mut a, mut b) = ports(&pair);
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let to = path(&pair.a, &mut a, local, remote);
        for lens in [vec![4116; 3], vec![1000; 20], vec![4152]] {
            send(&mut a, to.id, &lens);
            check_payloads(&receive(&mut b, lens.len()), &lens);
        }
    }
    assert_eq!(a.stats().tx_failed, 0);
}

#[test]
fn what_was_not_answered_of_segmentation_is_asked_again_until_it_is() {
    let pair = or_skip!(Pair::new_in_calm());
    let (mut a, _b) = ports(&pair);
    let asked = |a: &mut PacketPort| {
        for _ in 0..5 {
            a.maintain();
        }
        a.io.segmentation.as_ref().expect("it makes a difference").questions
    };
    let before = asked(&mut a);
    for again in 1..4 {
        a.io.segmentation.as_mut().expect("as before").was_not_answered();
        assert_eq!(asked(&mut a), before + again, "once each");
        assert!(a.io.sender.leaves_whole, "as it was");
    }
}
