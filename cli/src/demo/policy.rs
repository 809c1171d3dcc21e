//! Checks that the host's rules and its shaper bind the containers, and that the kernel's counters
//! show it.

use std::time::Duration;

use rocinante_lab::{Lab, Match, Tbf};

use super::pair::Pair;
use super::report::Policy;
use super::{MEASURE_HALF, VERIFY_HALF};
use crate::messages::{Bulk, MESSAGE, Request};
use crate::output::{Output, rounded};

/// Rate of the shaper.
const LIMIT_MBPS: u32 = 100;
/// Accepted rates through it.
const SHAPED_MBPS: std::ops::RangeInclusive<f64> = 70.0..=100.0;
/// Smallest ratio of the rates without and with the shaper, even on a busy machine. It shows that
/// the shaper binds.
const UNSHAPED_TIMES: f64 = 2.0;
/// Time limit of a WRITE into the void. The connection's parameters allow 4 to 16 times 17 ms.
const DROP_SECONDS_MAX: f64 = 3.0;
const STATUS: &str = "RETRY_EXC_ERR";
/// Path MTU of all checks.
const MTU: u32 = 4096;

/// The checks. Each adds its failed expectations to `broken`. `policy` keeps its figures even if a
/// phase fails.
pub(super) struct Checks<'a> {
    pub(super) lab: &'a Lab,
    pub(super) pair: &'a mut Pair,
    pub(super) policy: &'a mut Policy,
    pub(super) broken: &'a mut Vec<String>,
    pub(super) out: Output,
}

impl Checks<'_> {
    pub(super) fn all(&mut self) -> Result<(), String> {
        self.pair.phase("nft counter on the host's bridge");
        self.counter()?;
        self.pair.phase("nft drop rule on the host's bridge");
        self.block()?;
        self.pair.phase("tc tbf on the host's end of b's veth");
        self.shaper()
    }

    fn must(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.broken.push(otherwise());
        }
    }

    /// Checks that a counter on the bridge sees the packets.
    fn counter(&mut self) -> Result<(), String> {
        self.pair.connect(MTU, MEASURE_HALF)?;
        let toward_b = Match::roce().from(self.lab.container(0)).to(self.lab.container(1));
        let seen = self.lab.count(&toward_b).map_err(|error| self.pair.fault(error))?;
        let payload = self.bulk(0, 100)?.all_bytes;
        let counted = seen.counter().map_err(|error| self.pair.fault(error))?;
        seen.remove().map_err(|error| self.pair.fault(error))?;
        self.policy.counted_skbs = counted.packets;
        self.out.line(format_args!(
            "    nft counter: the host's bridge saw {} packets (skbs) of {} bytes toward b, for {payload} bytes of payload",
            counted.packets, counted.bytes
        ));
        self.must(counted.packets > 0 && counted.bytes >= payload, || {
            format!("the host's counter saw {} bytes of at least {payload}", counted.bytes)
        });
        Ok(())
    }

    /// Checks that a WRITE fails while a rule drops its packets, and that a new connection works
    /// without the rule.
    fn block(&mut self) -> Result<(), String> {
        const LIMIT: Duration = Duration::from_secs(15);
        // A timeout of 16.8 ms, and three retries.
        self.pair.connect_with(MTU, MEASURE_HALF, (12, 3))?;
        let before = self.pair.write(LIMIT)?.0;
        self.must(before == "SUCCESS", || {
            format!("a WRITE before the drop rule ended in {before}")
        });
        let rule = self.lab.block(&Match::roce()).map_err(|error| self.pair.fault(error))?;
        let (status, seconds) = self.pair.write(LIMIT)?;
        let dropped = rule.counter().map_err(|error| self.pair.fault(error))?.packets;
        rule.remove().map_err(|error| self.pair.fault(error))?;
        self.must(status == STATUS && seconds <= DROP_SECONDS_MAX, || {
            format!("under the drop rule a WRITE ended in {status} after {seconds:.3} s")
        });
        self.must(dropped > 0, || "the drop rule counted nothing".to_owned());
        (self.policy.drop_status, self.policy.drop_seconds) = (status, rounded(seconds));

        self.pair.connect(MTU, VERIFY_HALF)?;
        let request = Request::Verify { bytes_per_op: 1 << 20, seed: 4791 };
        if let Err(error) = self.pair.both(LIMIT, &request) {
            self.broken.push(format!("after the drop rule: {error}"));
            return Err(error);
        }
        self.policy.after_drop_ok = true;
        self.out.line(format_args!(
            "    nft drop:    it dropped {dropped} packets; the WRITE ended in {} after {seconds:.3} s; a new connection works without it",
            self.policy.drop_status
        ));
        Ok(())
    }

    /// Checks that a shaper on the host's end of the receiver's veth limits bulk traffic.
    fn shaper(&mut self) -> Result<(), String> {
        self.pair.connect(MTU, MEASURE_HALF)?;
        self.policy.unshaped_mbps = rounded(mbps(&self.bulk(200, 1000)?));

        let tbf = Tbf::mbit(LIMIT_MBPS);
        let shaper = self.lab.shape(1, &tbf).map_err(|error| self.pair.fault(error))?;
        // The initial burst passes within some ten milliseconds, and packets queued earlier within
        // a hundred.
        let mut shaped = self.bulk(1000, 3500)?;
        if mbps(&shaped) < *SHAPED_MBPS.start() {
            // The shaper cannot be the cause of a rate below its limit.
            self.out.line(format_args!(
                "    tc tbf:      only {:.1} Mbit/s: is the machine busy? Once more",
                mbps(&shaped)
            ));
            shaped = self.bulk(1000, 3500)?;
        }
        let stats = shaper.stats().map_err(|error| self.pair.fault(error))?;
        shaper.remove().map_err(|error| self.pair.fault(error))?;
        let (rate, seconds, all_bytes) = (mbps(&shaped), shaped.seconds, shaped.all_bytes);
        self.policy.shaped_limit_mbps = LIMIT_MBPS;
        self.policy.shaped_mbps = rounded(rate);
        (self.policy.tbf_bytes, self.policy.tbf_overlimits) = (stats.bytes, stats.overlimits);
        let unshaped = self.policy.unshaped_mbps;
        self.out.line(format_args!(
            "    tc tbf:      {LIMIT_MBPS} Mbit/s: {rate:.1} Mbit/s of payload for {seconds:.1} s, {unshaped:.0} without it; it passed {} bytes, held back {} times, dropped {}",
            stats.bytes, stats.overlimits, stats.drops
        ));
        self.must(SHAPED_MBPS.contains(&rate) && seconds >= 3.0, || {
            format!(
                "through the shaper came {rate:.1} Mbit/s for {seconds:.1} s, not 70 to 100 for 3 s"
            )
        });
        self.must(unshaped >= UNSHAPED_TIMES * rate, || {
            format!("without the shaper come {unshaped:.1} Mbit/s, with it {rate:.1}")
        });
        self.must(stats.bytes >= all_bytes && stats.overlimits > 0, || {
            format!("{all_bytes} bytes got past the shaper: {stats:?}")
        });
        Ok(())
    }

    /// The transfer to compare with and without the shaper. The outstanding WRITEs fit into the
    /// shaper's queue and pass it within the ACK timeout, so no packet is lost or sent twice.
    fn bulk(&mut self, warm_millis: u64, millis: u64) -> Result<Bulk, String> {
        self.pair.bulk(MESSAGE, 8, 1, (warm_millis, millis))
    }
}

fn mbps(bulk: &Bulk) -> f64 {
    if bulk.seconds > 0.0 { bulk.bytes as f64 * 8.0 / bulk.seconds / 1e6 } else { 0.0 }
}
