//! A link: its treatment of datagrams in one direction, decided from a seed.

use std::time::Duration;

use super::rng::Rng;

/// The bytes of an Ethernet header, which no MTU counts.
const ETHERNET: usize = 14;

/// The byte of the BTH that the ICRC does not cover: routers may change it.
const UNCOVERED: usize = 4;

/// How a link treats its datagrams, in one direction. The default is perfect: no delay, no fault.
/// Probabilities are in parts per million (1 % = 10,000).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LinkConfig {
    /// Time from the sender's flush (or the end of the rate limiter's queue) to the receiver.
    pub(crate) delay: Duration,
    /// Up to this much additional delay, drawn for each datagram. Datagrams overtake one another if
    /// it exceeds the distance between them.
    pub(crate) jitter: Duration,
    /// Datagrams lost, one by one.
    pub(crate) drop_ppm: u32,
    /// Datagrams that start a burst of losses.
    pub(crate) burst_ppm: u32,
    /// The longest such burst in datagrams; each takes 1 to this many.
    pub(crate) burst_max: u32,
    /// Datagrams that arrive twice.
    pub(crate) duplicate_ppm: u32,
    /// Datagrams that arrive late, so that later ones overtake them.
    pub(crate) reorder_ppm: u32,
    /// The longest delay of those; each is delayed by 1 ns to this much.
    pub(crate) reorder_delay: Duration,
    /// Datagrams with one bit flipped, any from the BTH to the ICRC that the ICRC covers.
    pub(crate) corrupt_ppm: u32,
    /// Datagrams marked as having met congestion (ECN, RFC 3168).
    pub(crate) mark_ppm: u32,
    /// Of this many datagrams, the last is lost; 0 for none.
    pub(crate) every: u32,
    /// The longest datagram that passes, in bytes with its IP header.
    pub(crate) mtu: Option<u32>,
    /// Whether nothing passes.
    pub(crate) is_cut: bool,
    /// A bottleneck.
    pub(crate) rate: Option<Rate>,
}

/// A rate limit with a queue in front of it; datagrams that do not fit are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Bits per second, Ethernet, IP and UDP headers included; 0 counts as 1.
    pub(crate) bits_per_second: u64,
    /// Bytes in the queue at most, including the datagram being sent.
    pub(crate) queue_bytes: u32,
}

impl LinkConfig {
    /// Whether every datagram arrives unchanged and at once.
    pub(crate) fn is_perfect(&self) -> bool {
        *self == Self::default()
    }
}

/// Why a datagram is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// By [`LinkConfig::drop_ppm`].
    Chance,
    /// In a burst.
    Burst,
    /// By [`LinkConfig::every`].
    Every,
    /// The rate limiter's queue is full.
    Rate,
    /// By [`LinkConfig::is_cut`].
    Cut,
    /// More datagrams are held back than there is room for.
    Full,
    /// It is longer than [`LinkConfig::mtu`].
    Mtu,
}

/// One direction of a link.
#[derive(Debug)]
pub(crate) struct Link {
    config: LinkConfig,
    /// When the rate limiter's queue will be empty.
    busy_until: Duration,
    /// Remaining losses of the current burst.
    burst_left: u32,
    /// Datagrams since the last that [`LinkConfig::every`] lost.
    passed: u32,
}

/// The fate of one datagram, or of one of its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fate {
    /// When it arrives.
    pub(crate) due: Duration,
    /// The bit to flip.
    pub(crate) flip: Option<usize>,
    /// Whether later ones overtake it.
    pub(crate) is_late: bool,
    /// Whether it is marked as having met congestion.
    pub(crate) is_marked: bool,
}

impl Fate {
    /// The fate of a datagram that arrives unchanged.
    pub(crate) const fn at(due: Duration) -> Self {
        Self { due, flip: None, is_late: false, is_marked: false }
    }
}

impl Link {
    pub(crate) fn new(config: LinkConfig) -> Self {
        Self { config, busy_until: Duration::ZERO, burst_left: 0, passed: 0 }
    }

    /// Decides the fates of a datagram's copies by the numbers of `rng`; `len` bytes, after
    /// `header` bytes of headers. Error: it is lost.
    pub(crate) fn decide(
        &mut self,
        rng: &mut Rng,
        now: Duration,
        len: usize,
        header: usize,
    ) -> Result<(Fate, Option<Fate>), Loss> {
        if let Some(loss) = self.loss(rng, len + header) {
            return Err(loss);
        }
        let leaves = self.leaves(now, len + header).ok_or(Loss::Rate)?;
        let twice = rng.chance(self.config.duplicate_ppm);
        let first = self.fate(rng, leaves, len);
        Ok((first, twice.then(|| self.fate(rng, leaves, len))))
    }

    fn loss(&mut self, rng: &mut Rng, frame: usize) -> Option<Loss> {
        let config = &self.config;
        if config.is_cut {
            return Some(Loss::Cut);
        }
        if config.mtu.is_some_and(|mtu| frame > mtu as usize + ETHERNET) {
            return Some(Loss::Mtu);
        }
        if config.every > 0 {
            self.passed += 1;
            if self.passed >= config.every {
                self.passed = 0;
                return Some(Loss::Every);
            }
        }
        if self.burst_left == 0 && rng.chance(self.config.burst_ppm) {
            self.burst_left = 1 + rng.below(u64::from(self.config.burst_max)) as u32;
        }
        if self.burst_left > 0 {
            self.burst_left -= 1;
            return Some(Loss::Burst);
        }
        rng.chance(self.config.drop_ppm).then_some(Loss::Chance)
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

    fn fate(&self, rng: &mut Rng, leaves: Duration, len: usize) -> Fate {
        let due = leaves.saturating_add(self.config.delay);
        let mut fate = Fate::at(due);
        if !self.config.jitter.is_zero() {
            fate.due = fate.due.saturating_add(up_to(rng, self.config.jitter));
        }
        if rng.chance(self.config.reorder_ppm) {
            let late = up_to(rng, self.config.reorder_delay).max(Duration::from_nanos(1));
            fate.due = fate.due.saturating_add(late);
            fate.is_late = true;
        }
        if len > 0 && rng.chance(self.config.corrupt_ppm) {
            let bit = rng.below(len as u64 * 8) as usize;
            let is_seen = bit / 8 != UNCOVERED || len <= UNCOVERED + 1;
            fate.flip = Some(if is_seen { bit } else { bit + 8 });
        }
        fate.is_marked = rng.chance(self.config.mark_ppm);
        fate
    }
}

fn up_to(rng: &mut Rng, limit: Duration) -> Duration {
    let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    Duration::from_nanos(rng.below(nanos.saturating_add(1)))
}
