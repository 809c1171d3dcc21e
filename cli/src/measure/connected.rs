//! One queue pair, connected to that of another process, with memory at both ends: what a measurement works on.

use std::time::Duration;

use rocinante::{
    Access, ConnectOptions, Context, Cq, Exchange, Hello, Mr, Mtu, Qp, RemoteRegion, VerbsError,
};

use super::End;

/// Bytes of inline data of a request.
const INLINE: u32 = 64;

/// A connected queue pair and what belongs to it.
#[derive(Debug)]
pub struct Connected {
    ctx: Context,
    cq: Cq,
    mr: Mr,
    qp: Qp,
    peer: RemoteRegion,
}

impl Connected {
    /// Makes a queue pair of `depth` sends and regions of twice `half` bytes, of which one half is sent from and the other written to, and connects it
    /// to the one at the other end of `exchange`; with the largest path MTU if `mtu` is none.
    ///
    /// # Errors
    /// Limits of the device, a path MTU that it does not carry, or a peer that is silent or has no queue pair.
    pub fn new(
        ctx: Context,
        mtu: Option<Mtu>,
        depth: u32,
        half: usize,
        exchange: &mut Exchange,
    ) -> Result<Self, VerbsError> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(depth)?);
        let mr = pd.allocate(2 * half, Access::ALL)?;
        let pattern: Vec<u8> = (0..2 * half).map(|i| ((i * 31) >> 3) as u8).collect();
        mr.write(0, &pattern);
        let qp = pd.qp(&cq, &cq).max_send_wr(depth).max_inline_data(INLINE).build()?;
        let peer = exchange.swap(&Hello {
            endpoints: vec![qp.endpoint()],
            regions: vec![RemoteRegion::from(&mr)],
            note: String::new(),
        })?;
        let (Some(endpoint), Some(region)) = (peer.endpoints.first(), peer.regions.first()) else {
            return Err(exchange.error("it has no queue pair, or no region"));
        };
        if region.len != mr.len() as u64 {
            return Err(exchange.error("its region has another length than this side's"));
        }
        let options = ConnectOptions { mtu, ..ConnectOptions::default() };
        let qp = qp.connect(endpoint, &options).map_err(|(_, error)| error)?;
        if let (Some(wanted), Some(has)) = (mtu, qp.query().1.path_mtu)
            && wanted != has
        {
            return Err(VerbsError::Invalid(format!(
                "the devices agree on a path MTU of {} at most, not {}: raise the MTU of both links (4200 carries 4096)",
                has.bytes(),
                wanted.bytes()
            )));
        }
        exchange.barrier("connected")?;
        Ok(Self { ctx, cq, mr, qp, peer: *region })
    }

    /// The device.
    #[must_use]
    pub fn ctx(&self) -> &Context {
        &self.ctx
    }

    /// The end of a measurement that gives up after so much `patience`.
    #[must_use]
    pub fn end(&self, patience: Duration) -> End<'_> {
        let Self { ctx, cq, mr, qp, peer } = self;
        End { ctx, qp, cq, mr, remote: *peer, patience }
    }
}
