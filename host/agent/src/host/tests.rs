//! The program's verdicts, its place, and announcements of other namespaces.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use rocinante_lab::{LabError, Netns};
use rocinante_netdev::TcxDrop;
use rocinante_netdev::for_agent::bpf::{TCX_DROP, TCX_NEXT};
use rocinante_netdev::for_agent::descriptors::wait_readable;
use rocinante_netdev::for_agent::namespaces::owning_user_namespace;

use super::*;

/// The value, or a `SKIPPED` line and a return from the calling test.
macro_rules! or_skip {
    ($name:literal, $made:expr) => {
        match $made {
            Ok(made) => made,
            Err(e) => return skip($name, &e),
        }
    };
}

fn skip(name: &str, reason: &dyn std::fmt::Display) {
    let line = format!("SKIPPED {name}: {reason}\n");
    // The test harness captures the print macros, not a write to descriptor 2.
    let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
}

/// A network namespace.
struct NetNs(Netns);

impl NetNs {
    fn new() -> Result<Self, LabError> {
        rocinante_lab::enter_user_namespace()?;
        Netns::new().map(Self)
    }

    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.run(work).expect("in the namespace")
    }

    /// Runs lines of a shell.
    fn sh(&self, lines: &str) {
        let output = self.0.output(Command::new("sh").args(["-ec", lines])).expect("a shell");
        assert!(output.status.success(), "{lines}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self) -> String {
        self.0.path()
    }
}

#[test]
fn it_is_tried_apart_and_nothing_stays() {
    let ns = or_skip!("host::it_is_tried_apart", NetNs::new());
    ns.run(|| {
        or_skip!("host::it_is_tried_apart", SourceFilter::try_apart());
        assert!(SourceFilter::find(1).expect("a query").is_none(), "this loopback is another");
    });
}

const MAC: [u8; 6] = [0x02, 0xdc, 0x02, 0x03, 0xf4, 0xf5];
const OTHER_MAC: [u8; 6] = [0x02, 0xdc, 0x02, 0x03, 0xf4, 0xf6];
const V4: [u8; 4] = [192, 0, 2, 77];
const V6: [u8; 16] = [0xfd, 9, 0, 0, 0, 0, 0, 0, 0xff, 0xee, 0, 0, 0, 0, 0, 1];
const OTHER_V6: [u8; 16] = [0xfd, 9, 0, 0, 0, 0, 0, 0, 0xff, 0xee, 0, 0, 0, 0, 0, 2];
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const NO_V6: [u8; 16] = [0; 16];

fn sources() -> Sources {
    let addresses = [IpAddr::from(V4), IpAddr::from(V6)].into();
    Sources { mac: MAC, addresses, is_closed: false }
}

fn ethernet(kind: u16, rest: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &MAC, &kind.to_be_bytes(), rest].concat()
}

fn ipv4(source: [u8; 4], destination: [u8; 4], protocol: u8) -> Vec<u8> {
    let fixed = [0x45, 0, 0, 36, 0, 1, 0, 0, 64, protocol, 0, 0];
    ethernet(0x0800, &[&fixed[..], &source, &destination, &[0x55; 16]].concat())
}

/// A datagram without a source to the broadcast address, between these ports.
fn dhcp(ports: [u8; 2]) -> Vec<u8> {
    let mut frame = ipv4([0; 4], [255; 4], 17);
    frame[34..38].copy_from_slice(&[0, ports[0], 0, ports[1]]);
    frame
}

/// A frame with another byte at `at`.
fn with(mut frame: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    frame[at] = byte;
    frame
}

fn arp(mac: [u8; 6], address: [u8; 4]) -> Vec<u8> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, 2];
    ethernet(0x0806, &[&fixed[..], &mac, &address, &[1; 6], &[192, 0, 2, 1]].concat())
}

fn ipv6(source: [u8; 16], destination: [u8; 16], next: u8, rest: &[u8]) -> Vec<u8> {
    let [high, low] = (rest.len() as u16).to_be_bytes();
    let fixed = [0x60, 0, 0, 0, high, low, next, 255];
    ethernet(0x86dd, &[&fixed[..], &source, &destination, rest].concat())
}

fn icmp(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0], body].concat()
}

fn link_option(kind: u8, mac: [u8; 6]) -> Vec<u8> {
    [&[kind, 1][..], &mac].concat()
}

/// An extension header of eight bytes.
fn extension(next: u8) -> Vec<u8> {
    vec![next, 0, 5, 2, 0, 0, 1, 0]
}

fn fragment(next: u8, offset: u8) -> Vec<u8> {
    vec![next, 0, 0, offset, 0, 0, 0, 9]
}

fn nd(source: [u8; 16], kind: u8, body: &[u8]) -> Vec<u8> {
    ipv6(source, ALL_NODES, 58, &icmp(kind, body))
}

/// A frame, its name, and why it is dropped.
type Case = (&'static str, Vec<u8>, Option<Reason>);

fn cases() -> Vec<Case> {
    use Reason::{Arp, EtherType, EthernetSource, Ipv4, Ipv6, Malformed, NeighbourDiscovery};
    let mac = |frame: Vec<u8>| [&frame[..6], &OTHER_MAC, &frame[12..]].concat();
    let behind = |headers: &[u8], next: u8, rest: &[u8]| {
        ipv6(V6, ALL_NODES, next, &[headers, rest].concat())
    };
    let advertisement =
        |target: &[u8; 16], mac| icmp(136, &[&target[..], &link_option(2, mac)].concat());
    let forged = advertisement(&OTHER_V6, MAC);
    let nonce = [14, 1, 1, 2, 3, 4, 5, 6];
    vec![
        ("IPv4", ipv4(V4, [10, 0, 0, 1], 17), None),
        ("another IPv4 source", ipv4([192, 0, 2, 78], [10, 0, 0, 1], 17), Some(Ipv4)),
        ("another MAC, IPv4", mac(ipv4(V4, [10, 0, 0, 1], 17)), Some(EthernetSource)),
        ("DHCP", dhcp([68, 67]), None),
        ("DHCP that no router may cut", with(dhcp([68, 67]), 20, 0x40), None),
        ("a server's DHCP", dhcp([67, 68]), Some(Ipv4)),
        ("no IPv4 source, to a server of DHCP", dhcp([69, 67]), Some(Ipv4)),
        ("no IPv4 source, from a client of DHCP", dhcp([68, 66]), Some(Ipv4)),
        ("DHCP with more fragments", with(dhcp([68, 67]), 20, 0x20), Some(Ipv4)),
        ("DHCP as a later fragment", with(dhcp([68, 67]), 21, 1), Some(Ipv4)),
        ("DHCP with options of IP", with(dhcp([68, 67]), 14, 0x46), Some(Ipv4)),
        ("DHCP that is cut short", dhcp([68, 67])[..37].to_vec(), Some(Malformed)),
        ("no IPv4 source to a host", ipv4([0; 4], [10, 0, 0, 1], 17), Some(Ipv4)),
        ("no IPv4 source, ICMP", ipv4([0; 4], [255; 4], 1), Some(Ipv4)),
        ("DHCP of another MAC", mac(dhcp([68, 67])), Some(EthernetSource)),
        ("IPv6 as IPv4", ethernet(0x0800, &ipv6(V6, V6, 17, &[0; 8])[14..]), Some(Malformed)),
        ("ARP", arp(MAC, V4), None),
        ("an ARP probe", arp(MAC, [0; 4]), None),
        ("another's ARP probe", mac(arp(OTHER_MAC, [0; 4])), Some(EthernetSource)),
        ("ARP of another sender", arp(MAC, [192, 0, 2, 1]), Some(Arp)),
        ("ARP of another MAC", arp(OTHER_MAC, V4), Some(Arp)),
        (
            "ARP of IPv6 addresses",
            ethernet(0x0806, &[0, 1, 0x86, 0xdd, 6, 16, 0, 2].repeat(5)),
            Some(Malformed),
        ),
        ("RARP", ethernet(0x8035, &arp(MAC, V4)[14..]), Some(EtherType)),
        (
            "VLAN",
            ethernet(0x8100, &[&[0, 5, 8, 0][..], &ipv4(V4, V4, 17)[14..]].concat()),
            Some(EtherType),
        ),
        ("STP", ethernet(38, &[0x42; 38]), Some(EtherType)),
        ("RoCEv1 of another MAC", mac(ethernet(0x8915, &[0; 40])), Some(EthernetSource)),
        ("IPv6", ipv6(V6, OTHER_V6, 17, &[0; 8]), None),
        ("another IPv6 source", ipv6(OTHER_V6, V6, 17, &[0; 8]), Some(Ipv6)),
        ("another MAC, IPv6", mac(ipv6(V6, OTHER_V6, 17, &[0; 8])), Some(EthernetSource)),
        (
            "an IPv4-mapped source",
            ipv6(std::net::Ipv4Addr::from(V4).to_ipv6_mapped().octets(), V6, 17, &[0; 8]),
            Some(Ipv6),
        ),
        (
            "IPv4 as IPv6",
            ethernet(0x86dd, &[ipv4(V4, V4, 17), vec![0; 40]].concat()[14..]),
            Some(Malformed),
        ),
        ("no IPv6 source, UDP", ipv6(NO_V6, ALL_NODES, 17, &[0; 8]), Some(Ipv6)),
        ("no IPv6 source to a host", ipv6(NO_V6, V6, 58, &icmp(143, &[])), Some(Ipv6)),
        (
            "MLD without a source",
            ipv6(NO_V6, ALL_NODES, 0, &[extension(58), icmp(143, &[])].concat()),
            None,
        ),
        (
            "MLD without a source of another MAC",
            mac(ipv6(NO_V6, ALL_NODES, 0, &[extension(58), icmp(143, &[])].concat())),
            Some(EthernetSource),
        ),
        ("echo", nd(V6, 128, &[0; 8]), None),
        ("a solicitation", nd(V6, 135, &[&OTHER_V6[..], &link_option(1, MAC)].concat()), None),
        (
            "a solicitation of another MAC",
            nd(V6, 135, &[&OTHER_V6[..], &link_option(1, OTHER_MAC)].concat()),
            Some(NeighbourDiscovery),
        ),
        (
            "a solicitation, second option",
            nd(V6, 135, &[&OTHER_V6[..], &nonce, &link_option(1, OTHER_MAC)].concat()),
            Some(NeighbourDiscovery),
        ),
        ("detection of duplicates", nd(NO_V6, 135, &[&V6[..], &nonce].concat()), None),
        ("detection of another's", nd(NO_V6, 135, &OTHER_V6), Some(NeighbourDiscovery)),
        ("an advertisement", nd(V6, 136, &advertisement(&V6, MAC)[8..]), None),
        ("an advertisement for another", nd(V6, 136, &forged[8..]), Some(NeighbourDiscovery)),
        (
            "an advertisement of another MAC",
            nd(V6, 136, &advertisement(&V6, OTHER_MAC)[8..]),
            Some(NeighbourDiscovery),
        ),
        ("an advertisement without a source", nd(NO_V6, 136, &V6), Some(NeighbourDiscovery)),
        ("an advertisement cut", nd(V6, 136, &V6[..8]), Some(Malformed)),
        ("a router is asked for", nd(V6, 133, &link_option(1, MAC)), None),
        (
            "a router is asked for, another MAC",
            nd(V6, 133, &link_option(1, OTHER_MAC)),
            Some(NeighbourDiscovery),
        ),
        ("a router", nd(V6, 134, &[0; 8]), Some(NeighbourDiscovery)),
        ("a redirect", nd(V6, 137, &[0; 32]), Some(NeighbourDiscovery)),
        (
            "an option of no length",
            nd(V6, 133, &[3, 0, 0, 0, 0, 0, 0, 0]),
            Some(NeighbourDiscovery),
        ),
        ("many options", nd(V6, 133, &nonce.repeat(9)), Some(NeighbourDiscovery)),
        ("the most that are read", nd(V6, 133, &nonce.repeat(8)), None),
        ("behind hop by hop", behind(&extension(58), 0, &forged), Some(NeighbourDiscovery)),
        ("behind options", behind(&extension(58), 60, &forged), Some(NeighbourDiscovery)),
        ("behind routing", behind(&extension(58), 43, &forged), Some(NeighbourDiscovery)),
        (
            "behind authentication",
            behind(&[&[58, 1][..], &[0; 10]].concat(), 51, &forged),
            Some(NeighbourDiscovery),
        ),
        (
            "behind several",
            behind(&[extension(60), extension(43), extension(58)].concat(), 0, &forged),
            Some(NeighbourDiscovery),
        ),
        (
            "behind too many",
            behind(&[extension(60).repeat(6), extension(58)].concat(), 60, &forged),
            Some(Malformed),
        ),
        (
            "behind many",
            behind(&[extension(60).repeat(5), extension(58)].concat(), 60, &icmp(128, &[])),
            None,
        ),
        (
            "in a fragment",
            behind(&fragment(58, 1), 44, &advertisement(&V6, MAC)),
            Some(NeighbourDiscovery),
        ),
        ("echo in a fragment", behind(&fragment(58, 1), 44, &icmp(128, &[])), None),
        ("a later fragment", behind(&fragment(58, 8), 44, &[0; 8]), None),
        (
            "a later fragment without a source",
            ipv6(NO_V6, ALL_NODES, 44, &[fragment(58, 8), vec![0; 8]].concat()),
            Some(Ipv6),
        ),
        (
            "the type in the second fragment",
            behind(&[fragment(60, 1), extension(58)].concat(), 44, &[]),
            Some(Malformed),
        ),
    ]
}

#[test]
fn each_frame_gets_its_verdict_and_its_count() {
    let filter = or_skip!("host::each_frame_gets_its_verdict", SourceFilter::loose(&sources()));
    for (name, frame, reason) in cases() {
        let counts = || Reason::ALL.map(|reason| filter.dropped(reason).expect("a counter"));
        let before = counts();
        let verdict = filter.program.test_run(&frame).expect("BPF_PROG_TEST_RUN");
        let due = if reason.is_some() { TCX_DROP } else { TCX_NEXT };
        assert_eq!(verdict.cast_signed(), due, "{name}");
        for ((counted, before), of) in counts().into_iter().zip(before).zip(Reason::ALL) {
            assert_eq!(counted - before, u64::from(reason == Some(of)), "{name}: {of:?}");
        }
    }
}

/// Every bit of an address of the sender, flipped.
#[test]
fn no_changed_bit_of_a_sender_passes() {
    let filter = or_skip!("host::no_changed_bit_of_a_sender", SourceFilter::loose(&sources()));
    let solicitation = nd(V6, 135, &[&OTHER_V6[..], &link_option(1, MAC)].concat());
    let advertisement = nd(V6, 136, &[&V6[..], &link_option(2, MAC)].concat());
    for (frame, senders) in [
        (ipv4(V4, [10, 0, 0, 1], 17), vec![6..12, 26..30]),
        (arp(MAC, V4), vec![6..12, 14..20, 22..32]),
        (ipv6(V6, OTHER_V6, 17, &[0; 8]), vec![6..12, 22..38]),
        (solicitation, vec![6..12, 22..38, 80..86]),
        (advertisement, vec![6..12, 22..38, 62..78, 80..86]),
    ] {
        assert_eq!(filter.program.test_run(&frame).expect("a run").cast_signed(), TCX_NEXT);
        for bit in senders.into_iter().flatten().flat_map(|byte| byte * 8..byte * 8 + 8) {
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let verdict = filter.program.test_run(&changed).expect("a run");
            assert_eq!(verdict.cast_signed(), TCX_DROP, "bit {bit} of {frame:x?}");
        }
        // The kernel itself runs no program on an IP header that is cut.
        for length in 15..34 {
            match filter.program.test_run(&frame[..length]) {
                Ok(verdict) => assert_eq!(verdict.cast_signed(), TCX_DROP, "{length} bytes"),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}"),
            }
        }
    }
}

#[test]
fn what_is_the_containers_can_change() {
    let filter = or_skip!("host::what_is_the_containers", SourceFilter::loose(&sources()));
    let passes =
        |frame: &[u8]| filter.program.test_run(frame).expect("a run").cast_signed() == TCX_NEXT;
    let (first, second) = (ipv4(V4, V4, 17), ipv4([192, 0, 2, 78], V4, 17));
    assert!(passes(&first) && !passes(&second));
    let both: BTreeSet<IpAddr> = [V4.into(), [192, 0, 2, 78].into()].into();
    let changed = Sources { addresses: both, ..sources() };
    filter.allow(&changed).expect("changed");
    assert!(passes(&first) && passes(&second));
    assert_eq!(filter.sources().expect("read"), Some(changed.clone()));
    filter.allow(&Sources { mac: OTHER_MAC, ..changed.clone() }).expect("changed");
    assert!(!passes(&first) && !passes(&second));
    filter.allow(&Sources { mac: MAC, ..Sources::default() }).expect("changed");
    assert!(!passes(&first) && passes(&arp(MAC, [0; 4])));
    // More than there is room for: those that fit, and again.
    let many = (0..1000_u32).map(|host| IpAddr::from((0xc000_0200 + host).to_be_bytes()));
    let many = Sources { addresses: many.collect(), ..sources() };
    for _ in 0..2 {
        filter.allow(&many).expect("changed");
        let room = filter.sources().expect("read").expect("sound").addresses.len();
        assert_eq!(room, ADDRESSES_MAX);
    }
    filter.allow(&sources()).expect("changed");
    assert!(passes(&first) && !passes(&second));
}

/// A "host", and a "container" with the other end of the host's `h0`.
fn host_and_container() -> Result<(NetNs, NetNs), LabError> {
    let (host, container) = (NetNs::new()?, NetNs::new()?);
    host.sh(&format!("ip link add h0 type veth peer name eth0 netns {}", container.path()));
    container.sh("ip link set eth0 address 02:dc:02:03:f4:f5
                  ip address add 192.0.2.77/24 dev eth0
                  ip link set eth0 up");
    host.sh("ip link set h0 up");
    Ok((host, container))
}

/// Datagrams to the port of RoCEv2 behind all headers, and all others; and open again.
#[test]
fn a_closed_container_sends_no_roce_and_all_else() {
    let filter = or_skip!("host::a_closed_container", SourceFilter::loose(&sources()));
    let ports =
        |from: u16, to: u16| [from.to_be_bytes(), to.to_be_bytes(), [0, 8], [0; 2]].concat();
    let v4 = |at: u8, more: u8, payload: &[u8]| {
        let words = at / 4;
        let options = vec![1; usize::from(at) - 20];
        let fixed = [0x40 | words, 0, 0, 60, 0, 1, more, 0, 64, 17, 0, 0];
        ethernet(0x0800, &[&fixed[..], &V4, &[10, 0, 0, 1], &options, payload].concat())
    };
    let later = |frame: Vec<u8>| with(frame, 21, 1);
    let (roce, other) = (ports(4096, 4791), ports(4791, 4790));
    let behind = |next: u8, headers: &[u8]| ipv6(V6, OTHER_V6, next, &[headers, &roce].concat());
    let to = |payload: &[u8]| ipv6(V6, OTHER_V6, 17, payload);
    let cases = [
        ("IPv4", v4(20, 0, &roce), Some(Reason::Unclaimed)),
        ("IPv4 with options", v4(60, 0, &roce), Some(Reason::Unclaimed)),
        ("a first fragment", v4(20, 0x20, &roce), Some(Reason::Unclaimed)),
        ("a later fragment", later(v4(20, 0x20, &roce)), None),
        ("another port", v4(20, 0, &other), None),
        ("TCP", with(v4(20, 0, &roce), 23, 6), None),
        ("cut ports", v4(20, 0, &roce[..3]), Some(Reason::Malformed)),
        ("IPv6", to(&roce), Some(Reason::Unclaimed)),
        ("IPv6, another port", to(&other), None),
        ("IPv6, cut ports", to(&roce[..2]), Some(Reason::Malformed)),
        ("IPv6, TCP", behind(6, &[]), None),
        ("behind options", behind(60, &extension(17)), Some(Reason::Unclaimed)),
        ("in a first fragment", behind(44, &fragment(17, 1)), Some(Reason::Unclaimed)),
        ("in a later fragment", behind(44, &fragment(17, 8)), None),
        ("ARP", arp(MAC, V4), None),
        ("a solicitation", nd(V6, 135, &[&OTHER_V6[..], &link_option(1, MAC)].concat()), None),
    ];
    for is_closed in [true, false, true] {
        filter.allow(&Sources { is_closed, ..sources() }).expect("changed");
        assert_eq!(filter.sources().expect("read").map(|it| it.is_closed), Some(is_closed));
        for (name, frame, reason) in &cases {
            let due = reason.filter(|_| is_closed);
            let count = || Reason::ALL.map(|reason| filter.dropped(reason).expect("a counter"));
            let before = count();
            let verdict = filter.program.test_run(frame).expect("a run").cast_signed();
            assert_eq!(verdict, if due.is_some() { TCX_DROP } else { TCX_NEXT }, "{name}");
            for ((now, before), of) in count().into_iter().zip(before).zip(Reason::ALL) {
                assert_eq!(now - before, u64::from(due == Some(of)), "{name}: {of:?}");
            }
        }
    }
}

fn index(name: &str) -> u32 {
    rocinante_netdev::Interface::by_name(name).expect("the interface").index
}

#[test]
fn it_stays_first_and_alone_and_lets_others_see() {
    let (host, container) = or_skip!("host::it_stays_first_and_alone", host_and_container());
    host.run(|| {
        let h0 = index("h0");
        // A foreign program, which drops.
        let foreign = or_skip!("host::it_stays_first", TcxDrop::attach(h0, true, [4791, 4791]));
        assert!(SourceFilter::find(h0).expect("a query").is_none());
        let (filter, how) = SourceFilter::attach(h0, &sources()).expect("attached");
        assert_eq!((how, rocinante_netdev::tcx_programs(h0, true).unwrap()), (Attached::New, 2));
        let first = filter.id().expect("an id");
        drop(filter);
        // It is there without a descriptor of it, and is found with its addresses.
        let found = SourceFilter::find(h0).expect("a query").expect("it stays");
        assert_eq!(found.sources().expect("read"), Some(sources()));
        let (_, how) = SourceFilter::attach(h0, &sources()).expect("attached");
        assert_eq!((how, rocinante_netdev::tcx_programs(h0, true).unwrap()), (Attached::Found, 2));
        // It is before the other program, which still runs.
        container.sh("ip neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev eth0");
        let send = |from: &str, to_port: u16| {
            let socket = std::net::UdpSocket::bind((from, 0)).expect("a socket");
            socket.send_to(b"RoCE", ("192.0.2.1", to_port)).expect("sent");
        };
        container.sh("ip address add 192.0.2.99/24 dev eth0");
        container.run(|| [4791, 4792].map(|port| send("192.0.2.77", port)));
        container.run(|| [4791, 4792].map(|port| send("192.0.2.99", port)));
        // The frames leave the container on a processor that may be busy.
        let end = Instant::now() + Duration::from_secs(20);
        while found.dropped(Reason::Ipv4).expect("a counter") < 2 {
            assert!(Instant::now() < end, "they never come");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(found.dropped(Reason::Ipv4).expect("a counter"), 2);
        assert_eq!(foreign.dropped().expect("a counter"), 1, "NEXT lets it see the frame");

        // Another program came before it, and a second of ours: both are put in order.
        let before = Sources { mac: OTHER_MAC, ..sources() };
        found.detach().expect("detached");
        assert!(SourceFilter::find(h0).expect("a query").is_none());
        let (_, how) = SourceFilter::attach(h0, &before).expect("attached");
        assert_eq!(how, Attached::New);
        let loose = SourceFilter::loose(&before).expect("loaded");
        loose.program.attach_first(h0, None).expect("attached");
        let (filter, how) = SourceFilter::attach(h0, &sources()).expect("attached");
        assert_eq!((how, rocinante_netdev::tcx_programs(h0, true).unwrap()), (Attached::Mended, 2));
        assert_ne!(filter.id().expect("an id"), first);
        drop((filter, foreign));
        let found = SourceFilter::find(h0).expect("a query").expect("it stays");
        assert_eq!(found.sources().expect("read"), Some(sources()));
    });
}

fn wait_for(watch: &mut Watch, wanted: impl Fn(&Heard) -> bool) -> Vec<Heard> {
    let (end, mut all) = (Instant::now() + Duration::from_secs(20), Vec::new());
    while !all.iter().any(&wanted) {
        assert!(Instant::now() < end, "not announced: {all:?}");
        wait_readable(&*watch, 100).expect("poll");
        watch.read(|heard| all.push(heard));
    }
    all
}

#[test]
fn links_of_other_namespaces_are_known_and_heard_of() {
    let (host, container) = or_skip!("host::links_of_other_namespaces", host_and_container());
    let own = std::fs::File::open(container.path()).expect("the namespace");
    host.run(|| {
        let mut namespaces = Namespaces::open().expect("netlink");
        let id = namespaces.id(&own).expect("a number");
        assert_eq!(namespaces.id(&own).expect("a number"), id, "it stays");
        let named = |namespaces: &mut Namespaces, id, name| {
            let links = namespaces.links(id).expect("links");
            links.into_iter().find(|link| link.name == name).expect("the link")
        };
        let eth0 = named(&mut namespaces, Some(id), "eth0");
        assert_eq!((eth0.kind.as_str(), eth0.mac), ("veth", MAC));
        assert_eq!(namespaces.link(Some(id), eth0.index).expect("the link"), eth0);
        let h0 = named(&mut namespaces, None, "h0");
        assert_eq!(h0.peer, Some(Peer { index: eth0.index, namespace: Some(id) }));
        assert_eq!(eth0.peer.map(|peer| peer.index), Some(h0.index));
        assert!(namespaces.links(None).expect("links").contains(&h0));
        let there = namespaces.links(Some(id)).expect("links");
        assert!(there.contains(&eth0) && there.iter().any(|link| link.is_loopback), "{there:?}");
        assert!(!there.contains(&h0) && !eth0.is_loopback);
        let addresses = namespaces.addresses(id, eth0.index).expect("addresses");
        assert!(addresses.contains(&IpAddr::from(V4)), "{addresses:?}");
        assert!(!addresses.contains(&IpAddr::from([127, 0, 0, 1])), "{addresses:?}");
        let error = namespaces.link(Some(id), 4711).expect_err("no such link");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        assert!(namespaces.link(Some(NsId(4711)), 2).is_err(), "no namespace's number");
        assert!(namespaces.id(std::io::stdin()).is_err(), "no namespace");

        let mut watch = Watch::open().expect("netlink");
        container.sh("ip address add 192.0.2.99/24 dev eth0");
        wait_for(&mut watch, |heard| *heard == Heard::Elsewhere(id, eth0.index));
        container.sh("ip link set eth0 address 02:dc:02:03:f4:f6");
        wait_for(&mut watch, |heard| *heard == Heard::Elsewhere(id, eth0.index));
        host.sh("ip link set h0 name h1");
        wait_for(&mut watch, |heard| *heard == Heard::Link(h0.index));
        container.sh("ip link del eth0");
        wait_for(&mut watch, |heard| *heard == Heard::LinkGone(h0.index));
    });
}

#[test]
fn an_end_that_comes_is_seen_however_often_one_asks() {
    let (host, container) = or_skip!("host::an_end_that_comes", host_and_container());
    host.run(|| {
        let ends = crate::ends::Ends::new().expect("netlink");
        let begun = Instant::now();
        let count = |ms| ends.all_at(begun + Duration::from_millis(ms)).expect("a list").len();
        assert_eq!(count(0), 1);
        host.sh(&format!("ip link add h1 type veth peer name eth1 netns {}", container.path()));
        assert_eq!([30, 60, 90].map(count), [1, 2, 2]);
    });
}

/// A link may go between a list and a question.
#[test]
fn nothing_is_at_a_link_that_has_gone() {
    let (host, _container) = or_skip!("host::nothing_is_at_a_link", host_and_container());
    host.run(|| {
        or_skip!("host::nothing_is_at_a_link", SourceFilter::try_apart());
        host.sh("ip link add v0 type veth peer name v1");
        let links = Namespaces::open().and_then(|mut it| it.links(None)).expect("links");
        let named = |name| links.iter().find(|link| link.name == name).expect("the link");
        let [stays, goes] = ["h0", "v0"].map(named);
        let is_found = |link: &HostLink| {
            let is_found = SourceFilter::find(link.index).expect("a query").is_some();
            assert_eq!(is_ours(link).expect("a query"), is_found, "{link:?}");
            is_found
        };
        for link in [stays, goes] {
            SourceFilter::attach(link.index, &sources()).expect("attached");
            assert!(is_found(link));
        }
        host.sh("ip link del v0");
        assert!(is_found(stays) && !is_found(goes));
        let mut shaper = Shaper::open().expect("netlink");
        assert_eq!(shaper.in_force(goes.index).expect("a query"), [None; 2]);
        for link in [stays, goes] {
            SourceFilter::detach_all(link.index).expect("nothing is there any more");
            shaper.clear(link.index).expect("nothing is there any more");
            assert!(!shaper.unshare(link.index).expect("nothing is there any more"));
            assert!(!is_found(link));
        }
        let error = SourceFilter::attach(goes.index, &sources()).expect_err("it has gone");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
    });
}

#[test]
fn the_owner_of_a_namespace_is_told() {
    let (_, container) = or_skip!("host::the_owner_of_a_namespace", host_and_container());
    let inode = |fd: &std::fs::File| {
        use std::os::unix::fs::MetadataExt as _;
        fd.metadata().expect("metadata").ino()
    };
    let file = std::fs::File::open(container.path()).expect("the namespace");
    let owner = owning_user_namespace(&file).expect("the owner");
    let own = std::fs::File::open("/proc/self/ns/user").expect("the own one");
    assert_eq!(inode(&owner.into()), inode(&own));
    assert!(owning_user_namespace(std::io::stdin()).is_err());
}
