//! AF_XDP features of a driver: the generic netlink family `netdev` (Linux 6.3,
//! `include/uapi/linux/netdev.h`). Needs no privilege and attaches nothing.

use std::io;

use crate::kernel::rtnl::socket::{Attributes, NetlinkSocket};

const NETLINK_GENERIC: isize = 16;
/// `GENL_ID_CTRL`: the family that lists the others.
const CTRL: u16 = 16;
const CTRL_GETFAMILY: u8 = 3;
const CTRL_FAMILY_ID: u16 = 1;
const CTRL_FAMILY_NAME: u16 = 2;
const DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1;
const DEV_XDP_FEATURES: u16 = 3;
/// `NETDEV_XDP_ACT_XSK_ZEROCOPY`.
const XSK_ZEROCOPY: u64 = 8;
/// `struct genlmsghdr`: command, version, reserved.
const GENERIC_LEN: usize = 4;

/// Whether the driver of an interface has AF_XDP zero-copy. Error: the kernel does not support the
/// request (before 6.3), or the interface is gone.
pub(super) fn has_zero_copy(interface: u32) -> io::Result<bool> {
    let mut socket = NetlinkSocket::open(NETLINK_GENERIC)?;
    let family = ask(&mut socket, CTRL, CTRL_GETFAMILY, CTRL_FAMILY_NAME, b"netdev\0", |answer| {
        find(answer, CTRL_FAMILY_ID).and_then(|id| id.first_chunk().copied())
    })?;
    let family = u16::from_ne_bytes(family);
    let index = interface.to_ne_bytes();
    let features = ask(&mut socket, family, DEV_GET, DEV_IFINDEX, &index, |answer| {
        find(answer, DEV_XDP_FEATURES).and_then(|features| features.first_chunk().copied())
    })?;
    Ok(u64::from_ne_bytes(features) & XSK_ZEROCOPY != 0)
}

/// Sends a request with one attribute; returns what `take` makes of the answer's attributes.
fn ask<R>(
    socket: &mut NetlinkSocket,
    family: u16,
    command: u8,
    attribute: u16,
    value: &[u8],
    take: impl Fn(&[u8]) -> Option<R>,
) -> io::Result<R> {
    let mut body = vec![command, 1, 0, 0];
    body.extend_from_slice(&(value.len() as u16 + 4).to_ne_bytes());
    body.extend_from_slice(&attribute.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
    let mut taken = None;
    socket.request(family, false, &body, &mut |_, answer| {
        taken = taken.take().or_else(|| take(answer.get(GENERIC_LEN..)?));
    })?;
    taken.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no answer to the question"))
}

/// The value of the first attribute of a type.
fn find(attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    Attributes(attributes).find_map(|(kind, value)| (kind == wanted).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::interface::Interface;
    use crate::testing::testns::{Pair, or_skip};

    #[test]
    fn a_veth_has_no_zero_copy() {
        let pair = or_skip!("auto::a_veth_has_no_zero_copy", Pair::new());
        pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0").index;
            assert!(!has_zero_copy(v0).expect("Linux 6.3"));
            assert!(has_zero_copy(v0 + 1000).is_err(), "no such interface");
        });
    }
}
