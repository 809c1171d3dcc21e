//! IP addresses and ports in the messages: GIDs, service ids, and the header that `rdma_cm` puts
//! before the private data.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::super::mad::u16_at;

/// A global identifier: on RoCE v2 an IPv6 address, or an IPv4 address as an IPv4-mapped one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IP address of the GID.
    #[must_use]
    pub fn address(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        })
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// A port space of `rdma_cm` (`enum rdma_ucm_port_space`, `include/uapi/rdma/rdma_user_cm.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PortSpace {
    /// `RDMA_PS_TCP`: reliable connections.
    Tcp,
    /// `RDMA_PS_UDP`: datagrams.
    Udp,
    /// `RDMA_PS_IB`: any service. The kernel's connection manager has unreliable connections only
    /// here.
    Ib,
    /// `RDMA_PS_IPOIB`: datagrams, beside those of IP over InfiniBand.
    IpOverIb,
}

impl PortSpace {
    /// Its number.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Tcp => 0x0106,
            Self::Udp => 0x0111,
            Self::Ib => 0x013f,
            Self::IpOverIb => 0x0002,
        }
    }
}

/// A service id. Those of `rdma_cm` have the port space in bits 16 to 31 and the port below (IBTA
/// annex A11 \[M\]; seen in captures).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// The service id of a port.
    #[must_use]
    pub const fn of_port(space: PortSpace, port: u16) -> Self {
        Self((space.number() as u64) << 16 | port as u64)
    }

    /// The service id of the listener. A listener on a port of [`PortSpace::Tcp`] also gets
    /// requests for the same port of [`PortSpace::Ib`], because Linux has unreliable connections
    /// only there (`ucma_get_qp_type` of `drivers/infiniband/core/ucma.c`).
    #[must_use]
    pub const fn listened(self) -> Self {
        match self.port() {
            Some((PortSpace::Ib, port)) => Self::of_port(PortSpace::Tcp, port),
            _ => self,
        }
    }

    /// Whether peers ask for a queue pair for datagrams there (SIDR), and for no connection.
    #[must_use]
    pub const fn takes_datagrams(self) -> bool {
        matches!(self.port(), Some((PortSpace::Udp | PortSpace::IpOverIb, _)))
    }

    /// Port space and port, if it is an `rdma_cm` service id of a known port space.
    #[must_use]
    pub const fn port(self) -> Option<(PortSpace, u16)> {
        let port = self.0 as u16;
        match self.0 >> 16 {
            0x0106 => Some((PortSpace::Tcp, port)),
            0x0111 => Some((PortSpace::Udp, port)),
            0x013f => Some((PortSpace::Ib, port)),
            0x0002 => Some((PortSpace::IpOverIb, port)),
            _ => None,
        }
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port() {
            Some((PortSpace::Tcp | PortSpace::Ib, port)) => write!(f, "port {port}"),
            Some((PortSpace::Udp | PortSpace::IpOverIb, port)) => {
                write!(f, "datagram port {port}")
            }
            None => write!(f, "0x{:016x}", self.0),
        }
    }
}

/// The header that `rdma_cm` puts before the private data of a REQ and a SIDR_REQ (IBTA annex A11
/// \[M\]; `struct cma_hdr` of Linux, `drivers/infiniband/core/cma.c`; seen in captures).
///
/// ```text
///  0        major version(4) minor version(4)     0
///  1        IP version(4) reserved(4)
///  2..4     source port
///  4..20    source address                        IPv4: the last four bytes, zeros before
/// 20..36    destination address
/// ```
///
/// The destination port is in the service id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpHeader {
    /// Source address and port.
    pub src: SocketAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
}

/// Why private data does not begin with such a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IpHeaderError {
    /// Fewer than 36 bytes.
    Truncated,
    /// A version other than 0.
    Version(u8),
    /// An IP version other than 4 and 6.
    Family(u8),
}

impl fmt::Display for IpHeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("shorter than an IP header of the connection manager"),
            Self::Version(version) => write!(f, "version 0x{version:02x} of the IP header"),
            Self::Family(family) => write!(f, "IP version {family}"),
        }
    }
}

impl core::error::Error for IpHeaderError {}

impl IpHeader {
    /// Its length in bytes.
    pub const LEN: usize = 36;

    /// Reads the header; returns it and the user's private data.
    ///
    /// # Errors
    /// [`IpHeaderError`].
    pub fn parse(private: &[u8]) -> Result<(Self, &[u8]), IpHeaderError> {
        let Some((b, rest)) = private.split_first_chunk::<{ Self::LEN }>() else {
            return Err(IpHeaderError::Truncated);
        };
        if b[0] != 0 {
            return Err(IpHeaderError::Version(b[0]));
        }
        let address = |at: usize| -> Result<IpAddr, IpHeaderError> {
            let bytes: [u8; 16] = *b[at..].first_chunk().expect("within the header");
            match b[1] >> 4 {
                4 => {
                    let [.., a, b, c, d] = bytes;
                    Ok(Ipv4Addr::new(a, b, c, d).into())
                }
                6 => Ok(Ipv6Addr::from(bytes).into()),
                other => Err(IpHeaderError::Family(other)),
            }
        };
        let src = SocketAddr::new(address(4)?, u16_at(b, 2));
        Ok((Self { src, dst: address(20)? }, rest))
    }

    /// Writes the header.
    #[must_use]
    pub fn bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[1] = if self.src.is_ipv4() { 0x40 } else { 0x60 };
        b[2..4].copy_from_slice(&self.src.port().to_be_bytes());
        for (at, address) in [(4, self.src.ip()), (20, self.dst)] {
            match address {
                IpAddr::V4(address) => b[at + 12..at + 16].copy_from_slice(&address.octets()),
                IpAddr::V6(address) => b[at..at + 16].copy_from_slice(&address.octets()),
            }
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_stand_for_addresses() {
        let v4 = IpAddr::from([10, 77, 0, 2]);
        assert_eq!(Gid::from(v4).0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 2]);
        assert_eq!(Gid::from(v4).address(), v4);
        let v6: IpAddr = "fd77::2".parse().unwrap();
        assert_eq!(Gid::from(v6).address(), v6);
    }

    #[test]
    fn service_ids_have_ports() {
        let id = ServiceId::of_port(PortSpace::Tcp, 7471);
        assert_eq!(id, ServiceId(0x0000_0000_0106_1d2f));
        assert_eq!(id.port(), Some((PortSpace::Tcp, 7471)));
        assert_eq!(ServiceId(0x0000_0000_0111_1c37).port(), Some((PortSpace::Udp, 7223)));
        assert_eq!(ServiceId(0x0100_0000_0106_1d2f).port(), None);
        // A listener for reliable connections also gets requests for unreliable ones.
        assert_eq!(ServiceId(0x0000_0000_013f_1d2f).listened(), id);
        for other in [id, ServiceId(0x0000_0000_0111_1c37), ServiceId(7)] {
            assert_eq!(other.listened(), other);
        }
    }

    #[test]
    fn ip_headers_survive_their_bytes_and_others_are_refused() {
        for (src, dst) in [("10.0.0.1:7", "10.0.0.2"), ("[fd77::2]:65535", "fd77::3")] {
            let header = IpHeader { src: src.parse().unwrap(), dst: dst.parse().unwrap() };
            let mut bytes = header.bytes().to_vec();
            bytes.extend_from_slice(b"user");
            assert_eq!(IpHeader::parse(&bytes), Ok((header, &b"user"[..])));
        }
        assert_eq!(IpHeader::parse(&[0; 35]), Err(IpHeaderError::Truncated));
        assert_eq!(IpHeader::parse(&[0; 36]), Err(IpHeaderError::Family(0)));
        assert_eq!(IpHeader::parse(&[0x10; 36]), Err(IpHeaderError::Version(0x10)));
    }
}
