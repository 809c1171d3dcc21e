//! Ports that a process without privileges assembles of received descriptors.

#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::kernel::descriptors;
use crate::testing::sides::{SELECTOR, acquire, ip, open, open_once, spec};
use crate::testing::testns::{Pair, drop_privileges, needs, or_skip};
use crate::udp::UdpPort;
use crate::{
    AnyPort, Backend, BackendParts, Descriptor, Interface, Manifest, Parts, PathId, PathSpec, Port,
    RxDatagram, Shards,
};

pub(crate) const A: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub(crate) const B: [&str; 2] = ["10.9.0.2", "fd09::2"];
/// An address of the child's namespace that no port has.
pub(crate) const SPARE: &str = "10.9.0.11";
/// The most descriptors and bytes of one message.
const FDS_MAX: usize = 16;
const MANIFEST_BYTES_MAX: usize = 4096;
/// As long as a RoCEv2 datagram with a payload of 4096 bytes; and shorter ones.
const LENS: [usize; 4] = [4116, 4116, 1044, 20];

fn v0() -> Interface {
    Interface::by_name("v0").expect("v0")
}

/// Sends parts: their manifest, with their descriptors.
fn send_parts(to: impl AsFd, parts: &Parts) {
    let manifest = serde_json::to_vec(parts.manifest()).expect("plain values");
    assert!(manifest.len() <= MANIFEST_BYTES_MAX);
    let fds: Vec<_> = parts.descriptors().map(|(_, fd)| fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "room for all");
    let sent = sendmsg(to, &[IoSlice::new(&manifest)], &mut control, SendFlags::empty());
    assert_eq!(sent.expect("sent"), manifest.len());
}

fn receive_parts(from: impl AsFd) -> (Manifest, Vec<OwnedFd>) {
    let mut manifest = vec![0; MANIFEST_BYTES_MAX];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(from, &mut [IoSliceMut::new(&mut manifest)], &mut control, RecvFlags::CMSG_CLOEXEC);
    manifest.truncate(received.expect("parts").bytes);
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    (serde_json::from_slice(&manifest).expect("a manifest"), fds)
}

/// This program again, without any privilege, with one end of a socket as its input.
fn child(backend: Backend, count: usize) -> std::io::Result<(Child, UnixStream)> {
    let (ours, its) = UnixStream::pair()?;
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "testing::parts::in_a_process_without_privileges", "--nocapture"])
        .env("ROCINANTE_TEST_PARTS", format!("{backend} {count}"))
        .stdin(OwnedFd::from(its))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    drop_privileges(&mut command);
    Ok((command.spawn()?, ours))
}

/// A child assembles `count` ports and exchanges datagrams with a port of this process.
fn another_process_assembles(backend: Backend, count: usize) -> Result<(), String> {
    let pair = Pair::new().map_err(|e| e.to_string())?;
    pair.a.sh(&format!("ip address add {SPARE}/24 dev v0"));
    if backend == Backend::Xdp && count > 1 {
        needs(&["ethtool"]).map_err(|e| e.to_string())?;
        pair.a.sh(&format!("ethtool -L v0 rx {count} tx {count}"));
        pair.b.sh(&format!("ethtool -L v0 rx {count} tx {count}"));
    }
    let shards = Shards { shared: false, first: 0, count, selector: SELECTOR };
    let parts =
        pair.a.run(|| acquire(&v0(), backend, &A.map(ip), shards)).map_err(|e| e.to_string())?;
    let mut peer = open(&pair.b, Backend::Udp, &B).map_err(|e| e.to_string())?;
    let (child, socket) = pair.a.run(|| child(backend, count)).map_err(|e| e.to_string())?;
    let mut child = child;
    for parts in parts {
        // The child says that it is ready for the next message, because those of a stream may
        // become one. If it has ended, its output says why.
        if (&socket).read_exact(&mut [0]).is_ok() {
            send_parts(&socket, &parts);
        }
        // This process keeps nothing: the child alone has the port.
        drop(parts);
    }
    socket.set_nonblocking(true).map_err(|e| e.to_string())?;
    let end = Instant::now() + Duration::from_secs(30);
    while child.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < end, "the child does not end");
        echo(&pair, &mut peer);
        // It asks for another Ethernet address of its interface.
        if matches!((&socket).read(&mut [0]), Ok(1)) {
            pair.a.sh("ip link set v0 address 02:00:00:00:09:77");
            pair.b.sh("ip neigh flush dev v0");
            (&socket).write_all(&[1]).map_err(|e| e.to_string())?;
        }
    }
    let output = child.wait_with_output().expect("its output");
    let text = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
    assert!(
        output.status.success() && text[0].contains("everything was exchanged"),
        "{}",
        text.concat()
    );
    Ok(())
}

/// Sends received datagrams back.
pub(crate) fn echo(pair: &Pair, port: &mut AnyPort) {
    descriptors::wait_readable(port.wait_fd(), 5).expect("poll");
    let mut got: Vec<(IpAddr, IpAddr, Vec<u8>)> = Vec::new();
    port.receive(64, |d| got.push((d.dst, d.src, d.payload.to_vec()))).expect("alive");
    port.maintain();
    for (local, remote, payload) in got {
        let spec = PathSpec { local, remote, ..spec(B[0], A[0]) };
        let path = pair.b.run(|| port.add_path(&spec)).expect("a path").id;
        port.reserve(path, payload.len()).expect("room").buf.copy_from_slice(&payload);
        port.commit();
        port.flush(|failure| panic!("{failure:?}"));
        port.remove_path(path);
    }
}

/// The child. Without parts to expect there is nothing to test.
#[test]
fn in_a_process_without_privileges() {
    let Ok(expected) = std::env::var("ROCINANTE_TEST_PARTS") else { return };
    let (backend, count) = expected.split_once(' ').expect("two words");
    let (backend, count): (Backend, usize) = (backend.parse().unwrap(), count.parse().unwrap());
    assert_unprivileged();
    let v0 = v0();
    let opened = open_once(&v0, backend, &[ip(SPARE)], count).map(drop);
    if backend == Backend::Udp {
        opened.expect("it needs no privilege");
    } else {
        assert_eq!(opened.expect_err("it needs a privilege").errno(), libc::EPERM);
    }
    let input = std::io::stdin().as_fd().try_clone_to_owned().expect("an input");
    let socket = UnixStream::from(input);
    let mut ports: Vec<AnyPort> = (0..count)
        .map(|_| {
            (&socket).write_all(&[1]).expect("the parent waits");
            let (manifest, fds) = receive_parts(&socket);
            assert_eq!(manifest.backend(), backend);
            // SAFETY: the parent made each port's parts for this process alone.
            let parts =
                unsafe { Parts::from_descriptors(manifest, fds) }.expect("the parent's parts");
            AnyPort::assemble(parts).expect("a port")
        })
        .collect();
    for new_address in [false, true] {
        if new_address {
            (&socket).write_all(&[1]).expect("the parent listens");
            (&socket).read_exact(&mut [0]).expect("its answer");
        }
        exchange_all(&mut ports, backend);
    }
    println!("everything was exchanged");
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
    port.flush(|failure| panic!("{failure:?}"));
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
            port.flush(|failure| panic!("{failure:?}"));
        }
    }
    got
}

/// One test for each backend and number of ports.
macro_rules! sent_to_another {
    ($($name:ident: $backend:ident, $count:literal;)+) => {$(
        #[test]
        fn $name() {
            or_skip!(another_process_assembles(Backend::$backend, $count));
        }
    )+};
}

sent_to_another! {
    a_process_without_privileges_assembles_udp: Udp, 1;
    a_process_without_privileges_assembles_two_of_udp: Udp, 2;
    a_process_without_privileges_assembles_packet: Packet, 1;
    a_process_without_privileges_assembles_two_of_packet: Packet, 2;
    a_process_without_privileges_assembles_afxdp: Xdp, 1;
    a_process_without_privileges_assembles_two_of_afxdp: Xdp, 2;
}

#[test]
fn descriptors_that_are_not_what_the_manifest_says_are_refused() {
    let pair = or_skip!(Pair::new());
    let own = A.map(ip);
    for backend in [Backend::Udp, Backend::Packet, Backend::Xdp] {
        let acquired = pair.a.run(|| acquire(&v0(), backend, &own, Shards::ONE));
        let parts = or_skip!(acquired).pop().expect("one was asked for");
        let kinds: Vec<Descriptor> = parts.descriptors().map(|(kind, _)| kind).collect();
        assert_eq!(kinds[kinds.len() - 2..], own.map(Descriptor::Udp), "{backend}");
        let manifest = parts.manifest().clone();
        let copies = || -> Vec<OwnedFd> {
            let copy = |(_, fd): (_, std::os::fd::BorrowedFd<'_>)| fd.try_clone_to_owned();
            parts.descriptors().map(copy).collect::<Result<_, _>>().expect("copies")
        };
        let refused = |manifest: &Manifest, fds: Vec<OwnedFd>, why: &str| {
            // SAFETY: no port is made of them: they are refused before anything is mapped.
            let parts = unsafe { Parts::from_descriptors(manifest.clone(), fds) };
            let error = parts.and_then(AnyPort::assemble).expect_err(why).to_string();
            assert!(error.contains("in the order of the manifest"), "{backend}, {why}: {error}");
        };
        let mut fewer = copies();
        fewer.pop();
        refused(&manifest, fewer, "one is missing");
        refused(&Manifest { addresses: vec![], ..manifest.clone() }, vec![], "no address");
        let mut more = copies();
        more.extend(copies().pop());
        refused(&manifest, more, "one too many");
        let mut turned = copies();
        turned.reverse();
        refused(&manifest, turned, "in another order");
        if let BackendParts::Xdp { queue, chunks, zero_copy } = manifest.backend {
            // Something else in the place of the map.
            let at = kinds.iter().position(|kind| *kind == Descriptor::Mac).expect("a map");
            let mut other = copies();
            other[at] = std::fs::File::open("/proc/self/exe").expect("a file").into();
            // SAFETY: no port is made of them: the map is refused.
            let parts = unsafe { Parts::from_descriptors(manifest.clone(), other) };
            let error = AnyPort::assemble(parts.expect("sockets and memory")).expect_err("no map");
            assert!(error.to_string().contains("the interface's Ethernet address"), "{error}");
            for chunks in [0, chunks - 1, 2 * chunks, u32::MAX] {
                let backend = BackendParts::Xdp { queue, chunks, zero_copy };
                refused(&Manifest { backend, ..manifest.clone() }, copies(), "another size");
            }
        }
        // SAFETY: no port is made of them: assembling fails before anything is mapped.
        let elsewhere = unsafe { Parts::from_descriptors(manifest.clone(), copies()) };
        let elsewhere = elsewhere.expect("they are");
        let error = pair.b.run(|| AnyPort::assemble(elsewhere)).expect_err("not there").to_string();
        assert!(error.contains("another network namespace"), "{backend}: {error}");
        // SAFETY: as above.
        let parts = unsafe { Parts::from_descriptors(manifest, copies()) }.expect("they are");
        let wrong = match backend {
            Backend::Udp => PacketPort::assemble(parts).map(drop),
            Backend::Packet => XdpPort::assemble(parts).map(drop),
            _ => UdpPort::assemble(parts).map(drop),
        };
        let error = wrong.expect_err("of another backend").to_string();
        assert!(error.contains(&format!("the parts are those of {backend}")), "{error}");
    }
}
