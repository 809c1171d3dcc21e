//! Frames that are not the container's own: each is counted at the host's end, and none arrives.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rocinante_agent::host::Reason;
use rocinante_netdev::Backend;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use crate::asker::{Asker, eventually};
use crate::lab::{Host, host_or_skip};

/// In each frame of these tests, before its number.
const MARK: [u8; 6] = *b"forged";

/// Bytes that [`marked`] adds to a frame.
const MARKED: u16 = 47;

/// A frame's claims about its sender.
#[derive(Debug, Clone)]
struct Sender {
    mac: [u8; 6],
    v4: [u8; 4],
    v6: [u8; 16],
}

fn ethernet(sender: &Sender, kind: u16, rest: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &sender.mac, &kind.to_be_bytes(), rest].concat()
}

/// With lengths and a checksum that are right: a bridge that hands packets to iptables drops
/// others.
fn ipv4(sender: &Sender) -> Vec<u8> {
    let [high, low] = (20 + 8 + MARKED).to_be_bytes();
    let fixed = [0x45, 0, high, low, 0, 1, 0, 0, 64, 17, 0, 0];
    let mut header = [&fixed[..], &sender.v4, &[255; 4]].concat();
    let words =
        header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    let [high, low] = (8 + MARKED).to_be_bytes();
    let udp = [0xc0, 0, 0x12, 0xb7, high, low, 0, 0];
    ethernet(sender, 0x0800, &[&header[..], &udp].concat())
}

fn ipv6(sender: &Sender, next: u8, rest: &[u8]) -> Vec<u8> {
    let [high, low] = (rest.len() as u16 + MARKED).to_be_bytes();
    let fixed = [0x60, 0, 0, 0, high, low, next, 255];
    let all_nodes: [u8; 16] = std::net::Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets();
    ethernet(sender, 0x86dd, &[&fixed[..], &sender.v6, &all_nodes, rest].concat())
}

fn arp(sender: &Sender, mac: [u8; 6], address: [u8; 4]) -> Vec<u8> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, 1];
    ethernet(sender, 0x0806, &[&fixed[..], &mac, &address, &[0; 6], &[10, 77, 0, 2]].concat())
}

fn advertisement(sender: &Sender, target: [u8; 16], mac: [u8; 6]) -> Vec<u8> {
    let message = [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &target, &[2, 1], &mac].concat();
    ipv6(sender, 58, &message)
}

fn router(sender: &Sender) -> Vec<u8> {
    ipv6(sender, 58, &[134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0])
}

/// Reads all frames of a container, of every protocol.
pub(crate) fn listener(host: &Host, container: usize) -> OwnedFd {
    let all =
        Protocol::from_raw(std::num::NonZero::new(u32::from(3_u16.to_be())).expect("ETH_P_ALL"));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let open = || socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(all));
    host.container(container).run(open).expect("entered").expect("a socket")
}

/// The numbers of the marked frames that arrived.
pub(crate) fn arrived(listener: &OwnedFd) -> Vec<u8> {
    let (mut numbers, mut frame) = (Vec::new(), [0_u8; 2048]);
    while let Ok((length, _)) = recv(listener, &mut frame[..], RecvFlags::DONTWAIT) {
        let frame = &frame[..length.min(frame.len())];
        let mark = frame.windows(MARK.len()).position(|bytes| bytes == MARK);
        numbers.extend(mark.and_then(|at| frame.get(at + MARK.len())));
    }
    numbers
}

/// A frame of UDP/4791 to all stations, with the number 9.
pub(crate) fn own_frame(mac: [u8; 6], v4: [u8; 4]) -> Vec<u8> {
    marked(&ipv4(&Sender { mac, v4, v6: [0; 16] }), 9)
}

fn marked(frame: &[u8], number: u8) -> Vec<u8> {
    // A short one stays short.
    let rest = if frame.len() < 34 { 0 } else { 40 };
    [frame, &MARK, &[number], &vec![0; rest]].concat()
}

#[test]
fn what_is_forged_is_counted_and_does_not_arrive() {
    forged_by(|asker, address| asker.granted(address));
}

/// Sockets of AF_XDP hand their frames to the driver, and these pass the program at the host's end
/// as all others do.
#[test]
fn what_is_forged_by_afxdp_is_counted_and_does_not_arrive() {
    forged_by(|asker, address| asker.opened(Backend::Xdp, address));
}

fn forged_by(gets_port: impl Fn(&mut Asker, IpAddr)) {
    use Reason::{Arp, EtherType, EthernetSource, Ipv4, Ipv6, Malformed, NeighbourDiscovery};
    let mut host = host_or_skip!("forged::what_is_forged", 3);
    host.start();
    let [IpAddr::V4(v4), IpAddr::V6(v6)] = host.addresses(0) else { unreachable!() };
    let [IpAddr::V4(other_v4), IpAddr::V6(other_v6)] = host.addresses(2) else { unreachable!() };
    let mut asker = host.asker(0);
    gets_port(&mut asker, v4.into());
    let mac = host.filter(0).unwrap().sources().unwrap().unwrap().mac;
    let own = Sender { mac, v4: v4.octets(), v6: v6.octets() };
    let other_mac = [2, 0, 0x0a, 0x4d, 0, 3];
    let no_mac = Sender { mac: other_mac, ..own.clone() };
    let no_v4 = Sender { v4: other_v4.octets(), ..own.clone() };
    let no_v6 = Sender { v6: other_v6.octets(), ..own.clone() };
    let vlan = |frame: Vec<u8>, kind: u16| {
        [&frame[..12], &kind.to_be_bytes(), &[0, 5], &frame[12..]].concat()
    };
    let cases: [(&str, Vec<u8>, Option<Reason>); 20] = [
        ("own IPv4", ipv4(&own), None),
        ("own IPv6", ipv6(&own, 17, &[0; 8]), None),
        ("own ARP", arp(&own, mac, v4.octets()), None),
        ("own advertisement", advertisement(&own, v6.octets(), mac), None),
        ("IPv4, Ethernet source", ipv4(&no_mac), Some(EthernetSource)),
        ("IPv6, Ethernet source", ipv6(&no_mac, 17, &[0; 8]), Some(EthernetSource)),
        ("ARP, Ethernet source", arp(&no_mac, mac, v4.octets()), Some(EthernetSource)),
        ("IPv4 source", ipv4(&no_v4), Some(Ipv4)),
        ("IPv6 source", ipv6(&no_v6, 17, &[0; 8]), Some(Ipv6)),
        ("ARP sender's Ethernet", arp(&own, other_mac, v4.octets()), Some(Arp)),
        ("ARP sender's IP", arp(&own, mac, other_v4.octets()), Some(Arp)),
        (
            "advertised address",
            advertisement(&own, other_v6.octets(), mac),
            Some(NeighbourDiscovery),
        ),
        (
            "advertised Ethernet",
            advertisement(&own, v6.octets(), other_mac),
            Some(NeighbourDiscovery),
        ),
        ("router", router(&own), Some(NeighbourDiscovery)),
        ("EtherType of RoCEv1", ethernet(&own, 0x8915, &[0; 40]), Some(EtherType)),
        ("EtherType of a length", ethernet(&own, 60, &[0x42; 46]), Some(EtherType)),
        // The kernel takes the tag off before the program sees the frame.
        ("VLAN", vlan(ipv4(&own), 0x8100), Some(EtherType)),
        ("VLAN of a provider", vlan(ipv4(&own), 0x88a8), Some(EtherType)),
        ("version of IPv4", ethernet(&own, 0x0800, &[0x65; 46]), Some(Malformed)),
        ("short IPv6", ethernet(&own, 0x86dd, &[0x60; 6]), Some(Malformed)),
    ];
    // A listener on the same bridge receives all broadcasts, the container of the host's other end
    // too.
    let listeners = [1, 2].map(|container| listener(&host, container));
    let mut counts = host.dropped(0);
    for (number, (name, frame, reason)) in cases.iter().enumerate() {
        asker.send(&marked(frame, number as u8));
        if let Some(reason) = reason {
            counts[*reason as usize] += 1;
        }
        eventually(name, || {
            host.dropped(0)[reason.map_or(0, |r| r as usize)]
                >= counts[reason.map_or(0, |r| r as usize)]
        });
        assert_eq!(host.dropped(0), counts, "{name}");
    }
    // The last one is behind all others.
    let last = cases.len() as u8;
    asker.send(&marked(&ipv4(&own), last));
    for listener in &listeners {
        let mut heard = Vec::new();
        eventually("the last one", || {
            heard.extend(arrived(listener));
            heard.contains(&last)
        });
        assert_eq!(heard, [0, 1, 2, 3, last]);
    }
    // The other container's frames are not concerned.
    assert!(host.filter(1).is_none() && host.filter(2).is_none());
}

/// The container's own kernel works as before: with a program at the host's end, datagrams,
/// neighbours and duplicate address detection work.
#[test]
fn the_containers_own_kernel_is_not_disturbed() {
    let mut host = host_or_skip!("forged::the_containers_own_kernel", 2);
    host.start();
    let mut askers: Vec<Asker> = [0, 1].map(|index| host.asker(index)).into();
    host.grant_each(&mut askers);
    for (from, to) in host.addresses(0).into_iter().zip(host.addresses(1)) {
        let open = |address: IpAddr| {
            let socket = std::net::UdpSocket::bind((address, 7000)).expect("a socket");
            socket.set_read_timeout(Some(crate::asker::SOON)).expect("set");
            socket
        };
        let here = host.container(0).run(|| open(from)).expect("entered");
        let there = host.container(1).run(|| open(to)).expect("entered");
        let mut bytes = [0; 8];
        here.send_to(b"question", (to, 7000)).expect("sent");
        let (_, asked) = there.recv_from(&mut bytes).expect("it arrives");
        there.send_to(b"answered", asked).expect("sent");
        here.recv_from(&mut bytes).expect("it arrives");
        assert_eq!(&bytes, b"answered");
    }
    // An address that is found unique after it was announced.
    let netns = host.container(0).netns();
    let dad = || std::fs::write("/proc/sys/net/ipv6/conf/eth0/dad_transmits", "1");
    netns.run(dad).expect("entered").expect("set");
    let dad = || std::fs::write("/proc/sys/net/ipv6/conf/eth0/accept_dad", "1");
    netns.run(dad).expect("entered").expect("set");
    netns.ip(&["address", "add", "fd00:77::77/64", "dev", "eth0"]).expect("added");
    let late: IpAddr = "fd00:77::77".parse().expect("an address");
    eventually("it is followed while it is checked", || host.may_leave(0).contains(&late));
    eventually("it is unique", || {
        let tentative = netns.json("ip -j -6 address show tentative").expect("listed");
        !tentative.to_string().contains("fd00:77::77")
    });
    let drops = [host.dropped(0), host.dropped(1)];
    // Announcements from before the agent knew of the address may be among them.
    assert_eq!(drops[1], [0; Reason::ALL.len()]);
    assert_eq!([&drops[0][..5], &drops[0][6..]].concat(), [0; Reason::ALL.len() - 1], "{drops:?}");
}
