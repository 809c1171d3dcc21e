//! Devices: their list, opening one, and its attributes.
//!
//! A device in software is a network interface ([`Interface`]) with the backend that carries its
//! packets ([`Backend`]). A device of the kernel ([`HardwareDevice`]) is a card or Soft-RoCE.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use rocinante_kernel as kernel;
#[doc(inline)]
pub use rocinante_kernel::{HardwareDevice, HardwareGid, HardwarePort, hardware_devices};
pub use rocinante_netdev::{
    Backend, Capabilities, Interface, OpenError, PacketConfig, PortConfig, UdpConfig, XdpConfig,
};
use rocinante_soft as soft;
#[doc(hidden)]
pub use rocinante_soft::environment;
#[doc(inline)]
pub use rocinante_soft::faults::{FAULT_LOG_VARIABLE, FAULT_VARIABLE};
#[doc(inline)]
pub use rocinante_soft::model::device::{
    Atomics, DeviceAttr, HardwareAttr, Limits, MwSupport, OptionalOperations, Provider,
};
#[doc(inline)]
pub use rocinante_soft::model::error::HardwareError;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::gid_at;
use rocinante_soft::provider::manager::Manager;
pub use rocinante_soft::{KEEP_ALIVE_VARIABLE, NETDEV_VARIABLE, SHARDS_VARIABLE};
use rocinante_stack::Budget;
use rocinante_stack::types::{Mtu, QueueKind};

pub use crate::open::{AGENT_VARIABLE, DEVICE_VARIABLE};

/// The interfaces that can be opened as devices in software: those that are up and have an address.
///
/// ```
/// fn main() -> std::io::Result<()> {
///     for interface in rocinante::device::software_devices()? {
///         assert!(interface.up);
///         println!("{}: {:?}", interface.name, interface.addresses);
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
/// The kernel does not list its interfaces.
pub fn software_devices() -> io::Result<Vec<Interface>> {
    let mut all = Interface::all()?;
    all.retain(|interface| interface.up && !interface.addresses.is_empty());
    Ok(all)
}

/// A device of one of the providers.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Soft(Arc<soft::Device>),
    Kernel(Arc<kernel::Device>),
}

impl Device {
    pub(crate) fn name(&self) -> &str {
        on!(Self, self, device => &device.name)
    }

    /// Its connection manager.
    pub(crate) fn manager(&self) -> Arc<dyn Manager> {
        on!(Self, self, device => device.clone())
    }

    /// Whether both are of one context.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Soft(device), Self::Soft(other)) => Arc::ptr_eq(device, other),
            (Self::Kernel(device), Self::Kernel(other)) => Arc::ptr_eq(device, other),
            _ => false,
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        on!(Self, self, device => &device.limits)
    }

    pub(crate) fn gids(&self) -> &[IpAddr] {
        on!(Self, self, device => &device.gids)
    }

    pub(crate) fn gid_table(&self) -> Vec<Option<IpAddr>> {
        match self {
            Self::Soft(device) => device.gid_table(),
            Self::Kernel(device) => device.gids.iter().copied().map(Some).collect(),
        }
    }

    /// The address that packets leave from, by its index.
    pub(crate) fn local(&self, sgid_index: usize) -> Result<IpAddr, VerbsError> {
        match self {
            Self::Soft(device) => device.local(sgid_index),
            Self::Kernel(device) => gid_at(&device.gids, sgid_index),
        }
    }

    pub(crate) fn active_mtu(&self) -> Mtu {
        on!(Self, self, device => device.active_mtu)
    }

    /// The announcement of the receive queue to peers: its budget and its kind.
    pub(crate) fn advertised(&self) -> (Budget, Option<QueueKind>) {
        match self {
            Self::Soft(device) => (device.advertised, Some(device.queue)),
            Self::Kernel(device) => device.advertised(),
        }
    }
}
