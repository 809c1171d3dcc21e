//! Checks that the host's rules and its shaper bind the containers, and that the kernel's counters
//! show it.

use std::time::Duration;

use super::order::{Answer, BulkOrder, Order};
use super::pair::{Fault, Pair};
use super::report::{Policy, rounded};
use super::{CONNECT, Console, connect};
use rocinante_lab::{Lab, Match, Tbf};

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
const MESSAGE: usize = 65_536;

/// Runs all checks. Adds each failed expectation to `broken`. `policy` keeps its figures even if a
/// phase fails.
pub(super) fn check(
    lab: &Lab,
    pair: &mut Pair,
    policy: &mut Policy,
    broken: &mut Vec<String>,
    console: &Console,
) -> Result<(), Fault> {
    counter(lab, pair, policy, broken, console)?;
    block(lab, pair, policy, broken, console)?;
    shaper(lab, pair, policy, broken, console)
}

/// Checks that a counter on the bridge sees the packets.
fn counter(
    lab: &Lab,
    pair: &mut Pair,
    policy: &mut Policy,
    broken: &mut Vec<String>,
    console: &Console,
) -> Result<(), Fault> {
    const PHASE: &str = "nft counter on the host's bridge";
    let fault = |error| Fault::new(PHASE, error);
    connect(pair, PHASE, MTU, &CONNECT)?;
    let toward_b = Match::roce().from(lab.container(0)).to(lab.container(1));
    let seen = lab.count(&toward_b).map_err(fault)?;
    let payload = bulk(pair, PHASE, &order(0, 100))?.all_bytes;
    let counted = seen.counter().map_err(fault)?;
    seen.remove().map_err(fault)?;
    policy.counted_skbs = counted.packets;
    console.line(format_args!(
        "    nft counter: the host's bridge saw {} packets (skbs) of {} bytes toward b, for {payload} bytes of payload",
        counted.packets, counted.bytes
    ));
    if counted.packets == 0 || counted.bytes < payload {
        broken
            .push(format!("the host's counter saw {} bytes of at least {payload}", counted.bytes));
    }
    Ok(())
}

/// Checks that a WRITE fails while a rule drops its packets, and that a new connection works
/// without the rule.
fn block(
    lab: &Lab,
    pair: &mut Pair,
    policy: &mut Policy,
    broken: &mut Vec<String>,
    console: &Console,
) -> Result<(), Fault> {
    const PHASE: &str = "nft drop rule on the host's bridge";
    const LIMIT: Duration = Duration::from_secs(15);
    let fault = |error| Fault::new(PHASE, error);
    // A timeout of 16.8 ms, and three retries.
    connect(pair, PHASE, MTU, &Order::Connect { mtu: MTU, timeout: 12, retry_cnt: 3 })?;
    let before = write(pair, PHASE, LIMIT)?;
    if before.0 != "SUCCESS" {
        broken.push(format!("a WRITE before the drop rule ended in {}", before.0));
    }
    let rule = lab.block(&Match::roce()).map_err(fault)?;
    let (status, seconds) = write(pair, PHASE, LIMIT)?;
    let dropped = rule.counter().map_err(fault)?.packets;
    rule.remove().map_err(fault)?;
    if status != STATUS || seconds > DROP_SECONDS_MAX {
        broken.push(format!("under the drop rule a WRITE ended in {status} after {seconds:.3} s"));
    }
    if dropped == 0 {
        broken.push("the drop rule counted nothing".to_owned());
    }
    (policy.drop_status, policy.drop_seconds) = (status, rounded(seconds));

    connect(pair, PHASE, MTU, &CONNECT)?;
    let order = Order::Verify { bytes_per_op: 1 << 20, seed: 4791 };
    policy.after_drop_ok = match pair.both(PHASE, LIMIT, &order) {
        Ok(_) => true,
        Err(error) => {
            broken.push(format!("after the drop rule: {error}"));
            return Err(error);
        }
    };
    console.line(format_args!(
        "    nft drop:    it dropped {dropped} packets; the WRITE ended in {} after {seconds:.3} s; a new connection works without it",
        policy.drop_status
    ));
    Ok(())
}

/// Checks that a shaper on the host's end of the receiver's veth limits bulk traffic.
fn shaper(
    lab: &Lab,
    pair: &mut Pair,
    policy: &mut Policy,
    broken: &mut Vec<String>,
    console: &Console,
) -> Result<(), Fault> {
    const PHASE: &str = "tc tbf on the host's end of b's veth";
    let fault = |error| Fault::new(PHASE, error);
    connect(pair, PHASE, MTU, &CONNECT)?;
    policy.unshaped_mbps = rounded(bulk(pair, PHASE, &order(200, 1000))?.mbps);

    let shaper = lab.shape(1, &Tbf::mbit(LIMIT_MBPS)).map_err(fault)?;
    // The initial burst passes within some ten milliseconds, and packets queued earlier within a
    // hundred.
    let mut shaped = bulk(pair, PHASE, &order(1000, 3500))?;
    if shaped.mbps < *SHAPED_MBPS.start() {
        // The shaper cannot be the cause of a rate below its limit.
        console.line(format_args!(
            "    tc tbf:      only {:.1} Mbit/s: is the machine busy? Once more",
            shaped.mbps
        ));
        shaped = bulk(pair, PHASE, &order(1000, 3500))?;
    }
    let stats = shaper.stats().map_err(fault)?;
    shaper.remove().map_err(fault)?;
    policy.shaped_limit_mbps = LIMIT_MBPS;
    policy.shaped_mbps = rounded(shaped.mbps);
    (policy.tbf_bytes, policy.tbf_overlimits) = (stats.bytes, stats.overlimits);
    console.line(format_args!(
        "    tc tbf:      {LIMIT_MBPS} Mbit/s: {:.1} Mbit/s of payload for {:.1} s, {:.0} without it; it passed {} bytes, held back {} times, dropped {}",
        shaped.mbps, shaped.seconds, policy.unshaped_mbps, stats.bytes, stats.overlimits, stats.drops
    ));
    if !SHAPED_MBPS.contains(&shaped.mbps) || shaped.seconds < 3.0 {
        broken.push(format!(
            "through the shaper came {:.1} Mbit/s for {:.1} s, not 70 to 100 for 3 s",
            shaped.mbps, shaped.seconds
        ));
    }
    if policy.unshaped_mbps < UNSHAPED_TIMES * shaped.mbps {
        broken.push(format!(
            "without the shaper come {:.1} Mbit/s, with it {:.1}",
            policy.unshaped_mbps, shaped.mbps
        ));
    }
    if stats.bytes < shaped.all_bytes || stats.overlimits == 0 {
        broken.push(format!("{} bytes got past the shaper: {stats:?}", shaped.all_bytes));
    }
    Ok(())
}

/// The transfer to compare with and without the shaper. The outstanding WRITEs fit into the
/// shaper's queue and pass it within the ACK timeout, so no packet is lost or sent twice.
fn order(warm_millis: u64, millis: u64) -> BulkOrder {
    BulkOrder { size: MESSAGE, depth: 8, list: 1, warm_millis, millis }
}

struct Measured {
    mbps: f64,
    seconds: f64,
    all_bytes: u64,
}

fn bulk(pair: &mut Pair, phase: &str, order: &BulkOrder) -> Result<Measured, Fault> {
    let limit = Duration::from_millis(order.warm_millis + order.millis) + Duration::from_secs(15);
    match pair.served(phase, limit, &Order::Bulk(*order))? {
        Answer::Bulk { bytes, seconds, all_bytes, .. } => {
            let mbps = if seconds > 0.0 { bytes as f64 * 8.0 / seconds / 1e6 } else { 0.0 };
            Ok(Measured { mbps, seconds, all_bytes })
        }
        other => Err(Fault::new(phase, format!("unexpected answer {other:?}"))),
    }
}

/// Status and seconds of one WRITE.
fn write(pair: &mut Pair, phase: &str, limit: Duration) -> Result<(String, f64), Fault> {
    match pair.first(phase, limit, &Order::Write)? {
        Answer::Wrote { status, seconds, .. } => Ok((status, seconds)),
        other => Err(Fault::new(phase, format!("unexpected answer {other:?}"))),
    }
}
