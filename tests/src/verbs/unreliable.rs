//! Unreliable connections and datagrams: messages that arrive are right; lost ones are lost, and
//! nothing waits for them.

use std::time::Duration;

use rocinante::verbs::{
    GRH_LEN, ModifyAttr, Mtu, PeerPath, PostError, QpState, QpType, SendOp, WcOpcode,
};
use rocinante::{Access, Ah, Mr, PreparedQp, Qp, RecvWr, Wc, WcStatus};

use crate::harness::{Family, Harness, On, Setup, Side, assert_same, pattern, wait_until, wr};

const IMM: [u8; 4] = [9, 8, 7, 6];
const QKEY: u32 = 0x1111_1111;
/// Bytes of a receive.
const SIZE: usize = 32 << 10;

/// A datagram queue pair of a side, in RTS.
fn datagrams(side: &Side, qkey: u32) -> Qp {
    let prepared: PreparedQp = side.qp().qp_type(QpType::Ud).qkey(qkey).build().unwrap();
    prepared.ready().expect("a queue pair without a peer")
}

/// An address handle from one side to the other.
fn way(from: &Side, to: &Side) -> Ah {
    let index = from.ctx.gids().iter().position(|gid| *gid == from.address).expect("its address");
    from.run(|| from.pd.create_ah(&PeerPath::new(to.address).sgid_index(index))).unwrap()
}

/// Waits until `count` packets were dropped for this reason. Devices of the kernel do not report
/// drops; for them it waits a fixed time.
fn until_lost(side: &Side, reason: &str, count: u64) {
    if !side.is_software() {
        return side.quiet(Duration::from_millis(200));
    }
    wait_until("a loss", || {
        let drops = side.ctx.counters().drops;
        drops.iter().any(|(name, found)| name == reason && found >= count)
    });
}

fn receive(qp: &Qp, wr_id: u64, buffer: &Mr, len: usize) {
    qp.post_recv(&[RecvWr { wr_id, sges: &[buffer.sge(0, len)] }]).unwrap();
}

/// A datagram queue pair on each side, the address handle from the first to the second, and a
/// region of each.
struct Datagrams {
    qps: [Qp; 2],
    there: Ah,
    regions: [Mr; 2],
    harness: Harness,
}

impl Datagrams {
    fn new(on: On, qkey: u32) -> Self {
        let harness = Harness::new(&Setup::new(on));
        let [a, b] = &harness.sides;
        let qps = [a, b].map(|side| datagrams(side, qkey));
        let regions = [a, b].map(|side| side.pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap());
        Self { qps, there: way(a, b), regions, harness }
    }

    /// Sends `len` bytes to the second queue pair, with this Q_Key.
    fn send(&self, wr_id: u64, len: usize, qkey: u32) {
        let to = self.there.to(self.qps[1].qpn(), qkey);
        let op = SendOp::SendTo { to, imm: None };
        self.qps[0].post_send(&[wr(wr_id, op, &[self.regions[0].sge(0, len)])]).unwrap();
        self.harness.sides[0].succeed(wr_id);
    }
}

pub fn datagrams_over_ipv4(on: On) {
    there_and_back(on, Family::V4);
}

pub fn datagrams_over_ipv6(on: On) {
    if let On::Kernel(device) = &on {
        crate::require!(device.address_of(Family::V6));
    }
    there_and_back(on, Family::V6);
}

/// Each receiver answers, along the addresses in the header that it got.
fn there_and_back(on: On, family: Family) {
    let harness = Harness::new(&Setup::new(on).family(family));
    let [a, b] = &harness.sides;
    let qps = [a, b].map(|side| datagrams(side, QKEY));
    let regions = [a, b].map(|side| side.pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap());
    let there = way(a, b);
    let mtu = a.ctx.query_device().active_mtu.bytes() as usize;
    let mut lengths = vec![0, 1, 3, 64, 500, 1024];
    if harness.is_software() {
        lengths.extend([mtu - 1, mtu]);
    }
    for (round, len) in lengths.into_iter().enumerate() {
        let imm = (round % 2 == 1).then_some(IMM);
        let data = pattern(len, round as u64);
        regions[0].write(GRH_LEN, &data);
        let to = there.to(qps[1].qpn(), QKEY);
        let wc = one_way(&harness, [0, 1], &qps, &regions, SendOp::SendTo { to, imm }, len);
        assert_eq!((wc.src_qp, wc.imm), (Some(qps[0].qpn()), imm));
        let placed = regions[1].to_vec(0, GRH_LEN + len);
        assert_same(&placed[GRH_LEN..], &data, "the datagram");
        let grh: [u8; GRH_LEN] = placed[..GRH_LEN].try_into().unwrap();
        check_header(&grh, a, b);

        let back = b.run(|| b.pd.create_ah_from_wc(&wc, &grh)).unwrap();
        let to = back.to(wc.src_qp.unwrap(), QKEY);
        let wc = one_way(&harness, [1, 0], &qps, &regions, SendOp::SendTo { to, imm: None }, len);
        assert_eq!((wc.src_qp, wc.imm), (Some(qps[1].qpn()), None));
        assert_same(&regions[0].to_vec(GRH_LEN, len), &data, "the answer");
    }
    if harness.is_software() {
        let op = SendOp::SendTo { to: there.to(qps[1].qpn(), QKEY), imm: None };
        let beyond = qps[0].post_send(&[wr(1, op, &[regions[0].sge(0, mtu + 1)])]).unwrap_err();
        assert_eq!((beyond.index, beyond.error), (0, PostError::BeyondMtu));
    }
}

/// Sends `len` bytes, those behind the header's place, from one side to the other.
fn one_way(
    harness: &Harness,
    [from, to]: [usize; 2],
    qps: &[Qp; 2],
    regions: &[Mr; 2],
    op: SendOp,
    len: usize,
) -> Wc {
    receive(&qps[to], 7, &regions[to], SIZE);
    qps[from].post_send(&[wr(8, op, &[regions[from].sge(GRH_LEN, len)])]).unwrap();
    let sent = harness.sides[from].succeed(8);
    let wc = harness.sides[to].succeed(7);
    assert_eq!((sent.opcode, sent.qpn), (WcOpcode::Send, qps[from].qpn()));
    assert_eq!((wc.opcode, wc.qpn), (WcOpcode::Recv, qps[to].qpn()));
    assert_eq!(wc.byte_len as usize, GRH_LEN + len);
    wc
}

/// Over IPv4, bytes 20 to 39 are the IP header. Over IPv6, all 40 bytes are.
fn check_header(grh: &[u8; GRH_LEN], from: &Side, to: &Side) {
    use std::net::IpAddr::{V4, V6};
    let (source, destination) = match (from.address, to.address) {
        (V4(from), V4(to)) => {
            assert_eq!((grh[20], grh[29]), (0x45, 17), "IPv4, UDP");
            (from.octets().to_vec(), to.octets().to_vec())
        }
        (V6(from), V6(to)) => {
            assert_eq!(grh[0] >> 4, 6, "IPv6");
            (from.octets().to_vec(), to.octets().to_vec())
        }
        other => panic!("{other:?}"),
    };
    let at = GRH_LEN - 2 * source.len();
    assert_eq!(
        (&grh[at..at + source.len()], &grh[at + source.len()..]),
        (&source[..], &destination[..])
    );
}

pub fn a_datagram_with_another_queue_key_is_lost(on: On) {
    let pair = Datagrams::new(on, QKEY);
    let b = &pair.harness.sides[1];
    receive(&pair.qps[1], 5, &pair.regions[1], SIZE);
    pair.send(1, 10, QKEY + 1);
    until_lost(b, "qkey", 1);
    pair.send(2, 20, QKEY);
    assert_eq!(b.succeed(5).byte_len as usize, GRH_LEN + 20);
}

pub fn a_controlled_queue_key_stands_for_the_senders_own(on: On) {
    let pair = Datagrams::new(on, 0x8000_1234);
    let b = &pair.harness.sides[1];
    receive(&pair.qps[1], 5, &pair.regions[1], SIZE);
    pair.send(1, 10, 0x8000_0000);
    if pair.harness.is_rxe() {
        // Soft-RoCE sends the Q_Key of the request.
        until_lost(b, "qkey", 1);
        pair.send(2, 10, 0x8000_1234);
    }
    assert_eq!(b.succeed(5).byte_len as usize, GRH_LEN + 10);
}

pub fn a_datagram_without_a_receive_is_lost(on: On) {
    let pair = Datagrams::new(on, QKEY);
    let b = &pair.harness.sides[1];
    (0..50).for_each(|wr_id| pair.send(wr_id, 100, QKEY));
    until_lost(b, "no_receive", 50);
    receive(&pair.qps[1], 99, &pair.regions[1], SIZE);
    pair.send(50, 11, QKEY);
    assert_eq!(b.succeed(99).byte_len as usize, GRH_LEN + 11);
}

pub fn unreliable_connections_carry_sends_and_writes(on: On) {
    let harness = Harness::new(&Setup::new(on).mtu(Mtu::Mtu1024));
    let [a, b] = &harness.sides;
    let [qp, peer] = unreliable(&harness);
    let source = a.pd.allocate(SIZE, Access::NONE).unwrap();
    let target = b.pd.allocate(SIZE, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let mtu = 1024;
    for (round, len) in [0, 1, mtu, mtu + 1, 3 * mtu - 1, SIZE - 8].into_iter().enumerate() {
        let (remote, rkey) = (target.address() + 8, target.rkey());
        for (n, op) in [
            SendOp::Send { imm: None },
            SendOp::Send { imm: Some(IMM) },
            SendOp::Write { remote, rkey, imm: None },
            SendOp::Write { remote, rkey, imm: Some(IMM) },
        ]
        .into_iter()
        .enumerate()
        {
            let data = pattern(len, (4 * round + n) as u64);
            source.write(0, &data);
            target.write(0, &vec![0; SIZE]);
            peer.post_recv(&[RecvWr { wr_id: 4, sges: &[target.sge(8, SIZE - 8)] }]).unwrap();
            qp.post_send(&[wr(3, op, &[source.sge(0, len)])]).unwrap();
            a.succeed(3);
            if matches!(op, SendOp::Write { imm: None, .. }) {
                // The target learns nothing of a plain WRITE, but of the WRITE with immediate
                // behind it.
                qp.post_send(&[wr(3, SendOp::Write { remote, rkey, imm: Some(IMM) }, &[])])
                    .unwrap();
                a.succeed(3);
                assert_eq!(b.succeed(4).byte_len, 0);
            } else {
                let wc = b.succeed(4);
                assert_eq!((wc.byte_len as usize, wc.imm, wc.src_qp), (len, op.immediate(), None));
            }
            assert_same(&target.to_vec(8, len), &data, "the message");
            assert_eq!(target.to_vec(0, 8), [0; 8], "before it");
        }
    }
    if harness.is_software() {
        // No packet was ever answered.
        for side in &harness.sides {
            let counters = side.ctx.counters().transport;
            assert_eq!((counters.sent_acks, counters.retransmitted_pkts), (0, 0));
            assert_eq!((counters.sent_seq_err, counters.send_rnr_err), (0, 0));
        }
    }
    let read = SendOp::Read { remote: target.address(), rkey: target.rkey() };
    assert!(qp.post_send(&[wr(1, read, &[source.sge(0, 8)])]).is_err(), "UC has no READ");
}

fn unreliable(harness: &Harness) -> [Qp; 2] {
    let prepared = [0, 1].map(|at| harness.sides[at].qp().qp_type(QpType::Uc).build().expect("UC"));
    harness.connect(prepared)
}

pub fn a_message_without_a_receive_is_lost(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, peer] = unreliable(&harness);
    let source = a.pd.allocate(SIZE, Access::NONE).unwrap();
    let target = b.pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
    qp.post_send(&[wr(1, SendOp::Send { imm: None }, &[source.sge(0, 9000)])]).unwrap();
    a.succeed(1);
    until_lost(b, "no_receive", 1);
    receive(&peer, 5, &target, SIZE);
    qp.post_send(&[wr(2, SendOp::Send { imm: None }, &[source.sge(0, 5000)])]).unwrap();
    a.succeed(2);
    assert_eq!(b.succeed(5).byte_len, 5000);
}

pub fn a_faulty_datagram_stops_sending_only(on: On) {
    let pair = Datagrams::new(on, QKEY);
    let [a, b] = &pair.harness.sides;
    let (qp, to) = (&pair.qps[0], pair.there.to(pair.qps[1].qpn(), QKEY));
    let op = SendOp::SendTo { to, imm: None };
    let gone = a.pd.allocate(64, Access::NONE).unwrap();
    let nowhere = [gone.sge(0, 64)];
    drop(gone);
    qp.post_send(&[wr(1, op, &nowhere), wr(2, op, &[pair.regions[0].sge(0, 8)])]).unwrap();
    if pair.harness.is_rxe() {
        // Soft-RoCE has no SQE state, and may flush the faulty request, too.
        let wc = a.next();
        assert!(matches!(wc.status, WcStatus::LocProtErr | WcStatus::WrFlushErr), "{wc:?}");
        a.complete(2, WcStatus::WrFlushErr);
        return assert_eq!(qp.query().0, QpState::Err);
    }
    a.complete(1, WcStatus::LocProtErr);
    a.complete(2, WcStatus::WrFlushErr);
    let (state, ..) = qp.query();
    assert_eq!(state, QpState::Sqe);
    // Incoming messages still arrive.
    receive(qp, 5, &pair.regions[0], SIZE);
    let back = way(b, a);
    let op = SendOp::SendTo { to: back.to(qp.qpn(), QKEY), imm: None };
    pair.qps[1].post_send(&[wr(6, op, &[pair.regions[1].sge(0, 33)])]).unwrap();
    b.succeed(6);
    assert_eq!(a.succeed(5).byte_len as usize, GRH_LEN + 33);
    // Outgoing messages leave again once the program goes back to RTS.
    qp.modify(&ModifyAttr::state(QpState::Rts)).unwrap();
    receive(&pair.qps[1], 7, &pair.regions[1], SIZE);
    pair.send(8, 12, QKEY);
    assert_eq!(b.succeed(7).byte_len as usize, GRH_LEN + 12);
}
