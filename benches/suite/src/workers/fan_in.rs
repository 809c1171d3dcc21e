//! Many senders, one receiver. Each is a process in a network namespace of its own, all behind one
//! bridge, as containers are.
//!
//! The receiver connects a queue pair with each sender and then sleeps: its device's background
//! thread answers. The senders sleep for completions, because there may be more of them than cores.
//! All count within the same window of time, so their sum is the arrivals in it.

use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rocinante::exchange::Exchange;
use rocinante::verbs::{Mtu, QpState};
use rocinante::{ConnectOptions, Context};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::job::PORT;
use super::measure::{Figure, Measure, Step};
use super::ours::{PATIENCE, QUEUED, in_bulk};
use super::peers;
use rocinante_cli::measure::{Connected, Connecting, End, MeasureError, Until, bulk, jain};
use rocinante_cli::output::{Failure, Result};

/// The most senders, and the namespaces that they and the receiver have.
pub(crate) const SENDERS_MAX: u32 = 64;
pub(crate) const NAMESPACES: u8 = SENDERS_MAX as u8 + 1;
/// Time before the window, for all senders to find their speed.
const WARM_UP: Duration = Duration::from_millis(200);

/// When messages count, in nanoseconds of the machine's monotonic clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Window {
    pub(super) begin: u64,
    pub(super) end: u64,
}

impl Window {
    /// From the time `warm_up` from now on, for this many seconds.
    pub(super) fn after(warm_up: Duration, seconds: f64) -> Self {
        let begin = now() + nanos(warm_up);
        Self { begin, end: begin + nanos(Duration::from_secs_f64(seconds)) }
    }

    /// The time until it begins, and until it ends.
    pub(super) fn left(&self) -> [Duration; 2] {
        [self.begin, self.end].map(|at| Duration::from_nanos(at.saturating_sub(now())))
    }
}

/// The result of one sender.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Sent {
    /// Payload bytes completed within the window.
    pub(super) bytes: u64,
    /// Whether its queue pair ended in an error.
    pub(super) failed: bool,
    /// Packets sent again.
    pub(super) retransmitted: u64,
}

/// Bytes completed so far, at the edges of a window.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    before: u64,
    until: u64,
}

impl Count {
    fn see(&mut self, window: Window, now: u64, bytes: u64) {
        if now < window.begin {
            self.before = bytes;
        }
        if now <= window.end {
            self.until = bytes;
        }
    }

    fn bytes(self) -> u64 {
        self.until - self.before
    }
}

/// The receiver: connects with `senders` processes, tells them when to count, and returns the
/// figures.
pub(super) fn receive(
    ctx: Option<&Context>,
    local: IpAddr,
    (mtu, senders): (u32, u32),
    step: &Step,
    patience: Duration,
) -> Result<Vec<Figure>> {
    let failed = |error: std::io::Error| Failure::Failed(format!("the exchange: {error}"));
    let listener = TcpListener::bind(SocketAddr::from((local, PORT))).map_err(failed)?;
    let streams = TcpListener::bind(SocketAddr::from((local, peers::PORT))).map_err(failed)?;
    let mut peers = Vec::new();
    for _ in 0..senders {
        let mut exchange = Exchange::accept_from(&listener)?;
        exchange.set_patience(Some(patience));
        let connected = match ctx {
            Some(ctx) => Some(Connected::new(ctx.clone(), &connecting(mtu, step), &mut exchange)?),
            None => {
                exchange.barrier("listening")?;
                let (mut stream, _) = streams.accept().map_err(failed)?;
                let bytes = QUEUED * step.size;
                std::thread::spawn(move || stream_into(&mut stream, bytes));
                None
            }
        };
        peers.push((exchange, connected));
    }
    let window = Window::after(WARM_UP, step.seconds);
    for (exchange, _) in &mut peers {
        say(exchange, &window)?;
    }
    let mut sent = Vec::new();
    for (exchange, _) in &mut peers {
        sent.push(hear::<Sent>(exchange)?);
    }
    let is_broken = |connected: &Connected| {
        connected.ends(PATIENCE).iter().any(|end| end.qp.state() == QpState::Err)
    };
    let broken = peers
        .iter()
        .zip(&sent)
        .filter(|((_, own), sent)| sent.failed || own.as_ref().is_some_and(is_broken));
    let broken = broken.count();
    for (exchange, _) in &mut peers {
        exchange.barrier("bye")?;
    }
    Ok(figures(step, &sent, broken))
}

fn figures(step: &Step, sent: &[Sent], broken: usize) -> Vec<Figure> {
    let shares: Vec<u64> = sent.iter().map(|sent| sent.bytes).collect();
    let retransmitted: u64 = sent.iter().map(|sent| sent.retransmitted).sum();
    let gbps = shares.iter().sum::<u64>() as f64 * 8.0 / step.seconds / 1e9;
    let mut figures = vec![
        step.figure(Measure::FanIn, gbps),
        step.figure(Measure::FanInErrors, broken as f64),
        step.figure(Measure::FanInRetransmits, retransmitted as f64),
    ];
    if shares.len() > 1 {
        figures.push(step.figure(Measure::FanInFairness, jain(shares.iter().map(|it| *it as f64))));
    }
    figures
}

pub(super) fn send(
    ctx: Option<Context>,
    remote: IpAddr,
    mtu: u32,
    step: &Step,
    exchange: &mut Exchange,
) -> Result {
    let Some(ctx) = ctx else {
        exchange.barrier("listening")?;
        let in_tcp = peers::failed("TCP");
        let mut stream = TcpStream::connect((remote, peers::PORT)).map_err(in_tcp)?;
        let bytes = stream_until(&mut stream, hear(exchange)?, step.size)?;
        return say(exchange, &Sent { bytes, failed: false, retransmitted: 0 });
    };
    let connected = Connected::new(ctx, &connecting(mtu, step), exchange)?;
    let window: Window = hear(exchange)?;
    say(exchange, &flow(&connected, window, step)?)
}

/// Writes to a stream that sleeps until the window is over, from as much memory as the messages of
/// a queue pair. Returns the bytes within the window.
pub(super) fn stream_until(stream: &mut TcpStream, window: Window, size: usize) -> Result<u64> {
    let (memory, mut sent, mut count) = (vec![0x5a; QUEUED * size], 0, Count::default());
    for message in memory.chunks(size).cycle() {
        if window.left()[1].is_zero() {
            break;
        }
        peers::write_all(stream, message).map_err(peers::failed("TCP"))?;
        sent += message.len() as u64;
        count.see(window, now(), sent);
    }
    Ok(count.bytes())
}

/// Reads a stream to its end, into this much memory again and again.
pub(super) fn stream_into(stream: &mut TcpStream, bytes: usize) -> std::io::Result<()> {
    let (mut memory, mut at) = (vec![0; bytes], 0);
    loop {
        match stream.read(&mut memory[at..])? {
            0 => return Ok(()),
            read => at = (at + read) % bytes,
        }
    }
}

/// Sends until the window is over. Sleeps for completions.
pub(super) fn flow(connected: &Connected, window: Window, step: &Step) -> Result<Sent> {
    let channel = Some(connected.channel());
    let ends = connected.ends(PATIENCE).into_iter().map(|end| End { channel, ..end });
    let ends: Vec<End<'_>> = ends.collect();
    let [_, time] = window.left();
    let what = in_bulk(step, ends.len(), Until::Time(time));
    let mut count = Count::default();
    let failed = match bulk(&ends, &what, |result| count.see(window, now(), result.bytes)) {
        Ok(_) => false,
        Err(MeasureError::Completion(_)) => true,
        Err(other) => return Err(other.into()),
    };
    let retransmitted = connected.ctx().counters().transport.retransmitted_pkts;
    Ok(Sent { bytes: count.bytes(), failed, retransmitted })
}

pub(super) fn connecting(mtu: u32, step: &Step) -> Connecting {
    Connecting {
        options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
        qps: 1,
        sends: QUEUED as u32,
        receives: 1,
        elements: 1,
        inline: 0,
        completions: 2 * QUEUED as u32,
        half: QUEUED * step.size,
    }
}

pub(super) fn say(exchange: &mut Exchange, what: &impl Serialize) -> Result {
    Ok(exchange.say(&serde_json::to_string(what).expect("figures are JSON"))?)
}

pub(super) fn hear<T: DeserializeOwned>(exchange: &mut Exchange) -> Result<T> {
    let line = exchange.hear()?;
    let heard = serde_json::from_str(&line);
    Ok(heard.map_err(|_| exchange.error(format_args!("it sent {line}")))?)
}

/// The machine's monotonic clock, which all its namespaces share, in nanoseconds.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_completes_within_the_window_counts() {
        let window = Window { begin: 100, end: 200 };
        let of = |seen: &[(u64, u64)]| {
            let mut count = Count::default();
            seen.iter().for_each(|(now, bytes)| count.see(window, *now, *bytes));
            count.bytes()
        };
        assert_eq!(of(&[(50, 10), (99, 20), (100, 30), (200, 70), (201, 90)]), 50);
        assert_eq!(of(&[(150, 30), (160, 40)]), 40, "it began late");
        assert_eq!(of(&[(50, 10), (250, 90)]), 0, "it stood still");
        assert_eq!(of(&[]), 0);
    }

    #[test]
    fn figures_are_of_all_senders() {
        let step = Step { measure: Measure::FanIn, size: 65_536, seconds: 0.5 };
        let sent = |bytes, failed| Sent { bytes, failed, retransmitted: 3 };
        let figures = figures(&step, &[sent(3_000_000_000, false), sent(1_000_000_000, true)], 1);
        let of = |measure| figures.iter().find(|figure| figure.measure == measure).unwrap().value;
        assert_eq!(of(Measure::FanIn), 64.0);
        assert_eq!((of(Measure::FanInErrors), of(Measure::FanInRetransmits)), (1.0, 6.0));
        assert!((of(Measure::FanInFairness) - 0.8).abs() < 1e-12);
        let named: Vec<Measure> = figures.iter().map(|figure| figure.measure).collect();
        assert!(step.figures().all(|measure| named.contains(&measure)));
    }
}
