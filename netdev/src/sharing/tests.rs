mod blocked;
mod guardians;
mod left_notes;
mod table;

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::*;
use crate::ROCE_PORT;
use crate::kernel::descriptors::{patiently, wait_readable};
use crate::port::contract::PortStats;
use crate::port::contract::{PathId, PathSpec, Port as _, RxIpId};
use crate::testing::ReceiveBy as _;
use crate::testing::loopback;
use crate::testing::sides::{Open as _, SELECTOR, lo};
use crate::testing::testns::{NetNs, forget_option, has_address, or_skip, wait_until};
use crate::udp::UdpPort;
use crate::udp::handoff::{Inbox, Outbox};

/// A process: its slots, and its ports.
struct Process {
    slots: Arc<Slots>,
    ports: Vec<UdpPort>,
}

fn shards(count: usize) -> Shards {
    Shards { shared: false, first: 0, count, selector: SELECTOR }
}

pub(super) fn lease(addresses: &[IpAddr], count: usize) -> Result<Arc<Slots>, OpenError> {
    Slots::lease(&lo(), addresses, &PortConfig::default(), shards(count)).map(Arc::new)
}

/// A process: for the kernel two of a process are as those of two.
fn process(addresses: &[IpAddr], count: usize) -> Process {
    let slots = lease(addresses, count).expect("slots");
    let own = Shards { first: slots.first(), ..shards(count) };
    let sockets = slots.sockets(addresses).expect("sockets");
    let parts = UdpPort::acquire(&lo(), addresses, &PortConfig::default(), own, Some(sockets));
    let parts = parts.expect("sockets").into_iter();
    let port = |(nth, parts)| {
        let mut port = UdpPort::assemble(parts).expect("a port");
        port.share(slots.clone(), nth).expect("shared");
        port
    };
    let ports = parts.enumerate().map(port).collect();
    Process { slots, ports }
}

/// Sends a datagram for a slot from a program that knows nothing of it.
fn send(to: IpAddr, slot: u8, mark: u8) {
    let from = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let mut payload = [mark; 20];
    payload[usize::from(SELECTOR)] = slot;
    from.send_to(&payload, (to, ROCE_PORT)).expect("sent");
}

/// The marks of a port's received datagrams.
fn received(port: &mut UdpPort) -> Vec<u8> {
    let mut marks = Vec::new();
    // Often enough to look for datagrams from neighbours, too.
    for _ in 0..300 {
        port.receive_by(64, &mut |datagram| marks.push(datagram.payload[0])).expect("received");
    }
    marks
}

#[test]
fn each_process_gets_what_is_for_its_slots() {
    let here = loopback();
    let mut all = [(0, 1), (1, 2), (3, 1)].map(|(first, count)| {
        let process = process(&[here], count);
        assert_eq!((process.slots.first(), process.slots.count()), (first, count));
        process
    });
    for slot in [0, 1, 2, 3, 4, 200, 255] {
        send(here, slot, 100 + slot / 2);
    }
    let marks = all.each_mut().map(|it| it.ports.iter_mut().map(received).collect::<Vec<_>>());
    // Datagrams for no process come to slot 0.
    assert_eq!(marks[0], [vec![100, 102, 200, 227]]);
    assert_eq!(marks[1], [vec![100], vec![101]]);
    assert_eq!(marks[2], [vec![101]]);
}

#[test]
fn what_a_process_leaves_is_where_it_was() {
    let here = loopback();
    let [first, second, third] = [(); 3].map(|()| process(&[here], 1));
    assert_eq!([&first, &second, &third].map(|it| it.slots.first()), [0, 1, 2]);
    drop(second);
    send(here, 1, 1);
    let mut third = third;
    send(here, 2, 2);
    assert_eq!(received(&mut third.ports[0]), [2], "the others' sockets have not moved");
    // The slot rests, and a new one is there.
    let mut fourth = process(&[here], 1);
    assert_eq!(fourth.slots.first(), 3);
    send(here, 3, 3);
    assert_eq!(received(&mut fourth.ports[0]), [3]);
}

#[test]
fn a_slot_that_is_used_anew_has_nothing_of_the_process_before() {
    let here = loopback();
    let keeper = process(&[here], 1);
    let mut last = 0;
    // More than there is room for, so one is used anew.
    for nth in 0..40_u8 {
        let mut process = process(&[here], 1);
        let slot = process.slots.first();
        assert!(slot != 0 && usize::from(slot) <= 2 + ROOM_MIN + 2, "slot {slot}");
        assert_eq!(received(&mut process.ports[0]), [0; 0], "process {nth} on slot {slot}");
        send(here, slot, nth);
        assert_eq!(received(&mut process.ports[0]), [nth]);
        send(here, slot, 99);
        assert!(keeper.slots.hand_over(slot, &datagram(here, b"for nobody")));
        last = last.max(slot);
    }
    assert!(last > 10, "they have not rested: {last}");
}

fn datagram(dst: IpAddr, payload: &[u8]) -> RxDatagram<'_> {
    RxDatagram {
        payload,
        src: IpAddr::from([10, 1, 2, 3]),
        dst,
        src_port: 0xc123,
        ip_id: RxIpId::Exact { id: 77, flags: 0x4000 },
        tos: Some(3),
    }
}

/// Waits until each address has its leader among these processes, and has its ports follow.
fn follow(heirs: &mut [&mut Process], addresses: &[IpAddr]) {
    let has = |to| heirs.iter().any(|it| it.slots.is_leader(to));
    wait_until("one follows", || addresses.iter().all(|to| has(*to)));
    for heir in heirs {
        assert_eq!(heir.ports[0].maintain(), None);
    }
}

#[test]
fn the_one_that_follows_reads_what_is_for_all() {
    let here = [loopback(), loopback()];
    let first = process(&here, 1);
    let [mut second, mut third] = [(); 2].map(|()| process(&here, 1));
    assert!(!wait_readable(second.ports[0].wait_fd(), 0).expect("poll"));
    // These stay unread before the lead has changed hands.
    send(here[0], 0, 2);
    drop(first);
    send(here[1], 0, 3);
    let told = |port: &UdpPort| wait_readable(port.wait_fd(), 1).expect("poll");
    wait_until("one is told", || told(&second.ports[0]) || told(&third.ports[0]));
    follow(&mut [&mut second, &mut third], &here);
    for (mark, to) in here.into_iter().enumerate() {
        send(to, 0, mark as u8);
    }
    let mut marks = [received(&mut second.ports[0]), received(&mut third.ports[0])].concat();
    marks.sort_unstable();
    assert_eq!(marks, [0, 1, 2, 3], "each is read once");
    // Also the second time.
    drop(second);
    follow(&mut [&mut third], &here);
    here.into_iter().for_each(|to| send(to, 0, 7));
    assert_eq!(received(&mut third.ports[0]), [7, 7]);
    // The slot 0 of a new process would be read twice.
    assert_ne!(process(&here, 1).slots.first(), 0);
}

#[test]
fn what_is_handed_over_arrives_as_it_was() {
    let here = loopback();
    let [first, mut second] = [(); 2].map(|()| process(&[here], 1));
    let other = IpAddr::from([255, 0, 0, 1]);
    let kinds = [RxIpId::None, RxIpId::Hint(9), RxIpId::Exact { id: 0xfffe, flags: 0x4000 }];
    for (nth, ip_id) in kinds.into_iter().enumerate() {
        let payload = vec![nth as u8; 4000 * nth + 1];
        let one = RxDatagram { ip_id, tos: None, src: other, ..datagram(here, &payload) };
        assert!(first.slots.hand_over(1, &one) && first.slots.hand_over(1, &datagram(here, b"x")));
    }
    assert!(wait_readable(second.ports[0].wait_fd(), 10_000).expect("poll"), "it is told");
    let mut nth = 0;
    for _ in 0..300 {
        let got = second.ports[0].receive_by(64, &mut |it| {
            let payload = vec![(nth / 2) as u8; 4000 * (nth / 2) + 1];
            let expected = match nth % 2 {
                0 => RxDatagram {
                    ip_id: kinds[nth / 2],
                    tos: None,
                    src: other,
                    ..datagram(here, &payload)
                },
                _ => datagram(here, b"x"),
            };
            assert_eq!(format!("{it:?}"), format!("{expected:?}"));
            nth += 1;
        });
        got.expect("received");
    }
    assert_eq!(nth, 6);
    // Datagrams for slots without a process, and for other addresses, are not kept.
    assert!(!first.slots.hand_over(9, &datagram(here, b"x")));
    assert!(!first.slots.hand_over(1, &datagram(loopback(), b"x")));
    // A mailbox without a reader fills up.
    let payload = [0; 4096];
    let room = (0..10_000).take_while(|_| first.slots.hand_over(1, &datagram(here, &payload)));
    assert!((10..10_000).contains(&room.count()));
}

/// Another process would deny the neighbour's connection.
#[test]
fn a_datagram_for_a_living_neighbour_is_that_ones_even_if_it_is_lost() {
    let here = loopback();
    let [first, second] = [(); 2].map(|()| process(&[here], 1));
    let payload = [0; 4096];
    let deliver = || first.slots.deliver(1, &datagram(here, &payload));
    // Another process is joining or leaving.
    let held = first.slots.shared[0].locks.hold().expect("no process has it");
    assert_eq!(deliver(), Delivery::Lost);
    drop(held);
    std::thread::sleep(ASK_EVERY + Duration::from_millis(10));
    assert_eq!(deliver(), Delivery::Done);
    // It does not read.
    let room = (0..10_000).take_while(|_| deliver() == Delivery::Done);
    assert!(room.count() < 10_000);
    assert_eq!(deliver(), Delivery::Lost);
    assert_eq!(first.slots.deliver(9, &datagram(here, b"x")), Delivery::NoProcess);
    drop(second);
    assert_eq!(deliver(), Delivery::NoProcess);
}

/// Other processes may write anything.
#[test]
fn a_mailbox_with_nonsense_is_read_no_more_and_harms_nothing() {
    let here = loopback();
    let good = {
        let mut bytes = Vec::new();
        let (writer, reader) = UnixStream::pair().expect("a pair");
        Outbox::new(writer.into()).write(&datagram(here, b"right"));
        reader.set_nonblocking(true).expect("a socket");
        std::io::Read::read_to_end(&mut &reader, &mut bytes).ok();
        bytes
    };
    let count = |bytes: &[u8], step: usize| {
        let (mut writer, reader) = UnixStream::pair().expect("a pair");
        let mut mail = Inbox::new(here, OwnedFd::from(reader));
        let mut stats = PortStats::default();
        let mut count = 0;
        for part in bytes.chunks(step) {
            std::io::Write::write_all(&mut writer, part).expect("written");
            count += mail.receive(&mut stats, &mut |it| assert_eq!(it.payload, b"right"));
        }
        (count, stats.rx_malformed)
    };
    let twice = [good.as_slice(), &good].concat();
    for step in 1..=twice.len() {
        assert_eq!(count(&twice, step), (2, 0), "in pieces of {step}");
    }
    // Each byte of the header: its length, its family, its identification, its addresses.
    for at in 0..good.len() - 5 {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bad = twice.clone();
            bad[at] = value;
            let (mut writer, reader) = UnixStream::pair().expect("a pair");
            std::io::Write::write_all(&mut writer, &bad).expect("written");
            let mut mail = Inbox::unread(here, reader.into());
            let mut stats = PortStats::default();
            let first = mail.receive(&mut stats, &mut |_| {});
            assert!(first <= 2 && stats.rx_malformed <= 1, "byte {at} as {value}");
        }
    }
    let mut other = twice.clone();
    other[28 + 15] ^= 1;
    assert_eq!(count(&other, other.len()), (0, 1), "to another address");
}

#[test]
fn a_service_has_one_process_that_listens() {
    let here = [loopback(), loopback()];
    let [first, second, third] = [(); 3].map(|()| lease(&here, 1).expect("a slot"));
    let in_use =
        |result: io::Result<()>| result.is_err_and(|e| e.raw_os_error() == Some(libc::EADDRINUSE));
    first.listen(5, None).expect("nobody does");
    assert!(in_use(second.listen(5, None)));
    second.listen(5, Some(here[0])).expect("on one address");
    assert!(in_use(third.listen(5, Some(here[0]))));
    second.listen(6, None).expect("another service");
    // The more precise one is found first. A process does not find itself.
    assert_eq!([here[0], here[1]].map(|at| third.listener(5, at)), [Some(1), Some(0)]);
    assert_eq!([here[0], here[1]].map(|at| second.listener(5, at)), [None, Some(0)]);
    assert_eq!([here[0], here[1]].map(|at| first.listener(5, at)), [Some(1), None]);
    assert_eq!((third.listener(6, here[1]), third.listener(7, here[1])), (Some(1), None));
    second.unlisten(5, Some(here[0]));
    assert_eq!(third.listener(5, here[0]), Some(0));
    // All of a family are less precise than one of it, and more than all of both.
    let v4 = IpAddr::from([0; 4]);
    second.listen(5, Some(v4)).expect("a place of its own");
    assert!(in_use(third.listen(5, Some(v4))));
    third.listen(5, Some([0_u16; 8].into())).expect("another family");
    assert_eq!([here[0], here[1]].map(|at| third.listener(5, at)), [Some(1), Some(1)]);
    third.unlisten(5, Some([0_u16; 8].into()));
    second.unlisten(5, Some(v4));
    assert_eq!(third.listener(5, here[1]), Some(0));
    // It ends with the process.
    drop(first);
    assert_eq!(third.listener(5, here[0]), None);
    third.listen(5, None).expect("nobody does any more");
    // A process that cannot listen on one of its addresses listens on none.
    let on_one = lease(&here[1..], 1).expect("a slot");
    on_one.listen(8, None).expect("nobody does");
    assert!(in_use(second.listen(8, None)));
    assert_eq!([here[0], here[1]].map(|at| third.listener(8, at)), [None, Some(on_one.first())]);
}

#[test]
fn a_request_is_the_process_s_that_has_it() {
    let here = [loopback(), loopback()];
    let [first, second, third] = [(); 3].map(|()| lease(&here, 1).expect("a slot"));
    let peers = [IpAddr::from([10, 0, 0, 9]), "fe80::9".parse().expect("an address")];
    let ways = [(here[0], peers[0]), (here[1], peers[0]), (here[0], peers[1])];
    let holders = |key| ways.map(|way| third.request_holder(way, key));
    second.hold_request(ways[0], 5, true);
    third.hold_request(ways[2], 5, true);
    assert_eq!(holders(5), [Some(1), None, Some(2)], "a process knows its own");
    assert_eq!([holders(6), holders(5 | 1 << 32)], [[None; 3]; 2]);
    // No place is also that of another request, or of a service.
    assert_eq!([here[0], here[1]].map(|at| third.listener(5, at)), [None, None]);
    third.hold_request(ways[2], 5, false);
    second.hold_request(ways[1], 5, true);
    second.hold_request(ways[0], 5, false);
    assert_eq!(holders(5), [None, Some(1), None]);
    drop((first, second));
    assert_eq!(holders(5), [None; 3], "it ends with the process");
}

#[test]
fn a_port_is_one_processs_or_all_share_it() {
    use PortClaim::{Alone, None, Shared};
    let here = [loopback(), loopback()];
    let [first, second, third] = [(); 3].map(|()| lease(&here, 1).expect("a slot"));
    let in_use =
        |result: io::Result<()>| result.is_err_and(|e| e.raw_os_error() == Some(libc::EADDRINUSE));
    first.claim_port(here[0], 5, Alone).expect("nobody has it");
    first.claim_port(here[0], 5, Alone).expect("it has it already");
    for claim in [Alone, Shared] {
        assert!(in_use(second.claim_port(here[0], 5, claim)));
    }
    second.claim_port(here[0], 6, Alone).expect("another port, beside it");
    second.claim_port(here[1], 5, Alone).expect("another address");
    let claimed = |by: &Slots| here.map(|at| [5, 6, 7].map(|port| by.is_port_claimed(at, port)));
    assert_eq!(claimed(&first), [[false, true, false], [true, false, false]]);
    assert_eq!(claimed(&second), [[true, false, false], [false; 3]]);
    // Shared by two, it is neither's alone. To fail changes nothing.
    first.claim_port(here[0], 5, Shared).expect("its own");
    third.claim_port(here[0], 5, Shared).expect("shared");
    assert!(in_use(first.claim_port(here[0], 5, Alone)));
    assert!(in_use(second.claim_port(here[0], 5, Alone)));
    third.claim_port(here[0], 5, None).expect("no more");
    first.claim_port(here[0], 5, Alone).expect("alone again");
    // It ends with the process, whose other port does not.
    drop(second);
    assert_eq!(claimed(&third), [[true, false, false], [false; 3]]);
    drop(first);
    assert_eq!(claimed(&third), [[false; 3]; 2]);
}

/// IPv6 has options of its own, and `::1` is there once: so in a namespace of its own.
#[test]
fn ipv6_addresses_are_shared_too() {
    let ns = or_skip!("shared::ipv6_addresses_are_shared_too", NetNs::new());
    ns.run(|| {
        has_address("::1").expect("an address of loopback");
        let here: [IpAddr; 2] = ["::1", "127.0.0.1"].map(|text| text.parse().expect("an address"));
        let first = process(&here, 1);
        let mut second = process(&here, 2);
        let from = UdpSocket::bind("[::1]:0").expect("a socket");
        for slot in [0, 1, 2] {
            let mut payload = [50 + slot; 20];
            payload[usize::from(SELECTOR)] = slot;
            from.send_to(&payload, (here[0], ROCE_PORT)).expect("sent");
        }
        assert_eq!([0, 1].map(|nth: usize| received(&mut second.ports[nth])), [[51], [52]]);
        // The one that follows reads slot 0 of both families, and datagrams that have come there
        // before.
        drop(first);
        follow(&mut [&mut second], &here);
        let mut payload = [60; 20];
        payload[usize::from(SELECTOR)] = 0;
        from.send_to(&payload, (here[0], ROCE_PORT)).expect("sent");
        assert_eq!(received(&mut second.ports[0]), [50, 60]);
    });
}

/// While the first process's datagrams come, others join.
#[test]
fn nothing_is_lost_when_others_join() {
    let here = loopback();
    let mut first = process(&[here], 1);
    let senders: Vec<UdpSocket> =
        (0..16).map(|_| UdpSocket::bind("127.0.0.1:0").expect("a socket")).collect();
    let mut others = Vec::new();
    for round in 0..20_u8 {
        if round % 4 == 1 {
            others.push(process(&[here], 1));
        }
        for sender in &senders {
            let mut payload = [round; 20];
            payload[usize::from(SELECTOR)] = 0;
            sender.send_to(&payload, (here, ROCE_PORT)).expect("sent");
        }
        assert_eq!(received(&mut first.ports[0]), vec![round; senders.len()], "round {round}");
    }
}

/// Those that have gone wait for the end of nothing.
#[test]
fn who_leaves_leaves_nothing_behind() {
    let here = loopback();
    let keeper = lease(&[here], 1).expect("a slot");
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let passes = || {
        for _ in 0..60 {
            drop(lease(&[here], 1).expect("a slot"));
        }
    };
    passes();
    // Tests beside this one have descriptors, too: so there are some that it has again.
    let before = descriptors();
    passes();
    wait_until("all are closed", || descriptors() <= before);
    assert_eq!(keeper.first(), 0);
}

#[test]
fn with_the_last_process_all_is_gone() {
    let here = loopback();
    let [first, second] = [(); 2].map(|()| process(&[here], 1));
    let alone = || UdpSocket::bind((here, ROCE_PORT));
    assert!(alone().is_err());
    drop(first);
    assert!(alone().is_err());
    drop(second);
    // Between fork and exec, children of other tests have copies of closed sockets.
    let free = patiently(libc::EADDRINUSE, Duration::from_secs(20), alone);
    drop(free.expect("the port is free"));
    assert_eq!(lease(&[here], 1).expect("slots").first(), 0);
}

#[test]
fn a_program_that_shares_with_nobody_has_the_address_alone() {
    let here = loopback();
    let alone = UdpSocket::bind((here, ROCE_PORT)).expect("free");
    let error = lease(&[here], 1).expect_err("the port is in use").to_string();
    assert!(error.contains("UDP/4791 is held by pid"), "{error}");
    drop(alone);
    let shared = process(&[here], 1);
    let error = UdpPort::open(&lo(), &[here], &PortConfig::default()).err().expect("shared");
    assert_eq!(error.errno(), libc::EADDRINUSE);
    drop(shared);
}

/// As under QEMU's emulation of Linux for programs of other processors.
#[test]
fn where_the_kernel_cannot_steer_the_first_process_has_its_addresses_alone() {
    let here = loopback();
    let process = std::thread::spawn(move || {
        forget_option(libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF);
        let error = lease(&[here], 1).expect_err("the option is missing");
        assert_eq!(error.errno(), libc::ENOPROTOOPT);
        let text = error.to_string();
        assert!(text.contains(&format!("cannot steer the datagrams of {here}: ")), "{text}");
        let open = || crate::choose::auto::lease(&lo(), &[here], &PortConfig::default(), 1);
        let (shards, slots) = open().expect("alone");
        assert!(slots.is_none() && !shards.shared, "{shards:?}");
        let port = UdpPort::open(&lo(), &[here], &PortConfig::default()).expect("the port is free");
        let error = open().map(drop).expect_err("held").to_string();
        assert!(error.contains("UDP/4791 is held by pid"), "{error}");
        port
    });
    let mut port = process.join().expect("a port");
    send(here, 7, 1);
    assert_eq!(received(&mut port), [1], "every slot is its own");
    drop(port);
    assert_eq!(lease(&[here], 1).expect("slots").first(), 0, "another thread still can");
}

#[test]
fn processes_with_some_addresses_in_common_have_the_same_slots_on_all_of_theirs() {
    let [one, two] = [loopback(), loopback()];
    let mut first = process(&[one], 1);
    let mut both = process(&[two, one], 1);
    assert_eq!(both.slots.first(), 1);
    let mut second = process(&[two], 1);
    assert_eq!(second.slots.first(), 2, "slot 0 is for what is for all");
    for (to, slot) in [(one, 0), (one, 1), (two, 0), (two, 1), (two, 2)] {
        send(to, slot, 10 * slot + u8::from(to == two));
    }
    assert_eq!(received(&mut first.ports[0]), [0]);
    let mut marks = received(&mut both.ports[0]);
    marks.sort_unstable();
    assert_eq!(marks, [1, 10, 11], "also what is for all on the address where it was first");
    assert_eq!(received(&mut second.ports[0]), [21]);
}

#[test]
fn more_slots_than_there_are_are_refused() {
    let here = loopback();
    let first = lease(&[here], 64).expect("slots");
    let error = lease(&[here], 250).expect_err("too many").to_string();
    assert!(error.contains("no 250 are free"), "{error}");
    assert_eq!((first.first(), lease(&[here], 1).expect("a slot").first()), (0, 64));
}

/// A path to a neighbour on the same address is as any other.
#[test]
fn neighbours_reach_each_other() {
    let here = loopback();
    let [mut first, mut second] = [(); 2].map(|()| process(&[here], 1));
    let spec =
        PathSpec { local: here, remote: here, src_port: 0xc100, tos: 0, ttl: 64, flow_label: 0 };
    let send = |port: &mut UdpPort, id: PathId, slot: u8| {
        let buf = port.reserve(id, 20).expect("room").buf;
        buf.fill(30 + slot);
        buf[usize::from(SELECTOR)] = slot;
        port.commit();
        port.flush(crate::testing::no_failure);
    };
    let to = second.ports[0].add_path(&spec).expect("a path").id;
    send(&mut second.ports[0], to, 0);
    let to = first.ports[0].add_path(&spec).expect("a path").id;
    send(&mut first.ports[0], to, 1);
    send(&mut first.ports[0], to, 0);
    assert_eq!(received(&mut first.ports[0]), [30, 30]);
    assert_eq!(received(&mut second.ports[0]), [31]);
}

#[test]
fn rings_are_smaller_for_those_that_join_unless_the_program_says_how_large() {
    let here = loopback();
    let default = PortConfig::default();
    let frames = |slots: &Slots| slots.fitted(&default).packet.ring_frames;
    let mut all = Vec::new();
    for expected in [256, 128, 128, 64, 64, 64, 64, 64, 64] {
        let slots = lease(&[here], 1).expect("a slot");
        assert_eq!(frames(&slots), expected, "beside {}", all.len());
        let chosen = PortConfig { packet: PacketConfig { ring_frames: 200 }, ..default.clone() };
        assert_eq!(slots.fitted(&chosen), chosen);
        all.push(slots);
    }
    // Those that have gone do not count, and each port of a process does.
    all.truncate(1);
    all.push(lease(&[here], 3).expect("slots"));
    assert_eq!(all.iter().map(|it| frames(it)).collect::<Vec<_>>(), [256, 128]);
    assert_eq!(frames(&lease(&[here], 1).expect("a slot")), 64);
}

/// A process in the middle of a change is waited for, and no longer than two seconds.
#[test]
fn a_process_that_is_stopped_in_a_change_is_named() {
    let here = loopback();
    let first = lease(&[here], 1).expect("a slot");
    let held = first.shared[0].locks.hold().expect("free");
    let error = lease(&[here], 1).expect_err("held").to_string();
    assert!(error.contains("is stopped"), "{error}");
    drop(held);
    assert_eq!(lease(&[here], 1).expect("a slot").first(), 1);
}
