//! The ledger of a container: memory in which its programs charge what they hold, each device in a
//! slot of its own, so that they keep limits together. The agent writes the limits, and clears the
//! slot of a device that has gone: no sum is kept that a dead process could leave wrong.
//!
//! Each process of the container can write each number at any time. It harms its container alone:
//! no number leads to memory, and no sum wraps.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::PAGES_MAX;
use crate::frames::xdp::{SharedWords, is_memory_file, memory_file};

/// The limited resources, by the kernel's names (rdma.max of cgroup v2), and registered bytes.
pub const RESOURCES: [&str; 3] = ["hca_handle", "hca_object", "mr_bytes"];
/// In the place of a limit: none.
pub const NO_LIMIT: u64 = u64::MAX;

/// A number for each of [`RESOURCES`].
pub type Amounts = [u64; RESOURCES.len()];

const SLOT_WORDS: usize = 8;
const WORDS: usize = SLOTS_AT + PAGES_MAX * SLOT_WORDS;
const LIMITS_AT: usize = 8;
const PEAKS_AT: usize = 16;
const EVENTS_AT: usize = 24;
const SLOTS_AT: usize = 32;
/// Bytes of a ledger.
pub(super) const BYTES: usize = WORDS * size_of::<u64>();
/// Of a charge for which there is room until another program's attempt is seen beside it.
const ATTEMPTS: usize = 64;

/// A ledger in this process's memory.
#[derive(Debug)]
pub struct Ledger(SharedWords);

/// The numbers of a ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// All that is charged now.
    pub current: Amounts,
    /// The most that was.
    pub peak: Amounts,
    /// Refused charges.
    pub events: Amounts,
}

impl Ledger {
    /// A fresh one, without limits, that goes on from these peaks and events; and its file.
    ///
    /// # Errors
    /// No descriptor or no memory left.
    pub fn make(from: &Usage) -> io::Result<(OwnedFd, Self)> {
        let file = memory_file(c"rocinante-ledger", BYTES)?;
        let ledger = Self::of_fd(file.as_fd(), BYTES)?;
        ledger.limit(&[NO_LIMIT; RESOURCES.len()]);
        ledger.put(PEAKS_AT, &from.peak);
        ledger.put(EVENTS_AT, &from.events);
        Ok((file, ledger))
    }

    /// That of another process's descriptor, opened for reading and writing. Error: it is none.
    pub fn open(file: &File) -> io::Result<Self> {
        Self::of_fd(file.as_fd(), BYTES)
    }

    pub(super) fn of_fd(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        if bytes < BYTES || !is_memory_file(file, bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        SharedWords::of_fd(file, BYTES).map(Self)
    }

    fn at(&self, at: usize) -> &[AtomicU64] {
        &self.0.words()[at..at + RESOURCES.len()]
    }

    /// Each access has its place in one order of all processes: of two programs that charge and
    /// then add up, one sees both charges.
    fn get(&self, at: usize) -> Amounts {
        let words = self.at(at);
        std::array::from_fn(|nth| words[nth].load(Ordering::SeqCst))
    }

    fn put(&self, at: usize, amounts: &Amounts) {
        let words = self.at(at).iter().zip(amounts);
        words.for_each(|(word, amount)| word.store(*amount, Ordering::SeqCst));
    }

    /// Puts limits in force, for later charges.
    pub fn limit(&self, limits: &Amounts) {
        self.put(LIMITS_AT, limits);
    }

    /// The limits in force.
    #[must_use]
    pub fn limits(&self) -> Amounts {
        self.get(LIMITS_AT)
    }

    /// The device of a slot has gone.
    pub fn clear(&self, slot: usize) {
        self.put(slot_at(slot), &Amounts::default());
    }

    /// The numbers of now.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage { current: self.sum(), peak: self.get(PEAKS_AT), events: self.get(EVENTS_AT) }
    }

    fn sum(&self) -> Amounts {
        let slots = (0..PAGES_MAX).map(|slot| self.get(slot_at(slot)));
        slots.fold(Amounts::default(), |sum, slot| plus(&sum, &slot))
    }
}

fn slot_at(slot: usize) -> usize {
    SLOTS_AT + slot.min(PAGES_MAX - 1) * SLOT_WORDS
}

fn plus(one: &Amounts, other: &Amounts) -> Amounts {
    std::array::from_fn(|nth| one[nth].saturating_add(other[nth]))
}

fn minus(one: &Amounts, other: &Amounts) -> Amounts {
    std::array::from_fn(|nth| one[nth].saturating_sub(other[nth]))
}

/// The first resource of which `wanted` has some, and the sum more than its limit.
fn exceeded(sum: &Amounts, wanted: &Amounts, limits: &Amounts) -> Option<Exceeded> {
    let resource = (0..RESOURCES.len()).find(|nth| wanted[*nth] > 0 && sum[*nth] > limits[*nth])?;
    Some(Exceeded { resource, limit: limits[resource] })
}

/// A slot of a ledger.
#[derive(Debug)]
pub struct Seat {
    pub(super) ledger: Ledger,
    pub(super) slot: usize,
    /// Other processes of the user find the ledger by this descriptor.
    pub(super) _file: OwnedFd,
}

/// A charge was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// By its number in [`RESOURCES`].
    pub resource: usize,
    /// The container's limit.
    pub limit: u64,
}

/// The holdings of a device. Until an agent gives it a seat it only counts.
#[derive(Debug)]
pub struct Account {
    inner: Mutex<(Amounts, Option<Seat>)>,
    /// A child of fork(2) has the memory, too, and none of the objects.
    process: u32,
}

impl Default for Account {
    fn default() -> Self {
        Self { inner: Mutex::default(), process: std::process::id() }
    }
}

impl Account {
    fn lock(&self) -> Option<MutexGuard<'_, (Amounts, Option<Seat>)>> {
        let is_own = self.process == std::process::id();
        is_own.then(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Charges from now on there, what it holds, too.
    pub fn sit(&self, seat: Seat) {
        let Some(mut inner) = self.lock() else { return };
        let (held, old) = &mut *inner;
        seat.ledger.put(slot_at(seat.slot), held);
        *old = Some(seat);
    }

    /// Sits on a ledger of its own, which this returns: for a test, where no agent is.
    #[doc(hidden)]
    pub fn sit_alone(&self) -> io::Result<Ledger> {
        let (file, ledger) = Ledger::make(&Usage::default())?;
        self.sit(Seat { ledger: Ledger::of_fd(file.as_fd(), BYTES)?, slot: 0, _file: file });
        Ok(ledger)
    }

    /// The limits of the container.
    #[must_use]
    pub fn limits(&self) -> Amounts {
        let inner = self.lock();
        let seat = inner.as_ref().and_then(|inner| inner.1.as_ref());
        seat.map_or([NO_LIMIT; RESOURCES.len()], |seat| seat.ledger.limits())
    }

    /// Charges all of this or nothing.
    ///
    /// # Errors
    /// The container would have more than it may.
    pub fn charge(&self, wanted: &Amounts) -> Result<(), Exceeded> {
        let Some(mut inner) = self.lock() else { return Ok(()) };
        let (held, seat) = &mut *inner;
        let after = plus(held, wanted);
        let admitted = seat.as_ref().map_or(Ok(()), |seat| seat.charge(held, &after, wanted));
        if admitted.is_ok() {
            *held = after;
        }
        admitted
    }

    /// Gives this back.
    pub fn refund(&self, amounts: &Amounts) {
        let Some(mut inner) = self.lock() else { return };
        let (held, seat) = &mut *inner;
        *held = minus(held, amounts);
        if let Some(Seat { ledger, slot, .. }) = seat {
            ledger.put(slot_at(*slot), held);
        }
    }
}

impl Seat {
    /// Charges first and adds up then, so that two programs never both take the last that is left.
    /// One that finds too much takes its charge back and tries again: without the other's attempt
    /// there may be room. An attempt that cannot succeed is never seen by others.
    fn charge(&self, held: &Amounts, after: &Amounts, wanted: &Amounts) -> Result<(), Exceeded> {
        let Self { ledger, slot, .. } = self;
        let at = slot_at(*slot);
        let mut refused = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::yield_now();
            }
            let limits = ledger.limits();
            refused = exceeded(&plus(&ledger.sum(), wanted), wanted, &limits);
            if refused.is_some() {
                break;
            }
            ledger.put(at, after);
            let sum = ledger.sum();
            refused = exceeded(&sum, wanted, &limits);
            if refused.is_none() {
                let peaks = ledger.at(PEAKS_AT).iter().zip(sum).zip(wanted);
                for ((peak, now), _) in peaks.filter(|(_, wanted)| **wanted > 0) {
                    peak.fetch_max(now, Ordering::Relaxed);
                }
                return Ok(());
            }
            ledger.put(at, held);
        }
        let refused = refused.expect("there was an attempt");
        ledger.at(EVENTS_AT)[refused.resource].fetch_add(1, Ordering::Relaxed);
        Err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The accounts of two devices on one ledger, as two programs have them.
    fn pair() -> (Ledger, [Account; 2]) {
        let (file, ledger) = Ledger::make(&Usage::default()).expect("a ledger");
        let accounts = [0, 1].map(|slot| {
            let account = Account::default();
            let ledger = Ledger::of_fd(file.as_fd(), BYTES).expect("it is one");
            let _file = file.try_clone().expect("a copy");
            account.sit(Seat { ledger, slot, _file });
            account
        });
        (ledger, accounts)
    }

    #[test]
    fn devices_of_a_container_share_what_it_may_have() {
        let (ledger, [one, two]) = pair();
        ledger.limit(&[NO_LIMIT, 3, 100]);
        assert_eq!(two.limits(), [NO_LIMIT, 3, 100]);
        one.charge(&[1, 0, 0]).expect("no limit");
        one.charge(&[0, 2, 0]).expect("room");
        let refused = two.charge(&[0, 2, 0]).expect_err("4 of 3");
        assert_eq!(refused, Exceeded { resource: 1, limit: 3 });
        two.charge(&[0, 1, 60]).expect("the last object");
        assert_eq!(one.charge(&[0, 0, 41]).expect_err("101 bytes").resource, 2);
        assert_eq!(one.charge(&[0, 1, u64::MAX]).expect_err("nothing of it").resource, 1);
        let usage = ledger.usage();
        assert_eq!((usage.current, usage.peak), ([1, 3, 60], [1, 3, 60]));
        assert_eq!(usage.events, [0, 2, 1]);
        one.refund(&[0, 2, 0]);
        two.charge(&[0, 2, 40]).expect("given back");
        // A process is killed.
        ledger.clear(1);
        assert_eq!(ledger.usage().current, [1, 0, 0]);
        assert_eq!(ledger.usage().peak, [1, 3, 100]);
        // An attempt that cannot succeed changes no other figure.
        two.charge(&[0, 0, 1 << 40]).expect_err("far beyond");
        assert_eq!(ledger.usage().peak, [1, 3, 100]);
        // A limit below the use: objects stay, and no more come.
        one.charge(&[0, 3, 0]).expect("room");
        ledger.limit(&[0, 2, 0]);
        one.charge(&[0, 1, 0]).expect_err("3 of 2");
        one.refund(&[0, 2, 0]);
        one.charge(&[0, 1, 0]).expect("2 of 2");
    }

    #[test]
    fn what_a_device_holds_goes_with_it_to_another_ledger() {
        let (first, [one, _]) = pair();
        let unseated = Account::default();
        unseated.charge(&[1, 5, 7]).expect("no agent is there");
        let (file, second) = Ledger::make(&first.usage()).expect("a ledger");
        one.charge(&[1, 2, 3]).expect("no limit");
        for (slot, account) in [(0, &unseated), (PAGES_MAX - 1, &one)] {
            let ledger = Ledger::of_fd(file.as_fd(), BYTES).expect("it is one");
            let _file = file.try_clone().expect("a copy");
            account.sit(Seat { ledger, slot, _file });
        }
        assert_eq!(second.usage().current, [2, 7, 10]);
        one.refund(&[1, 2, 3]);
        assert_eq!(second.usage().current, [1, 5, 7]);
    }

    #[test]
    fn no_number_of_a_hostile_process_leads_anywhere() {
        let (ledger, [one, _]) = pair();
        one.charge(&[1, 1, 1]).expect("no limit");
        for value in [0, 1, u64::MAX - 1, u64::MAX, 0xA5A5_A5A5_A5A5_A5A5] {
            ledger.0.words().iter().for_each(|word| word.store(value, Ordering::Relaxed));
            let _ = (one.charge(&[0, 1, 8]), ledger.usage());
            one.refund(&[0, u64::MAX, 9]);
            ledger.clear(usize::MAX);
        }
        // The device's own numbers are in its own memory.
        ledger.limit(&[NO_LIMIT; 3]);
        (0..PAGES_MAX).for_each(|slot| ledger.clear(slot));
        one.charge(&[1, 1, 0]).expect("no limit");
        assert_eq!(ledger.usage().current, [2, 1, 0]);
    }

    /// Threads of two programs at the limit: never more than it, and all of it is had.
    #[test]
    fn at_one_time_no_more_is_charged_than_the_limit_and_no_less() {
        let (ledger, accounts) = pair();
        let rounds = 20_000;
        ledger.limit(&[NO_LIMIT, 1, NO_LIMIT]);
        let had = AtomicU64::new(0);
        // Both go on within nanoseconds, if each has a processor.
        let come = AtomicU64::new(0);
        let meet = |nth: u64| {
            come.fetch_add(1, Ordering::SeqCst);
            for spins in 0.. {
                if come.load(Ordering::SeqCst) >= 2 * nth {
                    break;
                }
                if spins % 1024 == 1023 {
                    std::thread::yield_now();
                }
            }
        };
        std::thread::scope(|scope| {
            for account in &accounts {
                scope.spawn(|| {
                    for round in 0..rounds {
                        meet(2 * round + 1);
                        let got = account.charge(&[0, 1, 0]).is_ok();
                        had.fetch_add(got.into(), Ordering::Relaxed);
                        meet(2 * round + 2);
                        if got {
                            account.refund(&[0, 1, 0]);
                        }
                    }
                });
            }
        });
        assert_eq!(had.load(Ordering::Relaxed), rounds);
        assert_eq!((ledger.usage().current[1], ledger.usage().peak[1]), (0, 1));
    }
}
