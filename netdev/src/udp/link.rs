//! The interface of a port. Its sockets outlive it: without a look at the kernel's announcements
//! the port of a removed interface would send for ever, and nothing would answer.

use std::io;
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use rustix::net::netdevice::index_to_name;

use super::sys::Socket;
use crate::kernel::descriptors::{Epoll, Interest};
use crate::kernel::rtnl::Monitor;

pub(super) struct Link {
    monitor: Monitor,
    index: u32,
    is_gone: bool,
}

impl Link {
    /// Of an interface of the calling thread's network namespace. A change of it is readable in
    /// `epoll`, until it was looked at.
    ///
    /// # Errors
    /// The kernel's answer to `socket(AF_NETLINK)`: no descriptors left, or a seccomp filter.
    pub(super) fn open(index: u32, epoll: &Epoll) -> io::Result<Self> {
        let monitor = Monitor::of_link(index)?;
        epoll.add(monitor.as_fd(), Interest::Read)?;
        Ok(Self { monitor, index, is_gone: false })
    }

    /// Reads the kernel's announcements. Returns whether there was one. `socket` is of the network
    /// namespace.
    pub(super) fn look(&mut self, socket: &Socket) -> bool {
        let mut has_changed = false;
        self.monitor.read(|_| has_changed = true);
        if has_changed {
            let name = index_to_name(socket.as_fd(), self.index);
            self.is_gone |= name.is_err_and(|e| matches!(e, Errno::NODEV | Errno::NXIO));
        }
        has_changed
    }

    /// Whether it was removed, or moved to another network namespace.
    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone
    }
}
