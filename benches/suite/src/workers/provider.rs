//! The providers of measurements.

use rocinante::device::Backend;

use super::job::Device;
use super::place::PlaceArgs;
use rocinante_cli::output::Result;

/// The provider that carries the requests of a measurement.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Provider {
    /// The RDMA device of the kernel: hardware, or Soft-RoCE.
    Hw,
    /// The software device over UDP sockets.
    Udp,
    /// The software device over AF_PACKET.
    Packet,
    /// The software device over AF_PACKET that an agent on the host opened, in a process without
    /// capabilities.
    #[value(skip)]
    Handed,
    /// The software device over UDP sockets, in a container of podman.
    #[value(skip)]
    Contained,
    /// The software device over AF_XDP.
    Afxdp,
    /// The software device over AF_XDP that an agent opened, in such a process.
    #[value(skip)]
    HandedAfxdp,
}

impl Provider {
    const ALL: [Self; 4] = [Self::Hw, Self::Udp, Self::Packet, Self::Afxdp];

    /// The `given` providers. By default, all that are available with the named devices. Error: the
    /// kernel provider (`hw`) is wanted, but no devices are named.
    pub(crate) fn wanted(given: &[Self], place: &PlaceArgs) -> Result<Vec<Self>> {
        let mut wanted = given.to_vec();
        if given.is_empty() {
            let can_be = |one: &Self| *one != Self::Hw || !place.devices.is_empty();
            wanted.extend(Self::ALL.into_iter().filter(can_be));
        }
        if place.agent {
            let and_handed = |one: Self| [Some(one), one.handed()].into_iter().flatten();
            wanted = wanted.into_iter().flat_map(and_handed).collect();
        }
        if wanted.contains(&Self::Hw) {
            place.devices()?;
        }
        Ok(wanted)
    }

    /// The same over a port that an agent opened.
    const fn handed(self) -> Option<Self> {
        match self {
            Self::Packet => Some(Self::Handed),
            Self::Afxdp => Some(Self::HandedAfxdp),
            _ => None,
        }
    }

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hw => "hw",
            Self::Udp => "udp",
            Self::Packet => "packet",
            Self::Handed => "handed",
            Self::Contained => "contained",
            Self::Afxdp => "afxdp",
            Self::HandedAfxdp => "handed-afxdp",
        }
    }

    const fn backend(self) -> Option<Backend> {
        match self {
            Self::Hw => None,
            Self::Udp | Self::Contained => Some(Backend::Udp),
            Self::Packet | Self::Handed => Some(Backend::Packet),
            Self::Afxdp | Self::HandedAfxdp => Some(Backend::Xdp),
        }
    }

    /// The name of its backend, if it is the device in software.
    pub(crate) fn backend_name(self) -> Option<String> {
        self.backend().map(|backend| backend.to_string())
    }

    /// The name of its port in measurements of the port alone. The port of `afxdp` is its baseline.
    pub(crate) const fn port_name(self) -> Option<&'static str> {
        match self {
            Self::Udp => Some("udp-port"),
            Self::Packet => Some("packet-port"),
            _ => None,
        }
    }

    /// The device to measure.
    pub(crate) fn device(self, place: &PlaceArgs) -> Result<Device> {
        match self.backend_name() {
            Some(backend) => {
                let handed = matches!(self, Self::Handed | Self::HandedAfxdp);
                let contained = self == Self::Contained;
                Ok(Device::Software { backend, small_buffers: false, handed, contained })
            }
            None => Ok(Device::Hardware(place.devices()?)),
        }
    }
}
