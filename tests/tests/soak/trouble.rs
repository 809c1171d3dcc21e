//! Changes of the network during the work: addresses, routes, neighbours and links change, and are
//! put back.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use rocinante_lab::{Lab, Netns};

use super::lane::mix;

/// How long a change lasts, ms: less than any connection's patience.
const LASTS: [u64; 2] = [20, 600];
/// The time without a change between two changes, ms.
const PAUSE: [u64; 2] = [200, 1200];

/// A change, and how it is put back. Both are arguments of `ip`: `{own}` and `{peer}` stand for
/// addresses, `{n}` for the container's number, and `{port}` for the host's end of its veth.
struct Change {
    name: &'static str,
    place: Place,
    change: &'static str,
    back: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Container,
    Host,
}
use Place::{Container, Host};

#[rustfmt::skip]
const CHANGES: &[Change] = &[
    change("another address", Container,
           "address add 10.77.9.{n}/24 dev eth0", "address del 10.77.9.{n}/24 dev eth0"),
    change("no address", Container,
           "address del {own}/24 dev eth0", "address add {own}/24 dev eth0"),
    change("a route to nowhere", Container,
           "route add blackhole {peer}/32", "route del blackhole {peer}/32"),
    change("a route by a router that is not there", Container,
           "route add {peer}/32 via 10.77.0.200", "route del {peer}/32 via 10.77.0.200"),
    change("a route of its own", Container,
           "route add {peer}/32 dev eth0", "route del {peer}/32 dev eth0"),
    change("a wrong neighbour", Container,
           "neighbour replace {peer} lladdr 02:00:00:00:00:ee nud permanent dev eth0",
           "neighbour del {peer} dev eth0"),
    change("no neighbours", Container, "neighbour flush dev eth0", "neighbour flush dev eth0"),
    change("another MAC address", Container,
           "link set dev eth0 address 02:00:0a:4d:01:{n}",
           "link set dev eth0 address 02:00:0a:4d:00:{n}"),
    change("its link down", Container, "link set dev eth0 down", "link set dev eth0 up"),
    change("the host's link down", Host, "link set dev {port} down", "link set dev {port} up"),
    change("not at the bridge", Host,
           "link set dev {port} nomaster", "link set dev {port} master br0"),
];

const fn change(
    name: &'static str,
    place: Place,
    change: &'static str,
    back: &'static str,
) -> Change {
    Change { name, place, change, back }
}

/// The state of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    Changed,
    /// It is as before. Requests posted in between waited for this time.
    Back(Duration),
}

/// Makes each change at a container until `work` has judged it `times` times, and puts it back a
/// moment later. Calls `work` both while the change lasts and after it, when that says whether it
/// has judged it: on a busy machine `ip` may wait long for the kernel.
pub(super) fn each(
    lab: &Lab,
    [at, peer]: [usize; 2],
    times: u32,
    mut work: impl FnMut(&str, When) -> bool,
) {
    for change in CHANGES {
        let mut judged = 0;
        while judged < times {
            run(lab, change, at, peer, change.change);
            let changed = Instant::now();
            work(change.name, When::Changed);
            std::thread::sleep(Duration::from_millis(LASTS[0]));
            run(lab, change, at, peer, change.back);
            has_carrier(lab, at);
            judged += u32::from(work(change.name, When::Back(changed.elapsed())));
        }
    }
}

/// Makes random changes one after the other until `stop` returns `true`; returns how often each.
pub(super) fn make(lab: &Lab, seed: u64, stop: impl Fn() -> bool) -> BTreeMap<&'static str, u64> {
    let mut made = BTreeMap::new();
    let mut random = seed;
    let mut between = |[least, most]: [u64; 2]| {
        random = mix(random);
        least + random % (most - least)
    };
    while !stop() {
        std::thread::sleep(Duration::from_millis(between(PAUSE)));
        let change = &CHANGES[between([0, CHANGES.len() as u64]) as usize];
        let at = between([0, lab.containers().len() as u64]) as usize;
        // The survivor is in the first container, and is everyone's peer.
        let peer = if at == 0 { 1 + between([0, 2]) as usize } else { 0 };
        run(lab, change, at, peer, change.change);
        std::thread::sleep(Duration::from_millis(between(LASTS)));
        run(lab, change, at, peer, change.back);
        *made.entry(change.name).or_default() += 1;
    }
    made
}

fn run(lab: &Lab, change: &Change, at: usize, peer: usize, arguments: &str) {
    let container = lab.container(at);
    let number = (at + 1).to_string();
    let arguments = arguments
        .replace("{own}", &container.ipv4().to_string())
        .replace("{peer}", &lab.container(peer).ipv4().to_string())
        .replace("{port}", container.host_end())
        .replace("{n}", &format!("{number:0>2}"));
    let netns = if change.place == Place::Host { lab.host() } else { container.netns() };
    ip(netns, &arguments);
    if change.name == "another MAC address" {
        // A machine that changes its own address announces it, or its peers forget it: these
        // forget.
        for other in lab.containers() {
            ip(other.netns(), "neighbour flush dev eth0");
        }
    }
}

/// Waits until both ends of a container's link carry frames. The kernel looks at a carrier in its
/// own time: later, the more namespaces come and go meanwhile.
fn has_carrier(lab: &Lab, at: usize) {
    let container = lab.container(at);
    let ends = [(container.netns(), "eth0"), (lab.host(), container.host_end())];
    let end = Instant::now() + Duration::from_secs(60);
    for (netns, device) in ends {
        while !ip(netns, &format!("-o link show dev {device}")).contains("state UP") {
            assert!(Instant::now() < end, "{device} has no carrier");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn ip(netns: &Netns, arguments: &str) -> String {
    let mut command = Command::new("ip");
    command.args(arguments.split(' '));
    let output = netns.output(&mut command).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // A change that the kernel has undone meanwhile need not be put back.
    let gone = arguments.starts_with("neighbour del") || arguments.starts_with("route del");
    assert!(output.status.success() || gone, "ip {arguments}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
