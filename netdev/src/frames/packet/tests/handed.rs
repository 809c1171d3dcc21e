//! Ports that an agent opened: in a process without privileges, and what such a process cannot do.

mod lies;

use super::super::tx::FrameSink as _;
use super::*;
use crate::choose::give::{GiveLimits, give};
use crate::handed::testing::{
    ASK_NEW_MAC, ASK_OTHER, NEW_MAC, Parent, Server, child, choose_from, descriptors, expected_of,
    serve,
};
use crate::handed::{Agent, Code, Request};
use crate::kernel::descriptors::attach_filter;
use crate::testing::parts::{A, B, SPARE, assert_unprivileged, exchange, exchange_all};
use crate::testing::sides::{SELECTOR, open};
use crate::{AnyPort, Backend, Shards};

const STRANGER: [u8; 6] = [2, 0, 0, 0, 9, 0x99];

/// A child gets `count` ports from an agent and exchanges datagrams with a port of this process.
fn another_process_gets(count: usize) -> Result<(), String> {
    let pair = Pair::new_seeing().map_err(|e| e.to_string())?;
    pair.a.sh(&format!("ip address add {SPARE}/24 dev v0"));
    let agent = Server::honest(&pair.a);
    let mut peer = open(&pair.b, Backend::Udp, &B).map_err(|e| e.to_string())?;
    let test = "frames::packet::tests::handed::in_a_process_without_privileges";
    let child = pair.a.run(|| child(test, &agent, count)).map_err(|e| e.to_string())?;
    serve(&pair, &mut peer, child, || strays(&pair));
    // The child has gone; only the objects that the agent keeps are left.
    let given = std::mem::take(&mut *agent.given.lock().expect("no panic"));
    assert_eq!(given.len(), 1);
    let (connection, kept) = &given[0];
    assert_eq!((kept.len(), packet_sockets(&pair.a)), (count, count));
    let received = crate::handed::receive_request(connection);
    assert!(received.is_err_and(|e| e.kind() == io::ErrorKind::UnexpectedEof), "its end");
    drop(given);
    no_packet_sockets(&pair.a);
    Ok(())
}

/// Waits until a namespace has no packet socket any more. A process that another test is just
/// starting has copies of descriptors for a moment.
fn no_packet_sockets(ns: &NetNs) {
    wait_until("no packet sockets stay", || packet_sockets(ns) == 0);
}

/// The packet sockets of a namespace.
fn packet_sockets(ns: &NetNs) -> usize {
    let table = ns.run(|| std::fs::read_to_string("/proc/thread-self/net/packet"));
    table.expect("a table").lines().count() - 1
}

/// Sends datagrams that are not for the child's ports, which its interface receives: to another
/// station, to another address, and to another UDP port.
pub(crate) fn strays(pair: &Pair) {
    pair.b.run(|| {
        let socket = PacketSocket::new().expect("a socket");
        socket.bind(Interface::by_name("v0").expect("v0").index).expect("bound");
        let mut scratch = SendScratch::new();
        let mut sender = Transmit { socket: &socket, scratch: &mut scratch };
        for (mac, to, port_bit) in [(STRANGER, A[0], 0), (NEW_MAC, SPARE, 0), (NEW_MAC, A[0], 1)] {
            let spec = spec(B[0], to);
            let from = [2, 0, 0, 0, 9, 2];
            let template = FrameTemplate::new(from, mac, &spec, 0xc0de).expect("a family");
            let mut frame = vec![0; template.header_len() + 20];
            template.write(&mut frame, 20, 1);
            frame[37] ^= port_bit;
            for _ in 0..10 {
                sender.send_one(&frame).expect("sent");
            }
        }
    });
}

/// The child. Without an agent there is nothing to test.
#[test]
fn in_a_process_without_privileges() {
    let test = "frames::packet::tests::handed::in_a_process_without_privileges";
    let Some((count, path)) = expected_of(test) else { return };
    assert_unprivileged();
    assert_eq!(PacketSocket::new().expect_err("it is forbidden").raw_os_error(), Some(libc::EPERM));
    let v0 = Interface::by_name("v0").expect("v0");
    let before = descriptors();
    let (mut ports, choice) = choose_from(&v0, None, count, &Agent::at(&path)).expect("ports");
    assert_eq!((choice.backend, ports.len()), (Backend::Packet, count), "{choice}");
    assert!(choice.reason.contains(&format!("opened by the agent at {path}")), "{choice}");
    exchange_all(&mut ports, Backend::Packet);
    for port in &ports {
        cannot_be_changed(&socket_of(port));
    }
    let parent = Parent::of_this_process();
    // The locked filter follows the interface.
    parent.asked(ASK_NEW_MAC);
    exchange_all(&mut ports, Backend::Packet);
    gets_no_strays(&mut ports, &v0, || parent.asked(ASK_OTHER));
    // Its own mapping does not protect the ring.
    let sockets: Vec<PacketSocket> = ports.iter().map(socket_of).collect();
    drop(ports);
    sockets.iter().for_each(cannot_be_changed);
    drop(sockets);
    drop(parent);
    assert_eq!(descriptors(), before);
    println!("everything was exchanged");
}

fn socket_of(port: &AnyPort) -> PacketSocket {
    let AnyPort::Packet(port) = port else { panic!("{port:?} is another") };
    PacketSocket::from(port.io.as_fd().try_clone_to_owned().expect("a copy"))
}

/// A process that has the socket can change neither its filter nor the size of its memory.
fn cannot_be_changed(socket: &PacketSocket) {
    let errno = |result: io::Result<()>| result.expect_err("it is refused").raw_os_error();
    let all = [libc::sock_filter { code: libc::BPF_RET as u16, jt: 0, jf: 0, k: u32::MAX }];
    assert_eq!(errno(attach_filter(socket, &all)), Some(libc::EPERM));
    for (option, value) in [(libc::SO_DETACH_FILTER, 0), (libc::SO_LOCK_FILTER, 0)] {
        assert_eq!(errno(socket.set(libc::SOL_SOCKET, option, value)), Some(libc::EPERM));
    }
    if socket.packet_option(libc::PACKET_FANOUT).expect("a group") != 0 {
        assert_eq!(errno(socket.set_fanout_program(&all)), Some(libc::EPERM));
    }
    // It sends by each interface of its namespace.
    socket.send_by(1, &trial::super_packet()).expect("by loopback");
    let none =
        libc::tpacket_req { tp_block_size: 0, tp_block_nr: 0, tp_frame_size: 0, tp_frame_nr: 0 };
    let huge = libc::tpacket_req {
        tp_block_size: 1 << 20,
        tp_block_nr: 1 << 12,
        tp_frame_size: 1 << 16,
        tp_frame_nr: 1 << 16,
    };
    for (option, request) in
        [(libc::PACKET_RX_RING, none), (libc::PACKET_RX_RING, huge), (libc::PACKET_TX_RING, huge)]
    {
        assert_eq!(errno(socket.set_ring(option, &request)), Some(libc::EBUSY), "{option}");
    }
}

/// Promiscuous, other datagrams do not come: `exchange` knows its own.
fn gets_no_strays(ports: &mut [AnyPort], v0: &Interface, send_strays: impl Fn()) {
    for port in &*ports {
        let socket = socket_of(port);
        socket.see_all(v0.index).expect("it takes no privilege");
        // Neither does another interface of the namespace; those of a group do not move.
        let moved = socket.bind(1).and_then(|()| socket.bind(v0.index));
        assert_eq!(moved.is_ok(), socket.packet_option(libc::PACKET_FANOUT).expect("a group") == 0);
    }
    let malformed = |ports: &[AnyPort]| ports.iter().map(|p| p.stats().rx_malformed).sum::<u64>();
    let before = malformed(ports);
    send_strays();
    exchange(ports, Backend::Packet, 0, 0);
    assert_eq!(malformed(ports), before);
}

#[test]
fn a_process_without_privileges_gets_a_port() {
    or_skip!(another_process_gets(1));
}

#[test]
fn a_process_without_privileges_gets_two_that_share_what_arrives() {
    or_skip!(another_process_gets(2));
}

#[test]
fn an_agent_gives_no_more_than_its_limits_and_what_the_kernel_has() {
    let pair = or_skip!(Pair::new());
    let v0 = pair.a.run(|| Interface::by_name("v0")).expect("v0");
    let limits = GiveLimits { ring_frames_max: 45, tx_buffer_bytes_max: 1 << 16 };
    let asked = Request {
        backend: Backend::Packet,
        interface: v0.index,
        addresses: A.map(ip).to_vec(),
        shards: Shards { shared: false, first: 0, count: 2, selector: SELECTOR },
        ring_frames: Some(u32::MAX),
        tx_buffer_bytes: Some(u32::MAX),
        despite_rules: true,
        wait_ms: None,
    };
    let given = or_skip!(pair.a.run(|| give(&asked, &limits)).whole());
    assert_eq!((given.descriptors.len(), given.kept.len()), (2, 2));
    let rings: usize = given.kept.iter().map(crate::Kept::ring_bytes).sum();
    assert_eq!(limits.memory_bytes(&asked), rings);
    assert_eq!(rings, 6 << 20, "three blocks of 1 MiB each");
    for fd in &given.descriptors {
        let buffer = rustix::net::sockopt::socket_send_buffer_size(fd).expect("a socket");
        assert_eq!(buffer, 2 << 16, "the kernel doubles it");
    }
    drop(given);
    no_packet_sockets(&pair.a);
    for (change, code) in [
        (Request { interface: v0.index + 1000, ..asked.clone() }, Code::Interface),
        (Request { addresses: vec![ip("10.9.0.99")], ..asked.clone() }, Code::Interface),
        (Request { backend: Backend::Udp, ..asked.clone() }, Code::Unsupported),
        (Request { interface: 1, ..asked.clone() }, Code::Interface),
    ] {
        let refused = pair.a.run(|| give(&change, &limits));
        assert_eq!(refused.answer.outcome.expect_err("refused").code, code);
        assert!(refused.descriptors.is_empty() && refused.kept.is_empty());
    }
    // IPv6 addresses go with the link.
    let asked = Request { addresses: vec![ip(A[0])], ..asked };
    pair.a.sh("ip link set v0 down");
    let refused = pair.a.run(|| give(&asked, &limits)).answer.outcome.expect_err("it is down");
    assert_eq!((refused.code, refused.hint.contains("ip link set v0 up")), (Code::Failed, true));
    no_packet_sockets(&pair.a);
}
