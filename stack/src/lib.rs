//! The RoCEv2 engine of Rocinante, without any input or output of its own.
//!
//! Bytes and the time go in, bytes, completions and the next deadline come out. There is no clock, socket, thread or source of
//! randomness in this crate; given the same inputs at the same times it does the same, byte for byte. It builds
//! for `wasm32-unknown-unknown`, which proves the point.
//!
//! - [`types`]: the integers of the wire, each with its own type;
//! - [`wire`]: headers, the opcode table, the ICRC;
//! - [`mem`]: memory regions, keys, and the proof that an access was checked;
//! - [`verbs`]: work requests and completions;
//! - [`cm`]: the connection manager;
//! - [`Engine`]: the queue pairs, with one file per role in `rc/`.

#![forbid(unsafe_code)]

pub mod cm;
mod engine;
mod gsi;
mod ingress;
pub mod mem;
mod pool;
mod rc;
pub mod stats;
mod timer;
pub mod types;
pub mod verbs;
pub mod wire;

pub use engine::{Engine, EngineConfig, TxSink, TxStop};
pub use ingress::{Datagram, IpId};
pub use pool::Budget;
pub use rc::attr::{ModifyError, PeerAddress, QpAttr, QpInit};
pub use rc::sq::PostError;
pub use verbs::Completions;
