//! The networks of the matrix.

use std::fmt;
use std::net::IpAddr;

use rocinante_lab::{Between, Container, Hosts, Lab, LabConfig, LabError, Netns, UPLINK, VXLAN};
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

/// Hosts with their containers.
pub(super) fn network(topology: Topology) -> Result<Lab, LabError> {
    let config = LabConfig::default();
    let between = match topology {
        Topology::Bridged => return Lab::new(&config),
        Topology::Routed => return Lab::routed(&LabConfig { containers: 3, ..config }),
        Topology::Switched => Between::Plain,
        Topology::RoutedHosts => Between::Routed,
        Topology::Vxlan => Between::Vxlan { ipv6: false },
        Topology::VxlanIpv6 => Between::Vxlan { ipv6: true },
    };
    Lab::of_hosts(&Hosts { hosts: 2, containers_each: 2, between }, &config)
}

/// The address of an uplink.
pub(super) fn uplink_address(host: &Netns) -> Result<IpAddr, String> {
    let listing = host.json(&format!("ip -j address show dev {UPLINK} scope global"));
    let listing = listing.map_err(|error| error.to_string())?;
    let address = listing[0]["addr_info"][0]["local"].as_str().unwrap_or_default();
    address.parse().map_err(|_| format!("{UPLINK} has no address"))
}

/// The address of a container.
pub(super) fn address(network: &Lab, index: usize, family: Family) -> IpAddr {
    network.container(index).address(family == Family::V6)
}

/// The namespace at a place.
pub(super) fn netns(network: &Lab, place: Place) -> &Netns {
    match place {
        Place::Host => network.host_of(SENDER),
        Place::PeerHost => network.host_of(RECEIVER),
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
        End::Uplink => UPLINK,
        End::Vxlan => VXLAN,
    }
}
