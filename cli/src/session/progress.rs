//! Prints the progress of a long run, now and then.

use std::io::{IsTerminal, Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocinante::Context;
use rocinante::stats::DeviceCounters;

/// Prints a line on standard error until it is dropped: every second on a terminal, every ten
/// seconds elsewhere.
pub struct Progress {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Begins to print the device's activity, after `label`.
    #[must_use]
    pub fn start(ctx: &Context, label: &str) -> Self {
        let terminal = stderr().is_terminal();
        let pause = Duration::from_secs(if terminal { 1 } else { 10 });
        let (ctx, label) = (ctx.clone(), label.to_owned());
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            let mut before = (start, ctx.counters());
            let mut printed = false;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let now = (Instant::now(), ctx.counters());
                let text = line(&label, now.0 - start, now.0 - before.0, &before.1, &now.1);
                let end = if terminal { "\r" } else { "\n" };
                let _ = write!(stderr(), "{text}{end}");
                before = now;
                printed = true;
            }
            if printed && terminal {
                let _ = write!(stderr(), "\x1b[2K\r");
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
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
