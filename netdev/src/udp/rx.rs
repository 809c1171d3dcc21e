//! Receiving: bursts of super-packets, split into datagrams.

use std::cell::Cell;
use std::io;
use std::net::IpAddr;

use super::sockets::Role;
use super::sys::{RECV_MAX, Received, RecvBatch, Socket};
use crate::port::contract::{PortStats, Runs, RxDatagram, RxIpId};
use crate::tuning::udp::{BURST_BYTES, GUARD_EVERY, IDLE_EVERY};

/// The receive side of a port.
pub(super) struct Receiver {
    role: Role,
    /// Made when it is needed: a guard may receive nothing ever.
    batch: Option<RecvBatch>,
    queues: Vec<Queue>,
    /// Paths on all queues together whose peers' datagrams come here.
    paths: usize,
    calls: u32,
    /// The queue that the next call starts with, so that one busy address does not starve the
    /// others.
    first: usize,
    /// The queue that the last call did not empty.
    left_off: Option<usize>,
    stats: PortStats,
}

/// The receive state of one own address's socket, or of a group's.
#[derive(Debug)]
pub(super) struct Queue {
    local: IpAddr,
    paths: usize,
    /// Typical bytes of one message in the last burst.
    message_bytes: usize,
    /// The kernel's drop counter when it was last read, and the sum since the queue is this
    /// process's, beyond 32 bits. A socket that processes share counts for all that had it.
    drops: Cell<(u32, u64)>,
}

impl Receiver {
    pub(super) fn new(addresses: &[IpAddr], sockets: &[Socket], role: Role) -> Self {
        let queues = addresses.iter().zip(sockets).map(|(local, it)| Queue::new(*local, it));
        Self {
            role,
            batch: None,
            queues: queues.collect(),
            paths: 0,
            calls: 0,
            first: 0,
            left_off: None,
            stats: PortStats::default(),
        }
    }

    /// Counts a path from an own address; `loops` if it is to one, too. Of others a guard hears
    /// nothing.
    pub(super) fn path_added(&mut self, local: IpAddr, loops: bool) {
        if self.receives() || loops {
            self.paths += 1;
            self.queues.iter_mut().filter(|q| q.local == local).for_each(|q| q.paths += 1);
        }
    }

    pub(super) fn path_removed(&mut self, local: IpAddr, loops: bool) {
        if self.receives() || loops {
            self.paths -= 1;
            self.queues.iter_mut().filter(|q| q.local == local).for_each(|q| q.paths -= 1);
        }
    }

    /// Whether the port receives, that is, is not a guard.
    pub(super) fn receives(&self) -> bool {
        self.role == Role::Receive
    }

    /// Whether the sockets of own addresses are always in the epoll set, a guard's too.
    pub(super) fn is_watched(&self) -> bool {
        self.role != Role::Shut
    }

    /// Has the next call read all sockets.
    pub(super) fn look(&mut self) {
        self.calls = u32::MAX;
    }

    /// Reads from the sockets in use, one per own address and in that order.
    pub(super) fn receive<'s>(
        &mut self,
        sockets: impl Fn(usize) -> &'s Socket,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        self.calls = self.calls.wrapping_add(1);
        self.left_off = None;
        let all = match self.role {
            Role::Receive => self.paths == 0 || self.calls.is_multiple_of(IDLE_EVERY),
            _ => self.calls.is_multiple_of(GUARD_EVERY),
        };
        if self.role == Role::Shut || !all && self.paths == 0 {
            return Ok(0);
        }
        let batch = self.batch.get_or_insert_with(RecvBatch::new);
        let count = self.queues.len();
        let mut total = 0;
        for i in (self.first..count).chain(0..self.first) {
            let queue = &mut self.queues[i];
            if !all && queue.paths == 0 {
                continue;
            }
            let left = budget.saturating_sub(total);
            total += queue.drain(sockets(i), batch, left, &mut self.stats, &mut sink)?;
            if total >= budget {
                self.first = (i + 1) % count;
                self.left_off = Some(i);
                break;
            }
        }
        Ok(total)
    }

    /// Whether more than `eighths` eighths of the queue are filled at which the last call left off.
    pub(super) fn is_filled<'s>(
        &self,
        sockets: impl Fn(usize) -> &'s Socket,
        eighths: u32,
    ) -> bool {
        self.left_off.is_some_and(|queue| sockets(queue).is_filled(eighths))
    }

    /// How the datagrams that were read had arrived.
    pub(super) fn runs(&self) -> Runs {
        let PortStats { rx_runs: runs, rx_datagrams: datagrams, rx_bytes: bytes, .. } = self.stats;
        Runs { runs, datagrams, bytes }
    }

    /// The receiving half of the port's counters.
    pub(super) fn stats<'s>(&self, sockets: impl Fn(usize) -> &'s Socket) -> PortStats {
        let mut stats = self.stats;
        if self.role == Role::Receive {
            for (i, queue) in self.queues.iter().enumerate() {
                stats.rx_queue_drops += queue.drops(sockets(i));
            }
        }
        stats
    }
}

impl Queue {
    pub(super) fn new(local: IpAddr, socket: &Socket) -> Self {
        let drops = Cell::new((socket.input_drops(), 0));
        Self { local, paths: 0, message_bytes: 0, drops }
    }

    /// The destination address of its datagrams.
    pub(super) fn local(&self) -> IpAddr {
        self.local
    }

    /// The number of datagrams dropped because the queue was full.
    pub(super) fn drops(&self, socket: &Socket) -> u64 {
        let (last, sum) = self.drops.get();
        let now = socket.input_drops();
        let sum = sum + u64::from(now.wrapping_sub(last));
        self.drops.set((now, sum));
        sum
    }

    /// Reads until the queue is empty or `budget` datagrams have come.
    pub(super) fn drain(
        &mut self,
        socket: &Socket,
        batch: &mut RecvBatch,
        budget: usize,
        stats: &mut PortStats,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let mut total = 0;
        loop {
            let fits = BURST_BYTES.checked_div(self.message_bytes).unwrap_or(RECV_MAX);
            let wanted = fits.min(budget - total).clamp(1, RECV_MAX);
            let got = batch.recv(socket, wanted)?;
            let before = stats.rx_bytes;
            for i in 0..got {
                total += self.hand_up(&batch.message(i), stats, sink);
            }
            let bytes = (stats.rx_bytes - before) as usize;
            self.message_bytes = bytes.checked_div(got).unwrap_or(self.message_bytes);
            if got < wanted || total >= budget {
                return Ok(total);
            }
        }
    }

    /// Splits one message into its datagrams; returns their number, a truncated one counts.
    fn hand_up(
        &self,
        message: &Received<'_>,
        stats: &mut PortStats,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> usize {
        if message.truncated {
            stats.rx_malformed += 1;
            return 1;
        }
        let bytes = message.payload.len();
        let mut datagram = RxDatagram {
            payload: message.payload,
            src: message.src,
            dst: self.local,
            src_port: message.src_port,
            ip_id: if self.local.is_ipv6() { RxIpId::None } else { RxIpId::Hint(0) },
            tos: message.tos,
        };
        stats.rx_runs += 1;
        stats.rx_bytes += bytes as u64;
        let segment = message.segment.filter(|&s| s > 0 && s < bytes);
        let Some(segment) = segment else {
            sink(datagram);
            stats.rx_datagrams += 1;
            return 1;
        };
        let mut count = 0;
        for payload in message.payload.chunks(segment) {
            datagram.payload = payload;
            if let RxIpId::Hint(index) = &mut datagram.ip_id {
                *index = count;
            }
            sink(datagram);
            count = count.wrapping_add(1);
        }
        let count = bytes.div_ceil(segment);
        stats.rx_datagrams += count as u64;
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_counted_beyond_what_the_kernel_counts_to() {
        let socket = Socket::new(false).unwrap();
        let queue = Queue::new([127, 0, 0, 1].into(), &socket);
        for (last, new) in [(0, 0), (u32::MAX, 1), (1, u64::from(u32::MAX))] {
            queue.drops.set((last, u64::from(u32::MAX)));
            assert_eq!(queue.drops(&socket), u64::from(u32::MAX) + new, "after {last}");
            assert_eq!(queue.drops(&socket), u64::from(u32::MAX) + new, "and not twice");
        }
    }

    #[test]
    fn whatever_size_of_segments_is_told_the_payload_is_handed_up_once() {
        for address in [IpAddr::from([10, 0, 0, 1]), IpAddr::from([0_u16; 8])] {
            let drops = Cell::new((0, 0));
            let queue = Queue { local: address, paths: 0, message_bytes: 0, drops };
            for len in [0, 1, 2, 1000, 65_507] {
                let payload = vec![7; len];
                for segment in [0, 1, 2, 999, 1000, 65_506, 65_507, 65_508, i32::MAX as usize] {
                    for truncated in [false, true] {
                        let message = Received {
                            payload: &payload,
                            src: address,
                            src_port: 1,
                            segment: Some(segment),
                            tos: None,
                            truncated,
                        };
                        let mut stats = PortStats::default();
                        let (mut count, mut bytes) = (0, 0);
                        let told = queue.hand_up(&message, &mut stats, &mut |datagram| {
                            if let RxIpId::Hint(index) = datagram.ip_id {
                                assert_eq!(usize::from(index), count % 65_536);
                            }
                            count += 1;
                            bytes += datagram.payload.len();
                        });
                        let cut = (1..len).contains(&segment);
                        let expected = match (truncated, cut) {
                            (true, _) => 0,
                            (false, true) => len.div_ceil(segment),
                            (false, false) => 1,
                        };
                        let read = if truncated { 1 } else { expected };
                        assert_eq!((told, count), (read, expected), "{len} by {segment}");
                        assert_eq!(bytes, if truncated { 0 } else { len });
                        assert_eq!(stats.rx_datagrams, expected as u64);
                        assert_eq!(stats.rx_malformed, u64::from(truncated));
                    }
                }
            }
        }
    }
}
