//! Shared receive queues: a message that needs a receive takes the oldest.

use std::time::Duration;

use rocinante::verbs::{
    AsyncEvent, GRH_LEN, ModifyAttr, PeerPath, PostError, QpEvent, QpState, QpType, SendOp,
    WcOpcode,
};
use rocinante::{Access, Mr, Qp, RecvWr, Srq, VerbsError, WcStatus};

use crate::harness::{Harness, On, Setup, assert_same, pattern, wait_until, wr};

const SEND: SendOp = SendOp::Send { imm: None };
/// Bytes of a receive.
const SIZE: usize = 4096;

/// Pairs of queue pairs, those of the second side with `srq`.
fn pairs(harness: &Harness, srq: &Srq, qp_type: QpType, count: usize) -> Vec<[Qp; 2]> {
    let [a, b] = &harness.sides;
    let make = || {
        let qps = [a.qp(), b.qp().srq(srq)].map(|qp| qp.qp_type(qp_type).build().unwrap());
        harness.connect(qps)
    };
    (0..count).map(|_| make()).collect()
}

/// Posts the receive `wr_id`, in its part of `buffers`.
fn post(srq: &Srq, buffers: &Mr, wr_id: usize) -> Result<(), PostError> {
    let list = [buffers.sge(wr_id * SIZE, SIZE)];
    srq.post_recv(&[RecvWr { wr_id: wr_id as u64, sges: &list }]).map_err(|error| error.error)
}

pub fn queue_pairs_share_receives(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    for qp_type in [QpType::Rc, QpType::Uc] {
        let srq = b.pd.create_srq(64, 2).unwrap();
        let qps = pairs(&harness, &srq, qp_type, 3);
        let buffers = b.pd.allocate(16 * SIZE, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        let source = a.pd.allocate(SIZE, Access::NONE).unwrap();
        (0..16).for_each(|wr_id| post(&srq, &buffers, wr_id).unwrap());
        for (round, at) in [0, 2, 1, 1, 0, 2, 2, 0].into_iter().enumerate() {
            let data = pattern(SIZE - round, round as u64);
            source.write(0, &data);
            let [qp, peer] = &qps[at];
            let (remote, rkey) = (buffers.address() + 15 * SIZE as u64, buffers.rkey());
            // Every other message is a WRITE with immediate, with its data elsewhere.
            let write = SendOp::Write { remote, rkey, imm: Some([1, 2, 3, 4]) };
            let (op, is, place) = match round % 2 {
                0 => (SEND, WcOpcode::Recv, round * SIZE),
                _ => (write, WcOpcode::RecvRdmaWithImm, 15 * SIZE),
            };
            qp.post_send(&[wr(100, op, &[source.sge(0, data.len())])]).unwrap();
            a.succeed(100);
            let wc = b.succeed(round as u64);
            assert_eq!((wc.qpn, wc.opcode, wc.byte_len as usize), (peer.qpn(), is, data.len()));
            assert_same(&buffers.to_vec(place, data.len()), &data, "the receive");
        }
    }
}

pub fn datagrams_share_receives(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(16, 1).unwrap();
    let ready =
        |prepared: rocinante::PreparedQp| prepared.ready().expect("a queue pair without a peer");
    let from = ready(a.qp().qp_type(QpType::Ud).build().unwrap());
    let to: Vec<Qp> =
        (0..2).map(|_| ready(b.qp().qp_type(QpType::Ud).srq(&srq).build().unwrap())).collect();
    let buffers = b.pd.allocate(8 * SIZE, Access::LOCAL_WRITE).unwrap();
    let source = a.pd.allocate(SIZE, Access::NONE).unwrap();
    let ah = a.run(|| a.pd.create_ah(&PeerPath::new(b.address))).unwrap();
    (0..8).for_each(|wr_id| post(&srq, &buffers, wr_id).unwrap());
    for round in 0..8 {
        let data = pattern(200 + round, round as u64);
        source.write(0, &data);
        let to = &to[round % 2];
        let op = SendOp::SendTo { to: ah.to(to.qpn(), 0x1111_1111), imm: None };
        from.post_send(&[wr(100, op, &[source.sge(0, data.len())])]).unwrap();
        a.succeed(100);
        let wc = b.succeed(round as u64);
        assert_eq!((wc.qpn, wc.src_qp), (to.qpn(), Some(from.qpn())));
        assert_same(&buffers.to_vec(round * SIZE + GRH_LEN, data.len()), &data, "the datagram");
    }
}

pub fn without_a_shared_receive_the_sender_waits(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(4, 1).unwrap();
    let qps = pairs(&harness, &srq, QpType::Rc, 2);
    let buffers = b.pd.allocate(2 * SIZE, Access::LOCAL_WRITE).unwrap();
    let source = a.pd.allocate(SIZE, Access::NONE).unwrap();
    for [qp, _] in &qps {
        qp.post_send(&[wr(1, SEND, &[source.sge(0, SIZE)])]).unwrap();
    }
    a.quiet(Duration::from_millis(20));
    for wr_id in 0..2 {
        post(&srq, &buffers, wr_id).unwrap();
        b.succeed(wr_id as u64);
        a.succeed(1);
    }
}

pub fn the_limit_of_a_shared_queue_is_told_once(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(16, 1).unwrap();
    let attr = srq.query().unwrap();
    assert!(attr.max_wr >= 16 && attr.max_sge >= 1 && attr.srq_limit == 0, "{attr:?}");
    let error = srq.arm(attr.max_wr + 1).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    let qps = pairs(&harness, &srq, QpType::Rc, 2);
    let buffers = b.pd.allocate(16 * SIZE, Access::LOCAL_WRITE).unwrap();
    (0..16).for_each(|wr_id| post(&srq, &buffers, wr_id).unwrap());
    let reached = AsyncEvent::SrqLimitReached { srq: srq.number() };
    let mut left = 16;
    for limit in [12, 9] {
        srq.arm(limit).unwrap();
        assert_eq!(srq.query().unwrap().srq_limit, limit);
        while left > limit - 3 {
            qps[left as usize % 2][0].post_send(&[wr(1, SEND, &[])]).unwrap();
            a.succeed(1);
            b.succeed(16 - u64::from(left));
            left -= 1;
            if left == limit - 1 {
                let mut event = None;
                wait_until("the event of the limit", || {
                    event = b.ctx.poll_async_event();
                    event.is_some()
                });
                assert_eq!(event, Some(reached), "{left} left");
                assert_eq!(srq.query().unwrap().srq_limit, 0);
            } else {
                assert_eq!(b.ctx.poll_async_event(), None, "{left} left");
            }
        }
    }
}

pub fn a_broken_queue_pair_leaves_the_shared_queue(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(8, 1).unwrap();
    let qps = pairs(&harness, &srq, QpType::Rc, 3);
    let buffers = b.pd.allocate(8 * SIZE, Access::LOCAL_WRITE).unwrap();
    (0..6).for_each(|wr_id| post(&srq, &buffers, wr_id).unwrap());
    // Broken by its program, or by a message that is too long for its receive.
    let source = a.pd.allocate(2 * SIZE, Access::NONE).unwrap();
    qps[0][1].modify(&ModifyAttr::state(QpState::Err)).unwrap();
    qps[1][0].post_send(&[wr(1, SEND, &[source.sge(0, SIZE + 1)])]).unwrap();
    let [there, here] = harness.too_long();
    a.complete(1, there);
    b.complete(0, here);
    for [_, peer] in &qps[..2] {
        wait_until("the queue pair breaks", || peer.state() == QpState::Err);
    }
    if harness.is_software() {
        for [_, peer] in &qps[..2] {
            let event = QpEvent::LastWqeReached;
            assert_eq!(b.ctx.poll_async_event(), Some(AsyncEvent::Qp { qpn: peer.qpn(), event }));
        }
        assert_eq!(b.ctx.poll_async_event(), None);
    }
    for wr_id in 1..6 {
        qps[2][0].post_send(&[wr(2, SEND, &[source.sge(0, SIZE)])]).unwrap();
        a.succeed(2);
        assert_eq!(b.succeed(wr_id).qpn, qps[2][1].qpn());
    }
    b.quiet(Duration::from_millis(5));
}

pub fn a_shared_queue_in_use_is_not_destroyed(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(4, 1).unwrap();
    // A queue pair of another device cannot use it,
    let error = a.qp().srq(&srq).build().unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    // and a queue pair with one takes no receives of its own.
    let qp = b.qp().srq(&srq).build_reset().unwrap();
    let refused = qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap_err();
    assert_eq!((refused.index, refused.error), (0, PostError::Shared));
    assert_eq!(qp.srq().map(Srq::number), Some(srq.number()));
    let rocinante::Refused { value: srq, error } = srq.destroy().unwrap_err();
    assert!(matches!(error, VerbsError::Busy(_)), "{error}");
    drop(qp);
    // It takes the number of receives and of elements that it reports.
    let attr = srq.query().unwrap();
    let buffers = b.pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
    let many = vec![buffers.sge(0, 1); attr.max_sge as usize + 1];
    let refused = srq.post_recv(&[RecvWr { wr_id: 1, sges: &many }]).unwrap_err();
    assert_eq!(refused.error, PostError::TooManySges);
    let list: Vec<_> = (0..u64::from(attr.max_wr) + 1000)
        .map(|wr_id| RecvWr { wr_id, sges: &many[..1] })
        .collect();
    let refused = srq.post_recv(&list).unwrap_err();
    assert_eq!(refused.error, PostError::Full);
    assert!(refused.index >= attr.max_wr as usize, "{refused} of {attr:?}");
    srq.destroy().unwrap();
}

/// Eight senders, sixteen receives: the senders wait for receives, and no message is lost or mixed
/// up.
pub fn few_receives_serve_many_senders(on: On) {
    const SENDERS: usize = 8;
    const MESSAGES: usize = 100;
    const RECEIVES: usize = 16;
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let srq = b.pd.create_srq(RECEIVES as u32, 1).unwrap();
    let qps = pairs(&harness, &srq, QpType::Rc, SENDERS);
    let buffers = b.pd.allocate(RECEIVES * SIZE, Access::LOCAL_WRITE).unwrap();
    let source = a.pd.allocate(SENDERS * SIZE, Access::NONE).unwrap();
    (0..RECEIVES).for_each(|wr_id| post(&srq, &buffers, wr_id).unwrap());
    (0..SENDERS).for_each(|at| source.write(at * SIZE, &pattern(SIZE, at as u64)));
    let len = |at: usize, message: usize| 1 + (at * 523 + message * 977) % SIZE;
    for message in 0..MESSAGES {
        for (at, [qp, _]) in qps.iter().enumerate() {
            qp.post_send(&[wr(1, SEND, &[source.sge(at * SIZE, len(at, message))])]).unwrap();
        }
    }
    let mut seen = [0; SENDERS];
    for _ in 0..SENDERS * MESSAGES {
        let wc = b.next();
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        let at = qps.iter().position(|[_, peer]| peer.qpn() == wc.qpn).expect("one of them");
        let expected = &pattern(SIZE, at as u64)[..len(at, seen[at])];
        let place = wc.wr_id as usize * SIZE;
        assert_same(&buffers.to_vec(place, wc.byte_len as usize), expected, "in order");
        seen[at] += 1;
        post(&srq, &buffers, wc.wr_id as usize).unwrap();
    }
    (0..SENDERS * MESSAGES).for_each(|_| _ = a.succeed(1));
    assert_eq!(seen, [MESSAGES; SENDERS]);
}
