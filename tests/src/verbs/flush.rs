//! FLUSH and ATOMIC WRITE.

use std::sync::atomic::{AtomicBool, Ordering};

use rocinante::device::Provider;
use rocinante::verbs::{FlushLevel, Placement, PostError, SendOp, WcOpcode};
use rocinante::{Access, Mr, Qp, SendWr, VerbsError, WcStatus};

use crate::harness::{Harness, On, Setup, pattern, wr};

const FLUSHABLE: Access = Access::ALL.with(Access::FLUSH_GLOBAL);

/// A pair of queue pairs with the right to flush.
fn pair(harness: &Harness) -> [Qp; 2] {
    let rights = FLUSHABLE.with(Access::FLUSH_PERSISTENT);
    let qps = harness.sides.each_ref().map(|side| side.qp().access(rights).build().unwrap());
    harness.connect(qps)
}

fn store(mr: &Mr, offset: usize) -> SendOp {
    SendOp::AtomicWrite { remote: mr.address() + offset as u64, rkey: mr.rkey() }
}

fn flush(mr: &Mr, placement: Placement, level: FlushLevel) -> SendOp {
    let len = u32::try_from(mr.len()).unwrap();
    SendOp::Flush { remote: mr.address(), rkey: mr.rkey(), len, placement, level }
}

/// A signaled request with inline data.
fn inline(wr_id: u64, op: SendOp, bytes: &[u8]) -> SendWr<'_> {
    SendWr::new(op, bytes).wr_id(wr_id)
}

/// Posts a FLUSH. Returns `false` on a device of the kernel if the library has no `ibv_wr_flush`.
fn posts(harness: &Harness, qp: &Qp, request: &SendWr<'_>) -> bool {
    match qp.post_send(std::slice::from_ref(request)) {
        Ok(()) => true,
        Err(refused) => {
            assert_eq!((refused.index, refused.error), (0, PostError::Unsupported));
            assert!(!harness.is_software());
            false
        }
    }
}

/// Stops the watching thread, also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Whether the device has FLUSH and ATOMIC WRITE: a card may have neither.
fn has(on: &On) -> Result<(), String> {
    let On::Kernel(device) = on else { return Ok(()) };
    let ctx = rocinante::Context::open_device(&device.name).map_err(|error| error.to_string())?;
    let optional = ctx.query_device().optional;
    let both = optional.atomic_write && optional.flush_global;
    both.then_some(()).ok_or_else(|| format!("{} has neither FLUSH nor ATOMIC WRITE", device.name))
}

pub fn an_atomic_write_is_whole_and_behind_what_is_before(on: On) {
    crate::require!(has(&on));
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, _peer] = pair(&harness);
    assert!(a.ctx.query_device().optional.atomic_write);
    const LEN: usize = 20_000;
    let target = b.pd.allocate(LEN + 8, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let source = a.pd.allocate(LEN, Access::LOCAL_WRITE).unwrap();
    let word = LEN.next_multiple_of(8);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Both halves change together, and then all earlier data is in place.
        let watcher = scope.spawn(|| {
            let mut seen = 0;
            while !stop.load(Ordering::Acquire) {
                let value = target.load_u64(word);
                assert_eq!((value >> 32) as u32, !(value as u32) * u32::from(value != 0));
                if value != 0 {
                    let mut first = [0; 1];
                    target.read(0, &mut first);
                    assert!(u32::from(first[0]) >= value as u32, "{} behind {value:#x}", first[0]);
                }
                seen = value.max(seen);
                std::thread::yield_now();
            }
            seen
        });
        let stopper = Stop(&stop);
        for round in 1..=200u32 {
            source.write(0, &[round as u8; LEN]);
            let (remote, rkey) = (target.address(), target.rkey());
            let write = SendOp::Write { remote, rkey, imm: None };
            let value = (u64::from(!round) << 32 | u64::from(round)).to_ne_bytes();
            let list = [source.sge(0, LEN)];
            let before = wr(0, write, &list).signaled(false);
            qp.post_send(&[before, inline(u64::from(round), store(&target, word), &value)])
                .unwrap();
            let done = a.succeed(u64::from(round));
            assert_eq!((done.opcode, done.qpn), (WcOpcode::AtomicWrite, qp.qpn()));
            assert_eq!(target.load_u64(word).to_ne_bytes(), value);
        }
        drop(stopper);
        watcher.join().unwrap();
    });
    assert_eq!(target.to_vec(0, LEN), [200; LEN]);
    // From a list of elements: hardware takes inline data only.
    source.write(8, b"fromlist");
    let list = [source.sge(8, 3), source.sge(11, 5)];
    match qp.post_send(&[wr(1, store(&target, 0), &list)]) {
        Ok(()) => {
            a.succeed(1);
            assert_eq!(target.to_vec(0, 8), b"fromlist");
        }
        Err(refused) => {
            assert_eq!(refused.error, PostError::NotInline);
            assert_eq!(a.ctx.provider(), Provider::Hardware);
        }
    }
}

pub fn what_was_written_is_flushed(on: On) {
    crate::require!(has(&on));
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, _peer] = pair(&harness);
    assert!(b.ctx.query_device().optional.flush_global);
    const LEN: usize = 9000;
    let target = b.pd.allocate(LEN, FLUSHABLE).unwrap();
    assert_eq!(target.access(), FLUSHABLE);
    let source = a.pd.allocate(LEN, Access::NONE).unwrap();
    for (round, level) in [FlushLevel::Range, FlushLevel::Region].into_iter().enumerate() {
        let bytes = pattern(LEN, round as u64 + 1);
        source.write(0, &bytes);
        let (remote, rkey) = (target.address(), target.rkey());
        let write = SendOp::Write { remote, rkey, imm: None };
        qp.post_send(&[wr(0, write, &[source.sge(0, LEN)]).signaled(false)]).unwrap();
        let request = wr(7, flush(&target, Placement::GLOBAL, level), &[]);
        if !posts(&harness, &qp, &request) {
            return println!("no FLUSH was asked for: this libibverbs has no ibv_wr_flush");
        }
        assert_eq!(a.succeed(7).opcode, WcOpcode::Flush);
        assert_eq!(target.to_vec(0, LEN), bytes);
    }
    // More FLUSHes than may be outstanding at once, between WRITEs.
    for wr_id in 0..64 {
        let (remote, rkey) = (target.address(), target.rkey());
        let list = [source.sge(0, 64)];
        let write = wr(wr_id, SendOp::Write { remote, rkey, imm: None }, &list);
        let request = wr(wr_id, flush(&target, Placement::GLOBAL, FlushLevel::Range), &[]);
        let value = wr_id.to_ne_bytes();
        let last = inline(wr_id, store(&target, 8 * wr_id as usize), &value);
        qp.post_send(&[write, request, last]).unwrap();
    }
    for wr_id in 0..64 {
        for opcode in [WcOpcode::RdmaWrite, WcOpcode::Flush, WcOpcode::AtomicWrite] {
            assert_eq!(a.succeed(wr_id).opcode, opcode);
        }
    }
    assert!((8..64).all(|wr_id| target.load_u64(8 * wr_id) == wr_id as u64));
}

pub fn what_may_not_be_flushed_is_refused(on: On) {
    crate::require!(has(&on));
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    // No memory here is persistent.
    let error = b.pd.allocate(4096, FLUSHABLE.with(Access::FLUSH_PERSISTENT)).unwrap_err();
    assert!(!harness.is_software() || matches!(error, VerbsError::Invalid(_)), "{error}");
    let flushable = b.pd.allocate(4096, FLUSHABLE).unwrap();
    let plain = b.pd.allocate(4096, Access::ALL).unwrap();
    let read_only = b.pd.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
    let refused = |qps: [Qp; 2], request: &SendWr<'_>, status| {
        if posts(&harness, &qps[0], request) {
            a.complete(request.wr_id, status);
        }
    };
    let both = Placement::GLOBAL.with(Placement::PERSISTENT);
    for level in [FlushLevel::Range, FlushLevel::Region] {
        for (mr, placement) in [
            (&plain, Placement::GLOBAL),
            (&plain, Placement::PERSISTENT),
            (&flushable, Placement::PERSISTENT),
            (&flushable, both),
        ] {
            let request = wr(1, flush(mr, placement, level), &[]);
            refused(pair(&harness), &request, WcStatus::RemAccessErr);
        }
    }
    let beyond = SendOp::Flush {
        remote: flushable.address() + 1,
        rkey: flushable.rkey(),
        len: 4096,
        placement: Placement::GLOBAL,
        level: FlushLevel::Range,
    };
    refused(pair(&harness), &wr(2, beyond, &[]), WcStatus::RemAccessErr);
    // The queue pair does not permit it.
    let good = flush(&flushable, Placement::GLOBAL, FlushLevel::Range);
    refused(harness.pair(), &wr(3, good, &[]), WcStatus::RemInvReqErr);
    refused(pair(&harness), &inline(4, store(&read_only, 0), &[1; 8]), WcStatus::RemAccessErr);
    refused(pair(&harness), &inline(5, store(&plain, 4096), &[1; 8]), WcStatus::RemAccessErr);
    let no_write = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let qps = [a.qp(), b.qp().access(no_write)].map(|qp| qp.build().unwrap());
    refused(harness.connect(qps), &inline(6, store(&plain, 0), &[1; 8]), WcStatus::RemInvReqErr);
    assert_eq!(plain.to_vec(0, 4096), [0; 4096]);
    // A malformed request is refused when it is posted.
    let [qp, _peer] = pair(&harness);
    let error = |request| qp.post_send(&[request]).unwrap_err().error;
    assert_eq!(error(inline(1, store(&plain, 4), &[1; 8])), PostError::BadAtomic);
    assert_eq!(error(inline(1, store(&plain, 0), &[1; 7])), PostError::BadAtomic);
    assert_eq!(error(inline(1, good, &[1; 8])), PostError::FlushData);
}
