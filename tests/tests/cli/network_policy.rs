//! The rules that network plugins make of `deploy/kubernetes/examples/network-policy.yaml`. The
//! tests of rocinante-kube check the file.

use std::net::Ipv4Addr;

use rocinante_lab::{Chain, Lab, LabConfig, Rule};
use rocinante_tests::harness::Backend;
use rocinante_tests::on_backends;

use super::start;

/// Lets packets from one container to another through.
fn permits([from, to]: [Ipv4Addr; 2]) -> String {
    format!("ip saddr {from} ip daddr {to} udp dport 4791 counter name others accept\n")
}

/// Two pods with the label, and one without; then the lists of one direction alone, as they suffice
/// for TCP.
fn both_directions_need_both_lists(backend: Backend) {
    let lab = Lab::routed(&LabConfig { containers: 3, ..LabConfig::default() }).unwrap();
    let [a, b, other] = [0, 1, 2].map(|index| lab.container(index).ipv4());
    let line = format!("perf write-bw --netdev {backend} --cm -n 200 -s 4096");
    let works = |from: usize, to: Ipv4Addr| {
        let _server = start(lab.container(1), &line).that_waits();
        start(lab.container(from), &format!("{line} {to}")).finish().status == 0
    };
    let chain = Chain { family: "inet", hook: "forward", device: None, priority: 0 };
    let with = |permitted: &[[Ipv4Addr; 2]]| {
        let permitted: String = permitted.iter().copied().map(permits).collect();
        let reply = "ct state established,related accept";
        let rules = format!("{reply}\n{permitted}udp dport 4791 counter name hits drop");
        Rule::new(lab.host(), &[(chain, &rules)]).unwrap()
    };
    assert!(works(0, b) && works(2, b), "without a policy");
    let policy = with(&[[a, b], [b, a]]);
    assert!(works(0, b), "both have the label");
    assert_eq!(policy.counter().unwrap().packets, 0);
    assert!(policy.counted("others").unwrap().packets > 0);
    assert!(!works(2, b), "{other} has none");
    assert!(policy.counter().unwrap().packets > 0);
    drop(policy);
    let policy = with(&[[a, b]]);
    assert!(!works(0, b), "answers are no replies");
    assert!(policy.counter().unwrap().packets > 0);
}

on_backends! {
    a_network_policy_on_udp: Udp + nft => both_directions_need_both_lists(Backend::Udp);
    a_network_policy_on_packet: Packet + machine_root + nft =>
        both_directions_need_both_lists(Backend::Packet);
    a_network_policy_on_afxdp: Xdp + machine_root + nft =>
        both_directions_need_both_lists(Backend::Xdp);
}
