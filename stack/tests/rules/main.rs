//! Rules by their class: each kind of packet against each rule about packets, two of every numbered
//! object, each refused call, each error more often than there are buffers, each numeric field at
//! its smallest and greatest value.

#[path = "../common/mod.rs"]
mod common;
mod errors;
mod kinds;
mod marks;
mod numbers;
mod packets;
mod refusals;
mod reuse;
mod values;
