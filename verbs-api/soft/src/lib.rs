//! The device in software: an engine and a port instead of a card. It has its values ([`model`])
//! and the parts that a provider is made of ([`provider`]), which the kernel's devices share.
//!
//! The fronts (`rocinante`) and the C ABI (`rocinante-capi`) stand on this crate. It is a part of
//! `rocinante`: programs use that.

// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// The parts have names; the values, which programs see, have documentation.
#![allow(missing_docs)]
// Only this project calls them.
#![allow(clippy::new_without_default, clippy::len_without_is_empty)]

mod ah;
mod announce;
#[cfg(test)]
mod announce_tests;
mod charge;
mod choice;
mod clock;
mod cm;
mod cork;
mod cq;
mod device;
mod drivers;
pub mod environment;
mod events;
#[cfg(test)]
mod events_tests;
mod exit;
pub mod faults;
mod flood;
mod front;
mod gids;
mod groups;
mod gsi_paths;
mod host;
mod io;
#[cfg(test)]
mod limits_tests;
mod mail;
#[warn(missing_docs)]
pub mod model;
mod mr;
mod mw;
mod neighbours;
#[cfg(test)]
mod neighbours_tests;
mod opens;
mod others;
#[cfg(test)]
mod others_tests;
mod owner;
mod pin;
mod posting;
mod prepared;
mod progress;
pub mod provider;
mod publish;
mod qp;
mod recognition;
mod rivals;
mod router;
mod run_stats;
mod shard;
mod shards;
mod sidr;
mod slice;
mod srq;
mod staging;
mod tuning;
mod wishes;

use rocinante_stack::Engine;

pub use self::ah::Ah;
pub use self::charge::least;
pub use self::choice::BackendChoice;
pub use self::cq::{Channel, Cq, Sleep};
pub use self::device::{Counted, Device, Hca, Pd, active_mtu, attributes};
pub use self::events::Inbox;
pub use self::exit::send_held_at_once;
pub use self::gids::GidTable;
pub use self::mr::{Change, Registration};
pub use self::mw::Window;
pub use self::opens::{Key, open};
pub use self::others::SHARDS_MAX;
pub use self::owner::Owner;
pub use self::prepared::Prepared;
pub use self::qp::{Qp, QpInitAttr};
pub use self::srq::Srq;
pub use self::wishes::{
    FAULTS_ARE_ON, KEEP_ALIVE_VARIABLE, NETDEV_VARIABLE, SHARDS_VARIABLE, Settings, Wishes,
};
use crate::model::error::VerbsError;

/// The error for a device whose interface is gone.
fn gone() -> VerbsError {
    VerbsError::Io(std::io::Error::other(
        "the interface is gone: close all contexts of the device, and open it again",
    ))
}
