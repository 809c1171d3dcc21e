//! Filters, retransmissions, flows, and the connection manager's messages.

use std::path::PathBuf;

use rocinante_tests::captures;
use serde_json::Value;

use super::made::{Style, ethernet, ip_packet, ipv4, pcap, write_packet};
use super::{Done, decode, decode_bytes};

fn capture(name: &str) -> PathBuf {
    captures::data_dir().join("captures").join(name).with_extension("pcap")
}

fn over(name: &str, args: &[&str]) -> Done {
    let file = capture(name);
    let words = args.iter().map(std::convert::AsRef::as_ref);
    decode([file.as_os_str()].into_iter().chain(words))
}

/// The same over a pipe, which can be read only once.
fn piped(name: &str, args: &[&str]) -> Done {
    decode_bytes(&std::fs::read(capture(name)).unwrap(), args)
}

/// The objects of `--json-packets`, without the last one.
fn packets(done: &Done) -> Vec<Value> {
    let lines = done.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut objects: Vec<Value> = lines.collect();
    assert!(objects.pop().unwrap()["packets"].is_u64(), "the counts are last");
    objects.into_iter().map(|mut object| object["packet"].take()).collect()
}

#[test]
fn a_queue_pair_is_chosen_in_both_directions() {
    // 20 requests to 0x2e and their answers to 0x2f, and no message about a connection.
    for number in ["0x2e", "46", "0x2f"] {
        let done = over("perftest_atomic", &["--qp", number, "--json"]);
        assert_eq!(done.json()["roce"], 40, "{number}");
        assert_eq!(done.json()["packets"], 41, "frames of the file");
    }
    // Only the first answer says where the first request came from: too late for a pipe.
    assert_eq!(piped("perftest_atomic", &["--qp", "0x2e", "--json"]).json()["roce"], 40);
    assert_eq!(piped("perftest_atomic", &["--qp", "0x2f", "--json"]).json()["roce"], 39);
    // The connection manager says it before. Only a file says of a REQ which queue pair answers it.
    for number in ["0x30", "0x31"] {
        for (done, asked) in [
            (over("cm_rping_ipv4", &["--qp", number]), 1),
            (piped("cm_rping_ipv4", &["--qp", number]), usize::from(number == "0x31")),
        ] {
            let of_kind = |kind| done.lines().iter().filter(|line| line.contains(kind)).count();
            assert_eq!((of_kind(" RC_"), of_kind("cm(REQ")), (36, asked), "{number}");
            assert_eq!((of_kind("cm(REP"), of_kind("cm(RTU")), (1, 1));
            assert_eq!((of_kind("cm(DREQ"), of_kind("cm(DREP")), (1, 1));
        }
    }
    assert_eq!(over("perftest_atomic", &["--qp", "7", "--json"]).json()["roce"], 0);
    assert_eq!(over("perftest_atomic", &["--qp", "seven"]).status, 2);
}

#[test]
fn addresses_and_psns_are_chosen() {
    let roce = |args: &[&str]| over("raw_peer_experiments", args).json()["roce"].as_u64().unwrap();
    let all = roce(&["--json"]);
    assert_eq!(roce(&["--json", "--addr", "10.77.0.3"]), all);
    assert_eq!(roce(&["--json", "--addr", "10.77.0.55"]), 1);
    assert_eq!(roce(&["--json", "--addr", "10.77.0.55", "--addr", "10.77.0.1"]), 0);
    let one = roce(&["--json", "--psn", "0x500"]);
    let two = roce(&["--json", "--psn", "1281"]);
    assert!(one > 0 && two > 0 && one + two < all, "{one} {two}");
    assert_eq!(roce(&["--json", "--psn", "0x500-0x501"]), one + two);
    assert_eq!(roce(&["--json", "--psn", "0x502-0x4ff"]), all - one - two, "round the end");
}

#[test]
fn connection_management_is_spelled_out() {
    let done = over("cm_rping_ipv4", &[]);
    for words in [
        "cm(REQ comm 0xae019044 RC qp 0x000031 psn 0x2609d1 port tcp/7174 from 10.77.0.2:40330 to 10.77.0.3 mtu 1024 \
         reads 1/1 retry 7 rnr 7 timeout 4294 ms private 0)",
        "cm(REP comm 0xebd1a63b to 0xae019044 qp 0x000030 psn 0x8378d3 reads 1/1 rnr 7 private 0)",
        "cm(RTU comm 0xae019044 to 0xebd1a63b private 0)",
        "cm(DREQ comm 0xae019044 to 0xebd1a63b remote qp 0x000030 private 0)",
        "cm(DREP comm 0xebd1a63b to 0xae019044 private 0)",
    ] {
        assert!(done.out.contains(words), "{words}: {}", done.out);
    }
    let refused = over("cm_reject_no_listener", &[]);
    let words =
        "cm(REJ of REQ comm 0x00000000 to 0xa9019044: nobody listens there (reason 8), private 0)";
    assert!(refused.out.contains(words), "{}", refused.out);
    let found = packets(&over("cm_udaddy_sidr", &["--json-packets"]));
    let [asked, answered] = [&found[0]["cm"], &found[1]["cm"]];
    assert_eq!((&asked["message"], &asked["port"]), (&"SIDR_REQ".into(), &7174.into()));
    assert_eq!(asked["from"], "10.77.0.2:36464");
    assert_eq!((&answered["message"], &answered["qpn"]), (&"SIDR_REP".into(), &0x2b.into()));
    assert_eq!(answered["reason"], "resolved (status 0)");
    assert_eq!(asked["tid"], answered["tid"]);
}

#[test]
fn repetitions_are_marked_and_counted() {
    let done = over("loss8_requester_side", &["--flows"]);
    let marked = done.lines().iter().filter(|line| line.contains(" again icrc ok")).count();
    assert!(marked > 0, "{}", done.out);
    assert!(done.out.contains("answered after (us: min avg max)"), "{}", done.out);
    let json = over("loss8_requester_side", &["--flows", "--json"]).json();
    let flows = json["flows"].as_array().unwrap();
    let sum = |key: &str| flows.iter().filter_map(|flow| flow[key].as_u64()).sum::<u64>();
    assert_eq!(sum("again"), marked as u64);
    assert_eq!(sum("packets"), json["roce"].as_u64().unwrap());
    let marked_in_json = packets(&over("loss8_requester_side", &["--json-packets"]));
    let again = marked_in_json.iter().filter(|packet| packet["again"] == true).count();
    assert_eq!(again, marked);
    // A duplicate of a request of the connection manager.
    let bytes = std::fs::read(capture("cm_rping_ipv4")).unwrap();
    let (head, rest) = bytes.split_at(24);
    let first = 16 + u32::from_le_bytes(*rest[8..].first_chunk().unwrap()) as usize;
    let twice = [head, &rest[..first], rest].concat();
    let done = decode_bytes(&twice, &[]);
    assert!(!done.lines()[0].contains(" again ") && done.lines()[1].contains(") again icrc ok"));
}

#[test]
fn a_flow_has_its_naks_and_round_trips() {
    let json = over("nak_ipv4", &["--flows", "--json"]).json();
    let flows = json["flows"].as_array().unwrap();
    let by_kind = &json["by_opcode"];
    let sum = |key: &str| flows.iter().filter_map(|flow| flow[key].as_u64()).sum::<u64>();
    assert!(sum("rnr_naks") > 0 && sum("naks") > 0, "{json}");
    assert_eq!(
        sum("acks") + sum("naks") + sum("rnr_naks"),
        by_kind["RC_ACKNOWLEDGE"].as_u64().unwrap()
    );
    let json = over("perftest_atomic", &["--flows", "--json"]).json();
    let [asks, answers] = &json["flows"].as_array().unwrap()[..] else { panic!("{json}") };
    assert_eq!((&asks["src_qpn"], &asks["dest_qpn"]), (&0x2f.into(), &0x2e.into()));
    assert_eq!((&answers["src_qpn"], &answers["dest_qpn"]), (&0x2e.into(), &0x2f.into()));
    assert_eq!(answers["round_trips"]["count"], 20);
    assert_eq!(asks["round_trips"], Value::Null);
    // The first two answers of the capture came after 1,628 and 428 us.
    let us = |name: &str| answers["round_trips"][name].as_f64().unwrap();
    assert!(us("us_min") <= 428.5 && us("us_max") >= 1627.5, "{answers}");
    assert!(us("us_min") <= us("us_avg") && us("us_avg") <= us("us_max"), "{answers}");
}

#[test]
fn flows_are_those_of_what_is_chosen() {
    for (args, flows) in [
        (&[][..], &[1, 0x30, 1, 0x31][..]),
        (&["--qp", "0x30"], &[0x30, 0x31]),
        (&["--qp", "1"], &[1, 1]),
        (&["--addr", "10.77.0.2"], &[1, 0x30, 1, 0x31]),
        (&["--addr", "10.77.0.9"], &[]),
    ] {
        let args = [args, &["--flows", "--json"]].concat();
        let json = over("cm_rping_ipv4", &args).json();
        let found: Vec<u64> = json["flows"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|it| it["dest_qpn"].as_u64())
            .collect();
        assert_eq!(found, flows, "{args:?}");
    }
}

#[test]
fn more_flows_than_can_be_followed_are_counted() {
    let frames: Vec<Vec<u8>> = (0..5000u16)
        .map(|n| {
            let ip = ipv4(n);
            let mut packet = write_packet(&ip, 7, 0);
            packet[6..8].copy_from_slice(&n.to_be_bytes());
            super::runs::seal(&ip, &mut packet);
            ethernet(&ip_packet(&ip, &packet))
        })
        .collect();
    let done = decode_bytes(&pcap(Style::USUAL, 1, &frames), &["--flows", "--json", "-q"]);
    let json = done.json();
    assert_eq!((&json["roce"], &json["icrc_ok"]), (&5000.into(), &5000.into()));
    assert_eq!(json["flows"].as_array().unwrap().len(), 4096);
    assert_eq!(json["untracked"], 5000 - 4096);
}

#[test]
fn each_packet_is_an_object() {
    for file in captures::files() {
        let done = decode([file.as_os_str(), "--json-packets".as_ref()]);
        let packets = packets(&done);
        assert_eq!(packets.len() as u64, done.json()["roce"].as_u64().unwrap());
        for packet in &packets {
            assert!(packet["psn"].is_u64() && packet["dest_qpn"].is_u64(), "{packet}");
        }
    }
    let packets = packets(&over("perftest_atomic", &["--json-packets"]));
    let atomic = &packets[0];
    assert_eq!(atomic["opcode"], "RC_COMPARE_SWAP");
    assert_eq!(atomic["atomic"]["va"], "0x55bd9f91d000");
    assert_eq!((&atomic["seconds"], &atomic["icrc"]), (&0.0.into(), &"ok".into()));
    assert_eq!(packets[1]["aeth"]["kind"], "ack");
    assert_eq!(packets[1]["original"], "0x526193378ea806bd");
}
