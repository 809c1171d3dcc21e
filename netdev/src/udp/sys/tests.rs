use super::*;

/// Parses these words as control messages of `len` bytes; returns segment and TOS.
fn read(words: &[u64], len: usize) -> (Option<usize>, Option<u8>) {
    let mut control = Control([0; CONTROL_BYTES / 8]);
    control.0[..words.len()].copy_from_slice(words);
    let mut received = Received {
        payload: &[],
        src: IpAddr::from([0; 4]),
        src_port: 0,
        segment: None,
        tos: None,
        truncated: false,
    };
    control.parse(len, &mut received);
    (received.segment, received.tos)
}

/// A header's size, and its level and type in one word.
fn header(size: u64, level: i32, kind: i32) -> [u64; 2] {
    let halves = [level, kind].map(|half| u64::from(half.cast_unsigned()));
    let word = halves[0] | halves[1] << 32;
    [size, word]
}

fn int(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

#[test]
fn control_messages_are_read_as_they_are_written() {
    let mut control = Control([0; CONTROL_BYTES / 8]);
    let name = SockAddr::new(&"[fd09::1]:4791".parse().unwrap());
    let by = Some((0x0102_0304, "fd09::2".parse().unwrap()));
    let dest = Dest { name, tos: Some(0x6a), ttl: Some(u8::MAX) };
    let len = control.fill(&Message { payload: &[], dest: &dest, by, segment: u16::MAX });
    assert_eq!(len, 3 * 24 + 40, "all that a datagram may have");
    assert_eq!(len, CONTROL_BYTES);
    let words = control.0;
    assert_eq!(words[..2], header(18, libc::SOL_UDP, libc::UDP_SEGMENT));
    assert_eq!(words[2], u64::from(u16::MAX));
    assert_eq!(words[3..5], header(20, libc::IPPROTO_IPV6, libc::IPV6_TCLASS));
    assert_eq!(words[6..8], header(20, libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT));
    assert_eq!(words[8], 255);
    assert_eq!(words[9..11], header(36, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO));
    assert_eq!(words[11..], [0, 0, 0x0102_0304], "no source but the socket's");
    assert_eq!(read(&words, len), (None, Some(0x6a)));
}

#[test]
fn sizes_that_make_no_sense_end_the_control_messages() {
    let [gro, tos] = [(libc::SOL_UDP, libc::UDP_GRO), (libc::IPPROTO_IP, libc::IP_TOS)];
    for size in [0, 1, 15, 16, 20, 24] {
        // A message occupies at least its header: the second begins behind the first's data, or
        // where that would be.
        let second = if size > 16 { 3 } else { 2 };
        let mut words = [0; 8];
        words[..2].copy_from_slice(&header(size, gro.0, gro.1));
        words[2] = int(77);
        words[second..second + 2].copy_from_slice(&header(20, tos.0, tos.1));
        words[second + 2] = 9;
        let (segment, read_tos) = read(&words, 64);
        assert_eq!(read_tos, Some(9), "{size}");
        assert!(segment.is_some(), "{size}");
    }
    for size in [48, 96, 97, 1 << 32, u64::MAX - 7, u64::MAX] {
        let mut words = [0; 6];
        words[..2].copy_from_slice(&header(size, gro.0, gro.1));
        words[2] = int(77);
        words[3..5].copy_from_slice(&header(20, tos.0, tos.1));
        words[5] = 9;
        assert_eq!(read(&words, 48), (Some(77), None), "{size}");
    }
}

#[test]
fn lengths_that_make_no_sense_are_not_read_beyond() {
    let mut words = [0; 12];
    for at in (0..12).step_by(3) {
        words[at..at + 2].copy_from_slice(&header(20, libc::SOL_UDP, libc::UDP_GRO));
        words[at + 2] = int(at as i32 + 1);
    }
    for (len, segment) in [
        (0, None),
        (7, None),
        (16, None),
        (23, None),
        (24, Some(1)),
        (48, Some(4)),
        (95, Some(7)),
        (96, Some(10)),
        (97, Some(10)),
        (usize::MAX, Some(10)),
    ] {
        assert_eq!(read(&words, len).0, segment, "{len} bytes");
    }
}

#[test]
fn values_are_read_at_their_least_and_greatest() {
    for (value, segment) in [
        (0, Some(0)),
        (1, Some(1)),
        (i32::MAX, Some(i32::MAX as usize)),
        (-1, None),
        (i32::MIN, None),
    ] {
        let [size, kind] = header(20, libc::SOL_UDP, libc::UDP_GRO);
        assert_eq!(read(&[size, kind, int(value)], 24).0, segment, "{value}");
    }
    for (value, tos) in [(0, 0), (255, 255), (-1, 255), (i32::MAX, 255), (i32::MIN, 0)] {
        for (level, kind) in
            [(libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)]
        {
            let [size, kind] = header(20, level, kind);
            assert_eq!(read(&[size, kind, int(value)], 24).1, Some(tos), "{value}");
        }
    }
}

/// In a VRF a guard tells its interface's frames by their Ethernet address.
#[test]
fn a_guard_in_a_vrf_drops_the_frames_of_its_interface_alone() {
    use crate::kernel::descriptors::wait_readable;
    use crate::testing::testns::{Pair, or_skip};
    let pair = or_skip!("sys::a_guard_in_a_vrf", Pair::new());
    let own = [2, 0, 0, 0, 9, 1];
    for address in ["10.9.0.1:4791", "[fd09::1]:4791"] {
        let to: SocketAddr = address.parse().unwrap();
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        for (mac, takes_peers) in [(own, false), ([2, 0, 0, 0, 9, 9], true), ([6; 6], true)] {
            let guard = pair.a.run(|| {
                let guard = Socket::new(to.is_ipv6()).unwrap();
                guard.take_other_input(0, Some(mac), Shards::ONE).unwrap();
                guard.bind(&to).map(|()| guard).unwrap()
            });
            let send = || std::net::UdpSocket::bind(any).unwrap().send_to(&[1; 40], to).unwrap();
            let arrives = || {
                wait_readable(&guard, 0).unwrap() && {
                    guard.empty();
                    true
                }
            };
            // The neighbour may have to be asked for first.
            pair.b.run(send);
            let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while takes_peers && !wait_readable(&guard, 20).unwrap() {
                assert!(std::time::Instant::now() < end, "from the peer to {to}");
                pair.b.run(send);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(arrives(), takes_peers, "from the peer to {to}, with {mac:?}");
            // A frame to all belongs to the interface, too.
            let neighbour = format!("ip neighbour replace {} dev v0 nud permanent", to.ip());
            pair.b.sh(&format!("{neighbour} lladdr ff:ff:ff:ff:ff:ff"));
            guard.empty();
            pair.b.run(send);
            pair.b.sh(&format!("{neighbour} lladdr 02:00:00:00:09:01"));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!arrives(), "to all from the peer to {to}");
            pair.a.run(send);
            assert!(wait_readable(&guard, 20_000).unwrap(), "from this machine to {to}");
        }
    }
}
