//! Machines with a second rail: another interface in the subnet of the first.

use std::net::Ipv4Addr;
use std::process::Command;

use rocinante_lab::{BRIDGE, Lab, Netns};

use crate::harness::wait_until;

/// The host's end of a container's second rail.
#[must_use]
pub fn host_end(index: usize) -> String {
    format!("rail{index}")
}

/// Gives a container the rail `eth1`, up and with an address, which is returned. Panics if the
/// kernel refuses that.
#[must_use]
pub fn add(lab: &Lab, index: usize) -> Ipv4Addr {
    let (at, rail) = (lab.container(index), host_end(index));
    let [a, b, c, d] = at.ipv4().octets();
    let second = Ipv4Addr::from([a, b, c, d + 100]);
    let there = at.netns().path();
    let mtu = "mtu 4200";
    let add = format!("link add {rail} {mtu} type veth peer name eth1 {mtu} netns {there}");
    for line in [add, format!("link set {rail} master {BRIDGE} up")] {
        ip(lab.host(), &line);
    }
    // Otherwise each interface answers ARP requests for the other's address, too.
    let conf = "/proc/sys/net/ipv4/conf/all";
    let arp = format!("echo 1 > {conf}/arp_ignore && echo 2 > {conf}/arp_announce");
    assert!(at.output(Command::new("sh").args(["-c", &arp])).unwrap().status.success());
    for line in ["link set eth1 up", &format!("address add {second}/24 dev eth1")] {
        ip(at.netns(), line);
    }
    second
}

/// Waits for the link of the second rail and for the bridge's port: the kernel brings them up at
/// different times. Panics if that takes too long.
pub fn wait_for_link(lab: &Lab, index: usize) {
    let is = |at: &Netns, link: &str, word: &str| {
        let mut show = Command::new("ip");
        show.args(["-d", "-o", "link", "show", "dev", link]);
        String::from_utf8_lossy(&at.output(&mut show).unwrap().stdout).contains(word)
    };
    let (at, host) = (lab.container(index).netns(), lab.host());
    wait_until("the link is up", || {
        is(at, "eth1", "state UP") && is(host, &host_end(index), "state forwarding")
    });
}

/// `ip` with the words of a line. Panics if it fails.
pub fn ip(at: &Netns, line: &str) {
    at.ip(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
}
