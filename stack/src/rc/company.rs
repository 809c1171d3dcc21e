//! Small messages wait for company while enough is on its way: the cost is that of super-packets, so it pays to fill them.
//!
//! A message that is posted when an acknowledgement of another comes in would leave alone, be acknowledged alone, and so make the
//! next leave alone. While at least two runs, or half a window, are under way, nothing is lost by waiting until there is a run to
//! send or less is under way.

use crate::wire::ICRC_LEN;

/// Bytes of a run: what the ports send as one super-packet.
const RUN_BYTES: u32 = 65_000;
/// The most packets of a run.
const RUN_PACKETS: u32 = 60;

/// How far the run is that is being sent.
#[derive(Debug, Default)]
pub(super) struct Company {
    sent: u32,
}

impl Company {
    /// Another turn begins, and with it another run.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.sent = 0;
    }

    /// Whether the next packet begins a run.
    #[inline]
    pub(super) fn begins_run(&self) -> bool {
        self.sent == 0
    }

    /// A packet of so many bytes of payload left.
    #[inline]
    pub(super) fn sent(&mut self, payload: u32) {
        self.sent += 1;
        if self.sent >= run(payload) {
            self.sent = 0;
        }
    }

    /// Whether a message, whose first packet has so many bytes of payload, should wait: `queued` packets are to be sent, and of the
    /// `window` so many are `under_way`.
    #[inline]
    pub(super) fn awaited(&self, payload: u32, queued: u64, under_way: u32, window: u32) -> bool {
        let run = run(payload);
        self.sent == 0 && queued < u64::from(run) && under_way >= (2 * run).min(window / 2).max(2)
    }
}

/// Packets of a run.
#[inline]
fn run(payload: u32) -> u32 {
    // BTH, ICRC.
    const OVERHEAD: u32 = 12 + ICRC_LEN as u32;
    if payload <= RUN_BYTES / RUN_PACKETS - OVERHEAD {
        return RUN_PACKETS;
    }
    (RUN_BYTES / (payload + OVERHEAD)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_waits_while_little_is_under_way() {
        let company = Company::default();
        assert_eq!([run(4096), run(1068), run(1067), run(64)], [15, 59, 60, 60]);
        assert!(!company.awaited(4096, 1, 29, 512));
        assert!(company.awaited(4096, 1, 30, 512));
        assert!(!company.awaited(4096, 15, 30, 512), "a run is there");
        assert!(!company.awaited(4096, 1, 7, 16));
        assert!(company.awaited(4096, 1, 8, 16), "half a window");
        assert!(!company.awaited(4096, 1, 1, 2));
    }

    #[test]
    fn a_run_that_was_begun_is_not_cut_short() {
        let mut company = Company::default();
        for _ in 0..14 {
            company.sent(4096);
            assert!(!company.awaited(4096, 1, 100, 512));
        }
        company.sent(4096);
        assert!(company.awaited(4096, 1, 100, 512));
        company.sent(4096);
        company.begin();
        assert!(company.awaited(4096, 1, 100, 512));
    }
}
