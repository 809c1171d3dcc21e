//! `rocinante-bench compare`, as far as a test can check it: which figures there are, not their
//! values.

use super::run_bench;
use rocinante::device::Backend;
use rocinante_tests::{need, require};

#[test]
fn every_provider_has_every_figure() {
    require!(need::lab());
    require!(need::backend(Backend::Packet));
    let done =
        run_bench("compare --providers udp,packet --runs 1 --seconds 0.01 --mtu 1024 --json");
    let json = done.succeeded().json();
    assert_eq!(json["baseline"], "udp", "{json}");
    let rows = json["rows"].as_array().unwrap();
    // One latency; and for an active and a passive target each: a latency, a rate, and three
    // bandwidths with their processor time.
    assert_eq!(rows.len(), 1 + 2 * (2 + 3 * 2), "{json}");
    for row in rows {
        assert!(row["figure"].as_str().unwrap().contains("path MTU 1024"), "{row}");
        for provider in ["udp", "packet"] {
            assert!(row["providers"][provider]["median"].as_f64().unwrap() > 0.0, "{row}");
        }
        let packet = &row["providers"]["packet"];
        assert!(packet["ratio"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(packet["place"], "level", "one run says nothing: {row}");
    }
}

#[test]
fn what_cannot_be_compared_is_refused() {
    run_bench("compare --mtu 1500").failed(2, &["a path MTU is 256, 512, 1024, 2048 or 4096"]);
    run_bench("compare --only nothing --providers udp,packet")
        .failed(1, &["no figure has that name"]);
    run_bench("compare --providers hw").failed(2, &["--devices", "rocinante devices"]);
}
