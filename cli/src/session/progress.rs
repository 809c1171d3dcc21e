//! Prints the progress of a long run, now and then.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use rocinante::Context;
use rocinante::stats::DeviceCounters;

use crate::ticks::Ticks;

/// Prints the device's activity after `label` on standard error until the result is dropped: every
/// second on a terminal, every ten seconds elsewhere.
pub fn start(ctx: &Context, label: &str) -> Ticks {
    let terminal = stderr().is_terminal();
    let pause = Duration::from_secs(if terminal { 1 } else { 10 });
    let (ctx, label) = (ctx.clone(), label.to_owned());
    let begin = Instant::now();
    let mut before = (begin, ctx.counters());
    let mut erased = None;
    Ticks::start(pause, move |_| {
        let now = (Instant::now(), ctx.counters());
        let text = line(&label, now.0 - begin, now.0 - before.0, &before.1, &now.1);
        let end = if terminal { "\r" } else { "\n" };
        let _ = write!(stderr(), "{text}{end}");
        before = now;
        if terminal {
            erased.get_or_insert_with(|| Erased);
        }
    })
}

/// Erases the line of a terminal in the end.
struct Erased;

impl Drop for Erased {
    fn drop(&mut self) {
        let _ = write!(stderr(), "\x1b[2K\r");
    }
}

fn line(
    label: &str,
    total: Duration,
    since: Duration,
    before: &DeviceCounters,
    now: &DeviceCounters,
) -> String {
    let (old, new) = (&before.transport, &now.transport);
    let seconds = since.as_secs_f64();
    let rate = |new: u64, old: u64| (new - old) as f64 / seconds;
    let packets = rate(new.sent_pkts + new.rcvd_pkts, old.sent_pkts + old.rcvd_pkts) / 1e6;
    let bytes = rate(new.sent_bytes + new.rcvd_bytes, old.sent_bytes + old.rcvd_bytes);
    let mut text = format!(
        "{label}: {:.0} s: {:.2} Gb/s, {packets:.3} million packets/s",
        total.as_secs_f64(),
        bytes * 8.0 / 1e9,
    );
    if new.retransmitted_pkts > 0 {
        text.push_str(&format!(", {} sent again", new.retransmitted_pkts));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_last_interval() {
        let at = |sent_pkts, sent_bytes, retransmitted_pkts| {
            let mut counters = DeviceCounters::default();
            let transport = &mut counters.transport;
            (transport.sent_pkts, transport.sent_bytes) = (sent_pkts, sent_bytes);
            transport.retransmitted_pkts = retransmitted_pkts;
            counters
        };
        let (before, now) = (at(1_000_000, 0, 0), at(3_000_000, 250_000_000, 7));
        let text = line("64 bytes", Duration::from_secs(9), Duration::from_secs(2), &before, &now);
        assert_eq!(text, "64 bytes: 9 s: 1.00 Gb/s, 1.000 million packets/s, 7 sent again");
    }
}
