//! The treatment of datagrams between two addresses.

use std::time::Duration;

use super::rng::Rng;

/// How a link treats its datagrams, in one direction. The default is perfect: no delay, no fault.
///
/// Probabilities are in parts per million (1 % = 10,000). They are drawn for each datagram from the
/// link's own generator, so one link's faults do not depend on the traffic of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkConfig {
    /// Time from the sender's flush (or the end of the rate limiter's queue) to the receiver.
    pub delay: Duration,
    /// Up to this much additional delay, drawn for each datagram. Datagrams overtake one another if
    /// it exceeds the distance between them.
    pub jitter: Duration,
    /// Datagrams lost, one by one.
    pub drop_ppm: u32,
    /// Datagrams that start a burst of losses.
    pub burst_ppm: u32,
    /// The longest such burst in datagrams; each takes 1 to this many.
    pub burst_max: u32,
    /// Datagrams that arrive twice.
    pub duplicate_ppm: u32,
    /// Datagrams that arrive late, so that later ones overtake them.
    pub reorder_ppm: u32,
    /// The longest delay of those; each is delayed by 1 ns to this much.
    pub reorder_delay: Duration,
    /// Datagrams with one bit flipped, any bit from the BTH to the ICRC.
    pub corrupt_ppm: u32,
    /// Datagrams truncated to any length from 0 up.
    pub truncate_ppm: u32,
    /// A bottleneck.
    pub rate: Option<Rate>,
}

/// A rate limit with a queue in front of it; datagrams that do not fit are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Bits per second, Ethernet, IP and UDP headers included; 0 counts as 1.
    pub bits_per_second: u64,
    /// Bytes in the queue at most, including the datagram being sent.
    pub queue_bytes: u32,
}

impl LinkConfig {
    /// Whether every datagram arrives unchanged and at once.
    #[must_use]
    pub fn is_perfect(&self) -> bool {
        *self == Self::default()
    }
}

/// How often each fault has happened since the network was made, in datagrams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Flushed by a port, and not too long for its link.
    pub sent: u64,
    /// Put into a receive queue, duplicates included.
    pub delivered: u64,
    /// Lost one by one.
    pub dropped: u64,
    /// Lost in bursts.
    pub dropped_in_bursts: u64,
    /// Lost by the [tap](super::SimNet::set_tap).
    pub dropped_by_tap: u64,
    /// Lost because a rate limiter's queue was full.
    pub dropped_by_rate: u64,
    /// Lost because the receiver's queue was full.
    pub dropped_at_receiver: u64,
    /// Lost because no port has the destination address.
    pub unroutable: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Made late.
    pub reordered: u64,
    /// With a flipped bit.
    pub corrupted: u64,
    /// Cut short.
    pub truncated: u64,
}

/// One direction between two addresses.
#[derive(Debug)]
pub(super) struct SimLink {
    pub(super) config: LinkConfig,
    /// Whether `config` was set for this link, and does not follow the default.
    pub(super) explicit: bool,
    rng: Rng,
    /// When the rate limiter's queue will be empty.
    busy_until: Duration,
    /// Remaining losses of the current burst.
    burst_left: u32,
}

/// The fate of one datagram, or of one of its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fate {
    /// When it arrives.
    pub(super) due: Duration,
    /// The bit to flip.
    pub(super) flip: Option<usize>,
    /// The length that arrives.
    pub(super) len: usize,
}

impl SimLink {
    pub(super) fn new(config: LinkConfig, explicit: bool, rng: Rng) -> Self {
        Self { config, explicit, rng, busy_until: Duration::ZERO, burst_left: 0 }
    }

    /// Decides the fates of a datagram's copies; `len` bytes, after `header` bytes of headers.
    pub(super) fn decide(
        &mut self,
        now: Duration,
        len: usize,
        header: usize,
        stats: &mut SimStats,
    ) -> [Option<Fate>; 2] {
        if self.is_lost(stats) {
            return [None; 2];
        }
        let Some(leaves) = self.leaves(now, len + header) else {
            stats.dropped_by_rate += 1;
            return [None; 2];
        };
        let twice = self.rng.chance(self.config.duplicate_ppm);
        stats.duplicated += u64::from(twice);
        let first = self.fate(leaves, len, stats);
        [Some(first), twice.then(|| self.fate(leaves, len, stats))]
    }

    fn is_lost(&mut self, stats: &mut SimStats) -> bool {
        if self.burst_left == 0 && self.rng.chance(self.config.burst_ppm) {
            self.burst_left = 1 + self.rng.below(u64::from(self.config.burst_max)) as u32;
        }
        if self.burst_left > 0 {
            self.burst_left -= 1;
            stats.dropped_in_bursts += 1;
            return true;
        }
        let lost = self.rng.chance(self.config.drop_ppm);
        stats.dropped += u64::from(lost);
        lost
    }

    /// When the last bit has left the rate limiter; `None` if its queue is full.
    fn leaves(&mut self, now: Duration, frame: usize) -> Option<Duration> {
        let Some(Rate { bits_per_second, queue_bytes }) = self.config.rate else {
            return Some(now);
        };
        let rate = u128::from(bits_per_second.max(1));
        let backlog = self.busy_until.saturating_sub(now).as_nanos();
        let queued = backlog * rate / 8_000_000_000;
        if queued + frame as u128 > u128::from(queue_bytes) {
            return None;
        }
        let nanos = (frame as u128 * 8_000_000_000).div_ceil(rate);
        let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.busy_until = self.busy_until.max(now).saturating_add(takes);
        Some(self.busy_until)
    }

    fn fate(&mut self, leaves: Duration, len: usize, stats: &mut SimStats) -> Fate {
        let mut due = leaves.saturating_add(self.config.delay);
        if !self.config.jitter.is_zero() {
            due = due.saturating_add(self.up_to(self.config.jitter));
        }
        if self.rng.chance(self.config.reorder_ppm) {
            let late = self.up_to(self.config.reorder_delay).max(Duration::from_nanos(1));
            due = due.saturating_add(late);
            stats.reordered += 1;
        }
        let mut fate = Fate { due, flip: None, len };
        if len > 0 && self.rng.chance(self.config.truncate_ppm) {
            fate.len = self.rng.below(len as u64) as usize;
            stats.truncated += 1;
        }
        if fate.len > 0 && self.rng.chance(self.config.corrupt_ppm) {
            fate.flip = Some(self.rng.below(fate.len as u64 * 8) as usize);
            stats.corrupted += 1;
        }
        fate
    }

    fn up_to(&mut self, limit: Duration) -> Duration {
        let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.rng.below(nanos.saturating_add(1)))
    }
}
