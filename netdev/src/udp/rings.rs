//! Runs that leave by reference: memory for each receive queue of a peer, whose pages the kernel
//! takes as they are.
//!
//! The kernel copies what `sendmmsg` sends into pages that the receiver has just given back, and
//! whose lines are in its core's cache. A run in a ring is written once, by us, into pages that
//! were used long ago.
//!
//! Memory is written again when the ring has gone round. Less than a ring is in flight to a queue:
//! its credit bounds that, by its receive buffer of 4 MiB; and if that is larger, the windows of
//! queue pairs do. Runs that the kernel copied after all take no part of it. A datagram that is
//! late by a whole round carries the bytes of later ones. If that is a whole datagram of the same
//! path, it is valid, and arrives early and twice, which reliable connections expect of a network.
//! Otherwise its ICRC does not fit. A ring serves one address, and its memory is never another's,
//! so no other peer sees these bytes.

use std::io;
use std::net::IpAddr;
use std::num::NonZeroU8;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

use super::pages::{NotSent, Pages, Pipe, end_message};
use super::sockets::{Options, to_itself};
use super::staging::RUN_BYTES_MAX;
use super::sys::{Message, SendScratch, Socket, begin_message};
use crate::kernel::descriptors::wait_readable;
use crate::kernel::interface::Interface;
use crate::kernel::worded::is_passing;
use crate::tuning::udp::{RING_IDLE, RING_IDLE_CROWDED, RING_RUNS, TRIAL_TENTHS};

/// Bytes of the longest run, and of the gap before it in its first page.
const PLACE_BYTES: usize = 65_536;
/// A run begins here in a page, so that it has as few pages as possible. The payload behind BTH and
/// RETH is then at a multiple of 32 bytes, in each packet of a WRITE: half of a line.
const BEGIN: usize = 36;
const _: () = assert!(BEGIN + RUN_BYTES_MAX <= PLACE_BYTES);
const RING_BYTES: usize = RING_RUNS * PLACE_BYTES;
const PAGE: usize = 4096;

/// Tries whether the kernel takes pages by reference, by a message from `address` to itself, and
/// whether `bytes` are enough for a ring.
///
/// # Errors
/// Why the kernel copies all runs.
pub(super) fn try_reference(
    iface: &Interface,
    address: IpAddr,
    options: Options,
    bytes: u32,
) -> Result<(), String> {
    if (bytes as usize) < RING_BYTES {
        return Err(format!("{bytes} bytes are no room for one peer"));
    }
    // As many pages as a run can have, and of several datagrams: the kernel makes the checksum of a
    // single one within the call, before its bytes change.
    const SEGMENT: usize = 4112;
    let probe = || -> io::Result<bool> {
        let (socket, dest) = to_itself(iface, address, options)?;
        let pipe = Pipe::new().map_err(|e| io::Error::other(format!("no pipe: {e}")))?;
        let mut pages = Pages::new(PLACE_BYTES)?;
        let run = BEGIN..BEGIN + 15 * SEGMENT;
        pages[run.clone()].fill(1);
        let head = Message { payload: &[], dest: &dest, by: None, segment: SEGMENT as u16 };
        begin_message(&socket, &mut SendScratch::new(), head)?;
        pipe.send(&socket, &pages[run.clone()]).map_err(|e| match e {
            NotSent::Nothing(e) => io::Error::other(format!("vmsplice(2) or splice(2): {e}")),
            NotSent::Part => io::Error::other("splice(2) takes a part"),
        })?;
        pages[run].fill(2);
        let mut first = [0];
        let arrives = (0..TRIAL_TENTHS).any(|_| wait_readable(&socket, 100).unwrap_or(false));
        if !arrives {
            return Err(io::Error::other("a message to oneself does not arrive"));
        }
        rustix::net::recv(&socket, &mut first, RecvFlags::DONTWAIT)?;
        Ok(first == [2])
    };
    match probe() {
        Ok(true) => Ok(()),
        Ok(false) => Err("splice(2) of this kernel copies".into()),
        Err(e) => Err(e.to_string()),
    }
}

/// A ring. When rings are freed, no path has one any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingId(NonZeroU8);

impl RingId {
    fn index(self) -> usize {
        usize::from(self.0.get()) - 1
    }
}

/// A receive queue: its address, and the byte by which the peer chooses among its sockets
/// ([`Shards`](crate::Shards)).
pub(super) type ReceiveQueue = (IpAddr, u8);

/// The memory of one queue.
struct Ring {
    queue: ReceiveQueue,
    pages: Pages,
    /// The end of the last run, and of the last whose pages the kernel may have.
    end: usize,
    taken: usize,
    /// A run was put in since the last look, and when that was.
    in_use: bool,
    used: Instant,
}

/// The rings of a port.
pub(super) struct Rings {
    rings: Vec<Option<Ring>>,
    /// The most rings.
    most: usize,
    pipe: Option<Pipe>,
    /// The kernel refused pages that it took when the port was opened.
    refused: bool,
    /// Before this no ring is made: the last time there was no memory or descriptor.
    not_before: Option<Instant>,
    /// How long a ring that is not used keeps its memory.
    idle: Duration,
    /// A queue found all rings taken since the last look.
    crowded: bool,
}

impl Rings {
    /// Rings of at most `bytes` together.
    pub(super) fn new(bytes: usize) -> Self {
        let most = (bytes / RING_BYTES).min(usize::from(u8::MAX) - 1);
        let (rings, pipe, not_before) = (Vec::new(), None, None);
        Self { rings, most, pipe, refused: false, not_before, idle: RING_IDLE, crowded: false }
    }

    /// The ring of a queue to which runs leave, now. `None` if others have all.
    pub(super) fn of(&mut self, queue: ReceiveQueue, now: Instant) -> Option<RingId> {
        if self.refused || self.not_before.is_some_and(|moment| now < moment) {
            return None;
        }
        let found = self.rings.iter().position(|r| r.as_ref().is_some_and(|r| r.queue == queue));
        let index = match found.or_else(|| self.rings.iter().position(Option::is_none)) {
            Some(index) => index,
            None if self.rings.len() < self.most => {
                self.rings.push(None);
                self.rings.len() - 1
            }
            None => {
                self.crowded = true;
                return None;
            }
        };
        if let Err(_no_room) = self.make(index, queue, now) {
            self.not_before = Some(now + RING_IDLE);
        }
        self.rings[index].as_ref()?;
        NonZeroU8::new(index as u8 + 1).map(RingId)
    }

    /// Makes the ring and the pipe, if they are not there.
    fn make(&mut self, index: usize, queue: ReceiveQueue, now: Instant) -> io::Result<()> {
        if self.pipe.is_none() {
            self.pipe = Some(Pipe::new()?);
        }
        if self.rings[index].is_none() {
            let pages = Pages::new(RING_BYTES)?;
            let (end, taken, in_use, used) = (0, 0, false, now);
            self.rings[index] = Some(Ring { queue, pages, end, taken, in_use, used });
        }
        Ok(())
    }

    fn get(&self, id: RingId) -> Option<&Ring> {
        self.rings.get(id.index())?.as_ref()
    }

    fn get_mut(&mut self, id: RingId) -> &mut Ring {
        self.rings[id.index()].as_mut().expect("kept while a run waits in it")
    }

    /// The number of rings.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.rings.iter().flatten().count()
    }

    /// Whether the ring is still there, and a pipe for it.
    pub(super) fn has(&self, id: RingId) -> bool {
        self.pipe.is_some() && self.get(id).is_some()
    }

    /// Where the next run of the ring begins; `None` if the ring is gone.
    pub(super) fn next(&self, id: RingId) -> Option<usize> {
        let page = self.get(id)?.end.next_multiple_of(PAGE);
        Some(if page + PLACE_BYTES <= RING_BYTES { page + BEGIN } else { BEGIN })
    }

    /// The last run of the ring ends there.
    pub(super) fn end_at(&mut self, id: RingId, end: usize) {
        let ring = self.get_mut(id);
        (ring.end, ring.in_use) = (end, true);
    }

    pub(super) fn bytes(&self, id: RingId) -> &[u8] {
        self.get(id).map_or(&[], |ring| &ring.pages)
    }

    pub(super) fn bytes_mut(&mut self, id: RingId) -> &mut [u8] {
        &mut self.get_mut(id).pages
    }

    /// Ends the message that was begun at `socket` by `len` bytes of a ring. Returns whether they
    /// left by reference.
    pub(super) fn end_message(
        &mut self,
        socket: &Socket,
        id: RingId,
        start: usize,
        len: usize,
    ) -> io::Result<bool> {
        let ring = self.rings[id.index()].as_mut().expect("kept while a run waits in it");
        let run = &ring.pages[start..][..len];
        let Some(pipe) = &self.pipe else { return end_message(socket, run).map(|()| false) };
        ring.taken = start + len;
        let sent = pipe.send(socket, run);
        let Err(why) = sent else { return Ok(true) };
        // Another pipe has none of these pages.
        self.pipe = Pipe::new().ok();
        let error = match why {
            NotSent::Part => io::Error::from_raw_os_error(libc::ENOBUFS),
            NotSent::Nothing(error) => match end_message(socket, run) {
                // It was open, so the pages were refused, or memory was short for a moment.
                Ok(()) => {
                    self.refused = !is_passing(&error);
                    return Ok(false);
                }
                Err(e) if e.raw_os_error() == Some(libc::EDESTADDRREQ) => error,
                Err(e) => e,
            },
        };
        // No message stays open.
        socket.set(libc::SOL_UDP, libc::UDP_CORK, 0)?;
        Err(error)
    }

    /// No run waits: those that the kernel copied take no place.
    pub(super) fn forget_copied(&mut self) {
        self.rings.iter_mut().flatten().for_each(|ring| ring.end = ring.taken);
    }

    /// Frees the rings that were not used for some time. Call this when no run waits. Returns
    /// whether it freed any, and when to do it again.
    ///
    /// That time doubles whenever memory is freed: a peer that leaves a datagram unread keeps all
    /// of a large page, which no new ring gets. While other queues want a ring it has a bound.
    pub(super) fn maintain(&mut self, now: Instant) -> (bool, Option<Duration>) {
        let idle = match std::mem::take(&mut self.crowded) {
            true => self.idle.min(RING_IDLE_CROWDED),
            false => self.idle,
        };
        let mut freed = false;
        for place in &mut self.rings {
            let Some(ring) = place else { continue };
            if std::mem::take(&mut ring.in_use) {
                ring.used = now;
            }
            if now.duration_since(ring.used) >= idle {
                *place = None;
                freed = true;
            }
        }
        if freed && idle == self.idle {
            self.idle *= 2;
        }
        let until = |ring: &Ring| (ring.used + self.idle).saturating_duration_since(now);
        let again = self.rings.iter().flatten().map(until).min();
        if again.is_none() {
            (self.rings, self.pipe) = (Vec::new(), None);
        }
        (freed, again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE: ReceiveQueue = (IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    /// A peer that has a ring made, and keeps a page of it, as often as it can.
    #[test]
    fn memory_that_is_given_back_is_taken_anew_few_times_a_day() {
        let (mut rings, begin) = (Rings::new(RING_BYTES), Instant::now());
        let (mut now, mut made) = (begin, 0);
        while now < begin + Duration::from_secs(24 * 60 * 60) {
            let id = rings.of(QUEUE, now).expect("memory");
            rings.end_at(id, BEGIN + 1);
            made += 1;
            while let (_, Some(pause)) = rings.maintain(now) {
                assert!(pause >= RING_IDLE);
                now += pause;
            }
            assert_eq!(rings.count(), 0);
        }
        assert!(made < 20, "{made} times");
    }

    /// A pipe without room, as if memory for its pages were short.
    #[test]
    fn a_run_that_is_copied_for_a_moment_leaves_the_next_by_reference() {
        let (mut rings, now) = (Rings::new(RING_BYTES), Instant::now());
        let id = rings.of(QUEUE, now).expect("memory");
        let [open, closed] = [(); 2].map(|()| Socket::new(false).unwrap());
        open.bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let own = rustix::net::getsockname(&open).unwrap();
        rustix::net::connect(&open, &own).unwrap();
        let places = rings.bytes(id)[..2 * PLACE_BYTES].chunks(PLACE_BYTES);
        for place in places {
            let refused = rings.pipe.as_ref().unwrap().send(&closed, place);
            assert!(matches!(refused, Err(NotSent::Nothing(_))), "the socket has no peer");
        }
        for by_reference in [false, true] {
            assert_eq!(rings.of(QUEUE, now), Some(id));
            assert_eq!(rings.end_message(&open, id, BEGIN, 5000).unwrap(), by_reference);
            assert!(wait_readable(&open, 1000).unwrap());
            let (_, len) = rustix::net::recv(&open, &mut [0; 9000], RecvFlags::DONTWAIT).unwrap();
            assert_eq!(len, 5000);
        }
    }

    #[test]
    fn a_queue_waits_for_an_idle_ring_of_another_for_minutes_at_most() {
        let other = (QUEUE.0, 1);
        let (mut rings, mut now) = (Rings::new(RING_BYTES), Instant::now());
        for _ in 0..12 {
            rings.of(QUEUE, now).expect("memory");
            while let (_, Some(pause)) = rings.maintain(now) {
                now += pause;
            }
        }
        rings.of(QUEUE, now).expect("memory");
        now += RING_IDLE_CROWDED;
        assert!(!rings.maintain(now).0, "no other queue wants it");
        assert_eq!(rings.of(other, now), None);
        assert!(rings.maintain(now).0);
        assert!(rings.of(other, now).is_some());
    }
}
