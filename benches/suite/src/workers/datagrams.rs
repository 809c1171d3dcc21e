//! Datagrams between two queue pairs of type UD: the rate of arrivals.
//!
//! Nothing acknowledges them, so the receiver counts. Each of its receives is posted by itself, as
//! perftest does.

use std::time::Duration;

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{GRH_LEN, PeerPath, QpType};
use rocinante::{Access, Context};

use super::measure::{Figure, Step};
use super::ours::{PATIENCE, WARM_UP, in_bulk};
use rocinante_cli::measure::{
    FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Receive, Side, Until, serve,
};
use rocinante_cli::output::Result;
use rocinante_cli::session::join::QKEY;

/// Receives of the queue pair.
const RECEIVES: usize = 512;
/// Time for which datagrams are sent beyond that in which they are counted.
const LONGER: Duration = Duration::from_millis(50);

/// Sends datagrams of the step's size, or counts them. Returns the figure on the first side.
pub(super) fn rate(
    ctx: &Context,
    side: Side,
    step: &Step,
    exchange: &mut Exchange,
) -> Result<Option<Figure>> {
    let time = Duration::from_secs_f64(step.seconds);
    let bulk = in_bulk(step, 1, Until::Time(WARM_UP + time + LONGER));
    let stride = (GRH_LEN + step.size).next_multiple_of(64);
    let half = RECEIVES * stride;
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq((bulk.depth + RECEIVES) as u32)?);
    let mr = pd.allocate(2 * half, Access::LOCAL_WRITE)?;
    let qp = pd.qp(&cq, &cq).qp_type(QpType::Ud).qkey(QKEY);
    let qp = qp.max_send_wr(bulk.depth as u32).max_recv_wr(RECEIVES as u32).build()?;
    let hello = Hello { endpoints: vec![qp.endpoint()], ..Hello::default() };
    let theirs = exchange.swap(&hello)?;
    let [peer] = &theirs.endpoints[..] else {
        return Err(exchange.error("it has not one queue pair for datagrams").into());
    };
    let ah = pd.create_ah(&PeerPath::to(peer))?;
    let qp = qp.ready()?;
    let to = Some(ah.to(peer.qpn, QKEY));
    let lane = Lane { qp: &qp, landing: half, to };
    let lanes = Lanes { ctx, cq: &cq, channel: None, mr: &mr, lanes: vec![lane] };
    let is_first = side == Side::First;
    let plan = FlowPlan {
        sends: is_first,
        receive: if is_first { Receive::No } else { Receive::Until },
        size: step.size,
        slots: RECEIVES,
        stride,
        depth: bulk.depth,
        recv_depth: RECEIVES,
        list: bulk.list,
        signal_every: bulk.signal_every,
        until: bulk.until,
        mark_last: false,
    };
    lanes.post_receives(&plan)?;
    exchange.barrier("datagrams")?;
    if is_first {
        flow(&lanes, &plan)?;
        exchange.barrier("sent")?;
        let line = exchange.hear()?;
        let mops: f64 = line.parse().map_err(|_| exchange.error(format_args!("it sent {line}")))?;
        return Ok(Some(step.figure(step.measure, mops)));
    }
    flow(&lanes, &FlowPlan { until: Until::Time(WARM_UP), ..plan })?;
    let counted = flow(&lanes, &FlowPlan { until: Until::Time(time), ..plan })?;
    serve(ctx, exchange, "sent")?;
    let mops = counted.received as f64 / counted.elapsed.as_secs_f64() / 1e6;
    exchange.say(&mops.to_string())?;
    Ok(None)
}

fn flow(lanes: &Lanes<'_>, plan: &FlowPlan) -> Result<Flowed, MeasureError> {
    lanes.flow(
        plan,
        |_| (),
        |_, silence| {
            if silence < PATIENCE {
                return Ok(Idle::Wait);
            }
            Err(MeasureError::Silence { what: "datagram", patience: PATIENCE })
        },
    )
}
