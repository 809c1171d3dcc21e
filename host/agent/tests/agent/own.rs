//! Rates and the MTU that an engine has for one container.

use rocinante_agent::control::{self, About};
use rocinante_agent::host::Rates;
use rocinante_lab::Netns;
use serde_json::Value;

use crate::asker::eventually;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};
use crate::rates::{ifbs, programs};
use crate::reload::reload;

const CLASS: &str = "[[class]]\nname = \"default\"\n";
const BOTH: &str = "ingress_rate = \"200mbit\"\negress_rate = \"100mbit\"\n";

/// Rates into a container and out of it, each with a burst in bits.
fn rates(ways: [Option<(&str, u64)>; 2]) -> Rates {
    let rate = |way: usize| ways[way].map(|(rate, _)| rate.parse().expect("a rate"));
    let burst = |way: usize| ways[way].map(|(_, bits)| bits);
    let (ingress, egress) = (rate(0), rate(1));
    Rates { ingress, egress, ingress_burst_bits: burst(0), egress_burst_bits: burst(1) }
}

fn with_rates(host: &Host, container: usize, rates: Rates) -> About {
    About { rates: Some(rates), ..about(host, container) }
}

fn with_mtu(host: &Host, container: usize, mtu: u32) -> About {
    About { mtu: Some(mtu), ..about(host, container) }
}

/// The result of an introduction, or why there is none.
fn introduce(host: &Host, about: &About) -> Result<(), String> {
    control::introduce(&host.control(), about).map(drop).map_err(|e| e.to_string())
}

/// Bytes in a second and bytes at once of the tbf of a link on the host.
fn tbf(host: &Host, link: &str) -> Option<[u64; 2]> {
    let all = host.lab.host().json(&format!("tc -j qdisc show dev {link}")).expect("a list");
    let options = &all.as_array()?.iter().find(|it| it["kind"] == "tbf")?["options"];
    Some([options["rate"].as_u64()?, options["burst"].as_u64()?])
}

/// As [`tbf`], into a container and out of it.
fn in_force(host: &Host, container: usize) -> [Option<[u64; 2]>; 2] {
    let end = host.container(container).host_end();
    let ifb = format!("roce-{}", host.index(end));
    let out = ifbs(host).contains(&ifb).then(|| tbf(host, &ifb)).flatten();
    [tbf(host, end), out]
}

/// The rates alone.
pub(crate) fn bytes(host: &Host, container: usize) -> [Option<u64>; 2] {
    in_force(host, container).map(|it| it.map(|[rate, _]| rate))
}

/// The status of a container, if it is known.
fn status(host: &Host, container: usize) -> Option<Value> {
    let name = host.container(container).host_end();
    let all = host.status();
    all["containers"].as_array().expect("a list").iter().find(|it| it["name"] == name).cloned()
}

/// The MTUs of a container's interface and of its end on the host.
fn mtus(host: &Host, container: usize) -> [u64; 2] {
    let of = |netns: &Netns, link: &str| {
        netns.json(&format!("ip -j link show {link}")).expect("a link")[0]["mtu"].as_u64()
    };
    let container = host.container(container);
    let ends = [of(container.netns(), "eth0"), of(host.lab.host(), container.host_end())];
    ends.map(|mtu| mtu.expect("a number"))
}

#[test]
fn of_the_rates_of_a_class_and_of_its_own_the_lesser_binds() {
    let mut host = host_or_skip!("own::of_the_rates_of_a_class", 2);
    host.configure(CLASS);
    host.configure(BOTH);
    host.start();
    // The class has less into the first, and the second has less into itself.
    let first = with_rates(&host, 0, rates([Some(("1gbit", 8)), Some(("50mbit", 1 << 24))]));
    let second = with_rates(&host, 1, rates([Some(("150mbit", 1 << 31)), None]));
    introduce(&host, &first).expect("served");
    introduce(&host, &second).expect("served");
    assert_eq!(bytes(&host, 0), [Some(25_000_000), Some(6_250_000)]);
    assert_eq!(bytes(&host, 1), [Some(18_750_000), Some(12_500_000)]);
    // The burst of the class at least, else as asked for, and a second of the rate at most.
    let burst = |container: usize, way: usize| in_force(&host, container)[way].expect("a tbf")[1];
    let is_near = |it: u64, bytes: u64| (bytes - 64..=bytes + 64).contains(&it);
    assert!(is_near(burst(0, 0), 128 << 10), "{}", burst(0, 0));
    assert!(is_near(burst(0, 1), 2 << 20), "{}", burst(0, 1));
    assert!(is_near(burst(1, 0), 18_750_000), "{}", burst(1, 0));
    let class = &status(&host, 0).expect("it is known")["class"];
    assert_eq!(class["egress_rate"], 50_000_000);
    assert_eq!((&class["name"], &class["ingress_rate"]), (&"default".into(), &200_000_000.into()));
    let (_, said) = host.operator(&["status", "veth0"]);
    assert!(said.contains("  rate out of it: 50mbit, "), "{said}");
    // They outlive the agent and their class, and another word that has none.
    host.kill();
    host.start();
    host.lab.host().tc(&["qdisc", "del", "dev", "veth0", "root"]).expect("removed");
    host.asker(0).granted(host.addresses(0)[0]);
    assert_eq!(bytes(&host, 0), [Some(25_000_000), Some(6_250_000)]);
    reload(&host, "");
    assert_eq!(bytes(&host, 0), [Some(125_000_000), Some(6_250_000)]);
    assert_eq!(bytes(&host, 1), [Some(18_750_000), None]);
    introduce(&host, &about(&host, 0)).expect("served");
    assert_eq!(bytes(&host, 0), [Some(125_000_000), Some(6_250_000)]);
    let is_so =
        |about: &About| control::is_introduced(&host.control(), about).map_err(|e| e.to_string());
    assert_eq!(is_so(&first), Ok(Some("veth0".into())));
    let other = with_rates(&host, 0, Rates::default());
    assert!(is_so(&other).expect_err("others").contains("other rates"));
    introduce(&host, &other).expect("served");
    assert_eq!(bytes(&host, 0), [None, None]);
    assert_eq!(programs(&host, 0), ["roce_sources"]);
    host.lab.host().ip(&["link", "del", "veth1"]).expect("removed");
    eventually("its parts go", || status(&host, 1).is_none() && ifbs(&host).is_empty());
}

/// Also when another client introduces all of them, as the OCI hook does.
#[test]
fn two_interfaces_of_a_container_have_each_its_own() {
    let mut host = host_or_skip!("own::two_interfaces", 1);
    host.start();
    let (netns, lab) = (host.container(0).netns(), host.lab.host());
    let veth = ["link", "add", "h30", "type", "veth", "peer", "name", "eth1", "netns"];
    lab.ip(&[&veth[..], &[&netns.path()]].concat()).expect("a veth");
    let first = with_rates(&host, 0, rates([None, Some(("50mbit", 8))]));
    let second = About {
        interface: Some("eth1".into()),
        mtu: Some(4200),
        ..with_rates(&host, 0, rates([Some(("70mbit", 8)), Some(("60mbit", 8))]))
    };
    introduce(&host, &first).expect("served");
    introduce(&host, &second).expect("served");
    introduce(&host, &About { interface: None, ..about(&host, 0) }).expect("served");
    let ifb = format!("roce-{}", host.index("h30"));
    let rate = |link: &str| tbf(&host, link).map(|[rate, _]| rate);
    assert_eq!(bytes(&host, 0), [None, Some(6_250_000)]);
    assert_eq!([rate("h30"), rate(&ifb)], [Some(8_750_000), Some(7_500_000)]);
    assert_eq!(mtus(&host, 0), [9000, 9000]);
    let is_so = |about: &About| control::is_introduced(&host.control(), about).ok().flatten();
    let ends = [is_so(&first), is_so(&second)];
    assert_eq!(ends, [Some("veth0".into()), Some("h30".into())]);
}

/// A filter of others is in the way of the rate out of a container, when that into it is in force.
#[test]
fn nothing_stays_of_an_introduction_that_fails() {
    let mut host = host_or_skip!("own::nothing_stays", 2);
    host.start();
    let before = rates([None, Some(("50mbit", 8))]);
    introduce(&host, &with_rates(&host, 1, before)).expect("served");
    let given = host.may_leave(1);
    let filter = "parent ffff: protocol all u32 match u32 0 0 flowid 1:1";
    for link in ["veth0", "veth1"] {
        host.lab.host().tc(&["qdisc", "add", "dev", link, "ingress"]).expect("added");
        host.lab.host().command(&format!("tc filter add dev {link} {filter}")).expect("added");
    }
    let wanted = rates([Some(("200mbit", 8)), Some(("100mbit", 8))]);
    for container in [0, 1] {
        let late = format!("10.77.0.10{container}/24");
        let netns = host.container(container).netns();
        netns.ip(&["address", "add", &late, "dev", "eth0"]).expect("added");
        let about = About { mtu: Some(4200), ..with_rates(&host, container, wanted) };
        let refused = introduce(&host, &about).expect_err("a filter is in the way");
        assert!(refused.contains("a filter (u32) at the ingress of veth"), "{refused}");
        assert_eq!(mtus(&host, container), [9000, 9000]);
    }
    // The first one is as if it had never been known.
    assert!(host.filter(0).is_none() && status(&host, 0).is_none());
    assert_eq!((bytes(&host, 0), programs(&host, 0).len()), ([None, None], 0));
    // The other one keeps the earlier word, whose rate is not in force either.
    let known = status(&host, 1).expect("it is known");
    assert_eq!(known["class"]["egress_rate"], 50_000_000);
    assert!(known["class"]["ingress_rate"].is_null(), "{known:#}");
    assert!(known["rate_fault"].as_str().is_some_and(|it| it.contains("u32")), "{known:#}");
    assert_eq!(bytes(&host, 1)[0], None);
    let check = control::is_introduced(&host.control(), &with_rates(&host, 1, before));
    assert!(check.expect_err("not in force").to_string().contains("u32"));
    let late = "10.77.0.101".parse().expect("an address");
    assert!(host.may_leave(1).contains(&late) && host.may_leave(1).len() > given.len());
    // Without the filter both are served, with all that they are to have.
    for (container, link) in ["veth0", "veth1"].iter().enumerate() {
        host.lab.host().tc(&["qdisc", "del", "dev", link, "ingress"]).expect("removed");
        let about = About { mtu: Some(4200), ..with_rates(&host, container, wanted) };
        introduce(&host, &about).expect("served");
        assert_eq!(mtus(&host, container), [4200, 4200]);
        assert_eq!(bytes(&host, container), [Some(25_000_000), Some(12_500_000)]);
    }
    assert_eq!(ifbs(&host).len(), 2);
}

/// Another discipline at the end of one interface keeps the container from being served. Its other
/// interface, which was guarded first, is as before, too.
#[test]
fn nothing_stays_at_the_other_ends_of_an_introduction_that_fails() {
    let mut host = host_or_skip!("own::nothing_stays_at_the_other_ends", 2);
    host.start();
    let lab = host.lab.host();
    let second = |end: &str, container: usize| {
        let path = host.container(container).netns().path();
        lab.ip(&["link", "add", end, "type", "veth", "peer", "name", "eth1", "netns", &path])
            .expect("a veth");
    };
    second("h30", 0);
    second("h31", 1);
    // Of the second container its other interface is known before.
    let other = About { interface: Some("eth1".into()), ..about(&host, 1) };
    introduce(&host, &other).expect("served");
    for link in ["veth0", "veth1"] {
        lab.tc(&["qdisc", "add", "dev", link, "root", "pfifo"]).expect("added");
    }
    let known = |host: &Host| {
        let status = host.status();
        let all = status["containers"].as_array().expect("a list");
        all.iter().map(|it| it["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    let before = known(&host);
    for container in [0, 1] {
        let about = with_rates(&host, container, rates([Some(("200mbit", 8)), None]));
        let refused = introduce(&host, &about).expect_err("another discipline is there");
        assert!(refused.contains("do not bind at veth"), "{refused}");
    }
    assert_eq!(known(&host), before);
    let is_guarded = |name: &str| {
        let index = host.index(name);
        let filter = lab.run(|| rocinante_agent::host::SourceFilter::find(index));
        filter.expect("entered").expect("a query").is_some()
    };
    let ends = ["h30", "veth0", "h31", "veth1"];
    assert_eq!(ends.map(is_guarded), [false, false, true, true], "{before:?}");
}

#[test]
fn an_interface_has_the_mtu_that_its_bridge_and_uplinks_carry() {
    let mut host = host_or_skip!("own::an_interface_has_the_mtu", 2);
    host.configure("uplink = [{ interface = \"up1\", rate = \"1gbit\" }]");
    host.start();
    // Less than before, and more; the bridge follows the least of its ports.
    for mtu in [4200, 1280, 8000] {
        introduce(&host, &with_mtu(&host, 0, mtu)).expect("served");
        assert_eq!((mtus(&host, 0), mtus(&host, 1)), ([mtu.into(); 2], [9000; 2]));
    }
    let refused = |host: &Host, container: usize, mtu: u32, said: &str| {
        let before = mtus(host, container);
        let why = introduce(host, &with_mtu(host, container, mtu)).expect_err(said);
        assert!(why.contains(said), "{said}: {why}");
        assert_eq!(mtus(host, container), before);
    };
    refused(&host, 1, 8001, "the MTU of the bridge br0 is 8000, and the container's is 8001");
    assert!(host.filter(1).is_none(), "it is not known");
    let lab = host.lab.host();
    lab.ip(&["link", "set", "br0", "mtu", "9000"]).expect("set");
    introduce(&host, &with_mtu(&host, 1, 8500)).expect("served");
    assert_eq!((mtus(&host, 0), mtus(&host, 1)), ([8000; 2], [8500; 2]));
    refused(&host, 1, 9001, "the bridge br0 is 9000");
    // Those at the ends, whichever client asks.
    for (mtu, said) in [(1279, "not 1279"), (65_536, "not 65536"), (0, "not 0")] {
        refused(&host, 0, mtu, said);
    }
    refused(&host, 0, 65_535, "the bridge br0 is 9000");
    // A port of the bridge that leads out, and an uplink that the configuration names.
    lab.command("ip link add up0 mtu 4000 master br0 type ifb").expect("added");
    refused(&host, 0, 4200, "the uplink up0 is 4000");
    lab.ip(&["link", "set", "up0", "mtu", "4200"]).expect("set");
    introduce(&host, &with_mtu(&host, 0, 4200)).expect("served");
    lab.command("ip link add up1 mtu 1500 type ifb").expect("added");
    lab.command("ip link add up2 mtu 1500 type ifb").expect("added");
    refused(&host, 0, 4200, "the uplink up1 is 1500");
    refused(&host, 1, 1501, "the uplink up1 is 1500");
    introduce(&host, &with_mtu(&host, 1, 1500)).expect("served");
    let is_so = |mtu: u32| {
        control::is_introduced(&host.control(), &with_mtu(&host, 1, mtu)).map_err(|e| e.to_string())
    };
    assert_eq!(is_so(1500), Ok(Some("veth1".into())));
    assert!(is_so(1400).expect_err("it has more").contains("the MTU of eth0 is 1500 now"));
    lab.ip(&["link", "set", "veth1", "mtu", "1400"]).expect("set");
    assert!(is_so(1500).expect_err("one end has less").contains("the MTU of veth1 is 1400 now"));
    // Without a bridge the uplinks alone bind it.
    lab.command("ip link del up1").expect("removed");
    lab.command("ip link set veth1 nomaster").expect("set");
    introduce(&host, &with_mtu(&host, 1, 65_535)).expect("served");
    assert_eq!(mtus(&host, 1), [65_535; 2]);
    // Other links have what they had, and the first container has what it was given.
    assert_eq!(mtus(&host, 0), [4200; 2]);
}

/// Two containers begin at once on a bridge without an MTU of its own: whichever comes first, the
/// other has less then.
#[test]
fn two_that_are_introduced_at_once_have_their_mtu() {
    let mut host = host_or_skip!("own::two_that_are_introduced_at_once", 2);
    host.start();
    for container in [0, 1] {
        let end = host.container(container).host_end();
        host.lab.host().ip(&["link", "set", end, "mtu", "1500"]).expect("set");
        let own = ["link", "set", "eth0", "mtu", "1500"];
        host.container(container).netns().ip(&own).expect("set");
    }
    std::thread::scope(|scope| {
        let both = [0, 1].map(|container| {
            let about = with_mtu(&host, container, 4200);
            let control = host.control();
            scope.spawn(move || control::introduce(&control, &about))
        });
        for it in both {
            it.join().expect("no panic").expect("served");
        }
    });
    assert_eq!([0, 1].map(|container| mtus(&host, container)), [[4200; 2]; 2]);
    // Now the other one is known, and has its MTU.
    let why = introduce(&host, &with_mtu(&host, 0, 4201)).expect_err("the other has less");
    assert!(why.contains("the bridge br0 is 4200"), "{why}");
}
