//! The bytes of commands and answers (`rdma/rdma_user_cm.h`), in the machine's byte order.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::Outcome;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const AF_IB: u16 = 27;
/// The length of `struct sockaddr_in6`, in which most commands have their addresses.
pub(super) const SOCKADDR_IN6: usize = 28;
/// The length of `struct sockaddr_storage`.
pub(super) const STORAGE: usize = 128;

/// The bytes of a command. Those behind their end count as 0.
#[derive(Clone, Copy)]
pub(super) struct In<'a>(pub(super) &'a [u8]);

impl In<'_> {
    pub(super) fn array<const N: usize>(self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        for (to, from) in bytes.iter_mut().zip(self.0.iter().skip(at)) {
            *to = *from;
        }
        bytes
    }

    pub(super) fn u8(self, at: usize) -> u8 {
        self.array::<1>(at)[0]
    }

    pub(super) fn u16(self, at: usize) -> u16 {
        u16::from_ne_bytes(self.array(at))
    }

    pub(super) fn u32(self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    pub(super) fn u64(self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }

    /// Private data: the first `len` of the 256 bytes. The length stands elsewhere.
    pub(super) fn private(self, at: usize, len: u8) -> Vec<u8> {
        self.array::<256>(at)[..usize::from(len)].to_vec()
    }

    /// A socket address. One of IPv6 keeps its scope, which is the interface of a link-local one.
    /// Error: `EINVAL` for a family that there is not.
    pub(super) fn address(self, at: usize) -> Outcome<Address> {
        let port = u16::from_be_bytes(self.array(at + 2));
        Ok(match self.u16(at) {
            0 => Address::None,
            AF_INET => {
                let ip = Ipv4Addr::from(self.array::<4>(at + 4));
                Address::Ip(SocketAddr::new(ip.into(), port))
            }
            AF_INET6 => {
                let ip = Ipv6Addr::from(self.array::<16>(at + 8));
                let (flow, scope) = (self.u32(at + 4).to_be(), self.u32(at + 24));
                Address::Ip(SocketAddrV6::new(ip, port, flow, scope).into())
            }
            AF_IB => Address::Ib { is_any: self.array::<16>(at + 8) == [0; 16] },
            _ => return Err(libc::EINVAL),
        })
    }
}

/// The meaning of a socket address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Address {
    /// Family 0: no address.
    None,
    Ip(SocketAddr),
    /// An address of InfiniBand, which no device has.
    Ib {
        is_any: bool,
    },
}

impl Address {
    /// # Errors
    /// `EINVAL` if it is none of IP.
    pub(super) fn ip(self) -> Outcome<SocketAddr> {
        match self {
            Self::Ip(address) => Ok(address),
            Self::None => Err(libc::EINVAL),
            Self::Ib { .. } => Err(libc::EADDRNOTAVAIL),
        }
    }
}

/// The bytes of an answer, in their order.
#[derive(Default)]
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn zeroes(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// Zeroes until the answer has this length.
    pub(super) fn until(mut self, len: usize) -> Self {
        self.0.resize(len, 0);
        self
    }

    pub(super) fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    pub(super) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(super) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(super) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    /// A socket address in `room` bytes.
    pub(super) fn address(self, address: Option<SocketAddr>, room: usize) -> Self {
        let end = self.0.len() + room;
        let it = match address {
            None => self,
            Some(SocketAddr::V4(it)) => {
                self.u16(AF_INET).bytes(&it.port().to_be_bytes()).bytes(&it.ip().octets())
            }
            Some(SocketAddr::V6(it)) => self
                .u16(AF_INET6)
                .bytes(&it.port().to_be_bytes())
                .bytes(&it.flowinfo().to_be_bytes())
                .bytes(&it.ip().octets())
                .u32(it.scope_id()),
        };
        it.until(end)
    }

    /// `struct sockaddr_ib` of a GID, in a `struct sockaddr_storage`.
    pub(super) fn address_ib(self, address: Option<IpAddr>) -> Self {
        let end = self.0.len() + STORAGE;
        let gid = address.map_or([0; 16], crate::convert::gid);
        // The partition key is the default one.
        self.u16(AF_IB).u16(u16::MAX).u32(0).bytes(&gid).until(end)
    }
}

/// The length of an address of this kind, as the kernel gives it.
pub(super) fn length(address: Option<SocketAddr>) -> u16 {
    match address {
        None => 0,
        Some(SocketAddr::V4(_)) => 16,
        Some(SocketAddr::V6(_)) => 28,
    }
}

/// The errno of an error of the connection manager, as the kernel's: a request or connection that
/// is over is in the wrong state for every call.
pub(super) fn errno(error: &rocinante_soft::model::error::VerbsError) -> c_int {
    match crate::convert::errno("rdma_cm", error) {
        libc::ECONNRESET => libc::EINVAL,
        errno => errno,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_written() {
        let v6 = SocketAddrV6::new("fe80::1".parse().unwrap(), 7471, 0x1_2345, 3);
        for address in [SocketAddr::from(([10, 0, 0, 1], 7471)), v6.into()] {
            for room in [SOCKADDR_IN6, STORAGE] {
                let out = Out::default().u16(0).address(Some(address), room).0;
                assert_eq!(out.len(), 2 + room);
                assert!(matches!(In(&out).address(2), Ok(Address::Ip(read)) if read == address));
            }
        }
        let none = Out::default().address(None, STORAGE).0;
        assert!(matches!(In(&none).address(0), Ok(Address::None)));
        assert!(matches!(In(&[99]).address(0), Err(libc::EINVAL)));
    }
}
