//! The agent on the kernel's devices, through the system's libibverbs.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{null_mut, without_provenance_mut};
use std::time::{Duration, Instant};

use super::ffi::{
    self, AhAttr, Channel, Context, Cq, Gid, Library, Mr, Pd, Qp, QpAttr, QpCap, QpInitAttr,
    SendWr, Sge, Srq, SrqAttr, SrqInitAttr, Wc,
};
use super::proto::{
    Completion, Connection, Op, Opcode, Peer, Range, Remote, Reply, Request, Send, State,
};
use super::{Agent, CQ_DEPTH, ELEMENTS, INLINE, QUEUE_DEPTH, difference, pattern};

type Result<T> = std::result::Result<T, String>;

/// Bits of `enum ibv_qp_attr_mask`.
mod mask {
    pub(super) const STATE: i32 = 1;
    pub(super) const ACCESS: i32 = 1 << 3;
    pub(super) const PKEY: i32 = 1 << 4;
    pub(super) const PORT: i32 = 1 << 5;
    pub(super) const AV: i32 = 1 << 7;
    pub(super) const MTU: i32 = 1 << 8;
    pub(super) const TIMEOUT: i32 = 1 << 9;
    pub(super) const RETRY: i32 = 1 << 10;
    pub(super) const RNR_RETRY: i32 = 1 << 11;
    pub(super) const RQ_PSN: i32 = 1 << 12;
    pub(super) const RD_ATOMIC: i32 = 1 << 13;
    pub(super) const MIN_RNR: i32 = 1 << 15;
    pub(super) const SQ_PSN: i32 = 1 << 16;
    pub(super) const DEST_RD_ATOMIC: i32 = 1 << 17;
    pub(super) const DEST_QPN: i32 = 1 << 20;
}

/// `IBV_QPT_RC`.
const RC: u32 = 2;
/// `IBV_SRQ_LIMIT`.
const SRQ_LIMIT: c_int = 2;

/// A device of libibverbs with what was made of it. Everything is destroyed with it, in order.
pub(super) struct Kernel {
    library: Library,
    device: Option<Opened>,
    regions: Vec<Region>,
    qps: Vec<*mut Qp>,
    srq: *mut Srq,
}

/// What a scenario's first step makes.
#[derive(Clone, Copy)]
struct Opened {
    context: *mut Context,
    pd: *mut Pd,
    channel: *mut Channel,
    cq: *mut Cq,
    gid_index: u8,
}

struct Region {
    mr: *mut Mr,
    start: *mut u8,
    len: usize,
}

impl Agent for Kernel {
    fn ask(&mut self, request: &Request) -> Reply {
        self.step(request).unwrap_or_else(Reply::Failed)
    }
}

impl Kernel {
    pub(super) fn new(library: Library) -> Self {
        Self { library, device: None, regions: vec![], qps: vec![], srq: null_mut() }
    }

    fn step(&mut self, request: &Request) -> Result<Reply> {
        match request {
            Request::Open { name, address } => self.open(name, *address)?,
            Request::Region { len, access } => return self.register(*len, *access),
            Request::Fill { range, seed } => self.fill(*range, &pattern(range.len, *seed))?,
            Request::Compare { range, with } => {
                return Ok(Reply::Difference(difference(&self.bytes(*range)?, *with)));
            }
            Request::Store { at, value } => self.fill(*at, &value.to_ne_bytes())?,
            Request::Load(at) => {
                let bytes = self.bytes(Range { len: 8, ..*at })?;
                let bytes = bytes.try_into().map_err(|_| "no eight bytes")?;
                return Ok(Reply::Value(u64::from_ne_bytes(bytes)));
            }
            Request::Qp { access, srq } => return self.create_qp(*access, *srq),
            Request::Prepare { qp, access } => self.prepare(self.qp(*qp)?, *access)?,
            Request::Srq { limit } => self.create_srq(*limit)?,
            Request::Connect { qp, peer, how } => self.connect(self.qp(*qp)?, peer, how)?,
            Request::Modify { qp, state } => {
                let mut attr = QpAttr { qp_state: *state as u32, ..QpAttr::default() };
                self.modify(self.qp(*qp)?, &mut attr, mask::STATE)?;
            }
            Request::Query { qp } => return self.query(self.qp(*qp)?),
            Request::Destroy { qp } => {
                let pointer = std::mem::replace(
                    self.qps.get_mut(*qp).ok_or("no such queue pair")?,
                    null_mut(),
                );
                // SAFETY: it exists until now, and nobody will find it again.
                check("ibv_destroy_qp", unsafe { (self.library.destroy_qp)(pointer) })?;
            }
            Request::Send { qp, list } => {
                list.iter().try_for_each(|send| self.post_send(self.qp(*qp)?, send))?;
            }
            Request::Recv { qp, first, list } => {
                for (wr_id, ranges) in (*first..).zip(list) {
                    self.post_recv(*qp, wr_id, ranges)?;
                }
            }
            Request::Poll { count, timeout_ms } => return self.poll(*count, *timeout_ms),
            Request::Arm { solicited } => {
                // SAFETY: the queue exists as long as the device is open.
                let armed = unsafe { ffi::req_notify_cq(self.opened()?.cq, (*solicited).into()) };
                check("ibv_req_notify_cq", armed)?;
            }
            Request::Event { timeout_ms } => return self.wait_for_event(*timeout_ms),
            Request::Async { timeout_ms } => return self.wait_for_async(*timeout_ms),
        }
        Ok(Reply::Done)
    }

    fn opened(&self) -> Result<Opened> {
        self.device.ok_or_else(|| "no device is open".into())
    }

    fn qp(&self, index: usize) -> Result<*mut Qp> {
        let qp = self.qps.get(index).filter(|qp| !qp.is_null());
        qp.copied().ok_or_else(|| format!("there is no queue pair {index}"))
    }

    fn open(&mut self, name: &str, address: IpAddr) -> Result<()> {
        let library = self.library;
        let context = open_device(&library, name)?;
        let gid_index = find_gid(&library, context, address)?;
        // SAFETY: the context is open; each call gets what the one before it made.
        unsafe {
            let pd = made("ibv_alloc_pd", (library.alloc_pd)(context))?;
            let channel =
                made("ibv_create_comp_channel", (library.create_comp_channel)(context))?;
            let depth = CQ_DEPTH.cast_signed();
            let cq = (library.create_cq)(context, depth, null_mut(), channel, 0);
            let cq = made("ibv_create_cq", cq)?;
            self.device = Some(Opened { context, pd, channel, cq, gid_index });
        }
        Ok(())
    }

    fn register(&mut self, len: usize, access: u32) -> Result<Reply> {
        let device = self.opened()?;
        let start = Box::into_raw(vec![0u8; len.max(1)].into_boxed_slice()).cast::<u8>();
        // SAFETY: the memory is `len` bytes, and lives until `Drop` has deregistered it.
        let mr = unsafe {
            (self.library.reg_mr)(device.pd, start.cast(), len, access.cast_signed())
        };
        let mr = made("ibv_reg_mr", mr)?;
        self.regions.push(Region { mr, start, len });
        // SAFETY: the region was just made.
        let (address, rkey) = unsafe { ((*mr).addr as u64, (*mr).rkey) };
        Ok(Reply::Region(Remote { address, rkey }))
    }

    fn range(&self, range: Range) -> Result<(&Region, *mut u8)> {
        let region = self.regions.get(range.region).ok_or("no such region")?;
        if range.offset.checked_add(range.len).is_none_or(|end| end > region.len) {
            return Err(format!("{range:?} is not inside the region"));
        }
        // SAFETY: the offset is inside the region's memory.
        Ok((region, unsafe { region.start.add(range.offset) }))
    }

    fn fill(&self, range: Range, bytes: &[u8]) -> Result<()> {
        let (_, start) = self.range(Range { len: bytes.len(), ..range })?;
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the region's memory. The device may write it too: hence volatile.
            unsafe { start.add(at).write_volatile(*byte) };
        }
        Ok(())
    }

    fn bytes(&self, range: Range) -> Result<Vec<u8>> {
        let (_, start) = self.range(range)?;
        // SAFETY: as in `fill`.
        Ok((0..range.len).map(|at| unsafe { start.add(at).read_volatile() }).collect())
    }

    fn create_srq(&mut self, limit: u32) -> Result<()> {
        let device = self.opened()?;
        let attr = SrqAttr { max_wr: QUEUE_DEPTH, max_sge: ELEMENTS, srq_limit: 0 };
        let mut init = SrqInitAttr { srq_context: null_mut(), attr };
        // SAFETY: the domain exists, and the attributes are complete.
        let srq = unsafe { (self.library.create_srq)(device.pd, &raw mut init) };
        self.srq = made("ibv_create_srq", srq)?;
        if limit > 0 {
            let mut attr = SrqAttr { srq_limit: limit, ..SrqAttr::default() };
            // SAFETY: the queue was just made.
            let set = unsafe { (self.library.modify_srq)(self.srq, &raw mut attr, SRQ_LIMIT) };
            check("ibv_modify_srq", set)?;
        }
        Ok(())
    }

    fn create_qp(&mut self, access: u32, srq: bool) -> Result<Reply> {
        let device = self.opened()?;
        if srq && self.srq.is_null() {
            return Err("there is no shared receive queue".into());
        }
        let mut init = QpInitAttr {
            qp_context: null_mut(),
            send_cq: device.cq,
            recv_cq: device.cq,
            srq: if srq { self.srq } else { null_mut() },
            cap: QpCap {
                max_send_wr: QUEUE_DEPTH,
                max_recv_wr: QUEUE_DEPTH,
                max_send_sge: ELEMENTS,
                max_recv_sge: ELEMENTS,
                max_inline_data: INLINE,
            },
            qp_type: RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queues exist, and the attributes are complete.
        let qp = made("ibv_create_qp", unsafe { (self.library.create_qp)(device.pd, &raw mut init) })?;
        self.qps.push(qp);
        self.prepare(qp, access)?;
        // SAFETY: the queue pair was just made.
        Ok(Reply::Qp { qpn: unsafe { (*qp).qp_num } })
    }

    fn prepare(&self, qp: *mut Qp, access: u32) -> Result<()> {
        let mut attr = QpAttr {
            qp_state: State::Init as u32,
            port_num: 1,
            qp_access_flags: access,
            ..QpAttr::default()
        };
        self.modify(qp, &mut attr, mask::STATE | mask::PKEY | mask::PORT | mask::ACCESS)
    }

    fn connect(&self, qp: *mut Qp, peer: &Peer, how: &Connection) -> Result<()> {
        let mut rtr = QpAttr {
            qp_state: State::Rtr as u32,
            // IBV_MTU_256 is 1.
            path_mtu: how.mtu.ilog2() - 7,
            dest_qp_num: peer.qpn,
            rq_psn: peer.psn,
            max_dest_rd_atomic: how.rd_atomic,
            min_rnr_timer: how.min_rnr_timer,
            ah_attr: AhAttr {
                dgid: gid_of(peer.address),
                sgid_index: self.opened()?.gid_index,
                hop_limit: 64,
                is_global: 1,
                port_num: 1,
                ..AhAttr::default()
            },
            ..QpAttr::default()
        };
        let all = mask::STATE
            | mask::AV
            | mask::MTU
            | mask::DEST_QPN
            | mask::RQ_PSN
            | mask::DEST_RD_ATOMIC
            | mask::MIN_RNR;
        self.modify(qp, &mut rtr, all)?;
        let mut rts = QpAttr {
            qp_state: State::Rts as u32,
            sq_psn: how.psn,
            timeout: how.timeout,
            retry_cnt: how.retry_cnt,
            rnr_retry: how.rnr_retry,
            max_rd_atomic: how.rd_atomic,
            ..QpAttr::default()
        };
        let all = mask::STATE
            | mask::SQ_PSN
            | mask::TIMEOUT
            | mask::RETRY
            | mask::RNR_RETRY
            | mask::RD_ATOMIC;
        self.modify(qp, &mut rts, all)
    }

    fn modify(&self, qp: *mut Qp, attr: &mut QpAttr, mask: i32) -> Result<()> {
        // SAFETY: the queue pair exists, and the attributes that the mask names are set.
        check("ibv_modify_qp", unsafe { (self.library.modify_qp)(qp, attr, mask) })
    }

    fn query(&self, qp: *mut Qp) -> Result<Reply> {
        let mut attr = QpAttr::default();
        // SAFETY: zero is a value of every field.
        let mut init: QpInitAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair exists, and both structures are the caller's.
        let asked = unsafe {
            (self.library.query_qp)(qp, &raw mut attr, mask::STATE, &raw mut init)
        };
        check("ibv_query_qp", asked)?;
        use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        let states = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let state = states.get(attr.qp_state as usize);
        state.map(|state| Reply::State(*state)).ok_or_else(|| "an unknown state".into())
    }

    fn elements(&self, ranges: &[Range]) -> Result<Vec<Sge>> {
        let element = |range: &Range| {
            let (region, start) = self.range(*range)?;
            let length = u32::try_from(range.len).map_err(|_| "a range is too long")?;
            // SAFETY: the region is registered.
            Ok(Sge { addr: start as u64, length, lkey: unsafe { (*region.mr).lkey } })
        };
        ranges.iter().map(element).collect()
    }

    fn post_send(&self, qp: *mut Qp, send: &Send) -> Result<()> {
        let mut elements = self.elements(&send.ranges)?;
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let mut wr = SendWr {
            wr_id: send.wr_id,
            next: null_mut(),
            sg_list: elements.as_mut_ptr(),
            num_sge: c_int::try_from(elements.len()).map_err(|_| "too many elements")?,
            opcode: 0,
            send_flags: flag(send.fence, 1)
                | flag(send.signaled, 2)
                | flag(send.solicited, 4)
                | flag(send.inline, 8),
            imm_data: 0,
            remote_addr: 0,
            compare_add: 0,
            swap: 0,
            atomic_rkey: 0,
            rest: [0; 7],
        };
        set_operation(&mut wr, send.op);
        // SAFETY: the queue pair exists, and the request names memory that is registered.
        check("ibv_post_send", unsafe { ffi::post_send(qp, &raw mut wr) })
    }

    fn post_recv(&self, qp: Option<usize>, wr_id: u64, ranges: &[Range]) -> Result<()> {
        let mut elements = self.elements(ranges)?;
        let num_sge = c_int::try_from(elements.len()).map_err(|_| "too many elements")?;
        let sg_list = elements.as_mut_ptr();
        let mut wr = ffi::RecvWr { wr_id, next: null_mut(), sg_list, num_sge };
        match qp {
            Some(index) => {
                let qp = self.qp(index)?;
                // SAFETY: as in `post_send`.
                check("ibv_post_recv", unsafe { ffi::post_recv(qp, &raw mut wr) })
            }
            None if self.srq.is_null() => Err("there is no shared receive queue".into()),
            // SAFETY: as in `post_send`.
            None => check("ibv_post_srq_recv", unsafe {
                ffi::post_srq_recv(self.srq, &raw mut wr)
            }),
        }
    }

    fn poll(&self, count: usize, timeout_ms: u64) -> Result<Reply> {
        let cq = self.opened()?.cq;
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let mut found = Vec::new();
        loop {
            let mut wc = Wc::default();
            // SAFETY: the queue exists, and there is room for one.
            match unsafe { ffi::poll_cq(cq, 1, &raw mut wc) } {
                1 => found.push(completion(&wc)),
                0 if Instant::now() > deadline => break,
                0 => std::thread::sleep(Duration::from_micros(50)),
                _ => return Err("ibv_poll_cq failed".into()),
            }
            if found.len() >= count {
                break;
            }
        }
        Ok(Reply::Completions(found))
    }

    fn wait_for_event(&self, timeout_ms: u64) -> Result<Reply> {
        let device = self.opened()?;
        // SAFETY: a channel begins with its context and its descriptor.
        let fd = unsafe { device.channel.cast::<u8>().add(8).cast::<c_int>().read() };
        if !readable(fd, timeout_ms)? {
            return Ok(Reply::Event(false));
        }
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel exists, and an event is there.
        unsafe {
            let got =
                (self.library.get_cq_event)(device.channel, &raw mut cq, &raw mut context);
            check("ibv_get_cq_event", got)?;
            (self.library.ack_cq_events)(cq, 1);
        }
        Ok(Reply::Event(true))
    }

    fn wait_for_async(&self, timeout_ms: u64) -> Result<Reply> {
        let context = self.opened()?.context;
        // SAFETY: the context is open.
        if !readable(unsafe { (*context).async_fd }, timeout_ms)? {
            return Ok(Reply::Async(None));
        }
        let mut event = ffi::AsyncEvent { element: null_mut(), event_type: 0 };
        // SAFETY: the context is open, and an event is there, which is acknowledged once.
        let name = unsafe {
            check(
                "ibv_get_async_event",
                (self.library.get_async_event)(context, &raw mut event),
            )?;
            (self.library.ack_async_event)(&raw mut event);
            CStr::from_ptr((self.library.event_type_str)(event.event_type))
        };
        Ok(Reply::Async(Some(name.to_string_lossy().into_owned())))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let library = self.library;
        // SAFETY: everything exists, is destroyed once, and before what it was made of.
        unsafe {
            for qp in self.qps.iter().filter(|qp| !qp.is_null()) {
                (library.destroy_qp)(*qp);
            }
            if !self.srq.is_null() {
                (library.destroy_srq)(self.srq);
            }
            for region in &self.regions {
                if (library.dereg_mr)(region.mr) == 0 {
                    let slice = std::ptr::slice_from_raw_parts_mut(region.start, region.len.max(1));
                    drop(Box::from_raw(slice));
                }
            }
            if let Some(device) = self.device {
                (library.destroy_cq)(device.cq);
                (library.destroy_comp_channel)(device.channel);
                (library.dealloc_pd)(device.pd);
                (library.close_device)(device.context);
            }
        }
    }
}

fn open_device(library: &Library, name: &str) -> Result<*mut Context> {
    let mut count = 0;
    // SAFETY: the list is what the library says, and freed once, after the device was opened.
    unsafe {
        let list = made("ibv_get_device_list", (library.get_device_list)(&raw mut count))?;
        let count = usize::try_from(count).unwrap_or(0);
        let context = (0..count).map(|at| *list.add(at)).find_map(|device| {
            let its = CStr::from_ptr((library.get_device_name)(device));
            (its.to_bytes() == name.as_bytes()).then(|| (library.open_device)(device))
        });
        (library.free_device_list)(list);
        made("ibv_open_device", context.ok_or_else(|| format!("there is no device {name}"))?)
    }
}

/// The index of the RoCEv2 GID for `address`. Of an address that is there twice the later one is version 2; rxe has only
/// that.
fn find_gid(library: &Library, context: *mut Context, address: IpAddr) -> Result<u8> {
    let wanted = gid_of(address);
    let is_it = |index: &u8| {
        let mut gid = Gid::default();
        // SAFETY: the context is open, and the GID is the caller's.
        let asked = unsafe { (library.query_gid)(context, 1, (*index).into(), &raw mut gid) };
        asked == 0 && gid == wanted
    };
    let found = (0..64).rev().find(is_it);
    found.ok_or_else(|| format!("the device has no GID for {address}"))
}

fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
        IpAddr::V6(v6) => Gid(v6.octets()),
    }
}

fn set_operation(wr: &mut SendWr, op: Op) {
    match op {
        Op::Send { imm } => {
            wr.opcode = if imm.is_some() { 3 } else { 2 };
            wr.imm_data = imm.unwrap_or(0).to_be();
        }
        Op::Write { remote, rkey, imm } => {
            wr.opcode = u32::from(imm.is_some());
            wr.imm_data = imm.unwrap_or(0).to_be();
            (wr.remote_addr, wr.compare_add) = (remote, in_first_half(rkey));
        }
        Op::Read { remote, rkey } => {
            wr.opcode = 4;
            (wr.remote_addr, wr.compare_add) = (remote, in_first_half(rkey));
        }
        Op::CompareSwap { remote, rkey, compare, swap } => {
            (wr.opcode, wr.atomic_rkey) = (5, rkey);
            (wr.remote_addr, wr.compare_add, wr.swap) = (remote, compare, swap);
        }
        Op::FetchAdd { remote, rkey, add } => {
            (wr.opcode, wr.atomic_rkey) = (6, rkey);
            (wr.remote_addr, wr.compare_add) = (remote, add);
        }
    }
}

/// The eight bytes whose first four are this value.
fn in_first_half(value: u32) -> u64 {
    let [a, b, c, d] = value.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
}

fn completion(wc: &Wc) -> Completion {
    let opcode = match wc.opcode {
        0 => Opcode::Send,
        1 => Opcode::Write,
        2 => Opcode::Read,
        3 => Opcode::CompareSwap,
        4 => Opcode::FetchAdd,
        128 => Opcode::Recv,
        129 => Opcode::RecvWriteImm,
        _ => Opcode::Other,
    };
    #[rustfmt::skip]
    let names = ["SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
        "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR"];
    let status = names.get(wc.status as usize).map_or_else(|| wc.status.to_string(), |&n| n.into());
    // IBV_WC_WITH_IMM.
    let imm = (wc.wc_flags & 2 != 0).then(|| u32::from_be(wc.imm_data));
    Completion { wr_id: wc.wr_id, qpn: wc.qp_num, status, opcode, byte_len: wc.byte_len, imm }
}

fn readable(fd: c_int, timeout_ms: u64) -> Result<bool> {
    // SAFETY: the descriptor is open as long as the object that has it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut wanted = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
    let timeout = u16::try_from(timeout_ms).unwrap_or(u16::MAX);
    let ready = nix::poll::poll(&mut wanted, timeout).map_err(|error| format!("poll: {error}"))?;
    Ok(ready > 0)
}

/// A function that returns 0, an errno, or -1 with `errno` set.
fn check(what: &str, result: c_int) -> Result<()> {
    let error = match result {
        0 => return Ok(()),
        -1 => io::Error::last_os_error(),
        errno => io::Error::from_raw_os_error(errno.abs()),
    };
    Err(format!("{what}: {error}"))
}

/// A function that returns an object, or nothing with `errno` set.
fn made<T>(what: &str, object: *mut T) -> Result<*mut T> {
    if object == without_provenance_mut(0) {
        return Err(format!("{what}: {}", io::Error::last_os_error()));
    }
    Ok(object)
}
