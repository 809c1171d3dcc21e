//! Words that peers exchange before they are connected: the exchange, a client's request in it, and
//! the private data of a connection, which is written again.

use rocinante::{RemoteSlice, fuzzing};
use rocinante_cli::perf::plan::{Given, Plan};
use rocinante_cli::perf::test::Test;
use rocinante_cli::session::agreement;

use super::Input;

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
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
        _ => {
            if let Some(region) = RemoteSlice::from_bytes(input.0) {
                assert_eq!(region.to_bytes()[..], input.0[..region.to_bytes().len()]);
            }
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
    let plan = |test| Given { all: true, ..Given::default() }.plan(test);
    let with = |kind: u8, bytes: &[u8]| [&[kind][..], bytes].concat();
    vec![
        with(0, hello),
        with(0, six),
        with(0, b"{}"),
        with(1, agreement::request("perf write-bw", &plan(Test::WriteBw)).as_bytes()),
        with(1, agreement::request("perf send-lat", &plan(Test::SendLat)).as_bytes()),
        with(1, b"{}"),
        with(2, &[7; 20]),
    ]
}
