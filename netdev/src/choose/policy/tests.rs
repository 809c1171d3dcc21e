use super::rules::Rule;
use super::*;
use crate::port::contract::Backend;
use crate::testing::testns::{Pair, or_skip, without_capability};

fn audit_in(pair: &Pair) -> Audit {
    pair.a.run(|| audit(&Interface::by_name("v0").expect("v0")))
}

fn with_nft(pair: &Pair, ruleset: &str) -> Audit {
    let lines = ruleset.replace('}', "\n}");
    pair.a.sh(&format!("nft flush ruleset; nft '{lines}'"));
    audit_in(pair)
}

fn bypasses(audit: &Audit, backend: Backend) -> bool {
    matches!(audit.verdict(backend), AuditVerdict::Bypasses(_))
}

#[test]
fn without_rules_the_verdict_is_clear() {
    let pair = or_skip!("policy::without_rules_the_verdict_is_clear", Pair::new_seeing());
    let empty = audit_in(&pair);
    assert_eq!(empty, Audit::default());
    assert_eq!(empty.verdict(Backend::Xdp), AuditVerdict::Clear);
    // The default disciplines of hardware do not count as rules.
    for qdisc in ["fq_codel", "pfifo", "fq"] {
        let made = pair.a.run(|| {
            std::process::Command::new("tc")
                .args(["qdisc", "replace", "dev", "v0", "root", qdisc])
                .stderr(std::process::Stdio::null())
                .status()
        });
        if made.is_ok_and(|status| status.success()) {
            assert_eq!(audit_in(&pair), Audit::default(), "{qdisc}");
        }
    }
}

#[test]
fn rules_that_cannot_match_are_left_out() {
    let pair = or_skip!("policy::rules_that_cannot_match_are_left_out", Pair::new_seeing());
    for rules in [
        "",
        "tcp dport 22 drop",
        "udp dport 53 drop",
        "udp dport 1000-2000 drop",
        "udp dport != 4791 drop",
        "udp dport < 1024 drop",
        "ip protocol icmp drop",
        "meta l4proto != udp drop",
        "ip daddr 127.0.0.11 udp dport 4791 drop",
        "ip daddr 127.0.0.0/8 drop",
        "oifname \"lo\" drop",
        "oifname \"eth*\" drop",
        "oif lo drop",
        "tcp dport 22 jump other",
        "udp dport 4791 jump harmless",
        "goto harmless",
    ] {
        let found = with_nft(
            &pair,
            &format!(
                "table inet t {{ chain other {{ drop; }}
                   chain harmless {{ tcp dport 22 drop; }}
                   chain c {{ type filter hook output priority 0; {rules}; }} }}"
            ),
        );
        assert_eq!(found, Audit::default(), "{rules}");
    }
}

#[test]
fn rules_that_could_match_are_found() {
    let pair = or_skip!("policy::rules_that_could_match_are_found", Pair::new_seeing());
    for rules in [
        "drop",
        "counter",
        "udp dport 4791 drop",
        "udp dport 4000-5000 drop",
        "udp dport != 53 drop",
        "udp dport { 53, 4791 } drop",
        "udp dport > 1024 accept",
        "meta l4proto udp drop",
        "ip daddr 10.9.0.0/16 drop",
        "ip6 daddr fd09::/16 drop",
        "oifname \"v0\" drop",
        "oifname \"v*\" drop",
        "oifname != \"lo\" drop",
        "ct state established accept",
        "meta mark set 1 tcp dport 22 drop",
        "udp dport 4791 jump other",
        "goto other",
        "limit rate 10/second drop",
        "udp dport vmap { 4791 : drop }",
    ] {
        let found = with_nft(
            &pair,
            &format!(
                "table inet t {{ chain other {{ ip ttl 1 drop; }}
                   chain c {{ type filter hook output priority 0; {rules}; }} }}"
            ),
        );
        assert!(bypasses(&found, Backend::Packet) && bypasses(&found, Backend::Xdp), "{rules}");
        assert!(found.rules[0].what.contains("table inet t"), "{found:?}");
    }
}

#[test]
fn each_hook_counts_for_those_that_bypass_it() {
    let pair = or_skip!("policy::each_hook_counts_for_those_that_bypass_it", Pair::new_seeing());
    for (chain, packet, xdp) in [
        ("table ip t { chain c { type filter hook input priority 0; policy drop; } }", true, true),
        ("table ip t { chain c { type filter hook prerouting priority 0; drop; } }", true, true),
        ("table ip6 t { chain c { type filter hook postrouting priority 0; drop; } }", true, true),
        ("table ip t { chain c { type filter hook forward priority 0; drop; } }", false, false),
        ("table ip t { chain c { drop; } }", false, false),
        ("table bridge t { chain c { type filter hook input priority 0; drop; } }", false, false),
        (
            "table netdev t { chain c { type filter hook ingress device v0 priority 0; drop; } }",
            true,
            true,
        ),
        (
            "table netdev t { chain c { type filter hook egress device v0 priority 0; drop; } }",
            false,
            true,
        ),
        (
            "table netdev t { chain c { type filter hook ingress device lo priority 0; drop; } }",
            false,
            false,
        ),
        (
            "table inet t { chain c { type filter hook ingress device v0 priority 0; drop; } }",
            true,
            true,
        ),
    ] {
        let found = with_nft(&pair, chain);
        assert_eq!(bypasses(&found, Backend::Packet), packet, "packet: {chain}");
        assert_eq!(bypasses(&found, Backend::Xdp), xdp, "afxdp: {chain}");
        assert_eq!(found.verdict(Backend::Udp), AuditVerdict::Clear);
        assert_eq!(found.unseen, [""; 0]);
    }
}

/// Each base chain follows all that it leads to, whatever another has followed before.
#[test]
fn a_chain_of_two_base_chains_counts_for_each() {
    let pair = or_skip!("policy::a_chain_of_two_base_chains_counts_for_each", Pair::new_seeing());
    let hooks = ["egress", "ingress"];
    for order in [[0, 1], [1, 0]] {
        for by_another in [false, true] {
            let to = if by_another { "between" } else { "last" };
            let bases: String = order
                .iter()
                .map(|&at| {
                    let hook = hooks[at];
                    format!(
                        "chain {hook} {{ type filter hook {hook} device v0 priority 0;
                                         udp dport 4791 jump {to}; }}\n"
                    )
                })
                .collect();
            let found = with_nft(
                &pair,
                &format!(
                    "table netdev t {{ chain last {{ ip ttl 1 drop; }}
                       chain between {{ jump last; }}
                       {bases} }}"
                ),
            );
            // Egress alone would not count for packet sockets.
            assert!(bypasses(&found, Backend::Packet), "{order:?} {to}: {found:?}");
            assert!(bypasses(&found, Backend::Xdp), "{order:?} {to}: {found:?}");
        }
    }
}

/// Two tables and two families may have chains of one name.
#[test]
fn chains_of_one_name_are_of_their_tables() {
    let pair = or_skip!("policy::chains_of_one_name_are_of_their_tables", Pair::new_seeing());
    for (drops, other) in [("inet a", "inet b"), ("inet b", "inet a"), ("ip a", "inet a")] {
        for (based, found) in [(drops, true), (other, false)] {
            let table = |name: &str| {
                let verdict = if name == drops { "drop;" } else { "tcp dport 22 drop;" };
                let base = match name == based {
                    true => "chain base { type filter hook input priority 0; jump c; }",
                    false => "",
                };
                format!("table {name} {{ chain c {{ {verdict} }}\n{base} }}\n")
            };
            let audit = with_nft(&pair, &(table(drops) + &table(other)));
            assert_eq!(bypasses(&audit, Backend::Packet), found, "{drops} {based}: {audit:?}");
        }
    }
}

#[test]
fn tc_filters_and_shapers_are_found() {
    let pair = or_skip!("policy::tc_filters_and_shapers_are_found", Pair::new_seeing());
    pair.a.sh("tc qdisc add dev v0 clsact");
    assert_eq!(audit_in(&pair), Audit::default(), "clsact alone does nothing");
    let filter = "protocol ip u32 match ip protocol 17 0xff flowid 1:1";
    pair.a.sh(&format!("tc filter add dev v0 egress {filter}"));
    let egress = audit_in(&pair);
    assert!(!bypasses(&egress, Backend::Packet) && bypasses(&egress, Backend::Xdp));
    pair.a.sh(&format!("tc filter add dev v0 ingress {filter}"));
    assert!(bypasses(&audit_in(&pair), Backend::Packet));
    pair.a.sh("tc qdisc del dev v0 clsact; tc qdisc add dev v0 ingress");
    assert_eq!(audit_in(&pair), Audit::default());
    pair.a.sh(&format!("tc filter add dev v0 parent ffff: {filter}"));
    assert!(bypasses(&audit_in(&pair), Backend::Packet));
    pair.a.sh("tc qdisc del dev v0 ingress
               tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 50ms");
    let shaped = audit_in(&pair);
    assert!(!bypasses(&shaped, Backend::Packet) && bypasses(&shaped, Backend::Xdp));
    assert!(shaped.rules[0].what.contains("tbf"), "{shaped:?}");
}

/// An interface in the place of a VRF, which few kernels of tests have.
#[test]
fn rules_on_the_vrf_are_found_too_and_others_once() {
    let pair = or_skip!("policy::rules_on_the_vrf", Pair::new_seeing());
    pair.a.sh("ip link add vrf0 type bridge");
    for (on, found) in [("iifname vrf0", [0, 1]), ("iifname v0", [1, 1]), ("", [1, 1])] {
        let rules = format!(
            "table ip t {{ chain c {{ type filter hook input priority 0;
            {on} udp dport 4791 drop }} }}"
        );
        assert_eq!(with_nft(&pair, &rules).rules.len(), found[0], "{on}");
        let both = pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0");
            let name = String::from("vrf0");
            let index = Interface::by_name(&name).expect("vrf0").index;
            let mut audit = audit(&v0);
            audit_on(&Interface { name, index, ..v0 }, &mut audit);
            audit.rules.len()
        });
        assert_eq!(both, found[1], "{on}");
    }
}

#[test]
fn ipsec_policies_are_found() {
    let pair = or_skip!("policy::ipsec_policies_are_found", Pair::new_seeing());
    let tmpl = "tmpl src 10.9.0.1 dst 10.9.0.2 proto esp mode transport";
    let to = "src 10.9.0.1/32 dst 10.9.0.2/32";
    let tmpl6 = "tmpl src fd09::1 dst fd09::2 proto esp mode transport";
    for (policy, found) in [
        (format!("src fd09::1/128 dst fd09::2/128 dir out {tmpl6}"), "out"),
        (format!("dst fd09::/68 src fd09::2/128 dir in {tmpl6}"), "in"),
        (format!("src fd09::1:0:0:1/68 dst fd09::2/128 dir out {tmpl6}"), "out"),
        (format!("src fd09::3/128 dst fd09::2/128 dir out {tmpl6}"), ""),
        (format!("src fd09:0:0:0:1000::/68 dst fd09::2/128 dir out {tmpl6}"), ""),
        (format!("src fd09::1/128 dst fd09::2/128 dev lo dir out {tmpl6}"), ""),
        (format!("{to} dir out {tmpl}"), "out"),
        (format!("dst 10.9.0.0/16 src 10.9.0.2/32 dir in {tmpl}"), "in"),
        (format!("{to} proto udp dport 4791 dir out {tmpl}"), "out"),
        (format!("{to} dir out action block"), "out"),
        (format!("dst 0.0.0.0/0 src 0.0.0.0/0 dev v0 dir out {tmpl}"), "out"),
        (format!("{to} proto udp dport 53 dir out {tmpl}"), ""),
        (format!("{to} proto tcp dir out {tmpl}"), ""),
        (format!("{to} dev lo dir out {tmpl}"), ""),
        (format!("{to} dir out"), ""),
        (format!("{to} dir fwd {tmpl}"), ""),
        (format!("src 10.8.0.1/32 dst 10.9.0.2/32 dir out {tmpl}"), ""),
    ] {
        pair.a.sh(&format!("ip xfrm policy flush; ip xfrm policy add {policy}"));
        let audit = audit_in(&pair);
        let told = |rule: &Rule| rule.what.ends_with(&format!("direction {found}"));
        assert_eq!(audit.rules.iter().any(told), !found.is_empty(), "{policy}: {audit:?}");
        assert_eq!(audit.rules.len(), usize::from(!found.is_empty()), "{policy}: {audit:?}");
        assert_eq!(bypasses(&audit, Backend::Packet), !found.is_empty(), "{policy}");
        assert_eq!(audit.verdict(Backend::Udp), AuditVerdict::Clear);
    }
    pair.a.sh("ip xfrm policy flush");
    for (blocked, found) in [("in", 1), ("out", 1), ("fwd", 0)] {
        let defaults = ["in", "fwd", "out"]
            .map(|way| format!("{way} {}", if way == blocked { "block" } else { "accept" }));
        pair.a.sh(&format!("ip xfrm policy setdefault {}", defaults.join(" ")));
        assert_eq!(audit_in(&pair).rules.len(), found, "{blocked}");
    }
}

/// A namespace that forwards for others' addresses, which are the source or the destination.
#[test]
fn ipsec_policies_of_what_is_forwarded_are_found() {
    let pair = or_skip!("policy::ipsec_policies_of_what_is_forwarded", Pair::new_seeing());
    for (policy, found) in [
        ("src 10.8.0.0/16 dst 10.7.0.1/32 dir fwd action block", "fwd"),
        ("src 10.7.0.1/32 dst 10.8.0.0/16 dir fwd action block", "fwd"),
        ("src 10.7.0.1/32 dst 10.8.0.0/16 dir out action block", "out"),
        ("src 10.7.0.1/32 dst 10.8.0.0/16 dir fwd", ""),
        ("src 10.7.0.1/32 dst 10.8.0.0/16 dir in action block", ""),
        ("src 10.7.0.1/32 dst 10.6.0.0/16 dir fwd action block", ""),
    ] {
        pair.a.sh(&format!("ip xfrm policy flush; ip xfrm policy add {policy}"));
        let rules = pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0");
            let addresses = vec![("10.8.0.1".parse().expect("an address"), 16)];
            unlisted_rules(&Interface { addresses, ..v0 }, true).0
        });
        let hooks: Vec<_> = rules.iter().map(|rule| rule.hook).collect();
        assert_eq!(hooks.join(" "), found, "{policy}");
    }
}

#[test]
fn what_cannot_be_read_is_unseen() {
    /// `CAP_NET_ADMIN` of capabilities(7).
    const NET_ADMIN: u32 = 12;
    let pair = or_skip!("policy::what_cannot_be_read_is_unseen", Pair::new_seeing());
    let audited = || audit(&Interface::by_name("v0").expect("v0"));
    let blind = || pair.a.run(|| without_capability(NET_ADMIN, audited));
    let found = blind();
    let AuditVerdict::Unseen(why) = found.verdict(Backend::Packet) else { panic!("{found:?}") };
    assert!(why[0].contains("nft") && why[0].contains("CAP_NET_ADMIN"), "{why:?}");
    assert_eq!(found.verdict(Backend::Udp), AuditVerdict::Clear);
    // A visible rule outweighs an unreadable one: reading disciplines needs no privilege.
    pair.a.sh("tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 50ms");
    assert!(bypasses(&blind(), Backend::Xdp));
    assert!(matches!(blind().verdict(Backend::Packet), AuditVerdict::Unseen(_)));
}
