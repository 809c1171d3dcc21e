//! Unreliable connections and datagrams between two containers, on every backend. The tests repeat
//! messages that may be lost, and compare each byte that arrives.

use std::process::Command;
use std::time::Duration;

use rocinante::device::Backend;
use rocinante::verbs::{
    GRH_LEN, ModifyAttr, PeerPath, QpState, QpType, Qpn, SendData, SendOp, WcOpcode,
};
use rocinante::{Access, Qp, RecvWr, SendWr, Wc, WcStatus};
use rocinante_tests::harness::{Harness, Setup, Side, assert_same, pattern, wait_until, wr};
use rocinante_tests::{need, on_backends, on_each_backend, require};

const IMM: [u8; 4] = [0xde, 0xad, 0xbe, 0xef];
const QKEY: u32 = 0x2222_3333;
/// How long to wait for a message that may be lost.
const PATIENCE: Duration = Duration::from_secs(2);

fn uc_pair(harness: &Harness) -> [Qp; 2] {
    let make = |side: &Side| side.qp().qp_type(QpType::Uc).build().unwrap();
    harness.connect([make(&harness.sides[0]), make(&harness.sides[1])])
}

/// A datagram queue pair in RTS.
fn ready(side: &Side) -> Qp {
    let qp = side.qp().qp_type(QpType::Ud).qkey(QKEY).build().unwrap();
    qp.ready().unwrap()
}

on_each_backend!(unreliable::*);
on_each_backend!(what_was_posted_leaves_before_its_queue_pair_goes);

on_each_backend!(
    what_a_receiver_does_not_want_is_counted,
    a_handle_that_is_gone_fails_the_request,
    a_device_talks_to_itself,
    what_waits_for_company_leaves_though_nobody_polls,
);

/// Datagrams in a row may be held back for a batch, but not for ever, even if the program turns to
/// something else. A lost datagram may be repeated, so only silence fails.
fn what_waits_for_company_leaves_though_nobody_polls(backend: Backend) {
    const COUNT: usize = 9;
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let qps = [ready(a), ready(b)];
    let ah = a.run(|| a.pd.create_ah(&PeerPath::to(&qps[1].endpoint()))).unwrap();
    let mr = b.pd.allocate(100, Access::LOCAL_WRITE).unwrap();
    let to = ah.to(qps[1].qpn(), QKEY);
    let arrived = || {
        for _ in 0..COUNT {
            qps[1].post_recv(&[RecvWr { wr_id: 5, sges: &[mr.sge(0, 100)] }]).unwrap();
        }
        for _ in 0..COUNT {
            let op = SendOp::SendTo { to, imm: None };
            let data = SendData::Inline(b"one of many");
            // Not signaled, so there is nothing to poll for.
            qps[0].post_send(&[SendWr::new(op, data).wr_id(1).signaled(false)]).unwrap();
        }
        // Only the receiver is driven.
        (0..COUNT).all(|_| b.cq.wait_one(PATIENCE).is_ok())
    };
    assert!((0..10).any(|_| arrived()), "{:?} {:?}", a.ctx.counters(), b.ctx.counters());
}

/// One test for each backend that sends through the qdisc of its interface. Frames of `afxdp`
/// bypass the qdisc.
mod what_waits_for_room_leaves_and_then_all_is_idle {
    use super::*;

    on_backends! {
        udp: Udp + tc => what_waits_for_room_leaves(Backend::Udp);
        packet: Packet + tc => what_waits_for_room_leaves(Backend::Packet);
    }
}

/// The kernel accepts less than is posted. The two queue pairs have a source port each, and so on
/// `udp` a full socket each. The sender's program does nothing more.
fn what_waits_for_room_leaves(backend: Backend) {
    const LEN: usize = 400_000;
    let mut setup = Setup::new(backend);
    setup.port.tx_buffer_bytes = 100_000;
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let shaper = "qdisc add dev eth0 root tbf rate 400mbit burst 128kb limit 16mb";
    let mut tc = Command::new("tc");
    harness.lab().container(0).output(tc.args(shaper.split(' '))).unwrap();
    let pairs = [uc_pair(&harness), uc_pair(&harness)];
    let source = a.pd.allocate(LEN, Access::NONE).unwrap();
    source.write(0, &pattern(LEN, 1));
    let target = b.pd.allocate(2 * LEN, Access::ALL).unwrap();
    for round in 0..3 {
        for (index, [qp, peer]) in pairs.iter().enumerate() {
            peer.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
            let remote = target.address() + (index * LEN) as u64;
            let op = SendOp::Write { remote, rkey: target.rkey(), imm: Some(IMM) };
            qp.post_send(&[wr(2, op, &[source.sge(0, LEN)]).signaled(false)]).unwrap();
        }
        b.succeed(1);
        b.succeed(1);
        for index in 0..2 {
            let found = target.to_vec(index * LEN, LEN);
            assert_same(&found, &pattern(LEN, 1), &format!("message {index} of round {round}"));
        }
        harness.rests();
    }
    assert!(a.ctx.counters().port.tx_blocked > 0, "the kernel took everything at once");
}

fn what_a_receiver_does_not_want_is_counted(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let qps = [ready(a), ready(b)];
    let there = qps[1].endpoint();
    let ah = a.run(|| a.pd.create_ah(&PeerPath::to(&there))).unwrap();
    let mr = b.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let send = |qpn: Qpn, qkey, len| {
        let bytes = [7; 200];
        let op = SendOp::SendTo { to: ah.to(qpn, qkey), imm: None };
        qps[0].post_send(&[SendWr::new(op, SendData::Inline(&bytes[..len])).wr_id(1)]).unwrap();
        a.succeed(1);
    };
    let drops = || b.ctx.counters().drops;
    // Each is repeated until it has arrived: a loss is no fault here.
    qps[1].post_recv(&[RecvWr { wr_id: 5, sges: &[mr.sge(0, 100)] }]).unwrap();
    wait_until("another Q_Key", || {
        send(there.qpn, QKEY ^ 1, 8);
        drops().qkey > 0
    });
    wait_until("too long", || {
        send(there.qpn, QKEY, 61);
        drops().too_long > 0
    });
    wait_until("an unknown queue pair", || {
        send(Qpn::new(there.qpn.value() ^ 0x1000), QKEY, 8);
        drops().unknown_qpn > 0
    });
    assert_eq!(b.cq.poll_one().unwrap(), None);
    assert_eq!(mr.to_vec(0, 4096), [0; 4096]);
    wait_until("the receive is still there", || {
        send(there.qpn, QKEY, 60);
        b.cq.poll_one().unwrap().is_some_and(|wc| (wc.wr_id, wc.byte_len) == (5, 100))
    });
    wait_until("no receive", || {
        send(there.qpn, QKEY, 8);
        drops().no_receive > 0
    });
    assert_eq!(qps[1].state(), QpState::Rts);
}

fn a_handle_that_is_gone_fails_the_request(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let qp = ready(a);
    let ah = a.run(|| a.pd.create_ah(&PeerPath::new(b.address))).unwrap();
    let to = ah.to(Qpn::new(0x77), QKEY);
    let send = |wr_id| {
        qp.post_send(&[wr(wr_id, SendOp::SendTo { to, imm: None }, &[])]).unwrap();
    };
    send(1);
    drop(ah);
    a.succeed(1);
    send(2);
    a.complete(2, WcStatus::LocProtErr);
    assert_eq!(qp.state(), QpState::Sqe);
    send(3);
    a.complete(3, WcStatus::WrFlushErr);
    qp.modify(&ModifyAttr::state(QpState::Rts)).unwrap();
    let ah = a.run(|| a.pd.create_ah(&PeerPath::new(b.address))).unwrap();
    let to = ah.to(Qpn::new(0x77), QKEY);
    qp.post_send(&[wr(4, SendOp::SendTo { to, imm: None }, &[])]).unwrap();
    a.succeed(4);
    // An address of another family, and an index that does not exist.
    assert!(a.pd.create_ah(&PeerPath::new("fd00::1".parse().unwrap())).is_err());
    assert!(a.pd.create_ah(&PeerPath::new(b.address).sgid_index(99)).is_err());
}

fn a_device_talks_to_itself(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, _] = &harness.sides;
    let qps = [ready(a), ready(a)];
    let ah = a.run(|| a.pd.create_ah(&PeerPath::new(a.address))).unwrap();
    let mr = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    qps[1].post_recv(&[RecvWr { wr_id: 5, sges: &[mr.sge(0, 100)] }]).unwrap();
    let op = SendOp::SendTo { to: ah.to(qps[1].qpn(), QKEY), imm: Some(IMM) };
    qps[0].post_send(&[SendWr::new(op, SendData::Inline(b"hello")).wr_id(1)]).unwrap();
    let mut ids = [a.next(), a.next()].map(|wc| (wc.wr_id, wc.status));
    ids.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(ids, [(1, WcStatus::Success), (5, WcStatus::Success)]);
    assert_eq!(mr.to_vec(GRH_LEN, 5), b"hello");
}

/// Also the requests that were held back for a batch, which are all but the first.
fn what_was_posted_leaves_before_its_queue_pair_goes(backend: Backend) {
    const COUNT: u64 = 20;
    let harness = Harness::new(&Setup::new(backend));
    let b = &harness.sides[1];
    for by_state in [false, true] {
        let [qp, peer] = uc_pair(&harness);
        for id in 0..COUNT {
            peer.post_recv(&[RecvWr { wr_id: id, sges: &[] }]).unwrap();
        }
        for id in 0..COUNT {
            qp.post_send(&[wr(id, SendOp::Send { imm: None }, &[]).signaled(false)]).unwrap();
        }
        if by_state {
            qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
        }
        drop(qp);
        for id in 0..COUNT {
            b.succeed(id);
        }
    }
}

/// Misuse by the program is refused at once.
#[test]
fn misuse_is_named() {
    require!(need::backend(Backend::Udp));
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let [a, b] = &harness.sides;
    let datagrams = a.qp().qp_type(QpType::Ud).build().unwrap();
    let peer = b.qp().build().unwrap().endpoint();
    let rocinante::Refused { value: datagrams, error } =
        datagrams.connect(&peer, &Default::default()).unwrap_err();
    assert!(error.to_string().contains("has no peer"), "{error}");
    let qp = datagrams.ready().unwrap();
    let refused = qp.post_send(&[wr(1, SendOp::Send { imm: None }, &[])]).unwrap_err();
    assert!(refused.to_string().contains("SendTo"), "{refused}");
    let error = a.qp().build().unwrap().ready().unwrap_err().error;
    assert!(error.to_string().contains("connect it"), "{error}");
    let mut wc = Wc::default();
    (wc.opcode, wc.byte_len, wc.qpn) = (WcOpcode::Recv, 40, Qpn::new(2));
    let error = a.pd.create_ah_from_wc(&wc, &[0; GRH_LEN]).unwrap_err();
    assert!(error.to_string().contains("header of a datagram"), "{error}");
    wc.src_qp = Some(Qpn::new(1));
    assert!(a.pd.create_ah_from_wc(&wc, &[0; GRH_LEN]).is_err());
}
