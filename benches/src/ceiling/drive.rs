//! The loops over a link: a flood that is counted where it arrives, and a ping-pong.

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::{Exchange, VerbsError};
use serde::{Deserialize, Serialize};

use super::{Arrived, Link, Packet, Tally};
use crate::figure::{Figure, Figures, Plan, REGION};

/// What comes before a flood is counted.
const WARM_UP: Duration = Duration::from_millis(20);
/// How long nothing may come.
const PATIENCE: Duration = Duration::from_secs(5);
/// A ping that is not answered for so long is sent again.
const PING_LOST: Duration = Duration::from_millis(20);
/// How many super-packets may be on their way: what suits one interface and cache is too few or too many for another, so
/// each is tried, and the ceiling is the best.
const WINDOWS: [u64; 4] = [2, 4, 10, 30];
/// What has not arrived so long after the last arrival is lost.
const LOST: Duration = Duration::from_micros(500);
/// The number of the last ping.
const LAST: u32 = 0xff_ffff;
/// Round trips that are not counted.
const FIRST_PINGS: u32 = 300;

/// What of a flood arrived.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Received {
    packets: u64,
    bytes: u64,
    bad: u64,
    seconds: f64,
}

/// The sizes of a stream of messages.
#[derive(Debug, Clone, Copy)]
struct Shape {
    phase: u8,
    mtu: usize,
    packets_per_message: u32,
}

impl Shape {
    fn new(phase: u8, figure: Figure, plan: &Plan) -> Self {
        let mtu = plan.mtu.min(figure.message());
        let packets_per_message = (figure.message() / mtu) as u32;
        Self { phase, mtu, packets_per_message }
    }

    fn offset(&self, number: u32) -> usize {
        number as usize * self.mtu % REGION
    }

    fn packet<'a>(&self, number: u32, region: &'a [u8]) -> Packet<'a> {
        let first = number.is_multiple_of(self.packets_per_message);
        Packet::new(self.phase, number, first, &region[self.offset(number)..][..self.mtu])
    }
}

/// Measures what `plan` says, together with [`answer`] at the other end of `exchange`.
///
/// # Errors
/// The interface is gone, or the peer silent.
pub fn measure(
    link: &mut impl Link,
    exchange: &mut Exchange,
    tally: &Tally,
    plan: &Plan,
) -> Result<Figures, VerbsError> {
    let region: Vec<u8> = (0..REGION).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut figures = Figures::new();
    for Phase { number, figure, window } in phases(plan) {
        exchange.barrier("ready")?;
        let shape = Shape::new(number, figure, plan);
        let Some(window) = window else {
            figures.insert(figure, ping(link, shape, &region, seconds(plan))?);
            continue;
        };
        flood(link, tally, shape, &region, seconds(plan).mul_f64(1.05) + WARM_UP, window)?;
        let received = exchange.hear()?;
        let received: Received = serde_json::from_str(&received)
            .map_err(|_| VerbsError::Exchange(format!("the peer said {received}")))?;
        let best = figures.entry(figure).or_insert(0.0);
        *best = value(figure, &received).max(*best);
    }
    Ok(figures)
}

/// The other side of [`measure`].
///
/// # Errors
/// The interface is gone, or the peer silent.
pub fn answer(
    link: &mut impl Link,
    exchange: &mut Exchange,
    tally: &Tally,
    plan: &Plan,
) -> Result<(), VerbsError> {
    let mut region = vec![0xa5; REGION];
    for Phase { number, figure, window } in phases(plan) {
        drain(link)?;
        tally.set(0);
        exchange.barrier("ready")?;
        let shape = Shape::new(number, figure, plan);
        if window.is_none() {
            pong(link, shape, &mut region)?;
        } else {
            let received = count(link, tally, shape, &mut region, seconds(plan))?;
            exchange.say(&serde_json::to_string(&received).map_err(io::Error::other)?)?;
        }
    }
    Ok(())
}

/// One thing that is measured, with how many super-packets on their way if it is a flood.
#[derive(Debug, Clone, Copy)]
struct Phase {
    number: u8,
    figure: Figure,
    window: Option<u64>,
}

fn phases(plan: &Plan) -> impl Iterator<Item = Phase> {
    let figures = plan.figures.iter().flat_map(|&figure| {
        let floods = if figure == Figure::Latency { 0 } else { WINDOWS.len() };
        let windows = WINDOWS[..floods].iter().map(|window| Some(*window));
        let pings = (floods == 0).then_some(None);
        windows.chain(pings).map(move |window| (figure, window))
    });
    (0..).zip(figures).map(|(number, (figure, window))| Phase { number, figure, window })
}

fn seconds(plan: &Plan) -> Duration {
    Duration::from_secs_f64(plan.seconds)
}

fn value(figure: Figure, received: &Received) -> f64 {
    match figure {
        Figure::Rate => received.packets as f64 / received.seconds / 1e6,
        _ => received.bytes as f64 * 8.0 / received.seconds / 1e9,
    }
}

/// Sends as much as goes for `time`, with so many super-packets on their way.
fn flood(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &[u8],
    time: Duration,
    window: u64,
) -> io::Result<()> {
    let limits = link.limits();
    let (mut sent, mut lost) = (0, 0);
    let mut run: Vec<Packet<'_>> = Vec::with_capacity(limits.packets);
    let end = Instant::now() + time;
    let mut number = 0;
    while Instant::now() < end {
        run.clear();
        let (mut bytes, mut size) = (0, usize::MAX);
        while run.len() < limits.packets {
            let packet = shape.packet(number, region);
            // A run is of one size; only its last packet may be shorter.
            let joins = run.first().is_none_or(|first| size == first.len() && packet.len() <= size);
            if !joins || bytes + packet.len() > limits.bytes {
                break;
            }
            size = packet.len();
            bytes += size;
            run.push(packet);
            number += 1;
        }
        sent += run.len() as u64;
        lost += room(tally, sent - lost, window * run.len() as u64);
        while !link.send(&run)? {
            if Instant::now() >= end + PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
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

/// Counts what arrives whole, for `time` from a little after the first packet on.
fn count(
    link: &mut impl Link,
    tally: &Tally,
    shape: Shape,
    region: &mut [u8],
    time: Duration,
) -> Result<Received, VerbsError> {
    let mut received = Received::default();
    let start = Instant::now();
    let (mut first, mut began, mut arrivals) = (None, None, 0);
    loop {
        received.bad += link.receive(|arrived| {
            if place(shape, &arrived, region) {
                arrivals += 1;
                received.packets += 1;
                received.bytes += arrived.payload.len() as u64;
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
            if now - *first.get_or_insert(now) >= WARM_UP {
                received = Received::default();
                began = Some(now);
            }
        } else if now - start > PATIENCE {
            return Err(VerbsError::Exchange("nothing of a flood has arrived".into()));
        }
    }
}

/// Copies the payload to where a WRITE would place it, unless it is of another phase.
fn place(shape: Shape, arrived: &Arrived<'_>, region: &mut [u8]) -> bool {
    let at = shape.offset(arrived.number);
    let fits = arrived.phase == shape.phase && arrived.payload.len() <= shape.mtu;
    if fits {
        region[at..at + arrived.payload.len()].copy_from_slice(arrived.payload);
    }
    fits
}

/// Throws away what is left of a phase.
fn drain(link: &mut impl Link) -> io::Result<()> {
    const QUIET: Duration = Duration::from_millis(2);
    let start = Instant::now();
    let mut quiet_since = start;
    while quiet_since.elapsed() < QUIET && start.elapsed() < PATIENCE {
        let mut any = false;
        link.receive(|_| any = true)?;
        if any {
            quiet_since = Instant::now();
        }
    }
    Ok(())
}

/// The median of half the round trip, in microseconds.
fn ping(
    link: &mut impl Link,
    shape: Shape,
    region: &[u8],
    time: Duration,
) -> Result<f64, VerbsError> {
    let mut landing = vec![0; REGION];
    let mut histogram: Histogram<u64> =
        Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(io::Error::other)?;
    let start = Instant::now();
    let mut before = start;
    let mut number = 0;
    while number < FIRST_PINGS || before - start < time {
        if round_trip(link, shape, number, region, &mut landing)? {
            let after = Instant::now();
            if number >= FIRST_PINGS {
                let half = (after - before).as_nanos() / 2;
                histogram.saturating_record(u64::try_from(half).unwrap_or(u64::MAX));
            }
            number += 1;
        } else if start.elapsed() > time + PATIENCE {
            return Err(VerbsError::Exchange("pings are not answered".into()));
        }
        before = Instant::now();
    }
    for _ in 0..5 {
        if round_trip(link, shape, LAST, region, &mut landing)? {
            break;
        }
    }
    Ok(histogram.value_at_quantile(0.5) as f64 / 1e3)
}

/// Sends a ping and spins for its answer; `false` if there is none.
fn round_trip(
    link: &mut impl Link,
    shape: Shape,
    number: u32,
    region: &[u8],
    landing: &mut [u8],
) -> io::Result<bool> {
    let packet =
        Packet::new(shape.phase, number, true, &region[shape.offset(number)..][..shape.mtu]);
    while !link.send(&[packet])? {}
    let sent = Instant::now();
    let mut answered = false;
    loop {
        for _ in 0..256 {
            link.receive(|arrived| {
                answered |= place(shape, &arrived, landing) && arrived.number == number;
            })?;
            if answered {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        if sent.elapsed() > PING_LOST {
            return Ok(false);
        }
    }
}

/// Answers pings up to the last.
fn pong(link: &mut impl Link, shape: Shape, region: &mut [u8]) -> Result<(), VerbsError> {
    let source = vec![0x5a; shape.mtu];
    let mut heard = Instant::now();
    loop {
        for _ in 0..256 {
            let mut asked = None;
            link.receive(|arrived| {
                if place(shape, &arrived, region) {
                    asked = Some(arrived.number);
                }
            })?;
            let Some(number) = asked else {
                std::hint::spin_loop();
                continue;
            };
            while !link.send(&[Packet::new(shape.phase, number, true, &source)])? {}
            if number == LAST {
                return Ok(());
            }
            heard = Instant::now();
        }
        if heard.elapsed() > PATIENCE {
            return Err(VerbsError::Exchange("there are no more pings".into()));
        }
    }
}
