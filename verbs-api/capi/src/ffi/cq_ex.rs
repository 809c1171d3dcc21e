//! Completion queues that are polled field by field (`ibv_create_cq_ex(3)`).
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use parking_lot::lock_api::RawMutex as _;

use super::border::{Outcome, caught, refuse};
use super::context::refused;
use super::cq::{Queue, tell};
use crate::abi::{Cq, CqEx, Wc};
use crate::convert;

/// The structure of a queue, extended or not: it is the same object.
pub(super) fn structure(cq: Cq) -> CqEx {
    CqEx {
        cq,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll,
        next_poll,
        end_poll,
        read_opcode,
        read_vendor_err,
        read_byte_len,
        read_imm_data,
        read_qp_num,
        read_src_qp,
        read_wc_flags,
        read_slid,
        read_sl,
        read_dlid_path_bits,
        read_completion_ts,
        read_cvlan,
        read_flow_tag,
        read_tm_info,
        read_completion_wallclock_ns,
    }
}

/// Takes the next completion.
///
/// # Safety
/// The thread holds `polling`.
unsafe fn take(cq: *mut CqEx, queue: &Queue) -> Outcome<()> {
    // SAFETY: only the thread that polls reads or writes it; `cq` is the program's queue.
    let current = unsafe { &mut *queue.current.get() };
    let count = queue
        .cq
        .poll_as(std::slice::from_mut(current), convert::wc)
        .map_err(refused("ibv_start_poll"))?;
    if count == 0 {
        return Err(libc::ENOENT);
    }
    // SAFETY: as above.
    unsafe { ((*cq).wr_id, (*cq).status) = (current.wr_id, current.status) };
    if current.status != 0 {
        // SAFETY: the program's queue.
        unsafe { tell(cq.cast(), std::slice::from_ref(current)) };
    }
    Ok(())
}

unsafe extern "C" fn start_poll(cq: *mut CqEx, attr: *mut u32) -> c_int {
    // SAFETY: the program's queue and structure.
    unsafe {
        let Ok(queue) = Queue::of(cq.cast()) else { return refuse(libc::EINVAL) };
        if attr.as_ref().is_some_and(|comp_mask| *comp_mask != 0) {
            return refuse(libc::EINVAL);
        }
        queue.polling.lock();
        let taken = found(|| take(cq, queue));
        if taken != 0 {
            queue.polling.unlock();
        }
        taken
    }
}

unsafe extern "C" fn next_poll(cq: *mut CqEx) -> c_int {
    // SAFETY: the program's queue, between the two calls.
    found(|| unsafe { take(cq, Queue::of(cq.cast())?) })
}

/// That there is no completion is no failure: programs ask again and again, and errno stays.
#[inline]
fn found(take: impl FnOnce() -> Outcome<()>) -> c_int {
    match caught(take) {
        Ok(()) => 0,
        Err(libc::ENOENT) => libc::ENOENT,
        Err(errno) => refuse(errno),
    }
}

unsafe extern "C" fn end_poll(cq: *mut CqEx) {
    // SAFETY: the program's queue; `start_poll` locked it.
    unsafe {
        if let Ok(queue) = Queue::of(cq.cast())
            && queue.polling.is_locked()
        {
            queue.polling.unlock();
        }
    }
}

/// The completion that the program looks at.
///
/// # Safety
/// Between `start_poll` and `end_poll`, on that thread.
unsafe fn current(cq: *mut CqEx) -> Wc {
    // SAFETY: the caller vouches for it.
    unsafe { Queue::of(cq.cast()) }.map_or_else(
        |_| Wc::default(),
        // SAFETY: as above.
        |queue| unsafe { *queue.current.get() },
    )
}

macro_rules! readers {
    ($($name:ident $kind:ty, $wc:ident => $value:expr;)*) => {
        $(unsafe extern "C" fn $name(cq: *mut CqEx) -> $kind {
            // SAFETY: the program calls it between `ibv_start_poll` and `ibv_end_poll`.
            let $wc = unsafe { current(cq) };
            $value
        })*
    };
}

readers! {
    read_opcode c_int, wc => wc.opcode;
    read_vendor_err u32, wc => wc.vendor_err;
    read_byte_len u32, wc => wc.byte_len;
    read_imm_data u32, wc => u32::from_ne_bytes(wc.imm_data);
    read_qp_num u32, wc => wc.qp_num;
    read_src_qp u32, wc => wc.src_qp;
    read_wc_flags c_uint, wc => wc.wc_flags;
    read_slid u32, wc => wc.slid.into();
    read_sl u8, wc => wc.sl;
    read_dlid_path_bits u8, wc => wc.dlid_path_bits;
    // A queue with these is refused.
    read_completion_ts u64, _wc => 0;
    read_cvlan u16, _wc => 0;
    read_flow_tag u32, _wc => 0;
    read_completion_wallclock_ns u64, _wc => 0;
}

unsafe extern "C" fn read_tm_info(_: *mut CqEx, _: *mut c_void) {}
