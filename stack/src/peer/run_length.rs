//! How much more a receive queue holds of super-packets than of datagrams that come one by one.
//!
//! A budget is what the queue holds however it comes. What leaves as a super-packet mostly arrives
//! as one, which takes one place of a ring, or of a socket's memory little more than its bytes. How
//! packets leave the sender sees; whether they arrive so (a router or a bridge on the way may take
//! them apart) only a loss tells. So the room at a peer is stretched while what leaves is dense and
//! nothing is lost.

use super::budget::Budget;

/// More datagrams in a super-packet than this make no difference.
const DENSEST: u32 = 8;
/// So many datagrams without a loss, and it is forgotten; twice as many for each that came of it,
/// up to [`TIMES_MAX`] as many.
pub(crate) const CALM: u32 = 1 << 20;
const TIMES_MAX: u32 = 1 << 10;
/// The part of so many that is to come first.
const FIRST_PART: u32 = 1 << 10;
/// Of a ring, a place is reckoned with so many eighths of the datagrams of a super-packet; the
/// queue holds this many times what was said at most.
const PLACE: u32 = 6;
const PLACES_TIMES: u32 = 4;
/// Of a socket's memory, so many eighths of what was said at most.
const EIGHTHS_MAX: u32 = 14;
/// What a socket is charged with for a super-packet beside its bytes. Measured on Linux 6.18: 15
/// datagrams of 4112 bytes take 62,900.
const RUN_COST: u64 = 1280;
/// Super-packets of what counts as lately: what is older counts half, and less.
const LATELY: u64 = 64;
/// Payload on its way to one receiver of which more is no faster, but colder in the caches of both:
/// ten full super-packets.
pub(super) const ENOUGH: u64 = 640 * 1024;

/// Whether a peer's losses permit to count on it.
#[derive(Debug)]
pub(super) struct Trust {
    since: u32,
    calm: u32,
    least: u32,
}

impl Trust {
    /// After `least` datagrams without a loss it is whole again.
    pub(super) fn new(least: u32) -> Self {
        Self { since: least - least / FIRST_PART, calm: least, least }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.since >= self.calm
    }

    /// So many datagrams were acknowledged; returns whether it is whole again.
    #[inline]
    pub(super) fn came(&mut self, datagrams: u32) -> bool {
        let before = self.is_whole();
        if before && self.calm == self.least {
            return false;
        }
        self.since = self.since.saturating_add(datagrams);
        if self.since >= self.calm.saturating_mul(2) {
            // It went well for as long as it took to try again.
            (self.since, self.calm) = (self.least, self.least);
        }
        !before && self.is_whole()
    }

    pub(super) fn lost(&mut self) {
        if self.is_whole() {
            let most = self.least.saturating_mul(TIMES_MAX);
            self.calm = self.calm.saturating_mul(2).min(most);
        }
        self.since = 0;
    }
}

/// How dense what leaves is, or what arrives.
#[derive(Debug, Default)]
pub(super) struct Watched {
    lately: Departures,
    pub(super) density: Density,
}

impl Watched {
    /// So many datagrams in so many super-packets. Returns whether that changes how dense they are.
    #[inline]
    pub(super) fn add(&mut self, runs: u32, datagrams: u32, bytes: u64) -> bool {
        // A sender of one by one pays nothing.
        let alone = runs == datagrams && self.density == Density::default();
        !alone && self.lately.add(runs, datagrams, bytes) && self.look()
    }

    fn look(&mut self) -> bool {
        let density = self.lately.density();
        std::mem::replace(&mut self.density, density) != density
    }
}

/// What left or arrived lately.
#[derive(Debug)]
struct Departures {
    runs: u64,
    datagrams: u64,
    bytes: u64,
}

/// How dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Density {
    /// Datagrams of a super-packet, [`DENSEST`] at most.
    datagrams: u32,
    /// Eighths of what was said of a socket's memory that it holds.
    eighths: u32,
    /// How long a datagram is, roughly.
    len: u32,
}

impl Default for Density {
    /// One by one.
    fn default() -> Self {
        Self { datagrams: 1, eighths: 8, len: 0 }
    }
}

impl Default for Departures {
    /// Before anything left, as good as one by one.
    fn default() -> Self {
        Self { runs: LATELY / 2, datagrams: LATELY / 2, bytes: 0 }
    }
}

impl Departures {
    /// So many datagrams left in so many super-packets. Returns whether it is time to look at the
    /// density.
    fn add(&mut self, runs: u32, datagrams: u32, bytes: u64) -> bool {
        self.runs += u64::from(runs);
        self.datagrams += u64::from(datagrams.max(runs));
        self.bytes += bytes;
        let full = self.runs > LATELY;
        while self.runs > LATELY {
            self.runs = self.runs.div_ceil(2);
            self.datagrams = (self.datagrams / 2).max(self.runs);
            self.bytes /= 2;
        }
        full
    }

    fn density(&self) -> Density {
        let datagrams = (self.datagrams + self.runs / 2) / self.runs;
        if datagrams < 2 {
            return Density::default();
        }
        let real = (self.bytes + self.runs * RUN_COST) / self.datagrams;
        let mean = self.bytes / self.datagrams;
        // On the safe side of a step of the cost, and seven of eight: lengths differ, and the cost
        // of their mean is not the mean of their costs.
        let len = u32::try_from(mean - mean / 32).unwrap_or(u32::MAX);
        let eighths = 7 * u64::from(Budget::cost(len)) / real.max(1);
        #[allow(clippy::cast_possible_truncation)]
        Density {
            datagrams: datagrams.min(u64::from(DENSEST)) as u32,
            eighths: eighths.clamp(8, u64::from(EIGHTHS_MAX)) as u32,
            len: len / ROUGHLY * ROUGHLY,
        }
    }
}

/// A length is rounded down to a multiple of this.
const ROUGHLY: u32 = 128;

/// What counts in a receive queue.
enum Kind {
    /// The memory that the kernel charges a socket with: no datagram costs less than the smallest.
    Memory,
    /// A place takes a super-packet, so that their number counts and not their bytes.
    Places,
    /// A place takes a frame, and super-packets do not come.
    Frames,
}

fn kind(budget: Budget) -> Kind {
    let place = budget.bytes / budget.datagrams.max(1);
    if place > u32::from(u16::MAX) {
        Kind::Places
    } else if place < 2 * Budget::cost(0) {
        Kind::Memory
    } else {
        Kind::Frames
    }
}

/// What a queue of this budget holds of what comes so dense, if no more than `enough` bytes of
/// payload are wanted.
pub(super) fn stretched(budget: Budget, density: Density, enough: u64) -> Budget {
    if budget.bytes <= Budget::STANDARD.bytes || density.datagrams < 2 {
        return budget;
    }
    let (held, eighths) = match kind(budget) {
        Kind::Places => (budget.datagrams, (density.datagrams * PLACE).min(8 * PLACES_TIMES)),
        Kind::Memory => (budget.bytes / Budget::cost(density.len), density.eighths),
        Kind::Frames => return budget,
    };
    let payload = u64::from(held) * u64::from(density.len.max(ROUGHLY));
    let enough = enough.saturating_mul(8) / payload.max(1);
    #[allow(clippy::cast_possible_truncation)]
    budget.part(enough.clamp(8, u64::from(eighths.max(8))) as u32, 8)
}

/// The most datagrams that a queue of this budget is ever taken to hold.
pub(crate) fn datagrams_max(budget: Budget) -> u32 {
    match kind(budget) {
        Kind::Places if budget.bytes > Budget::STANDARD.bytes => {
            budget.datagrams.saturating_mul(PLACES_TIMES)
        }
        _ => budget.datagrams,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(datagrams: u32, eighths: u32) -> Density {
        Density { datagrams, eighths, len: 1024 }
    }

    #[test]
    fn a_ring_holds_more_the_denser_it_comes() {
        let ring = Budget { bytes: 150 * 133_118, datagrams: 150 };
        let datagrams = [1, 2, 3, 4, 5, 8].map(|d| stretched(ring, of(d, 8), ENOUGH).datagrams);
        assert_eq!(datagrams, [150, 225, 337, 450, 562, 600]);
        let long = Density { len: 4096, ..of(8, 14) };
        assert_eq!(stretched(ring, long, ENOUGH).datagrams, 150, "enough");
        assert_eq!(datagrams_max(ring), 600);
    }

    #[test]
    fn a_socket_holds_more_if_it_comes_dense() {
        let socket = Budget { bytes: 279_552, datagrams: 336 };
        assert_eq!(stretched(socket, of(8, 8), ENOUGH), socket);
        assert_eq!(stretched(socket, of(2, 14), ENOUGH), Budget { bytes: 489_216, datagrams: 588 });
        let large = Budget { bytes: 5 << 20, datagrams: 6301 };
        assert_eq!(stretched(large, of(8, 14), ENOUGH), large, "enough");
        assert_eq!(stretched(large, of(8, 14), u64::MAX), large.part(14, 8));
        assert_eq!(datagrams_max(socket), 336);
    }

    #[test]
    fn who_said_nothing_gets_no_more_nor_who_takes_frames() {
        let chunks = Budget { bytes: 1792 * 8448, datagrams: 1792 };
        for budget in [Budget::STANDARD, chunks] {
            assert_eq!(stretched(budget, of(8, 14), ENOUGH), budget);
            assert_eq!(datagrams_max(budget), budget.datagrams);
        }
    }

    #[test]
    fn a_socket_is_never_taken_to_hold_more_bytes_than_are_there() {
        // Of each length, super-packets of so many datagrams: what the kernel charges for them fits
        // wherever their stretched cost does.
        let step = if cfg!(miri) { 997 } else { 1 };
        for len in (16..=4200_u32).step_by(step) {
            for each in (2..=(60_000 / len).min(64)).step_by(step.min(20)) {
                let mut departures = Departures::default();
                for _ in 0..200 {
                    departures.add(1, each, u64::from(each * len));
                }
                let density = departures.density();
                let charged = u64::from(each * Budget::cost(len)) * 8;
                let real = u64::from(each * len) + RUN_COST - 30;
                assert!(
                    density.eighths == 8 || real * u64::from(density.eighths) <= charged,
                    "{each} of {len}: {density:?}"
                );
            }
        }
    }

    #[test]
    fn it_follows_what_leaves() {
        let mut departures = Departures::default();
        assert_eq!(departures.density(), Density::default());
        (0..200).for_each(|_| _ = departures.add(4, 60, 60 * 4112));
        assert_eq!(departures.density(), Density { len: 3968, ..of(8, 14) });
        // So long that they take nearly what they cost.
        (0..200).for_each(|_| _ = departures.add(1, 16, 16 * 3600));
        assert_eq!(departures.density(), Density { len: 3456, ..of(8, 8) });
        departures.add(1000, 1000, 1000 * 3600);
        assert_eq!(departures.density(), Density::default());
        departures.add(u32::MAX, 0, 0);
        departures.add(0, u32::MAX, u64::MAX / 2);
        assert!((8..=EIGHTHS_MAX).contains(&departures.density().eighths));
    }

    const FIRST: u32 = CALM / FIRST_PART;
    const CALM_MAX: u32 = CALM * TIMES_MAX;

    #[test]
    fn a_loss_is_remembered_for_two_million_packets() {
        let mut trust = Trust::new(CALM);
        assert!(!trust.came(FIRST - 1) && !trust.is_whole());
        assert!(trust.came(1) && trust.is_whole() && !trust.came(1));
        trust.lost();
        trust.lost();
        assert!(!trust.came(2 * CALM - 1) && !trust.is_whole());
        assert!(trust.came(1) && trust.is_whole(), "twice as many, as it came of that");
    }

    #[test]
    fn where_it_is_always_lost_it_is_tried_ever_more_seldom() {
        let mut trust = Trust::new(CALM);
        let mut tries = 0;
        for _ in 0..1 << 16 {
            trust.came(CALM / 16);
            if trust.is_whole() {
                tries += 1;
                trust.lost();
            }
        }
        assert!((10..=16).contains(&tries), "{tries} in 2³² packets");
        // Until it went well for long.
        trust.lost();
        assert!(!trust.came(CALM_MAX - 1) && trust.came(1));
        assert!(!trust.came(CALM_MAX));
        trust.lost();
        assert!(trust.came(2 * CALM));
    }
}
