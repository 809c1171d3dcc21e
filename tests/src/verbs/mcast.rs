//! Multicast: a datagram to a group reaches each queue pair that is attached to it.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use rocinante::verbs::{GRH_LEN, PeerPath, QpType, Qpn, SendOp, WcOpcode};
use rocinante::{Access, Ah, Mr, Qp, QpBuilder, RecvWr, VerbsError, Wc};

use crate::harness::{Family, Harness, On, Setup, Side, assert_same, pattern, wr};

const QKEY: u32 = 0x0123_4567;
const IMM: [u8; 4] = [1, 2, 3, 4];
/// Bytes of a receive: the header, and the longest datagram of an Ethernet link.
const SIZE: usize = GRH_LEN + 1024;
/// How long to wait for a datagram that should not come.
const PAUSE: Duration = Duration::from_millis(100);

/// A group that no other test of this machine uses now.
fn group(family: Family) -> IpAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    #[allow(clippy::cast_possible_truncation, reason = "any group will do")]
    let process = std::process::id() as u16;
    let [high, low] = process.wrapping_mul(64).wrapping_add(next).to_be_bytes();
    match family {
        Family::V4 => [239, 77, high, low].into(),
        Family::V6 => [0xff15, 0, 0, 0, 0, 0x77, process, next].into(),
    }
}

fn builder(side: &Side) -> QpBuilder {
    side.qp().qp_type(QpType::Ud).qkey(QKEY)
}

fn ready(builder: QpBuilder) -> Qp {
    let qp = builder.build().unwrap().ready();
    qp.expect("a queue pair without a peer")
}

fn attach(side: &Side, qp: &Qp, group: IpAddr) -> Result<(), VerbsError> {
    side.run(|| qp.attach_mcast(group))
}

fn to(side: &Side, group: IpAddr) -> Ah {
    side.run(|| side.pd.create_ah(&PeerPath::new(group))).expect("a handle")
}

/// Posts the receive `wr_id`, in its part of `buffers`.
fn post(qp: &Qp, buffers: &Mr, wr_id: usize) {
    let list = [buffers.sge(wr_id * SIZE, SIZE)];
    qp.post_recv(&[RecvWr { wr_id: wr_id as u64, sges: &list }]).unwrap();
}

/// Sends to a group.
fn send(side: &Side, qp: &Qp, ah: &Ah, qkey: u32, data: &[u8]) {
    let source = side.pd.allocate(SIZE, Access::NONE).unwrap();
    source.write(0, data);
    let op = SendOp::SendTo { to: ah.to(Qpn::MULTICAST, qkey), imm: Some(IMM) };
    qp.post_send(&[wr(1000, op, &[source.sge(0, data.len())])]).unwrap();
    let mut wc = side.next();
    // The sender's own copy may complete first.
    while wc.wr_id != 1000 {
        wc = side.next();
    }
}

/// Checks that all data has arrived, and that the header names sender and group.
fn check(buffers: &Mr, wc: &Wc, from: &Qp, (local, group): (IpAddr, IpAddr), data: &[u8]) {
    assert_eq!((wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, GRH_LEN + data.len()), "{wc:?}");
    assert_eq!((wc.src_qp, wc.imm), (Some(from.qpn()), Some(IMM)));
    let at = usize::try_from(wc.wr_id).unwrap();
    let header: [u8; GRH_LEN] = buffers.to_vec(at * SIZE, GRH_LEN).try_into().unwrap();
    let told = match (local, group) {
        (IpAddr::V4(local), IpAddr::V4(group)) => {
            assert_eq!(header[32..36], local.octets(), "{header:x?}");
            (header[20] == 0x45, group.octets() == header[36..40])
        }
        (IpAddr::V6(local), IpAddr::V6(group)) => {
            assert_eq!(header[8..24], local.octets(), "{header:x?}");
            (header[0] >> 4 == 6, group.octets() == header[24..40])
        }
        _ => panic!("{local} and {group} are of two families"),
    };
    assert_eq!(told, (true, true), "{header:x?}");
    assert_same(&buffers.to_vec(at * SIZE + GRH_LEN, data.len()), data, "the datagram");
}

fn every_member_receives(on: On, family: Family) {
    let harness = Harness::new(&Setup::new(on).family(family));
    let [a, b] = &harness.sides;
    let group = group(family);
    let qps: Vec<Qp> = (0..3).map(|_| ready(builder(b))).collect();
    let buffers = b.pd.allocate(16 * SIZE, Access::LOCAL_WRITE).unwrap();
    attach(b, &qps[0], group).unwrap();
    attach(b, &qps[1], group).unwrap();
    attach(b, &qps[1], group).expect("again");
    let from = ready(builder(a));
    let ah = to(a, group);
    for (round, len) in [0, 1, 100, 1023, 1024].into_iter().enumerate() {
        let data = pattern(len, round as u64);
        (0..3).for_each(|at| post(&qps[at], &buffers, 3 * round + at));
        send(a, &from, &ah, QKEY, &data);
        // Two members get one copy each; the third queue pair is not attached.
        let mut wcs = [b.next(), b.next()];
        wcs.sort_by_key(|wc| wc.wr_id);
        for (at, wc) in wcs.iter().enumerate() {
            let wr_id = (3 * round + at) as u64;
            assert_eq!((wc.wr_id, wc.qpn), (wr_id, qps[at].qpn()), "{wc:?}");
            check(&buffers, wc, &from, (a.address, group), &data);
        }
    }
    b.quiet(PAUSE);
    // The answer goes to one queue pair.
    let back = ready(builder(b));
    let heard = buffers.to_vec(0, GRH_LEN).try_into().unwrap();
    post(&qps[0], &buffers, 15);
    send(a, &from, &ah, QKEY, b"who is there?");
    let wc = b.succeed(15);
    let answer = b.run(|| b.pd.create_ah_from_wc(&wc, &heard)).unwrap();
    let inbox = a.pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
    post(&from, &inbox, 0);
    let source = b.pd.allocate(4, Access::NONE).unwrap();
    source.write(0, b"here");
    let op = SendOp::SendTo { to: answer.to(wc.src_qp.unwrap(), QKEY), imm: None };
    back.post_send(&[wr(7, op, &[source.sge(0, 4)])]).unwrap();
    b.succeed(7);
    let wc = a.succeed(0);
    assert_eq!((wc.src_qp, wc.byte_len), (Some(back.qpn()), GRH_LEN as u32 + 4));
    assert_eq!(inbox.to_vec(GRH_LEN, 4), b"here");
}

pub fn every_member_receives_ipv4(on: On) {
    every_member_receives(on, Family::V4);
}

pub fn every_member_receives_ipv6(on: On) {
    every_member_receives(on, Family::V6);
}

/// Also on the sender's own device: the sender gets a copy, too.
pub fn a_sender_in_the_group_receives_its_own_datagram(on: On) {
    for family in [Family::V4, Family::V6] {
        let harness = Harness::new(&Setup::new(on.clone()).family(family));
        let [a, _] = &harness.sides;
        let group = group(family);
        let qps = [ready(builder(a)), ready(builder(a))];
        let buffers = a.pd.allocate(4 * SIZE, Access::LOCAL_WRITE).unwrap();
        for (at, qp) in qps.iter().enumerate() {
            attach(a, qp, group).unwrap();
            post(qp, &buffers, at);
        }
        let source = a.pd.allocate(8, Access::NONE).unwrap();
        source.write(0, b"to us all".get(..8).unwrap());
        let ah = to(a, group);
        let op = SendOp::SendTo { to: ah.to(Qpn::MULTICAST, QKEY), imm: Some(IMM) };
        qps[0].post_send(&[wr(1000, op, &[source.sge(0, 8)])]).unwrap();
        let mut wcs = [a.next(), a.next(), a.next()];
        wcs.sort_by_key(|wc| wc.wr_id);
        assert_eq!(wcs.each_ref().map(|wc| wc.wr_id), [0, 1, 1000]);
        for wc in &wcs[..2] {
            check(&buffers, wc, &qps[0], (a.address, group), b"to us al");
        }
    }
}

/// Each member accepts or drops its copy on its own.
pub fn one_member_that_cannot_take_it_is_no_trouble_to_others(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let group = group(Family::V4);
    let buffers = b.pd.allocate(8 * SIZE, Access::LOCAL_WRITE).unwrap();
    // One with another key, one without a receive, and one that is ready.
    let qps = [ready(builder(b).qkey(QKEY ^ 1)), ready(builder(b)), ready(builder(b))];
    for qp in &qps {
        attach(b, qp, group).unwrap();
    }
    post(&qps[0], &buffers, 0);
    post(&qps[2], &buffers, 2);
    let (from, ah) = (ready(builder(a)), to(a, group));
    send(a, &from, &ah, QKEY, b"for two");
    let wc = b.succeed(2);
    check(&buffers, &wc, &from, (a.address, group), b"for two");
    b.quiet(PAUSE);
    // For the first only, which still has its receive.
    post(&qps[1], &buffers, 1);
    post(&qps[2], &buffers, 2);
    send(a, &from, &ah, QKEY ^ 1, b"for one");
    check(&buffers, &b.succeed(0), &from, (a.address, group), b"for one");
    b.quiet(PAUSE);
    if harness.is_software() {
        let drops = b.ctx.counters().drops;
        assert_eq!((drops.qkey, drops.no_receive), (3, 1));
    }
}

pub fn a_queue_pair_that_left_the_group_receives_no_more(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let groups = [group(Family::V4), group(Family::V4)];
    let buffers = b.pd.allocate(16 * SIZE, Access::LOCAL_WRITE).unwrap();
    let [stays, leaves, goes] = [0, 1, 2].map(|_| ready(builder(b)));
    for qp in [&stays, &leaves, &goes] {
        for group in groups {
            attach(b, qp, group).unwrap();
        }
    }
    for (at, qp) in [&stays, &leaves, &goes].into_iter().enumerate() {
        (0..4).for_each(|n| post(qp, &buffers, 4 * at + n));
    }
    leaves.detach_mcast(groups[0]).unwrap();
    leaves.detach_mcast(groups[0]).expect_err("it is not attached any more");
    goes.destroy();
    let (from, ahs) = (ready(builder(a)), groups.map(|group| to(a, group)));
    send(a, &from, &ahs[0], QKEY, b"to the first");
    assert_eq!(b.next().qpn, stays.qpn());
    b.quiet(PAUSE);
    send(a, &from, &ahs[1], QKEY, b"to the second");
    let mut heard = [b.next().qpn, b.next().qpn];
    heard.sort();
    let mut expected = [stays.qpn(), leaves.qpn()];
    expected.sort();
    assert_eq!(heard, expected);
    b.quiet(PAUSE);
    // No member is left; then one comes back.
    drop(leaves);
    stays.detach_mcast(groups[1]).unwrap();
    send(a, &from, &ahs[1], QKEY, b"to nobody");
    b.quiet(PAUSE);
    attach(b, &stays, groups[1]).unwrap();
    send(a, &from, &ahs[1], QKEY, b"to one again");
    assert_eq!(b.next().qpn, stays.qpn());
}

pub fn what_cannot_be_attached_is_refused(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [connected, _peer] = harness.pair();
    let refused = |refused: Result<(), VerbsError>| match refused {
        Err(VerbsError::Invalid(why)) => why,
        other => panic!("{other:?}"),
    };
    let group = group(Family::V4);
    assert!(refused(attach(a, &connected, group)).contains("type UD"));
    let qp = ready(builder(b));
    for address in [b.address, [255; 4].into(), [0; 4].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 1].into()]
    {
        assert!(refused(attach(b, &qp, address)).contains("no multicast group"), "{address}");
    }
    assert!(refused(qp.detach_mcast(group)).contains("not attached"));
    // An IPv4 group by its GID.
    let IpAddr::V4(v4) = group else { panic!("IPv4 here") };
    attach(b, &qp, v4.to_ipv6_mapped().into()).unwrap();
    qp.detach_mcast(group).unwrap();
}
