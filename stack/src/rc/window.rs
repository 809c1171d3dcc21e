//! How many packets a queue pair may have unacknowledged: starts with what the receiver has room for, halves on
//! loss, and grows back.

/// A congestion window, in packets.
#[derive(Debug, Clone)]
pub(super) struct Window {
    packets: u32,
    threshold: u32,
    max: u32,
    acknowledged: u32,
    /// Loss below this PSN was answered already.
    recover: u64,
}

const MIN: u32 = 2;

impl Window {
    pub(super) fn new(max: u32) -> Self {
        let max = max.max(MIN);
        Self { packets: max, threshold: max, max, acknowledged: 0, recover: 0 }
    }

    #[inline]
    pub(super) fn packets(&self) -> u32 {
        self.packets
    }

    /// `packets` were acknowledged.
    #[inline]
    pub(super) fn acknowledged(&mut self, packets: u32) {
        if self.packets >= self.max {
            return;
        }
        if self.packets < self.threshold {
            self.packets = (self.packets + packets).min(self.max);
            return;
        }
        self.acknowledged += packets;
        if self.acknowledged >= self.packets {
            self.acknowledged = 0;
            // One sixteenth more per round trip: a lossy shaper is probed gently, a clear path is full in a dozen.
            self.packets = (self.packets + 1 + self.packets / 16).min(self.max);
        }
    }

    /// A packet was lost, with everything below `sent` on its way; `una` is the first not acknowledged.
    pub(super) fn lost(&mut self, una: u64, sent: u64) {
        if una < self.recover {
            return;
        }
        self.recover = sent;
        self.threshold = (self.packets / 2).max(MIN);
        self.packets = self.threshold;
        self.acknowledged = 0;
    }

    /// Nothing came back in time.
    pub(super) fn timed_out(&mut self, sent: u64) {
        self.recover = sent;
        self.threshold = (self.packets / 2).max(MIN);
        self.packets = self.packets.min(4 * MIN);
        self.acknowledged = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_loss_episode_halves_once() {
        let mut window = Window::new(64);
        window.lost(100, 160);
        window.lost(110, 160);
        assert_eq!(window.packets(), 32);
        window.lost(160, 200);
        assert_eq!(window.packets(), 16);
    }

    #[test]
    fn it_grows_back_and_no_further_than_its_bound() {
        let mut window = Window::new(64);
        window.timed_out(10);
        assert_eq!(window.packets(), 8);
        for _ in 0..10_000 {
            window.acknowledged(1);
        }
        assert_eq!(window.packets(), 64);
    }
}
