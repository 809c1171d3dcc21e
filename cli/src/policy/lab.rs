//! The two networks of the matrix.

use std::fmt;
use std::net::IpAddr;

use rocinante_lab::{Container, Lab, LabConfig, LabError, Netns};
use serde::Serialize;

use super::table::{End, Place, Topology};
use crate::workers::{RECEIVER, SENDER};

/// The family of the addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Family {
    /// IPv4.
    #[serde(rename = "ipv4")]
    V4,
    /// IPv6.
    #[serde(rename = "ipv6")]
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Its name in rules of nftables.
    #[must_use]
    pub const fn nft(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// A host with its containers.
pub(super) fn network(topology: Topology) -> Result<Lab, LabError> {
    match topology {
        Topology::Bridged => Lab::new(&LabConfig::default()),
        Topology::Routed => Lab::routed(&LabConfig { containers: 3, ..LabConfig::default() }),
    }
}

/// The address of a container.
pub(super) fn address(network: &Lab, index: usize, family: Family) -> IpAddr {
    network.container(index).address(family == Family::V6)
}

/// The namespace at a place.
pub(super) fn netns(network: &Lab, place: Place) -> &Netns {
    match place {
        Place::Host => network.host(),
        Place::Sender => network.container(SENDER).netns(),
        Place::Receiver => network.container(RECEIVER).netns(),
    }
}

/// The name of an interface.
pub(super) fn device(network: &Lab, end: End) -> &str {
    match end {
        End::Sender => network.container(SENDER).host_end(),
        End::Receiver => network.container(RECEIVER).host_end(),
        End::Own => Container::DEVICE,
    }
}
