//! Multicast groups: a socket for each that has joined it.
//!
//! The kernel does what a group needs: it tells routers and switches (IGMP, MLD), lets the interface accept the group's Ethernet address, and
//! gives a copy of what this machine sends to every socket on it that has joined, the sender's own included. So do the ports that
//! read frames themselves: their guards receive what is sent to groups.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use super::rx::Queue;
use super::sockets::{self, Home};
use super::sys::{RecvBatch, Socket};
use crate::PortConfig;
use crate::fd::{self, Epoll, Interest};
use crate::iface::Interface;
use crate::port::{PortStats, RxDatagram};

/// Groups of a port at most: each has a socket with a buffer.
const GROUPS_MAX: usize = 256;
/// So many are just read; for more, one system call says first whether there is anything.
const POLLED_MAX: usize = 1;

/// The groups that a port has joined.
pub(super) struct Groups {
    iface: Interface,
    home: Home,
    entries: Vec<Group>,
    /// With the first group.
    batch: Option<RecvBatch>,
    /// All of the sockets.
    ready: Epoll,
    /// Where the next call begins.
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

    /// Joins a group; `epoll` becomes readable for it, too.
    pub(super) fn join(
        &mut self,
        group: IpAddr,
        config: &PortConfig,
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
        let socket = sockets::open_group(&self.iface, self.home, group, config)?;
        self.ready.add(socket.as_fd(), Interest::Read)?;
        epoll.add(socket.as_fd(), Interest::Read)?;
        self.batch.get_or_insert_with(RecvBatch::new);
        self.entries.push(Group { socket, queue: Queue::new(group) });
        Ok(())
    }

    /// Leaves a group; that it was not joined is no error.
    pub(super) fn leave(&mut self, group: IpAddr) {
        let Some(at) = self.position(group) else { return };
        // Closing the socket takes it out of both sets, and leaves the group.
        let gone = self.entries.swap_remove(at);
        self.stats.rx_queue_drops += gone.queue.drops(&gone.socket);
        self.first = 0;
    }

    /// Reads what has come.
    pub(super) fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let count = self.entries.len();
        let Some(batch) = self.batch.as_mut().filter(|_| count > 0) else { return Ok(0) };
        if count > POLLED_MAX && !fd::wait_readable(&self.ready, 0)? {
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

    /// Adds what was received to the counters of a port.
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
