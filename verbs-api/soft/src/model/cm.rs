//! Values of the connection manager.

use std::fmt;

use rocinante_stack::cm::CmError;
use rocinante_stack::wire::cm::{RejReason, SidrStatus};
use rustix::io::Errno;

/// The default Q_Key of `librdmacm` programs for datagrams and multicast (`RDMA_UDP_QKEY`).
pub const UDP_QKEY: u32 = 0x0123_4567;

/// Why a connection failed or ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmFailure {
    /// The peer rejected it (`ECONNREFUSED`).
    Rejected {
        /// The reason.
        reason: RejReason,
        /// The data of the peer's program: 148 bytes, zeros behind its end.
        private_data: Vec<u8>,
    },
    /// The peer gave up, or ended the connection (`ECONNRESET`).
    Ended,
    /// The peer has no queue pair for the datagrams of this service (`ECONNREFUSED`).
    Unresolved {
        /// The reason.
        status: SidrStatus,
        /// The data of the peer's program: 136 bytes, zeros behind its end.
        private_data: Vec<u8>,
    },
    /// The call is not possible: the port is in use (`EADDRINUSE`), private data is too long, or
    /// there are too many connections.
    Call(CmError),
}

impl CmFailure {
    pub(crate) fn errno(&self) -> Errno {
        match self {
            Self::Rejected { .. } | Self::Unresolved { .. } => Errno::CONNREFUSED,
            Self::Ended => Errno::CONNRESET,
            Self::Call(CmError::InUse) => Errno::ADDRINUSE,
            Self::Call(CmError::Full) => Errno::NOMEM,
            Self::Call(_) => Errno::INVAL,
        }
    }
}

impl fmt::Display for CmFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected { reason, .. } => {
                write!(f, "the peer rejects the connection: {reason}")?;
                match *reason {
                    RejReason::INVALID_SERVICE_ID => f.write_str(
                        ": start the server first, and give both sides the same address and port",
                    ),
                    RejReason::STALE_CONNECTION => f.write_str(": try again with a new queue pair"),
                    RejReason::NO_RESOURCES => {
                        f.write_str(": its backlog is full, try again or raise it")
                    }
                    RejReason::INVALID_MTU => f.write_str(": ask for a smaller path MTU"),
                    _ => Ok(()),
                }
            }
            Self::Unresolved { status, .. } => {
                write!(f, "the peer names no queue pair for datagrams: {status}")?;
                match *status {
                    SidrStatus::UNSUPPORTED => f.write_str(
                        ": start the server first, and give both sides the same address and port",
                    ),
                    _ => Ok(()),
                }
            }
            Self::Ended => f.write_str("the peer has ended the connection"),
            Self::Call(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CmFailure {}
