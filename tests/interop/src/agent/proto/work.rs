//! Work requests and completions.

use serde::{Deserialize, Serialize};

use super::{Opcode, Range};

/// A send request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Send {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: Op,
    /// The local bytes.
    pub ranges: Vec<Range>,
    /// Whether to copy the bytes when the request is posted.
    pub inline: bool,
    /// Whether success makes a completion.
    pub signaled: bool,
    /// Whether to raise a solicited event at the receiver.
    pub solicited: bool,
    /// Whether to wait for earlier READs and atomics.
    pub fence: bool,
}

/// The operation of a send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Op {
    /// SEND, perhaps with immediate.
    Send { imm: Option<u32> },
    /// SEND that invalidates a window of the receiver.
    SendInv { rkey: u32 },
    /// Invalidate a window of this side.
    LocalInv { rkey: u32 },
    /// SEND of a datagram: along an address handle, to a queue pair there.
    SendTo { handle: usize, qpn: u32, qkey: u32, imm: Option<u32> },
    /// WRITE, perhaps with immediate.
    Write { remote: u64, rkey: u32, imm: Option<u32> },
    /// READ.
    Read { remote: u64, rkey: u32 },
    /// Compare and swap.
    CompareSwap { remote: u64, rkey: u32, compare: u64, swap: u64 },
    /// Fetch and add.
    FetchAdd { remote: u64, rkey: u32, add: u64 },
    /// FLUSH: bits of the placement, and whether the whole region is meant.
    Flush { remote: u64, rkey: u32, len: u32, placement: u8, region: bool },
    /// ATOMIC WRITE.
    AtomicWrite { remote: u64, rkey: u32 },
}

/// A completion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    /// From the work request.
    pub wr_id: u64,
    /// The number of the queue pair on the wire.
    pub qpn: u32,
    /// The name in `verbs.h`, without `IBV_WC_`.
    pub status: String,
    /// The operation; only meaningful for a success.
    #[serde(with = "opcode")]
    pub opcode: Opcode,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// The key that the SEND invalidated (`IBV_WC_WITH_INV`).
    pub invalidated: Option<u32>,
    /// The queue pair that sent the datagram. The first 40 bytes of the receive are then its IP
    /// header, and count as received.
    pub source: Option<u32>,
}

/// [`Opcode`] by its name.
mod opcode {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Opcode;

    pub(super) fn serialize<S: Serializer>(opcode: &Opcode, to: S) -> Result<S::Ok, S::Error> {
        opcode.name().serialize(to)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Opcode, D::Error> {
        let name = String::deserialize(from)?;
        let found = Opcode::ALL.into_iter().find(|opcode| opcode.name() == name);
        found.ok_or_else(|| D::Error::custom(name))
    }
}

/// `LOCAL_WRITE`, the first of the bits of `IBV_ACCESS_*`.
pub const LOCAL_WRITE: u32 = 1;
/// `REMOTE_WRITE`.
pub const REMOTE_WRITE: u32 = 2;
/// `REMOTE_READ`.
pub const REMOTE_READ: u32 = 4;
/// `REMOTE_ATOMIC`.
pub const REMOTE_ATOMIC: u32 = 8;
/// `MW_BIND`.
pub const MW_BIND: u32 = 16;
/// `ZERO_BASED`.
pub const ZERO_BASED: u32 = 32;
/// `FLUSH_GLOBAL`.
pub const FLUSH_GLOBAL: u32 = 1 << 8;
/// `FLUSH_PERSISTENT`.
pub const FLUSH_PERSISTENT: u32 = 1 << 9;
/// All bits but those of windows and FLUSH.
pub const ALL: u32 = 15;
