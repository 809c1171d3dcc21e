//! Creates queue pairs and connects them to a perftest program's: with the addresses that both
//! sides exchange, or with `-R` through the connection manager.

use std::net::IpAddr;

use rocinante::verbs::{Destination, Mtu, PeerPath, Psn, QpType, Qpn};
use rocinante::{
    Access, Ah, CompChannel, ConnectOptions, Context, Cq, Endpoint, Mr, Pd, PreparedQp, Qp,
    VerbsError, cm,
};

use super::bench::PAGE;
use super::managed::ManagedSide;
use super::message::Keys;
use super::plan::{Managed, PerftestPlan};
use super::talk::{Talk, Terms};
use crate::compat::gid;
use crate::compat::queue::gid_index;
use crate::output::Failure;
use crate::session::join::Joined;
use crate::session::{self};

/// The Q_Key of both sides' datagrams, unless the connection manager connects.
const QKEY: u32 = 0x1111_1111;
/// The READs and atomics in flight that the device takes.
const READS_MAX: u32 = 128;

/// The objects that queue pairs are created with.
pub(super) struct PerftestParts {
    pub(super) ctx: Context,
    /// The completion queues of sends and of receives.
    pub(super) cqs: [Cq; 2],
    pub(super) channel: Option<CompChannel>,
    pub(super) pd: Pd,
    /// First the send areas of all queue pairs, then their receive areas.
    pub(super) mr: Mr,
    rx_depth: u32,
}

/// Connected queue pairs.
pub(super) struct ConnectedQps {
    pub(super) qps: Vec<Joined>,
    /// The destination of each queue pair's datagrams, if it sends any.
    pub(super) targets: Vec<Target>,
    /// The keys of the queue pairs that the peer was sent.
    pub(super) own: Vec<Keys>,
    /// The keys of the peer's queue pairs.
    pub(super) theirs: Vec<Keys>,
    /// The address of the peer's packets.
    pub(super) peer: IpAddr,
    pub(super) mtu: Mtu,
}

/// The destination of datagrams.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) ah: Ah,
    pub(super) qpn: Qpn,
    pub(super) qkey: u32,
}

impl Target {
    pub(super) fn to(&self) -> Destination {
        self.ah.to(self.qpn, self.qkey)
    }
}

impl PerftestParts {
    pub(super) fn new(ctx: Context, plan: &PerftestPlan, terms: &Terms) -> Result<Self, Failure> {
        let channel = plan.events.then(|| ctx.create_comp_channel()).transpose()?;
        let cq = |depth: u32| match &channel {
            Some(channel) => ctx.create_cq_with(depth, channel),
            None => ctx.create_cq(depth),
        };
        let rx_depth = if plan.test.is_send() { plan.rx_depth } else { 1 };
        let cqs = [cq(plan.qps * plan.tx_depth)?, cq(plan.qps * rx_depth)?];
        let pd = ctx.alloc_pd();
        let area = (plan.head() + plan.size_max()).max(terms.cycle_buffer as usize);
        let mr = pd.allocate(2 * plan.qps as usize * area, Access::ALL)?;
        Ok(Self { ctx, cqs, channel, pd, mr, rx_depth })
    }

    /// Creates a queue pair.
    pub(super) fn build(
        &self,
        plan: &PerftestPlan,
        local: IpAddr,
    ) -> Result<PreparedQp, VerbsError> {
        let qkey = if plan.managed == Managed::All { cm::UDP_QKEY } else { QKEY };
        let qp = self
            .pd
            .qp(&self.cqs[0], &self.cqs[1])
            .access(Access::ALL)
            .sgid_index(gid_index(&self.ctx, local));
        let qp = qp.max_send_wr(plan.tx_depth).max_recv_wr(self.rx_depth);
        qp.qp_type(plan.service).qkey(qkey).max_inline_data(plan.inline).build()
    }

    /// Offset in the region of a queue pair's receive area.
    pub(super) fn landing(&self, plan: &PerftestPlan, index: usize) -> usize {
        self.mr.len() / 2 + index * (self.mr.len() / 2 / plan.qps as usize)
    }

    /// The keys of a queue pair, for the peer.
    fn keys(&self, plan: &PerftestPlan, end: &Endpoint, index: usize) -> Keys {
        Keys {
            out_reads: plan.out_reads.into(),
            qpn: end.qpn.value(),
            psn: end.psn.value(),
            rkey: self.mr.rkey().0,
            address: self.mr.address() + self.landing(plan, index) as u64,
            gid: gid::of(end.address),
        }
    }

    /// An address handle for the peer's datagrams.
    pub(super) fn target(
        &self,
        plan: &PerftestPlan,
        local: IpAddr,
        path: PeerPath,
    ) -> Result<Ah, VerbsError> {
        let path = path.traffic_class(plan.traffic_class);
        self.pd.create_ah(&path.sgid_index(gid_index(&self.ctx, local)))
    }

    /// Exchanges keys with the peer, and connects the queue pairs accordingly.
    pub(super) fn swap(
        &self,
        plan: &PerftestPlan,
        talk: &mut Talk,
        terms: &Terms,
    ) -> Result<ConnectedQps, Failure> {
        let local = self.ctx.gids()[0];
        let built = (0..plan.qps).map(|_| self.build(plan, local));
        let prepared = built.collect::<Result<Vec<_>, _>>()?;
        let own = prepared.iter().enumerate();
        let own: Vec<Keys> = own.map(|(at, qp)| self.keys(plan, &qp.endpoint(), at)).collect();
        let theirs = exchange_keys(plan, &own, talk)?;
        let ends = theirs.iter().map(|theirs| endpoint(theirs, local, terms.mtu));
        let ends = ends.collect::<Result<Vec<_>, _>>().map_err(|why| talk.failed(why))?;
        let peer = ends[0].address;
        let (mut qps, mut targets) = (Vec::with_capacity(prepared.len()), Vec::new());
        for ((qp, theirs), end) in prepared.into_iter().zip(&theirs).zip(&ends) {
            let qp = if plan.service == QpType::Ud {
                let ah = self.target(plan, local, PeerPath::to(end));
                let ah = ah.map_err(|why| talk.failed(why))?;
                targets.push(Target { ah, qpn: end.qpn, qkey: QKEY });
                qp.ready().map_err(|refused| talk.failed(refused.error))?
            } else {
                let options = options(plan, theirs.out_reads, terms.mtu);
                let connected = session::connect_qp(&self.ctx, qp, end, &options);
                connected.map_err(|why| talk.failed(why))?
            };
            qps.push(Joined::Plain(Box::new(qp)));
        }
        Ok(ConnectedQps { qps, targets, own, theirs, peer, mtu: terms.mtu })
    }

    /// Connects queue pairs through the connection manager, and then exchanges keys.
    pub(super) fn manage(
        &self,
        side: ManagedSide,
        plan: &PerftestPlan,
        talk: &mut Talk,
        terms: &Terms,
    ) -> Result<ConnectedQps, Failure> {
        // Both sides meet before connecting and after it. They have no keys to exchange yet.
        talk.enter("connecting queue pairs (both sides need the same -q and -c)");
        talk.keys(&Keys::default())?;
        let (mut qps, mut targets) = (Vec::with_capacity(plan.qps as usize), Vec::new());
        for index in 0..plan.qps as usize {
            let (qp, target) = if plan.service == QpType::Ud {
                side.find(self, plan, talk, index)?
            } else {
                (side.connect(self, plan, talk, &self.offer(plan, terms.mtu))?, None)
            };
            qps.push(qp);
            targets.extend(target);
        }
        // A later client finds no listener.
        drop(side);
        talk.keys(&Keys::default())?;
        let keys = |(index, qp): (usize, &Joined)| self.keys(plan, &Qp::endpoint(qp), index);
        let own: Vec<Keys> = qps.iter().enumerate().map(keys).collect();
        let theirs = exchange_keys(plan, &own, talk)?;
        // The side that asked for the connection chose the path MTU.
        let mtu = qps[0].query().1.path_mtu.unwrap_or(terms.mtu);
        let peer = talk.wire().peer().ip();
        Ok(ConnectedQps { qps, targets, own, theirs, peer, mtu })
    }

    /// The options of a connection. Whatever the client offers to serve, perftest's server asks for
    /// as many READs in flight as its own device takes. So this side offers as many as its device
    /// can serve.
    fn offer(&self, plan: &PerftestPlan, mtu: Mtu) -> ConnectOptions {
        let serves = self.ctx.query_device().limits.max_qp_rd_atom;
        options(plan, plan.out_reads.into(), mtu).max_dest_rd_atomic(serves.min(READS_MAX) as u8)
    }
}

/// Both sides exchange the keys of all queue pairs.
fn exchange_keys(plan: &PerftestPlan, own: &[Keys], talk: &mut Talk) -> Result<Vec<Keys>, Failure> {
    talk.enter("telling addresses (both sides need the same test and the same -q)");
    if !plan.test.is_bandwidth() && !plan.test.is_send() {
        talk.keys(&own[0])?;
    }
    let theirs = own.iter().map(|own| talk.keys(own)).collect::<Result<Vec<_>, _>>()?;
    let suited = theirs.iter().try_for_each(|theirs| suits(plan, theirs));
    suited.map_err(|why| talk.failed(why))?;
    Ok(theirs)
}

/// Checks that the memory in the peer's keys can exist.
fn suits(plan: &PerftestPlan, theirs: &Keys) -> Result<(), String> {
    let space = 2 * plan.size_max().max(PAGE as usize) as u64;
    if !plan.test.is_send() && theirs.address.checked_add(space).is_none() {
        return Err(format!("its memory at {:#x} has no end", theirs.address));
    }
    if plan.test.is_atomic() && !theirs.address.is_multiple_of(8) {
        return Err(format!("its memory at {:#x} takes no atomics", theirs.address));
    }
    Ok(())
}

/// The endpoint of the peer's queue pair, if its keys are valid.
fn endpoint(theirs: &Keys, local: IpAddr, mtu: Mtu) -> Result<Endpoint, String> {
    if theirs.qpn < 2 {
        return Err(format!("{} is no number of a queue pair", theirs.qpn));
    }
    let address = gid::address(theirs.gid, "-x")?;
    gid::same_family(local, address, "-x")?;
    Ok(Endpoint::new(address, Qpn::new(theirs.qpn), Psn::new(theirs.psn), mtu))
}

fn options(plan: &PerftestPlan, their_reads: u32, mtu: Mtu) -> ConnectOptions {
    ConnectOptions::default()
        .mtu(Some(mtu))
        .max_rd_atomic(their_reads.clamp(1, READS_MAX) as u8)
        .max_dest_rd_atomic(plan.out_reads)
        .timeout(plan.timeout)
        .traffic_class(plan.traffic_class)
}
