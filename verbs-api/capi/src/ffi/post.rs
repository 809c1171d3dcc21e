//! Posting: the functions behind `ibv_post_send`, `ibv_post_recv` and `ibv_bind_mw`.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::{ptr, slice};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::PostListError;
use rocinante_stack::PostError;
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{Destination, QpType, SendData, SendOp};
use rocinante_stack::verbs::{RecvWr, SendWr};

use super::border::{Outcome, posted};
use super::memory::is_window;
use super::qp::Pair;
use super::{ah, srq};
use crate::abi::{self, MwBindInfo, Sge};
use crate::convert;
use crate::plain;

pub(super) use crate::abi::send_flags as flag;

/// `enum ibv_wr_opcode`.
mod opcode {
    pub(super) const WRITE: i32 = 0;
    pub(super) const WRITE_WITH_IMM: i32 = 1;
    pub(super) const SEND: i32 = 2;
    pub(super) const SEND_WITH_IMM: i32 = 3;
    pub(super) const READ: i32 = 4;
    pub(super) const COMPARE_SWAP: i32 = 5;
    pub(super) const FETCH_ADD: i32 = 6;
    pub(super) const LOCAL_INV: i32 = 7;
    pub(super) const BIND_MW: i32 = 8;
    pub(super) const SEND_WITH_INV: i32 = 9;
    pub(super) const ATOMIC_WRITE: i32 = 15;
}

/// Requests of a list that are posted at once.
pub(super) const BATCH: usize = 16;
/// The longest inline data (`Limits::max_inline_data`).
const INLINE_MAX: usize = 4096;

/// The errno of a refused request, and its place in the list.
#[cold]
pub(super) fn refusal(error: PostListError) -> (usize, c_int) {
    (error.index, VerbsError::Post(error.error).errno())
}

/// The scatter-gather list of a request.
///
/// # Safety
/// The program's list has `count` elements.
#[inline]
unsafe fn list<'a>(start: *const Sge, count: c_int) -> Outcome<&'a [Sge]> {
    if count > 0 && !start.is_null() {
        // SAFETY: the caller vouches for it.
        Ok(unsafe { slice::from_raw_parts(start, count.unsigned_abs() as usize) })
    } else if count == 0 {
        Ok(&[])
    } else {
        Err(libc::EINVAL)
    }
}

/// The program's bytes: EFAULT if they cannot be read.
///
/// # Safety
/// If there are `len` bytes, nothing changes them during the call.
pub(super) unsafe fn bytes<'a>(start: u64, len: usize) -> Outcome<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if !plain::is_readable(start, len) {
        return Err(libc::EFAULT);
    }
    // SAFETY: they were just read, and the caller vouches for the rest.
    Ok(unsafe { slice::from_raw_parts(start as *const u8, len) })
}

/// Appends the bytes of inline elements: EINVAL if they are more than any queue pair takes.
///
/// # Safety
/// As [`bytes`], for each element.
unsafe fn gather<'a>(sges: &[Sge], room: &'a mut [u8; INLINE_MAX]) -> Outcome<&'a [u8]> {
    let mut end = 0;
    for sge in sges {
        let to = room.get_mut(end..end + sge.len as usize).ok_or(libc::EINVAL)?;
        // SAFETY: the caller vouches for it.
        to.copy_from_slice(unsafe { bytes(sge.addr, sge.len as usize) }?);
        end += sge.len as usize;
    }
    Ok(&room[..end])
}

/// The key that a window with the key `now` gets by a binding: the program gives the low 8 bits.
pub(super) fn bound_key(now: u32, given: u32) -> u32 {
    now & !0xff | given & 0xff
}

/// The operation that binds a window whose key is `now`.
///
/// # Safety
/// The program's window and region.
pub(super) unsafe fn bind(
    mw: *mut abi::Mw,
    now: impl FnOnce(u32) -> u32,
    given: u32,
    info: &MwBindInfo,
) -> Outcome<SendOp> {
    // SAFETY: the caller vouches for it.
    unsafe {
        if !is_window(mw) {
            return Err(libc::EINVAL);
        }
        let (region, len) = match info.mr.as_ref() {
            // Cards do not compare the end with the region's: accesses behind it fail.
            Some(mr) => {
                let end = (mr.addr as u64).wrapping_add(mr.length as u64);
                (Key(mr.lkey), info.length.min(end.checked_sub(info.addr).unwrap_or(info.length)))
            }
            None if info.length == 0 => (Key(0), 0),
            None => return Err(libc::EINVAL),
        };
        // A window gives no local rights; the kernel takes and ignores them.
        let access = convert::access(info.access).ok_or(libc::EINVAL)?;
        let access = access.without(Access::LOCAL_WRITE).without(Access::MW_BIND);
        let addr = if len == 0 { 0 } else { info.addr };
        let now = now((*mw).rkey);
        let (mw, rkey) = (Key(now), Key(bound_key(now, given)));
        Ok(SendOp::BindMw { mw, rkey, region, addr, len, access })
    }
}

/// The destination of a datagram.
///
/// # Safety
/// The program's handle.
#[inline]
pub(super) unsafe fn destination(
    pair: &Pair,
    handle: *mut abi::Ah,
    qpn: u32,
    qkey: u32,
) -> Outcome<Destination> {
    // SAFETY: the caller vouches for it.
    let ah = unsafe { ah::id(handle, pair.domain)? };
    // With the highest bit set, it stands for the queue pair's own.
    let own = qkey & 1 << 31 != 0;
    let qkey = if own { pair.qkey.load(Ordering::Relaxed) } else { qkey };
    Ok(Destination { ah, qpn: Qpn::new(qpn & 0xff_ffff), qkey })
}

/// The halves of a word as they are in memory: `rdma.rkey`; `ud.remote_qpn` and `ud.remote_qkey`.
#[inline]
fn halves(word: u64) -> [u32; 2] {
    let (low, high) = (word as u32, (word >> 32) as u32);
    if cfg!(target_endian = "little") { [low, high] } else { [high, low] }
}

/// A send request, without its data.
///
/// # Safety
/// The program's request; its pointers are valid.
#[inline(always)]
unsafe fn operation(pair: &Pair, wr: &abi::SendWr) -> Outcome<SendOp> {
    let remote = wr.wr.remote_addr;
    let [first, second] = halves(wr.wr.compare_add);
    let (key, atomic_key) = (Key(first), Key(wr.wr.rkey));
    let (imm, invalidate) = (Some(wr.imm_data), Key(u32::from_ne_bytes(wr.imm_data)));
    let datagrams = pair.qp_type == QpType::Ud;
    Ok(match wr.opcode {
        opcode::SEND | opcode::SEND_WITH_IMM if datagrams => {
            let handle = ptr::with_exposed_provenance_mut(remote as usize);
            // SAFETY: the caller vouches for it.
            let to = unsafe { destination(pair, handle, first, second)? };
            SendOp::SendTo { to, imm: imm.filter(|_| wr.opcode == opcode::SEND_WITH_IMM) }
        }
        opcode::SEND => SendOp::Send { imm: None },
        opcode::SEND_WITH_IMM => SendOp::Send { imm },
        opcode::WRITE => SendOp::Write { remote, rkey: key, imm: None },
        opcode::WRITE_WITH_IMM => SendOp::Write { remote, rkey: key, imm },
        opcode::READ => SendOp::Read { remote, rkey: key },
        opcode::COMPARE_SWAP => SendOp::CompareSwap {
            remote,
            rkey: atomic_key,
            compare: wr.wr.compare_add,
            swap: wr.wr.swap,
        },
        opcode::FETCH_ADD => SendOp::FetchAdd { remote, rkey: atomic_key, add: wr.wr.compare_add },
        opcode::LOCAL_INV => SendOp::LocalInv { rkey: invalidate },
        opcode::SEND_WITH_INV => SendOp::SendInv { rkey: invalidate },
        opcode::ATOMIC_WRITE => SendOp::AtomicWrite { remote, rkey: key },
        // SAFETY: the caller vouches for it.
        opcode::BIND_MW => unsafe {
            bind(wr.bind_mw.mw, |now| now, wr.bind_mw.rkey, &wr.bind_mw.info)?
        },
        // Segmentation, tags and drivers' own: a card's.
        _ => return Err(libc::EINVAL),
    })
}

/// A request with its operation and data.
#[inline]
pub(super) fn request<'a>(wr_id: u64, op: SendOp, data: SendData<'a>, flags: c_uint) -> SendWr<'a> {
    let mut wr = SendWr::new(op, data).wr_id(wr_id).signaled(flags & flag::SIGNALED != 0);
    wr.solicited = flags & flag::SOLICITED != 0;
    wr.fence = flags & flag::FENCE != 0;
    wr
}

/// `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn post_send(
    qp: *mut abi::Qp,
    first: *mut abi::SendWr,
    bad: *mut *mut abi::SendWr,
) -> c_int {
    // The first request that is not posted.
    let mut next = first;
    let errno = posted(|| {
        // SAFETY: the program's queue pair and requests, as far as the last of them.
        unsafe {
            let pair = Pair::of(qp)?;
            match first.as_ref().map(|wr| (wr, frequent(pair, wr))) {
                Some((wr, Some(op))) => {
                    let sges = SendData::Sges(list(wr.sg_list, wr.num_sge)?);
                    post_one(pair, &request(wr.wr_id, op, sges, wr.send_flags))
                }
                _ => post_list(pair, &mut next),
            }
        }
    });
    if errno != 0 && !bad.is_null() {
        // SAFETY: the program's pointer.
        unsafe { bad.write(next) };
    }
    errno
}

/// The operation of a request that stands alone, if it is one of those that programs post most.
/// They are posted without all that others need.
#[inline(always)]
fn frequent(pair: &Pair, wr: &abi::SendWr) -> Option<SendOp> {
    if !wr.next.is_null() || wr.send_flags & flag::INLINE != 0 {
        return None;
    }
    let (remote, rkey) = (wr.wr.remote_addr, Key(halves(wr.wr.compare_add)[0]));
    match wr.opcode {
        opcode::WRITE => Some(SendOp::Write { remote, rkey, imm: None }),
        opcode::READ => Some(SendOp::Read { remote, rkey }),
        opcode::SEND if pair.qp_type != QpType::Ud => Some(SendOp::Send { imm: None }),
        _ => None,
    }
}

/// Posts the requests of a list, and moves `next` behind those that are posted.
///
/// # Safety
/// The program's requests.
#[inline(never)]
unsafe fn post_list(pair: &Pair, next: &mut *mut abi::SendWr) -> Outcome<()> {
    while !next.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe {
            if is_unusual(&**next) { post_unusual(pair, next) } else { post_batch(pair, next) }
        }?;
    }
    Ok(())
}

/// Whether a request has its own turn: one with its bytes, whose copy lives as long, and a binding,
/// which changes its window.
#[inline]
fn is_unusual(wr: &abi::SendWr) -> bool {
    wr.send_flags & flag::INLINE != 0 || wr.opcode == opcode::BIND_MW
}

/// A request of the usual kind.
///
/// # Safety
/// As [`operation`].
#[inline(always)]
unsafe fn prepared<'a>(pair: &Pair, wr: &'a abi::SendWr) -> Outcome<SendWr<'a>> {
    // SAFETY: the caller vouches for it.
    unsafe {
        let (sges, op) = (list(wr.sg_list, wr.num_sge)?, operation(pair, wr)?);
        Ok(request(wr.wr_id, op, SendData::Sges(sges), wr.send_flags))
    }
}

#[inline(always)]
fn post_one(pair: &Pair, one: &SendWr<'_>) -> Outcome<()> {
    pair.qp.post_send(slice::from_ref(one)).map_err(|error| refusal(error).1)
}

/// Posts an [unusual](is_unusual) request.
///
/// # Safety
/// As [`post_list`].
unsafe fn post_unusual(pair: &Pair, next: &mut *mut abi::SendWr) -> Outcome<()> {
    // SAFETY: the caller vouches for all that is read here.
    unsafe {
        let wr = &**next;
        let (op, sges) = (operation(pair, wr)?, list(wr.sg_list, wr.num_sge)?);
        if wr.send_flags & flag::INLINE == 0 {
            post_one(pair, &request(wr.wr_id, op, SendData::Sges(sges), wr.send_flags))?;
        } else if let [sge] = sges {
            let data = SendData::Inline(bytes(sge.addr, sge.len as usize)?);
            post_one(pair, &request(wr.wr_id, op, data, wr.send_flags))?;
        } else {
            let mut room = [0; INLINE_MAX];
            let data = SendData::Inline(gather(sges, &mut room)?);
            post_one(pair, &request(wr.wr_id, op, data, wr.send_flags))?;
        }
        if let SendOp::BindMw { rkey, .. } = op {
            (*wr.bind_mw.mw).rkey = rkey.0;
        }
        *next = wr.next;
    }
    Ok(())
}

/// Posts this request and those behind it, as far as they are of the usual kind.
///
/// # Safety
/// As [`post_list`].
unsafe fn post_batch(pair: &Pair, next: &mut *mut abi::SendWr) -> Outcome<()> {
    let (mut batch, mut behind) = (Batch::new(), *next);
    // SAFETY: the caller vouches for all that is read here.
    unsafe {
        batch.push(prepared(pair, &*behind)?);
        behind = (*behind).next;
        while !batch.is_full() && !behind.is_null() && !is_unusual(&*behind) {
            // One with a mistake has its own turn, after those before it are posted.
            let Ok(one) = prepared(pair, &*behind) else { break };
            batch.push(one);
            behind = (*behind).next;
        }
        if let Err(error) = pair.qp.post_send(batch.list()) {
            let (index, errno) = refusal(error);
            for _ in 0..index {
                *next = (**next).next;
            }
            return Err(errno);
        }
    }
    *next = behind;
    Ok(())
}

/// Up to [`BATCH`] requests. The room for them is not written beforehand.
pub(super) struct Batch<T> {
    room: [MaybeUninit<T>; BATCH],
    count: usize,
}

impl<T: Copy> Batch<T> {
    #[inline]
    pub(super) fn new() -> Self {
        Self { room: [const { MaybeUninit::uninit() }; BATCH], count: 0 }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.count == BATCH
    }

    /// # Panics
    /// It is full.
    #[inline]
    pub(super) fn push(&mut self, one: T) {
        self.room[self.count].write(one);
        self.count += 1;
    }

    #[inline]
    pub(super) fn list(&self) -> &[T] {
        // SAFETY: `count` elements were written.
        unsafe { slice::from_raw_parts(self.room.as_ptr().cast(), self.count) }
    }
}

/// Posts a list of receives.
///
/// # Safety
/// The program's requests.
#[inline]
unsafe fn receives<T>(
    first: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
    to: impl FnOnce() -> Outcome<T>,
    post: impl Fn(&T, &[RecvWr<'_>]) -> Result<(), PostListError>,
) -> c_int {
    let mut next = first;
    let errno = posted(|| {
        let to = to()?;
        while !next.is_null() {
            let (mut batch, mut behind) = (Batch::new(), next);
            while !batch.is_full() && !behind.is_null() {
                // SAFETY: the caller vouches for it.
                let (wr, sges) = unsafe { (&*behind, list((*behind).sg_list, (*behind).num_sge)) };
                let Ok(sges) = sges else { break };
                batch.push(RecvWr { wr_id: wr.wr_id, sges });
                behind = wr.next;
            }
            if batch.list().is_empty() {
                return Err(libc::EINVAL);
            }
            if let Err(error) = post(&to, batch.list()) {
                let (index, errno) = refusal(error);
                for _ in 0..index {
                    // SAFETY: the caller vouches for it.
                    next = unsafe { (*next).next };
                }
                return Err(errno);
            }
            next = behind;
        }
        Ok(())
    });
    if errno != 0 && !bad.is_null() {
        // SAFETY: the program's pointer.
        unsafe { bad.write(next) };
    }
    errno
}

/// `ibv_post_recv(3)`.
pub(super) unsafe extern "C" fn post_recv(
    qp: *mut abi::Qp,
    first: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    let post = |pair: &&Pair, list: &[RecvWr<'_>]| {
        // With a shared queue its own has no places, and is not full.
        pair.qp.post_recv(list).map_err(|refused| match refused.error {
            PostError::Full if pair.is_shared => {
                PostListError { error: PostError::Shared, ..refused }
            }
            _ => refused,
        })
    };
    // SAFETY: the program's queue pair and requests.
    unsafe { receives(first, bad, || Pair::of(qp), post) }
}

/// `ibv_post_srq_recv(3)`.
pub(super) unsafe extern "C" fn post_srq_recv(
    queue: *mut abi::Srq,
    first: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: the program's queue and requests.
    unsafe { receives(first, bad, || srq::of(queue), |queue, list| queue.srq.post_recv(list)) }
}

/// `ibv_bind_mw(3)`: a window of type 1, under its next key.
pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut abi::Qp,
    mw: *mut abi::Mw,
    bind_of: *mut abi::MwBind,
) -> c_int {
    posted(|| {
        // SAFETY: the program's objects and structure.
        unsafe {
            let (pair, how) = (Pair::of(qp)?, bind_of.as_ref().ok_or(libc::EINVAL)?);
            if !is_window(mw) || (*mw).mw_type != 1 {
                return Err(libc::EINVAL);
            }
            let key = (*mw).rkey;
            let next = key.wrapping_add(1);
            let op = bind(mw, |now| now, next, &how.info)?;
            let one = request(how.wr_id, op, SendData::NONE, how.send_flags);
            pair.qp.post_send(&[one]).map_err(|error| refusal(error).1)?;
            (*mw).rkey = bound_key(key, next);
        }
        Ok(())
    })
}
