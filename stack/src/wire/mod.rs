//! The wire: headers as values, one opcode table, the ICRC. Bytes in, value out; nothing
//! half-checked.

mod alive;
pub mod bth;
pub mod cm;
pub mod ext;
pub mod icrc;
pub mod mad;
pub mod opcode;
mod packet;
mod recognition;

pub use alive::{AliveMad, Pairs};
pub use bth::Bth;
pub use ext::{AckKind, Aeth, AtomicEth, Deth, Feth, NakCode, Reth, Syndrome};
pub use icrc::solver::Solver;
pub use icrc::{ICRC_LEN, IpFields};
pub use mad::{MadBytes, MadError, MadHeader};
pub use opcode::{Ext, Opcode, OpcodeInfo, Operation, Place, Service};
pub use packet::{Packet, WireError};
pub use recognition::{Introduction, RecognitionMad};
