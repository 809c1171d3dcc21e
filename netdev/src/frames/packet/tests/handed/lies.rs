//! Agents that do not keep to it: a program gets `udp`, and keeps nothing.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::choose::policy::AuditVerdict;
use crate::frames::packet::handing::open_for_another;
use crate::frames::packet::ring::RingGeometry;
use crate::handed::testing::{answer, grant, request, say, succeeds};
use crate::handed::{
    Answer, Granted, MESSAGE_BYTES_MAX, Refused, Report, ReportedRule, Ring, receive_request,
    send_answer,
};
use crate::kernel::descriptors::wait_readable;

/// The child.
const TEST: &str = "frames::packet::tests::handed::lies::in_a_process_that_is_told_lies";

/// The program's error, and an agent's behaviour with a connection. The namespaces are the
/// program's and its peer's.
type Lie = (&'static str, fn(OwnedFd, &NetNs, &NetNs));

const LIES: [Lie; 23] = [
    ("it hung up", |connection, _, _| drop(connection)),
    ("it hung up", |connection, _, _| {
        request(&connection).expect("a request");
    }),
    ("it does not answer in time", |connection, _, _| {
        request(&connection).expect("a request");
        // Until the program goes.
        wait_readable(&connection, 10_000).expect("poll");
        assert!(receive_request(&connection).is_err());
    }),
    ("no answer", |connection, _, _| say(&connection, b"\0\x01\x02")),
    ("no answer", |connection, _, _| {
        let whole = Answer { outcome: Ok(granted(15)), report: Some(Report::default()) }.encode();
        say(&connection, &whole[..whole.len() / 2]);
    }),
    ("too long", |connection, _, _| say(&connection, &[b' '; MESSAGE_BYTES_MAX + 1])),
    ("speaks version 7", |connection, _, _| say(&connection, b"{\"version\":7,\"gift\":{}}")),
    ("neither grants nor refuses", |connection, _, _| say(&connection, b"{\"version\":1}")),
    ("refuses: not you: go away", |connection, _, _| {
        let refused = Refused::new(Code::Forbidden, "not you", "go away");
        answer(&connection, &Answer::refusal(refused), &[]);
    }),
    ("refuses: too often", |connection, _, _| {
        // It neither reads the request nor waits for it.
        let refused = Answer::refusal(Refused::new(Code::Busy, "too often", ""));
        send_answer(&connection, &refused, &[]).expect("sent");
    }),
    ("0 descriptors came with its answer, not 1", |connection, _, _| {
        grant(&connection, granted(15), &[]);
    }),
    ("2 descriptors came with its answer, not 1", |connection, ns, _| {
        let sockets = [honest(ns, 15), honest(ns, 15)];
        grant(&connection, granted(15), &sockets.map(|(socket, _)| socket));
    }),
    ("1 descriptors came with its answer, not 0", |connection, ns, _| {
        let refused = Answer::refusal(Refused::new(Code::Busy, "no", ""));
        answer(&connection, &refused, &[honest(ns, 15).0]);
    }),
    ("no packet socket", |connection, _, _| {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        grant(&connection, granted(15), &[socket.into()]);
    }),
    ("no packet socket", |connection, _, _| {
        let file = std::fs::File::open("/proc/self/exe").expect("a file");
        grant(&connection, granted(15), &[file.into()]);
    }),
    ("another network namespace", |connection, _, other| {
        let socket = other.run(|| {
            let (v0, config) = (Interface::by_name("v0").expect("v0"), PortConfig::default());
            open_for_another(&v0, &B.map(ip), &config, Shards::ONE).expect("sockets").1.remove(0)
        });
        grant(&connection, granted(255), &[socket]);
    }),
    ("not bound to v0", |connection, ns, _| {
        let (socket, _kept) = honest(ns, 15);
        let socket = PacketSocket::from(socket);
        socket.bind(1).expect("loopback");
        grant(&connection, granted(15), &[socket.into()]);
    }),
    ("other options", |connection, ns, _| {
        let socket = ns.run(|| {
            let kind = rustix::net::SocketType::DGRAM;
            rustix::net::socket(rustix::net::AddressFamily::PACKET, kind, None).expect("one")
        });
        grant(&connection, granted(15), &[socket]);
    }),
    ("filter is not locked", |connection, ns, _| {
        let parts = ns.run(|| {
            let (v0, config) = (Interface::by_name("v0").expect("v0"), config(15));
            let layout = RingGeometry::new(15, sys::page_bytes());
            let program = filter::program(&A.map(ip), Shards::ONE);
            let sockets = open::open_sockets(&v0, &config, Shards::ONE, &program).expect("one");
            open::bind(&sockets, &v0, layout, Shards::ONE).expect("bound");
            sockets
        });
        grant(&connection, granted(15), &parts.into_iter().map(OwnedFd::from).collect::<Vec<_>>());
    }),
    ("another geometry", |connection, ns, _| {
        let Granted::Packet { ring } = granted(15) else { unreachable!() };
        let ring = Ring { frame_bytes: ring.frame_bytes / 2, frames: ring.frames * 2, ..ring };
        grant(&connection, Granted::Packet { ring }, &[honest(ns, 15).0]);
    }),
    ("cannot make the receive ring", |connection, ns, _| {
        grant(&connection, granted(30), &[honest(ns, 15).0]);
    }),
    ("does not say which rules", |connection, ns, _| {
        let silent = Answer { outcome: Ok(granted(15)), report: None };
        answer(&connection, &silent, &[honest(ns, 15).0]);
    }),
    // Last: a program that names the backend gets it.
    ("would bypass a wall, says the agent", |connection, ns, _| {
        let wall = ReportedRule { what: "a wall".into(), packet_bypasses: true };
        let report = Some(Report { rules: vec![wall], unseen: Vec::new() });
        let careless = Answer { outcome: Ok(granted(15)), report };
        answer(&connection, &careless, &[honest(ns, 15).0]);
    }),
];

fn config(ring_frames: u32) -> PortConfig {
    PortConfig { packet: PacketConfig { ring_frames }, ..PortConfig::default() }
}

fn granted(frames: u32) -> Granted {
    Granted::Packet { ring: RingGeometry::new(frames, sys::page_bytes()).into() }
}

fn honest(ns: &NetNs, frames: u32) -> (OwnedFd, Kept) {
    let opened = ns.run(|| {
        let v0 = Interface::by_name("v0").expect("v0");
        open_for_another(&v0, &A.map(ip), &config(frames), Shards::ONE)
    });
    let (_, mut sockets, mut kept) = opened.expect("sockets");
    (sockets.remove(0), kept.remove(0))
}

#[test]
fn a_program_that_is_told_lies_has_udp_and_keeps_nothing() {
    let pair = or_skip!(Pair::new_seeing());
    let [a, b] = [&pair.a, &pair.b].map(|ns| NetNs::at(&ns.path()).expect("the same"));
    let served = AtomicUsize::new(0);
    let agent = Server::new(move |connection| {
        // Each is asked twice: by a program that leaves the choice, and by one that does not.
        let number = served.fetch_add(1, Ordering::Relaxed) / 2;
        LIES[number].1(connection, &a, &b);
    });
    let (child, _socket) = pair.a.run(|| child(TEST, &agent, 1)).expect("a child");
    succeeds(child);
    no_packet_sockets(&pair.a);
}

/// The child.
#[test]
fn in_a_process_that_is_told_lies() {
    let Some((_, path)) = expected_of(TEST) else { return };
    assert_unprivileged();
    let v0 = Interface::by_name("v0").expect("v0");
    let absent = ("there is no agent at", format!("{path}.not"));
    let off = ("needs CAP_NET_RAW", Agent::off());
    let there = LIES.iter().map(|(what, _)| (*what, Agent::at(&path)));
    let all = [(absent.0, Agent::at(absent.1)), off].into_iter().chain(there);
    for (number, (what, agent)) in all.enumerate() {
        let before = descriptors();
        let chosen = choose_from(&v0, None, 1, &agent).expect("udp");
        assert_eq!(chosen.1.backend, Backend::Udp, "{what}: {}", chosen.1);
        let AuditVerdict::Unseen(_) = crate::choose::policy::audit(&v0).verdict(Backend::Packet)
        else {
            panic!("it sees all rules");
        };
        if number != 1 {
            assert!(chosen.1.reason.contains(what), "{what}: {}", chosen.1);
        }
        drop(chosen);
        let named = choose_from(&v0, Some(Backend::Packet), 1, &agent);
        if number == LIES.len() + 1 {
            let reason = named.expect("as named").1.reason;
            assert!(reason.contains("asked for; it bypasses a wall; opened by"), "{reason}");
        } else {
            let error = named.expect_err(what);
            assert_eq!(error.errno(), libc::EPERM);
            let error = error.to_string();
            assert!(error.contains(what) && error.contains("--cap-add NET_RAW"), "{error}");
        }
        assert_eq!(descriptors(), before, "{what}");
    }
    println!("everything was exchanged");
}
