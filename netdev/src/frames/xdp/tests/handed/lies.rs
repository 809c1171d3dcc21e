//! Agents that do not keep to it: a program gets nothing, and keeps nothing.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::frames::xdp::handing::open_for_another;
use crate::handed::Answer;
use crate::handed::testing::{answer, grant, succeeds};
use crate::kernel::bpf::Map;
use crate::kernel::descriptors::patiently;

/// The child.
const TEST: &str = "frames::xdp::tests::handed::lies::in_a_process_that_is_told_lies";
const CHUNKS: u32 = 64;
const GRANTED: Granted = Granted::Xdp { chunks: CHUNKS };

/// The program's error, and an agent's behaviour with a connection. The namespaces are the
/// program's and its peer's.
type Lie = (&'static str, fn(OwnedFd, &NetNs, &NetNs));

const LIES: [Lie; 17] = [
    ("3 descriptors came with its answer, not 4", |connection, ns, _| {
        grant(&connection, GRANTED, &opened(ns, CHUNKS)[..3]);
    }),
    ("5 descriptors came with its answer, not 4", |connection, ns, _| {
        let mut descriptors = opened(ns, CHUNKS);
        descriptors.push(file());
        grant(&connection, GRANTED, &descriptors);
    }),
    ("it hands over packet, not afxdp", |connection, ns, _| {
        let packet = Request { backend: Backend::Packet, ..request(&v0_of(ns)) };
        let given = ns.run(|| give(&packet, &GiveLimits::default())).whole().expect("given");
        answer(&connection, &given.answer, &given.descriptors);
    }),
    ("does not say which rules", |connection, ns, _| {
        let silent = Answer { outcome: Ok(GRANTED), report: None };
        answer(&connection, &silent, &opened(ns, CHUNKS));
    }),
    ("a number of chunks that cannot be", |connection, ns, _| {
        grant(&connection, Granted::Xdp { chunks: 100 }, &opened(ns, CHUNKS));
    }),
    ("a number of chunks that cannot be", |connection, ns, _| {
        grant(&connection, Granted::Xdp { chunks: u32::MAX }, &opened(ns, CHUNKS));
    }),
    ("no AF_XDP socket", |connection, ns, _| {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        grant(&connection, GRANTED, &with(ns, 0, socket.into()));
    }),
    ("no AF_XDP socket", |connection, ns, _| grant(&connection, GRANTED, &with(ns, 0, file()))),
    ("another network namespace", |connection, ns, other| {
        grant(&connection, GRANTED, &with(ns, 0, opened(other, CHUNKS).remove(0)));
    }),
    ("a socket that is not bound", |connection, ns, _| {
        grant(&connection, GRANTED, &with(ns, 0, ns.run(XdpSocket::new).expect("a socket").into()));
    }),
    ("rings of another size", |connection, ns, _| {
        let mut larger = opened(ns, 2 * CHUNKS);
        larger[1] = memory_file(c"test", Umem::bytes(2 * CHUNKS)).expect("a file");
        grant(&connection, GRANTED, &larger);
    }),
    ("no memory of constant size for its chunks", |connection, ns, _| {
        grant(&connection, GRANTED, &opened(ns, 2 * CHUNKS));
    }),
    ("no memory of constant size for its chunks", |connection, ns, _| {
        // It could shrink, and so end the process that reads it.
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("frames", flags).expect("a file");
        rustix::fs::ftruncate(&memory, Umem::bytes(2 * CHUNKS) as u64).expect("as long");
        grant(&connection, GRANTED, &with(ns, 1, memory));
    }),
    ("no program of v0", |connection, ns, _| grant(&connection, GRANTED, &with(ns, 2, file()))),
    ("no program of v0", |connection, ns, _| {
        let mut asm = Asm::default();
        asm.mov_imm(Reg::R0, prog::XDP_PASS.cast_signed());
        asm.exit();
        let program = Program::load("other", &asm.assemble()).expect("loaded");
        let link = ns.run(|| program.attach_generic(1)).expect("attached to lo");
        grant(&connection, GRANTED, &with(ns, 2, link.into()));
    }),
    ("no map of an Ethernet address", |connection, ns, _| {
        grant(&connection, GRANTED, &with(ns, 3, super::super::super::test_map().expect("a map")));
    }),
    ("cannot map the interface's Ethernet address", |connection, ns, _| {
        let counters = Map::counters("test", 1).expect("a map");
        let counters = counters.as_fd().try_clone_to_owned().expect("a copy");
        grant(&connection, GRANTED, &with(ns, 3, counters));
    }),
];

fn v0_of(ns: &NetNs) -> Interface {
    ns.run(|| Interface::by_name("v0")).expect("v0")
}

fn file() -> OwnedFd {
    File::open("/proc/self/exe").expect("a file").into()
}

/// An honest agent's descriptors.
fn opened(ns: &NetNs, chunks: u32) -> Vec<OwnedFd> {
    let config = config_with(|xdp| xdp.ring_frames = chunks);
    let own: Vec<IpAddr> = v0_of(ns).addresses.iter().map(|(address, _)| *address).collect();
    let open = || {
        let opened = open_for_another(&v0_of(ns), &own[..1], &config, Shards::ONE);
        opened.map_err(|e| io::Error::from_raw_os_error(e.errno()))
    };
    let opened = ns.run(|| patiently(libc::EBUSY, Duration::from_millis(900), open));
    opened.expect("a port").1
}

/// The same with another descriptor at a place.
fn with(ns: &NetNs, at: usize, other: OwnedFd) -> Vec<OwnedFd> {
    let mut descriptors = opened(ns, CHUNKS);
    descriptors[at] = other;
    descriptors
}

#[test]
fn a_program_that_is_told_lies_has_no_port_and_keeps_nothing() {
    let pair = or_skip!(Pair::new_seeing());
    or_skip!(give_in(&pair.a, &request(&v0_of(&pair.a)), &GiveLimits::default()).whole());
    let [a, b] = [&pair.a, &pair.b].map(|ns| NetNs::at(&ns.path()).expect("the same"));
    let served = AtomicUsize::new(0);
    let agent = Server::new(move |connection| {
        LIES[served.fetch_add(1, Ordering::Relaxed)].1(connection, &a, &b);
    });
    let (child, _socket) = pair.a.run(|| child(TEST, &agent, 1)).expect("a child");
    succeeds(child);
    detaches(&pair.a);
    detaches(&pair.b);
}

/// The child.
#[test]
fn in_a_process_that_is_told_lies() {
    let Some((_, path)) = expected_of(TEST) else { return };
    assert_unprivileged();
    let v0 = Interface::by_name("v0").expect("v0");
    for (what, _) in LIES {
        let before = descriptors();
        let named = choose_from(&v0, Some(Backend::Xdp), 1, &Agent::at(&path));
        let error = named.expect_err(what);
        assert_eq!(error.errno(), libc::EPERM);
        let error = error.to_string();
        assert!(error.contains(what) && error.contains("--cap-add NET_RAW"), "{what}: {error}");
        assert_eq!(descriptors(), before, "{what}");
    }
    println!("everything was exchanged");
}
