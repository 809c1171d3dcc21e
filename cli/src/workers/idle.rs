//! Many connected queue pairs on which nothing happens.

use std::time::Duration;

use rocinante::{Context, Exchange, Mtu};

use super::cost;
use super::measure::{Figure, Measure, Step};
use crate::measure::{Connected, Connecting, Side};
use crate::output::Failure;

/// Depth of either queue.
const DEPTH: u32 = 16;
/// After what was done to connect them.
const SETTLES: Duration = Duration::from_millis(500);

/// Makes and connects `qps` queue pairs, leaves them alone for as long as `step` says, and tells what each costs. Nothing else may have been done by
/// this process before: it would have left memory that is used again.
pub(super) fn measure(
    ctx: Context,
    side: Side,
    (mtu, qps): (u32, u32),
    step: &Step,
    exchange: &mut Exchange,
) -> Result<Vec<Figure>, Failure> {
    let how = Connecting {
        mtu: Mtu::from_bytes(mtu),
        qps,
        sends: DEPTH,
        receives: DEPTH,
        inline: 0,
        completions: DEPTH,
        half: 4096,
    };
    // What is there once is none of theirs: the code that connects, for one, is read from its file when it runs first.
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
    let said = exchange.hear()?;
    let theirs: [f64; 2] =
        serde_json::from_str(&said).map_err(|_| exchange.error(format_args!("it said {said}")))?;
    Ok(vec![
        step.figure(Measure::QpBytes, bytes.max(theirs[0])),
        step.figure(Measure::IdleWakeups, naps.max(theirs[1])),
    ])
}
