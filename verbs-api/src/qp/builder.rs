//! The builder of queue pairs, and prepared queue pairs before they connect.

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::qp::{ConnectOptions, PostListError, QpCaps};
use rocinante_soft::provider::random::random;
use rocinante_stack::mem::Access;
use rocinante_stack::types::Psn;
use rocinante_stack::verbs::{QpType, RecvWr};

use super::{Peers, Qp, QpKind};
use crate::context::{Pd, PdKind};
use crate::cq::{Cq, CqKind};
use crate::srq::{Srq, SrqKind};

/// Makes queue pairs: see [`Pd::qp`].
#[derive(Debug, Clone)]
pub struct QpBuilder {
    pd: Pd,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    qp_type: QpType,
    caps: QpCaps,
    access: Access,
    qkey: u32,
    sq_sig_all: bool,
    context: u64,
    sgid_index: usize,
    shard: Option<usize>,
}

impl QpBuilder {
    pub(crate) fn new(pd: &Pd, send_cq: &Cq, recv_cq: &Cq) -> Self {
        Self {
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            qp_type: QpType::Rc,
            caps: QpCaps::default(),
            access: Access::NONE,
            qkey: 0x1111_1111,
            sq_sig_all: false,
            context: 0,
            sgid_index: 0,
            shard: None,
        }
    }
}

setters! { QpBuilder:
    /// The transport service; a reliable connection by default.
    qp_type(qp_type: QpType) { qp_type = qp_type }
    /// Takes receives from a shared receive queue. The queue pair then has none of its own, and
    /// ignores the capabilities of its receive queue.
    srq(srq: &Srq) { srq = Some(srq.clone()) }
    /// The Q_Key of a queue pair for datagrams; 0x11111111 by default, as in many programs. The
    /// queue pair takes only datagrams that carry it.
    qkey(qkey: u32) { qkey = qkey }
    /// Depths and sizes; by default 128 requests of one element each, and 64 bytes inline.
    caps(caps: QpCaps) { caps = caps }
    /// Depth of the send queue.
    max_send_wr(depth: u32) { caps.max_send_wr = depth }
    /// Depth of the receive queue.
    max_recv_wr(depth: u32) { caps.max_recv_wr = depth }
    /// Scatter-gather elements of sends and receives.
    max_sge(elements: u32) { caps.max_send_sge = elements, caps.max_recv_sge = elements }
    /// Bytes of inline data.
    max_inline_data(bytes: u32) { caps.max_inline_data = bytes }
    /// The peer's accesses without a receive (`IBV_QP_ACCESS_FLAGS`): none by default. A region's
    /// own flags limit them further.
    access(access: Access) { access = access }
    /// Whether every send makes a completion (`sq_sig_all`).
    signal_all(all: bool) { sq_sig_all = all }
    /// The program's own value (`qp_context`), which each completion of the queue pair returns
    /// ([`Wc::context`](crate::Wc::context)): for instance an index into a table of connections. 0
    /// by default.
    context(context: u64) { context = context }
    /// The address of the device that [`PreparedQp::endpoint`] announces and
    /// [`PreparedQp::connect`] uses: an index into [`Context::gids`](crate::Context::gids), the
    /// first by default. A program that changes the state by [`Qp::modify`] names it in
    /// [`PeerPath::sgid_index`](crate::verbs::PeerPath::sgid_index).
    sgid_index(index: usize) { sgid_index = index }
    /// The shard of the device that it lives on, counted from 0: see
    /// [`OpenOptions::shards`](crate::OpenOptions::shards). By default the device takes the shard
    /// of the shared receive queue if there is one, else the shards in turn. A device of the kernel
    /// has no shards and ignores it.
    shard(shard: usize) { shard = Some(shard) }
}

impl QpBuilder {
    /// Makes the queue pair in the RESET state, for programs that change its state by
    /// [`Qp::modify`].
    ///
    /// # Errors
    /// [`VerbsError::Limit`] or [`VerbsError::Invalid`] if a limit of the device is exceeded;
    /// [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn build_reset(mut self) -> Result<Qp, VerbsError> {
        if self.srq.is_some() {
            (self.caps.max_recv_wr, self.caps.max_recv_sge) = (0, 0);
        }
        let device = self.pd.device();
        let alien = |srq: &Srq| !srq.is_of(device);
        if !self.send_cq.is_of(device)
            || !self.recv_cq.is_of(device)
            || self.srq.as_ref().is_some_and(alien)
        {
            return Err(foreign());
        }
        device.limits().check(&self.caps)?;
        let local = device.local(self.sgid_index)?;
        let place = device.gids().iter().position(|address| *address == local);
        let short = |index: Option<usize>| index.and_then(|index| u16::try_from(index).ok());
        let (Some(sgid_index), Some(place)) = (short(Some(self.sgid_index)), short(place)) else {
            return Err(VerbsError::Invalid(format!("GID index {} is too great", self.sgid_index)));
        };
        let kind = match (&self.pd.inner.kind, &self.send_cq.kind, &self.recv_cq.kind) {
            (PdKind::Soft(pd), CqKind::Soft(send_cq), CqKind::Soft(recv_cq)) => {
                let Self { qp_type, caps, sq_sig_all, context, .. } = self;
                let srq = self.srq.as_ref().and_then(|srq| match srq.kind() {
                    SrqKind::Soft(srq) => Some(srq),
                    SrqKind::Kernel(_) => None,
                });
                let Self { shard, .. } = self;
                let attr = soft::QpInitAttr {
                    qp_type,
                    send_cq,
                    recv_cq,
                    srq,
                    caps,
                    sq_sig_all,
                    context,
                    shard,
                };
                QpKind::Soft(soft::Qp::create(pd, &attr)?)
            }
            (PdKind::Kernel(pd), CqKind::Kernel(send_cq), CqKind::Kernel(recv_cq)) => {
                let Self { qp_type, caps, sq_sig_all, context, .. } = self;
                let srq = self.srq.as_ref().and_then(|srq| match srq.kind() {
                    SrqKind::Kernel(srq) => Some(srq),
                    SrqKind::Soft(_) => None,
                });
                let attr = kernel::QpInitAttr {
                    qp_type,
                    send_cq,
                    recv_cq,
                    srq,
                    caps,
                    sq_sig_all,
                    context,
                    local,
                };
                QpKind::Kernel(Box::new(kernel::Qp::create(pd, &attr)?))
            }
            // `is_of` has excluded mixed providers above.
            _ => return Err(foreign()),
        };
        Ok(Qp {
            kind,
            sgid_index,
            local: place,
            psn: Psn::new(random()?),
            qp_type: self.qp_type,
            peers: match self.qp_type {
                QpType::Ud => Peers::Qkey(self.qkey),
                QpType::Rc | QpType::Uc => Peers::Access(self.access),
            },
            srq: self.srq,
            cqs: (self.send_cq, self.recv_cq),
            pd: self.pd,
        })
    }

    /// Makes the queue pair in the INIT state, where the program can post receives.
    /// [`PreparedQp::connect`] does the rest, or [`PreparedQp::ready`] for datagrams.
    ///
    /// # Errors
    /// As [`build_reset`](Self::build_reset).
    pub fn build(self) -> Result<PreparedQp, VerbsError> {
        let qp = self.build_reset()?;
        qp.modify(&qp.peers.init())?;
        Ok(PreparedQp { qp })
    }
}

fn foreign() -> VerbsError {
    let why =
        "protection domain, completion queues and shared receive queue belong to different devices";
    VerbsError::Invalid(why.into())
}

/// A queue pair in the INIT state: the program can post receives, but not send yet.
#[derive(Debug)]
pub struct PreparedQp {
    qp: Qp,
}

impl PreparedQp {
    /// The data that the peer needs to connect: as [`Qp::endpoint`].
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.qp.endpoint()
    }

    /// The shared receive queue, if it uses one.
    #[must_use]
    pub fn srq(&self) -> Option<&Srq> {
        self.qp.srq()
    }

    /// Posts receives, which a peer may fill as soon as both sides are connected.
    ///
    /// # Errors
    /// As [`Qp::post_recv`].
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        self.qp.post_recv(list)
    }

    /// The queue pair, still in INIT.
    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Its transport service.
    pub(crate) fn qp_type(&self) -> QpType {
        self.qp.qp_type()
    }

    /// Its device.
    pub(crate) fn device(&self) -> &crate::device::Device {
        self.qp.device()
    }

    /// Connects: through RTR to RTS. An unreliable connection ignores the options for
    /// acknowledgements and READs.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a queue pair for datagrams. The queue pair comes back with the
    /// error, in the INIT or the RESET state.
    pub fn connect(self, peer: &Endpoint, options: &ConnectOptions) -> Result<Qp, Refused<Self>> {
        let psns = (self.qp.psn, peer.psn);
        self.connect_by(peer, psns, options)
    }

    /// As [`connect`](Self::connect), but each side has announced the PSN that it wants to receive
    /// first, as the connection manager does, not the PSN that it sends first. `ours` is this
    /// side's, if it is not the queue pair's own.
    pub(crate) fn connect_by_cm(
        self,
        peer: &Endpoint,
        ours: Option<Psn>,
        options: &ConnectOptions,
    ) -> Result<Qp, Refused<Self>> {
        let psns = (peer.psn, ours.unwrap_or(self.qp.psn));
        self.connect_by(peer, psns, options)
    }

    fn connect_by(
        self,
        peer: &Endpoint,
        psns: (Psn, Psn),
        options: &ConnectOptions,
    ) -> Result<Qp, Refused<Self>> {
        match self.qp.connect_to(peer, psns, options) {
            Ok(()) => Ok(self.qp),
            Err(error) => Err(Refused::new(self, error)),
        }
    }

    /// Makes a queue pair for datagrams ready, without a peer: through RTR to RTS.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a connection. The queue pair comes back with the error.
    pub fn ready(self) -> Result<Qp, Refused<Self>> {
        match self.qp.make_ready() {
            Ok(()) => Ok(self.qp),
            Err(error) => Err(Refused::new(self, error)),
        }
    }
}
