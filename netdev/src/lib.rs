//! Frames in, frames out: the ways a RoCEv2 datagram reaches the kernel and comes back.
//!
//! A [`Port`] moves the payloads of UDP datagrams to and from port 4791. It knows nothing of their
//! contents: neither queue pairs, nor the transport's headers. Its contract is that of [`Port`],
//! its backends are [`UdpPort`], [`PacketPort`], [`XdpPort`] and [`sim`], and [`auto`] chooses one.
//! [`Parts`] open a port in two steps, of which only the first needs privileges.

mod choose;
mod devices;
pub mod fault;
mod frames;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod handed;
mod kernel;
mod port;
mod sharing;
pub mod sim;
#[cfg(test)]
mod testing;
mod tuning;
mod udp;

/// The kernel's objects for `rocinante-agent`. No part of the API.
#[doc(hidden)]
pub mod for_agent {
    pub use crate::choose::policy::nft_at_ingress;
    pub use crate::frames::packet::send_frame;
    pub use crate::kernel::{bpf, descriptors, namespaces, rtnl};
}

/// The UDP destination port of RoCEv2 (IANA `ri-oce`), in both directions.
pub const ROCE_PORT: u16 = 4791;

pub use choose::any::AnyPort;
pub use choose::auto;
pub use choose::faulty::Seal;
#[doc(hidden)]
pub use choose::give::{GiveLimits, Given, give};
pub use choose::policy::{Unlisted, unlisted_rules};
pub use devices::interfaces::gid_table_len;
pub use devices::names::{DEVICES_VARIABLE, NamedInterface, Names, follow_gids, named_interfaces};
pub use devices::sysfs;
pub use frames::FramePort;
pub use frames::packet::PacketPort;
#[doc(hidden)]
pub use frames::packet::{Capture, Captured, Direction, Kept, Run, Wanted, keep_again};
pub use frames::xdp::XdpPort;
pub use kernel::descriptors::{apart, keep_from_children};
pub use kernel::interface::{Interface, Unusable, WhyUnusable};
#[doc(hidden)]
pub use kernel::of_process::OfProcess;
#[doc(hidden)]
pub use kernel::silent::write as write_without_signal;
pub use kernel::tcx::{TcxDepartures, TcxDrop, tcx_programs};
pub use kernel::watch::{InterfaceWatch, InterfacesWatch};
pub use kernel::worded::{errno, worded};
pub use port::config::{PacketConfig, PortConfig, Shards, UdpConfig, XdpConfig};
pub use port::contract::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, QueueKind, Runs,
    RxBudget, RxDatagram, RxIpId, TxFailure, TxSlot,
};
pub use port::error::OpenError;
pub use port::parts::{BackendParts, Manifest, Parts, SharedSockets};
pub use sharing::{
    Delivery, Errand, GUARDIAN_VARIABLE, Guardian, Left, NOTE_BYTES, PortClaim, Slots,
    close_elsewhere, container_limits,
};
pub use udp::next_hop::NextHop;
pub use udp::{UdpPort, holder};
