//! The client.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rocinante::cm::{Connecting, Connection, Params};
use rocinante::exchange::Exchange;

use super::{Args, Maker, Memory, Report, grown, holdings};
use rocinante_cli::output::{Failure, Output, Result};
use rocinante_cli::session::address;

/// Time in which the server has to appear.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time without progress.
const SILENCE: Duration = Duration::from_secs(20);

/// Measures with the server at `host`.
pub(super) fn ask(args: &Args, host: IpAddr, out: Output) -> Result<Report> {
    let server = args.at(host);
    let local = args.bind.map_or_else(|| address::towards(server), Ok)?;
    let ctx = args.device.open(local, out)?;
    let mut exchange = Exchange::connect_cm(&ctx, server, PATIENCE)?;
    exchange.set_patience(Some(SILENCE));
    let plan = args.plan();
    exchange.say(&serde_json::to_string(&plan).expect("a plan is JSON"))?;
    let asker = Asker { server, maker: Maker::new(&ctx, plan.depth)? };
    // Taken before any connection: memory that earlier ones left would be used again, and not
    // counted.
    exchange.barrier("ready")?;
    let before = holdings()?;
    let start = Instant::now();
    let held = asker.hold(args.connections, args.at_a_time)?;
    let held_after_s = start.elapsed().as_secs_f64();
    let client = grown(before, args.connections)?;
    exchange.barrier("held")?;
    let memory = exchange.hear()?;
    let server: Memory = serde_json::from_str(&memory)
        .map_err(|error| exchange.error(format_args!("its report of memory is wrong: {error}")))?;
    drop(held);
    exchange.barrier("released")?;
    let rate = asker.make_and_end(Duration::from_secs_f64(args.seconds), args.at_a_time)?;
    exchange.barrier("made and ended")?;
    let repeated: u64 = exchange.hear()?.parse().map_err(|error| {
        exchange.error(format_args!("its report of repetitions is wrong: {error}"))
    })?;
    let of_ours = ctx.cm_counters().map_or(0, |counters| counters.repeated);
    let us = |quantile| rate.latency.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Report {
        netdev: ctx.provider().name().to_owned(),
        seconds: rate.elapsed.as_secs_f64(),
        connections: rate.count,
        connections_per_s: rate.count as f64 / rate.elapsed.as_secs_f64(),
        connect_us_p50: us(0.5),
        connect_us_p99: us(0.99),
        held: args.connections,
        held_after_s,
        client,
        server,
        repeated: repeated + of_ours,
    })
}

struct Asker {
    server: SocketAddr,
    maker: Maker,
}

struct Rate {
    count: u64,
    elapsed: Duration,
    /// Time to connect, in nanoseconds.
    latency: Histogram<u64>,
}

impl Asker {
    /// Requests a connection, and returns the time of the request.
    fn start(&self) -> Result<(Connecting, Instant)> {
        let (qp, now) = (self.maker.make()?, Instant::now());
        Ok((Connecting::start(qp, self.server, &Params::default())?, now))
    }

    /// Makes connections for `time`, and ends each as soon as it is established. Then waits until
    /// the last has ended.
    fn make_and_end(&self, time: Duration, at_a_time: u32) -> Result<Rate> {
        let begin = Instant::now();
        let mut latency = Histogram::new_with_max(60_000_000_000, 3).expect("three digits");
        let mut making: Vec<(Connecting, Instant)> = Vec::new();
        let mut ending: VecDeque<Connection> = VecDeque::new();
        let (mut count, mut last) = (0, begin);
        loop {
            let more = begin.elapsed() < time;
            while more && making.len() + ending.len() < at_a_time as usize {
                making.push(self.start()?);
            }
            if making.is_empty() && ending.is_empty() {
                return Ok(Rate { count, elapsed: last - begin, latency });
            }
            self.maker.ctx.progress();
            let mut at = 0;
            while let Some((connecting, since)) = making.get_mut(at) {
                if let Some(connection) = connecting.try_finish()? {
                    let time = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    latency.saturating_record(time);
                    connection.disconnect()?;
                    ending.push_back(connection);
                    making.swap_remove(at);
                } else {
                    at += 1;
                }
            }
            while ending.front().is_some_and(Connection::is_disconnected) {
                ending.pop_front();
                (count, last) = (count + 1, Instant::now());
            }
            if last.elapsed() > SILENCE {
                return Err(silent(self.server));
            }
        }
    }

    /// Makes `count` connections and keeps them.
    fn hold(&self, count: u32, at_a_time: u32) -> Result<Vec<Connection>> {
        let mut held = Vec::with_capacity(count as usize);
        let mut making: VecDeque<Connecting> = VecDeque::new();
        let mut last = Instant::now();
        while held.len() < count as usize {
            while making.len() < at_a_time as usize && held.len() + making.len() < count as usize {
                making.push_back(self.start()?.0);
            }
            self.maker.ctx.progress();
            while let Some(connecting) = making.front_mut() {
                let Some(connection) = connecting.try_finish()? else { break };
                making.pop_front();
                held.push(connection);
                last = Instant::now();
            }
            if last.elapsed() > SILENCE {
                return Err(silent(self.server));
            }
        }
        Ok(held)
    }
}

fn silent(server: SocketAddr) -> Failure {
    Failure::Failed(format!(
        "{server}: no connection was made or ended within {} s",
        SILENCE.as_secs()
    ))
}
