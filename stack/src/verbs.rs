//! Work requests, completions, queue pair states and events, with the names of `verbs.h`.

mod wr;

use core::fmt;

pub use self::wr::{RecvWr, SendData, SendWr};
use crate::mem::{Access, Bind, FlushLevel, Placement};
use crate::types::{Key, Qpn};

/// The transport service of a queue pair (`enum ibv_qp_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QpType {
    /// Reliable connection: everything arrives, once and in order, or the queue pair breaks.
    #[default]
    Rc,
    /// Unreliable connection: SEND and WRITE without acknowledgement; one lost packet loses its
    /// whole message.
    Uc,
    /// Unreliable datagram: messages of one packet, to and from any queue pair that knows the
    /// Q_Key.
    Ud,
}

impl QpType {
    /// All, in the order of `verbs.h`.
    pub const ALL: [Self; 3] = [Self::Rc, Self::Uc, Self::Ud];

    /// Whether a queue pair of this type supports `op`.
    #[must_use]
    pub const fn has(self, op: &SendOp) -> bool {
        match self {
            Self::Rc => !matches!(op, SendOp::SendTo { .. }),
            Self::Uc => op.is_local() || matches!(op, SendOp::Send { .. } | SendOp::Write { .. }),
            Self::Ud => matches!(op, SendOp::SendTo { .. }),
        }
    }
}

impl fmt::Display for QpType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        })
    }
}

/// State of a queue pair (`enum ibv_qp_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Created; nothing can be posted.
    Reset,
    /// Receives can be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Ready to send, but no further request begins: [`QpEvent::SqDrained`] reports that those in
    /// flight are done.
    Sqd,
    /// A send request of an unreliable queue pair failed: sends are flushed until it is RTS again;
    /// receives go on.
    Sqe,
    /// Broken: all work is flushed.
    Err,
}

impl QpState {
    /// All, in the order of `verbs.h`.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];

    /// Whether packets of the peer are accepted.
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }

    /// Whether sends can be posted; in SQE and ERR they are flushed.
    #[must_use]
    pub const fn takes_sends(self) -> bool {
        matches!(self, Self::Rts | Self::Sqd | Self::Sqe | Self::Err)
    }

    /// Whether requests are sent or may still be in flight: their responses and timeouts matter.
    #[must_use]
    pub const fn requests(self) -> bool {
        matches!(self, Self::Rts | Self::Sqd)
    }
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        })
    }
}

/// An address handle of the engine or of a device: the path of datagrams (`struct ibv_ah`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AhId(pub u32);

/// The destination queue pair of a datagram (`wr.ud` of `struct ibv_send_wr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Destination {
    /// The port that it is on.
    pub ah: AhId,
    /// Its number; [`Qpn::MULTICAST`] for the queue pairs of a group.
    pub qpn: Qpn,
    /// Its Q_Key. With the highest bit set, the sender's own Q_Key is sent instead.
    pub qkey: u32,
}

/// The operation of a send work request (`enum ibv_wr_opcode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// SEND, with immediate data (in network byte order) or without.
    Send {
        /// Immediate data.
        imm: Option<[u8; 4]>,
    },
    /// SEND of a datagram, with immediate data (in network byte order) or without.
    SendTo {
        /// The destination.
        to: Destination,
        /// Immediate data.
        imm: Option<[u8; 4]>,
    },
    /// RDMA WRITE, with immediate data or without.
    Write {
        /// Remote address.
        remote: u64,
        /// Remote key.
        rkey: Key,
        /// Immediate data.
        imm: Option<[u8; 4]>,
    },
    /// RDMA READ.
    Read {
        /// Remote address.
        remote: u64,
        /// Remote key.
        rkey: Key,
    },
    /// Compare and swap of eight bytes; the first eight bytes of the list receive the value found.
    CompareSwap {
        /// Remote address, a multiple of 8.
        remote: u64,
        /// Remote key.
        rkey: Key,
        /// The value to compare with.
        compare: u64,
        /// The value to store if equal.
        swap: u64,
    },
    /// Fetch and add of eight bytes; the first eight bytes of the list receive the value found.
    FetchAdd {
        /// Remote address, a multiple of 8.
        remote: u64,
        /// Remote key.
        rkey: Key,
        /// The value to add.
        add: u64,
    },
    /// FLUSH: its completion means that the data of all earlier writes to the range is placed as
    /// `placement` asks. It has no data.
    Flush {
        /// Remote address.
        remote: u64,
        /// Remote key.
        rkey: Key,
        /// Length of the range in bytes.
        len: u32,
        /// The required placement.
        placement: Placement,
        /// The range only, or the whole region.
        level: FlushLevel,
    },
    /// ATOMIC WRITE: eight bytes that appear in memory all at once, and after everything before
    /// them.
    AtomicWrite {
        /// Remote address, a multiple of 8.
        remote: u64,
        /// Remote key.
        rkey: Key,
    },
    /// SEND that also invalidates a window of type 2 at the receiver, bound for the receiver's
    /// queue pair (`IBV_WR_SEND_WITH_INV`).
    SendInv {
        /// The key of the window.
        rkey: Key,
    },
    /// Binds a window of type 2 for this queue pair (`IBV_WR_BIND_MW`). Nothing is sent; its data
    /// is ignored.
    BindMw {
        /// The window's key until now.
        mw: Key,
        /// Its key from now on, of which only the low 8 bits count.
        rkey: Key,
        /// The local key of the region.
        region: Key,
        /// Address of the first byte, as local work requests name it.
        addr: u64,
        /// Length in bytes.
        len: u64,
        /// Permissions of peers: remote flags, and [`Access::ZERO_BASED`].
        access: Access,
    },
    /// Invalidates a window of type 2 that is bound for this queue pair (`IBV_WR_LOCAL_INV`). This
    /// happens after all requests before it are done, and before a request after it begins. Nothing
    /// is sent; its data is ignored.
    LocalInv {
        /// The key of the window.
        rkey: Key,
    },
}

impl SendOp {
    /// Whether it concerns this side only and sends nothing: binding and invalidation.
    #[must_use]
    #[inline]
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::BindMw { .. } | Self::LocalInv { .. })
    }

    /// Whether it is a SEND or WRITE: an operation that carries data to the peer and is
    /// acknowledged.
    #[must_use]
    #[inline]
    pub const fn carries_data(&self) -> bool {
        matches!(
            self,
            Self::Send { .. } | Self::SendTo { .. } | Self::SendInv { .. } | Self::Write { .. }
        )
    }

    /// The binding of a [`BindMw`](Self::BindMw).
    #[must_use]
    pub const fn bind(&self) -> Option<Bind> {
        match *self {
            Self::BindMw { mw, rkey, region, addr, len, access } => {
                Some(Bind { mw, rkey, region, addr, len, access })
            }
            _ => None,
        }
    }

    /// Whether it has a response of its own instead of an acknowledgement: READ, atomics, FLUSH and
    /// ATOMIC WRITE.
    #[must_use]
    pub const fn has_response(&self) -> bool {
        !self.carries_data() && !self.is_local()
    }

    /// Whether its response carries data for its list: READ and atomics.
    #[must_use]
    pub const fn has_result(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Its immediate data.
    #[must_use]
    pub const fn immediate(&self) -> Option<[u8; 4]> {
        match self {
            Self::Send { imm } | Self::SendTo { imm, .. } | Self::Write { imm, .. } => *imm,
            _ => None,
        }
    }

    /// Whether it is an atomic that returns the value found.
    #[must_use]
    pub const fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// The opcode of its completion.
    #[must_use]
    pub const fn completion(&self) -> WcOpcode {
        match self {
            Self::Send { .. } | Self::SendTo { .. } | Self::SendInv { .. } => WcOpcode::Send,
            Self::Write { .. } => WcOpcode::RdmaWrite,
            Self::Read { .. } => WcOpcode::RdmaRead,
            Self::CompareSwap { .. } => WcOpcode::CompSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::Flush { .. } => WcOpcode::Flush,
            Self::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            Self::BindMw { .. } => WcOpcode::BindMw,
            Self::LocalInv { .. } => WcOpcode::LocalInv,
        }
    }
}

/// Status of a completion (`enum ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
#[non_exhaustive]
pub enum WcStatus {
    /// Done.
    #[default]
    Success = 0,
    /// The receive was too small for the message, or the message too long for the protocol.
    LocLenErr = 1,
    /// The QP was inconsistent.
    LocQpOpErr = 2,
    /// The local memory was not registered, or not with that permission.
    LocProtErr = 4,
    /// The QP was in, or went to, the error state before the request was done.
    WrFlushErr = 5,
    /// A memory window could not be bound: window, region, range and permissions do not fit
    /// together.
    MwBindErr = 6,
    /// The peer's response does not fit the request.
    BadRespErr = 7,
    /// The local memory of a receive did not admit the access.
    LocAccessErr = 8,
    /// The peer says the request is invalid: too long for its receive, or not permitted on its QP.
    /// Of a receive: the SEND asked for an invalidation that it may not do; its data was placed.
    RemInvReqErr = 9,
    /// The peer's memory key, range or permission is wrong.
    RemAccessErr = 10,
    /// The peer could not complete the request.
    RemOpErr = 11,
    /// The peer does not answer.
    RetryExcErr = 12,
    /// The peer posted no receive in time.
    RnrRetryExcErr = 13,
    /// The peer aborted the request; not by the software device.
    RemAbortErr = 16,
    /// The device failed; not by the software device.
    FatalErr = 19,
    /// A response took too long; not by the software device.
    RespTimeoutErr = 20,
    /// Something else failed; not by the software device.
    GeneralErr = 21,
}

impl WcStatus {
    /// All, by their numbers.
    pub const ALL: [Self; 17] = [
        Self::Success,
        Self::LocLenErr,
        Self::LocQpOpErr,
        Self::LocProtErr,
        Self::WrFlushErr,
        Self::MwBindErr,
        Self::BadRespErr,
        Self::LocAccessErr,
        Self::RemInvReqErr,
        Self::RemAccessErr,
        Self::RemOpErr,
        Self::RetryExcErr,
        Self::RnrRetryExcErr,
        Self::RemAbortErr,
        Self::FatalErr,
        Self::RespTimeoutErr,
        Self::GeneralErr,
    ];

    /// The name in `verbs.h`, without `IBV_WC_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Success => "SUCCESS",
            Self::LocLenErr => "LOC_LEN_ERR",
            Self::LocQpOpErr => "LOC_QP_OP_ERR",
            Self::LocProtErr => "LOC_PROT_ERR",
            Self::WrFlushErr => "WR_FLUSH_ERR",
            Self::MwBindErr => "MW_BIND_ERR",
            Self::BadRespErr => "BAD_RESP_ERR",
            Self::LocAccessErr => "LOC_ACCESS_ERR",
            Self::RemInvReqErr => "REM_INV_REQ_ERR",
            Self::RemAccessErr => "REM_ACCESS_ERR",
            Self::RemOpErr => "REM_OP_ERR",
            Self::RetryExcErr => "RETRY_EXC_ERR",
            Self::RnrRetryExcErr => "RNR_RETRY_EXC_ERR",
            Self::RemAbortErr => "REM_ABORT_ERR",
            Self::FatalErr => "FATAL_ERR",
            Self::RespTimeoutErr => "RESP_TIMEOUT_ERR",
            Self::GeneralErr => "GENERAL_ERR",
        }
    }
}

impl WcStatus {
    /// Its meaning, in a few words.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Success => "done",
            Self::LocLenErr => "the message does not fit the receive, or is too long",
            Self::LocQpOpErr => "the queue pair was inconsistent",
            Self::LocProtErr => "the local memory is not registered with that permission",
            Self::WrFlushErr => "the queue pair broke before the request was done",
            Self::MwBindErr => "the memory window could not be bound",
            Self::BadRespErr => "the peer's response does not fit the request",
            Self::LocAccessErr => "the local memory of the receive does not admit the access",
            Self::RemInvReqErr => "the peer says that the request is invalid",
            Self::RemAccessErr => "the peer's key, range or permission is wrong",
            Self::RemOpErr => "the peer could not complete the request",
            Self::RetryExcErr => "the peer does not answer",
            Self::RnrRetryExcErr => "the peer posted no receive in time",
            Self::RemAbortErr => "the peer aborted the request",
            Self::FatalErr => "the device failed",
            Self::RespTimeoutErr => "a response took too long",
            Self::GeneralErr => "the device says no more",
        }
    }
}

impl core::error::Error for WcStatus {}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The operation that completed (`enum ibv_wc_opcode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum WcOpcode {
    /// Not known: a device of the kernel does not say which operation failed.
    #[default]
    Unknown,
    /// A SEND.
    Send,
    /// An RDMA WRITE.
    RdmaWrite,
    /// An RDMA READ.
    RdmaRead,
    /// A compare and swap.
    CompSwap,
    /// A fetch and add.
    FetchAdd,
    /// A FLUSH.
    Flush,
    /// An ATOMIC WRITE.
    AtomicWrite,
    /// A memory window was bound.
    BindMw,
    /// A memory window was invalidated.
    LocalInv,
    /// A receive, consumed by a SEND.
    Recv,
    /// A receive, consumed by an RDMA WRITE with immediate.
    RecvRdmaWithImm,
}

impl WcOpcode {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Unknown,
        Self::Send,
        Self::RdmaWrite,
        Self::RdmaRead,
        Self::CompSwap,
        Self::FetchAdd,
        Self::Flush,
        Self::AtomicWrite,
        Self::BindMw,
        Self::LocalInv,
        Self::Recv,
        Self::RecvRdmaWithImm,
    ];

    /// The name in `verbs.h`, without `IBV_WC_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Send => "SEND",
            Self::RdmaWrite => "RDMA_WRITE",
            Self::RdmaRead => "RDMA_READ",
            Self::CompSwap => "COMP_SWAP",
            Self::FetchAdd => "FETCH_ADD",
            Self::Flush => "FLUSH",
            Self::AtomicWrite => "ATOMIC_WRITE",
            Self::BindMw => "BIND_MW",
            Self::LocalInv => "LOCAL_INV",
            Self::Recv => "RECV",
            Self::RecvRdmaWithImm => "RECV_RDMA_WITH_IMM",
        }
    }
}

impl fmt::Display for WcOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A completion queue of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CqId(pub u32);

/// A shared receive queue of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SrqId(pub u32);

/// A completion (`struct ibv_wc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// From the work request.
    pub wr_id: u64,
    /// The result.
    pub status: WcStatus,
    /// The operation, also of a failed request.
    pub opcode: WcOpcode,
    /// Bytes received, or read.
    pub byte_len: u32,
    /// Immediate data, in network byte order.
    pub imm: Option<[u8; 4]>,
    /// The window that the SEND invalidated (`IBV_WC_WITH_INV`).
    pub invalidated: Option<Key>,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The caller's own value for it: [`QpInit::context`](crate::QpInit::context).
    pub context: u64,
    /// The sender of a datagram. If present, the first 40 bytes of the receive hold the datagram's
    /// IP header (`IBV_WC_GRH`) and count in `byte_len`. An IPv4 header is in the last 20 of these
    /// bytes; the others are 0.
    pub sender: Option<Sender>,
    /// Whether an event for solicited completions is due: the sender asked for it, or it is an
    /// error.
    pub solicited: bool,
}

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// The queue pair that sent it.
    pub qpn: Qpn,
    /// Whether it came over IPv4. `false` also if the device does not say.
    pub ipv4: bool,
}

/// An asynchronous event of a queue pair (`enum ibv_event_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpEvent {
    /// The first packet arrived while in RTR.
    CommEst,
    /// In SQD, all requests that had begun are complete (`IBV_EVENT_SQ_DRAINED`).
    SqDrained,
    /// The QP broke and no completion could report it.
    Fatal,
    /// A request violated the protocol (`IBV_EVENT_QP_REQ_ERR`).
    ReqErr,
    /// A request violated a protection (`IBV_EVENT_QP_ACCESS_ERR`).
    AccessErr,
    /// It broke, and takes nothing more from its shared receive queue; the receives it took are
    /// completed (`IBV_EVENT_QP_LAST_WQE_REACHED`).
    LastWqeReached,
}

/// Takes completions, and reports of room in the queues.
pub trait Completions {
    /// Takes one completion. Must not fail: if the queue is full, the caller reports that by
    /// [`Engine::cq_overflow`](crate::Engine::cq_overflow) afterwards.
    fn complete(&mut self, cq: CqId, cqe: Cqe);

    /// `count` send requests of a QP were retired; `cookie` is the QP's.
    fn send_retired(&mut self, cookie: u32, count: u32);

    /// `count` receive requests of a QP's own queue were retired. Receives of a shared queue are
    /// not reported.
    fn recv_retired(&mut self, cookie: u32, count: u32);
}
