//! The software provider: an engine and a port instead of a card.

mod ah;
mod announce;
#[cfg(test)]
mod announce_tests;
mod cm;
mod cork;
mod cq;
mod density;
mod device;
mod events;
mod exit;
mod flood;
mod front;
mod gids;
mod groups;
mod gsi_paths;
mod host;
mod introduce;
#[cfg(test)]
mod introduce_tests;
mod mail;
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
mod progress;
mod qp;
mod rivals;
mod shard;
mod shards;
mod sidr;
mod sink;
mod slice;
mod srq;
mod staging;
#[cfg(test)]
mod two_tests;

use rocinante_stack::Engine;

pub(crate) use self::ah::Ah;
pub(crate) use self::cq::{Channel, Cq};
pub(crate) use self::device::{Counted, Device, Hca, Pd, Settings, active_mtu, attributes};
pub(crate) use self::events::Inbox;
pub(crate) use self::exit::send_held_at_once;
pub(crate) use self::gids::GidTable;
pub(crate) use self::mr::{Change, Registration};
pub(crate) use self::mw::Window;
pub(crate) use self::opens::{Key, open};
pub(crate) use self::others::SHARDS_MAX;
pub(crate) use self::owner::Owner;
pub(crate) use self::qp::{Qp, QpInitAttr};
pub(crate) use self::srq::Srq;
use crate::model::error::VerbsError;

/// The error for a device whose interface is gone.
fn gone() -> VerbsError {
    VerbsError::Io(std::io::Error::other(
        "the interface is gone: close all contexts of the device, and open it again",
    ))
}
