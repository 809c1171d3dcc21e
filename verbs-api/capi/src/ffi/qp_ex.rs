//! Requests that are built by calls (`ibv_wr_start(3)`) and posted together.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::slice;

use parking_lot::lock_api::RawMutex as _;
use rocinante_stack::mem::{FlushLevel, Placement};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::SendWr;
use rocinante_stack::verbs::{Destination, QpType, SendData, SendOp};

use super::border::{Outcome, posted, quiet, refuse};
use super::post::{BATCH, Batch, bind, bytes, destination, refusal, request};
use super::qp::Pair;
use crate::abi::{Ah, DataBuf, Mw, MwBindInfo, Qp, QpEx, Sge};

/// The requests since `ibv_wr_start`.
#[derive(Default)]
pub(super) struct Builder {
    list: Vec<Request>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// Windows to give their new keys when the list is posted.
    bound: Vec<(usize, u32)>,
    /// The errno of the first mistake, or 0.
    failed: c_int,
}

struct Request {
    wr_id: u64,
    flags: c_uint,
    op: SendOp,
    data: Data,
}

/// The data of a request: places in the builder's lists.
enum Data {
    Sges(Range<usize>),
    Inline(Range<usize>),
}

impl Builder {
    fn clear(&mut self) {
        self.list.clear();
        self.sges.clear();
        self.inline.clear();
        self.bound.clear();
        self.failed = 0;
    }

    fn fail(&mut self, errno: c_int) {
        if self.failed == 0 {
            self.failed = errno;
        }
    }

    /// Appends a request without data, with the number and flags that the program has set.
    fn push(&mut self, qp: &QpEx, op: SendOp) {
        let (wr_id, flags, at) = (qp.wr_id, qp.wr_flags, self.sges.len());
        self.list.push(Request { wr_id, flags, op, data: Data::Sges(at..at) });
    }

    fn set(&mut self, data: Data) {
        match self.list.last_mut() {
            Some(last) => last.data = data,
            None => self.fail(libc::EINVAL),
        }
    }

    fn prepared(&self, request_of: &Request) -> SendWr<'_> {
        let data = match &request_of.data {
            Data::Sges(range) => SendData::Sges(&self.sges[range.clone()]),
            Data::Inline(range) => SendData::Inline(&self.inline[range.clone()]),
        };
        request(request_of.wr_id, request_of.op, data, request_of.flags)
    }
}

/// `IBV_QP_EX_WITH_ATOMIC_WRITE`.
const ATOMIC_WRITE: u64 = 1 << 12;

/// Bits of `enum ibv_qp_create_send_ops_flags` that a queue pair of this type can have.
pub(super) fn operations(qp_type: QpType) -> u64 {
    const WRITE: u64 = 1;
    const WRITE_WITH_IMM: u64 = 1 << 1;
    const SEND: u64 = 1 << 2;
    const SEND_WITH_IMM: u64 = 1 << 3;
    const READ: u64 = 1 << 4;
    const COMPARE_SWAP: u64 = 1 << 5;
    const FETCH_ADD: u64 = 1 << 6;
    const LOCAL_INV: u64 = 1 << 7;
    const BIND_MW: u64 = 1 << 8;
    const SEND_WITH_INV: u64 = 1 << 9;
    const FLUSH: u64 = 1 << 11;
    let datagrams = SEND | SEND_WITH_IMM;
    let unreliable = datagrams | WRITE | WRITE_WITH_IMM | LOCAL_INV | BIND_MW;
    match qp_type {
        QpType::Ud => datagrams,
        QpType::Uc => unreliable,
        QpType::Rc => {
            unreliable | READ | COMPARE_SWAP | FETCH_ADD | SEND_WITH_INV | FLUSH | ATOMIC_WRITE
        }
    }
}

/// The structure of a queue pair, extended or not: it is the same object.
pub(super) fn structure(qp: Qp) -> QpEx {
    QpEx {
        qp,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: Some(wr_atomic_cmp_swp),
        wr_atomic_fetch_add: Some(wr_atomic_fetch_add),
        wr_bind_mw: Some(wr_bind_mw),
        wr_local_inv: Some(wr_local_inv),
        wr_rdma_read: Some(wr_rdma_read),
        wr_rdma_write: Some(wr_rdma_write),
        wr_rdma_write_imm: Some(wr_rdma_write_imm),
        wr_send: Some(wr_send),
        wr_send_imm: Some(wr_send_imm),
        wr_send_inv: Some(wr_send_inv),
        wr_send_tso: Some(wr_send_tso),
        wr_set_ud_addr: Some(wr_set_ud_addr),
        wr_set_xrc_srqn: Some(wr_set_xrc_srqn),
        wr_set_inline_data: Some(wr_set_inline_data),
        wr_set_inline_data_list: Some(wr_set_inline_data_list),
        wr_set_sge: Some(wr_set_sge),
        wr_set_sge_list: Some(wr_set_sge_list),
        wr_start: Some(wr_start),
        wr_complete: Some(wr_complete),
        wr_abort: Some(wr_abort),
        wr_atomic_write: Some(wr_atomic_write),
        wr_flush: Some(wr_flush),
    }
}

/// Runs `body` with the builder.
///
/// # Safety
/// The program's queue pair, between `ibv_wr_start` and `ibv_wr_complete`, on that thread.
unsafe fn build(qp: *mut QpEx, body: impl FnOnce(&Pair, &mut Builder) -> Outcome<()>) {
    quiet(|| {
        // SAFETY: the caller vouches for it: `wr_start` took the lock.
        unsafe {
            if let Ok(pair) = Pair::of(qp.cast()) {
                let builder = &mut *pair.builder.get();
                if let Err(errno) = body(pair, builder) {
                    builder.fail(errno);
                }
            }
        }
    });
}

/// Appends a request.
///
/// # Safety
/// As [`build`].
unsafe fn push(qp: *mut QpEx, op: impl FnOnce(&Pair) -> Outcome<SendOp>) {
    // SAFETY: the caller vouches for it.
    unsafe {
        build(qp, |pair, builder| {
            let op = op(pair)?;
            builder.push(&*qp, op);
            Ok(())
        });
    }
}

macro_rules! requests {
    ($($name:ident($($argument:ident: $kind:ty),*) $op:expr;)*) => {
        $(unsafe extern "C" fn $name(qp: *mut QpEx $(, $argument: $kind)*) {
            // SAFETY: the program calls it between `ibv_wr_start` and `ibv_wr_complete`.
            unsafe { push(qp, |pair| $op(pair)) };
        })*
    };
}

fn imm(data: u32) -> Option<[u8; 4]> {
    // Big-endian as it comes.
    Some(data.to_ne_bytes())
}

/// A SEND: of a datagram, whose destination a later call sets, or on a connection.
fn send(pair: &Pair, imm: Option<[u8; 4]>) -> SendOp {
    match pair.qp_type {
        QpType::Ud => SendOp::SendTo { to: Destination::default(), imm },
        QpType::Rc | QpType::Uc => SendOp::Send { imm },
    }
}

requests! {
    wr_atomic_cmp_swp(rkey: u32, remote: u64, compare: u64, swap: u64)
        |_: &Pair| Ok(SendOp::CompareSwap { remote, rkey: Key(rkey), compare, swap });
    wr_atomic_fetch_add(rkey: u32, remote: u64, add: u64)
        |_: &Pair| Ok(SendOp::FetchAdd { remote, rkey: Key(rkey), add });
    wr_local_inv(rkey: u32) |_: &Pair| Ok(SendOp::LocalInv { rkey: Key(rkey) });
    wr_rdma_read(rkey: u32, remote: u64)
        |_: &Pair| Ok(SendOp::Read { remote, rkey: Key(rkey) });
    wr_rdma_write(rkey: u32, remote: u64)
        |_: &Pair| Ok(SendOp::Write { remote, rkey: Key(rkey), imm: None });
    wr_rdma_write_imm(rkey: u32, remote: u64, data: u32)
        |_: &Pair| Ok(SendOp::Write { remote, rkey: Key(rkey), imm: imm(data) });
    wr_send() |pair: &Pair| Ok(send(pair, None));
    wr_send_imm(data: u32) |pair: &Pair| Ok(send(pair, imm(data)));
    wr_send_inv(rkey: u32) |_: &Pair| Ok(SendOp::SendInv { rkey: Key(rkey) });
    // A queue pair with these is refused.
    wr_send_tso(_hdr: *mut c_void, _hdr_sz: u16, _mss: u16) |_: &Pair| Err(libc::EOPNOTSUPP);
    wr_set_xrc_srqn(_srqn: u32) |_: &Pair| Err(libc::EOPNOTSUPP);
    wr_flush(rkey: u32, remote: u64, len: usize, placement: u8, level: u8)
        |_: &Pair| flush(Key(rkey), remote, len, placement, level);
}

fn flush(rkey: Key, remote: u64, len: usize, placement: u8, level: u8) -> Outcome<SendOp> {
    let placement = Placement::from_bits(placement).ok_or(libc::EINVAL)?;
    let level = match level {
        0 => FlushLevel::Range,
        1 => FlushLevel::Region,
        _ => return Err(libc::EINVAL),
    };
    let len = u32::try_from(len).map_err(|_| libc::EINVAL)?;
    Ok(SendOp::Flush { remote, rkey, len, placement, level })
}

unsafe extern "C" fn wr_bind_mw(qp: *mut QpEx, mw: *mut Mw, rkey: u32, info: *const MwBindInfo) {
    // SAFETY: the program's window and structure, between the two calls.
    unsafe {
        build(qp, |_, builder| {
            let info = info.as_ref().ok_or(libc::EINVAL)?;
            // The one before in this list has not changed the window yet.
            let earlier = builder.bound.iter().rev().find(|(other, _)| *other == mw as usize);
            let op = bind(mw, |now| earlier.map_or(now, |(_, key)| *key), rkey, info)?;
            builder.push(&*qp, op);
            if let SendOp::BindMw { rkey, .. } = op {
                builder.bound.push((mw as usize, rkey.0));
            }
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_atomic_write(qp: *mut QpEx, rkey: u32, remote: u64, data: *const c_void) {
    // SAFETY: the program's eight bytes, between the two calls.
    unsafe {
        push(qp, |_| Ok(SendOp::AtomicWrite { remote, rkey: Key(rkey) }));
        wr_set_inline_data(qp, data.cast_mut(), 8);
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut QpEx, ah: *mut Ah, qpn: u32, qkey: u32) {
    // SAFETY: the program's handle, between the two calls.
    unsafe {
        build(qp, |pair, builder| {
            let found = destination(pair, ah, qpn, qkey)?;
            match builder.list.last_mut().map(|last| &mut last.op) {
                Some(SendOp::SendTo { to, .. }) => *to = found,
                _ => return Err(libc::EINVAL),
            }
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut QpEx, addr: *mut c_void, length: usize) {
    let one = DataBuf { addr, length };
    // SAFETY: the program's bytes, between the two calls.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const one) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut QpEx, count: usize, buffers: *const DataBuf) {
    // SAFETY: the program's buffers, between the two calls.
    unsafe {
        build(qp, |_, builder| {
            let start = builder.inline.len();
            let buffers = if count == 0 { &[] } else { slice::from_raw_parts(buffers, count) };
            for buffer in buffers {
                builder.inline.extend_from_slice(bytes(buffer.addr as u64, buffer.length)?);
            }
            builder.set(Data::Inline(start..builder.inline.len()));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut QpEx, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the program calls it between the two calls.
    unsafe {
        build(qp, |_, builder| {
            let at = builder.sges.len();
            builder.sges.push(Sge { addr, len: length, lkey: Key(lkey) });
            builder.set(Data::Sges(at..at + 1));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut QpEx, count: usize, list: *const Sge) {
    // SAFETY: the program's list, between the two calls.
    unsafe {
        build(qp, |_, builder| {
            let at = builder.sges.len();
            if count > 0 {
                builder.sges.extend_from_slice(slice::from_raw_parts(list, count));
            }
            builder.set(Data::Sges(at..builder.sges.len()));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_start(qp: *mut QpEx) {
    // SAFETY: the program's queue pair.
    if let Ok(pair) = unsafe { Pair::of(qp.cast()) } {
        pair.building.lock();
        // SAFETY: this thread has the lock.
        unsafe { &mut *pair.builder.get() }.clear();
    }
}

unsafe extern "C" fn wr_complete(qp: *mut QpEx) -> c_int {
    // SAFETY: the program's queue pair, whose lock this thread took in `wr_start`.
    unsafe {
        let Ok(pair) = Pair::of(qp.cast()) else { return refuse(libc::EINVAL) };
        if !pair.building.is_locked() {
            return refuse(libc::EINVAL);
        }
        let builder = &*pair.builder.get();
        let errno = posted(|| post(pair, builder));
        pair.building.unlock();
        errno
    }
}

unsafe extern "C" fn wr_abort(qp: *mut QpEx) {
    // SAFETY: as in `wr_complete`.
    unsafe {
        if let Ok(pair) = Pair::of(qp.cast())
            && pair.building.is_locked()
        {
            pair.building.unlock();
        }
    }
}

/// Posts all that was built, or nothing.
fn post(pair: &Pair, builder: &Builder) -> Outcome<()> {
    if builder.failed != 0 {
        return Err(builder.failed);
    }
    let requests = builder.list.iter().map(|one| builder.prepared(one));
    let posted = match builder.list.len() {
        ..=BATCH => {
            let mut batch = Batch::new();
            requests.for_each(|one| batch.push(one));
            match batch.list() {
                // One is all of it.
                one @ [_] => pair.qp.post_send(one),
                list => pair.qp.post_send_all(list),
            }
        }
        _ => pair.qp.post_send_all(&requests.collect::<Vec<_>>()),
    };
    posted.map_err(|error| refusal(error).1)?;
    for (mw, rkey) in &builder.bound {
        // SAFETY: `wr_bind_mw` saw that it is a window of the program's.
        unsafe { (*(*mw as *mut Mw)).rkey = *rkey };
    }
    Ok(())
}
