//! Small messages of several threads, each with queue pairs or streams of its own.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;
use rocinante::verbs::Mtu;
use rocinante::{ConnectOptions, Context};
use rocinante_cli::measure::{
    Bulk, BulkOp, Connected, Connecting, MeasureError, Side, Until, bulk, serve,
};
use rocinante_cli::output::Result;

use super::measure::{Figure, Step};
use super::ours::{PATIENCE, WARM_UP};
use super::peers;

/// Messages outstanding on a queue pair, if a thread has several.
const OUTSTANDING: u32 = 64;

/// One side, which has `each` connections for each thread. The second has no figures.
pub(super) fn run(
    ctx: Option<Context>,
    side: Side,
    ends: (IpAddr, IpAddr),
    (mtu, threads, each): (u32, u32, u32),
    step: &Step,
    exchange: &mut Exchange,
) -> Result<Option<Figure>> {
    let time = Duration::from_secs_f64(step.seconds);
    let mops = match ctx {
        Some(ctx) => verbs(&ctx, side, (mtu, threads, each), step.size, time, exchange)?,
        None => streams(side, ends, (threads, each), step.size, time, exchange)?,
    };
    Ok((side == Side::First).then(|| step.figure(step.measure, mops)))
}

fn verbs(
    ctx: &Context,
    side: Side,
    (mtu, threads, each): (u32, u32, u32),
    size: usize,
    time: Duration,
    exchange: &mut Exchange,
) -> Result<f64> {
    let small = Bulk::small(BulkOp::Write, size, Until::Time(time));
    let depth = if each > 1 { OUTSTANDING as usize } else { small.depth };
    let how = Connecting {
        options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
        qps: each,
        sends: depth as u32,
        receives: 1,
        elements: 1,
        inline: 0,
        completions: each * depth as u32,
        half: size,
    };
    // Each thread has a completion queue of its own.
    let all = (0..threads).map(|_| Connected::new(ctx.clone(), &how, exchange));
    let all: Vec<Connected> = all.collect::<Result<_, _>>()?;
    if side == Side::Second {
        serve(ctx, exchange, "done")?;
        return Ok(0.0);
    }
    let flow = |connected: &Connected| {
        let ends = connected.ends(PATIENCE);
        let what = Bulk { depth, ..small };
        bulk(&ends, &Bulk { until: Until::Time(WARM_UP), ..what }, |_| ())?;
        Ok::<f64, MeasureError>(bulk(&ends, &what, |_| ())?.mops())
    };
    let mops = side_by_side(all.iter().map(|connected| move || flow(connected)))?;
    exchange.barrier("done")?;
    Ok(mops)
}

/// Streams that sleep in their calls. Each message is a call of its own.
fn streams(
    side: Side,
    ends: (IpAddr, IpAddr),
    (threads, each): (u32, u32),
    size: usize,
    time: Duration,
    exchange: &mut Exchange,
) -> Result<f64> {
    let all = (0..threads * each).map(|_| peers::connect(side, ends, exchange));
    let mut all: Vec<TcpStream> = all.collect::<Result<_>>()?;
    let in_tcp = peers::failed("TCP");
    if side == Side::Second {
        let receive = |mut stream: TcpStream| {
            let mut bytes = vec![0; 64 << 10];
            while stream.read(&mut bytes)? > 0 {}
            Ok::<f64, std::io::Error>(0.0)
        };
        return side_by_side(all.into_iter().map(|stream| move || receive(stream))).map_err(in_tcp);
    }
    let send = |streams: &mut [TcpStream]| {
        let (bytes, begin, mut messages) = (vec![0x5a; size], Instant::now(), 0_u64);
        while begin.elapsed() < time {
            for stream in &mut *streams {
                stream.write_all(&bytes)?;
                messages += 1;
            }
        }
        Ok::<f64, std::io::Error>(messages as f64 / begin.elapsed().as_secs_f64() / 1e6)
    };
    let shares = all.chunks_mut(each as usize);
    side_by_side(shares.map(|share| move || send(share))).map_err(in_tcp)
}

/// The sum of what all of these return, each on a thread of its own.
fn side_by_side<F, E>(all: impl Iterator<Item = F>) -> Result<f64, E>
where
    F: FnOnce() -> Result<f64, E> + Send,
    E: Send,
{
    thread::scope(|scope| {
        let running: Vec<ScopedJoinHandle<'_, _>> = all.map(|one| scope.spawn(one)).collect();
        let ended = running
            .into_iter()
            .map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_of_all_threads_and_an_error_is_that_of_one() {
        let of = |values: &[f64]| {
            let one = |value: f64| move || if value < 0.0 { Err("lost") } else { Ok(value) };
            side_by_side(values.iter().map(|value| one(*value)))
        };
        assert_eq!(of(&[1.0, 2.0, 4.0]), Ok(7.0));
        assert_eq!(of(&[1.0, -2.0, 4.0]), Err("lost"));
    }
}
