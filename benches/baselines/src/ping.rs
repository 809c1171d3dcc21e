//! One message back and forth; both sides spin.

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::VerbsError;

use crate::drive::PATIENCE;
use crate::flood::{fill, send};
use crate::shape::Shape;
use crate::{Link, Packet, Tally};

/// After this long without an answer, another ping follows.
const LOST: Duration = Duration::from_millis(20);
/// Round trips at the start that are not counted.
const FIRST: u32 = 300;
/// Value of the tally when no more pings follow: the pinging side sets it.
const ENDED: u64 = u64::MAX;

/// The median of half the round trip, in microseconds.
pub(crate) fn ping(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &[u8],
    time: Duration,
) -> Result<f64, VerbsError> {
    let mut landing = vec![0; region.len()];
    let mut histogram: Histogram<u64> =
        Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(io::Error::other)?;
    let mut start = Instant::now();
    let (mut before, mut heard) = (start, start);
    let mut answered = 0;
    let mut run = Vec::with_capacity(link.limits().packets);
    for message in 0.. {
        let first = shape.first_of(message);
        send_message(link, shape, first, region, &mut run)?;
        if is_answered(link, shape, first, &mut landing)? {
            let after = Instant::now();
            heard = after;
            answered += 1;
            if answered == FIRST {
                start = after;
            } else if answered > FIRST {
                let half = (after - before).as_nanos() / 2;
                histogram.saturating_record(u64::try_from(half).unwrap_or(u64::MAX));
            }
        }
        before = Instant::now();
        if answered > FIRST && before - start >= time {
            break;
        }
        if before - heard > PATIENCE {
            return Err(VerbsError::Exchange("pings are not answered".into()));
        }
    }
    tally.set(ENDED);
    Ok(histogram.value_at_quantile(0.5) as f64 / 1e3)
}

/// Spins for the answer to a message, which has the same length; `false` if none arrives.
fn is_answered(
    link: &mut impl Link,
    shape: Shape,
    first: u32,
    landing: &mut [u8],
) -> io::Result<bool> {
    let sent = Instant::now();
    let mut arrivals = 0;
    loop {
        for _ in 0..256 {
            link.receive(|arrived| {
                let is_of_it = arrived.number.wrapping_sub(first) < shape.packets;
                arrivals += u32::from(shape.take(&arrived, landing) && is_of_it);
            })?;
            if arrivals >= shape.packets {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        if sent.elapsed() > LOST {
            return Ok(false);
        }
    }
}

fn send_message<'a>(
    link: &mut impl Link,
    shape: Shape,
    first: u32,
    region: &'a [u8],
    run: &mut Vec<Packet<'a>>,
) -> io::Result<()> {
    let (mut number, end) = (first, first + shape.packets);
    while number != end {
        fill(run, link, shape, region, &mut number, end);
        send(link, run, Instant::now() + PATIENCE)?;
    }
    Ok(())
}

/// Answers each message with one of the same length, until there are no more.
pub(crate) fn pong(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &mut [u8],
) -> Result<(), VerbsError> {
    let source = shape.region();
    let mut run = Vec::with_capacity(link.limits().packets);
    // The message that is arriving, by its first packet, and the number of its packets received.
    let (mut current, mut arrivals) = (None, 0);
    let mut heard = Instant::now();
    loop {
        for _ in 0..256 {
            link.receive(|arrived| {
                if shape.take(&arrived, region) {
                    let first = arrived.number - arrived.number % shape.packets;
                    if current != Some(first) {
                        (current, arrivals) = (Some(first), 0);
                    }
                    arrivals += 1;
                }
            })?;
            let Some(first) = current.filter(|_| arrivals >= shape.packets) else {
                std::hint::spin_loop();
                continue;
            };
            send_message(link, shape, first, &source, &mut run)?;
            (current, arrivals) = (None, 0);
            heard = Instant::now();
        }
        if tally.get() == ENDED {
            return Ok(());
        }
        if heard.elapsed() > 2 * PATIENCE {
            return Err(VerbsError::Exchange("there are no more pings".into()));
        }
    }
}
