//! The messages between a program and an agent.
//!
//! Each message read is within its bounds, and is written and read again as the same.

use rocinante_netdev::handed::{
    ADDRESSES_MAX, Answer, Code, Granted, MESSAGE_BYTES_MAX, Refused, Report, ReportedRule,
    Request, Ring, SHARDS_MAX,
};
use rocinante_netdev::{Backend, Shards};

pub(super) fn run(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        assert!((1..=ADDRESSES_MAX).contains(&request.addresses.len()));
        assert!((1..=SHARDS_MAX).contains(&request.shards.count));
        let bytes = request.encode().expect("within bounds");
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Request::decode(&bytes), Ok(request));
    }
    if let Ok(answer) = Answer::decode(data) {
        let bytes = answer.encode();
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Answer::decode(&bytes), Ok(answer));
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let one = Request {
        backend: Backend::Packet,
        interface: 2,
        addresses: vec!["10.9.0.1".parse().expect("an address")],
        shards: Shards::ONE,
        ring_frames: None,
        tx_buffer_bytes: None,
        despite_rules: false,
        wait_ms: None,
    };
    let other = Request {
        addresses: vec!["fd09::1".parse().expect("an address"); 3],
        shards: Shards { shared: false, first: 0, count: 4, selector: 5 },
        ring_frames: Some(128),
        tx_buffer_bytes: Some(1 << 20),
        despite_rules: true,
        wait_ms: Some(10_000),
        ..one.clone()
    };
    let ring = Ring { block_bytes: 1_044_480, blocks: 4, frame_bytes: 69_632, frames: 60 };
    let rule = |what: &str| ReportedRule { what: what.repeat(40), packet_bypasses: true };
    let report = Report {
        rules: "nft\0drop\ntc \u{2026}\"\\".split(' ').map(rule).collect(),
        unseen: vec!["the tcx programs of v0".into(); 20],
    };
    let answers = [
        Answer { outcome: Ok(Granted::Xdp { chunks: 256 }), report: Some(Report::default()) },
        Answer { outcome: Ok(Granted::Packet { ring }), report: Some(Report::default()) },
        Answer {
            outcome: Err(Refused::new(Code::Bypasses, "it would bypass rules", "")),
            report: Some(report),
        },
        Answer::refusal(Refused::new(Code::Busy, "as many as it may have", "close some")),
    ];
    let of_afxdp = Request { backend: Backend::Xdp, ..one.clone() };
    let requests = [one, other, of_afxdp].map(|request| request.encode().expect("within bounds"));
    let later = b"{\"version\":1,\"refused\":{\"code\":\"later\",\"reason\":\"\"},\"more\":[0]}";
    requests
        .into_iter()
        .chain(answers.map(|answer| answer.encode()))
        .chain([later.to_vec(), b"{\"version\":2}".to_vec()])
        .collect()
}
