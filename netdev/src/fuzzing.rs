//! For fuzz targets only: what reads the words of the kernel, as functions of bytes. Nothing is returned: it must only not panic, nor read
//! beyond the bytes.

use crate::rtnl::socket;
use crate::{policy, rtnl, udp};

/// A datagram of netlink, with every message in it as whatever it could be.
pub fn netlink(datagram: &[u8]) {
    let _ = socket::hand_out(datagram, 0, &mut |kind, payload| {
        rtnl::try_payload(payload);
        policy::try_payload((kind & 0xff) as u8, payload);
    });
}

/// The control messages that come with a datagram of a UDP socket.
pub fn control(bytes: &[u8]) {
    udp::try_control(bytes);
}
