//! Frames in, frames out: the ways a RoCEv2 datagram reaches the kernel and comes back.
//!
//! A [`Port`] moves the payloads of UDP datagrams to and from port 4791. It knows nothing of their
//! contents: neither queue pairs, nor the transport's headers. Its contract is that of [`Port`],
//! its backends are [`UdpPort`], [`PacketPort`], [`XdpPort`] and [`sim`], and [`auto`] chooses one.
//! [`Parts`] open a port in two steps, of which only the first needs privileges.

mod any;
pub mod auto;
mod bpf;
mod call;
mod config;
mod denied;
mod error;
mod ethtool;
mod fd;
mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
mod group_tests;
pub mod handed;
mod headers;
#[doc(hidden)]
pub mod host;
mod iface;
mod inherited;
mod names;
mod next_hop;
mod packet;
mod parts;
#[cfg(test)]
mod parts_tests;
#[cfg(test)]
mod path_tests;
mod policy;
mod port;
#[cfg(test)]
mod rails_tests;
mod recent;
mod resolve;
mod rights;
mod rtnl;
#[cfg(test)]
mod scarcity_tests;
mod shared;
#[cfg(test)]
mod sides;
pub mod sim;
mod steering;
pub mod sysfs;
mod tcx;
#[cfg(test)]
mod testns;
mod tuning;
mod udp;
mod watch;
mod xdp;

pub use any::AnyPort;
pub use config::{PacketConfig, PortConfig, Shards, UdpConfig, XdpConfig};
pub use error::OpenError;
pub use fd::{apart, keep_from_children};
pub use frame::FramePort;
pub use iface::{Interface, Unusable, WhyUnusable, gid_table_len};
pub use names::{DEVICES_VARIABLE, NamedInterface, Names, follow_gids, named_interfaces};
pub use next_hop::NextHop;
pub use packet::PacketPort;
pub use parts::{BackendParts, Descriptor, Manifest, Parts};
pub use policy::{Unlisted, unlisted_rules};
pub use port::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, QueueKind, ROCE_PORT,
    Runs, RxBudget, RxDatagram, RxIpId, TxFailure, TxSlot,
};
pub use shared::{
    Delivery, Errand, GUARDIAN_VARIABLE, Guardian, Left, NOTE_BYTES, PortClaim, Slots,
};
#[doc(hidden)]
pub use tcx::{TcxDepartures, TcxDrop, tcx_programs};
pub use udp::{UdpPort, holder};
pub use watch::InterfaceWatch;
pub use xdp::XdpPort;
