//! The lab itself: containers reach each other over the host's bridge, and the host's policy binds
//! them. The tests use plain UDP datagrams instead of RDMA, so that a failure is the lab's.

use rocinante_lab::{
    Between, Chain, Container, Hosts, Lab, LabConfig, Match, Pair, Rule, Tbf, UPLINK,
};
use rocinante_tests::{need, require};
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ROCE_PORT: u16 = 4791;
/// The longest that a test waits for a datagram.
const PATIENCE: Duration = Duration::from_secs(20);

fn lab() -> Lab {
    Lab::new(&LabConfig::default()).unwrap()
}

fn socket(container: &Container, address: IpAddr) -> UdpSocket {
    let socket = container.run(|| UdpSocket::bind((address, ROCE_PORT))).unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// One socket in each of the first two containers.
fn pair(lab: &Lab) -> (UdpSocket, UdpSocket) {
    let [a, b] = [0, 1].map(|i| socket(lab.container(i), lab.container(i).ipv4().into()));
    (a, b)
}

fn arrives(from: &UdpSocket, to: &UdpSocket, payload: &[u8]) -> bool {
    from.send_to(payload, to.local_addr().unwrap()).unwrap();
    let mut buf = [0; 9000];
    match to.recv_from(&mut buf) {
        Ok((len, source)) => {
            assert_eq!(source, from.local_addr().unwrap());
            assert_eq!(&buf[..len], payload);
            true
        }
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
            false
        }
    }
}

/// Whether nothing arrives.
fn is_kept_back(from: &UdpSocket, to: &UdpSocket, payload: &[u8]) -> bool {
    to.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let arrived = arrives(from, to, payload);
    to.set_read_timeout(Some(PATIENCE)).unwrap();
    !arrived
}

#[test]
fn containers_reach_each_other_at_once() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig { containers: 3, ..LabConfig::default() }).unwrap();
    let [a, b] = [0, 2].map(|i| lab.container(i));
    let v4 = [a, b].map(|c| socket(c, c.ipv4().into()));
    let v6 = [a, b].map(|c| socket(c, c.ipv6().unwrap().into()));
    for [a, b] in [&v4, &v6] {
        // Whole datagrams of almost the MTU, without fragments.
        assert!(arrives(a, b, &[7; 8900]));
        assert!(arrives(b, a, &[9; 64]));
    }
}

#[test]
fn a_pair_is_joined_by_one_veth() {
    require!(need::lab());
    let pair = Pair::new(&LabConfig::default()).unwrap();
    let [a, b] = pair.containers();
    let [v4, v6] =
        [[a.ipv4(), b.ipv4()].map(IpAddr::from), [a, b].map(|c| c.ipv6().unwrap().into())];
    for [at_a, at_b] in [v4, v6] {
        assert!(arrives(&socket(a, at_a), &socket(b, at_b), &[7; 8900]));
    }
}

/// Counts the frames of UDP to `port` that leave the first host by its uplink.
fn count_at_the_uplink(lab: &Lab, port: u16) -> Rule {
    let chain = Chain { family: "netdev", hook: "egress", device: Some(UPLINK), priority: 0 };
    Rule::new(lab.host(), &[(chain, &format!("udp dport {port} counter name hits"))]).unwrap()
}

/// Containers of several hosts exchange whole datagrams of almost the MTU.
fn hosts_reach_each_other(between: Between, mtu: u32) {
    require!(need::nft());
    let shape = Hosts { hosts: 3, containers_each: 2, between };
    let lab = Lab::of_hosts(&shape, &LabConfig { mtu, ..LabConfig::default() }).unwrap();
    assert_eq!(lab.containers().len(), 6);
    let [plain, encapsulated] = [ROCE_PORT, 4789].map(|port| count_at_the_uplink(&lab, port));
    let payload = vec![7; mtu as usize - 48];
    for v6 in [false, true] {
        // One socket each: a child that another test starts holds a closed one for a moment.
        let [a, others @ ..] = [0, 1, 5, 3].map(|index| {
            let container = lab.container(index);
            socket(container, container.address(v6))
        });
        // On another host, on a third, and on the same.
        for b in &others {
            assert!(arrives(&a, b, &payload), "{b:?}");
            assert!(arrives(b, &a, &[9; 64]), "{b:?}");
        }
    }
    let [plain, encapsulated] = [plain, encapsulated].map(|rule| rule.counter().unwrap().packets);
    let tunnel = matches!(between, Between::Vxlan { .. });
    assert_eq!((plain > 0, encapsulated > 0), (!tunnel, tunnel));
}

#[test]
fn hosts_reach_each_other_over_a_switch() {
    hosts_reach_each_other(Between::Plain, 9000);
}

#[test]
fn hosts_reach_each_other_over_a_router() {
    hosts_reach_each_other(Between::Routed, 9000);
}

#[test]
fn hosts_reach_each_other_over_vxlan() {
    require!(need::vxlan());
    for ipv6 in [false, true] {
        for mtu in [1450, 9000] {
            hosts_reach_each_other(Between::Vxlan { ipv6 }, mtu);
        }
    }
}

#[test]
fn a_lab_is_apart_from_the_machine_and_from_other_labs() {
    require!(need::lab());
    let (one, two) = (lab(), lab());
    let links = one.host().output(Command::new("ip").args(["-br", "link"])).unwrap();
    let links = String::from_utf8(links.stdout).unwrap();
    let mut names: Vec<_> = links.lines().filter_map(|l| l.split(['@', ' ']).next()).collect();
    names.sort_unstable();
    assert_eq!(names, ["br0", "lo", "veth0", "veth1"]);

    // The same addresses, with no path between the two labs.
    let (a, _) = pair(&one);
    let (_, b) = pair(&two);
    assert!(is_kept_back(&a, &b, b"hello"));
}

#[test]
fn a_child_runs_in_its_container_and_dies_with_its_guard() {
    require!(need::lab());
    let lab = lab();
    let mut command = Command::new("sleep");
    let child = lab.container(1).spawn(command.arg("60").stdin(Stdio::null())).unwrap();
    let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net"));
    let inside = lab.container(1).run(|| std::fs::read_link("/proc/thread-self/ns/net")).unwrap();
    let pid = child.id();
    assert_eq!(namespace(pid).unwrap(), inside.unwrap());
    assert_ne!(namespace(pid).unwrap(), namespace(std::process::id()).unwrap());
    drop(child);
    assert_eq!(namespace(pid).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_counter_counts_what_matches_and_nothing_else() {
    require!(need::nft());
    let lab = lab();
    let (a, b) = pair(&lab);
    let all = lab.count(&Match::roce()).unwrap();
    let forth = lab.count(&Match::roce().from(lab.container(0)).to(lab.container(1))).unwrap();
    let other = lab.count(&Match::udp(4792)).unwrap();
    for _ in 0..5 {
        assert!(arrives(&a, &b, &[0; 100]));
    }
    for _ in 0..2 {
        assert!(arrives(&b, &a, &[0; 100]));
    }
    // 20 bytes of IPv4 and 8 of UDP before each payload.
    let figures = |rule: &rocinante_lab::Rule| {
        let counter = rule.counter().unwrap();
        (counter.packets, counter.bytes)
    };
    assert_eq!(figures(&all), (7, 7 * 128));
    assert_eq!(figures(&forth), (5, 5 * 128));
    assert_eq!(figures(&other), (0, 0));
}

#[test]
fn a_block_stops_and_its_removal_lets_through() {
    require!(need::nft());
    let lab = lab();
    let (a, b) = pair(&lab);
    assert!(arrives(&a, &b, b"before"));
    let seen = lab.count(&Match::roce()).unwrap();
    let block = lab.block(&Match::roce()).unwrap();
    assert!(is_kept_back(&a, &b, b"during"));
    assert_eq!(block.counter().unwrap().packets, 1);
    assert_eq!(seen.counter().unwrap().packets, 1, "a counter sees what a block drops");
    block.remove().unwrap();
    assert!(arrives(&a, &b, b"after"));
}

#[test]
fn a_block_binds_ipv6_too() {
    require!(need::nft());
    let lab = lab();
    let [a, b] = [0, 1].map(|i| socket(lab.container(i), lab.container(i).ipv6().unwrap().into()));
    let block = lab.block(&Match::roce()).unwrap();
    assert!(is_kept_back(&a, &b, b"during"));
    assert_eq!(block.counter().unwrap().packets, 1);
    drop(block);
    assert!(arrives(&a, &b, b"after"));
}

#[test]
fn random_loss_loses_what_its_counter_says() {
    require!(need::nft());
    let lab = lab();
    let (a, b) = pair(&lab);
    let loss = lab.lose(&Match::roce(), 30.0).unwrap();
    let (sent, mut received, mut buf) = (1000, 0, [0; 16]);
    b.set_nonblocking(true).unwrap();
    for _ in 0..sent {
        a.send_to(b"number", b.local_addr().unwrap()).unwrap();
        // Never more than a few in the socket's queue, which would drop packets, too.
        while b.recv(&mut buf).is_ok() {
            received += 1;
        }
    }
    b.set_nonblocking(false).unwrap();
    while received + loss.counter().unwrap().packets < sent {
        b.recv(&mut buf).unwrap();
        received += 1;
    }
    let lost = loss.counter().unwrap().packets;
    assert_eq!(sent, received + lost);
    // 300 are expected, with a standard deviation of 14.5: the bounds are eight of them away.
    assert!((184..416).contains(&lost), "{lost} of {sent} lost");
}

#[test]
fn segmentation_can_be_switched() {
    require!(need::ethtool());
    let lab = lab();
    lab.container(0).set_udp_segmentation(false).unwrap();
    lab.container(0).set_udp_segmentation(true).unwrap();
}

/// Sends datagrams from `a` to `b` as fast as the kernel accepts them, for `time`. Returns the
/// payload bytes per second that arrived.
fn flood(a: &UdpSocket, b: &UdpSocket, time: Duration) -> f64 {
    let target = b.local_addr().unwrap();
    let start = Instant::now();
    b.set_nonblocking(true).unwrap();
    let (payload, mut buf) = ([1; 4096], [0; 9000]);
    let mut bytes = 0_usize;
    while start.elapsed() < time {
        a.send_to(&payload, target).unwrap();
        while let Ok(len) = b.recv(&mut buf) {
            bytes += len;
        }
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

#[test]
fn a_shaper_shapes_and_its_statistics_say_so() {
    require!(need::tc());
    let lab = lab();
    let (a, b) = pair(&lab);
    // While others have the processors, not much arrives by either.
    let is_fast = || flood(&a, &b, Duration::from_millis(300)) > 5.0 * 2_600_000.0;
    assert!((0..20).any(|_| is_fast()), "slow without a shaper");

    let tbf = Tbf { rate_bits: 20_000_000, burst_bytes: 16 << 10, limit_bytes: 64 << 10 };
    let shaper = lab.shape(1, &tbf).unwrap();
    // 2.5 MB/s on the wire, with the burst on top; 42 of 4138 bytes are headers.
    let is_as_fast_as_it_may = || {
        let shaped = flood(&a, &b, Duration::from_secs(1));
        assert!(shaped < 2_600_000.0, "{shaped} bytes/s");
        // What the shaper still has is not the next flood's.
        b.set_nonblocking(false).unwrap();
        b.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        while b.recv(&mut [0; 9000]).is_ok() {}
        shaped > 1_500_000.0
    };
    assert!((0..20).any(|_| is_as_fast_as_it_may()), "slower than its rate");
    let stats = shaper.stats().unwrap();
    assert!(stats.overlimits > 0 && stats.drops > 0, "{stats:?}");
    assert!(stats.bytes > 1_500_000, "{stats:?}");

    shaper.remove().unwrap();
    assert!((0..20).any(|_| is_fast()), "slow after the shaper");
}
