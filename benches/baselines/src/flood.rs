//! Packets at full speed in one direction, counted at the receiver.

use std::io;
use std::time::{Duration, Instant};

use rocinante::VerbsError;
use serde::{Deserialize, Serialize};

use crate::drive::PATIENCE;
use crate::shape::Shape;
use crate::{Link, Packet, Tally};

/// A packet counts as lost if it has not arrived this long after the last arrival.
const LOST: Duration = Duration::from_micros(500);

/// The received part of a flood.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) packets: u64,
    pub(crate) bad: u64,
    pub(crate) seconds: f64,
}

/// Sends at full speed for `time`, with at most the packets of `window` full super-packets in
/// flight. Returns the number of packets that it considers lost.
pub(crate) fn flood(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &[u8],
    time: Duration,
    window: u64,
) -> io::Result<u64> {
    let (mut sent, mut lost) = (0, 0);
    let mut run = Vec::with_capacity(link.limits().packets);
    let window = window * longest_run(&mut run, link, shape, region);
    let end = Instant::now() + time;
    let mut number = 0;
    while Instant::now() < end {
        fill(&mut run, link, shape, region, &mut number, u32::MAX);
        sent += run.len() as u64;
        lost += room(tally, sent - lost, window);
        send(link, &run, end + PATIENCE)?;
    }
    Ok(lost)
}

/// The most packets of a message that leave at once. The first packet is longer than the others, so
/// it starts a run of two, which is no measure for a window.
fn longest_run<'a>(
    run: &mut Vec<Packet<'a>>,
    link: &impl Link,
    shape: Shape,
    region: &'a [u8],
) -> u64 {
    let (mut number, mut longest) = (0, 0);
    while number < shape.packets {
        fill(run, link, shape, region, &mut number, u32::MAX);
        longest = longest.max(run.len());
    }
    longest as u64
}

/// The packets from `number` on that leave at once, up to but not including number `end`.
pub(crate) fn fill<'a>(
    run: &mut Vec<Packet<'a>>,
    link: &impl Link,
    shape: Shape,
    region: &'a [u8],
    number: &mut u32,
    end: u32,
) {
    let limits = link.limits();
    run.clear();
    let (mut bytes, mut size) = (0, usize::MAX);
    while run.len() < limits.packets && *number != end {
        let packet = shape.packet(*number, region);
        // All packets of a run have one size; only the last may be shorter.
        let joins = run.first().is_none_or(|first| size == first.len() && packet.len() <= size);
        if !joins || bytes + packet.len() > limits.bytes {
            break;
        }
        size = packet.len();
        bytes += size;
        run.push(packet);
        *number = number.wrapping_add(1);
    }
}

/// Sends a run as soon as there is room for it.
pub(crate) fn send(link: &mut impl Link, run: &[Packet<'_>], deadline: Instant) -> io::Result<()> {
    while !link.send(run)? {
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Waits until at most `window` of the packets `sent` are in flight; returns the number of lost
/// packets.
fn room(tally: &Tally, sent: u64, window: u64) -> u64 {
    let (mut since, mut before) = (None, tally.get());
    loop {
        for _ in 0..64 {
            if sent.saturating_sub(tally.get()) <= window {
                return 0;
            }
            std::hint::spin_loop();
        }
        let (now, arrived) = (Instant::now(), tally.get());
        if arrived != before {
            (since, before) = (None, arrived);
        } else if now - *since.get_or_insert(now) > LOST {
            return sent - arrived;
        }
    }
}

/// Counts packets that arrive whole, for `time`, starting `warm_up` after the first packet.
pub(crate) fn count(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &mut [u8],
    warm_up: Duration,
    time: Duration,
) -> Result<Received, VerbsError> {
    let mut received = Received::default();
    let start = Instant::now();
    let (mut first, mut began, mut arrivals) = (None, None, 0);
    loop {
        received.bad += link.receive(|arrived| {
            if shape.take(&arrived, region) {
                arrivals += 1;
                received.packets += 1;
            }
        })?;
        tally.set(arrivals);
        let now = Instant::now();
        if let Some(began) = began {
            let elapsed: Duration = now - began;
            if elapsed >= time {
                received.seconds = elapsed.as_secs_f64();
                return Ok(received);
            }
        } else if received.packets > 0 {
            if now - *first.get_or_insert(now) >= warm_up {
                received = Received::default();
                began = Some(now);
            }
        } else if now - start > PATIENCE {
            return Err(VerbsError::Exchange("nothing of a flood has arrived".into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arrived, RunLimits};

    /// An interface that always has `holds` packets in flight, and delivers those beyond them.
    struct Pipe<'a> {
        tally: &'a Tally,
        holds: u64,
        sent: u64,
        runs: Vec<usize>,
    }

    impl Link for Pipe<'_> {
        fn limits(&self) -> RunLimits {
            RunLimits { packets: 64, bytes: 65_000 }
        }

        fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool> {
            self.sent += run.len() as u64;
            self.tally.set(self.sent.saturating_sub(self.holds));
            if self.runs.len() < 100 {
                self.runs.push(run.len());
            }
            Ok(true)
        }

        fn receive(&mut self, _: impl FnMut(Arrived<'_>)) -> io::Result<u64> {
            Ok(0)
        }
    }

    #[test]
    fn a_short_run_does_not_wait_for_the_packets_before_it() {
        let tally = Tally::map(&Tally::file().unwrap()).unwrap();
        let shape = Shape::new(0, 1 << 20, 4096, 4);
        let region = shape.region();
        let of = |holds| {
            tally.set(0);
            let mut pipe = Pipe { tally: &tally, holds, sent: 0, runs: Vec::new() };
            let lost = flood(&mut pipe, &tally, shape, &region, Duration::from_millis(250), 4);
            (lost.unwrap(), pipe)
        };
        // Four super-packets of 15; one of them is about to leave.
        let (lost, pipe) = of(45);
        assert_eq!(pipe.runs[..3], [2, 15, 15], "the first packet is longer");
        assert!(pipe.sent > 45);
        assert_eq!(lost, 0);
        assert!(of(61).0 > 0, "undelivered packets are lost");
    }

    #[test]
    fn a_window_is_counted_in_full_super_packets() {
        let tally = Tally::map(&Tally::file().unwrap()).unwrap();
        let pipe = Pipe { tally: &tally, holds: 0, sent: 0, runs: Vec::new() };
        for (message, mtu, packets) in [
            (64, 4096, 64),
            (4096, 4096, 15),
            (8192, 4096, 2),
            (1 << 20, 4096, 15),
            (1 << 20, 1024, 62),
        ] {
            let shape = Shape::new(0, message, mtu, 1);
            let region = shape.region();
            let longest = longest_run(&mut Vec::new(), &pipe, shape, &region);
            assert_eq!(longest, packets, "{message} at {mtu}");
        }
    }
}
