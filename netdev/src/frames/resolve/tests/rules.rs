//! Routes that depend on more than the destination.

use super::*;

/// Two gateways: `.9` where a rule matches, else `.10`.
fn two_ways(pair: &Pair, rule: &str) {
    pair.a.sh(&format!(
        "ip route add 192.0.2.0/24 via 10.9.0.10 dev v0
         ip route add 192.0.2.0/24 via 10.9.0.9 dev v0 table 77
         ip neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0 nud permanent
         ip neigh add 10.9.0.10 lladdr 02:00:00:00:00:0a dev v0 nud permanent
         ip rule add prio 77 {rule} lookup 77"
    ));
}

#[test]
fn two_traffic_classes_may_go_two_ways_at_once() {
    let pair = or_skip!(Pair::new());
    two_ways(&pair, "tos 0x10");
    with_table(&pair, |mut table, mut guard| {
        for (tos, gateway) in [(0, "0a"), (0x10, "09"), (0, "0a")] {
            let spec = PathSpec { tos, ..spec("10.9.0.1", "192.0.2.1") };
            let path = table.add(&spec, &mut guard).expect("a path");
            assert_eq!(hop(&mut table, path.id), gateway, "{tos:#x}");
        }
    });
}

#[test]
fn the_route_is_that_of_our_ports() {
    for rule in ["ipproto udp dport 4791", "ipproto udp sport 49153"] {
        let pair = or_skip!(Pair::new());
        two_ways(&pair, rule);
        with_table(&pair, |mut table, mut guard| {
            let path = table.add(&spec("10.9.0.1", "192.0.2.1"), &mut guard).expect("a path");
            assert_eq!(hop(&mut table, path.id), "09", "{rule}");
        });
    }
}
