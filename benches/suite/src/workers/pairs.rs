//! Many pairs of processes that work at the same time, each process in a network namespace of its
//! own, and a probe beside them.
//!
//! The first process of a pair says on its standard output that it is connected, and reads on its
//! standard input when to count: all count within the same window of time. Both processes sleep
//! while they have nothing to do, because there may be more of them than processors.

use std::io::Write as _;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rocinante::Context;
use rocinante::exchange::Exchange;
use rocinante_cli::measure::{Connected, End, Side, Until, histogram, send_latency};
use rocinante_cli::output::{Failure, Result};
use rocinante_lab::ChildGuard;
use serde::{Deserialize, Serialize};

use super::cost;
use super::fan_in::{self, Sent, Window};
use super::job::{Outcome, Work};
use super::measure::{Measure, Step};
use super::ours::{PATIENCE, QUEUED};
use super::peers::{self, failed, ping_pong, quantile_us, read_all, write_all};
use super::place::{Link, Places, parsed};

/// What the first process says once it is connected.
const CONNECTED: &str = "connected";
/// Bytes of a probe's message.
const PROBE: usize = 64;
/// Time before the window, for all pairs to find their speed.
const WARM_UP: Duration = Duration::from_millis(300);
/// Time that each process may take to start, and to end.
const EACH: Duration = Duration::from_millis(500);
/// The same for all of them.
const ALL: Duration = Duration::from_secs(20);

/// The work of each pair.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pairing {
    /// Bytes of a message.
    pub(crate) size: usize,
    pub(crate) seconds: f64,
    /// 4.096 µs · 2^this.
    pub(crate) ack_timeout: u8,
    /// Whether it is the probe, which sends small messages to and fro, one at a time.
    pub(crate) probes: bool,
}

/// The result of one pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Paired {
    /// Payload bytes within the window.
    pub(crate) bytes: u64,
    /// Whether its connection ended by an error.
    pub(crate) failed: bool,
    /// Half a round trip of the probe, in microseconds: the median, and the 99th percentile.
    pub(crate) probe_us: Option<[f64; 2]>,
}

/// The results of all pairs.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Together {
    /// Of the pairs that have results.
    pub(crate) pairs: Vec<Paired>,
    pub(crate) probe: Option<Paired>,
    /// The pairs, or the probe, that have no result, and the reason of the first.
    pub(crate) lost: u32,
    pub(crate) why: Option<String>,
    /// Processor time of the machine within the window, in seconds.
    pub(crate) busy: f64,
    /// Bytes of memory: the private ones of the processes, and all else that the machine lost while
    /// they started.
    pub(crate) private: u64,
    pub(crate) kernel: Option<u64>,
    /// Seconds from the start of the first process until the last was connected.
    pub(crate) started: f64,
    /// Of the last process that leads, while it worked.
    pub(crate) rights: Option<Rights>,
}

/// The rights that a process really had (`proc_pid_status(5)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rights {
    /// Number of its effective capabilities.
    pub(crate) capabilities: u32,
    pub(crate) uid: u32,
    /// 0 is no filter of system calls, 1 the strict one, 2 a program.
    pub(crate) seccomp: u32,
}

impl Rights {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |name| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        let capabilities = u64::from_str_radix(field("CapEff:")?, 16).ok()?.count_ones();
        // The effective one is the second.
        let uid = field("Uid:")?.split_whitespace().nth(1)?.parse().ok()?;
        Some(Self { capabilities, uid, seccomp: field("Seccomp:")?.parse().ok()? })
    }
}

/// One process of a pair. The second one has no result.
pub(super) fn run(
    ctx: Option<Context>,
    side: Side,
    ends: (IpAddr, IpAddr),
    mtu: u32,
    pairing: &Pairing,
    exchange: &mut Exchange,
) -> Result<Paired> {
    let step = Step { measure: Measure::FanIn, size: pairing.size, seconds: pairing.seconds };
    let Some(ctx) = ctx else { return stream(side, ends, pairing, exchange) };
    let mut how = fan_in::connecting(mtu, &step);
    how.options.timeout = pairing.ack_timeout;
    let connected = Connected::new(ctx, &how, exchange)?;
    let paired = verbs(&connected, side, pairing, &step, exchange)?;
    // Until then the other side's requests need this one's queue pair.
    exchange.barrier("over")?;
    Ok(paired)
}

fn verbs(
    connected: &Connected,
    side: Side,
    pairing: &Pairing,
    step: &Step,
    exchange: &mut Exchange,
) -> Result<Paired> {
    if !pairing.probes {
        if side == Side::Second {
            // Its device's own thread answers.
            return Ok(Paired::default());
        }
        let Sent { bytes, failed, .. } = fan_in::flow(connected, window()?, step)?;
        return Ok(Paired { bytes, failed, probe_us: None });
    }
    let until = Until::Time(Duration::from_secs_f64(pairing.seconds));
    if side == Side::First {
        std::thread::sleep(window()?.left()[0]);
    }
    let mut times = histogram();
    let end = End { channel: Some(connected.channel()), ..connected.end(PATIENCE) };
    let ended = send_latency(&end, exchange, side, PROBE, until, &mut times);
    let probe_us = (!times.is_empty()).then(|| [0.5, 0.99].map(|at| quantile_us(&times, at)));
    Ok(Paired { bytes: 0, failed: ended.is_err(), probe_us })
}

fn stream(
    side: Side,
    ends: (IpAddr, IpAddr),
    pairing: &Pairing,
    exchange: &mut Exchange,
) -> Result<Paired> {
    let mut stream = peers::connect(side, ends, exchange)?;
    let in_tcp = failed("TCP");
    if pairing.probes {
        if side == Side::First {
            std::thread::sleep(window()?.left()[0]);
        }
        exchange.barrier("probe")?;
        let time = Duration::from_secs_f64(pairing.seconds);
        let times = ping_pong(side, PROBE, time, None, |bytes, sends| {
            if sends { write_all(&mut stream, bytes) } else { read_all(&mut stream, bytes) }
        });
        let times = times.map_err(&in_tcp)?;
        let probe_us = times.map(|times| [0.5, 0.99].map(|at| quantile_us(&times, at)));
        return Ok(Paired { probe_us, ..Paired::default() });
    }
    if side == Side::Second {
        fan_in::stream_into(&mut stream, QUEUED * pairing.size).map_err(&in_tcp)?;
        return Ok(Paired::default());
    }
    let bytes = fan_in::stream_until(&mut stream, window()?, pairing.size)?;
    Ok(Paired { bytes, ..Paired::default() })
}

/// Says that this process is connected, and hears when to count.
fn window() -> Result<Window> {
    println!("{CONNECTED}");
    let mut line = String::new();
    let heard = std::io::stdin().read_line(&mut line).map_err(failed("standard input"));
    heard?;
    serde_json::from_str(&line)
        .map_err(|_| Failure::Failed(format!("no window on standard input: {line:?}")))
}

impl Places {
    /// Runs this many pairs and the probe at once, over the plain link. Calls `edge` when the
    /// window of time in which they count begins, and when it ends. Error: there are not enough
    /// namespaces, or a process cannot be started; the error of `edge`.
    pub(crate) fn together(
        &self,
        work: &Work,
        probe: &Work,
        pairs: u32,
        edge: &mut dyn FnMut() -> Result,
    ) -> Result<Together> {
        let (before, began) = (available(), Instant::now());
        let start = |number: u32, side| {
            let work = if number == pairs { probe } else { work };
            self.start(Link::Plain, work, side, number as usize)
        };
        let answering = (0..=pairs).map(|number| start(number, Side::Second));
        let answering = answering.collect::<Result<Vec<_>>>()?;
        let leading = (0..=pairs).map(|number| start(number, Side::First));
        let mut leading = leading.collect::<Result<Vec<_>>>()?;
        let patience = ALL + 2 * EACH * pairs;
        let mut out = Together::default();
        let mut heard: Vec<Receiver<String>> = leading.iter_mut().map(lines).collect();
        let deadline = Instant::now() + patience;
        let connected = heard.iter_mut().map(|heard| next(heard, deadline));
        let connected: Vec<bool> =
            connected.map(|line| line.as_deref() == Some(CONNECTED)).collect();
        out.started = began.elapsed().as_secs_f64();
        out.rights = leading.last().and_then(|child| Rights::of(child.id()));
        out.private = leading.iter().chain(&answering).map(private).sum();
        let gone = before.zip(available()).and_then(|(before, now)| before.checked_sub(now));
        out.kernel = gone.and_then(|gone| gone.checked_sub(out.private));
        let seconds = work.seconds();
        let window = Window::after(WARM_UP, seconds);
        let text = serde_json::to_string(&window).expect("a window is JSON");
        for child in &mut leading {
            // A process that has ended is lost below.
            let _ = child.child_mut().stdin.take().map(|mut pipe| writeln!(pipe, "{text}"));
        }
        std::thread::sleep(window.left()[0]);
        edge()?;
        let idle = cost::idle()?;
        std::thread::sleep(window.left()[1]);
        edge()?;
        out.busy = (seconds * cost::online()? as f64 - (cost::idle()? - idle)).max(0.0);
        let deadline = Instant::now() + patience;
        for (number, (heard, connected)) in (0..).zip(heard.iter_mut().zip(connected)) {
            let line = connected.then(|| next(heard, deadline)).flatten();
            match line.as_deref().map(parsed) {
                Some(Ok(Outcome::Paired(paired))) if number == pairs => out.probe = Some(paired),
                Some(Ok(Outcome::Paired(paired))) => out.pairs.push(paired),
                _ => {
                    out.lost += 1;
                    let child = &mut leading[number as usize];
                    out.why.get_or_insert_with(|| last_words(child));
                }
            }
        }
        Ok(out)
    }
}

/// The lines of a child's standard output, as they come.
pub(super) fn lines(child: &mut ChildGuard) -> Receiver<String> {
    child.child_mut().stdout.take().map_or_else(|| channel().1, rocinante_lab::lines)
}

pub(super) fn next(lines: &mut Receiver<String>, deadline: Instant) -> Option<String> {
    lines.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
}

/// The error output of a child that is of no more use.
pub(super) fn last_words(child: &mut ChildGuard) -> String {
    child.kill();
    let mut text = String::new();
    if let Some(mut pipe) = child.child_mut().stderr.take() {
        let _ = std::io::Read::read_to_string(&mut pipe, &mut text);
    }
    if text.trim().is_empty() { "it did not answer".into() } else { text.trim().to_owned() }
}

/// Anonymous bytes of a process, those that it shares counted in part.
fn private(child: &ChildGuard) -> u64 {
    field(&format!("/proc/{}/smaps_rollup", child.id()), "Pss_Anon:").unwrap_or(0)
}

/// Bytes that programs could still have.
fn available() -> Option<u64> {
    field("/proc/meminfo", "MemAvailable:")
}

/// A field of a file of `/proc` that is in kB.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_of_the_process() {
        let status = "Name:\tx\nUid:\t1000\t65534\t1000\t1000\nCapPrm:\tff\nCapEff:\t\
                      0000000000003000\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        let rights = Rights { capabilities: 2, uid: 65534, seccomp: 2 };
        assert_eq!(Rights::parse(status), Some(rights));
        assert_eq!(Rights::parse("Name:\tx\n"), None);
        assert!(Rights::of(std::process::id()).is_some());
    }

    #[test]
    fn fields_of_proc_are_bytes() {
        assert!(available().unwrap() > 1 << 20);
        assert!(field("/proc/self/smaps_rollup", "Pss_Anon:").unwrap() > 4096);
        assert_eq!(field("/proc/meminfo", "Nothing:"), None);
        assert_eq!(field("/proc/nothing", "MemAvailable:"), None);
    }
}
