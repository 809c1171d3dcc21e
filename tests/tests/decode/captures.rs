//! Over the captures of another implementation.

use serde_json::{Value, json};

use rocinante_tests::captures;
use rocinante_tests::snapshot::assert_snapshot;

use super::{decode, decode_bytes};

#[test]
fn every_capture_is_right_but_for_the_packet_that_was_broken() {
    let (mut total, mut frames) = (0, 0);
    for file in captures::files() {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let packets = captures::packets(&file).len();
        let bad = u64::from(name == "raw_peer_experiments");
        let done = decode([file.as_os_str(), "--json".as_ref()]);
        assert_eq!(done.status, i32::from(bad == 1), "{name}: {}", done.err);
        assert_eq!(done.out.lines().count(), 1, "only the JSON is on standard output");
        assert_eq!(done.lines().len(), packets);
        let json = done.json();
        for (key, expected) in [
            ("roce", packets as u64),
            ("icrc_ok", packets as u64 - bad),
            ("icrc_bad", bad),
            ("icrc_unknown", 0),
        ] {
            assert_eq!(json[key], expected, "{name}: {key}");
        }
        assert!(json["packets"].as_u64() >= Some(packets as u64));
        let by_opcode = json["by_opcode"].as_object().unwrap().values();
        assert_eq!(by_opcode.filter_map(Value::as_u64).sum::<u64>(), packets as u64);
        assert_eq!(json.as_object().unwrap().len(), 3 + 6, "{json}");
        total += packets;
        frames += json["packets"].as_u64().unwrap();
    }
    // The rest is ARP and neighbour discovery.
    assert_eq!(frames, 1584);
    assert_eq!(total, 1568);
}

#[test]
fn the_lines_are_what_they_were() {
    for name in
        ["nak_ipv4", "uc_ud_ipv6", "rc_ipv4_mtu256", "perftest_atomic", "raw_peer_experiments"]
    {
        let file = captures::data_dir().join("captures").join(name).with_extension("pcap");
        let done = decode([file]);
        assert_eq!(done.status, i32::from(name == "raw_peer_experiments"));
        assert_snapshot(&format!("decode/{name}.txt"), &done.out);
        assert_eq!(done.err, "");
    }
}

#[test]
fn quiet_prints_only_what_is_wrong() {
    let file = captures::data_dir().join("captures/raw_peer_experiments.pcap");
    let done = decode([file.as_os_str(), "--quiet".as_ref()]);
    let [line] = done.lines()[..] else { panic!("{}", done.out) };
    assert!(line.trim_start().starts_with("3 "), "{line}");
    assert!(line.ends_with("icrc BAD computed 0x4dd4dea1 found 0x4dd4dea0"), "{line}");
    assert!(done.out.ends_with("36 packets, 36 of them RoCEv2: ICRC 35 ok, 1 bad, 0 unknown\n"));
    assert_eq!(done.status, 1);
}

#[test]
fn standard_input_is_a_file_too() {
    let bytes = std::fs::read(captures::data_dir().join("captures/perftest_atomic.pcap")).unwrap();
    let done = decode_bytes(&bytes, &["--json", "-q"]);
    assert_eq!((done.status, done.lines().len()), (0, 0));
    assert_eq!(
        done.json(),
        json!({
            "schema": 1, "version": env!("CARGO_PKG_VERSION"), "command": "decode",
            "packets": 41, "roce": 40, "icrc_ok": 40, "icrc_bad": 0, "icrc_unknown": 0,
            "by_opcode": {"RC_COMPARE_SWAP": 20, "RC_ATOMIC_ACKNOWLEDGE": 20},
        })
    );
}
