//! Which backend carries a device's packets.

use std::net::IpAddr;

use rocinante_netdev::udp::UdpPort;
use rocinante_netdev::xdp::XdpPort;
use rocinante_netdev::{AnyPort, Backend, Interface, OpenError, PortConfig};

/// Opens a port: the wanted one, or the best that binds every rule. Says why.
pub(crate) fn open(
    iface: &Interface,
    addresses: &[IpAddr],
    want: Option<Backend>,
    config: &PortConfig,
) -> Result<(AnyPort, String), OpenError> {
    match want {
        Some(Backend::Xdp) => {
            XdpPort::open(iface, addresses, config).map(|p| (AnyPort::Xdp(p), "asked for".into()))
        }
        _ => UdpPort::open(iface, addresses, config).map(|p| (AnyPort::Udp(p), "asked for".into())),
    }
}
