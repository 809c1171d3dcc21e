//! A port's dealings with other processes on its addresses: the datagrams that they hand over, and
//! the sockets that they leave.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::rx::Queue;
use super::sys::{RecvBatch, Socket};
use crate::kernel::descriptors::{Epoll, Interest};
use crate::port::contract::{PortStats, RxDatagram};
use crate::sharing::{Mail, Slots};
use crate::tuning::udp::NEIGHBOURS_EVERY;

/// The neighbours of a port.
pub(super) struct Neighbours {
    slots: Arc<Slots>,
    /// The number of the port among those of its device. The first one has the parts that belong to
    /// all.
    nth: usize,
    mail: Vec<Mail>,
    inherited: Vec<(Socket, Queue)>,
    batch: Option<RecvBatch>,
    calls: u32,
    stats: PortStats,
}

impl Neighbours {
    pub(super) fn new(
        slots: Arc<Slots>,
        nth: usize,
        addresses: &[IpAddr],
        epoll: &Epoll,
    ) -> io::Result<Self> {
        let mail = addresses.iter().map(|address| slots.mail(*address, nth));
        let mail = mail.collect::<io::Result<Vec<_>>>()?;
        mail.iter().try_for_each(|mail| epoll.add(mail.fd(), Interest::Read))?;
        if nth == 0 {
            epoll.add(slots.news(), Interest::Read)?;
        }
        let (inherited, batch, stats) = (Vec::new(), None, PortStats::default());
        Ok(Self { slots, nth, mail, inherited, batch, calls: 0, stats })
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
        self.slots.heard();
        for at in 0..self.mail.len() {
            let address = self.mail[at].local();
            if self.inherited.iter().any(|(_, queue)| queue.local() == address) {
                continue;
            }
            let Some(socket) = self.slots.inherited(address)? else { continue };
            take_over(&socket, address)?;
            epoll.add(socket.as_fd(), Interest::Read)?;
            self.inherited.push((socket, Queue::new(address)));
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
        let Self { mail, inherited, batch, stats, .. } = self;
        let mut count = mail.iter_mut().map(|mail| mail.receive(stats, sink)).sum();
        for (socket, queue) in inherited {
            let batch = batch.get_or_insert_with(RecvBatch::new);
            let left = budget.saturating_sub(count).max(1);
            count += queue.drain(socket, batch, left, stats, sink)?;
        }
        Ok(count)
    }

    pub(super) fn stats(&self) -> &PortStats {
        &self.stats
    }
}
