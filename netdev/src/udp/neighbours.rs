//! What a port has to do with other processes on its addresses: the datagrams that they hand over,
//! and the sockets that they leave.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use super::sys::Socket;
use crate::fd::{Epoll, Interest};
use crate::port::{PortStats, RxDatagram};
use crate::shared::{Mail, Slots};

/// Mail is looked for once in this many calls, and after a thread was told that there is something:
/// few datagrams come so, and to look takes a system call.
const MAIL_EVERY: u32 = 256;

/// The neighbours of a port.
pub(super) struct Neighbours {
    slots: Arc<Slots>,
    /// The number of the port among those of its device. The first one has what belongs to all.
    nth: usize,
    mail: Vec<Mail>,
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
        Ok(Self { slots, nth, mail, calls: 0, stats: PortStats::default() })
    }

    /// The sockets of neighbours that have ended, which this port has to read from now on.
    pub(super) fn inherit(&self) -> io::Result<Vec<(IpAddr, Socket)>> {
        if self.nth == 0 { self.slots.inherit() } else { Ok(Vec::new()) }
    }

    /// Has the next call look for mail.
    pub(super) fn look(&mut self) {
        self.calls = u32::MAX;
    }

    /// Hands up what neighbours handed over.
    #[inline]
    pub(super) fn receive(&mut self, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        self.calls = self.calls.wrapping_add(1);
        if !self.calls.is_multiple_of(MAIL_EVERY) {
            return 0;
        }
        let Self { mail, stats, .. } = self;
        mail.iter_mut().map(|mail| mail.receive(stats, sink)).sum()
    }

    pub(super) fn stats(&self) -> &PortStats {
        &self.stats
    }
}
