//! The wire of RoCEv2: headers as values, one opcode table, the ICRC, and the messages of the
//! connection manager.
//!
//! Bytes in, value out; nothing half-checked. This crate has no state and no input or output. The
//! engine (`rocinante-stack`) stands on it, and so does everything that only reads packets.
//!
//! - [`types`]: the integers of the wire, each with its own type;
//! - [`bth`], [`ext`], [`opcode`]: the headers;
//! - [`icrc`]: the invariant CRC;
//! - [`mad`], [`cm`]: management datagrams.

#![forbid(unsafe_code)]

mod alive;
pub mod bth;
pub mod cm;
pub mod ext;
pub mod icrc;
pub mod mad;
pub mod opcode;
mod packet;
mod recognition;
pub mod types;
mod vendor;

pub use alive::{AliveMad, Pairs};
pub use bth::Bth;
pub use ext::{AckKind, Aeth, AtomicEth, Deth, Feth, NakCode, Reth, Syndrome};
pub use icrc::solver::Solver;
pub use icrc::{ICRC_LEN, IpFields};
pub use mad::{MadBytes, MadError, MadHeader};
pub use opcode::{Ext, Opcode, OpcodeInfo, Operation, Place, Service};
pub use packet::{Packet, WireError};
pub use recognition::{PeerInfo, RecognitionMad};
