//! The choice of a backend, in namespaces of their own.

use super::*;
use crate::handed::testing::Server;
use crate::testing::testns::{NetNs, Pair, or_skip, without_capability};

/// `CAP_NET_ADMIN` and `CAP_NET_RAW` of capabilities(7).
const NET_ADMIN: u32 = 12;
const NET_RAW: u32 = 13;

fn choose_in_thread(name: &str, want: Option<Backend>) -> Result<Choice, OpenError> {
    let iface = Interface::by_name(name).expect("the interface");
    let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
    // A child process of another test may hold a copy of a closed socket between fork and exec.
    let mut last = None;
    for _ in 0..1000 {
        match choose(&iface, &addresses[..1], want, &PortConfig::default(), &Agent::off()) {
            Err(e) if e.errno() == libc::EADDRINUSE => last = Some(Err(e)),
            Ok((_, choice)) if choice.tried.iter().any(|(_, why)| why.contains("4791")) => {
                last = Some(Ok(choice));
            }
            result => return result.map(|(_, choice)| choice),
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    last.expect("a thousand attempts")
}

fn choose_in(ns: &NetNs, want: Option<Backend>) -> Choice {
    ns.run(|| choose_in_thread("v0", want)).expect("a port")
}

#[test]
fn a_veth_without_rules_gets_packet() {
    let pair = or_skip!("auto::a_veth_without_rules_gets_packet", Pair::new_seeing());
    let choice = choose_in(&pair.a, None);
    assert_eq!((choice.backend, choice.tried.len()), (Backend::Packet, 0), "{choice}");
    assert!(choice.reason.contains("veth"), "{choice}");
    let lo = pair.a.run(|| choose_in_thread("lo", None)).expect("a port");
    assert_eq!(lo.backend, Backend::Udp);
    assert!(lo.reason.contains("loopback"), "{lo}");
}

#[test]
fn a_preview_is_what_would_be_chosen() {
    let pair = or_skip!("auto::a_preview_is_what_would_be_chosen", Pair::new());
    for name in ["v0", "lo"] {
        let (capabilities, choice) = pair.a.run(|| {
            let iface = Interface::by_name(name).expect("the interface");
            let address = iface.addresses[0].0;
            preview(&iface, &[address], None, &PortConfig::default(), &Agent::off())
                .expect("a choice")
        });
        assert_eq!(Some(choice.backend), capabilities.map(|c| c.backend), "{choice}");
        assert_eq!(choice, pair.a.run(|| choose_in_thread(name, None)).expect("a port"));
    }
}

#[test]
fn a_rule_that_packet_would_bypass_means_udp() {
    let pair = or_skip!("auto::a_rule_that_packet_would_bypass_means_udp", Pair::new_seeing());
    // A shaper also applies to `packet`.
    pair.a.sh("tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 50ms");
    assert_eq!(choose_in(&pair.a, None).backend, Backend::Packet);
    pair.a.sh("nft add table inet t
               nft add chain inet t out '{ type filter hook output priority 0; }'
               nft add rule inet t out udp dport 4791 drop");
    let choice = choose_in(&pair.a, None);
    assert_eq!(choice.backend, Backend::Udp);
    assert!(choice.reason.contains("chain out of table inet t"), "{choice}");
    assert_eq!(choice.tried[0].0, Backend::Packet);
    // A named backend is taken, but the choice lists the rules that it bypasses.
    let choice = choose_in(&pair.a, Some(Backend::Packet));
    assert_eq!(choice.backend, Backend::Packet);
    assert!(choice.reason.contains("bypasses nft: rule"), "{choice}");
}

#[test]
fn rules_that_cannot_be_seen_mean_udp() {
    let pair = or_skip!("auto::rules_that_cannot_be_seen_mean_udp", Pair::new());
    let blind = || without_capability(NET_ADMIN, || choose_in_thread("v0", None));
    let choice = pair.a.run(blind).expect("a port");
    assert_eq!(choice.backend, Backend::Udp);
    assert!(choice.reason.contains("CAP_NET_ADMIN"), "{choice}");
}

#[test]
fn without_the_capability_to_open_it_udp_is_taken() {
    let pair = or_skip!("auto::without_the_capability_to_open_it_udp_is_taken", Pair::new_seeing());
    let lame = |want| move || without_capability(NET_RAW, || choose_in_thread("v0", want));
    let choice = pair.a.run(lame(None)).expect("a port");
    assert_eq!(choice.backend, Backend::Udp);
    assert!(choice.tried[0].1.contains("--cap-add NET_RAW"), "{choice}");
    let wish = pair.a.run(lame(Some(Backend::Packet))).expect_err("not opened");
    assert_eq!(wish.backend, Backend::Packet);
    assert!(pair.a.run(lame(Some(Backend::Sim))).is_err());
}

fn choose_with(agent: &Agent, want: Option<Backend>) -> Result<Choice, OpenError> {
    let iface = Interface::by_name("v0").expect("the interface");
    let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
    let config = PortConfig::default();
    choose(&iface, &addresses[..1], want, &config, agent).map(|(_, choice)| choice)
}

#[test]
fn the_agent_opens_and_sees_what_the_process_may_not() {
    let pair = or_skip!("auto::the_agent_opens_and_sees", Pair::new_seeing());
    let server = Server::honest(&pair.a);
    let agent = server.agent();
    // It may open, and not see; see, and not open.
    for lacking in [NET_ADMIN, NET_RAW] {
        let choose = || without_capability(lacking, || choose_with(&agent, None));
        let choice = pair.a.run(choose).expect("a port");
        assert_eq!((choice.backend, choice.tried.len()), (Backend::Packet, 0), "{choice}");
        assert!(choice.reason.contains("opened by the agent"), "{choice}");
    }
    let given = server.given.lock().expect("no panic").len();
    assert_eq!(given, 2);
    // A process with both rights asks no agent.
    let choice = pair.a.run(|| choose_with(&agent, None)).expect("a port");
    assert_eq!(choice.backend, Backend::Packet);
    assert!(!choice.reason.contains("agent"), "{choice}");
    assert_eq!(server.given.lock().expect("no panic").len(), given);
}

#[test]
fn a_rule_that_only_the_agent_sees_means_udp_unless_the_backend_is_named() {
    let pair = or_skip!("auto::a_rule_that_only_the_agent_sees", Pair::new_seeing());
    let server = Server::honest(&pair.a);
    let agent = server.agent();
    pair.a.sh("nft add table inet t
               nft add chain inet t out '{ type filter hook output priority 0; }'
               nft add rule inet t out udp dport 4791 drop");
    let blind = |want| {
        let agent = &agent;
        move || without_capability(NET_ADMIN, || choose_with(agent, want))
    };
    let choice = pair.a.run(blind(None)).expect("a port");
    assert_eq!(choice.backend, Backend::Udp, "{choice}");
    assert!(choice.reason.contains("would bypass nft: rule"), "{choice}");
    assert!(choice.reason.ends_with("says the agent"), "{choice}");
    let lame = || without_capability(NET_RAW, || choose_with(&agent, Some(Backend::Packet)));
    let choice = pair.a.run(lame).expect("a port");
    assert_eq!(choice.backend, Backend::Packet);
    assert!(choice.reason.contains("asked for; it bypasses nft: rule"), "{choice}");
    assert!(choice.reason.contains("opened by the agent"), "{choice}");
    // A rule at egress binds both.
    pair.a
        .sh("nft flush ruleset; tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 9ms");
    assert_eq!(pair.a.run(blind(None)).expect("a port").backend, Backend::Packet);
}

#[test]
fn other_virtual_interfaces_get_udp() {
    let pair = or_skip!("auto::other_virtual_interfaces_get_udp", Pair::new());
    pair.a.sh("ip link add b0 type bridge; ip address add 10.7.0.1/24 dev b0
               ip link set b0 up");
    let choice = pair.a.run(|| choose_in_thread("b0", None)).expect("a port");
    assert_eq!(choice.backend, Backend::Udp);
    assert!(choice.reason.contains("bridge"), "{choice}");
    pair.a.sh("ip tuntap add tap0 mode tap; ip address add 10.8.0.1/24 dev tap0
               ip link set tap0 up; ip link add link v0 mv0 type macvlan
               ip address add 10.9.9.1/24 dev mv0; ip link set mv0 up");
    for (name, cause) in [("tap0", "slirp4netns, pasta"), ("mv0", "a macvlan, which no agent")] {
        let choice = pair.a.run(|| choose_in_thread(name, None)).expect("a port");
        assert_eq!(choice.backend, Backend::Udp);
        assert!(choice.reason.contains(cause), "{choice}");
        assert!(choice.reason.ends_with("a bridge network of the engine's has a veth"), "{choice}");
        let carried = pair.a.run(|| carried_by_program(name));
        assert_eq!(carried.is_some(), name == "tap0", "{carried:?}");
    }
}

#[test]
fn long_lists_are_cut() {
    let items: Vec<String> = (1..=5).map(|i| i.to_string()).collect();
    assert_eq!(list(&items), "1; 2; 3; and 2 more");
    assert_eq!(list(&items[..3]), "1; 2; 3");
}
