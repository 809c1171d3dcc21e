//! How many receive queues an interface has: `ETHTOOL_GCHANNELS` (`linux/ethtool.h`).
#![allow(unsafe_code)]

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// `struct ethtool_channels`.
#[derive(Debug, Default)]
#[repr(C)]
struct Channels {
    cmd: u32,
    max: [u32; 4],
    rx_count: u32,
    tx_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// The receive queues in use, or `None` where the driver does not say (then it has one, or we learn
/// from `bind`).
pub(super) fn receive_queues(interface: &str) -> Option<u32> {
    // Any socket of the namespace serves for the request.
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let mut channels = Channels { cmd: ETHTOOL_GCHANNELS, ..Channels::default() };
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = interface.as_bytes();
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: the request names an interface, zero-terminated, and points to a buffer of the size
    // that the command in it stands for; both live through the call.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request)
    };
    let queues = channels.rx_count + channels.combined_count;
    (result == 0 && queues > 0).then_some(queues)
}
