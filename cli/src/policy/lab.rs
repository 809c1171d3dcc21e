//! The two networks of the matrix.

use std::fmt;
use std::net::IpAddr;

use rocinante_lab::{Container, Lab, LabConfig, LabError, Netns, Routed};
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
pub(super) enum Network {
    Bridged(Lab),
    Routed(Routed),
}

impl Network {
    pub(super) fn new(topology: Topology) -> Result<Self, LabError> {
        let config = LabConfig { containers: 3, ..LabConfig::default() };
        Ok(match topology {
            Topology::Bridged => Self::Bridged(Lab::new(&LabConfig { containers: 2, ..config })?),
            Topology::Routed => Self::Routed(Routed::new(&config)?),
        })
    }

    pub(super) fn host(&self) -> &Netns {
        match self {
            Self::Bridged(lab) => lab.host(),
            Self::Routed(routed) => routed.host(),
        }
    }

    pub(super) fn containers(&self) -> &[Container] {
        match self {
            Self::Bridged(lab) => lab.containers(),
            Self::Routed(routed) => routed.containers(),
        }
    }

    /// The address of a container.
    pub(super) fn address(&self, index: usize, family: Family) -> IpAddr {
        let container = &self.containers()[index];
        match (family, container.ipv6()) {
            (Family::V6, Some(address)) => address.into(),
            _ => container.ipv4().into(),
        }
    }

    /// The namespace at a place.
    pub(super) fn netns(&self, place: Place) -> &Netns {
        match place {
            Place::Host => self.host(),
            Place::Sender => self.containers()[SENDER].netns(),
            Place::Receiver => self.containers()[RECEIVER].netns(),
        }
    }

    /// The name of an interface.
    pub(super) fn device(&self, end: End) -> &str {
        match end {
            End::Sender => self.containers()[SENDER].host_end(),
            End::Receiver => self.containers()[RECEIVER].host_end(),
            End::Own => Container::DEVICE,
        }
    }
}
