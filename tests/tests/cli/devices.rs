//! `rocinante devices`.

use super::{Addresses, run};

#[test]
fn loopback_is_a_device() {
    let done = run("devices lo -v").succeeded();
    for line in [
        "hca_id: lo",
        "transport:        RoCE v2 (UDP/4791): RC, UC, UD; in software",
        "node_guid:        0200:00ff:fe00:0001",
        "link_layer:       Ethernet",
        "state:            PORT_ACTIVE (4)",
        "max_mtu:          4096 (5)",
        "netdev:           udp: ",
    ] {
        assert!(done.out.contains(line), "{line:?}: {}", done.out);
    }
    assert!(done.out.contains("GID[0]:           ::ffff:127.0.0.1 (127.0.0.1/8)"), "{}", done.out);
}

#[test]
fn a_device_is_one_line() {
    let done = run("devices lo").succeeded();
    let line = "lo/1  state ACTIVE  backend udp  netdev lo  mtu 4096  gid 127.0.0.1";
    assert!(done.out.starts_with(line), "{}", done.out);
    assert_eq!(done.out.lines().count(), 1);
    assert_eq!(run("devices lo -l").succeeded().out, "lo\n");
    assert!(run("devices -l").succeeded().out.lines().any(|name| name == "lo"));
    run("devices -l -v").failed(2, &["cannot be used with"]);
}

#[test]
fn counters_stand_in_columns() {
    let done = run("devices lo --counters").succeeded();
    let lines: Vec<&str> = done.out.lines().collect();
    let head = lines.iter().position(|line| line.starts_with("interface ")).unwrap();
    let (head, row) = (lines[head], lines[head + 1]);
    assert!(row.starts_with("lo "), "{row}");
    for column in ["rx packets", "rx bytes", "rx dropped", "tx packets", "tx bytes"] {
        let end = head.find(column).unwrap() + column.len();
        let cell = row[..end].split_whitespace().next_back().unwrap();
        assert!(cell.parse::<u64>().is_ok(), "{column}: {row}");
        assert!(row[end..].is_empty() || row[end..].starts_with("  "), "{column}: {row}");
    }
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
