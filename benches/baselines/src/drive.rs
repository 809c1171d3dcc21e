//! The measurements over a link, and the two sides of each.

use std::io;
use std::time::{Duration, Instant};

use rocinante::VerbsError;
use rocinante::exchange::Exchange;
use serde::{Deserialize, Serialize};

use crate::flood::{Received, count, flood};
use crate::ping::{ping, pong};
use crate::shape::Shape;
use crate::{Link, Tally};

/// Time before the count of a flood starts.
const WARM_UP: Duration = Duration::from_millis(20);
/// The same for trials, which only look for the best window.
const WARM_UP_OF_TRIAL: Duration = Duration::from_millis(5);
/// The shortest trial of a window.
const TRIAL_MIN: Duration = Duration::from_millis(15);
/// The time of a flood, divided by this, is the time of a trial.
const TRIAL_PART: u32 = 8;
/// A flood is sent this many times longer than it is counted.
const LONGER: f64 = 1.05;
/// The most attempts at a flood. One is repeated if no packet arrived in its time: another program
/// had the core.
const ATTEMPTS: u32 = 5;
/// The longest silence of a link or peer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Super-packets in flight. A value that suits one interface and cache is too low or too high for
/// another. So each of them is tried, and the baseline is measured with the best.
const WINDOWS: [u64; 4] = [2, 4, 10, 30];

/// The traffic pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Packets at full speed, in one direction.
    Flood,
    /// One message back and forth.
    PingPong,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The traffic pattern.
    pub kind: Kind,
    /// Bytes of a message: a power of two, as the path MTU.
    pub message: usize,
    /// Path MTU in bytes.
    pub mtu: usize,
    /// Messages that would be in flight if there were a protocol. Each has memory of its own, up to
    /// 4 MiB in all. A ping-pong has one.
    pub depth: usize,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
}

/// The result of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Raw {
    /// Of a [`Kind::Flood`].
    Flood {
        /// Payload, in 10⁹ bits per second.
        gbps: f64,
        /// 10⁶ packets per second.
        mpps: f64,
    },
    /// Of a [`Kind::PingPong`].
    PingPong {
        /// Median of half the round trip, in microseconds.
        us: f64,
    },
}

impl Task {
    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// The planned duration, including the time before the count starts.
    #[must_use]
    pub fn planned(&self) -> Duration {
        let time = |phase| match phase {
            Phase::Flood { warm_up, time } => warm_up + time.mul_f64(LONGER),
            Phase::PingPong { time } => time,
        };
        self.phases().map(time).sum()
    }

    fn shape(&self, phase: u8) -> Shape {
        Shape::new(phase, self.message, self.mtu, self.depth)
    }

    fn raw(&self, received: &Received) -> Raw {
        // Padding does not count.
        let bytes = received.packets as f64 * self.message.min(self.mtu) as f64;
        Raw::Flood {
            gbps: bytes * 8.0 / received.seconds / 1e9,
            mpps: received.packets as f64 / received.seconds / 1e6,
        }
    }

    /// The phases of the task, one after the other, for both sides.
    fn phases(self) -> impl Iterator<Item = Phase> {
        let trial = Phase::Flood {
            warm_up: WARM_UP_OF_TRIAL,
            time: (self.time() / TRIAL_PART).max(TRIAL_MIN),
        };
        let flood = Phase::Flood { warm_up: WARM_UP, time: self.time() };
        let (trials, last) = match self.kind {
            Kind::Flood => (WINDOWS.len(), flood),
            Kind::PingPong => (0, Phase::PingPong { time: self.time() }),
        };
        std::iter::repeat_n(trial, trials).chain([last])
    }
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Flood { warm_up: Duration, time: Duration },
    PingPong { time: Duration },
}

/// Measures each of `tasks`, together with [`answer`] at the other end of `exchange`. Error: the
/// interface is gone, or the peer silent.
pub fn measure(
    link: &mut impl Link,
    exchange: &mut Exchange,
    tally: &Tally,
    tasks: &[Task],
) -> Result<Vec<Raw>, VerbsError> {
    let mut number = 0_u8;
    let mut results = Vec::new();
    for task in tasks {
        let region = task.shape(0).region();
        let mut trials: Vec<(f64, u64)> = Vec::new();
        for phase in task.phases() {
            let shape = task.shape(number);
            number = number.wrapping_add(1);
            let (warm_up, time) = match phase {
                Phase::PingPong { time } => {
                    exchange.barrier("ready")?;
                    results.push(Raw::PingPong { us: ping(link, tally, shape, &region, time)? });
                    continue;
                }
                Phase::Flood { warm_up, time } => (warm_up, time),
            };
            let best = trials.iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(WINDOWS[0], |t| t.1);
            let window = WINDOWS.get(trials.len()).copied().unwrap_or(best);
            let mut received = Received::default();
            for _ in 0..ATTEMPTS {
                exchange.barrier("ready")?;
                flood(link, tally, shape, &region, time.mul_f64(LONGER) + warm_up, window)?;
                received = receive_count(exchange)?;
                if received.packets > 0 {
                    break;
                }
            }
            if trials.len() < WINDOWS.len() {
                trials.push((received.packets as f64 / received.seconds, window));
            } else if received.packets > 0 {
                results.push(task.raw(&received));
            } else {
                return Err(exchange.error("it received nothing of a flood in its time"));
            }
        }
    }
    Ok(results)
}

fn receive_count(exchange: &mut Exchange) -> Result<Received, VerbsError> {
    let line = exchange.hear()?;
    serde_json::from_str(&line).map_err(|_| exchange.error(format_args!("it sent {line}")))
}

/// The other side of [`measure`]. Error: the interface is gone, or the peer silent.
pub fn answer(
    link: &mut impl Link,
    exchange: &mut Exchange,
    tally: &Tally,
    tasks: &[Task],
) -> Result<(), VerbsError> {
    let mut number = 0_u8;
    for task in tasks {
        let mut region = task.shape(0).region();
        for phase in task.phases() {
            let shape = task.shape(number);
            number = number.wrapping_add(1);
            for _ in 0..ATTEMPTS {
                drain(link)?;
                tally.set(0);
                exchange.barrier("ready")?;
                let Phase::Flood { warm_up, time } = phase else {
                    pong(link, tally, shape, &mut region)?;
                    break;
                };
                let received = count(link, tally, shape, &mut region, warm_up, time)?;
                exchange.say(&serde_json::to_string(&received).map_err(io::Error::other)?)?;
                if received.packets > 0 {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Discards the remaining datagrams of a phase.
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
