//! Completion queues, their channels, and queue pairs.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::{ModifyAttr, PeerPath, PostListError, QpCaps, SendRules, gid_at};
use rocinante_soft::model::wc::Wc;
use rocinante_soft::provider::listeners::{Listeners, fresh_number};
use rocinante_soft::provider::manager::Breaks;
use rocinante_soft::provider::state::StateCell;
use rocinante_soft::provider::trace;
use rocinante_soft::provider::wakers::Wakers;
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{Cqe, QpState, QpType, RecvWr, SendWr, WcOpcode, WcStatus};
use rocinante_stack::{PeerAddress, PeerKind, PostError, QpAttr};
use rustix::io::Errno;

use super::groups::Membership;
use super::watch::{self, Source};
use super::{Device, Pd, Srq, convert, error, ffi};

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    raw: Arc<ffi::Cq>,
    device: Arc<Device>,
    handle: u32,
    depth: usize,
    has_channel: bool,
    /// Tasks that wait for completions, if it has no channel of the program's.
    tasks: Arc<Wakers>,
    /// Receives of datagrams complete here, so their completions report the sender.
    datagrams: AtomicBool,
}

impl Cq {
    pub fn create(
        device: &Arc<Device>,
        depth: u32,
        channel: Option<&Arc<Channel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        // The library returns this number with each event of the queue.
        let number = fresh_number();
        let own = match channel {
            Some(_) => None,
            None => Some(device.quiet()?),
        };
        let events = channel.map(|channel| &channel.raw).or(own.map(|(channel, _)| channel));
        let entries = c_int::try_from(depth).unwrap_or(c_int::MAX);
        let raw = ffi::Cq::create(&device.context, entries, number, events)
            .map_err(|error| error::locked("ibv_create_cq", None, error))?;
        let (handle, depth) = raw.handle_and_depth();
        let has_channel = channel.is_some();
        let cq = Arc::new(Self {
            raw: Arc::new(raw),
            device: device.clone(),
            handle,
            depth,
            has_channel,
            tasks: Arc::default(),
            datagrams: AtomicBool::new(false),
        });
        if let Some((_, queues)) = own {
            queues.add(number, &cq.tasks);
        }
        if let Some(channel) = channel {
            channel.queues.add(number, &cq);
        }
        Ok(cq)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn number(&self) -> u32 {
        self.handle
    }

    pub fn depth(&self) -> usize {
        self.depth
    }

    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, VerbsError> {
        let room = out.len();
        let mut slots = out.iter_mut();
        let polled = self.raw.poll(room, |wc| {
            if let Some(slot) = slots.next() {
                *slot = Wc::of(self.cqe(wc));
            }
        });
        polled.map_err(poll_failed)
    }

    #[inline]
    pub fn poll_one(&self) -> Result<Option<Wc>, VerbsError> {
        let mut found = None;
        self.raw.poll(1, |wc| found = Some(Wc::of(self.cqe(wc)))).map_err(poll_failed)?;
        Ok(found)
    }

    #[inline]
    fn cqe(&self, wc: &ffi::abi::Wc) -> Cqe {
        let mut cqe = convert::cqe(wc);
        let known = &self.device.known;
        cqe.context = known.context_of(cqe.qpn);
        if !self.datagrams.load(Ordering::Relaxed) || !known.may_be_datagrams(cqe.qpn) {
            cqe.sender = None;
            // On Soft-RoCE this flag means an invalidated key. No checksum flag is in use here.
            if wc.wc_flags & ffi::abi::WC_IP_CSUM_OK != 0
                && self.device.attr.vendor_id == RXE_VENDOR
                && cqe.opcode == WcOpcode::Recv
                && cqe.status == WcStatus::Success
            {
                cqe.invalidated = Some(Key(u32::from_ne_bytes(wc.imm_data)));
            }
        }
        trace::completed(&cqe);
        cqe
    }

    pub fn has_channel(&self) -> bool {
        self.has_channel
    }

    pub fn tasks(&self) -> &Wakers {
        &self.tasks
    }

    /// Announces the next completion to the tasks that have registered.
    pub fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        let (channel, queues) = self.device.quiet()?;
        self.req_notify(false)?;
        let source = Source::Queues(channel.clone(), queues.clone());
        Ok(self.device.watcher.watch(source)?)
    }

    pub fn req_notify(&self, solicited_only: bool) -> Result<(), VerbsError> {
        let armed = self.raw.req_notify(solicited_only);
        armed.map_err(|error| error::failed("ibv_req_notify_cq", error))
    }
}

/// `RXE_VENDOR_ID` of Linux.
const RXE_VENDOR: u32 = 0xff_ffff;

#[cold]
fn poll_failed(error: io::Error) -> VerbsError {
    error::failed("ibv_poll_cq", error)
}

/// A completion event channel.
#[derive(Debug)]
pub struct Channel {
    raw: Arc<ffi::Channel>,
    device: Arc<Device>,
    queues: Listeners<Cq>,
    tasks: Arc<Wakers>,
}

impl Channel {
    pub fn create(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        let raw = ffi::Channel::create(&device.context)
            .map_err(|error| error::failed("ibv_create_comp_channel", error))?;
        let (raw, queues) = (Arc::new(raw), Listeners::new());
        Ok(Arc::new(Self { raw, device: device.clone(), queues, tasks: Arc::default() }))
    }

    pub fn tasks(&self) -> &Wakers {
        &self.tasks
    }

    /// Announces the next event to the tasks that have registered.
    pub fn announce_to_tasks(&self) -> Result<(), VerbsError> {
        let source = Source::Channel(self.raw.clone(), self.tasks.clone());
        Ok(self.device.watcher.watch(source)?)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The queue of the next event, if there is one now.
    pub fn try_event(&self) -> Option<Arc<Cq>> {
        loop {
            let number = self.raw.next_event()?;
            if let Some(cq) = self.queues.find(number) {
                return Some(cq);
            }
        }
    }

    /// Sleeps until there is an event, or until `until`. Error: the device has been removed, and
    /// its last event was taken.
    pub fn wait(&self, until: Option<Instant>) -> io::Result<()> {
        watch::wait(self.raw.fd(), until)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.raw.fd()
    }
}

/// The attributes of a new queue pair.
#[derive(Debug)]
pub struct QpInitAttr<'a> {
    pub qp_type: QpType,
    pub send_cq: &'a Cq,
    pub recv_cq: &'a Cq,
    pub srq: Option<&'a Srq>,
    pub caps: QpCaps,
    pub sq_sig_all: bool,
    /// The program's own value.
    pub context: u64,
    /// Its address, by which it joins groups.
    pub local: IpAddr,
}

/// A queue pair; dropping it destroys it.
#[derive(Debug)]
pub struct Qp {
    /// Shared with the connection manager, which breaks it when the peer ends the connection.
    pub(super) raw: Arc<ffi::Qp>,
    pub(super) groups: Mutex<Vec<Membership>>,
    pub(super) device: Arc<Device>,
    pub(super) state: StateCell,
    pub(super) rules: SendRules,
    /// Its address, by which it joins groups.
    pub(super) local: IpAddr,
}

impl Breaks for ffi::Qp {
    fn break_off(&self) {
        let mut attr = ffi::abi::QpAttr::to(convert::qp_state_number(QpState::Err));
        // The queue pair may be in that state already.
        let _ = self.modify(&mut attr, ffi::abi::mask::STATE);
    }
}

impl Qp {
    /// The queue pair as the connection manager breaks it.
    pub fn breaks(&self) -> Weak<dyn Breaks> {
        let raw: Arc<dyn Breaks> = self.raw.clone();
        Arc::downgrade(&raw)
    }

    /// Makes a queue pair in the RESET state.
    pub fn create(pd: &Pd, attr: &QpInitAttr<'_>) -> Result<Self, VerbsError> {
        let cqs = [&attr.send_cq.raw, &attr.recv_cq.raw];
        let qp_type = convert::qp_type_number(attr.qp_type);
        let srq = attr.srq.map(Srq::raw);
        let operations = match attr.qp_type {
            QpType::Rc => {
                let has = pd.device.optional;
                ffi::SendOps::new(has.flush_global || has.flush_persistent, has.atomic_write)
            }
            QpType::Uc | QpType::Ud => ffi::SendOps::USUAL,
        };
        let (caps, all) = (convert::cap(attr.caps), attr.sq_sig_all);
        let raw = ffi::Qp::create(pd.raw()?, cqs, srq, qp_type, caps, all, operations)
            .map_err(|error| cannot_create(&attr.caps, error))?;
        if attr.qp_type == QpType::Ud {
            attr.recv_cq.datagrams.store(true, Ordering::Relaxed);
        }
        let device = pd.device.clone();
        device.known.insert(Qpn::new(raw.number()), attr.qp_type, attr.context);
        let (caps, qp_type, mtu) = (raw.caps(), attr.qp_type, device.active_mtu);
        Ok(Self {
            raw: Arc::new(raw),
            groups: Mutex::default(),
            state: StateCell::default(),
            rules: SendRules { caps, qp_type, mtu },
            local: attr.local,
            device,
        })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn qpn(&self) -> Qpn {
        Qpn::new(self.raw.number())
    }

    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        let peer = change.path.map(|path| self.peer(&path)).transpose()?;
        let before = state(self.raw.query(ffi::abi::mask::STATE))?;
        QpAttr { peer, ..change.attr }.check(self.rules.qp_type, before)?;
        let (port, indices) = (self.device.attr.port, &self.device.attr.gid_indices);
        let path = change.path.map(|path| convert::path(&path, indices[path.sgid_index], port));
        let (mut attr, mask) = convert::qp_attr(&change.attr, path.as_ref(), port);
        let modified = self.raw.modify(&mut attr, mask);
        if modified.is_ok()
            && let Some(state) = change.attr.state
        {
            self.state.set(state);
        }
        if modified.is_ok()
            && let Some(path) = &change.path
        {
            self.device.known.set_peer(self.qpn(), path.remote);
        }
        modified.map_err(|error| cannot_modify(change, before, error))
    }

    /// The peer, checked here because the device would refuse it with only an errno.
    fn peer(&self, path: &PeerPath) -> Result<PeerAddress, VerbsError> {
        let (local, remote) = (gid_at(&self.device.gids, path.sgid_index)?, path.remote);
        if remote.is_ipv4() != local.is_ipv4() {
            return Err(VerbsError::Path(io::Error::from(io::ErrorKind::InvalidInput)));
        }
        let kind = PeerKind::Standard;
        Ok(PeerAddress { local, remote, path: 0, budget: path.budget, kind })
    }

    pub fn query(&self) -> (QpState, QpAttr, QpCaps) {
        let queried = self.raw.query(convert::QUERY_ALL);
        let (state, attr) = queried.map_or((QpState::Err, QpAttr::default()), |attr| {
            let used = attr.ah_attr.grh.sgid_index;
            let index = self.device.attr.gid_indices.iter().position(|index| *index == used);
            let local = index.map_or(self.local, |index| self.device.gids[index]);
            convert::qp_attr_back(&attr, self.rules.qp_type, local)
        });
        (state, attr, self.raw.caps())
    }

    #[inline]
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        if !self.state.get().takes_sends() && !self.has_broken() {
            return wrong_state(list.len());
        }
        if self.device.has_windows.load(Ordering::Acquire)
            && list.iter().any(|wr| wr.op.bind().is_some())
        {
            return self.post_with_binds(list);
        }
        // While this lock is held, no handle is destroyed.
        let ahs = (self.rules.qp_type == QpType::Ud).then(|| self.device.ahs.read());
        self.raw.post_send(list, &self.rules, ahs.as_deref())
    }

    /// Whether it has broken since the last change: it takes requests now, and flushes them. Not
    /// kept, as another thread may change the state meanwhile.
    #[cold]
    fn has_broken(&self) -> bool {
        matches!(state(self.raw.query(ffi::abi::mask::STATE)), Ok(QpState::Err))
    }

    /// Posts a list with requests that bind windows. It posts these one by one, because the library
    /// reads a window's key during the call.
    #[cold]
    fn post_with_binds(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let mut windows = self.device.windows.write();
        let at = |index| move |error| PostListError { index, error };
        let mut index = 0;
        for part in list.chunk_by(|a, b| a.op.bind().is_none() && b.op.bind().is_none()) {
            match part[0].op.bind() {
                None => self
                    .raw
                    .post_send(part, &self.rules, None)
                    .map_err(|refused| PostListError { index: index + refused.index, ..refused })?,
                Some(bind) => {
                    self.rules.check(&part[0]).map_err(at(index))?;
                    self.raw.post_bind(&part[0], &bind, &mut windows).map_err(at(index))?;
                }
            }
            index += part.len();
        }
        Ok(())
    }

    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        match self.state.get() {
            QpState::Reset => wrong_state(list.len()),
            _ => self.raw.post_recv(list),
        }
    }
}

/// The state that the device reports.
fn state(queried: io::Result<ffi::abi::QpAttr>) -> Result<QpState, VerbsError> {
    let attr = queried.map_err(|error| error::failed("ibv_query_qp", error))?;
    Ok(convert::qp_state(attr.qp_state).unwrap_or(QpState::Err))
}

/// The error for a refused change, as far as the errno tells.
fn cannot_modify(change: &ModifyAttr, before: QpState, error: io::Error) -> VerbsError {
    let errno = error.raw_os_error().and_then(|errno| Errno::from_raw_os_error(errno).into());
    let unreachable = [Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::NODEV];
    if change.path.is_some() && errno.is_some_and(|errno| unreachable.contains(&errno)) {
        return VerbsError::Path(error);
    }
    let to = change.attr.state.map_or_else(String::new, |state| format!(" to {state}"));
    error::failed(&format!("ibv_modify_qp{to} (the queue pair is in {before})"), error)
}

/// The error for a list in the wrong state, unless the list is empty.
fn wrong_state(len: usize) -> Result<(), PostListError> {
    if len == 0 { Ok(()) } else { Err(PostListError { index: 0, error: PostError::State }) }
}

fn cannot_create(caps: &QpCaps, error: io::Error) -> VerbsError {
    match error.raw_os_error() {
        Some(errno) if errno == Errno::NOMEM.raw_os_error() => {
            error::locked("ibv_create_qp", None, error)
        }
        _ => error::refused_caps(caps, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That of a device that is removed is not known: it is no error state.
    #[test]
    fn a_state_that_the_device_does_not_report_is_its_error() {
        for of in [QpState::Init, QpState::Rts, QpState::Err] {
            let attr = ffi::abi::QpAttr::to(convert::qp_state_number(of));
            assert_eq!(state(Ok(attr)).unwrap(), of);
        }
        let why = state(Err(Errno::IO.into())).unwrap_err();
        assert_eq!(why.errno(), Errno::IO.raw_os_error());
        assert!(why.to_string().contains("ibv_query_qp"), "{why}");
    }
}
