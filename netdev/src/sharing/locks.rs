//! Locks in a file that processes share: slots that are taken, services that are listened for, and
//! ports that are bound.
//!
//! They are locks of an open file description (`F_OFD_SETLK` of fcntl(2)): the kernel removes them
//! with the last descriptor of it, so with the process. Each process opens the file anew, for a
//! description of its own.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::last_will;
use super::layout::{NOTES_AT, RECORD, SLOTS_MAX, TABLE};
use crate::kernel::descriptors::{self, Lock};
use crate::kernel::inherited;
use crate::tuning::shared::LOCK_PATIENCE;

/// A process has the lock of this byte during work of several steps. Slot *s* is the byte *s*.
const ALL: u64 = 1 << 16;
/// A process has the lock of this byte while it opens `afxdp` on the address, or has it.
const XDP: u64 = 1 << 17;
/// A guardian has the lock of this byte while it ends the connections of those that have gone.
const GUARD: u64 = 1 << 18;
/// Services are behind this: 256 bytes each, one for each slot.
const SERVICES: u64 = 1 << 20;
/// Peers' requests are behind those, in the same way. A peer chooses its address and the number of
/// a request, so it must reach no service's place.
const REQUESTS: u64 = SERVICES + (1 << 62);
/// Ports are behind those, a byte each, so that the locks of ports in a row are one to the kernel.
const PORTS: u64 = 3 << 61;
/// The record of a slot that a process has taken, and not left.
const TAKEN: u64 = u64::MAX;

/// How a process has a port, as its neighbours see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortClaim {
    /// Not at all.
    None,
    /// As all others that have it so, too.
    Shared,
    /// Alone.
    Alone,
}

/// One process's locks.
#[derive(Debug)]
pub(super) struct Locks {
    file: File,
    /// For the kernel the threads of a process are one.
    threads: Mutex<()>,
}

/// A slot, as the locks and the file show it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// Whether another process has it.
    pub(super) is_taken: bool,
    record: u64,
    /// The number of places of its notes that have been used.
    pub(super) notes: u64,
}

/// The lock of all, until it is dropped.
pub(super) struct Held<'a> {
    locks: &'a Locks,
    _thread: MutexGuard<'a, ()>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locks.unlock(ALL);
    }
}

/// The addresses of a service, the most precise first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum On {
    Address,
    Family,
    All,
}

impl On {
    pub(super) const EACH: [Self; 3] = [Self::Address, Self::Family, Self::All];

    pub(super) fn of(address: Option<IpAddr>) -> Self {
        match address {
            None => Self::All,
            Some(address) if address.is_unspecified() => Self::Family,
            Some(_) => Self::Address,
        }
    }
}

/// The place of a service among the locks. Two services at one place would only refuse each other.
pub(super) fn service(service: u64, on: On) -> u64 {
    SERVICES + apart(mixed(service << 2 | on as u64), 11)
}

/// The place of a peer's request.
pub(super) fn request(peer: IpAddr, key: u64) -> u64 {
    let octets = match peer {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let halves = [(octets >> 64) as u64, octets as u64];
    let mixed = halves.into_iter().fold(key, |so_far, half| mixed(mixed(so_far) ^ half));
    REQUESTS + apart(mixed, 13)
}

/// Locks that are next to each other become one, so these are apart. Without the lowest bits.
const fn apart(mixed: u64, without: u32) -> u64 {
    (mixed >> without) * 512
}
const _: () = assert!(SERVICES + apart(u64::MAX, 11) + 512 <= REQUESTS);
const _: () = assert!(REQUESTS + apart(u64::MAX, 13) + 512 <= PORTS);

/// As SplitMix64 mixes.
fn mixed(bits: u64) -> u64 {
    let mut mixed = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

impl Locks {
    /// Opens the file anew. Error: there is no `/proc`, or no descriptor left.
    pub(super) fn open(memory: impl AsFd) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self { file: File::from(inherited::noted(file.into())), threads: Mutex::new(()) })
    }

    /// Takes the lock of all. Error: a process has it for two seconds: it is stopped.
    pub(super) fn hold(&self) -> io::Result<Held<'_>> {
        let thread = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        descriptors::patiently(libc::EAGAIN, LOCK_PATIENCE, || self.lock(ALL))?;
        Ok(Held { locks: self, _thread: thread })
    }

    /// As [`hold`](Self::hold), but waits neither for another process nor for another thread.
    pub(super) fn hold_at_once(&self) -> io::Result<Held<'_>> {
        let thread = self.threads.try_lock().map_err(|_| io::ErrorKind::WouldBlock)?;
        self.lock(ALL)?;
        Ok(Held { locks: self, _thread: thread })
    }

    /// All slots: by one read, and by a question for each row of them that another process has and
    /// for each row between.
    pub(super) fn look(&self) -> io::Result<[Seen; SLOTS_MAX]> {
        let mut all = [Seen::default(); SLOTS_MAX];
        let mut rows = Vec::from([(0, SLOTS_MAX as u64)]);
        while let Some((start, end)) = rows.pop() {
            if let Some(taken) = descriptors::find_lock(&self.file, start..end)? {
                all[taken.start as usize..taken.end as usize]
                    .iter_mut()
                    .for_each(|seen| seen.is_taken = true);
                let rest = [(start, taken.start), (taken.end, end)];
                rows.extend(rest.into_iter().filter(|(start, end)| start < end));
            }
        }
        // After the locks: a process writes until it leaves its slot. The file may end behind the
        // records.
        let mut table = [0; TABLE];
        if self.file.read_at(&mut table, 0)? < NOTES_AT as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (records, notes) = table.split_at(NOTES_AT as usize);
        let numbers = |bytes| <[u8]>::chunks_exact(bytes, RECORD as usize).map(number);
        for (seen, (record, notes)) in all.iter_mut().zip(numbers(records).zip(numbers(notes))) {
            (seen.record, seen.notes) = (record, notes);
        }
        Ok(all)
    }

    /// When a slot has rested, nanoseconds since the machine started: 0 if it has, and `None` while
    /// another process has it. If that process has died, the slot rests from now on. Under the lock
    /// of all.
    pub(super) fn rests_until(
        &self,
        slot: usize,
        seen: &Seen,
        rest: Duration,
    ) -> io::Result<Option<u64>> {
        if seen.is_taken {
            return Ok(None);
        }
        let mut until = seen.record;
        if until == TAKEN {
            until = now() + rest.as_nanos() as u64;
            self.set_record(slot, until)?;
        }
        Ok(Some(if until <= now() { 0 } else { until }))
    }

    /// Whether another process has a slot.
    pub(super) fn is_taken(&self, slot: usize) -> io::Result<bool> {
        self.is_locked(slot as u64)
    }

    /// Takes a slot that is free, under the lock of all.
    pub(super) fn take(&self, slot: usize) -> io::Result<()> {
        self.lock(slot as u64)?;
        let _ = last_will::clear(self, slot);
        self.set_record(slot, TAKEN)
    }

    /// Leaves a slot, which rests then. Under the lock of all.
    pub(super) fn leave(&self, slot: usize, rest: Duration) {
        // Otherwise it is one of a process that has died, and rests when it is looked at.
        let _ = self.set_record(slot, now() + rest.as_nanos() as u64);
        self.unlock(slot as u64);
    }

    /// The process on `slot` listens at this place. Error: `EADDRINUSE`: another does.
    pub(super) fn listen(&self, place: u64, slot: u8) -> io::Result<()> {
        let _held = self.hold()?;
        match self.listener(place)? {
            Some(_) => Err(io::Error::from_raw_os_error(libc::EADDRINUSE)),
            None => self.lock(place + u64::from(slot)),
        }
    }

    /// As [`listen`](Self::listen), where no other process can be in the way.
    pub(super) fn hold_place(&self, place: u64, slot: u8) {
        // Without it a neighbour may get this process's messages.
        let _ = self.lock(place + u64::from(slot));
    }

    pub(super) fn unlisten(&self, place: u64, slot: u8) {
        self.unlock(place + u64::from(slot));
    }

    /// The slot of another process that listens there.
    pub(super) fn listener(&self, place: u64) -> io::Result<Option<u8>> {
        let found = descriptors::find_lock(&self.file, place..place + SLOTS_MAX as u64)?;
        Ok(found.and_then(|at| u8::try_from(at.start - place).ok()))
    }

    /// Has a port as `claim` says from now on. Error: `EADDRINUSE`: another process has it in a way
    /// that does not go with that.
    pub(super) fn claim_port(&self, port: u32, claim: PortClaim) -> io::Result<()> {
        let how = match claim {
            PortClaim::None => Lock::None,
            PortClaim::Shared => Lock::Shared,
            PortClaim::Alone => Lock::Alone,
        };
        let done = descriptors::lock(&self.file, PORTS + u64::from(port), how);
        done.map_err(|error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => io::Error::from_raw_os_error(libc::EADDRINUSE),
            _ => error,
        })
    }

    /// Whether another process has a port in any way.
    #[cfg(test)]
    pub(super) fn is_port_claimed(&self, port: u32) -> io::Result<bool> {
        self.is_locked(PORTS + u64::from(port))
    }

    /// This process opens `afxdp`, or has it. Returns whether no other does.
    pub(super) fn take_xdp(&self) -> bool {
        // Where the file cannot be locked, the second open fails.
        !self.lock(XDP).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    }

    pub(super) fn leave_xdp(&self) {
        self.unlock(XDP);
    }

    /// Whether another process has `afxdp`.
    pub(super) fn is_xdp_taken(&self) -> io::Result<bool> {
        self.is_locked(XDP)
    }

    /// Whether no process has a slot.
    pub(super) fn is_deserted(&self) -> bool {
        descriptors::find_lock(&self.file, 0..SLOTS_MAX as u64).is_ok_and(|found| found.is_none())
    }

    /// This guardian does what there is to do. Returns whether no other does.
    pub(super) fn take_guard(&self) -> bool {
        self.lock(GUARD).is_ok()
    }

    pub(super) fn leave_guard(&self) {
        self.unlock(GUARD);
    }

    fn is_locked(&self, at: u64) -> io::Result<bool> {
        Ok(descriptors::find_lock(&self.file, at..at + 1)?.is_some())
    }

    fn lock(&self, at: u64) -> io::Result<()> {
        descriptors::lock(&self.file, at, Lock::Alone)
    }

    fn unlock(&self, at: u64) {
        // It has no error but for a file that is none.
        let _ = descriptors::lock(&self.file, at, Lock::None);
    }

    fn set_record(&self, slot: usize, record: u64) -> io::Result<()> {
        self.write(&record.to_ne_bytes(), slot as u64 * RECORD)
    }

    pub(super) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    /// Writes to the file. Error: it ends before, as one that an older version made; `EFBIG` beyond
    /// `ulimit -f`.
    pub(super) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        // The kernel would end the program (SIGXFSZ of setrlimit(2)).
        if file_bytes_max() < at + bytes.len() as u64 {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        self.file.write_all_at(bytes, at)
    }
}

/// A number of the file.
fn number(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

/// How long a file may be that this process writes.
pub(super) fn file_bytes_max() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Nanoseconds since the machine started.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
