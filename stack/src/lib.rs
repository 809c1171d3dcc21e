//! The RoCEv2 engine of Rocinante, without any input or output of its own.
//!
//! Bytes and the time go in; bytes, completions and the next deadline come out. This crate has no
//! clock, socket, thread or source of randomness. Given the same inputs at the same times it does
//! the same, byte for byte. It builds for `wasm32-unknown-unknown`, which proves the point.
//!
//! - [`types`]: the integers of the wire, each with its own type;
//! - [`wire`]: headers, the opcode table, the ICRC;
//! - [`mem`]: memory regions and windows, keys, and the proof that an access was checked;
//! - [`verbs`]: work requests and completions;
//! - [`cm`]: the connection manager;
//! - [`Engine`]: the queue pairs. The part that all have in common is in `qp/`, reliable
//!   connections are in `rc/`, with one file per role, the other services in `unreliable/`.

#![forbid(unsafe_code)]

mod ah;
mod allowance;
mod any;
mod budget;
pub mod cm;
mod contacts;
mod engine;
mod events;
mod footprint;
mod groups;
mod gsi;
mod ids;
mod ingress;
pub mod mem;
mod pacing;
mod peer;
mod qp;
mod rc;
mod recognition;
mod ring;
mod shared;
mod sink;
mod srq;
pub mod stats;
mod timer;
mod tuning;
mod unreliable;
pub mod verbs;

pub use rocinante_wire as wire;
pub use rocinante_wire::types;

pub use allowance::Allowance;
pub use budget::Budget;
pub use engine::{Engine, Transmitted, TxStop};
pub use footprint::Footprint;
pub use groups::GroupError;
pub use gsi::{Addressee, addressee};
pub use ingress::{Datagram, IpId};
pub use pacing::Pacing;
pub use peer::{PeerKind, RunLimits};
pub use qp::Urgency;
pub use qp::attr::{AltPath, ModifyError, PathMigState, PeerAddress, QpAttr, QpInit};
pub use qp::post::{MESSAGE_MAX, PostError, SendLimits, check_recv};
pub use recognition::HandOff;
pub use shared::EngineConfig;
pub use sink::TxSink;
pub use srq::{SrqAttr, SrqChange, SrqError, SrqInit};
pub use tuning::engine::{ACK_DELAY_NS, GROUPS_MAX, MEMBERS_MAX};
pub use unreliable::grh_addresses;
pub use verbs::Completions;
