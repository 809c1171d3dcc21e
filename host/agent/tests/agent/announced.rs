//! Addresses that a container gets later, and the network that has to find them.

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};
use std::os::fd::AsRawFd as _;

use crate::asker::eventually;
use crate::lab::host_or_skip;

/// A container announces an address once, perhaps before the agent lets it out.
#[test]
fn a_new_ethernet_address_is_where_the_bridge_looks_for_it() {
    let mut host = host_or_skip!("announced::a_new_ethernet_address", 2);
    host.start();
    let mut asker = host.asker(0);
    asker.granted(host.addresses(0)[0]);
    let [container, other] = [0, 1].map(|index| host.container(index).netns());
    // It says nothing itself. Its address was at another place before.
    let off = || std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
    container.run(off).expect("entered").expect("written");
    let (mac, text) = ([2, 0, 0, 0, 0x91, 1], "02:00:00:00:91:01");
    let lab = host.lab.host();
    let [end, other_end] = [0, 1].map(|index| host.container(index).host_end());
    let before = format!("bridge fdb replace {text} dev {other_end} master dynamic");
    lab.command(&before).expect("an entry");
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let listen = || socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll);
    let heard = other.run(listen).expect("entered").expect("a socket");
    container.ip(&["link", "set", "eth0", "address", text]).expect("set");
    let is_at = |end: &str| {
        let all = lab.json("bridge -j fdb show br br0").expect("a table");
        all.as_array().expect("a list").iter().any(|it| it["mac"] == text && it["ifname"] == end)
    };
    eventually("the bridge has the address at its port", || is_at(end) && !is_at(other_end));
    eventually("the other ports got a frame of the address", || {
        let mut frame = [0; 60];
        let length = recv(heard.as_raw_fd(), &mut frame, MsgFlags::empty()).unwrap_or(0);
        length == frame.len() && frame[6..14] == [&mac[..], &[0x80, 0x35]].concat()
    });
}
