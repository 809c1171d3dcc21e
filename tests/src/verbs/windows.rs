//! Memory windows: the memory that peers reach through them, and until when.

use rocinante::verbs::{
    BindMw, Key, MwPart, MwType, PostError, QpState, Rereg, SendOp, Sge, WcOpcode,
};
use rocinante::{Access, Mr, Mw, Qp, RecvWr, VerbsError, WcStatus};

use crate::harness::{Harness, On, Setup, assert_same, pattern, wait_until, wr};

const SEND: SendOp = SendOp::Send { imm: None };
const REMOTE: Access = Access::REMOTE_WRITE.with(Access::REMOTE_READ).with(Access::REMOTE_ATOMIC);
/// Rights of a region to which windows are bound.
const OPEN: Access = Access::LOCAL_WRITE.with(Access::MW_BIND);
/// Bytes of a region.
const SIZE: usize = 1 << 16;

/// The first side is the peer; the second side has the region.
struct Ends {
    region: Mr,
    source: Mr,
    harness: Harness,
}

impl Ends {
    fn new(on: On) -> Self {
        let harness = Harness::new(&Setup::new(on));
        let region = harness.sides[1].pd.allocate(SIZE, OPEN).unwrap();
        let source = harness.sides[0].pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
        source.write(0, &pattern(SIZE, 5));
        Self { harness, region, source }
    }

    /// A window of type 2.
    fn window(&self) -> Mw {
        self.harness.sides[1].pd.alloc_mw(MwType::Type2).unwrap()
    }

    fn part(&self, offset: usize, len: usize) -> MwPart<'_> {
        MwPart { mr: &self.region, offset, len, access: REMOTE }
    }

    /// Binds a window of type 2 through the second side's queue pair; returns the window's key.
    fn bind(&self, qp: &Qp, mw: &Mw, part: &MwPart<'_>) -> Key {
        qp.post_send(&[wr(90, mw.bind(part), &[])]).unwrap();
        assert_eq!(self.harness.sides[1].succeed(90).opcode, WcOpcode::BindMw);
        mw.rkey()
    }

    /// The peer writes `len` bytes to `remote`.
    fn write(&self, qp: &Qp, rkey: Key, remote: u64, len: usize) {
        let write = SendOp::Write { remote, rkey, imm: None };
        qp.post_send(&[wr(91, write, &[self.source.sge(0, len)])]).unwrap();
        self.harness.sides[0].succeed(91);
    }

    /// The second side's request `wr_id` fails with `status`; on Soft-RoCE it may be flushed
    /// instead.
    fn fails(&self, wr_id: u64, status: WcStatus) {
        let wc = self.harness.sides[1].next();
        let flushed = self.harness.is_rxe() && wc.status == WcStatus::WrFlushErr;
        assert!(wc.wr_id == wr_id && (wc.status == status || flushed), "{wc:?}, not {status}");
    }

    /// The peer is refused, and its queue pair breaks.
    fn refused(&self, qp: &Qp, rkey: Key, remote: u64) {
        let before = self.region.to_vec(0, SIZE);
        let write = SendOp::Write { remote, rkey, imm: None };
        qp.post_send(&[wr(92, write, &[self.source.sge(0, 8)])]).unwrap();
        self.harness.sides[0].complete(92, WcStatus::RemAccessErr);
        assert_same(&self.region.to_vec(0, SIZE), &before, "the region");
    }
}

pub fn a_window_of_type_2_is_used_until_it_is_invalidated(on: On) {
    let ends = Ends::new(on);
    let [a, b] = &ends.harness.sides;
    let [qp, peer] = ends.harness.pair();
    let mw = ends.window();
    assert_eq!(mw.mw_type(), MwType::Type2);
    let part = ends.part(4096, 8192);
    let remote = part.address();
    let mut keys = Vec::new();
    for round in 0..5 {
        let rkey = ends.bind(&peer, &mw, &part);
        assert!(!keys.contains(&rkey));
        keys.push(rkey);
        let data = pattern(8192, round);
        ends.source.write(0, &data);
        ends.write(&qp, rkey, remote, 8192);
        assert_same(&ends.region.to_vec(4096, 8192), &data, "the bytes written");
        let read = SendOp::Read { remote: remote + 100, rkey };
        qp.post_send(&[wr(1, read, &[ends.source.sge(20_000, 500)])]).unwrap();
        a.succeed(1);
        assert_same(&ends.source.to_vec(20_000, 500), &data[100..600], "the bytes read");
        let found = ends.region.load_u64(4096);
        let add = SendOp::FetchAdd { remote, rkey, add: 7 };
        qp.post_send(&[wr(2, add, &[ends.source.sge(30_000, 8)])]).unwrap();
        a.succeed(2);
        assert_eq!(ends.region.load_u64(4096), found.wrapping_add(7));
        // The invalidation waits for the requests before it, and ends before the next one begins.
        let list = [wr(3, SEND, &[]), wr(4, SendOp::LocalInv { rkey }, &[]), wr(5, SEND, &[])];
        for wr_id in [6, 7] {
            qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
        }
        peer.post_send(&list).unwrap();
        b.succeed(3);
        assert_eq!(b.succeed(4).opcode, WcOpcode::LocalInv);
        b.succeed(5);
        for wr_id in [6, 7] {
            a.succeed(wr_id);
        }
    }
    ends.refused(&qp, keys[4], remote);
}

pub fn a_window_of_type_1_is_bound_anew(on: On) {
    let ends = Ends::new(on);
    let b = &ends.harness.sides[1];
    let pairs = [(); 4].map(|()| ends.harness.pair());
    let mw = b.pd.alloc_mw(MwType::Type1).unwrap();
    let bind = |at: usize, offset, len| {
        let bind = BindMw { wr_id: 1, part: ends.part(offset, len), signaled: true, fence: false };
        let rkey = pairs[at][1].bind_mw(&mw, &bind).unwrap();
        assert_eq!(b.succeed(1).opcode, WcOpcode::BindMw);
        assert_eq!(mw.rkey(), rkey);
        rkey
    };
    let start = ends.region.address();
    let first = bind(0, 0, 4096);
    // All queue pairs of the domain get through it, not only the one that bound it.
    ends.write(&pairs[0][0], first, start, 4096);
    ends.write(&pairs[1][0], first, start, 4096);
    let second = bind(1, 8192, 4096);
    assert_ne!(first, second);
    ends.write(&pairs[0][0], second, start + 8192, 4096);
    ends.refused(&pairs[0][0], first, start);
    ends.refused(&pairs[2][0], bind(1, 0, 0), start);
    // A bind by another verb is another request.
    let wrong = ends.window();
    let part = BindMw { wr_id: 1, part: ends.part(0, 64), signaled: true, fence: false };
    let error = pairs[3][1].bind_mw(&wrong, &part).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    let foreign = ends.harness.sides[0].pd.alloc_mw(MwType::Type1).unwrap();
    // The key is not looked up in the other device's table.
    let error = pairs[3][1].bind_mw(&foreign, &part).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
}

pub fn a_send_takes_a_window_away(on: On) {
    let ends = Ends::new(on);
    let [a, b] = &ends.harness.sides;
    let [qp, peer] = ends.harness.pair();
    let mw = ends.window();
    let part = ends.part(0, 4096);
    let mut rkey = Key::default();
    for len in [0, 1, 4096, 10_000] {
        rkey = ends.bind(&peer, &mw, &part);
        ends.write(&qp, rkey, part.address(), 64);
        peer.post_recv(&[RecvWr { wr_id: 1, sges: &[ends.region.sge(20_000, 10_000)] }]).unwrap();
        let list = [ends.source.sge(0, len)];
        let list = if len > 0 { &list[..] } else { &[] };
        qp.post_send(&[wr(2, SendOp::SendInv { rkey }, list)]).unwrap();
        assert_eq!(a.succeed(2).opcode, WcOpcode::Send);
        let wc = b.succeed(1);
        assert_eq!((wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, len));
        assert_eq!((wc.invalidated, wc.imm), (Some(rkey), None));
        assert_same(&ends.region.to_vec(20_000, len), &ends.source.to_vec(0, len), "the SEND");
    }
    ends.refused(&qp, rkey, part.address());
}

/// The SEND itself succeeds. Its receiver may not invalidate that key, reports an error and breaks.
pub fn a_send_takes_away_no_more_than_it_may(on: On) {
    let ends = Ends::new(on);
    let [a, b] = &ends.harness.sides;
    let [other, other_peer] = ends.harness.pair();
    let theirs = ends.window();
    let part = ends.part(0, 4096);
    let foreign = ends.bind(&other_peer, &theirs, &part);
    let own = ends.window();
    let type_1 = b.pd.alloc_mw(MwType::Type1).unwrap();
    let bind = BindMw { wr_id: 1, part, signaled: true, fence: false };
    let type_1 = other_peer.bind_mw(&type_1, &bind).map(|key| (key, type_1)).unwrap();
    b.succeed(1);
    let ordinary = b.pd.allocate(64, Access::ALL).unwrap();
    let mut keys = vec![ordinary.rkey(), type_1.0, Key(foreign.0 ^ 0x55)];
    if ends.harness.is_software() {
        // Soft-RoCE lets any queue pair invalidate any window of type 2. If that window is not
        // bound, the kernel follows a null pointer (`rxe_do_invalidate_mw`).
        keys.extend([foreign, own.rkey(), Key(0), Key(u32::MAX)]);
    }
    for key in keys {
        let [qp, peer] = ends.harness.pair();
        peer.post_recv(&[RecvWr { wr_id: 2, sges: &[ends.region.sge(20_000, 64)] }]).unwrap();
        let list = [ends.source.sge(0, 64)];
        qp.post_send(&[wr(3, SendOp::SendInv { rkey: key }, &list)]).unwrap();
        b.complete(2, WcStatus::RemInvReqErr);
        a.succeed(3);
        wait_until("the queue pair breaks", || peer.state() == QpState::Err);
    }
    // All keys are still valid.
    ends.write(&other, foreign, part.address(), 4096);
    ends.write(&other, type_1.0, part.address(), 4096);
    ends.write(&other, ordinary.rkey(), ordinary.address(), 64);
}

pub fn a_window_shows_what_it_was_bound_to(on: On) {
    let ends = Ends::new(on);
    let [a, _] = &ends.harness.sides;
    let at = ends.region.address() + 4096;
    // The start of the window, and its rights. None of these accesses is admitted.
    let mut cases = vec![
        (at, Access::REMOTE_READ | Access::REMOTE_ATOMIC),
        (ends.region.address() + SIZE as u64, REMOTE),
        (ends.region.address().wrapping_sub(8), REMOTE),
    ];
    let beside = [at - 8, at + 4096, at + 4092];
    if ends.harness.is_rxe() {
        // Soft-RoCE checks only that the access is inside the region (`check_rkey` of
        // `rxe_resp.c`).
        let [qp, peer] = ends.harness.pair();
        let mw = ends.window();
        let rkey = ends.bind(&peer, &mw, &ends.part(4096, 4096));
        beside.iter().for_each(|remote| ends.write(&qp, rkey, *remote, 8));
    } else {
        cases.extend(beside.map(|remote| (remote, REMOTE)));
    }
    for (remote, access) in cases {
        let [qp, peer] = ends.harness.pair();
        let mw = ends.window();
        let rkey = ends.bind(&peer, &mw, &MwPart { access, ..ends.part(4096, 4096) });
        ends.refused(&qp, rkey, remote);
    }
    for (op, access) in [
        (SendOp::Read { remote: at, rkey: Key(0) }, Access::REMOTE_WRITE),
        (SendOp::FetchAdd { remote: at, rkey: Key(0), add: 1 }, Access::REMOTE_WRITE),
    ] {
        let [qp, peer] = ends.harness.pair();
        let mw = ends.window();
        let rkey = ends.bind(&peer, &mw, &MwPart { access, ..ends.part(4096, 4096) });
        let op = match op {
            SendOp::Read { remote, .. } => SendOp::Read { remote, rkey },
            _ => SendOp::FetchAdd { remote: at, rkey, add: 1 },
        };
        qp.post_send(&[wr(1, op, &[ends.source.sge(0, 8)])]).unwrap();
        a.complete(1, WcStatus::RemAccessErr);
    }
}

pub fn what_cannot_be_bound(on: On) {
    let ends = Ends::new(on);
    let b = &ends.harness.sides[1];
    let closed = b.pd.allocate(SIZE, Access::ALL).unwrap();
    let read_only = b.pd.allocate(SIZE, Access::MW_BIND).unwrap();
    let elsewhere = b.ctx.alloc_pd();
    let foreign = elsewhere.allocate(SIZE, OPEN).unwrap();
    let gone = b.pd.allocate(SIZE, OPEN).unwrap();
    let good = ends.part(0, 4096);
    let parts = [
        MwPart { mr: &closed, ..good },
        MwPart { mr: &read_only, ..good },
        MwPart { offset: SIZE - 4095, ..good },
        MwPart { offset: SIZE, len: 1, ..good },
        MwPart { len: SIZE + 1, ..good },
        MwPart { offset: usize::MAX, ..good },
        MwPart { len: 0, ..good },
        MwPart { mr: &foreign, ..good },
    ];
    let requests = parts.iter().map(|part| {
        let mw = ends.window();
        (mw.bind(part), mw)
    });
    let mut requests: Vec<_> = requests.collect();
    let first = ends.window();
    let unbound = first.rkey();
    requests.push((first.bind(&MwPart { len: SIZE + 2, ..good }), first));
    // A window of another domain than the queue pair's, no window, and a region that is gone.
    let mw = elsewhere.alloc_mw(MwType::Type2).unwrap();
    requests.push((mw.bind(&MwPart { mr: &foreign, ..good }), mw));
    let SendOp::BindMw { rkey, region, addr, len, access, .. } = requests[0].0 else { panic!() };
    requests
        .push((SendOp::BindMw { mw: Key(0x77), rkey, region, addr, len, access }, ends.window()));
    let mw = ends.window();
    let after = mw.bind(&MwPart { mr: &gone, ..good });
    gone.deregister().unwrap();
    requests.push((after, mw));
    for (op, _mw) in &requests {
        let [_qp, peer] = ends.harness.pair();
        // Some devices check when the request is posted.
        match peer.post_send(&[wr(1, *op, &[]), wr(2, SEND, &[])]) {
            Ok(()) => {
                ends.fails(1, WcStatus::MwBindErr);
                b.complete(2, WcStatus::WrFlushErr);
                wait_until("the queue pair breaks", || peer.state() == QpState::Err);
            }
            Err(refused) => {
                let refusal = matches!(refused.error, PostError::Refused(_));
                assert!(refused.index == 0 && refusal && !ends.harness.is_software(), "{refused}");
            }
        }
    }
    // A failed bind leaves the window with its old key, and the window can still be bound. Once
    // bound, it must be invalidated before the next bind.
    let [qp, peer] = ends.harness.pair();
    let (_, mw) = &requests[parts.len()];
    assert_ne!(mw.rkey(), unbound);
    mw.set_rkey(unbound);
    ends.write(&qp, ends.bind(&peer, mw, &good), good.address(), 64);
    peer.post_send(&[wr(1, mw.bind(&good), &[])]).unwrap();
    ends.fails(1, WcStatus::MwBindErr);
}

pub fn a_window_of_type_2_is_one_queue_pairs(on: On) {
    let ends = Ends::new(on);
    let [qp, peer] = ends.harness.pair();
    let [other, other_peer] = ends.harness.pair();
    let b = &ends.harness.sides[1];
    let windows = b.ctx.query_device().windows;
    assert!(windows.type_2b || ends.harness.is_rxe(), "{windows:?}: what else?");
    let mw = ends.window();
    let part = ends.part(0, 4096);
    let rkey = ends.bind(&peer, &mw, &part);
    ends.refused(&other, rkey, part.address());
    ends.write(&qp, rkey, part.address(), 64);
    if ends.harness.is_software() {
        // Another queue pair cannot invalidate it, either.
        let [_third, third_peer] = ends.harness.pair();
        third_peer.post_send(&[wr(1, SendOp::LocalInv { rkey }, &[])]).unwrap();
        b.complete(1, WcStatus::LocQpOpErr);
        ends.write(&qp, rkey, part.address(), 64);
        assert_eq!(other_peer.state(), QpState::Err);
        // The window is free once its queue pair is gone.
        drop(peer);
        let [qp, peer] = ends.harness.pair();
        ends.write(&qp, ends.bind(&peer, &mw, &part), part.address(), 64);
    }
}

pub fn a_region_with_a_window_stays(on: On) {
    let mut ends = Ends::new(on);
    let [qp, peer] = ends.harness.pair();
    let mw = ends.window();
    let part = ends.part(0, 4096);
    let remote = part.address();
    let rkey = ends.bind(&peer, &mw, &part);
    let Ends { region, .. } = ends;
    let rocinante::Refused { value: region, error } = region.deregister().unwrap_err();
    assert!(matches!(error, VerbsError::Busy(_)), "{error}");
    ends.region = *region;
    if ends.harness.is_software() {
        let error = ends.region.rereg(&Rereg::default()).unwrap_err();
        assert!(matches!(error, VerbsError::Busy(_)), "{error}");
    }
    ends.write(&qp, rkey, remote, 64);
    peer.post_send(&[wr(1, SendOp::LocalInv { rkey }, &[])]).unwrap();
    ends.harness.sides[1].succeed(1);
    ends.region.deregister().unwrap();
    drop(mw);
}

pub fn a_window_that_is_gone_is_refused(on: On) {
    let ends = Ends::new(on);
    let [qp, peer] = ends.harness.pair();
    let mw = ends.window();
    let part = ends.part(0, 4096);
    let rkey = ends.bind(&peer, &mw, &part);
    ends.write(&qp, rkey, part.address(), 64);
    mw.dealloc();
    ends.refused(&qp, rkey, part.address());
    let b = &ends.harness.sides[1];
    if ends.harness.is_software() {
        // A region that is dropped invalidates its windows.
        let [qp, peer] = ends.harness.pair();
        let region = b.pd.allocate(SIZE, OPEN).unwrap();
        let mw = ends.window();
        let part = MwPart { mr: &region, ..part };
        let (rkey, remote) = (ends.bind(&peer, &mw, &part), part.address());
        drop(region);
        ends.refused(&qp, rkey, remote);
    }
    // The window's key is not valid as a local key.
    let [_qp, peer] = ends.harness.pair();
    let mw = ends.window();
    let rkey = ends.bind(&peer, &mw, &part);
    peer.post_send(&[wr(1, SEND, &[Sge { addr: part.address(), len: 8, lkey: rkey }])]).unwrap();
    ends.fails(1, WcStatus::LocProtErr);
    drop(mw);
}

pub fn without_an_address_bytes_count_from_the_first(on: On) {
    let ends = Ends::new(on);
    let [a, b] = &ends.harness.sides;
    let [qp, peer] = ends.harness.pair();
    let region = b.pd.allocate(SIZE, Access::ALL | Access::ZERO_BASED).unwrap();
    assert_eq!((region.address(), region.sge(16, 8).addr), (0, 16));
    ends.write(&qp, region.rkey(), 100, 5000);
    assert_same(&region.to_vec(100, 5000), &ends.source.to_vec(0, 5000), "the WRITE");
    // Locally, too.
    region.write(0, &pattern(300, 9));
    qp.post_recv(&[RecvWr { wr_id: 1, sges: &[ends.source.sge(10_000, 300)] }]).unwrap();
    peer.post_send(&[wr(2, SEND, &[region.sge(0, 300)])]).unwrap();
    b.succeed(2);
    a.succeed(1);
    assert_same(&ends.source.to_vec(10_000, 300), &pattern(300, 9), "the SEND");
    assert!(region.check(0, SIZE as u32, Access::REMOTE_WRITE).is_ok());
    assert!(region.check(1, SIZE as u32, Access::REMOTE_WRITE).is_err());
    let mw = ends.window();
    let part = MwPart { access: REMOTE | Access::ZERO_BASED, ..ends.part(4096, 4096) };
    assert_eq!(part.address(), 0);
    ends.write(&qp, ends.bind(&peer, &mw, &part), 8, 4000);
    assert_same(&ends.region.to_vec(4104, 4000), &ends.source.to_vec(0, 4000), "the window");
    let write = SendOp::Write { remote: SIZE as u64 - 7, rkey: region.rkey(), imm: None };
    qp.post_send(&[wr(3, write, &[ends.source.sge(0, 8)])]).unwrap();
    a.complete(3, WcStatus::RemAccessErr);
}

pub fn a_region_is_registered_anew(on: On) {
    let ends = Ends::new(on);
    let [a, b] = &ends.harness.sides;
    let mut region = b.pd.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
    region.write(0, &pattern(4096, 1));
    let old = region.rkey();
    let foreign = a.ctx.alloc_pd();
    let error = region.rereg(&Rereg { pd: Some(&foreign), ..Rereg::default() }).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    let writable = Rereg { access: Some(Access::ALL), ..Rereg::default() };
    if ends.harness.is_rxe() {
        // Soft-RoCE has no such verb, or only a part of it (6.7).
        match region.rereg(&writable) {
            Ok(()) => assert_eq!(region.access(), Access::ALL),
            Err(error) => {
                assert!(matches!(error, VerbsError::Hardware(_)), "{error}");
                assert_eq!(region.access(), Access::LOCAL_WRITE | Access::REMOTE_READ);
            }
        }
        return;
    }
    let bad = Rereg { access: Some(Access::REMOTE_WRITE), ..Rereg::default() };
    let error = region.rereg(&bad).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)) && region.rkey() == old, "{error}");
    // New permissions; the memory is the same.
    let pairs = [(); 4].map(|()| ends.harness.pair());
    region.rereg(&writable).unwrap();
    let (qp, start) = (&pairs[0][0], region.address());
    assert_same(&region.to_vec(0, 4096), &pattern(4096, 1), "the bytes from before");
    ends.write(qp, region.rkey(), start, 4096);
    assert_same(&region.to_vec(0, 4096), &ends.source.to_vec(0, 4096), "the WRITE");
    assert_eq!((region.access(), region.len()), (Access::ALL, 4096));
    if ends.harness.is_software() {
        assert_eq!(region.rkey(), old);
    }
    // Other memory.
    let second = region.rkey();
    region.rereg(&Rereg { len: Some(3 * 4096), ..Rereg::default() }).unwrap();
    assert_same(&region.to_vec(0, 3 * 4096), &[0; 3 * 4096], "new memory");
    ends.write(qp, region.rkey(), region.address() + 4096, 8192);
    assert_same(&region.to_vec(4096, 8192), &ends.source.to_vec(0, 8192), "the WRITE");
    if ends.harness.is_software() {
        ends.refused(&pairs[2][0], second, start);
        // Other permissions leave a posted receive as it is.
        pairs[3][1].post_recv(&[RecvWr { wr_id: 1, sges: &[region.sge(0, 64)] }]).unwrap();
        region.rereg(&writable).unwrap();
        ends.write(qp, region.rkey(), region.address(), 64);
        pairs[3][0].post_send(&[wr(2, SEND, &[])]).unwrap();
        a.succeed(2);
        b.succeed(1);
    }
    // Another domain: its queue pairs reach the region, others do not.
    let domain = b.ctx.alloc_pd();
    region.rereg(&Rereg { pd: Some(&domain), ..Rereg::default() }).unwrap();
    ends.refused(qp, region.rkey(), region.address());
    let prepared =
        [a.qp(), domain.qp(&b.cq, &b.cq).access(Access::ALL)].map(|qp| qp.build().unwrap());
    let [qp, _peer] = ends.harness.connect(prepared);
    ends.write(&qp, region.rkey(), region.address(), 4096);
    let error = domain.dealloc().unwrap_err().error;
    assert!(matches!(error, VerbsError::Busy(_)), "{error}");
}
