//! The RoCEv2 engine of Rocinante, without any input or output of its own.
//!
//! Bytes and the time go in, bytes, completions and the next deadline come out. There is no clock, socket, thread or source of
//! randomness in this crate; given the same inputs at the same times it does the same, byte for byte. It builds
//! for `wasm32-unknown-unknown`, which proves the point.
//!
//! - [`types`]: the integers of the wire, each with its own type;
//! - [`wire`]: headers, the opcode table, the ICRC.
#![forbid(unsafe_code)]

pub mod types;
pub mod wire;
