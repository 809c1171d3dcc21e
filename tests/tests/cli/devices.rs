//! `rocinante devices`.

use super::{Addresses, run};

#[test]
fn loopback_is_a_device() {
    let done = run("devices lo").succeeded();
    for line in ["hca_id: lo", "state:            PORT_ACTIVE", "netdev:           udp: "] {
        assert!(done.out.contains(line), "{line:?}: {}", done.out);
    }
    assert!(done.out.contains("GID[0]:           ::ffff:127.0.0.1 (127.0.0.1/8)"), "{}", done.out);
}

#[test]
fn json_has_the_promised_members() {
    let done = run("devices lo --json --counters").succeeded();
    assert_eq!(done.out.lines().count(), 1, "{}", done.out);
    let json = done.json();
    let device = &json["devices"][0];
    assert_eq!((&device["name"], &device["state"]), (&"lo".into(), &"PORT_ACTIVE".into()));
    assert_eq!((&device["netdev"], &device["max_path_mtu"]), (&"udp".into(), &4096.into()));
    assert!(device["reason"].as_str().unwrap().contains("loopback"));
    let gid = &device["gids"][0];
    assert_eq!((&gid["index"], &gid["gid"]), (&0.into(), &"::ffff:127.0.0.1".into()));
    assert_eq!((&gid["address"], &gid["prefix_len"]), (&"127.0.0.1".into(), &8.into()));
    for limit in ["max_qp", "max_mr", "max_cq", "max_cqe", "max_qp_wr", "max_sge", "max_qp_rd_atom"]
    {
        assert!(device["limits"][limit].as_u64().unwrap() > 0, "{limit}");
    }
    for capability in ["segments_max", "run_bytes_max", "rx_budget_bytes", "rx_budget_datagrams"] {
        assert!(device["capabilities"][capability].as_u64().unwrap() > 0, "{capability}");
    }
    let counters = &json["counters"];
    assert!(counters["interfaces"]["lo"]["rx_packets"].is_u64(), "{counters}");
    assert!(counters["udp"]["RcvbufErrors"].is_u64(), "{counters}");
}

#[test]
fn counters_name_the_process_that_has_the_port() {
    let addresses = Addresses::new();
    let server = addresses.serve("pingpong");
    let done = run("devices lo --counters --json").succeeded();
    let sockets = done.json()["counters"]["roce_sockets"].as_array().unwrap().clone();
    let address = format!("{}:4791", addresses.server);
    let own = sockets.iter().find(|socket| socket["address"] == *address);
    let own = own.unwrap_or_else(|| panic!("{address}: {sockets:?}"));
    assert_eq!(own["processes"][0]["pid"], server.child.id());
    assert!(own["drops"].is_u64() && own["queued_bytes"].is_u64(), "{own}");
    assert!(done.err.contains(&format!("pid {}", server.child.id())), "{}", done.err);
}

#[test]
fn an_interface_that_does_not_exist_is_named() {
    run("devices nosuch0").failed(1, &["no interface \"nosuch0\"", "lo"]);
}
