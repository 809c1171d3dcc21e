//! Queue pairs: creation, changes of state, queries, groups.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::lock_api::RawMutex as _;
use parking_lot::{Mutex, RawMutex};
use rocinante_soft::model::device::Limits;
use rocinante_stack::verbs::{QpState, QpType};

use super::border::{Outcome, afford, pointer, status};
use super::context::{self, refused};
use super::cq::Queue;
use super::object::{Object, Private, Unacknowledged};
use super::pd::{Domain, Identity};
use super::qp_ex::{self, Builder};
use super::srq;
use crate::abi;
use crate::abi::mask;
use crate::convert;
use crate::log::{Level, say};
use crate::plain::{self, QpInit};

/// The private part of a queue pair.
pub(super) struct Pair {
    pub(super) qp: plain::Qp,
    pub(super) qp_type: QpType,
    /// Address handles of another domain are refused.
    pub(super) domain: Identity,
    /// For datagrams to a Q_Key with the highest bit set.
    pub(super) qkey: AtomicU32,
    pub(super) events: Unacknowledged,
    /// The attributes that a query returns.
    known: Mutex<abi::QpAttr>,
    sq_sig_all: c_int,
    cap: abi::QpCap,
    max_rd_atomic: u8,
    /// Whether it receives from a shared queue.
    pub(super) is_shared: bool,
    /// Whether it was made with `send_ops_flags`.
    extended: bool,
    /// Held from `ibv_wr_start` to `ibv_wr_complete` or `ibv_wr_abort`.
    pub(super) building: RawMutex,
    pub(super) builder: UnsafeCell<Builder>,
}

impl Private for Pair {
    type Public = abi::QpEx;
    const KIND: usize = 11;
}

impl Pair {
    /// # Safety
    /// As [`Object::of`].
    #[inline]
    pub(super) unsafe fn of<'a>(qp: *mut abi::Qp) -> Outcome<&'a Self> {
        // SAFETY: the caller vouches for it; the structure begins with that of an extended pair.
        unsafe { Object::<Self>::of(qp.cast()) }.map(|object| &object.private)
    }
}

/// `ibv_create_qp(3)`.
pub(super) unsafe extern "C" fn create_qp(
    pd: *mut abi::Pd,
    init: *mut abi::QpInitAttr,
) -> *mut abi::Qp {
    // SAFETY: the program's domain and structure.
    pointer(|| unsafe { create(pd, init.as_mut().ok_or(libc::EINVAL)?, None) })
}

/// `ibv_create_qp_ex(3)`.
pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut abi::Context,
    init: *mut abi::QpInitAttrEx,
) -> *mut abi::Qp {
    const PD: u32 = 1;
    const CREATE_FLAGS: u32 = 1 << 2;
    const SEND_OPS: u32 = 1 << 6;
    pointer(|| {
        // SAFETY: the program's structures and objects.
        unsafe {
            context::of(context)?;
            let init = init.as_mut().ok_or(libc::EINVAL)?;
            if init.comp_mask & !(PD | CREATE_FLAGS | SEND_OPS) != 0
                || (init.comp_mask & CREATE_FLAGS != 0 && init.create_flags != 0)
            {
                return Err(libc::EOPNOTSUPP);
            }
            if init.comp_mask & PD == 0 {
                return Err(libc::EINVAL);
            }
            Domain::of(init.pd)?;
            context::same((*init.pd).context, context)?;
            let ops = (init.comp_mask & SEND_OPS != 0).then_some(init.send_ops_flags);
            let mut common = abi::QpInitAttr {
                qp_context: init.qp_context,
                send_cq: init.send_cq,
                recv_cq: init.recv_cq,
                srq: init.srq,
                cap: init.cap,
                qp_type: init.qp_type,
                sq_sig_all: init.sq_sig_all,
            };
            let made = create(init.pd, &mut common, ops)?;
            init.cap = common.cap;
            Ok(made)
        }
    })
}

/// # Safety
/// As for `ibv_create_qp(3)`.
unsafe fn create(
    pd: *mut abi::Pd,
    init: &mut abi::QpInitAttr,
    ops: Option<u64>,
) -> Outcome<*mut abi::Qp> {
    // SAFETY: the program's domain, and its context.
    let (domain, context, shared) =
        unsafe { (Domain::of(pd)?, (*pd).context, context::of((*pd).context)?) };
    let qp_type = convert::qp_type(init.qp_type).ok_or(libc::EOPNOTSUPP)?;
    if ops.is_some_and(|ops| ops & !qp_ex::operations(qp_type) != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the program's objects.
    let (send, recv, shared_queue) = unsafe {
        let shared_queue = if init.srq.is_null() { None } else { Some(srq::of(init.srq)?) };
        let (send, recv) = (Queue::of(init.send_cq)?, Queue::of(init.recv_cq)?);
        context::same((*init.send_cq).context, context)?;
        context::same((*init.recv_cq).context, context)?;
        if shared_queue.is_some() {
            context::same((*init.srq).context, context)?;
        }
        (send, recv, shared_queue)
    };
    // The program's structure changes only if the call succeeds.
    let mut cap = init.cap;
    if shared_queue.is_some() {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    // As Soft-RoCE has it. Every device gives some inline data to those that ask for none, and
    // programs send by it. `ibv_wr_atomic_write` has its eight bytes with it.
    let elements =
        cap.max_send_sge.clamp(1, Limits::default().max_sge) * size_of::<abi::Sge>() as u32;
    cap.max_inline_data = cap.max_inline_data.max(elements);
    let attr = QpInit {
        qp_type,
        send_cq: &send.cq,
        recv_cq: &recv.cq,
        srq: shared_queue.map(|queue| &queue.srq),
        caps: convert::caps(&cap),
        sq_sig_all: init.sq_sig_all != 0,
    };
    afford(bytes(&cap))?;
    let identity = domain.identity()?;
    let qp = domain.pd()?.create_qp(&attr).map_err(refused("ibv_create_qp"))?;
    domain.add_user();
    send.users.add();
    recv.users.add();
    if let Some(queue) = shared_queue {
        queue.users.add();
    }
    init.cap = cap;
    let number = qp.qpn().value();
    let public = abi::Qp {
        context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: init.qp_type,
        mutex: abi::MUTEX,
        cond: abi::COND,
        events_completed: 0,
    };
    let max_rd_atomic = u8::try_from(shared.found.attributes().max_qp_rd_atom).unwrap_or(u8::MAX);
    let pair = Pair {
        qp,
        qp_type,
        domain: identity,
        qkey: AtomicU32::new(0),
        events: Unacknowledged::default(),
        known: Mutex::default(),
        sq_sig_all: init.sq_sig_all,
        cap,
        max_rd_atomic,
        is_shared: shared_queue.is_some(),
        extended: ops.is_some(),
        building: RawMutex::INIT,
        builder: UnsafeCell::default(),
    };
    let made = Object::make(qp_ex::structure(public), pair);
    shared.objects.lock().qps.insert(number, made as usize);
    Ok(made.cast())
}

/// The most bytes that a queue pair takes. One that is too large is refused for that.
fn bytes(cap: &abi::QpCap) -> usize {
    let limits = Limits::default();
    let requests = cap.max_send_wr.min(limits.max_qp_wr) + cap.max_recv_wr.min(limits.max_qp_wr);
    let elements = cap.max_send_sge.max(cap.max_recv_sge).min(limits.max_sge);
    let inline = cap.max_inline_data.min(limits.max_inline_data) as usize;
    let slots = (cap.max_send_wr.min(limits.max_qp_wr) as usize).next_power_of_two();
    requests as usize * (1024 + elements as usize * size_of::<abi::Sge>()) + slots * inline
}

/// `ibv_qp_to_qp_ex(3)`.
pub(super) unsafe extern "C" fn qp_to_qp_ex(qp: *mut abi::Qp) -> *mut abi::QpEx {
    pointer(|| {
        // SAFETY: the program's queue pair.
        let pair = unsafe { Pair::of(qp)? };
        if pair.extended { Ok(qp.cast()) } else { Err(libc::EOPNOTSUPP) }
    })
}

/// `ibv_modify_qp(3)`.
pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut abi::Qp,
    attr: *mut abi::QpAttr,
    bits: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the program's queue pair and structure.
        let (pair, context, attr) = unsafe {
            (Pair::of(qp)?, context::of((*qp).context)?, attr.as_ref().ok_or(libc::EINVAL)?)
        };
        context.is_own()?;
        let change = convert::modify(attr, bits).ok_or(libc::EINVAL)?;
        let too_many = |wanted: Option<u8>| wanted.is_some_and(|many| many > pair.max_rd_atomic);
        if too_many(change.attr.max_rd_atomic) || too_many(change.attr.max_dest_rd_atomic) {
            return Err(libc::EINVAL);
        }
        pair.qp.modify(&change).map_err(refused("ibv_modify_qp"))?;
        let mut known = pair.known.lock();
        if change.attr.state == Some(QpState::Reset) {
            *known = abi::QpAttr::default();
        }
        convert::remember(&mut known, attr, bits);
        pair.qkey.store(known.qkey, Ordering::Relaxed);
        if let Some(state) = change.attr.state {
            let peer = change.path.map(|path| path.remote);
            let qpn = pair.qp.qpn().value();
            say(Level::Debug, format_args!("queue pair {qpn:#08x}: {state:?}, peer {peer:?}"));
        }
        if bits & mask::STATE != 0 {
            // SAFETY: the program's queue pair.
            unsafe { (*qp).state = attr.qp_state };
        }
        Ok(())
    })
}

/// `ibv_query_qp(3)`.
pub(super) unsafe extern "C" fn query_qp(
    qp: *mut abi::Qp,
    attr: *mut abi::QpAttr,
    _mask: c_int,
    init: *mut abi::QpInitAttr,
) -> c_int {
    status(|| {
        // SAFETY: the program's queue pair and structures.
        let (pair, public) = unsafe { (Pair::of(qp)?, &mut *qp) };
        if attr.is_null() || init.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the context of the queue pair.
        unsafe { context::of(public.context)? }.is_own()?;
        let (state, engine, _) = pair.qp.query();
        let drains = state == QpState::Sqd && pair.qp.is_draining();
        let state = convert::state_code(state);
        public.state = state;
        let mut is = *pair.known.lock();
        (is.qp_state, is.cur_qp_state, is.cap) = (state, state, pair.cap);
        is.sq_draining = drains.into();
        // SEND PSN and RECEIVE PSN of the engine, where they have moved on.
        is.sq_psn = engine.sq_psn.map_or(is.sq_psn, |psn| psn.value());
        is.rq_psn = engine.rq_psn.map_or(is.rq_psn, |psn| psn.value());
        let made = abi::QpInitAttr {
            qp_context: public.qp_context,
            send_cq: public.send_cq,
            recv_cq: public.recv_cq,
            srq: public.srq,
            cap: pair.cap,
            qp_type: public.qp_type,
            sq_sig_all: pair.sq_sig_all,
        };
        // SAFETY: the program's structures.
        unsafe {
            attr.write(is);
            init.write(made);
        }
        Ok(())
    })
}

/// `ibv_destroy_qp(3)`.
pub(super) unsafe extern "C" fn destroy_qp(qp: *mut abi::Qp) -> c_int {
    status(|| {
        // SAFETY: the program's queue pair, which it gives back.
        unsafe {
            let object = Object::<Pair>::own_or_inherited(qp.cast())?;
            let shared = context::of((*qp).context)?;
            if !shared.is_inherited() {
                // As the kernel has it: detach first.
                if object.private.qp.is_in_group() {
                    return Err(libc::EBUSY);
                }
                shared.objects.lock().qps.remove(&(*qp).qp_num);
                object.private.events.wait();
                Queue::of((*qp).send_cq)?.users.remove();
                Queue::of((*qp).recv_cq)?.users.remove();
                if let Ok(queue) = srq::of((*qp).srq) {
                    queue.users.remove();
                }
                Domain::of((*qp).pd)?.remove_user();
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// `ibv_query_qp_data_in_order(3)`: bytes are written in order, but a program that polls memory
/// learns that of a card from its driver only.
pub(super) unsafe extern "C" fn query_qp_data_in_order(
    qp: *mut abi::Qp,
    opcode: c_int,
    flags: c_uint,
) -> c_int {
    let _ = (qp, opcode, flags);
    0
}

/// `ibv_attach_mcast(3)`.
pub(super) unsafe extern "C" fn attach_mcast(
    qp: *mut abi::Qp,
    gid: *const [u8; 16],
    _lid: u16,
) -> c_int {
    // SAFETY: the program's queue pair and GID.
    status(|| unsafe { group(qp, gid, true) })
}

/// `ibv_detach_mcast(3)`.
pub(super) unsafe extern "C" fn detach_mcast(
    qp: *mut abi::Qp,
    gid: *const [u8; 16],
    _lid: u16,
) -> c_int {
    // SAFETY: the program's queue pair and GID.
    status(|| unsafe { group(qp, gid, false) })
}

/// # Safety
/// As [`Object::of`].
unsafe fn group(qp: *mut abi::Qp, gid: *const [u8; 16], attach: bool) -> Outcome<()> {
    // SAFETY: the program's queue pair and GID.
    let (pair, gid) = unsafe { (Pair::of(qp)?, *gid.as_ref().ok_or(libc::EINVAL)?) };
    let group = convert::address(gid);
    if pair.qp_type != QpType::Ud || !group.is_multicast() {
        return Err(libc::EINVAL);
    }
    if attach {
        pair.qp.attach_mcast(group).map_err(refused("ibv_attach_mcast"))
    } else {
        pair.qp.detach_mcast(group).map_err(refused("ibv_detach_mcast"))
    }
}
