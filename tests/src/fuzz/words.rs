//! Words that peers exchange before they are connected: our own exchange and a client's request in
//! it, the private data of a connection, rdma-core's ping-pong lines, perftest's lines.
//!
//! A word that is understood is written again, and the copy means the same.

use rocinante::{RemoteSlice, fuzzing};
use rocinante_cli::compat::ibv::message::{Address, LEN as ADDRESS_LEN};
use rocinante_cli::compat::perftest::message::{self, KEYS_LEN, Keys, REPORT_PARTS, Report};
use rocinante_cli::perf::plan::{Given, Plan};
use rocinante_cli::perf::test::Test;
use rocinante_cli::session::agreement;
use rocinante_stack::types::Mtu;

use super::Input;

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 9 {
        0 => {
            if let Ok(line) = std::str::from_utf8(input.0) {
                fuzzing::hello(line);
            }
        }
        1 => {
            if let Ok(line) = std::str::from_utf8(input.0) {
                request(line);
            }
        }
        2 => {
            let message = input.bytes::<ADDRESS_LEN>();
            if let Ok(address) = Address::parse(&message) {
                assert_eq!(Address::parse(&address.message()), Ok(address));
            }
        }
        3 => {
            let message = input.bytes::<KEYS_LEN>();
            if let Ok(keys) = Keys::parse(&message) {
                let again = Keys::parse(&keys.message()).expect("what was written can be read");
                assert_eq!(again.message(), keys.message());
            }
            let binary = message.first_chunk().expect("the text is longer");
            if let Ok(keys) = Keys::parse_binary(binary) {
                assert_eq!(Keys::parse_binary(&keys.binary()), Ok(keys));
            }
        }
        4 => {
            if let Ok(version) = message::version(&input.bytes()) {
                assert!(version.parse::<f64>().is_ok_and(f64::is_finite));
            }
        }
        5 => {
            let bytes = input.bytes();
            if let Ok(mtu) = message::mtu(bytes) {
                assert!(Mtu::ALL.contains(&mtu));
            }
        }
        6 => {
            let _ = message::cycle_buffer(input.bytes());
            let _ = message::cache_line(input.bytes());
        }
        7 => {
            if let Some(region) = RemoteSlice::from_bytes(input.0) {
                assert_eq!(region.to_bytes()[..], input.0[..region.to_bytes().len()]);
            }
        }
        _ => {
            let parts: [[u8; 8]; REPORT_PARTS] = std::array::from_fn(|_| input.bytes());
            let report = Report::of(parts);
            assert!(report.peak.is_finite() && report.average >= 0.0 && report.rate >= 0.0);
        }
    }
}

/// The request of a client of `rocinante perf`, at a server with options of its own and at one
/// without.
fn request(line: &str) {
    let Ok(request) = agreement::parse(line) else { return };
    let given = Given { size: Some(64), qps: Some(2), ..Given::default() };
    for (given, test) in [(given, Test::WriteBw), (Given::default(), Test::SendLat)] {
        let _ = agreement::check(&test.command(), &given, &request);
        let Ok(plan) = serde_json::from_value::<Plan>(request.options.clone()) else { continue };
        if plan.check(test).is_err() {
            continue;
        }
        assert!(plan.completions() > 0);
        for size in plan.sizes() {
            assert!(size > 0);
            let _ = plan.until(size);
            let _ = test.bulk(plan.atomic).map(|op| plan.bulk(op, size, false));
        }
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let hello = br#"{"rocinante":1,"endpoints":[{"address":"10.0.0.2","qpn":4660,"psn":1,"mtu":4096,"budget_bytes":262144,"budget_datagrams":128}],"regions":[{"address":4096,"len":64,"rkey":4294967295}],"note":""}"#;
    let six = br#"{"rocinante":1,"endpoints":[{"address":"fe80::1","qpn":16777215,"psn":16777215,"mtu":1024,"budget_bytes":1,"budget_datagrams":1},{"address":"::ffff:10.0.0.2","qpn":2,"psn":0,"mtu":256,"budget_bytes":0,"budget_datagrams":0}],"regions":[],"note":"\u001b"}"#;
    let address = b"0000:000011:5b2c1f:00000000000000000000ffff0a4d0002\0";
    let keys = b"0000:0080:000012:5b2c1f:00000d25:00007f3b8c001000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02:00000000:\0";
    let plan = |test| Given { all: true, ..Given::default() }.plan(test);
    let with = |kind: u8, bytes: &[u8]| [&[kind][..], bytes].concat();
    vec![
        with(0, hello),
        with(0, six),
        with(0, b"{}"),
        with(1, agreement::request("perf write-bw", &plan(Test::WriteBw)).as_bytes()),
        with(1, agreement::request("perf send-lat", &plan(Test::SendLat)).as_bytes()),
        with(1, b"{}"),
        with(2, address),
        with(3, keys),
        with(3, &[0; 108]),
        with(4, b"6.10\0"),
        with(4, b"5.70\0"),
        with(5, &[0, 0, 0, 5]),
        with(5, b"3\0\0\0"),
        with(6, &[0, 0, 16, 0, 0, 0, 0, 64]),
        with(7, &[7; 20]),
        with(8, &[0; 40]),
    ]
}
