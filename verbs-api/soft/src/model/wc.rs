//! Completions.

use std::fmt;
use std::net::IpAddr;

use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{Cqe, WcOpcode, WcStatus};

/// A completion (`struct ibv_wc`). The default one stands for none, to make room for
/// `Cq::poll`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Wc {
    /// From the work request.
    pub wr_id: u64,
    /// The result.
    pub status: WcStatus,
    /// The operation. A device of the kernel does not say which operation failed: then it is
    /// [`WcOpcode::Unknown`].
    pub opcode: WcOpcode,
    /// Bytes received, or read.
    pub byte_len: u32,
    /// Immediate data, in network byte order.
    pub imm: Option<[u8; 4]>,
    /// The window that the SEND invalidated (`IBV_WC_WITH_INV`).
    pub invalidated: Option<Key>,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The program's own value for that queue pair:
    /// `QpBuilder::context`.
    pub context: u64,
    /// The sender of a datagram. If present, the first 40 bytes of the receive hold the datagram's
    /// IP header (`IBV_WC_GRH`) and count in `byte_len`. An IPv4 header is in the last 20 of these
    /// bytes; the others are 0.
    pub src_qp: Option<Qpn>,
    /// Where the peer of a connection is, if the request failed and the queue pair still exists.
    pub peer: Option<IpAddr>,
}

impl Wc {
    /// The completion itself if it is a success, else an error that says which request of which
    /// queue pair failed, and how.
    ///
    /// # Errors
    /// [`WcError`] unless the status is success.
    #[inline]
    pub fn ok(self) -> Result<Self, WcError> {
        match self.status {
            WcStatus::Success => Ok(self),
            status => {
                let Self { wr_id, opcode, qpn, context, peer, .. } = self;
                Err(WcError { status, wr_id, opcode, qpn, context, peer, is_numbered: true })
            }
        }
    }

    /// The immediate data as `SendWr::imm` sent it: a number that travelled
    /// in network byte order.
    #[must_use]
    #[inline]
    pub fn imm_data(&self) -> Option<u32> {
        self.imm.map(u32::from_be_bytes)
    }

    #[inline]
    #[doc(hidden)]
    pub fn of(cqe: Cqe) -> Self {
        let Cqe { wr_id, status, opcode, byte_len, imm, invalidated, qpn, context, sender, .. } =
            cqe;
        let src_qp = sender.map(|sender| sender.qpn);
        Self { wr_id, status, opcode, byte_len, imm, invalidated, qpn, context, src_qp, peer: None }
    }
}

/// A work request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WcError {
    /// How.
    pub status: WcStatus,
    /// From the work request.
    pub wr_id: u64,
    /// The operation; [`WcOpcode::Unknown`] for a device of the kernel.
    pub opcode: WcOpcode,
    /// The queue pair.
    pub qpn: Qpn,
    /// The program's own value for that queue pair.
    pub context: u64,
    /// Where the peer of the connection is.
    pub peer: Option<IpAddr>,
    /// Whether the program gave the request its number.
    is_numbered: bool,
}

impl WcError {
    /// Of a request that the program gave no number.
    #[doc(hidden)]
    pub fn without_number(self) -> Self {
        Self { is_numbered: false, ..self }
    }
}

impl fmt::Display for WcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, wr_id, opcode, qpn, peer, is_numbered, .. } = self;
        match opcode {
            WcOpcode::Unknown => f.write_str("request")?,
            opcode => write!(f, "{opcode}")?,
        }
        if *is_numbered {
            write!(f, " {wr_id}")?;
        }
        write!(f, " of queue pair {qpn}")?;
        if let Some(peer) = peer {
            write!(f, " with {peer}")?;
        }
        write!(f, ": {status}: {}", status.meaning())
    }
}

/// It has no source: its own text says how the request failed.
impl std::error::Error for WcError {}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_failed_completion_is_an_error_that_names_everything() {
        let good = Wc { wr_id: 7, imm: Some([0, 0, 1, 2]), ..Wc::default() };
        assert_eq!((good.ok(), good.imm_data()), (Ok(good), Some(0x0102)));
        let status = WcStatus::RetryExcErr;
        let (qpn, peer) = (Qpn::new(0x12), Some(IpAddr::from([10, 0, 0, 2])));
        let bad = Wc { status, qpn, peer, context: 9, opcode: WcOpcode::RdmaWrite, ..good };
        let error = bad.ok().unwrap_err();
        assert_eq!((error.status, error.wr_id, error.context), (status, 7, 9));
        let text = "RDMA_WRITE 7 of queue pair 0x000012 with 10.0.0.2: RETRY_EXC_ERR: the peer does not answer";
        assert_eq!(error.to_string(), text);
        assert!(error.source().is_none());
        let text = text.replace("RDMA_WRITE 7", "RDMA_WRITE");
        assert_eq!(error.without_number().to_string(), text);
        let unknown = Wc { opcode: WcOpcode::Unknown, peer: None, ..bad }.ok().unwrap_err();
        assert!(unknown.to_string().starts_with("request 7 of queue pair 0x000012: RETRY"));
    }
}
