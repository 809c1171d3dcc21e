//! A device, whichever provider it is of.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_stack::Budget;
use rocinante_stack::types::Mtu;

use crate::model::device::Limits;
use crate::provider::manager::Manager;
use crate::{kernel, soft};

/// A device of one of the providers.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Soft(Arc<soft::Device>),
    Kernel(Arc<kernel::Device>),
}

impl Device {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Soft(device) => &device.name,
            Self::Kernel(device) => &device.name,
        }
    }

    /// Its connection manager.
    pub(crate) fn manager(&self) -> Arc<dyn Manager> {
        match self {
            Self::Soft(device) => device.clone(),
            Self::Kernel(device) => device.clone(),
        }
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
        match self {
            Self::Soft(device) => &device.limits,
            Self::Kernel(device) => &device.limits,
        }
    }

    pub(crate) fn gids(&self) -> &[IpAddr] {
        match self {
            Self::Soft(device) => &device.gids,
            Self::Kernel(device) => &device.gids,
        }
    }

    pub(crate) fn active_mtu(&self) -> Mtu {
        match self {
            Self::Soft(device) => device.active_mtu,
            Self::Kernel(device) => device.active_mtu,
        }
    }

    /// The receive budget that peers learn.
    pub(crate) fn advertised(&self) -> Budget {
        match self {
            Self::Soft(device) => device.advertised,
            Self::Kernel(device) => device.advertised(),
        }
    }
}
