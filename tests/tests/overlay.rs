//! RDMA between containers of two hosts over VXLAN. The ICRC covers the IPv4 identification, and
//! the kernel cuts a super-packet where the first device on its way cannot send it whole: the
//! container's `eth0`, the VXLAN device, the uplink, or none. It merges datagrams where a host has
//! that switched on. No datagram may have a wrong ICRC then.

use rocinante::device::Backend;
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{Access, Mr, Qp, RecvWr};
use rocinante_lab::{Between, Chain, Container, Lab, Rule, UPLINK, VXLAN};
use rocinante_tests::harness::{Family, Harness, Setup, assert_same, pattern, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::{need, require};

const CUT: &str = "tx-udp-segmentation";
const MERGED: &str = "rx-udp-gro-forwarding";
/// Bytes of each operation.
const BYTES: usize = 1 << 20;

/// Small WRITEs, and the bytes of each: 98 of their datagrams, of 668 bytes, fill 64 KiB.
const SMALL_WRITES: u64 = 294;
const SMALL: usize = 636;

/// One test per backend and family inside and outside.
macro_rules! cells {
    ($( $name:ident: $backend:ident $inside:ident $outside_v6:literal; )*) => {$(
        #[test]
        fn $name() {
            require!(need::backend(Backend::$backend));
            require!(need::nft());
            require!(need::ethtool());
            require!(need::vxlan());
            use Mtu::{Mtu512, Mtu1024, Mtu4096};
            for (link_mtu, mtu) in [(1450, Mtu512), (1450, Mtu1024), (9000, Mtu4096)] {
                run(Backend::$backend, Family::$inside, $outside_v6, link_mtu, mtu);
            }
        }
    )*};
}

cells! {
    udp_ipv4_over_ipv4: Udp V4 false;
    udp_ipv4_over_ipv6: Udp V4 true;
    udp_ipv6_over_ipv4: Udp V6 false;
    udp_ipv6_over_ipv6: Udp V6 true;
    packet_ipv4_over_ipv4: Packet V4 false;
    packet_ipv4_over_ipv6: Packet V4 true;
    packet_ipv6_over_ipv4: Packet V6 false;
    packet_ipv6_over_ipv6: Packet V6 true;
    afxdp_ipv4_over_ipv4: Xdp V4 false;
    afxdp_ipv4_over_ipv6: Xdp V4 true;
    afxdp_ipv6_over_ipv4: Xdp V6 false;
    afxdp_ipv6_over_ipv6: Xdp V6 true;
}

fn run(backend: Backend, family: Family, ipv6: bool, link_mtu: u32, mtu: Mtu) {
    let mut setup = Setup::new(backend)
        .family(family)
        .mtu(mtu)
        .may_break(Oracle::Retransmissions, "queues of the hosts may overflow");
    setup.between = Some(Between::Vxlan { ipv6 });
    setup.link_mtu = link_mtu;
    let harness = Harness::new(&setup);
    let [qp, peer] = harness.pair();
    let carried = count_encapsulated(harness.lab());
    let arrived = [(Chain::BRIDGE, "iifname \"vxlan0\" udp dport 4791 counter name hits")];
    let bridged = Rule::new(harness.lab().host_of(1), &arrived).unwrap();
    let mut seed = 0;
    let mut exchange = |what: &str| {
        let before = carried.counter().unwrap().packets;
        seed += 3;
        transfers(&harness, [&qp, &peer], seed, what);
        let datagrams = 3 * BYTES as u64 / u64::from(mtu.bytes())
            + if mtu >= Mtu::Mtu1024 { SMALL_WRITES } else { 0 };
        (carried.counter().unwrap().packets - before, datagrams)
    };
    // AF_XDP sends by a socket until it knows its neighbour.
    exchange("at first");
    let about = format!("{backend}, {family:?} over IPv6: {ipv6}, MTU {link_mtu}, {mtu:?}");
    // All subsets, each by one change of the last (a Gray code).
    let devices = [Container::DEVICE, VXLAN, UPLINK];
    let settings = if mtu == Mtu::Mtu512 { 1 } else { 8 };
    let mut last = [false; 3];
    for cut in (0..settings).map(|n| [0, 1, 2].map(|at| (n ^ n >> 1) >> at & 1 == 1)) {
        for at in (0..3).filter(|at| last[*at] != cut[*at]) {
            set(harness.lab(), devices[at], CUT, !cut[at]);
        }
        last = cut;
        let what = format!("{about}, cut at {cut:?}");
        let (frames, datagrams) = exchange(&what);
        let whole = cut == [false; 3] && backend != Backend::Xdp;
        assert_eq!(frames < datagrams, whole, "{what}: {frames} frames, {datagrams} datagrams");
        // Datagrams of this path MTU fill a super-packet best: with room for VXLAN, it is not cut.
        if whole && mtu == Mtu::Mtu512 {
            assert!(frames < datagrams / 4, "{what}: {frames} frames, {datagrams} datagrams");
        }
    }
    set(harness.lab(), UPLINK, CUT, false);
    // The VXLAN devices, or the containers' own, merge again what arrives as datagrams.
    for device in [VXLAN, Container::DEVICE] {
        set(harness.lab(), device, MERGED, true);
        let what = format!("{about}, merged at {device}");
        let before = bridged.counter().unwrap().packets;
        let (_, datagrams) = exchange(&what);
        let frames = bridged.counter().unwrap().packets - before;
        // Frames of AF_XDP have no checksum that the kernel could merge.
        if device == VXLAN && backend != Backend::Xdp {
            assert!(frames < datagrams, "{what}: {frames} frames, {datagrams} datagrams");
        }
        set(harness.lab(), device, MERGED, false);
    }
}

/// Sets an offload in both containers, or on both hosts.
fn set(lab: &Lab, device: &str, feature: &str, on: bool) {
    for index in [0, 1] {
        let netns = match device {
            Container::DEVICE => lab.container(index).netns(),
            _ => lab.host_of(index),
        };
        netns.set_feature(device, feature, on).expect("ethtool");
        if feature == MERGED {
            let state = if on { "on" } else { "off" };
            netns.command(&format!("ethtool -K {device} gro {state}")).expect("ethtool");
        }
    }
}

/// Counts the encapsulated frames (skbs) from the first host to the second.
fn count_encapsulated(lab: &Lab) -> Rule {
    let switch = lab.between().expect("a switch");
    let rule = r#"iifname "host0" udp dport 4789 counter name hits"#;
    Rule::new(switch, &[(Chain::BRIDGE, rule)]).expect("a rule")
}

/// A WRITE and a SEND to the second side, and what it READs. Every byte must be right, and every
/// ICRC.
fn transfers(harness: &Harness, [qp, peer]: [&Qp; 2], seed: u64, what: &str) {
    let [a, b] = &harness.sides;
    let [source, target] =
        [a, b].map(|side| side.pd.allocate(BYTES, Access::ALL).expect("a region"));
    let fill = |seed| {
        let bytes = pattern(BYTES, seed);
        source.write(0, &bytes);
        bytes
    };
    let whole = [source.sge(0, BYTES)];

    let bytes = fill(seed);
    let (remote, rkey) = (target.address(), target.rkey());
    qp.post_send(&[wr(1, SendOp::Write { remote, rkey, imm: None }, &whole)]).unwrap();
    a.succeed(1);
    assert_same(&target.to_vec(0, BYTES), &bytes, &format!("{what}: WRITE"));

    if harness.setup.connect.mtu >= Some(Mtu::Mtu1024) {
        small_writes(harness, qp, [&source, &target], what);
    }
    let bytes = fill(seed + 1);
    let sges = [target.sge(0, BYTES)];
    peer.post_recv(&[RecvWr { wr_id: 2, sges: &sges }]).unwrap();
    qp.post_send(&[wr(3, SendOp::Send { imm: None }, &whole)]).unwrap();
    a.succeed(3);
    b.succeed(2);
    assert_same(&target.to_vec(0, BYTES), &bytes, &format!("{what}: SEND"));

    let bytes = fill(seed + 2);
    let (remote, rkey) = (source.address(), source.rkey());
    peer.post_send(&[wr(4, SendOp::Read { remote, rkey }, &[target.sge(0, BYTES)])]).unwrap();
    b.succeed(4);
    assert_same(&target.to_vec(0, BYTES), &bytes, &format!("{what}: READ"));

    for side in &harness.sides {
        let counters = side.ctx.counters();
        assert_eq!(counters.drops.icrc, 0, "{what}: {counters:#?}");
    }
}

/// WRITEs of one packet each, posted at once, from the source's end to the target's begin.
fn small_writes(harness: &Harness, qp: &Qp, [source, target]: [&Mr; 2], what: &str) {
    let count = SMALL_WRITES as usize;
    let sges: Vec<_> = (0..count).map(|at| [source.sge(BYTES - (at + 1) * SMALL, SMALL)]).collect();
    let list: Vec<_> = (0..count)
        .map(|at| {
            let remote = target.address() + (at * SMALL) as u64;
            let op = SendOp::Write { remote, rkey: target.rkey(), imm: None };
            wr(at as u64, op, &sges[at]).signaled(at + 1 == count)
        })
        .collect();
    qp.post_send(&list).unwrap();
    harness.sides[0].succeed(SMALL_WRITES - 1);
    for at in 0..count {
        let expected = source.to_vec(BYTES - (at + 1) * SMALL, SMALL);
        let found = target.to_vec(at * SMALL, SMALL);
        assert_same(&found, &expected, &format!("{what}: small WRITE {at}"));
    }
}
