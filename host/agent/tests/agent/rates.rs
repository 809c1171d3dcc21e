//! Rates of classes: everything that goes into a container and out of it passes them.

use std::net::{IpAddr, TcpListener};

use rocinante_agent::control;
use rocinante_netdev::for_agent::bpf::asm::{Asm, Reg};
use rocinante_netdev::for_agent::bpf::{Program, TCX_NEXT};
use serde_json::Value;

use crate::asker::eventually;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};
use crate::reload::reload;

const BYTES: usize = 3 << 20;

/// The first container alone.
const CLASS: &str = "[[class]]\nname = \"slow\"\ncontainers = [\"veth0\"]\n";
const BOTH: &str = "ingress_rate = \"200mbit\"\negress_rate = \"100mbit\"\n";

/// Sends bytes from one container to another by TCP.
fn transfer(host: &Host, from: usize, to: usize) {
    let [address, _]: [IpAddr; 2] = host.addresses(to);
    let listener = host.container(to).run(|| TcpListener::bind((address, 0)));
    host.transfer(from, listener.expect("entered").expect("a socket"), BYTES);
}

fn status(host: &Host, container: usize) -> Value {
    let name = host.container(container).host_end();
    let status = host.status();
    let all = status["containers"].as_array().expect("a list");
    all.iter().find(|it| it["name"] == name).expect("it is known").clone()
}

fn count(status: &Value, way: &str, what: &str) -> u64 {
    status[way][what].as_u64().unwrap_or_else(|| panic!("{status:#}"))
}

/// The disciplines of a link on the host, with their handles.
pub(crate) fn disciplines(host: &Host, link: &str) -> Vec<String> {
    let listing = host.lab.host().json(&format!("tc -j qdisc show dev {link}"));
    let listing = listing.expect("a list");
    let all = listing.as_array().expect("a list").iter();
    let text = |it: &Value, key: &str| it[key].as_str().unwrap_or_default().to_owned();
    all.map(|it| format!("{} {}", text(it, "kind"), text(it, "handle"))).collect()
}

fn is_shaped(host: &Host, link: &str) -> bool {
    disciplines(host, link).contains(&"tbf 4791:".to_owned())
}

/// The rate of the tbf at the root of a link, in bytes per second.
fn rate(host: &Host, link: &str) -> u64 {
    let all = host.lab.host().json(&format!("tc -j qdisc show dev {link}")).expect("a list");
    all[0]["options"]["rate"].as_u64().unwrap_or_else(|| panic!("{all:#}"))
}

pub(crate) fn ifbs(host: &Host) -> Vec<String> {
    let links = host.lab.host().json("ip -j link show type ifb").expect("a list");
    let names = links.as_array().expect("a list").iter();
    // The kernel lists an empty object for each link that is left out.
    let names = names.filter_map(|link| link["ifname"].as_str());
    names.filter(|name| name.starts_with("roce-")).map(str::to_owned).collect()
}

/// The names of the programs at the ingress of a container's end on the host.
pub(crate) fn programs(host: &Host, container: usize) -> Vec<String> {
    let index = host.index(host.container(container).host_end());
    let names = || -> std::io::Result<Vec<String>> {
        Program::at_ingress(index)?.iter().map(|it| Ok(it.described()?.name)).collect()
    };
    host.lab.host().run(names).expect("entered").expect("listed")
}

#[test]
fn what_goes_in_and_out_passes_the_rates_of_the_class() {
    let mut host = host_or_skip!("rates::what_goes_in_and_out", 2);
    host.configure(CLASS);
    host.configure(BOTH);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    (0..2).for_each(|it| askers[it].granted(host.addresses(it)[0]));
    transfer(&host, 0, 1);
    let slow = status(&host, 0);
    assert_eq!(slow["class"]["ingress_rate"], 200_000_000);
    assert_eq!(
        (&slow["ingress"]["by"], &slow["egress"]["by"]),
        (&"shaper".into(), &"shaper".into())
    );
    assert!(count(&slow, "egress", "bytes") > BYTES as u64, "{slow:#}");
    assert!(count(&slow, "egress", "delayed") > 0, "{slow:#}");
    assert!(count(&slow, "ingress", "bytes") < BYTES as u64, "{slow:#}");
    transfer(&host, 1, 0);
    let slow = status(&host, 0);
    assert!(count(&slow, "ingress", "bytes") > BYTES as u64, "{slow:#}");
    assert!(count(&slow, "ingress", "delayed") > 0, "{slow:#}");
    let (_, said) = host.operator(&["status", "veth0"]);
    assert!(said.contains("  rate into it: 200mbit, ") && said.contains("out of it: 100mbit"));
    // The other one has none.
    let other = status(&host, 1);
    assert!(other["ingress"].is_null() && other["egress"].is_null(), "{other:#}");
    assert_eq!((programs(&host, 1), ifbs(&host).len()), (vec!["roce_sources".to_owned()], 1));
    // Frames of a port pass as well, and arrive.
    let before = count(&slow, "egress", "bytes");
    let [v4, _] = host.addresses(0);
    let IpAddr::V4(v4) = v4 else { unreachable!("the first is IPv4") };
    let mac = host.mac(0);
    let frame = crate::forged::own_frame(mac, v4.octets());
    let listener = crate::forged::listener(&host, 1);
    askers[0].send(&frame);
    let own = || crate::forged::arrived(&listener).contains(&9);
    eventually("the frame arrives", own);
    let after = count(&status(&host, 0), "egress", "bytes");
    assert!(after >= before + frame.len() as u64, "{before} {after}");
}

#[test]
fn a_reload_changes_rates_at_once_and_takes_them_off() {
    let mut host = host_or_skip!("rates::a_reload_changes_rates", 2);
    host.configure(CLASS);
    host.start();
    let path = control::path(&host.state());
    control::introduce(&path, &about(&host, 0)).expect("served");
    assert!(!is_shaped(&host, "veth0") && ifbs(&host).is_empty());
    reload(&host, &format!("{CLASS}{BOTH}"));
    let rate = |link: &str| rate(&host, link);
    let [ifb] = &ifbs(&host)[..] else { panic!("{:?}", ifbs(&host)) };
    assert_eq!((rate("veth0"), rate(ifb)), (25_000_000, 12_500_000));
    assert_eq!(programs(&host, 0), ["roce_sources", "roce_rate"]);
    transfer(&host, 0, 1);
    let before = count(&status(&host, 0), "egress", "bytes");
    // Another rate, with the counters of before: nothing is set up anew.
    reload(&host, &format!("{CLASS}ingress_rate = \"1.5G\"\negress_rate = 3000000000"));
    assert_eq!((rate("veth0"), rate(ifb)), (187_500_000, 375_000_000));
    assert!(count(&status(&host, 0), "egress", "bytes") >= before);
    // Nonsense leaves it as it is.
    for nonsense in ["\"fast\"", "\"0\"", "\"5mbps\"", "-1", "1", "1.5", "[]"] {
        reload(&host, &format!("{CLASS}egress_rate = {nonsense}"));
        assert_eq!(rate(ifb), 375_000_000, "{nonsense}");
    }
    let refusals = host.log().iter().filter(|line| line.contains("stays as it was")).count();
    assert_eq!(refusals, 7, "{:#?}", host.log());
    reload(&host, &format!("{CLASS}ingress_rate = \"2G\""));
    assert!(ifbs(&host).is_empty() && is_shaped(&host, "veth0"));
    reload(&host, "");
    assert!(!is_shaped(&host, "veth0"));
    assert_eq!(programs(&host, 0), ["roce_sources"]);
    transfer(&host, 0, 1);
}

#[test]
fn rates_outlive_the_agent_and_end_with_their_container() {
    let mut host = host_or_skip!("rates::rates_outlive_the_agent", 2);
    let all = "[[class]]\nname = \"default\"\n";
    host.configure(all);
    host.configure(BOTH);
    host.start();
    let path = control::path(&host.state());
    for it in [0, 1] {
        control::introduce(&path, &about(&host, it)).expect("served");
    }
    assert_eq!(ifbs(&host).len(), 2);
    host.kill();
    transfer(&host, 0, 1);
    assert!(is_shaped(&host, "veth0") && is_shaped(&host, "veth1"));
    host.start();
    let slow = status(&host, 0);
    assert!(count(&slow, "egress", "bytes") > BYTES as u64, "it is the same: {slow:#}");
    // The next request mends a missing part.
    host.lab.host().tc(&["qdisc", "del", "dev", "veth0", "root"]).expect("removed");
    let index = host.index("veth0");
    host.lab.host().ip(&["link", "del", &format!("roce-{index}")]).expect("removed");
    host.asker(0).granted(host.addresses(0)[0]);
    assert!(is_shaped(&host, "veth0") && ifbs(&host).len() == 2);
    transfer(&host, 0, 1);
    // A container ends while an agent runs, and another one while none does.
    host.lab.host().ip(&["link", "del", "veth0"]).expect("removed");
    eventually("its ifb goes", || ifbs(&host).len() == 1);
    host.kill();
    host.lab.host().ip(&["link", "del", "veth1"]).expect("removed");
    assert_eq!(ifbs(&host).len(), 1);
    host.start();
    eventually("its ifb goes", || ifbs(&host).is_empty());
}

/// To set a tbf again fills its bucket. One that was changed by hand shows that none is set.
#[test]
fn requests_fill_no_bucket() {
    let mut host = host_or_skip!("rates::requests_fill_no_bucket", 2);
    host.configure(CLASS);
    host.configure(BOTH);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    let (lab, v4) = (host.lab.host(), host.addresses(0)[0]);
    let links = ["veth0".to_owned(), format!("roce-{}", host.index("veth0"))];
    for link in &links {
        let by_hand = ["root", "handle", "4791:", "tbf", "rate", "1gbit", "burst", "1m"];
        let change = [&["qdisc", "change", "dev", link], &by_hand[..], &["limit", "2m"]].concat();
        lab.tc(&change).expect("changed");
    }
    let rates = || links.each_ref().map(|link| rate(&host, link));
    for _ in 0..10 {
        askers[0].granted(v4);
    }
    control::introduce(&control::path(&host.state()), &about(&host, 0)).expect("served");
    assert_eq!(rates(), [125_000_000; 2]);
    // A missing one is made, and the other stays.
    for (link, after) in [(0, [25_000_000, 125_000_000]), (1, [25_000_000, 12_500_000])] {
        lab.tc(&["qdisc", "del", "dev", &links[link], "root"]).expect("removed");
        askers[0].granted(v4);
        assert_eq!(rates(), after);
    }
}

#[test]
fn nothing_of_rates_stays_when_containers_are_released() {
    let mut host = host_or_skip!("rates::nothing_of_rates_stays", 2);
    host.configure("[[class]]\nname = \"default\"\n");
    host.configure(BOTH);
    host.start();
    let path = control::path(&host.state());
    let introduce = |host: &Host| {
        for it in [0, 1] {
            control::introduce(&path, &about(host, it)).expect("served");
        }
    };
    let is_left = |host: &Host| {
        let links = ["veth0", "veth1"];
        let has_programs = (0..2).any(|it| !programs(host, it).is_empty());
        has_programs || links.iter().any(|it| is_shaped(host, it)) || !ifbs(host).is_empty()
    };
    introduce(&host);
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(is_good && !is_shaped(&host, "veth0") && is_shaped(&host, "veth1"), "{said}");
    assert_eq!((programs(&host, 0).len(), ifbs(&host).len()), (0, 1));
    introduce(&host);
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good && !is_left(&host), "{said}");
    // Without an agent, and without the program that judges senders.
    introduce(&host);
    let filter = host.filter(0).expect("a program");
    host.kill();
    host.lab.host().run(|| filter.detach()).expect("entered").expect("detached");
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good && !is_left(&host), "{said}");
    assert_eq!(said.matches(" released").count(), 2, "{said}");
}

/// Each stays as it is, and the container gets no port: its rates would not bind.
#[test]
fn what_others_have_put_there_is_refused_by_name() {
    let mut host = host_or_skip!("rates::what_others_have_put_there", 1);
    host.configure("[[class]]\nname = \"default\"\n");
    host.configure(BOTH);
    host.start();
    let [v4, _] = host.addresses(0);
    let mut asker = host.asker(0);
    let lab = host.lab.host();
    let mut refused = |foreign: &str| {
        let refused = asker.refused(v4);
        assert!(refused.starts_with("Failed") && refused.contains("is in the way"), "{refused}");
        assert!(refused.contains(foreign), "{refused}");
        let status = status(&host, 0);
        assert!(status["rate_fault"].as_str().is_some_and(|it| it.contains(foreign)), "{status:#}");
        assert_eq!(host.ports(), 0);
    };
    lab.command("tc qdisc add dev veth0 root handle 77: htb").expect("added");
    refused("htb 77: at the root of veth0");
    let (_, said) = host.operator(&["status"]);
    assert!(said.contains("  rates: not in force: htb 77: "), "{said}");
    // The agent's own handle is no excuse, and a release leaves it where it is.
    lab.command("tc qdisc del dev veth0 root").expect("removed");
    lab.command("tc qdisc add dev veth0 root handle 4791: htb").expect("added");
    refused("htb 4791: at the root of veth0");
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(is_good, "{said}");
    assert_eq!(disciplines(&host, "veth0"), ["htb 4791:"]);
    lab.command("tc qdisc del dev veth0 root").expect("removed");
    lab.command("tc qdisc add dev veth0 ingress").expect("added");
    let filter = "tc filter add dev veth0 parent ffff: protocol all u32 match u32 0 0 flowid 1:1";
    lab.command(filter).expect("added");
    refused("a filter (u32) at the ingress of veth0");
    let listed = lab.command("tc filter show dev veth0 ingress").expect("a list");
    assert!(listed.contains("u32"), "{listed}");
    lab.command("tc qdisc del dev veth0 ingress").expect("removed");
    let (index, mut asm) = (host.index("veth0"), Asm::default());
    asm.mov_imm(Reg::R0, TCX_NEXT);
    asm.exit();
    let program = Program::load_classifier("roce_rate", &asm.assemble()).expect("loaded");
    let others = lab.run(|| program.attach_tcx(index, true)).expect("entered").expect("attached");
    refused("the program \"roce_rate\" at tcx ingress of veth0");
    assert_eq!(programs(&host, 0), ["roce_sources", "roce_rate"]);
    drop(others);
    lab.ip(&["link", "add", &format!("roce-{index}"), "type", "bridge"]).expect("added");
    refused(&format!("the link roce-{index}"));
    lab.ip(&["link", "del", &format!("roce-{index}")]).expect("it is there");
    asker.granted(v4);
    assert!(status(&host, 0)["rate_fault"].is_null());
    assert_eq!(programs(&host, 0), ["roce_sources", "roce_rate"]);
}

/// An ifb takes frames past nft chains at the ingress: a policer does not.
#[test]
fn beside_nft_chains_at_the_ingress_a_policer_binds() {
    let mut host = host_or_skip!("rates::beside_nft_chains", 2);
    host.configure(CLASS);
    host.configure("egress_rate = \"1mbit\"\n");
    host.start();
    let chain = "table netdev t { chain c { type filter hook ingress device veth0 priority 0; \
                 ip protocol tcp counter;\n}\n}";
    if let Err(error) = host.lab.host().nft(chain) {
        return crate::lab::skip("rates::beside_nft_chains", &error);
    }
    let [v4, _] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.granted(v4);
    let slow = status(&host, 0);
    assert_eq!(slow["egress"]["by"], "policer", "{slow:#}");
    assert!(ifbs(&host).is_empty());
    let (_, said) = host.operator(&["status", "veth0"]);
    assert!(said.contains("nft chains are at its ingress"), "{said}");
    // The burst of 128 KiB passes, and the chain counts it.
    let mac = host.mac(0);
    let IpAddr::V4(own) = v4 else { unreachable!("the first is IPv4") };
    let frame = crate::forged::own_frame(mac, own.octets());
    let listener = crate::forged::listener(&host, 1);
    asker.send(&frame);
    eventually("the frame arrives", || crate::forged::arrived(&listener).contains(&9));
    let long = [&frame[..], &[0; 1300]].concat();
    eventually("frames are dropped", || {
        (0..50).for_each(|_| asker.send(&long));
        count(&status(&host, 0), "egress", "dropped") > 0
    });
    // The chain goes: frames wait again.
    host.lab.host().nft("delete table netdev t").expect("removed");
    asker.granted(v4);
    assert_eq!(status(&host, 0)["egress"]["by"], "shaper");
    assert_eq!(ifbs(&host).len(), 1);
    host.lab.host().nft(chain).expect("added");
    asker.granted(v4);
    assert_eq!(status(&host, 0)["egress"]["by"], "policer");
    assert!(ifbs(&host).is_empty());
}
