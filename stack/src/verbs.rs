//! Work requests, completions, queue pair states and events, with the names of `verbs.h`.

use core::fmt;

use crate::mem::Sge;
use crate::types::{Key, Qpn};

/// The transport service of a queue pair (`enum ibv_qp_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QpType {
    /// Reliable connection: everything arrives, once and in order, or the queue pair breaks.
    #[default]
    Rc,
    /// Unreliable connection: SEND and WRITE without acknowledgement; what is lost is lost with its whole message.
    Uc,
    /// Unreliable datagram: messages of one packet, to and from any queue pair that knows the Q_Key.
    Ud,
}

impl QpType {
    /// All, in the order of `verbs.h`.
    pub const ALL: [Self; 3] = [Self::Rc, Self::Uc, Self::Ud];

    /// Whether a queue pair of this type can be asked for `op`.
    #[must_use]
    pub const fn has(self, op: &SendOp) -> bool {
        match self {
            Self::Rc => !matches!(op, SendOp::SendTo { .. }),
            Self::Uc => matches!(op, SendOp::Send { .. } | SendOp::Write { .. }),
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
    /// Ready to send, but no request is begun any more: [`QpEvent::SqDrained`] says when those under way are done.
    Sqd,
    /// A send request of an unreliable queue pair failed: sends are flushed until it is RTS again; receives go on.
    Sqe,
    /// Broken: all work is flushed.
    Err,
}

impl QpState {
    /// All, in the order of `verbs.h`.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err];

    /// Whether the peer's packets are taken.
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }

    /// Whether sends can be posted; in SQE and ERR they are flushed.
    #[must_use]
    pub const fn takes_sends(self) -> bool {
        matches!(self, Self::Rts | Self::Sqd | Self::Sqe | Self::Err)
    }

    /// Whether requests are, or were until now, sent: their responses and timeouts matter.
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

/// An address handle of the engine's, or of a device's: where datagrams go (`struct ibv_ah`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AhId(pub u32);

/// The queue pair that a datagram is for (`wr.ud` of `struct ibv_send_wr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Destination {
    /// On which port.
    pub ah: AhId,
    /// Its number; [`Qpn::MULTICAST`] for those of a group.
    pub qpn: Qpn,
    /// Its Q_Key; with the highest bit set, the sender's own is sent instead.
    pub qkey: u32,
}

/// What a send work request does (`enum ibv_wr_opcode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// SEND, with immediate data (in network byte order) or without.
    Send {
        /// Immediate data.
        imm: Option<[u8; 4]>,
    },
    /// SEND of a datagram, with immediate data (in network byte order) or without.
    SendTo {
        /// To whom.
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
    /// Compare and swap of eight bytes; the value found is placed in the first eight bytes of the list.
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
    /// Fetch and add of eight bytes; the value found is placed in the first eight bytes of the list.
    FetchAdd {
        /// Remote address, a multiple of 8.
        remote: u64,
        /// Remote key.
        rkey: Key,
        /// The value to add.
        add: u64,
    },
}

impl SendOp {
    /// Whether a response carries its result: READ and atomics.
    #[must_use]
    pub const fn has_response(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Its immediate data.
    #[must_use]
    pub const fn immediate(&self) -> Option<[u8; 4]> {
        match self {
            Self::Send { imm } | Self::SendTo { imm, .. } | Self::Write { imm, .. } => *imm,
            Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. } => None,
        }
    }

    /// Whether it is an atomic.
    #[must_use]
    pub const fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// What its completion is called.
    #[must_use]
    pub const fn completion(&self) -> WcOpcode {
        match self {
            Self::Send { .. } | Self::SendTo { .. } => WcOpcode::Send,
            Self::Write { .. } => WcOpcode::RdmaWrite,
            Self::Read { .. } => WcOpcode::RdmaRead,
            Self::CompareSwap { .. } => WcOpcode::CompSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
        }
    }
}

/// The data of a send work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendData<'a> {
    /// Ranges of registered memory: source of SEND and WRITE, destination of READ and atomics.
    Sges(&'a [Sge]),
    /// Bytes copied when posted (`IBV_SEND_INLINE`); SEND and WRITE only.
    Inline(&'a [u8]),
}

/// A send work request (`struct ibv_send_wr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// With which data.
    pub data: SendData<'a>,
    /// Whether success makes a completion (`IBV_SEND_SIGNALED`); errors always do.
    pub signaled: bool,
    /// Whether the receiver shall be woken (`IBV_SEND_SOLICITED`).
    pub solicited: bool,
    /// Whether to wait for all READs and atomics before it (`IBV_SEND_FENCE`).
    pub fence: bool,
}

/// A receive work request (`struct ibv_recv_wr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Where an incoming SEND is placed.
    pub sges: &'a [Sge],
}

/// Status of a completion (`enum ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcStatus {
    /// Done.
    Success = 0,
    /// The receive was too small for the message, or the message too long for the protocol.
    LocLenErr = 1,
    /// The QP was inconsistent.
    LocQpOpErr = 2,
    /// The local memory was not registered, or not with that permission.
    LocProtErr = 4,
    /// The QP was in, or went to, the error state before the request was done.
    WrFlushErr = 5,
    /// A memory window could not be bound; not by the software device.
    MwBindErr = 6,
    /// The peer's response was not what the request asked for.
    BadRespErr = 7,
    /// The local memory of a receive did not admit the access.
    LocAccessErr = 8,
    /// The peer says the request is invalid: too long for its receive, not permitted on its QP.
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

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What completed (`enum ibv_wc_opcode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WcOpcode {
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
    /// A receive, consumed by a SEND.
    Recv,
    /// A receive, consumed by an RDMA WRITE with immediate.
    RecvRdmaWithImm,
}

/// A completion queue of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CqId(pub u32);

/// A shared receive queue of an engine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SrqId(pub u32);

/// A completion (`struct ibv_wc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// From the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was; meaningless unless `status` is success.
    pub opcode: WcOpcode,
    /// Bytes received, or read.
    pub byte_len: u32,
    /// Immediate data, in network byte order.
    pub imm: Option<[u8; 4]>,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The sender of a datagram. Then the first 40 bytes of the receive have its IP header (`IBV_WC_GRH`) and count in `byte_len`: over
    /// IPv4 in their last 20 bytes, the others being 0.
    pub src_qp: Option<Qpn>,
    /// Whether an event for solicited completions is due: the sender asked for it, or it is an error.
    pub solicited: bool,
}

/// An asynchronous event of a queue pair (`enum ibv_event_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QpEvent {
    /// The first packet arrived while in RTR.
    CommEst,
    /// In SQD, all requests that were begun are complete (`IBV_EVENT_SQ_DRAINED`).
    SqDrained,
    /// The QP broke and no completion could say so.
    Fatal,
    /// A request violated the protocol (`IBV_EVENT_QP_REQ_ERR`).
    ReqErr,
    /// A request violated a protection (`IBV_EVENT_QP_ACCESS_ERR`).
    AccessErr,
    /// It broke, and takes nothing more from its shared receive queue; what it had taken is completed
    /// (`IBV_EVENT_QP_LAST_WQE_REACHED`).
    LastWqeReached,
}

/// Where completions go, and who hears of room in the queues.
pub trait Completions {
    /// Takes one completion. Must not fail: a caller whose queue is full reports it by
    /// [`Engine::cq_overflow`](crate::Engine::cq_overflow) afterwards.
    fn complete(&mut self, cq: CqId, cqe: Cqe);

    /// `count` send requests of the QP whose owner's cookie this is were retired.
    fn send_retired(&mut self, cookie: u64, count: u32);

    /// `count` receive requests of its own queue were retired; of a shared receive queue's nobody is told.
    fn recv_retired(&mut self, cookie: u64, count: u32);
}
