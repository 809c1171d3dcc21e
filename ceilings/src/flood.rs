//! As much as goes, counted where it arrives.

use std::io;
use std::time::{Duration, Instant};

use rocinante::VerbsError;
use serde::{Deserialize, Serialize};

use crate::drive::PATIENCE;
use crate::shape::Shape;
use crate::{Link, Packet, Tally};

/// What has not arrived so long after the last arrival is lost.
const LOST: Duration = Duration::from_micros(500);

/// What of a flood arrived.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) packets: u64,
    pub(crate) bad: u64,
    pub(crate) seconds: f64,
}

/// Sends as much as goes for `time`, with so many super-packets on their way.
pub(crate) fn flood(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &[u8],
    time: Duration,
    window: u64,
) -> io::Result<()> {
    let (mut sent, mut lost) = (0, 0);
    let mut run = Vec::with_capacity(link.limits().packets);
    let end = Instant::now() + time;
    let mut number = 0;
    while Instant::now() < end {
        fill(&mut run, link, shape, region, &mut number, u32::MAX);
        sent += run.len() as u64;
        lost += room(tally, sent - lost, window * run.len() as u64);
        send(link, &run, end + PATIENCE)?;
    }
    Ok(())
}

/// The packets from `number` on that leave at once, before number `end`.
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
        // A run is of one size; only its last packet may be shorter.
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

/// Waits until no more than `window` of the packets `sent` are on their way; how many were lost.
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

/// Counts what arrives whole, for `time` from so long after the first packet on.
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
