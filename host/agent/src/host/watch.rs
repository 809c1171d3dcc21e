//! Announcements about links and addresses of the own network namespace, and of all that it has a
//! number for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use netlink_sys::{Socket, SocketAddr};

use rocinante_netdev::for_agent::namespaces::receive;
use rocinante_netdev::for_agent::rtnl::socket::Messages;

use super::namespaces::NsId;

const GROUPS: [u32; 3] = [libc::RTNLGRP_LINK, libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR];
/// Datagrams of the kernel's per read; the others stay in the queue.
const BURST: usize = 256;
/// The longest datagram that is read whole: only its first message counts.
const DATAGRAM_MAX: usize = 16 * 1024;

/// An announcement. The number is the interface's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// A link of the own namespace is new or changed.
    Link(u32),
    /// A link of the own namespace is gone.
    LinkGone(u32),
    /// A link or an address of another namespace.
    Elsewhere(NsId, u32),
    /// Announcements were lost: anything may have changed.
    Anything,
}

/// Receives announcements.
#[derive(Debug)]
pub struct Watch {
    socket: Socket,
    buffer: Box<[u8]>,
}

impl Watch {
    /// Listens in the calling thread's network namespace. The kernel looks at the rights that the
    /// process has now: it may drop `CAP_NET_BROADCAST` later. Error: no descriptor left.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.set_non_blocking(true)?;
        socket.set_listen_all_namespaces(true)?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        Ok(Self { socket, buffer: vec![0; DATAGRAM_MAX].into() })
    }

    /// Hands the announcements to `each`. Returns whether more may be waiting.
    pub fn read(&mut self, mut each: impl FnMut(Heard)) -> bool {
        for _ in 0..BURST {
            match receive(&self.socket, &mut self.buffer) {
                Ok((length, namespace)) => {
                    let datagram = &self.buffer[..length.min(DATAGRAM_MAX)];
                    heard(datagram, namespace, &mut each);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => each(Heard::Anything),
            }
        }
        true
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn heard(datagram: &[u8], namespace: Option<i32>, each: &mut impl FnMut(Heard)) {
    let mut is_empty = true;
    for (header, body) in Messages(datagram) {
        is_empty = false;
        // The second word of `struct ifinfomsg` and of `struct ifaddrmsg` is the interface.
        let index = body.get(4..8).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes);
        each(match (index, namespace, header.kind) {
            (Some(index), Some(namespace), _) => Heard::Elsewhere(NsId(namespace), index),
            (Some(index), None, libc::RTM_NEWLINK) => Heard::Link(index),
            (Some(index), None, libc::RTM_DELLINK) => Heard::LinkGone(index),
            // Addresses of the host's end are the host's matter.
            (Some(_), None, libc::RTM_NEWADDR | libc::RTM_DELADDR) => continue,
            _ => Heard::Anything,
        });
    }
    if is_empty {
        each(Heard::Anything);
    }
}
