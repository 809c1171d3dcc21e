//! A port's dealings with other processes on its addresses: the datagrams that they hand over, and
//! the sockets that they leave.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use super::handoff::Inbox;
use super::rx::Queue;
use super::sys::{RecvBatch, Socket};
use crate::kernel::descriptors::{Epoll, Interest};
use crate::port::contract::{PortStats, RxDatagram};
use crate::tuning::udp::NEIGHBOURS_EVERY;

/// Addresses that processes share, as the port of one of them sees them.
pub(crate) trait SharedAddresses: Send + Sync {
    /// Where neighbours hand datagrams over to the `nth` port of this process.
    fn inbox(&self, address: IpAddr, nth: usize) -> io::Result<Inbox>;

    /// The socket of a process that has ended, if this process has to read it. It waits for no
    /// other process.
    fn inherited(&self, address: IpAddr) -> io::Result<Option<Socket>>;

    /// Readable once there may be something inherited, until [`heard`](Self::heard).
    fn news(&self) -> BorrowedFd<'_>;

    /// Clears [`news`](Self::news).
    fn heard(&self);
}

/// The neighbours of a port.
pub(super) struct Neighbours {
    shared: Arc<dyn SharedAddresses>,
    /// The number of the port among those of its device. The first one has the parts that belong to
    /// all.
    nth: usize,
    inboxes: Vec<Inbox>,
    inherited: Vec<(Socket, Queue)>,
    batch: Option<RecvBatch>,
    calls: u32,
    stats: PortStats,
}

impl Neighbours {
    pub(super) fn new(
        shared: Arc<dyn SharedAddresses>,
        nth: usize,
        addresses: &[IpAddr],
        epoll: &Epoll,
    ) -> io::Result<Self> {
        let inboxes = addresses.iter().map(|address| shared.inbox(*address, nth));
        let inboxes = inboxes.collect::<io::Result<Vec<_>>>()?;
        inboxes.iter().try_for_each(|inbox| epoll.add(inbox.fd(), Interest::Read))?;
        if nth == 0 {
            epoll.add(shared.news(), Interest::Read)?;
        }
        let (inherited, batch, stats) = (Vec::new(), None, PortStats::default());
        Ok(Self { shared, nth, inboxes, inherited, batch, calls: 0, stats })
    }

    /// Begins to read the sockets that processes have left which have ended. `take_over` makes one
    /// this process's.
    ///
    /// # Errors
    /// No descriptor is left, or another process is just joining or leaving: to be tried again.
    pub(super) fn inherit(
        &mut self,
        epoll: &Epoll,
        take_over: impl Fn(&Socket, IpAddr) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.nth > 0 {
            return Ok(());
        }
        self.shared.heard();
        for at in 0..self.inboxes.len() {
            let address = self.inboxes[at].local();
            if self.inherited.iter().any(|(_, queue)| queue.local() == address) {
                continue;
            }
            let Some(socket) = self.shared.inherited(address)? else { continue };
            take_over(&socket, address)?;
            epoll.add(socket.as_fd(), Interest::Read)?;
            let queue = Queue::new(address, &socket);
            self.inherited.push((socket, queue));
        }
        Ok(())
    }

    /// Has the next call look.
    pub(super) fn look(&mut self) {
        self.calls = u32::MAX;
    }

    /// Hands up datagrams from neighbours, and those of the sockets that they left.
    #[inline]
    pub(super) fn receive(
        &mut self,
        budget: usize,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(NEIGHBOURS_EVERY) { self.read(budget, sink) } else { Ok(0) }
    }

    fn read(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> io::Result<usize> {
        let Self { inboxes, inherited, batch, stats, .. } = self;
        let mut count = inboxes.iter_mut().map(|inbox| inbox.receive(stats, sink)).sum();
        for (socket, queue) in inherited {
            let batch = batch.get_or_insert_with(RecvBatch::new);
            let left = budget.saturating_sub(count).max(1);
            count += queue.drain(socket, batch, left, stats, sink)?;
        }
        Ok(count)
    }

    /// Adds the counters of all that came from neighbours to those of a port.
    pub(super) fn add_stats(&self, stats: &mut PortStats) {
        stats.add(&self.stats);
        let drops = self.inherited.iter().map(|(socket, queue)| queue.drops(socket));
        stats.rx_queue_drops += drops.sum::<u64>();
    }
}
