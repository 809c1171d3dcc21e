//! Posting: the functions behind `ibv_post_send`, `ibv_post_recv` and `ibv_bind_mw`.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;
use std::{ptr, slice};

use rocinante::verbs::{Destination, Key, PostListError, QpType, Qpn, SendData, SendOp};
use rocinante::{Access, RecvWr, SendWr, VerbsError};

use super::border::{Outcome, status};
use super::memory::is_window;
use super::qp::Pair;
use super::{ah, srq};
use crate::abi::{self, MwBindInfo, Sge};
use crate::convert;

/// Bits of `enum ibv_send_flags`.
pub(super) mod flag {
    pub(in crate::ffi) const FENCE: u32 = 1;
    pub(in crate::ffi) const SIGNALED: u32 = 1 << 1;
    pub(in crate::ffi) const SOLICITED: u32 = 1 << 2;
    pub(in crate::ffi) const INLINE: u32 = 1 << 3;
}

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

/// How many requests of a list are posted at once.
pub(super) const BATCH: usize = 16;
/// The longest inline data (`Limits::max_inline_data`).
const INLINE_MAX: usize = 4096;

/// The errno of a refused request, and its place in the list.
pub(super) fn refusal(error: PostListError) -> (usize, c_int) {
    (error.index, VerbsError::Post(error.error).errno())
}

/// The scatter-gather list of a request.
///
/// # Safety
/// The program's list has so many elements.
unsafe fn list<'a>(start: *const Sge, count: c_int) -> Outcome<&'a [Sge]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        Ok(_) if start.is_null() => Err(libc::EINVAL),
        // SAFETY: the caller vouches for it.
        Ok(count) => Ok(unsafe { slice::from_raw_parts(start, count) }),
        Err(_) => Err(libc::EINVAL),
    }
}

/// The program's bytes.
///
/// # Safety
/// So many bytes can be read there, and nothing changes them during the call.
pub(super) unsafe fn bytes<'a>(start: u64, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { slice::from_raw_parts(start as *const u8, len) }
}

/// Appends the bytes of inline elements. `None` if they are more than any queue pair takes.
///
/// # Safety
/// As [`bytes`], for each element.
unsafe fn gather<'a>(sges: &[Sge], room: &'a mut [u8; INLINE_MAX]) -> Option<&'a [u8]> {
    let mut end = 0;
    for sge in sges {
        let to = room.get_mut(end..end + sge.len as usize)?;
        // SAFETY: the caller vouches for it.
        to.copy_from_slice(unsafe { bytes(sge.addr, sge.len as usize) });
        end += sge.len as usize;
    }
    Some(&room[..end])
}

/// The operation that binds a window.
///
/// # Safety
/// The program's window and region.
pub(super) unsafe fn bind(mw: *mut abi::Mw, rkey: u32, info: &MwBindInfo) -> Outcome<SendOp> {
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
        let (mw, rkey) = (Key((*mw).rkey), Key(rkey));
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

/// A send request, without its data.
///
/// # Safety
/// The program's request, with what it points to.
#[inline]
unsafe fn operation(pair: &Pair, wr: &abi::SendWr) -> Outcome<SendOp> {
    let remote = wr.wr.remote_addr;
    // The halves of the word, as `rdma.rkey` and as `ud.remote_qpn`, `ud.remote_qkey`.
    let [first, second] = [0, 4].map(|at| {
        let word = wr.wr.compare_add.to_ne_bytes();
        u32::from_ne_bytes([word[at], word[at + 1], word[at + 2], word[at + 3]])
    });
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
        opcode::BIND_MW => unsafe { bind(wr.bind_mw.mw, wr.bind_mw.rkey, &wr.bind_mw.info)? },
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
    let errno = status(|| {
        // SAFETY: the program's queue pair and requests, as far as the last of them.
        unsafe {
            let pair = Pair::of(qp)?;
            while !next.is_null() {
                post_some(pair, &mut next)?;
            }
        }
        Ok(())
    });
    if errno != 0 && !bad.is_null() {
        // SAFETY: the program's pointer.
        unsafe { bad.write(next) };
    }
    errno
}

/// Posts up to [`BATCH`] requests, and moves `next` behind them.
///
/// # Safety
/// The program's requests.
#[inline]
unsafe fn post_some(pair: &Pair, next: &mut *mut abi::SendWr) -> Outcome<()> {
    // SAFETY: the caller vouches for all that is read here.
    unsafe {
        let wr = &**next;
        let flags = wr.send_flags;
        let sges = list(wr.sg_list, wr.num_sge)?;
        let op = operation(pair, wr)?;
        if flags & flag::INLINE != 0 {
            let mut room = [0; INLINE_MAX];
            let data = match sges {
                [sge] => bytes(sge.addr, sge.len as usize),
                _ => gather(sges, &mut room).ok_or(libc::EINVAL)?,
            };
            let one = request(wr.wr_id, op, SendData::Inline(data), flags);
            pair.qp.post_send(&[one]).map_err(|error| refusal(error).1)?;
            *next = wr.next;
            return Ok(());
        }
        let one = request(wr.wr_id, op, SendData::Sges(sges), flags);
        if wr.next.is_null() || matches!(op, SendOp::BindMw { .. }) {
            pair.qp.post_send(&[one]).map_err(|error| refusal(error).1)?;
            if let SendOp::BindMw { rkey, .. } = op {
                (*wr.bind_mw.mw).rkey = rkey.0;
            }
            *next = wr.next;
            return Ok(());
        }
        post_batch(pair, one, next)
    }
}

/// Posts this request and those behind it that are of the usual kind.
///
/// # Safety
/// As [`post_some`].
unsafe fn post_batch(pair: &Pair, one: SendWr<'_>, next: &mut *mut abi::SendWr) -> Outcome<()> {
    let mut batch = [one; BATCH];
    let mut count = 1;
    // SAFETY: the caller vouches for all that is read here.
    unsafe {
        let mut behind = (**next).next;
        while count < BATCH && !behind.is_null() {
            let wr = &*behind;
            // An inline request, a binding and one with a mistake have their own turn.
            let unusual = wr.send_flags & flag::INLINE != 0 || wr.opcode == opcode::BIND_MW;
            let parts = (list(wr.sg_list, wr.num_sge), operation(pair, wr));
            let (false, (Ok(sges), Ok(op))) = (unusual, parts) else { break };
            batch[count] = request(wr.wr_id, op, SendData::Sges(sges), wr.send_flags);
            count += 1;
            behind = wr.next;
        }
        if let Err(error) = pair.qp.post_send(&batch[..count]) {
            let (index, errno) = refusal(error);
            for _ in 0..index {
                *next = (**next).next;
            }
            return Err(errno);
        }
        *next = behind;
    }
    Ok(())
}

/// Posts a list of receives.
///
/// # Safety
/// The program's requests.
#[inline]
unsafe fn receives(
    first: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostListError>,
) -> c_int {
    let mut next = first;
    let errno = status(|| {
        while !next.is_null() {
            let mut batch = [RecvWr { wr_id: 0, sges: &[] }; BATCH];
            let (mut count, mut behind) = (0, next);
            while count < BATCH && !behind.is_null() {
                // SAFETY: the caller vouches for it.
                let (wr, sges) = unsafe { (&*behind, list((*behind).sg_list, (*behind).num_sge)) };
                let Ok(sges) = sges else { break };
                batch[count] = RecvWr { wr_id: wr.wr_id, sges };
                count += 1;
                behind = wr.next;
            }
            if count == 0 {
                return Err(libc::EINVAL);
            }
            if let Err(error) = post(&batch[..count]) {
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
    // SAFETY: the program's queue pair and requests.
    unsafe {
        match Pair::of(qp) {
            Ok(pair) => receives(first, bad, |list| pair.qp.post_recv(list)),
            Err(errno) => errno,
        }
    }
}

/// `ibv_post_srq_recv(3)`.
pub(super) unsafe extern "C" fn post_srq_recv(
    queue: *mut abi::Srq,
    first: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: the program's queue and requests.
    unsafe {
        match srq::of(queue) {
            Ok(queue) => receives(first, bad, |list| queue.srq.post_recv(list)),
            Err(errno) => errno,
        }
    }
}

/// `ibv_bind_mw(3)`: a window of type 1, under its next key.
pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut abi::Qp,
    mw: *mut abi::Mw,
    bind_of: *const abi::MwBind,
) -> c_int {
    status(|| {
        // SAFETY: the program's objects and structure.
        unsafe {
            let (pair, how) = (Pair::of(qp)?, bind_of.as_ref().ok_or(libc::EINVAL)?);
            if !is_window(mw) || (*mw).mw_type != 1 {
                return Err(libc::EINVAL);
            }
            let key = (*mw).rkey;
            let rkey = key & !0xff | key.wrapping_add(1) & 0xff;
            let op = bind(mw, rkey, &how.info)?;
            let one = request(how.wr_id, op, SendData::NONE, how.send_flags);
            pair.qp.post_send(&[one]).map_err(|error| refusal(error).1)?;
            (*mw).rkey = rkey;
        }
        Ok(())
    })
}
