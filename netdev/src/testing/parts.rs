//! Ports that are assembled without privileges: the exchange with them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::kernel::descriptors;
use crate::port::error::OpenError;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{SELECTOR, acquire, ip, spec};
use crate::testing::testns::{Pair, or_skip};
use crate::udp::UdpPort;
use crate::{AnyPort, Backend, Interface, Parts, PathId, PathSpec, Port, RxDatagram, Shards};

pub(crate) const A: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub(crate) const B: [&str; 2] = ["10.9.0.2", "fd09::2"];
/// An address of the child's namespace that no port has.
pub(crate) const SPARE: &str = "10.9.0.11";
/// As long as a RoCEv2 datagram with a payload of 4096 bytes; and shorter ones.
const LENS: [usize; 4] = [4116, 4116, 1044, 20];

/// Sends received datagrams back.
pub(crate) fn echo(pair: &Pair, port: &mut AnyPort) {
    descriptors::wait_readable(port.wait_fd(), 5).expect("poll");
    let mut got: Vec<(IpAddr, IpAddr, Vec<u8>)> = Vec::new();
    port.receive_by(64, &mut |d| got.push((d.dst, d.src, d.payload.to_vec()))).expect("alive");
    port.maintain();
    for (local, remote, payload) in got {
        let spec = PathSpec { local, remote, ..spec(B[0], A[0]) };
        let path = pair.b.run(|| port.add_path(&spec)).expect("a path").id;
        port.reserve(path, payload.len()).expect("room").buf.copy_from_slice(&payload);
        port.commit();
        port.flush(crate::testing::no_failure);
        port.remove_path(path);
    }
}

pub(crate) fn assert_unprivileged() {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(line("Uid:"), ["65534"; 4]);
    assert_eq!(line("Gid:"), ["65534"; 4]);
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(line(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(line("NoNewPrivs:"), ["1"]);
}

/// Has each port [`exchange`] datagrams over both families.
pub(crate) fn exchange_all(ports: &mut [AnyPort], backend: Backend) {
    for (number, at) in (0..ports.len()).flat_map(|number| [(number, 0), (number, 1)]) {
        exchange(ports, backend, number, at);
    }
}

/// Sends datagrams from port `number` until all leave directly and come back. They must come to the
/// same port, as their byte says; on `afxdp`, to any.
pub(crate) fn exchange(ports: &mut [AnyPort], backend: Backend, number: usize, at: usize) {
    let path = ports[number].add_path(&spec(A[at], B[at])).expect("a path").id;
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < end, "{backend} never sends directly to {}", B[at]);
        let before = ports[number].stats();
        let sent = send(&mut ports[number], path, number as u8);
        let mut got = receive(ports, sent.len(), backend != Backend::Xdp);
        // Late replies of an earlier exchange come first.
        let is_known =
            |(_, src, dst): &Got| [0, 1].iter().any(|at| (*src, *dst) == (ip(B[*at]), ip(A[*at])));
        assert!(got.iter().all(is_known), "other addresses");
        let byte = |(payload, ..): &Got| payload[usize::from(SELECTOR)];
        got.retain(|got| got.1 == ip(B[at]) && byte(got) == number as u8);
        assert!(got.iter().all(|(payload, ..)| sent.contains(payload)), "other bytes");
        let after = ports[number].stats();
        assert_eq!(after.tx_failed, 0);
        if got.len() == sent.len() && after.tx_unresolved == before.tx_unresolved {
            break;
        }
    }
    ports[number].remove_path(path);
}

fn send(port: &mut AnyPort, path: PathId, byte: u8) -> Vec<Vec<u8>> {
    let payloads = LENS.map(|len| {
        let mut payload: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
        payload[usize::from(SELECTOR)] = byte;
        port.reserve(path, len).expect("room").buf.copy_from_slice(&payload);
        port.commit();
        payload
    });
    port.flush(crate::testing::no_failure);
    payloads.to_vec()
}

pub(crate) type Got = (Vec<u8>, IpAddr, IpAddr);

/// Receives until `want` datagrams have arrived, or for some time; each at the port of its byte, if
/// they are `steered`.
pub(crate) fn receive(ports: &mut [AnyPort], want: usize, steered: bool) -> Vec<Got> {
    let end = Instant::now() + Duration::from_millis(500);
    let mut got = Vec::new();
    while got.len() < want && Instant::now() < end {
        for (number, port) in ports.iter_mut().enumerate() {
            let sink = |d: RxDatagram<'_>| {
                let byte = d.payload[usize::from(SELECTOR)];
                assert!(!steered || usize::from(byte) == number, "{number}, not {byte}");
                got.push((d.payload.to_vec(), d.src, d.dst));
            };
            port.receive(64, sink).expect("alive");
            port.maintain();
            port.flush(crate::testing::no_failure);
        }
    }
    got
}

#[test]
fn parts_are_those_of_one_backend_and_one_network_namespace() {
    let pair = or_skip!(Pair::new());
    let v0 = || Interface::by_name("v0").expect("v0");
    for backend in [Backend::Udp, Backend::Packet, Backend::Xdp] {
        // One port each: the addresses of another are not free at once when it is closed.
        let acquire = |own: &str| -> Result<Parts, OpenError> {
            let acquired = pair.a.run(|| acquire(&v0(), backend, &[ip(own)], Shards::ONE));
            acquired.map(|mut parts| parts.pop().expect("one was asked for"))
        };
        let parts = or_skip!(acquire(A[0]));
        let elsewhere = pair.b.run(|| AnyPort::assemble(parts));
        let error = elsewhere.expect_err("not there").to_string();
        assert!(error.contains("another network namespace"), "{backend}: {error}");
        let parts = or_skip!(acquire(A[1]));
        let wrong = match backend {
            Backend::Udp => PacketPort::assemble(parts).map(drop),
            Backend::Packet => XdpPort::assemble(parts).map(drop),
            _ => UdpPort::assemble(parts).map(drop),
        };
        let error = wrong.expect_err("of another backend").to_string();
        assert!(error.contains(&format!("the parts are those of {backend}")), "{error}");
    }
}
