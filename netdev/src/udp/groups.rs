//! Multicast groups: one socket for each joined group.
//!
//! The kernel does everything else for a group. It informs routers and switches (IGMP, MLD), and
//! lets the interface accept the group's Ethernet address. It gives a copy of this machine's
//! datagrams to every local socket that has joined, the sender's own included. Ports that read
//! frames themselves use this too: their guards receive datagrams to groups.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use super::rx::Queue;
use super::sockets::{self, Home, Options};
use super::sys::{RecvBatch, Socket};
use crate::kernel::descriptors::{self, Epoll, Interest};
use crate::kernel::interface::Interface;
use crate::port::contract::{PortStats, RxDatagram};
use crate::tuning::udp::{GROUPS_MAX, POLLED_MAX};

/// The groups that a port has joined.
pub(super) struct Groups {
    iface: Interface,
    home: Home,
    entries: Vec<Group>,
    /// Allocated with the first group.
    batch: Option<RecvBatch>,
    /// Holds all the sockets.
    ready: Epoll,
    /// The group that the next call starts with.
    first: usize,
    stats: PortStats,
}

struct Group {
    socket: Socket,
    queue: Queue,
}

impl Groups {
    pub(super) fn new(iface: &Interface, home: Home) -> io::Result<Self> {
        Ok(Self {
            iface: iface.clone(),
            home,
            entries: Vec::new(),
            batch: None,
            ready: Epoll::new()?,
            first: 0,
            stats: PortStats::default(),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Joins a group and adds its socket to `epoll`.
    pub(super) fn join(
        &mut self,
        group: IpAddr,
        options: Options,
        epoll: &Epoll,
    ) -> io::Result<()> {
        if !group.is_multicast() {
            let what = format!("{group} is no multicast group");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if self.position(group).is_some() {
            return Ok(());
        }
        if self.entries.len() >= GROUPS_MAX {
            let what = format!("a port joins {GROUPS_MAX} groups at most");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        let socket = sockets::open_group(&self.iface, self.home, group, options)?;
        self.ready.add(socket.as_fd(), Interest::Read)?;
        epoll.add(socket.as_fd(), Interest::Read)?;
        self.batch.get_or_insert_with(RecvBatch::new);
        let queue = Queue::new(group, &socket);
        self.entries.push(Group { socket, queue });
        Ok(())
    }

    /// Leaves a group; does nothing if it was not joined.
    pub(super) fn leave(&mut self, group: IpAddr) {
        let Some(at) = self.position(group) else { return };
        // Closing the socket leaves the group and removes the socket from both sets.
        let gone = self.entries.swap_remove(at);
        self.stats.rx_queue_drops += gone.queue.drops(&gone.socket);
        self.first = 0;
    }

    /// Reads received datagrams.
    pub(super) fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let count = self.entries.len();
        let Some(batch) = self.batch.as_mut().filter(|_| count > 0) else { return Ok(0) };
        if count > POLLED_MAX && !descriptors::wait_readable(&self.ready, 0)? {
            return Ok(0);
        }
        let mut total = 0;
        for at in (self.first..count).chain(0..self.first) {
            let left = budget.saturating_sub(total);
            let Group { socket, queue } = &mut self.entries[at];
            total += queue.drain(socket, batch, left, &mut self.stats, &mut sink)?;
            if total >= budget {
                self.first = (at + 1) % count;
                break;
            }
        }
        Ok(total)
    }

    /// Adds the receive counters of all groups to those of a port.
    pub(super) fn add_stats(&self, stats: &mut PortStats) {
        let drops: u64 = self.entries.iter().map(|group| group.queue.drops(&group.socket)).sum();
        stats.rx_queue_drops += self.stats.rx_queue_drops + drops;
        stats.rx_datagrams += self.stats.rx_datagrams;
        stats.rx_bytes += self.stats.rx_bytes;
        stats.rx_runs += self.stats.rx_runs;
        stats.rx_malformed += self.stats.rx_malformed;
    }

    fn position(&self, group: IpAddr) -> Option<usize> {
        self.entries.iter().position(|entry| entry.queue.local() == group)
    }
}
