//! Queue pairs connected to those of another process, with memory at both ends, for measurements.

use std::time::Duration;

use rocinante::exchange::{Exchange, Hello};
use rocinante::{
    Access, CompChannel, ConnectOptions, Context, Cq, Mr, Pd, Qp, RemoteSlice, VerbsError,
};

use super::End;

/// Number of queue pairs that one exchange connects.
const AT_ONCE: u32 = 32;

/// The parameters of [`Connected`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connecting {
    /// Timeouts, retries, and the path MTU; by default the largest that the links carry.
    pub options: ConnectOptions,
    /// Queue pairs, which share a completion queue and a region.
    pub qps: u32,
    /// Depth of each send queue.
    pub sends: u32,
    /// Depth of each receive queue.
    pub receives: u32,
    /// Memory ranges per request.
    pub elements: u32,
    /// Bytes of inline data per request.
    pub inline: u32,
    /// Entries of the completion queue.
    pub completions: u32,
    /// Bytes of half a region. One half is the source of messages, the other half their target.
    pub half: usize,
}

/// Connected queue pairs and their objects.
#[derive(Debug)]
pub struct Connected {
    ctx: Context,
    channel: CompChannel,
    cq: Cq,
    mr: Mr,
    qps: Vec<Qp>,
    peer: RemoteSlice,
}

impl Connected {
    /// Creates queue pairs and connects them to those at the other end of `exchange`. Error: the
    /// device's limits are exceeded or it does not carry the path MTU, or the peer is silent or has
    /// other queue pairs.
    pub fn new(
        ctx: Context,
        how: &Connecting,
        exchange: &mut Exchange,
    ) -> Result<Self, VerbsError> {
        let (pd, channel) = (ctx.alloc_pd(), ctx.create_comp_channel()?);
        let cq = ctx.create_cq_with(how.completions, &channel)?;
        let mr = pd.allocate(2 * how.half, Access::ALL)?;
        let pattern: Vec<u8> = (0..2 * how.half).map(|i| ((i * 31) >> 3) as u8).collect();
        mr.write(0, &pattern);
        let mut qps = Vec::with_capacity(how.qps as usize);
        let mut peer = None;
        while qps.len() < how.qps as usize {
            let count = AT_ONCE.min(how.qps - qps.len() as u32);
            peer = Some(connect(&pd, &cq, &mr, how, count, exchange, &mut qps)?);
        }
        let peer = peer.ok_or_else(|| VerbsError::Invalid("no queue pairs are wanted".into()))?;
        exchange.barrier("connected")?;
        Ok(Self { ctx, channel, cq, mr, qps, peer })
    }

    /// The device.
    #[must_use]
    pub fn ctx(&self) -> &Context {
        &self.ctx
    }

    /// The channel of the completion queue.
    #[must_use]
    pub fn channel(&self) -> &CompChannel {
        &self.channel
    }

    /// The end of a measurement with the first queue pair.
    #[must_use]
    pub fn end(&self, patience: Duration) -> End<'_> {
        let Self { ctx, cq, mr, qps, peer, .. } = self;
        End::new(ctx, &qps[0], cq, mr, *peer, patience)
    }

    /// The ends of a measurement, one per queue pair. The measurement gives up after `patience`
    /// without progress.
    #[must_use]
    pub fn ends(&self, patience: Duration) -> Vec<End<'_>> {
        let Self { ctx, cq, mr, peer, .. } = self;
        self.qps.iter().map(|qp| End::new(ctx, qp, cq, mr, *peer, patience)).collect()
    }
}

/// Creates and connects `count` more queue pairs. Returns the peer's region.
fn connect(
    pd: &Pd,
    cq: &Cq,
    mr: &Mr,
    how: &Connecting,
    count: u32,
    exchange: &mut Exchange,
    qps: &mut Vec<Qp>,
) -> Result<RemoteSlice, VerbsError> {
    let qp = |_| {
        let qp = pd.qp(cq, cq).access(Access::ALL).max_send_wr(how.sends).max_recv_wr(how.receives);
        qp.max_sge(how.elements).max_inline_data(how.inline).build()
    };
    let prepared = (0..count).map(qp).collect::<Result<Vec<_>, _>>()?;
    let peer = exchange.swap(&Hello {
        endpoints: prepared.iter().map(rocinante::PreparedQp::endpoint).collect(),
        regions: vec![mr.remote()],
        note: String::new(),
    })?;
    let Some(region) = peer.regions.first().filter(|_| peer.endpoints.len() == prepared.len())
    else {
        return Err(exchange.error("it has another number of queue pairs, or no region"));
    };
    if region.len != mr.len() as u64 {
        return Err(exchange.error("its region has another length than this side's"));
    }
    for (qp, endpoint) in prepared.into_iter().zip(&peer.endpoints) {
        let qp = qp.connect(endpoint, &how.options)?;
        if let (Some(wanted), Some(has)) = (how.options.mtu, qp.query().1.path_mtu)
            && wanted != has
        {
            return Err(VerbsError::Invalid(format!(
                "the devices agree on a path MTU of {} at most, not {}: raise the MTU of both links (4200 carries 4096)",
                has.bytes(),
                wanted.bytes()
            )));
        }
        qps.push(qp);
    }
    Ok(*region)
}
