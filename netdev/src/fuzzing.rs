//! Entry points for fuzz targets only: the parsers of kernel messages, as functions of bytes. A
//! parser must not panic, nor read beyond the bytes.

use crate::choose::policy::nft;
use crate::kernel::rtnl;
use crate::kernel::rtnl::socket;
use crate::port::headers::parse_frame;
use crate::udp::sys;

/// An Ethernet frame; returns the UDP payload in it.
#[must_use]
pub fn frame(bytes: &[u8]) -> Option<&[u8]> {
    parse_frame(bytes).map(|frame| frame.payload)
}

/// A datagram of netlink; every message in it goes through each parser.
pub fn netlink(datagram: &[u8]) {
    let _ = socket::hand_out(datagram, 0, &mut |kind, payload| {
        rtnl::try_payload(payload);
        nft::try_payload((kind & 0xff) as u8, payload);
    });
}

/// The control messages that come with a datagram of a UDP socket.
pub fn control(bytes: &[u8]) {
    sys::try_control(bytes);
}
