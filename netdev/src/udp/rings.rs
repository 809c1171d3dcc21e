//! Runs that leave by reference: memory for each peer, whose pages the kernel takes as they are.
//!
//! The kernel copies what `sendmmsg` sends into pages that the receiver has just given back, and
//! whose lines are in its core's cache. A run in a ring is written once, by us, into pages that
//! were used long ago.
//!
//! A place is written again when the ring has gone round. Less than that is in flight to a peer:
//! its credit, which the receive buffer of 4 MiB bounds, and that of larger ones the windows of
//! queue pairs. A datagram that is late by a whole round carries what was written over it. Its ICRC
//! does not fit then, so it is lost. A ring serves one peer, and its memory is never another's, so
//! those bytes were for that peer, too.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

use super::pages::{NotSent, Pages, Pipe, end_message};
use super::sockets::{Options, to_itself};
use super::staging::RUN_BYTES_MAX;
use super::sys::{Message, SendScratch, Socket, begin_message};
use crate::kernel::descriptors::wait_readable;
use crate::kernel::interface::Interface;
use crate::tuning::udp::{RING_IDLE, RING_RUNS, TRIAL_MS};

/// Bytes of the place of a run. It begins with a page, so a run has as few pages as possible.
const PLACE_BYTES: usize = 65_536;
/// Where a run begins in its place: the payload behind BTH and RETH is at a multiple of 32 bytes
/// then, in each packet of a WRITE, so a store of that length is within a line.
const BEGIN: usize = 36;
const _: () = assert!(BEGIN + RUN_BYTES_MAX <= PLACE_BYTES);
const RING_BYTES: usize = RING_RUNS * PLACE_BYTES;

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
    const PAGE: usize = 4096;
    let probe = || -> io::Result<bool> {
        let (socket, dest) = to_itself(iface, address, options)?;
        let pipe = Pipe::new().map_err(|e| io::Error::other(format!("no pipe: {e}")))?;
        let mut pages = Pages::new(PAGE)?;
        pages.fill(1);
        // Of one datagram the kernel would make the checksum before the second bytes.
        let segment = PAGE as u16 / 2;
        let head = Message { payload: &[], dest: &dest, by: None, segment };
        begin_message(&socket, &mut SendScratch::new(), head)?;
        pipe.send(&socket, &pages).map_err(|e| match e {
            NotSent::Open => io::Error::other("vmsplice(2) is refused"),
            NotSent::Gone(e) => e,
        })?;
        pages.fill(2);
        let mut first = [0];
        if !wait_readable(&socket, TRIAL_MS)? {
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

/// A ring, as long as it is the same peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingId {
    index: usize,
    made: u64,
}

/// The memory of one peer.
struct Ring {
    peer: IpAddr,
    made: u64,
    pages: Pages,
    /// The place of the next run.
    next: usize,
    used: Instant,
}

/// The rings of a port.
pub(super) struct Rings {
    rings: Vec<Option<Ring>>,
    /// The most rings.
    most: usize,
    /// Rings made so far.
    made: u64,
    pipe: Option<Pipe>,
    /// Whether the kernel refused what it had taken before.
    refused: bool,
}

impl Rings {
    /// Rings of at most `bytes` together.
    pub(super) fn new(bytes: usize) -> Self {
        let most = bytes / RING_BYTES;
        Self { rings: Vec::new(), most, made: 0, pipe: None, refused: false }
    }

    /// The ring of a peer to which runs leave, now. `None` if other peers have all.
    pub(super) fn of(&mut self, peer: IpAddr, now: Instant) -> Option<RingId> {
        if self.refused {
            return None;
        }
        let found = self.rings.iter().position(|r| r.as_ref().is_some_and(|r| r.peer == peer));
        let index = match found.or_else(|| self.rings.iter().position(Option::is_none)) {
            Some(index) => index,
            None if self.rings.len() < self.most => {
                self.rings.push(None);
                self.rings.len() - 1
            }
            None => return None,
        };
        if self.rings[index].is_none() {
            self.rings[index] = self.make(peer, now).ok();
        }
        let ring = self.rings[index].as_mut()?;
        ring.used = now;
        Some(RingId { index, made: ring.made })
    }

    fn make(&mut self, peer: IpAddr, now: Instant) -> io::Result<Ring> {
        if self.pipe.is_none() {
            self.pipe = Some(Pipe::new()?);
        }
        self.made += 1;
        let pages = Pages::new(RING_BYTES)?;
        Ok(Ring { peer, made: self.made, pages, next: 0, used: now })
    }

    fn get(&self, id: RingId) -> Option<&Ring> {
        self.rings.get(id.index)?.as_ref().filter(|ring| ring.made == id.made)
    }

    fn get_mut(&mut self, id: RingId) -> &mut Ring {
        self.rings[id.index].as_mut().expect("kept while a run waits in it")
    }

    /// The number of rings.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.rings.iter().flatten().count()
    }

    /// Whether the ring is still there.
    pub(super) fn has(&self, id: RingId) -> bool {
        self.get(id).is_some()
    }

    /// Where the next run of the ring begins; `None` if the ring is gone.
    pub(super) fn next(&self, id: RingId) -> Option<usize> {
        self.get(id).map(|ring| ring.next * PLACE_BYTES + BEGIN)
    }

    /// A run begins there.
    pub(super) fn take(&mut self, id: RingId) -> usize {
        let ring = self.get_mut(id);
        let place = ring.next;
        ring.next = (place + 1) % RING_RUNS;
        place * PLACE_BYTES + BEGIN
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
        let run =
            &self.rings[id.index].as_ref().map_or(&[][..], |ring| &ring.pages)[start..][..len];
        let sent = match &self.pipe {
            Some(pipe) => pipe.send(socket, run),
            None => Err(NotSent::Open),
        };
        match sent {
            Ok(()) => Ok(true),
            Err(NotSent::Open) => {
                self.refused = true;
                end_message(socket, run).map(|()| false)
            }
            Err(NotSent::Gone(e)) => {
                // Another pipe has none of these pages. No message stays open, whatever happened.
                self.pipe = Pipe::new().ok();
                socket.set(libc::SOL_UDP, libc::UDP_CORK, 0)?;
                Err(e)
            }
        }
    }

    /// Frees the rings that were not used for some time. Returns when to do it again. Call this
    /// when no run waits.
    pub(super) fn maintain(&mut self) -> Option<Duration> {
        if self.rings.is_empty() {
            return None;
        }
        let now = Instant::now();
        let is_used = |ring: &Ring| now.duration_since(ring.used) < RING_IDLE;
        self.rings.iter_mut().for_each(|ring| *ring = ring.take().filter(is_used));
        if self.rings.iter().any(Option::is_some) {
            return Some(RING_IDLE);
        }
        (self.rings, self.pipe) = (Vec::new(), None);
        None
    }
}
