use std::net::UdpSocket;

use super::*;
use crate::ROCE_PORT;
use crate::kernel::descriptors;
use crate::port::config::UdpConfig;
use crate::port::contract::RxIpId;
use crate::testing::ReceiveBy as _;
use crate::testing::loopback;
use crate::testing::sides::{Got, Open as _, lo, receive_for};
use crate::testing::testns::{Pair, forget_option, or_skip};

/// The default configuration but for the receive buffer.
fn small_buffer(bytes: u32) -> PortConfig {
    let udp = UdpConfig { rx_buffer_bytes: bytes, ..UdpConfig::default() };
    PortConfig { udp, force_buffers: false, ..PortConfig::default() }
}

fn open_guard(iface: &Interface, own: IpAddr) -> UdpPort {
    open_guard_with(iface, own, PortConfig::default())
}

fn open_guard_with(iface: &Interface, own: IpAddr, config: PortConfig) -> UdpPort {
    let own = [own];
    let guards = acquire_guards(Backend::Packet, iface, &own, &config, Shards::ONE, None).unwrap();
    let manifest = Manifest {
        interface: iface.clone(),
        addresses: own.to_vec(),
        config,
        udp_segments_max: guards.segments_max,
        backend: BackendParts::Udp,
    };
    let sockets = Fds::new(guards.sockets.into_iter().flatten().collect());
    UdpPort::assemble_guard(&manifest, sockets).unwrap()
}

fn open(address: IpAddr) -> UdpPort {
    UdpPort::open(&lo(), &[address], &PortConfig::default()).unwrap()
}

fn spec(local: IpAddr, remote: IpAddr) -> PathSpec {
    PathSpec { local, remote, src_port: 0xC123, tos: 0, ttl: 64, flow_label: 0 }
}

/// Stages datagrams of these sizes, filled with their number; returns the identifications.
fn stage(port: &mut UdpPort, path: PathId, sizes: &[usize]) -> Vec<u16> {
    let stage = |(i, &len)| {
        let slot = port.reserve(path, len).expect("room");
        slot.buf.fill(i as u8);
        let id = slot.ip_id;
        port.commit();
        id
    };
    sizes.iter().enumerate().map(stage).collect()
}

/// Sends such datagrams.
fn send(port: &mut UdpPort, path: PathId, sizes: &[usize]) -> Vec<u16> {
    let ids = stage(port, path, sizes);
    port.flush(crate::testing::no_failure);
    assert!(!port.wants_write());
    ids
}

/// Receives until `count` datagrams have come.
fn receive(port: &mut UdpPort, count: usize) -> Vec<Got> {
    let got = receive_for(port, count, Duration::from_secs(20));
    assert!(got.len() >= count, "{} of {count}", got.len());
    got
}

#[test]
fn a_run_arrives_whole_with_the_identifications_of_its_segments() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let path = tx.add_path(&spec(a, b)).unwrap();
    let sizes = [4120, 4120, 4120, 4120, 100];
    assert_eq!(send(&mut tx, path.id, &sizes), [0, 1, 2, 3, 4]);
    for (i, got) in receive(&mut rx, sizes.len()).into_iter().enumerate() {
        assert_eq!(got.payload, vec![i as u8; sizes[i]]);
        assert_eq!((got.src, got.dst, got.src_port), (a, b, path.src_port));
        assert_eq!(got.ip_id, RxIpId::Hint(i as u16));
        assert_eq!(got.tos, Some(0));
    }
    assert_eq!((tx.stats().tx_runs, tx.stats().tx_datagrams), (1, 5));
    assert_eq!((rx.stats().rx_runs, rx.stats().rx_datagrams), (1, 5));
    assert_eq!(rx.stats().rx_bytes, 4 * 4120 + 100);
    assert_eq!(rx.receive_by(64, &mut |_| panic!("nothing was sent")).unwrap(), 0);
}

#[test]
fn mixed_sizes_and_paths_leave_with_one_flush_in_order() {
    let (a, b, c) = (loopback(), loopback(), loopback());
    let (mut tx, mut rx_b, mut rx_c) = (open(a), open(b), open(c));
    let to_b = tx.add_path(&spec(a, b)).unwrap().id;
    let to_c = tx.add_path(&spec(a, c)).unwrap().id;
    let script =
        [(to_b, 80), (to_b, 80), (to_c, 80), (to_b, 1040), (to_b, 24), (to_b, 24), (to_c, 0)];
    let mut ids = Vec::new();
    for (path, len) in script {
        let slot = tx.reserve(path, len).unwrap();
        slot.buf.fill(len as u8);
        ids.push(slot.ip_id);
        tx.commit();
    }
    tx.flush(crate::testing::no_failure);
    assert_eq!(ids, [0, 1, 0, 0, 1, 0, 0]);
    let lens = |got: Vec<Got>| got.iter().map(|g| g.payload.len()).collect::<Vec<_>>();
    assert_eq!(lens(receive(&mut rx_b, 5)), [80, 80, 1040, 24, 24]);
    assert_eq!(lens(receive(&mut rx_c, 2)), [80, 0]);
    assert_eq!(tx.stats().tx_runs, 5);
}

#[test]
fn more_than_one_run_per_flush_and_more_than_one_burst_per_receive() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let path = tx.add_path(&spec(a, b)).unwrap().id;
    let mut sent = 0_u32;
    for _ in 0..3 {
        while let Some(slot) = tx.reserve(path, 4120) {
            slot.buf[..4].copy_from_slice(&sent.to_be_bytes());
            tx.commit();
            sent += 1;
        }
        tx.flush(crate::testing::no_failure);
        assert!(!tx.wants_write());
    }
    assert!(sent >= 180, "{sent}");
    for (i, got) in receive(&mut rx, sent as usize).into_iter().enumerate() {
        assert_eq!(got.payload[..4], (i as u32).to_be_bytes());
    }
    assert_eq!(rx.stats().rx_queue_drops, 0);
}

/// As the next process on a slot of a shared address opens its port: the kernel has counted what
/// the socket dropped before, and goes on.
#[test]
fn a_port_counts_no_drops_from_before_it_was_there() {
    let (own, peer) = (loopback(), loopback());
    let config = small_buffer(20_000);
    let socket = open_shared(&lo(), own, &config, true).unwrap();
    let mut tx = open(peer);
    let path = tx.add_path(&spec(peer, own)).unwrap().id;
    send(&mut tx, path, &[100; 10]);
    let begun = Instant::now();
    while socket.input_drops() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no process takes them");
    }
    let shared = Some(vec![vec![socket.into()]]);
    let mut parts = UdpPort::acquire(&lo(), &[own], &config, Shards::ONE, shared).unwrap();
    let mut rx = UdpPort::assemble(parts.remove(0)).unwrap();
    assert_eq!(rx.stats().rx_queue_drops, 0);
    (0..50).for_each(|_| drop(send(&mut tx, path, &[4120])));
    let mut received = 0;
    while rx.receive_by(64, &mut |_| received += 1).unwrap() > 0 {}
    assert!(received < 50, "{received}");
    assert_eq!(rx.stats().rx_queue_drops, 50 - received);
}

/// As under QEMU's emulation of Linux for programs of other processors.
#[test]
fn a_kernel_that_sends_no_flow_labels_sends_all_else() {
    let own = UdpSocket::bind("[::1]:0").map_err(|e| e.raw_os_error());
    if let Err(Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)) = own {
        eprintln!("SKIPPED a_kernel_that_sends_no_flow_labels_sends_all_else: no ::1");
        return;
    }
    let sent = std::thread::spawn(move || {
        let open = |option| {
            forget_option(libc::IPPROTO_IPV6, option);
            let home = sockets::Home::of(&Socket::new(true)?);
            let options = sockets::Options::new(&PortConfig::default(), None);
            let own = "::1".parse().unwrap();
            sockets::open_sender(&lo(), home, own, 0xC321, false, options)
        };
        assert!(open(libc::IPV6_FLOWINFO_SEND)?.is_some(), "a socket");
        // Without this one, datagrams could be fragmented.
        let error = open(libc::IPV6_MTU_DISCOVER).err().and_then(|e| e.raw_os_error());
        assert_eq!(error, Some(libc::ENOPROTOOPT));
        io::Result::Ok(())
    });
    sent.join().unwrap().unwrap();
}

#[test]
fn ipv6_has_no_identification_and_carries_the_traffic_class() {
    let localhost = IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
    // There is only one ::1: wait until other processes' tests release it.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    let mut port = loop {
        match UdpPort::open(&lo(), &[localhost], &PortConfig::default()) {
            Ok(port) => break port,
            Err(e) if e.errno() == libc::EADDRINUSE && std::time::Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) if e.errno() == libc::EADDRNOTAVAIL || e.errno() == libc::EAFNOSUPPORT => {
                eprintln!("SKIPPED ipv6_has_no_identification_and_carries_the_traffic_class: {e}");
                return;
            }
            Err(e) => panic!("{e}"),
        }
    };
    let wanted = PathSpec { tos: 0x6A, ttl: 3, flow_label: 0x12345, ..spec(localhost, localhost) };
    let path = port.add_path(&wanted).unwrap();
    assert_eq!(send(&mut port, path.id, &[300, 300, 300, 20]), [0, 0, 0, 0]);
    let got = receive(&mut port, 4);
    assert_eq!(got.iter().map(|g| g.payload.len()).collect::<Vec<_>>(), [300, 300, 300, 20]);
    for got in got {
        assert_eq!((got.src, got.dst), (localhost, localhost));
        assert_eq!((got.ip_id, got.tos), (RxIpId::None, Some(0x6A)));
        assert_eq!(got.src_port, path.src_port);
    }
}

#[test]
fn tos_is_per_path_and_arrives() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    for tos in [0, 2, 0x68, 0xFF] {
        let path = tx.add_path(&PathSpec { tos, ttl: 17, ..spec(a, b) }).unwrap();
        send(&mut tx, path.id, &[64, 64]);
        assert!(receive(&mut rx, 2).iter().all(|got| got.tos == Some(tos)), "{tos}");
    }
}

#[test]
fn a_taken_port_is_explained() {
    let a = loopback();
    let _first = open(a);
    let error = UdpPort::open(&lo(), &[a], &PortConfig::default()).err().unwrap();
    assert_eq!(error.errno(), libc::EADDRINUSE);
    let text = error.to_string();
    assert!(text.starts_with(&format!("udp: cannot bind {a}:4791: ")), "{text}");
    assert!(text.contains(&format!("held by pid {} (", std::process::id())), "{text}");
}

/// No process has the socket open: it is on its way to one, and is freed then.
#[test]
fn a_port_that_no_process_holds_is_waited_for() {
    use std::os::fd::AsFd as _;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let a = loopback();
    let held = std::net::UdpSocket::bind((a, ROCE_PORT)).unwrap();
    let (to, from) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [held.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&to, &[std::io::IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    drop(held);
    std::thread::scope(|scope| {
        let begin = std::time::Instant::now();
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(600));
            drop((to, from));
        });
        open(a);
        assert!(begin.elapsed() >= Duration::from_millis(500));
    });
}

#[test]
fn a_port_needs_an_address_of_its_own() {
    let none = UdpPort::open(&lo(), &[], &PortConfig::default()).err().unwrap();
    assert!(none.to_string().contains("lo has no address"), "{none}");
    let foreign = IpAddr::from([192, 0, 2, 1]);
    let error = UdpPort::open(&lo(), &[foreign], &PortConfig::default()).err().unwrap();
    assert_eq!(error.errno(), libc::EADDRNOTAVAIL);
    assert!(error.hint.contains("ip address show dev lo"), "{error}");
}

#[test]
fn paths_that_cannot_work_are_refused() {
    let a = loopback();
    let mut port = open(a);
    let kind = |port: &mut UdpPort, spec: &PathSpec| port.add_path(spec).err().unwrap().kind();
    let v6 = IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(kind(&mut port, &spec(a, v6)), io::ErrorKind::InvalidInput);
    assert_eq!(kind(&mut port, &spec(loopback(), a)), io::ErrorKind::AddrNotAvailable);
    // A loopback source reaches nothing outside.
    let outside = port.add_path(&spec(a, IpAddr::from([192, 0, 2, 1]))).err().unwrap();
    assert!(outside.to_string().contains("to 192.0.2.1"), "{outside}");
}

#[test]
fn a_taken_source_port_is_replaced_and_reported() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let _taken = std::net::UdpSocket::bind((a, 0xC123)).unwrap();
    let path = tx.add_path(&spec(a, b)).unwrap();
    assert_eq!(path.src_port, 0xC124);
    let again = tx.add_path(&spec(a, b)).unwrap();
    assert_eq!(again.src_port, 0xC124);
    assert_ne!(path.id, again.id);
    send(&mut tx, again.id, &[9]);
    assert_eq!(receive(&mut rx, 1)[0].src_port, 0xC124);
    // UDP/4791 itself is a source port like any other.
    let own = tx.add_path(&PathSpec { src_port: 4791, ..spec(a, b) }).unwrap();
    assert_eq!(own.src_port, 4791);
    send(&mut tx, own.id, &[9, 9]);
    assert_eq!(receive(&mut rx, 2)[1].src_port, 4791);
}

/// A thousand connections do not need a thousand descriptors, and a program that keeps connecting
/// does not open a socket each time.
#[test]
fn many_paths_share_their_source_ports() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let paths: Vec<_> = (0..1000)
        .map(|n| tx.add_path(&PathSpec { src_port: 0xC000 + n, ..spec(a, b) }).unwrap())
        .collect();
    let ports: std::collections::BTreeSet<_> = paths.iter().map(|path| path.src_port).collect();
    assert_eq!(ports.len(), 32);
    let share = |port: &u16| paths.iter().filter(|path| path.src_port == *port).count();
    assert!(ports.iter().all(|port| (30..34).contains(&share(port))), "they share evenly");
    send(&mut tx, paths[999].id, &[9]);
    assert_eq!(receive(&mut rx, 1)[0].src_port, paths[999].src_port);
    let (last, others) = paths.split_last().unwrap();
    others.iter().for_each(|path| tx.remove_path(path.id));
    // A few stay open while there is another path, and are reused first.
    // Between fork and exec, children of other tests have copies of closed sockets.
    let bind = |port: &u16| std::net::UdpSocket::bind((a, *port));
    let taken = || ports.iter().copied().filter(|port| bind(port).is_err()).collect::<Vec<_>>();
    let end = std::time::Instant::now() + Duration::from_secs(20);
    let mut open = taken();
    while open.len() > 9 && std::time::Instant::now() < end {
        open = taken();
    }
    assert_eq!(open.len(), 9);
    let again = tx.add_path(&PathSpec { src_port: 0xD123, ..spec(a, b) }).unwrap();
    assert!(open.contains(&again.src_port) && again.src_port != last.src_port);
    tx.remove_path(again.id);
    tx.remove_path(last.id);
    for port in &ports {
        let limit = Duration::from_secs(20);
        drop(descriptors::patiently(libc::EADDRINUSE, limit, || bind(port)).expect("it is closed"));
    }
}

#[test]
fn a_removed_path_sends_what_was_committed_and_frees_its_source_port() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let first = tx.add_path(&spec(a, b)).unwrap();
    let second = tx.add_path(&spec(a, b)).unwrap();
    tx.reserve(first.id, 5).unwrap().buf.fill(5);
    tx.commit();
    tx.remove_path(first.id);
    tx.remove_path(first.id);
    assert!(tx.reserve(first.id, 5).is_none());
    tx.flush(crate::testing::no_failure);
    assert_eq!(receive(&mut rx, 1)[0].payload, [5; 5]);
    assert!(std::net::UdpSocket::bind((a, first.src_port)).is_err(), "the second path uses it");
    tx.remove_path(second.id);
    let bind = || std::net::UdpSocket::bind((a, first.src_port));
    drop(descriptors::patiently(libc::EADDRINUSE, Duration::from_secs(20), bind).unwrap());
    // Ids are reused.
    let third = tx.add_path(&spec(a, b)).unwrap();
    assert!([first.id, second.id].contains(&third.id));
    send(&mut tx, third.id, &[6]);
    assert_eq!(receive(&mut rx, 1)[0].payload, [0; 6]);
}

#[test]
fn a_guard_owns_the_port_drops_what_comes_and_sends() {
    let (a, b) = (loopback(), loopback());
    let mut guard = open_guard(&lo(), a);
    let mut other = open(b);
    let to_guard = other.add_path(&spec(b, a)).unwrap();
    send(&mut other, to_guard.id, &[1000; 20]);
    assert!(!descriptors::wait_readable(guard.wait_fd(), 20).unwrap());
    assert_eq!(guard.receive_by(64, &mut |_| panic!("a guard hands nothing up")).unwrap(), 0);
    assert_eq!(guard.stats().rx_queue_drops, 0);
    let to_other = guard.add_path(&spec(a, b)).unwrap();
    send(&mut guard, to_other.id, &[70, 70]);
    assert_eq!(receive(&mut other, 2).len(), 2);
    assert!(UdpPort::open(&lo(), &[a], &PortConfig::default()).is_err());
}

#[test]
fn an_address_without_a_path_is_heard_while_another_has_one() {
    let (a, b, c) = (loopback(), loopback(), loopback());
    let mut two = UdpPort::open(&lo(), &[a, b], &PortConfig::default()).unwrap();
    two.add_path(&spec(a, c)).unwrap();
    let mut other = open(c);
    let path = other.add_path(&spec(c, b)).unwrap();
    send(&mut other, path.id, &[3]);
    assert_eq!(receive(&mut two, 1)[0].dst, b);
}

#[test]
fn without_segmentation_every_datagram_is_its_own_run() {
    let (a, b) = (loopback(), loopback());
    let config = PortConfig { no_segmentation: true, ..PortConfig::default() };
    let mut tx = UdpPort::open(&lo(), &[a], &config).unwrap();
    assert_eq!(tx.capabilities().segments_max, 1);
    let mut rx = open(b);
    let path = tx.add_path(&spec(a, b)).unwrap();
    assert_eq!(send(&mut tx, path.id, &[50; 40]), [0; 40]);
    assert!(receive(&mut rx, 40).iter().all(|got| got.ip_id == RxIpId::Hint(0)));
    assert_eq!(tx.stats().tx_runs, 40);
}

#[test]
fn there_is_no_room_for_what_cannot_be_sent() {
    let (a, b) = (loopback(), loopback());
    let mut tx = open(a);
    let path = tx.add_path(&spec(a, b)).unwrap();
    assert!(tx.reserve(path.id, 65_508).is_none());
    assert!(tx.reserve(PathId(77), 10).is_none());
}

#[test]
fn the_receive_budget_is_what_the_queue_really_holds() {
    let config = small_buffer(212_992);
    let sizes = [0, 64, 160, 161, 608, 609, 1044, 1632, 1633, 2068, 3680, 3681, 4120, 7776];
    for payload in sizes {
        let (a, b) = (loopback(), loopback());
        // Nothing is read before all is sent: the worst case for a peer within the budget.
        let mut rx = UdpPort::open(&lo(), &[b], &config).unwrap();
        let single = PortConfig { no_segmentation: true, ..PortConfig::default() };
        for tx_config in [single, PortConfig::default()] {
            let mut tx = UdpPort::open(&lo(), &[a], &tx_config).unwrap();
            let path = tx.add_path(&spec(a, b)).unwrap().id;
            let budget = rx.capabilities().rx_budget;
            assert!(budget.bytes > 300_000 && budget.bytes < 425_984, "{budget:?}");
            let count = (budget.bytes / RxBudget::cost(payload)).min(budget.datagrams) as usize;
            for _ in 0..count {
                if tx.reserve(path, payload as usize).is_none() {
                    tx.flush(crate::testing::no_failure);
                    tx.reserve(path, payload as usize).unwrap();
                }
                tx.commit();
            }
            tx.flush(crate::testing::no_failure);
            assert_eq!(receive(&mut rx, count).len(), count);
            assert_eq!(rx.stats().rx_queue_drops, 0, "{payload}");
        }
    }
}

#[test]
fn an_overrun_is_counted() {
    let (a, b) = (loopback(), loopback());
    let config = small_buffer(20_000);
    let mut rx = UdpPort::open(&lo(), &[b], &config).unwrap();
    let mut tx = open(a);
    let path = tx.add_path(&spec(a, b)).unwrap();
    for _ in 0..100 {
        send(&mut tx, path.id, &[4120]);
    }
    let mut count = 0;
    while rx.receive_by(64, &mut |_| count += 1).unwrap() > 0 {}
    assert!(count < 100, "{count}");
    assert_eq!(rx.stats().rx_queue_drops, 100 - count);
}

mod blocked;
mod bulk;
mod several;
mod two;
mod wire;

#[test]
fn several_ports_share_an_address_and_each_gets_what_is_for_its_queue_pairs() {
    let (own, peer) = (loopback(), loopback());
    let several = || {
        UdpPort::open_shards(
            &lo(),
            &[own],
            &PortConfig::default(),
            Shards { shared: false, first: 0, count: 3, selector: 5 },
        )
    };
    let mut ports = several().unwrap();
    // No other socket can share it, even one that would allow sharing.
    for error in [several().err(), UdpPort::open(&lo(), &[own], &PortConfig::default()).err()] {
        assert_eq!(error.expect("the port is taken").errno(), libc::EADDRINUSE);
    }
    let sender = std::net::UdpSocket::bind((peer, 0)).unwrap();
    for (byte, port) in [(0, 0), (1, 1), (2, 2), (3, 0), (0xff, 0), (2, 2)] {
        let mut payload = [7; 16];
        payload[5] = byte;
        sender.send_to(&payload, (own, ROCE_PORT)).unwrap();
        assert_eq!(receive(&mut ports[port], 1)[0].payload, payload);
    }
    // Too short for a queue pair number.
    sender.send_to(&[1; 3], (own, ROCE_PORT)).unwrap();
    assert_eq!(receive(&mut ports[0], 1)[0].payload, [1; 3]);
}

/// Any thread that drives a device adds paths: one that never was where the port was opened, or one
/// in another network that has the same addresses.
#[test]
fn paths_lead_from_where_the_port_is_whoever_adds_them() {
    let [pair, alike] = or_skip!(Pair::new().and_then(|pair| Ok([pair, Pair::new()?])));
    let [a, b] = ["10.9.0.1", "10.9.0.2"].map(|address| address.parse::<IpAddr>().unwrap());
    let [mut tx, mut rx] = [(&pair.a, a), (&pair.b, b)].map(|(ns, address)| {
        ns.run(|| {
            let v0 = Interface::by_name("v0").unwrap();
            UdpPort::open(&v0, &[address], &PortConfig::default()).unwrap()
        })
    });
    let mut wanted = 0xC100..;
    let mut add = |tx: &mut UdpPort| {
        tx.add_path(&PathSpec { src_port: wanted.next().unwrap(), ..spec(a, b) }).unwrap()
    };
    let paths = [add(&mut tx), alike.a.run(|| add(&mut tx)), pair.a.run(|| add(&mut tx))];
    assert_eq!(paths.map(|path| path.src_port), [ROCE_PORT, ROCE_PORT, 0xC102]);
    for path in paths {
        send(&mut tx, path.id, &[80]);
        assert_eq!(receive(&mut rx, 1)[0].src_port, path.src_port);
    }
    let group = "239.1.2.3".parse().unwrap();
    let elsewhere = alike.a.run(|| tx.join(group)).expect_err("not its network");
    assert_eq!(elsewhere.kind(), io::ErrorKind::Unsupported, "{elsewhere}");
    pair.a.run(|| tx.join(group)).unwrap();
}

/// Administrators watch the kernel's counters of errors.
#[test]
fn opening_a_port_counts_no_errors() {
    let pair = or_skip!(Pair::new());
    for address in ["10.9.0.1", "fd09::1"] {
        pair.a.run(|| {
            let iface = Interface::by_name("v0").expect("v0");
            let own = [address.parse().expect("an address")];
            drop(UdpPort::open(&iface, &own, &PortConfig::default()).expect("a port"));
        });
    }
    let counters = pair.a.sh("cat /proc/thread-self/net/snmp /proc/thread-self/net/snmp6");
    let errors: Vec<&str> =
        counters.lines().filter(|line| line.starts_with("Udp6InErrors")).collect();
    assert!(errors.len() == 1 && errors[0].ends_with("\t0"), "{errors:?}");
    let mut udp = counters.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let names = udp.next().expect("names").split(' ');
    let of =
        names.zip(udp.next().expect("values").split(' ')).find(|(name, _)| *name == "InErrors");
    assert_eq!(of, Some(("InErrors", "0")));
}
