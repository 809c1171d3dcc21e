//! Waits for a peer that may be busy without limit: as long as packets arrive from the network.

use std::time::{Duration, Instant};

use rocinante::Context;

use crate::ending::{self, Attentive};

/// Tells whether packets still arrive at a device. This process cannot count the packets of a
/// hardware device.
#[derive(Debug)]
pub struct Quiet<'a> {
    ctx: &'a Context,
    patience: Duration,
    packets: u64,
    since: Instant,
    _attentive: Attentive,
}

impl<'a> Quiet<'a> {
    /// Starts now.
    #[must_use]
    pub fn new(ctx: &'a Context, patience: Duration) -> Self {
        let packets = ctx.counters().transport.rcvd_pkts;
        let since = Instant::now();
        Self { ctx, patience, packets, since, _attentive: ending::attentive() }
    }

    /// Whether a packet arrived within `patience`; always `true` where packets cannot be counted.
    /// `false` after a signal. A call takes a lock, so call it a few times per second only.
    #[must_use]
    pub fn goes_on(&mut self) -> bool {
        if ending::signal().is_some() {
            return false;
        }
        if self.ctx.backend().is_none() {
            return true;
        }
        let packets = self.ctx.counters().transport.rcvd_pkts;
        if packets != self.packets {
            (self.packets, self.since) = (packets, Instant::now());
        }
        self.since.elapsed() < self.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante::OpenOptions;
    use rocinante::device::Backend;

    #[test]
    fn silence_ends_patience() {
        let (here, _) = rocinante::doc::addresses();
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(here).unwrap();
        // Longer than this thread may be without a processor.
        let patience = Duration::from_secs(2);
        let mut quiet = Quiet::new(&ctx, patience);
        assert!(quiet.goes_on());
        std::thread::sleep(patience);
        assert!(!quiet.goes_on());
    }
}
