//! Uplinks that containers share.

use std::collections::BTreeMap;
use std::net::{IpAddr, TcpListener};

use rocinante_agent::control;
use rocinante_lab::Netns;
use rustix::process::Signal;
use serde_json::Value;

use crate::asker::eventually;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};
use crate::rates::disciplines;
use crate::reload::reload;

const BYTES: usize = 1 << 20;
pub(crate) const UPLINK: &str = "uplink = [{ interface = \"up0\", rate = \"1gbit\" }]\n";
const CLASSES: &str = "[[class]]\nname = \"a\"\ncontainers = [\"veth0\"]\nuplink_rate = \"300mbit\"\n\
                       [[class]]\nname = \"b\"\ncontainers = [\"veth1\"]\nuplink_rate = \"200mbit\"\n\
                       uplink_ceil = \"400mbit\"\n";

/// Another machine behind a link of the host's bridge.
pub(crate) fn far(host: &Host) -> (Netns, [IpAddr; 2]) {
    let (far, lab) = (Netns::new().expect("a namespace"), host.lab.host());
    let path = far.path();
    let veth = ["link", "add", "up0", "type", "veth", "peer", "name", "far", "netns", &path];
    lab.ip(&veth).expect("a veth");
    let links = lab.json("ip -j link show veth0").expect("a link");
    let bridge = links[0]["master"].as_str().expect("a bridge").to_owned();
    lab.ip(&["link", "set", "up0", "master", &bridge, "up"]).expect("set");
    let addresses = ["10.77.0.200", "fd00:77::200"];
    far.ip(&["address", "add", "10.77.0.200/24", "dev", "far"]).expect("added");
    far.ip(&["address", "add", "fd00:77::200/64", "dev", "far", "nodad"]).expect("added");
    far.ip(&["link", "set", "far", "up"]).expect("set");
    (far, addresses.map(|address| address.parse().expect("an address")))
}

/// Sends bytes from a container to an address there.
fn send(host: &Host, from: usize, far: &Netns, address: IpAddr) {
    let listener = far.run(|| TcpListener::bind((address, 0))).expect("entered");
    host.transfer(from, listener.expect("a socket"), BYTES);
}

/// The classes of the uplink: reserved bytes in a second, the most, and bytes sent.
pub(crate) fn classes(host: &Host) -> BTreeMap<String, [u64; 3]> {
    // Unlike the JSON of tc 6.1, the text has the rates of classes of htb.
    let text = host.lab.host().command("tc -s class show dev up0").expect("a list");
    let mut all = BTreeMap::new();
    let mut name = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |word: &str| {
            let at = words.iter().position(|it| *it == word)?;
            let value = words[at + 1].to_ascii_lowercase();
            let (number, unit) = value.split_at(value.find(|c: char| c.is_alphabetic())?);
            let factor = [("bit", 1), ("kbit", 1000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];
            let (_, factor) = factor.into_iter().find(|(name, _)| *name == unit)?;
            Some(number.parse::<u64>().ok()? * factor)
        };
        match words[..] {
            ["class", "htb", id, ..] => {
                name = id.to_owned();
                let of = [after("rate").unwrap_or(0), after("ceil").unwrap_or(0), 0];
                all.insert(name.clone(), of);
            }
            ["Sent", bytes, ..] => {
                all.get_mut(&name).expect("a class")[2] = bytes.parse().expect("a number");
            }
            _ => {}
        }
    }
    all
}

/// The class of a container: its number is that of its end on the host.
pub(crate) fn class_of(host: &Host, container: usize) -> String {
    format!("4791:{:x}", 0x10 + host.index(host.container(container).host_end()))
}

fn introduce(host: &Host, containers: std::ops::Range<usize>) {
    for it in containers {
        control::introduce(&host.control(), &about(host, it)).expect("served");
    }
}

#[test]
fn containers_share_an_uplink_by_their_classes() {
    let mut host = host_or_skip!("uplinks::containers_share_an_uplink", 3);
    let (far, addresses) = far(&host);
    host.configure(UPLINK);
    host.configure(CLASSES);
    host.start();
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"], "there is no share yet");
    introduce(&host, 0..3);
    let mbit = |classes: &BTreeMap<String, [u64; 3]>, name: &str| {
        let [rate, ceil, _] = classes.get(name).unwrap_or_else(|| panic!("{classes:?}"));
        [rate / 1_000_000, ceil / 1_000_000]
    };
    let all = classes(&host);
    let names = [0, 1].map(|it| class_of(&host, it));
    assert_eq!(mbit(&all, "4791:1"), [1000, 1000]);
    assert_eq!(mbit(&all, "4791:2"), [500, 1000]);
    assert_eq!(mbit(&all, &names[0]), [300, 1000]);
    assert_eq!(mbit(&all, &names[1]), [200, 400]);
    assert_eq!(all.len(), 4, "the third has none: {all:?}");
    // Each frame goes by its source, of both families.
    for (nth, address) in addresses.into_iter().enumerate() {
        let before = classes(&host);
        for (container, class) in [(0, &names[0][..]), (1, &names[1]), (2, "4791:2")] {
            send(&host, container, &far, address);
            let sent = classes(&host)[class][2] - before[class][2];
            assert!(sent > BYTES as u64, "{nth} {class}: {sent}");
            assert!(sent < 2 * BYTES as u64, "{nth} {class}: {sent}");
        }
    }
    let status = host.status();
    assert_eq!(status["agent"]["uplinks"][0]["interface"], "up0");
    assert!(status["agent"]["uplinks"][0]["fault"].is_null(), "{status:#}");
    // Another agent takes it over with its counters, and a container that ends has no share.
    let before = classes(&host)[&names[1]][2];
    host.kill();
    host.start();
    assert!(classes(&host)[&names[1]][2] >= before && before > 0);
    host.lab.host().ip(&["link", "del", "veth0"]).expect("removed");
    eventually("its class goes", || !classes(&host).contains_key(&names[0]));
    assert_eq!(mbit(&classes(&host), "4791:2"), [800, 1000]);
    // Other shares at once, and none.
    reload(&host, &format!("{UPLINK}{}", CLASSES.replace("200mbit", "100mbit")));
    assert_eq!(mbit(&classes(&host), &names[1]), [100, 400]);
    reload(&host, UPLINK);
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"]);
    reload(&host, &format!("{UPLINK}{CLASSES}"));
    assert!(disciplines(&host, "up0").contains(&"htb 4791:".to_owned()));
    reload(&host, CLASSES);
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"]);
}

#[test]
fn nothing_of_shares_stays_and_what_others_have_is_left_alone() {
    let mut host = host_or_skip!("uplinks::nothing_of_shares_stays", 2);
    let (_far, _) = far(&host);
    host.configure(UPLINK);
    host.configure(CLASSES);
    host.lab.host().command("tc qdisc add dev up0 root handle 4791: htb").expect("added");
    host.start();
    introduce(&host, 0..2);
    let fault = |host: &Host| -> Value { host.status()["agent"]["uplinks"][0]["fault"].clone() };
    // What fails again is no news, and is no success either.
    introduce(&host, 0..2);
    let why = fault(&host);
    assert!(why.as_str().is_some_and(|it| it.contains("htb 4791: at the root of up0")), "{why}");
    let (_, said) = host.operator(&["status"]);
    assert!(said.contains("  uplink \"up0\": not shared: htb 4791: "), "{said}");
    host.logged(&["it is not shared", "htb 4791:"]);
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good, "{said}");
    assert_eq!(disciplines(&host, "up0"), ["htb 4791:"]);
    host.lab.host().command("tc qdisc del dev up0 root").expect("removed");
    introduce(&host, 0..2);
    assert!(fault(&host).is_null());
    assert_eq!(classes(&host).len(), 4);
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(is_good, "{said}");
    assert_eq!(classes(&host).len(), 3);
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good, "{said}");
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"]);
    // Without an agent, too.
    introduce(&host, 0..2);
    host.kill();
    assert_eq!(classes(&host).len(), 4);
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good, "{said}");
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"]);
    let index = host.index("up0");
    let left = || rocinante_netdev::for_agent::bpf::Program::at_egress(index).map(|it| it.len());
    assert_eq!(host.lab.host().run(left).expect("entered").expect("listed"), 0);
}

/// It keeps its index when it goes and comes back, and nothing of what was there.
#[test]
fn an_uplink_that_was_away_is_shared_again() {
    let mut host = host_or_skip!("uplinks::an_uplink_that_was_away", 2);
    let (far, _) = far(&host);
    host.configure(UPLINK);
    host.configure(CLASSES);
    host.start();
    introduce(&host, 0..2);
    let (before, index) = (classes(&host).len(), host.index("up0"));
    assert_eq!(before, 4);
    let fault = || host.status()["agent"]["uplinks"][0]["fault"].as_str().map(str::to_owned);
    assert_eq!(fault(), None);
    host.lab.host().ip(&["link", "set", "up0", "netns", &far.path()]).expect("moved");
    eventually("it is away", || fault().is_some_and(|it| it.contains("no such interface")));
    far.ip(&["link", "set", "up0", "netns", &host.lab.host().path()]).expect("moved");
    eventually("it is there", || fault().is_none());
    assert_eq!(host.index("up0"), index);
    assert_eq!(classes(&host).len(), before);
    // It is back when the agent looks.
    host.signal(Signal::STOP);
    host.lab.host().ip(&["link", "set", "up0", "netns", &far.path()]).expect("moved");
    far.ip(&["link", "set", "up0", "netns", &host.lab.host().path()]).expect("moved");
    assert_eq!((host.index("up0"), classes(&host).len()), (index, 0));
    host.signal(Signal::CONT);
    eventually("it is shared", || classes(&host).len() == before);
}
