//! The process in a container. It carries out the requests of `demo` and `policy-check`, one per
//! line.

mod plan;
mod verify;

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{ConnectOptions, Context, OpenOptions, SendWr, VerbsError};
use rocinante_lab::exit_with_parent;

use crate::cores;
use crate::measure::{self, BulkOp, BulkResult, Connected, Connecting, End, Pinging, Until};
use crate::messages::{Answer, Bulk, BulkRequest, ConnectRequest, MESSAGE, PROBE, Request};

/// TCP port of the exchange, in the container that accepts.
const PORT: u16 = 18_515;
/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process of demo or policy-check in a container (started by these commands)
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The address of this container
    #[arg(long)]
    address: IpAddr,
    /// The address of the container that accepts connections; without it, this one accepts
    #[arg(long)]
    peer: Option<IpAddr>,
    /// Run on this one of two cores
    #[arg(long)]
    core: Option<usize>,
}

/// Carries out requests until standard input ends.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    args.core.into_iter().for_each(cores::bind);
    exit_with_parent();
    match apply_all(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante lab-worker: {error}");
            ExitCode::FAILURE
        }
    }
}

fn apply_all(args: &Args) -> io::Result<()> {
    let listener = match args.peer {
        Some(_) => None,
        None => Some(TcpListener::bind((args.address, PORT))?),
    };
    let mut worker = Worker { args, listener, links: BTreeMap::new(), ctx: None };
    for line in io::stdin().lock().lines() {
        let request = serde_json::from_str(&line?).map_err(|error| error.to_string());
        let answer = request.and_then(|request| worker.apply(&request));
        let answer = answer.unwrap_or_else(|why| Answer::Failed { why });
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

struct Worker<'a> {
    args: &'a Args,
    listener: Option<TcpListener>,
    links: BTreeMap<usize, Link>,
    ctx: Option<Context>,
}

/// A connection to another container.
struct Link {
    connected: Connected,
    exchange: Exchange,
    /// Whether this side begins.
    first: bool,
}

impl Worker<'_> {
    fn apply(&mut self, request: &Request) -> Result<Answer, String> {
        match *request {
            Request::Open { ref netdev } => {
                self.links.clear();
                self.ctx = None;
                match OpenOptions::new().netdev(netdev.parse()?).open(self.args.address) {
                    Ok(ctx) => self.ctx = Some(ctx),
                    Err(error @ VerbsError::Open(_)) => {
                        return Ok(Answer::Unavailable { why: error.to_string() });
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
            Request::Connect(ref how) => {
                self.links.remove(&how.slot);
                let link = self.connect(how).map_err(|error| error.to_string())?;
                self.links.insert(how.slot, link);
            }
            Request::Probe => self.probe()?,
            Request::Count => {
                let transport = self.ctx.as_ref().ok_or("no device")?.counters().transport;
                let (rcvd_cnp, sent_cnp) = (transport.rcvd_cnp, transport.sent_cnp);
                return Ok(Answer::Counted { rcvd_cnp, sent_cnp });
            }
            _ => return self.links.get_mut(&0).ok_or("not connected")?.apply(request),
        }
        Ok(Answer::Done)
    }

    fn connect(&self, how: &ConnectRequest) -> Result<Link, VerbsError> {
        let ConnectRequest { mtu, half, timeout, retry_cnt, traffic_class, .. } = *how;
        let invalid = |what: &str| VerbsError::Invalid(what.to_owned());
        let ctx = self.ctx.clone().ok_or_else(|| invalid("the device is not open"))?;
        let mtu = Mtu::from_bytes(mtu).ok_or_else(|| invalid("no such path MTU"))?;
        let mut exchange = match (&self.listener, self.args.peer) {
            (Some(listener), _) => Exchange::accept_from(listener)?,
            (None, Some(peer)) => Exchange::connect(SocketAddr::new(peer, PORT), PATIENCE)?,
            (None, None) => return Err(invalid("there is no peer")),
        };
        exchange.set_patience(Some(2 * PATIENCE));
        let options = ConnectOptions::default().mtu(Some(mtu));
        let how = Connecting {
            options: options.timeout(timeout).retry_cnt(retry_cnt).traffic_class(traffic_class),
            qps: 1,
            sends: 1024,
            receives: 512,
            elements: 2,
            inline: 256,
            completions: 4096,
            half,
        };
        let connected = Connected::new(ctx, &how, &mut exchange)?;
        Ok(Link { connected, exchange, first: self.args.peer.is_some() })
    }

    /// Sends a datagram that no backend of ours sends.
    fn probe(&self) -> Result<(), String> {
        let peer = self.args.peer.ok_or("the receiver sends no probe")?;
        let sent = UdpSocket::bind((self.args.address, 0))
            .and_then(|socket| socket.send_to(b"probe", (peer, PROBE)));
        match sent {
            // A rule of the own namespace dropped it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            sent => sent.map(drop).map_err(|error| format!("the probe: {error}")),
        }
    }
}

impl Link {
    fn apply(&mut self, request: &Request) -> Result<Answer, String> {
        let Self { connected, exchange, first } = self;
        let end = connected.end(PATIENCE);
        let in_words = |error: VerbsError| error.to_string();
        match *request {
            Request::Verify { bytes_per_op, seed } => {
                verify::verify(end, exchange, *first, bytes_per_op, seed).map(Answer::Verified)
            }
            Request::Latency { size, millis } => latency(&end, exchange, *first, size, millis),
            Request::Bulk(ref request) => {
                let channel = (!request.served).then(|| connected.channel());
                let bulk = bulk(End { channel, ..end }, request)?;
                if request.served {
                    exchange.barrier("done").map_err(in_words)?;
                }
                Ok(Answer::Bulk(bulk))
            }
            Request::Serve => {
                measure::serve(end.ctx, exchange, "done").map(|()| Answer::Done).map_err(in_words)
            }
            Request::Write { fill } => write(&end, fill).map_err(in_words),
            Request::Look { fill } => {
                let bytes = end.mr.to_vec(end.mr.len() / 2, MESSAGE);
                let bytes = bytes.iter().filter(|byte| **byte == fill).count() as u64;
                Ok(Answer::Found { bytes })
            }
            _ => Err("no request for a connection".into()),
        }
    }
}

fn latency(
    end: &End<'_>,
    exchange: &mut Exchange,
    first: bool,
    size: usize,
    millis: u64,
) -> Result<Answer, String> {
    let side = if first { measure::Side::First } else { measure::Side::Second };
    let mut run = |until| {
        let mut times = measure::histogram();
        measure::write_latency(end, exchange, Pinging::Usual, side, size, until, &mut times)
            .map(|()| times)
            .map_err(|error| error.to_string())
    };
    run(Until::Messages(200))?;
    let histogram = run(Until::Time(Duration::from_millis(millis)))?;
    Ok(Answer::Latency { p50_nanos: histogram.value_at_quantile(0.5) })
}

fn bulk(end: End<'_>, request: &BulkRequest) -> Result<Bulk, String> {
    let BulkRequest { size, depth, list, warm_millis, millis, .. } = *request;
    let warm = Duration::from_millis(warm_millis);
    let until = Until::Time(warm + Duration::from_millis(millis));
    let large = measure::Bulk::large(BulkOp::Write, size, depth, until);
    let what = measure::Bulk { list, signal_every: list, ..large };
    let mut window = Window { warm, first: None, last: BulkResult::default() };
    let from = monotonic();
    let all = measure::bulk(&[end], &what, |so_far| window.observe(so_far));
    let (all, measured) = (all.map_err(|error| error.to_string())?, window.measured());
    Ok(Bulk {
        messages: measured.messages,
        bytes: measured.bytes,
        seconds: measured.elapsed.as_secs_f64(),
        all_bytes: all.bytes,
        from_to: (from, monotonic()),
    })
}

fn write(end: &End<'_>, fill: u8) -> Result<Answer, VerbsError> {
    end.mr.write(0, &[fill; MESSAGE]);
    let remote = end.remote.address + end.remote.len / 2;
    let op = SendOp::Write { remote, rkey: end.remote.rkey, imm: None };
    let start = Instant::now();
    end.qp.post_send(&[SendWr::new(op, &[end.mr.sge(0, MESSAGE)]).wr_id(1)])?;
    let wc = end.cq.wait_one(PATIENCE)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Answer::Wrote { status: wc.status.to_string(), seconds })
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The messages between the end of the warm-up and now.
struct Window {
    warm: Duration,
    first: Option<BulkResult>,
    last: BulkResult,
}

impl Window {
    fn observe(&mut self, so_far: &BulkResult) {
        if so_far.elapsed >= self.warm {
            self.first.get_or_insert(*so_far);
        }
        self.last = *so_far;
    }

    fn measured(&self) -> BulkResult {
        let first = self.first.unwrap_or_default();
        BulkResult {
            messages: self.last.messages - first.messages,
            bytes: self.last.bytes - first.bytes,
            elapsed: self.last.elapsed - first.elapsed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warm_up_does_not_count() {
        let at = |millis, messages| BulkResult {
            messages,
            bytes: 10 * messages,
            elapsed: Duration::from_millis(millis),
        };
        let mut window =
            Window { warm: Duration::from_millis(50), first: None, last: BulkResult::default() };
        for so_far in [at(10, 1), at(60, 5), at(100, 9), at(160, 15)] {
            window.observe(&so_far);
        }
        assert_eq!(window.measured(), at(100, 10));
    }
}
