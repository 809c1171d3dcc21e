//! The messages, and bytes that are none.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::net::{SendFlags, SocketFlags, SocketType, socketpair};

use super::*;
use crate::port::config::Shards;
use crate::port::contract::Backend;
use crate::testing::sides::ip;

fn request() -> Request {
    Request {
        backend: Backend::Packet,
        interface: 2,
        addresses: vec![ip("10.9.0.1"), ip("fd09::1")],
        shards: Shards { shared: false, first: 0, count: 2, selector: 5 },
        ring_frames: Some(128),
        tx_buffer_bytes: None,
        despite_rules: false,
        wait_ms: None,
    }
}

fn answers() -> [Answer; 4] {
    let ring = Ring { block_bytes: 1_044_480, blocks: 4, frame_bytes: 69_632, frames: 60 };
    let rule = |what: &str, packet_bypasses| ReportedRule { what: what.into(), packet_bypasses };
    let report = Report {
        rules: vec![rule("nft: rule 4 in chain out", true), rule("tc: tbf on v0", false)],
        unseen: vec!["the tcx programs of v0".into()],
    };
    [
        Answer { outcome: Ok(Granted::Packet { ring }), report: Some(Report::default()) },
        Answer { outcome: Err(Refused::new(Code::Bypasses, "rules", "")), report: Some(report) },
        Answer::refusal(Refused::new(Code::Busy, "as many as it may have", "close some")),
        Answer { outcome: Ok(Granted::Xdp { chunks: 256 }), report: Some(Report::default()) },
    ]
}

fn pair() -> (OwnedFd, OwnedFd) {
    let (family, flags) = (rustix::net::AddressFamily::UNIX, SocketFlags::CLOEXEC);
    socketpair(family, SocketType::SEQPACKET, flags, None).expect("sockets")
}

#[test]
fn what_is_written_is_read() {
    let one = request();
    assert_eq!(Request::decode(&one.encode().expect("within bounds")), Ok(one.clone()));
    let other = Request { despite_rules: true, shards: Shards::ONE, ring_frames: None, ..one };
    assert_eq!(Request::decode(&other.encode().expect("within bounds")), Ok(other.clone()));
    let of_afxdp = Request { backend: Backend::Xdp, ..other };
    assert_eq!(Request::decode(&of_afxdp.encode().expect("within bounds")), Ok(of_afxdp));
    for answer in answers() {
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }
}

#[test]
fn the_document_shows_messages_that_are_read() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/agent.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let mut blocks = text.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let asked = Request::decode(blocks.next().expect("a request").as_bytes());
    assert_eq!(asked, Ok(Request { ring_frames: None, ..request() }));
    let shown: Vec<&str> = blocks.next().expect("answers").split("\n{").collect();
    let [one, of_afxdp, other] = shown[..] else { panic!("{} answers", shown.len()) };
    assert_eq!(Answer::decode(one.as_bytes()).expect("an answer"), answers()[0]);
    let of_afxdp = Answer::decode(format!("{{{of_afxdp}").as_bytes()).expect("an answer");
    assert_eq!(of_afxdp, answers()[3]);
    let other = Answer::decode(format!("{{{other}").as_bytes()).expect("an answer");
    assert_eq!(other.outcome.expect_err("refused").code, Code::Bypasses);
    assert!(other.report.expect("rules").rules[0].packet_bypasses);
}

#[test]
fn unknown_fields_are_passed_over_and_other_versions_are_not() {
    let change = |bytes: &[u8], from: &str, to: &str| {
        let text = std::str::from_utf8(bytes).expect("text");
        assert!(text.contains(from), "{text}");
        text.replacen(from, to, 1).into_bytes()
    };
    let bytes = request().encode().expect("within bounds");
    assert_eq!(Request::decode(&change(&bytes, "{", "{\"later\":{\"a\":[1]},")), Ok(request()));
    let newer = change(&bytes, "\"version\":1", "\"version\":2");
    assert_eq!(Request::decode(&newer).expect_err("another version").code, Code::Version);
    let other = change(&bytes, "\"packet\"", "\"pigeon\"");
    assert_eq!(Request::decode(&other).expect_err("unknown").code, Code::Unsupported);
    let [granted, refused, ..] = answers().map(|answer| answer.encode());
    assert_eq!(Answer::decode(&change(&granted, "{", "{\"later\":0,")), Ok(answers()[0].clone()));
    let newer = change(&granted, "\"version\":1", "\"version\":2");
    assert!(Answer::decode(&newer).expect_err("another version").contains("version 2"));
    let code = change(&refused, "\"bypasses\"", "\"eclipse\"");
    let answer = Answer::decode(&code).expect("a refusal all the same");
    assert_eq!(answer.outcome.expect_err("refused").code, Code::Other);
    assert!(Answer::decode(&change(&refused, "\"refused\"", "\"granted\"")).is_err());
    assert!(Answer::decode(b"{\"version\":1}").is_err(), "neither");
}

#[test]
fn a_request_has_bounds() {
    let v4 = |i: usize| Ipv4Addr::from_bits(i as u32).into();
    let with = |count| Request { addresses: (0..count).map(v4).collect(), ..request() };
    assert!(with(ADDRESSES_MAX).encode().is_ok());
    let shards = |count| Request {
        shards: Shards { shared: false, first: 0, count, selector: 0 },
        ..request()
    };
    assert!(shards(SHARDS_MAX).encode().is_ok());
    let from = |first| Request {
        shards: Shards { shared: true, first, count: 2, selector: 5 },
        ..request()
    };
    let last = from(254).encode().expect("the last values");
    assert_eq!(Request::decode(&last).expect("a request").shards, from(254).shards);
    let many = [shards(0), shards(SHARDS_MAX + 1), shards(usize::MAX), from(255)];
    for bad in [with(0), with(ADDRESSES_MAX + 1)].into_iter().chain(many) {
        assert_eq!(bad.encode().expect_err("out of bounds").code, Code::Malformed);
    }
    let bytes = String::from_utf8(request().encode().expect("within bounds")).expect("text");
    let many = bytes.replace("\"count\":2", "\"count\":65");
    assert_eq!(Request::decode(many.as_bytes()).expect_err("too many").code, Code::Malformed);
    let long =
        Request { addresses: vec![Ipv6Addr::from_bits(!0).into(); ADDRESSES_MAX], ..request() };
    assert!(long.encode().expect("within bounds").len() < MESSAGE_BYTES_MAX);
}

#[test]
fn the_longest_answer_fits_and_still_says_that_a_rule_is_bypassed() {
    let long: String = "\"\\\u{7f}\n🦄".repeat(10_000);
    let rule = |i: usize| ReportedRule { what: format!("{i}{long}"), packet_bypasses: i == 70 };
    let report = Report { rules: (0..100).map(rule).collect(), unseen: vec![long.clone(); 100] };
    let refused = Refused::new(Code::Failed, long.clone(), long);
    let answer = Answer { outcome: Err(refused), report: Some(report) };
    let bytes = answer.encode();
    assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{}", bytes.len());
    let read = Answer::decode(&bytes).expect("an answer");
    assert_eq!(Answer::decode(&read.encode()), Ok(read.clone()), "it is cut once");
    let report = read.report.expect("a report");
    assert!(report.rules[0].packet_bypasses && report.rules[0].what.starts_with("70"));
    assert!(report.rules.last().expect("the rest").what.starts_with("93 more"));
    let texts = report.rules.iter().map(|rule| &rule.what).chain(&report.unseen);
    assert!(texts.flat_map(|text| text.chars()).all(|c| !c.is_control()));
}

#[test]
fn what_is_no_message_is_an_error() {
    let request = request().encode().expect("within bounds");
    let answers = answers().map(|answer| answer.encode());
    for whole in answers.iter().chain([&request]) {
        for end in 0..whole.len() {
            assert!(Request::decode(&whole[..end]).is_err(), "{end} bytes");
            assert!(Answer::decode(&whole[..end]).is_err(), "{end} bytes");
        }
    }
    // The request of another, with each byte changed in turn: read or refused, and no panic.
    let mut changed = request.clone();
    for at in 0..changed.len() {
        for bit in 0..8 {
            changed[at] ^= 1 << bit;
            let _ = (Request::decode(&changed), Answer::decode(&changed));
            changed[at] ^= 1 << bit;
        }
    }
    for nonsense in [&b""[..], b"[", b"null", b"{}", &[0xff; 100], &[b'['; MESSAGE_BYTES_MAX]] {
        assert!(Request::decode(nonsense).is_err() && Answer::decode(nonsense).is_err());
    }
    let huge = vec![b' '; MESSAGE_BYTES_MAX + 1];
    assert!(Request::decode(&huge).is_err() && Answer::decode(&huge).is_err());
}

#[test]
fn an_agent_reads_one_request_and_no_descriptor() {
    let (program, agent) = pair();
    let kind = |error: io::Error| error.kind();
    assert_eq!(receive_request(&agent).map_err(kind), Err(io::ErrorKind::WouldBlock));
    send_request(&program, &request()).expect("sent");
    assert_eq!(receive_request(&agent).expect("there"), Ok(request()));
    let send = |bytes: &[u8]| rustix::net::send(&program, bytes, SendFlags::empty());
    let refused = || receive_request(&agent).expect("there").expect_err("no request");
    send(&vec![b' '; MESSAGE_BYTES_MAX + 1]).expect("sent");
    assert!(refused().reason.contains("too long"));
    send(b"{").expect("sent");
    assert_eq!(refused().code, Code::Malformed);
    // The most descriptors of one message, of a socket whose end shows that they are closed.
    let (held, other) = pair();
    let bytes = request().encode().expect("within bounds");
    transport::tests::send_with(&program, &bytes, &[held.as_fd(); 200]);
    assert!(refused().reason.contains("no descriptors"));
    drop(held);
    // They stay where they are until the connection is closed.
    assert_eq!(receive_request(&other).map_err(kind), Err(io::ErrorKind::WouldBlock));
    assert!(refused().reason.contains("no descriptors"));
    drop(agent);
    assert_eq!(receive_request(&other).map_err(kind), Err(io::ErrorKind::UnexpectedEof));
    let (program, agent) = pair();
    drop(program);
    assert_eq!(receive_request(&agent).map_err(kind), Err(io::ErrorKind::UnexpectedEof));
    assert!(send_answer(&agent, &answers()[0], &[]).is_err(), "the program has gone");
}

#[test]
fn an_answer_comes_with_its_descriptors_in_their_order() {
    let (program, agent) = pair();
    let sockets = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    send_answer(&agent, &answers()[0], &sockets.each_ref().map(|s| s.as_fd())).expect("sent");
    let (answer, descriptors) = receive_answer(&program).expect("there").expect("an answer");
    assert_eq!(answer, answers()[0]);
    let got = descriptors.into_iter().map(|fd| UdpSocket::from(fd).local_addr().unwrap().port());
    assert_eq!(got.collect::<Vec<_>>(), sockets.map(|socket| socket.local_addr().unwrap().port()));
    // More than an answer can have are closed, all of them.
    let (held, other) = pair();
    transport::tests::send_with(&agent, &answers()[0].encode(), &[held.as_fd(); 200]);
    assert!(receive_answer(&program).expect("there").is_err());
    drop(held);
    assert!(receive_request(&other).is_err_and(|e| e.kind() == io::ErrorKind::UnexpectedEof));
    assert!(send_answer(&agent, &answers()[0], &[other.as_fd(); DESCRIPTORS_MAX + 1]).is_err());
}
