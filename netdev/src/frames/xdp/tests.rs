//! Two ports on the ends of a veth pair.

mod flow;
mod handed;
mod life;
mod shards;
mod tap;

use super::*;
use crate::kernel::bpf::Program;
use crate::kernel::bpf::asm::{Asm, Reg};
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards, XdpConfig};
use crate::port::contract::{PathSpec, Port as _, RxBudget};
use crate::port::error::OpenError;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{self, Got, Open as _, receive_for};
use crate::testing::testns::{NetNs, Pair, arrives, has_arrivals, look_after, or_skip, wait_until};
use std::time::{Duration, Instant};

/// The default configuration but for some option.
fn config_with(set: impl FnOnce(&mut XdpConfig)) -> PortConfig {
    let mut config = PortConfig::default();
    set(&mut config.xdp);
    config
}

/// Opens a port on `v0` of a namespace with all its addresses.
fn open_in(ns: &NetNs, config: &PortConfig) -> Result<XdpPort, OpenError> {
    ns.run(|| {
        let iface = Interface::by_name("v0").expect("v0");
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
        XdpPort::open(&iface, &addresses, config)
    })
}

/// The pair with another MTU, or the reason why it is not available (not root, no AF_XDP).
fn pair_with(mtu: u32, config: &PortConfig) -> Result<(Pair, XdpPort, XdpPort), String> {
    let pair = Pair::new().map_err(|e| e.to_string())?;
    for ns in [&pair.a, &pair.b] {
        ns.sh(&format!("ip link set v0 mtu {mtu}"));
    }
    let a = open_in(&pair.a, config).map_err(|e| e.to_string())?;
    let b = open_in(&pair.b, config).map_err(|e| e.to_string())?;
    Ok((pair, a, b))
}

fn spec(v6: bool, from_a: bool) -> PathSpec {
    let (a, b) = if v6 { ("fd09::1", "fd09::2") } else { ("10.9.0.1", "10.9.0.2") };
    let (local, remote) = if from_a { (a, b) } else { (b, a) };
    PathSpec { tos: 0x6a, ttl: 33, flow_label: 0x1_2345, ..sides::spec(local, remote) }
}

/// Attaches a program that is not a port's, until the result is dropped.
pub(crate) fn another_program(interface: u32) -> io::Result<impl Sized> {
    let mut asm = Asm::default();
    asm.mov_imm(Reg::R0, prog::XDP_PASS.cast_signed());
    asm.exit();
    Program::load("other", &asm.assemble())?.attach(interface)
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Receives until `want` datagrams have arrived, which must come.
fn receive(port: &mut XdpPort, want: usize) -> Vec<Got> {
    receive_for(port, want, PATIENCE)
}

/// Receives whatever is there.
fn drain(port: &mut XdpPort) {
    while !receive_for(port, 1, Duration::from_millis(200)).is_empty() {}
}

/// A payload that reveals cuts and swaps.
fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(131)) as u8)
        .collect()
}

/// Commits a datagram, without flushing; returns the promised identification.
fn commit(port: &mut XdpPort, path: PathId, payload: &[u8]) -> u16 {
    let slot = port.reserve(path, payload.len()).expect("a slot");
    slot.buf.copy_from_slice(payload);
    let ip_id = slot.ip_id;
    port.commit();
    ip_id
}

/// Commits and flushes; nothing may fail.
fn send(port: &mut XdpPort, path: PathId, payload: &[u8]) -> u16 {
    let ip_id = commit(port, path, payload);
    port.flush(crate::testing::no_failure);
    ip_id
}

/// Adds a path and waits until it leaves directly.
fn direct_path(ns: &NetNs, port: &mut XdpPort, peer: &mut XdpPort, spec: &PathSpec) -> PathId {
    let path = ns.run(|| port.add_path(spec)).unwrap();
    assert!(path.src_port >= 1024, "the guard's choice");
    let end = Instant::now() + PATIENCE;
    while !matches!(port.paths.hop(path.id), Some(Hop::Direct(_))) {
        assert!(Instant::now() < end, "the neighbour was never resolved");
        send(port, path.id, &[1; 16]);
        std::thread::sleep(Duration::from_millis(2));
        port.maintain();
        receive(peer, 1);
    }
    path.id
}

/// Every size both ways, both families: content, addresses and header fields.
fn round_trips(mtu: u32, sizes: &[usize]) -> Result<(), String> {
    let (pair, mut a, mut b) = pair_with(mtu, &PortConfig::default())?;
    assert!(!a.io.socket.zero_copy().unwrap(), "veth copies");
    for v6 in [false, true] {
        let to_b = direct_path(&pair.a, &mut a, &mut b, &spec(v6, true));
        let to_a = direct_path(&pair.b, &mut b, &mut a, &spec(v6, false));
        for &len in sizes {
            let payload = pattern(len, len as u32);
            let ip_id = send(&mut a, to_b, &payload);
            let got = receive(&mut b, 1);
            assert_eq!(got.len(), 1, "mtu {mtu} v6 {v6} len {len}");
            assert!(got[0].payload == payload, "mtu {mtu} v6 {v6} len {len}: other bytes");
            let expected = spec(v6, true);
            assert_eq!((got[0].src, got[0].dst), (expected.local, expected.remote));
            assert_eq!((got[0].src_port, got[0].tos), (0xc0de, Some(0x6a)));
            let exact = RxIpId::Exact { id: ip_id, flags: 0x4000 };
            assert_eq!(got[0].ip_id, if v6 { RxIpId::None } else { exact });

            send(&mut b, to_a, &got[0].payload);
            let back = receive(&mut a, 1);
            assert!(back.len() == 1 && back[0].payload == payload, "mtu {mtu} v6 {v6} len {len}");
        }
    }
    for port in [&a, &b] {
        let stats = port.stats();
        assert_eq!((stats.rx_queue_drops, stats.rx_malformed, stats.tx_failed), (0, 0, 0));
    }
    Ok(())
}

#[test]
fn a_cold_neighbour_is_resolved_and_nothing_is_lost() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    for v6 in [false, true] {
        let path = pair.a.run(|| a.add_path(&spec(v6, true))).unwrap().id;
        pair.a.sh("ip neigh flush dev v0");
        a.turns_to_guard(path);
        let before = a.stats().tx_unresolved;
        send(&mut a, path, &[42; 333]);
        let got = receive(&mut b, 1);
        assert_eq!(got.len(), 1, "the first datagram arrives");
        assert_eq!(got[0].payload, [42; 333]);
        assert_eq!(a.stats().tx_unresolved, before + 1);
        wait_until("it is resolved", || {
            look_after(&mut a, 5);
            matches!(a.paths.hop(path), Some(Hop::Direct(_)))
        });
        send(&mut a, path, &[43; 4112]);
        assert_eq!(receive(&mut b, 1)[0].payload, [43; 4112]);
        assert_eq!(a.stats().tx_unresolved, before + 1, "now it leaves directly");
    }
}

#[test]
fn round_trips_at_mtu_1500() {
    let sizes = [16, 17, 60, 255, 256, 1000, 1024 + 20, 1452];
    or_skip!(round_trips(1500, &sizes));
}

#[test]
fn round_trips_at_mtu_9000_across_chunks() {
    // Around the ends of the first chunk of either direction: 3840 bytes received, 4096 sent.
    let mut sizes: Vec<usize> = (3770..3805).chain(4030..4060).collect();
    sizes.extend([16, 64, 1024, 2048, 4096, 4112, 4116, 4128, 4200, 7600, 8000]);
    or_skip!(round_trips(9000, &sizes));
}

/// Frames of one, two and three chunks in turn, until every chunk has been first, middle and last.
#[test]
fn mixed_sizes_survive_many_turns_of_the_rings() {
    let config = config_with(|xdp| xdp.ring_frames = 64);
    let (pair, mut a, mut b) = or_skip!(pair_with(9000, &config));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    let mut seed = 0;
    for round in 0..400 {
        let sent: Vec<Vec<u8>> = (0..1 + round % 9)
            .map(|_| {
                seed += 1;
                pattern([64, 4112, 1024, 7900, 3800][seed as usize % 5], seed)
            })
            .collect();
        for payload in &sent {
            commit(&mut a, path, payload);
        }
        a.flush(crate::testing::no_failure);
        let got = receive(&mut b, sent.len());
        assert_eq!(got.len(), sent.len(), "round {round}");
        for (got, sent) in got.iter().zip(&sent) {
            assert!(got.payload == *sent, "round {round}: other bytes");
        }
    }
    assert_eq!(b.stats().rx_queue_drops, 0);
}

#[test]
fn what_waits_in_the_ring_is_not_overtaken_through_the_guard() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let path = direct_path(&pair.a, &mut a, &mut b, &spec(false, true));
    drain(&mut b);
    commit(&mut a, path, &[1; 64]);
    pair.a.sh("ip neigh change 10.9.0.2 dev v0 nud stale");
    wait_until("the next refresh of the neighbour", || {
        look_after(&mut a, 50);
        a.paths.hop(path).is_none()
    });
    assert!(a.reserve(path, 64).is_none() && a.wants_write(), "it would be overtaken");
    a.flush(crate::testing::no_failure);
    assert!(matches!(a.paths.hop(path), Some(Hop::Guard(_))), "the kernel is to look");
    send(&mut a, path, &[2; 64]);
    assert!(matches!(a.paths.hop(path), Some(Hop::Direct(_))) && !a.wants_write());
    send(&mut a, path, &[3; 64]);
    let got: Vec<u8> = receive(&mut b, 3).iter().map(|got| got.payload[0]).collect();
    assert_eq!(got, [1, 2, 3]);
}

#[test]
fn what_waits_on_one_path_does_not_keep_another_from_looking() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let [path, other] =
        [false, true].map(|v6| direct_path(&pair.a, &mut a, &mut b, &spec(v6, true)));
    drain(&mut b);
    commit(&mut a, other, &[1; 64]);
    pair.a.sh("ip neigh change 10.9.0.2 dev v0 nud stale");
    a.turns_to_guard(path);
    a.flush(crate::testing::no_failure);
    assert_eq!(receive(&mut b, 1).len(), 1);
}

/// Whether an XDP program is attached to `v0`.
fn attached(ns: &NetNs) -> bool {
    ns.sh("ip -details link show dev v0").contains("prog/xdp")
}

/// Waits until the program detaches. The link goes with its last descriptor, and a child that
/// another test is just forking holds copies of all of them until it executes its program.
#[track_caller]
fn detaches(ns: &NetNs) {
    wait_until("the program detaches", || !attached(ns));
}

#[test]
fn the_program_leaves_the_interface_as_it_was() {
    let test = "xdp::the_program_leaves_the_interface_as_it_was";
    let pair = or_skip!(Pair::new_in_calm());
    let state = |ns: &NetNs| {
        ns.sh("ip -details link show dev v0; ethtool -k v0 2>/dev/null || echo no ethtool")
    };
    let before = [&pair.a, &pair.b].map(state);
    let (a, b) = match [&pair.a, &pair.b].map(|ns| open_in(ns, &PortConfig::default())) {
        [Ok(a), Ok(b)] => (a, b),
        [Err(e), _] | [_, Err(e)] => return crate::testing::testns::skip(test, &e),
    };
    assert!(attached(&pair.a) && attached(&pair.b));
    drop(a);
    detaches(&pair.a);
    assert!(attached(&pair.b));
    drop(b);
    detaches(&pair.b);
    assert_eq!([&pair.a, &pair.b].map(state), before);
    tcp_works(&pair, "10.9.0.2");
}

/// Sends a megabyte through the kernel from one namespace to the other.
fn tcp_works(pair: &Pair, to: &str) {
    use std::io::{Read as _, Write as _};
    let to: IpAddr = to.parse().unwrap();
    let listener = pair.b.run(|| std::net::TcpListener::bind((to, 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let sent = pattern(1 << 20, 7);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let stream = pair.a.run(|| std::net::TcpStream::connect(address));
            stream.unwrap().write_all(&sent).unwrap();
        });
        let mut got = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut got).unwrap();
        assert!(got == sent, "TCP to {to} arrives whole");
        sending.join().unwrap();
    });
}

/// All other traffic still reaches the kernel. Frames that the program passes (here: to a socket
/// that is not on the port's address) are not answered with "port unreachable".
#[test]
fn the_kernel_keeps_its_traffic_and_the_guard_its_silence() {
    let (pair, mut a, mut b) = or_skip!(pair_with(4200, &PortConfig::default()));
    tcp_works(&pair, "10.9.0.2");
    tcp_works(&pair, "fd09::2");
    let unreachables = |ns: &NetNs| {
        let snmp = ns.sh("grep ^Icmp: /proc/thread-self/net/snmp");
        let mut lines = snmp.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let at = names.iter().position(|n| *n == "OutDestUnreachs").unwrap();
        values[at].parse::<u64>().unwrap()
    };
    assert_eq!(unreachables(&pair.b), 0);
    // The program does not take a fragmented datagram to port 4791: the kernel gets it.
    pair.a.run(|| {
        let socket = std::net::UdpSocket::bind("10.9.0.1:0").unwrap();
        socket.send_to(&[0; 9000], "10.9.0.2:4791").unwrap();
        socket.send_to(&[0; 9000], "10.9.0.2:4792").unwrap();
    });
    wait_until("it is unreachable", || unreachables(&pair.b) > 0);
    assert_eq!(unreachables(&pair.b), 1, "only for port 4792");
    assert!(receive_none(&mut b) && receive_none(&mut a));
}

fn receive_none(port: &mut XdpPort) -> bool {
    port.receive_by(64, &mut |d| panic!("{d:?}")).unwrap() == 0
}

#[test]
fn datagrams_to_the_own_address_come_back() {
    let (pair, mut a, _b) = or_skip!(pair_with(4200, &PortConfig::default()));
    for v6 in [false, true] {
        let spec = PathSpec { remote: spec(v6, true).local, ..spec(v6, true) };
        let path = pair.a.run(|| a.add_path(&spec)).unwrap();
        assert_eq!(commit(&mut a, path.id, &pattern(4112, 5)), 0);
        commit(&mut a, path.id, &[6; 20]);
        assert!(!has_arrivals(&mut a), "not flushed");
        a.flush(crate::testing::no_failure);
        assert!(arrives(&mut a));
        let got = receive(&mut a, 2);
        // It came over loopback, by the guard.
        let ip_id = if v6 { RxIpId::None } else { RxIpId::Hint(0) };
        let first = Got {
            payload: pattern(4112, 5),
            src: spec.local,
            dst: spec.local,
            src_port: path.src_port,
            ip_id,
            tos: Some(0x6a),
        };
        assert_eq!((&got[0], &got[1].payload[..]), (&first, &[6; 20][..]));
        assert!(receive_none(&mut a));
    }
    let stats = a.stats();
    assert_eq!((stats.tx_datagrams, stats.rx_datagrams), (4, 4));
    assert_eq!((stats.tx_bytes, stats.rx_bytes), (2 * (4112 + 20), 2 * (4112 + 20)));
}

#[test]
fn errors_say_what_to_do() {
    let (pair, a, _b) = or_skip!(pair_with(4200, &PortConfig::default()));
    let second = open_in(&pair.a, &PortConfig::default()).expect_err("refused").to_string();
    assert!(second.contains("4791") || second.contains("AF_XDP"), "{second}");
    pair.a.run(|| {
        let lo = Interface::by_name("lo").unwrap();
        let error = XdpPort::open(&lo, &["127.0.0.1".parse().unwrap()], &PortConfig::default());
        assert!(error.expect_err("refused").to_string().contains("--netdev udp"));
    });
    let config = config_with(|xdp| xdp.queue = 3);
    drop(a);
    let error = open_in(&pair.a, &config).expect_err("refused").to_string();
    assert!(error.contains("no receive queue 3"), "{error}");
    let config = config_with(|xdp| xdp.queue = u32::MAX);
    let error = open_in(&pair.a, &config).expect_err("refused").to_string();
    assert!(error.contains("no receive queue 4294967295"), "{error}");
    let several = pair.a.run(|| {
        let iface = Interface::by_name("v0").expect("v0");
        let addresses = ["10.9.0.1".parse().unwrap()];
        XdpPort::open_shards(
            &iface,
            &addresses,
            &PortConfig::default(),
            Shards { shared: false, first: 0, count: 2, selector: 5 },
        )
    });
    let error = several.expect_err("refused").to_string();
    assert!(
        error.contains("no receive queue 1") && error.contains("ethtool -L v0 rx 2"),
        "{error}"
    );
}

#[test]
fn generic_mode_is_never_used() {
    let (pair, _a, _b) = or_skip!(pair_with(4200, &PortConfig::default()));
    pair.a.sh(
        "ip link add name d0 type bridge; ip address add 10.7.0.1/24 dev d0; ip link set d0 up",
    );
    // A bridge has no native XDP.
    let error = pair.a.run(|| {
        let iface = Interface::by_name("d0").unwrap();
        XdpPort::open(&iface, &["10.7.0.1".parse().unwrap()], &PortConfig::default())
    });
    let text = error.expect_err("refused").to_string();
    assert!(text.contains("no native XDP") && text.contains("--netdev packet"), "{text}");
    assert!(!pair.a.sh("ip link show dev d0").contains("xdp"));
}
