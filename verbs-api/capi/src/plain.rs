//! The objects of the device in software, as the C ABI has them: no reference count and no choice
//! in a call. A C program keeps the objects alive that an object uses, by the order of its calls.

use std::io;
use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) use rocinante_netdev::{
    DEVICES_VARIABLE, NamedInterface, NextHop, OfProcess, PortClaim, apart, container_limits,
    gid_table_len, named_interfaces, sysfs,
};
use rocinante_soft as soft;
use rocinante_soft::model::device::DeviceCounters;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::{PeerPath, QpCaps};
use rocinante_soft::provider::advice::Advice;
pub(crate) use rocinante_soft::provider::manager::Manager;
use rocinante_soft::provider::manager::{ListensTo, Place};
pub(crate) use rocinante_soft::provider::memory::is_readable;
use rocinante_soft::provider::memory::{self, Range};
pub(crate) use rocinante_soft::provider::random::random;
use rocinante_soft::provider::wake;
pub(crate) use rocinante_soft::provider::wakers::Woken;
pub(crate) use rocinante_soft::{Channel, Owner, Qp, Srq, Window as Mw};
pub(crate) use rocinante_stack::cm::{
    Accept, Asked, CmEvent, ConnId, Connect, Ended, ListenerId, QpSide, Reply, Request,
    SidrQueryId, SidrReqId,
};
use rocinante_stack::mem::{Access, AccessError, MwType, Sge};
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{AhId, QpType};
pub(crate) use rocinante_stack::verbs::{Cqe, Sender};
pub(crate) use rocinante_stack::wire::cm::{
    PortSpace, RejReason, ServiceId, SidrStatus, Transport,
};
pub(crate) use rocinante_stack::{GROUPS_MAX, MEMBERS_MAX, grh_addresses};
use rustix::io::Errno;

/// The device in software of a context.
#[derive(Debug)]
pub(crate) struct Device(Arc<soft::Device>);

impl Deref for Device {
    type Target = soft::Device;

    fn deref(&self) -> &soft::Device {
        &self.0
    }
}

impl Device {
    pub(crate) fn new(device: Arc<soft::Device>) -> Self {
        Self(device)
    }

    /// The counters, of all contexts of the device together.
    #[must_use]
    pub(crate) fn watch(&self) -> Watched {
        Watched(Arc::downgrade(self.0.hca()))
    }

    /// The largest path MTU, since the device was opened.
    pub(crate) fn mtu(&self) -> Mtu {
        self.0.hca().active_mtu
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, VerbsError> {
        let (what, max) = ("protection domains", PDS_MAX);
        let count = soft::Counted::new(&self.0, |hca| &hca.plain_pds, (what, max))?;
        let pd = soft::Pd::new(&self.0);
        pd.admitted()?;
        Ok(Pd(pd, count))
    }

    pub(crate) fn create_channel(&self) -> Result<Channel, VerbsError> {
        Channel::create(&self.0)
    }

    pub(crate) fn create_cq(
        &self,
        depth: u32,
        channel: Option<&Channel>,
    ) -> Result<Cq, VerbsError> {
        let max = self.0.limits.max_cqe;
        if depth == 0 || depth > max {
            return Err(VerbsError::Invalid(format!("a queue has 1 to {max} entries")));
        }
        soft::Cq::create(&self.0, depth, channel).map(Cq)
    }
}

/// The connection manager.
impl Device {
    /// Listens for requests, or for questions where the service is of datagrams.
    pub(crate) fn listen(
        &self,
        service: ServiceId,
        (address, backlog): (Option<IpAddr>, usize),
        owner: Arc<dyn Owner>,
    ) -> Result<ListenerId, VerbsError> {
        let port = service.port().map_or(0, |(_, port)| port);
        self.0.listen_into(service, Place { address, port, backlog }, owner)
    }

    /// Has a port of a port space as `claim` says, as far as other processes are concerned.
    /// `EADDRINUSE` if one is in the way.
    pub(crate) fn claim_port(
        &self,
        (address, space, port): (IpAddr, PortSpace, u16),
        claim: PortClaim,
    ) -> io::Result<()> {
        self.0.claim_port(address, number_of(space, port), claim)
    }

    pub(crate) fn unlisten(&self, listener: ListenerId, service: ServiceId) {
        let datagrams = service.takes_datagrams();
        let to = if datagrams { ListensTo::Datagrams } else { ListensTo::Connections };
        self.0.unlisten(listener, to);
    }
}

/// The port's number among those of all spaces.
fn number_of(space: PortSpace, port: u16) -> u32 {
    u32::from(space.number()) << 16 | u32::from(port)
}

/// A descriptor that is readable while something is there.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        wake::eventfd().map(Self)
    }

    pub(crate) fn ring(&self) {
        wake::notify(&self.0);
    }

    pub(crate) fn clear(&self) {
        wake::clear(&self.0);
    }

    #[must_use]
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether all of `len` bytes from `address` on can be read, and written if `writable`. It changes
/// nothing in them. Linux before 5.14 tells only whether memory is mapped there.
#[must_use]
pub(crate) fn is_accessible(address: u64, len: usize, writable: bool) -> bool {
    let len = len as u64;
    memory::is_mapped(address, len) && memory::populate(address, len, writable).is_ok()
}

/// The counters of a device. They keep nothing open.
#[derive(Debug, Clone)]
pub(crate) struct Watched(Weak<soft::Hca>);

impl Watched {
    /// Whether both are of one device, from when it was opened until it is closed.
    #[must_use]
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }

    /// The counters; `None` if the device is closed, or if another thread uses it for all of
    /// `patience`.
    #[must_use]
    pub(crate) fn counters(&self, patience: Duration) -> Option<DeviceCounters> {
        self.0.upgrade()?.try_counters(patience)
    }
}

/// Most protection domains and most address handles of a device, as a C program reads them.
pub(crate) const PDS_MAX: u32 = 1 << 16;
pub(crate) const AHS_MAX: u32 = 1 << 16;

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd(
    soft::Pd,
    #[allow(dead_code, reason = "counts as long as it is there")] soft::Counted,
);

/// The attributes of a new queue pair.
#[derive(Debug)]
pub(crate) struct QpInit<'a> {
    pub qp_type: QpType,
    pub send_cq: &'a Cq,
    pub recv_cq: &'a Cq,
    pub srq: Option<&'a Srq>,
    pub caps: QpCaps,
    pub sq_sig_all: bool,
}

impl Pd {
    /// Registers memory of the program, which work requests and peers name by `start`. A C program
    /// promises what `rocinante::Pd::register` asks for when it calls `ibv_reg_mr`.
    pub(crate) fn register(
        &self,
        (address, len): (u64, usize),
        start: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        soft::Registration::insert(&self.0, Range { address, len }, start, access).map(Mr)
    }

    /// Brings the pages of an element in (`ibv_advise_mr(3)`): ENOENT for a key that is none of the
    /// domain's, EFAULT for bytes outside the region or that are gone.
    pub(crate) fn advise(&self, advice: Advice, sge: &Sge) -> Result<(), VerbsError> {
        let host = soft::Registration::locate(&self.0, sge, advice == Advice::PrefetchWrite);
        let host = host.map_err(|why| match why {
            AccessError::Key | AccessError::Pd => Errno::NOENT,
            AccessError::Permission => Errno::INVAL,
            _ => Errno::FAULT,
        });
        let host = host.map_err(|errno| io::Error::from_raw_os_error(errno.raw_os_error()))?;
        advice.follow(host, sge.len as usize)
    }

    pub(crate) fn alloc_mw(&self, mw_type: MwType) -> Result<Mw, VerbsError> {
        soft::Window::alloc(&self.0, mw_type)
    }

    pub(crate) fn create_ah(&self, path: &PeerPath) -> Result<Ah, VerbsError> {
        let local = self.0.device().local(path.sgid_index)?;
        if local.is_ipv4() != path.remote.is_ipv4() {
            return Err(VerbsError::Path(io::ErrorKind::InvalidInput.into()));
        }
        let (what, max) = ("address handles", AHS_MAX);
        let count = soft::Counted::new(self.0.device(), |hca| &hca.plain_ahs, (what, max))?;
        Ok(Ah(soft::Ah::create(&self.0, local, path)?, count))
    }

    pub(crate) fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq, VerbsError> {
        soft::Srq::create(&self.0, max_wr, max_sge)
    }

    pub(crate) fn create_qp(&self, init: &QpInit<'_>) -> Result<Qp, VerbsError> {
        init.send_cq.0.device().limits.check(&init.caps)?;
        let attr = soft::QpInitAttr {
            qp_type: init.qp_type,
            send_cq: &init.send_cq.0,
            recv_cq: &init.recv_cq.0,
            srq: init.srq,
            caps: init.caps,
            sq_sig_all: init.sq_sig_all,
            context: 0,
            shard: None,
        };
        soft::Qp::create(&self.0, &attr)
    }
}

/// A registered region; dropping it deregisters it, even if requests name it.
#[derive(Debug)]
pub(crate) struct Mr(soft::Registration);

impl Mr {
    #[must_use]
    pub(crate) fn key(&self) -> Key {
        self.0.key()
    }

    /// Deregisters it, unless a window is bound to it. Requests that name it fail.
    pub(crate) fn remove(&mut self) -> Result<(), VerbsError> {
        self.0.remove(true)
    }

    /// Changes the domain and the memory, if they are given, and the access. The key stays unless
    /// the memory changes.
    pub(crate) fn change(
        &mut self,
        pd: Option<&Pd>,
        memory: Option<(u64, usize)>,
        access: Access,
    ) -> Result<(), VerbsError> {
        let range = memory.map(|(address, len)| Range { address, len });
        self.0.change(&soft::Change { pd: pd.map(|pd| &pd.0), range, access })
    }
}

/// An address handle.
#[derive(Debug)]
pub(crate) struct Ah(soft::Ah, #[allow(dead_code, reason = "as of a domain")] soft::Counted);

impl Ah {
    #[must_use]
    pub(crate) fn id(&self) -> AhId {
        self.0.id()
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq(Arc<soft::Cq>);

impl Deref for Cq {
    type Target = soft::Cq;

    #[inline]
    fn deref(&self) -> &soft::Cq {
        &self.0
    }
}

impl Cq {
    #[must_use]
    pub(crate) fn number(&self) -> u32 {
        self.0.id().0
    }

    pub(crate) fn resize(&self, depth: u32) -> Result<(), VerbsError> {
        self.0.device().limits.check_depth(depth)?;
        self.0.resize(depth)
    }
}
