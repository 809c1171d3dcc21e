//! Many connected but idle queue pairs.

use std::time::Duration;

use rocinante::exchange::Exchange;
use rocinante::verbs::Mtu;
use rocinante::{ConnectOptions, Context};

use super::cost;
use super::measure::{Figure, Measure, Step};
use rocinante_cli::measure::{Connected, Connecting, Side};
use rocinante_cli::output::Result;

/// Depth of each send queue and each receive queue.
const DEPTH: u32 = 16;
/// Time for the work of connecting to settle.
const SETTLES: Duration = Duration::from_millis(500);

/// Connects `qps` queue pairs, leaves them idle for the time of `step`, and returns the cost of
/// each. This process must not have done anything else before, because memory that earlier work
/// freed would be used again.
pub(super) fn measure(
    ctx: Context,
    side: Side,
    (mtu, qps): (u32, u32),
    step: &Step,
    exchange: &mut Exchange,
) -> Result<Vec<Figure>> {
    let how = Connecting {
        options: ConnectOptions::default().mtu(Mtu::from_bytes(mtu)),
        qps,
        sends: DEPTH,
        receives: DEPTH,
        elements: 1,
        inline: 0,
        completions: DEPTH,
        half: 4096,
    };
    // The first connection loads what all of them need, such as the code that connects, which is
    // read from its file when it first runs.
    let first = Connected::new(ctx.clone(), &Connecting { qps: 1, ..how }, exchange)?;
    exchange.barrier("before")?;
    let before = cost::resident()?;
    let connected = Connected::new(ctx, &how, exchange)?;
    let bytes = cost::resident()?.saturating_sub(before) as f64 / f64::from(qps);
    exchange.barrier("idle")?;
    std::thread::sleep(SETTLES);
    let time = Duration::from_secs_f64(step.seconds);
    let naps = cost::naps()?;
    std::thread::sleep(time);
    let naps = (cost::naps()? - naps) as f64 / time.as_secs_f64();
    exchange.barrier("done")?;
    drop((first, connected));
    if side == Side::Second {
        exchange.say(&serde_json::to_string(&[bytes, naps]).expect("figures are JSON"))?;
        return Ok(Vec::new());
    }
    let line = exchange.hear()?;
    let theirs: [f64; 2] =
        serde_json::from_str(&line).map_err(|_| exchange.error(format_args!("it sent {line}")))?;
    Ok(vec![
        step.figure(Measure::QpBytes, bytes.max(theirs[0])),
        step.figure(Measure::IdleWakeups, naps.max(theirs[1])),
    ])
}
