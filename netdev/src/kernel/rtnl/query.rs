//! Requests and answers of fixed size, without allocation: for chores that run while packets flow.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Rtnl;

/// The body of a request: a fixed header and attributes.
pub struct Query {
    bytes: [u8; Self::MAX],
    len: usize,
}

impl Query {
    const MAX: usize = 128;

    /// A body that starts with this header; the header's length must be a multiple of 4.
    pub fn new(header: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX];
        bytes[..header.len()].copy_from_slice(header);
        Self { bytes, len: header.len() }
    }

    /// Adds an attribute (`struct rtattr`). Panics if there is no room: requests here are short.
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = 4 + value.len();
        let attribute = &mut self.bytes[self.len..self.len + length];
        attribute[..2].copy_from_slice(&(length as u16).to_ne_bytes());
        attribute[2..4].copy_from_slice(&kind.to_ne_bytes());
        attribute[4..].copy_from_slice(value);
        self.len += length.next_multiple_of(4);
        self
    }

    /// The body as it is sent.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Adds an attribute that is an address.
    pub fn address(self, kind: u16, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(a) => self.attribute(kind, &a.octets()),
            IpAddr::V6(a) => self.attribute(kind, &a.octets()),
        }
    }
}

impl Rtnl {
    /// Sends one request; parses the first answer of type `answer` with `understand`, if possible.
    pub(crate) fn ask_one<T>(
        &mut self,
        request: u16,
        answer: u16,
        query: &Query,
        understand: impl Fn(&[u8]) -> Option<T>,
    ) -> io::Result<T> {
        let mut found = None;
        self.socket.request_one(request, 0, query.bytes(), &mut |kind, payload| {
            if kind == answer && found.is_none() {
                found = understand(payload);
            }
        })?;
        found.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Sends one request with these flags (`NLM_F_*`); the only answer is success or an error.
    pub(crate) fn tell(&mut self, request: u16, flags: u16, query: &Query) -> io::Result<()> {
        self.socket.request_one(request, flags, query.bytes(), &mut |_, _| {})
    }
}

/// An address attribute.
pub fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(|octets| Ipv4Addr::from(octets).into());
    let v6 = || <[u8; 16]>::try_from(bytes).map(|octets| Ipv6Addr::from(octets).into());
    v4().or_else(|_| v6()).ok()
}

/// A 32-bit attribute.
pub fn word(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// A string attribute, without the zero at its end.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The number of an address family (`AF_INET`, `AF_INET6`), and the bits of its addresses.
pub fn family(address: IpAddr) -> (u8, u8) {
    match address {
        IpAddr::V4(_) => (libc::AF_INET as u8, 32),
        IpAddr::V6(_) => (libc::AF_INET6 as u8, 128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::rtnl::socket::Attributes;

    #[test]
    fn attributes_are_padded_to_four_bytes() {
        let query = Query::new(&[9; 4]).attribute(3, &[1, 2, 3]).address(1, [10, 0, 0, 1].into());
        let body = &query.bytes[4..query.len];
        let found: Vec<_> = Attributes(body).collect();
        assert_eq!(found, [(3, &[1u8, 2, 3][..]), (1, &[10, 0, 0, 1])]);
        assert_eq!(query.len, 4 + 8 + 8);
    }

    #[test]
    fn addresses_are_told_by_their_length() {
        assert_eq!(ip(&[1, 2, 3, 4]), Some([1, 2, 3, 4].into()));
        assert_eq!(ip(&[0; 16]), Some(Ipv6Addr::UNSPECIFIED.into()));
        assert_eq!((ip(&[0; 5]), word(&[0; 3])), (None, None));
    }
}
