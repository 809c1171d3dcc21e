//! Queue pairs that are connected to a perftest program's, and the memory behind them, laid out as there: first what each queue pair
//! sends from, then where each queue pair's messages land.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::{
    Access, Ah, Budget, CompChannel, ConnectOptions, Context, Cq, Endpoint, Key, Mr, Mtu, PeerPath,
    PreparedQp, Psn, Qp, QpState, QpType, Qpn, WcStatus,
};

use super::message::Keys;
use super::plan::Plan;
use super::talk::{PATIENCE, Talk, Terms};
use crate::compat::gid;
use crate::compat::wire::Watch;
use crate::measure::{FlowPlan, Lane, Lanes, MeasureError, Receive};
use crate::output::Failure;
use crate::session::{self, diagnosis};

/// Bytes of a page of memory here, as the peer is told: the messages of a queue pair take so many in turn.
pub const PAGE: u32 = 4096;
/// How far apart they are, at least.
pub const CACHE_LINE: u32 = 64;
/// How long a peer whose words have ended may finish what is on its way.
const GRACE: Duration = Duration::from_secs(1);
/// Of both sides' datagrams.
const QKEY: u32 = 0x1111_1111;
/// What the device takes.
const READS_MAX: u32 = 128;

/// All of it.
#[derive(Debug)]
pub struct Bench {
    /// The device.
    pub ctx: Context,
    /// Where sends complete, and where receives do.
    pub cqs: [Cq; 2],
    /// What announces completions, if they are slept for.
    pub channel: Option<CompChannel>,
    /// The region.
    pub mr: Mr,
    /// The queue pairs.
    pub qps: Vec<Qp>,
    /// Where the datagrams of each go, if they are for those.
    ahs: Vec<Ah>,
    /// What the peer was told of them.
    pub own: Vec<Keys>,
    /// What it told of its own.
    pub theirs: Vec<Keys>,
    /// What both know.
    pub terms: Terms,
    /// The address of its packets.
    pub peer: IpAddr,
    watch: Watch,
    /// When its words ended, if they have.
    gone: Cell<Option<Instant>>,
}

/// Why a measurement ended too early.
#[derive(Debug)]
pub enum Trouble {
    /// On this side, or on the network.
    Measure(MeasureError),
    /// At the peer.
    Peer(&'static str),
}

impl From<MeasureError> for Trouble {
    fn from(error: MeasureError) -> Self {
        Self::Measure(error)
    }
}

impl Bench {
    /// Makes queue pairs, tells of them, connects them.
    ///
    /// # Errors
    /// Limits; the peer says something else, goes or stays silent; its address cannot be reached.
    pub fn connect(ctx: Context, plan: &mut Plan, talk: &mut Talk) -> Result<Self, Failure> {
        let active = ctx.query_device().active_mtu;
        let mtu = plan.mtu.unwrap_or(active);
        if mtu > active {
            return Err(Failure::Failed(format!(
                "path MTU {mtu} does not fit {}, which takes {active}: give -m {active}, or raise the MTU of its link",
                ctx.name()
            )));
        }
        let terms = talk.agree(PAGE, CACHE_LINE, mtu)?;
        plan.fit(terms.mtu)?;
        let plan = &*plan;
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
        let build = |_| {
            let qp = pd.qp(&cqs[0], &cqs[1]).max_send_wr(plan.tx_depth).max_recv_wr(rx_depth);
            qp.qp_type(plan.service).qkey(QKEY).max_inline_data(plan.inline).build()
        };
        let prepared = (0..plan.qps).map(build).collect::<Result<Vec<_>, _>>()?;
        let told = |(index, qp): (usize, &PreparedQp)| keys(plan, &qp.endpoint(), &mr, area, index);
        let own: Vec<Keys> = prepared.iter().enumerate().map(told).collect();
        let local = prepared[0].endpoint().address;
        talk.enter("telling addresses (both sides need the same test and the same -q)");
        if !plan.test.is_bandwidth() && !plan.test.is_send() {
            talk.keys(&own[0])?;
        }
        let theirs = own.iter().map(|own| talk.keys(own)).collect::<Result<Vec<_>, _>>()?;
        let ends = theirs.iter().map(|theirs| endpoint(plan, theirs, local, terms.mtu));
        let ends = ends.collect::<Result<Vec<_>, _>>().map_err(|why| talk.failed(why))?;
        let peer = ends[0].address;
        let mut qps = Vec::with_capacity(prepared.len());
        let mut ahs = Vec::new();
        for ((qp, theirs), end) in prepared.into_iter().zip(&theirs).zip(&ends) {
            if plan.service == QpType::Ud {
                let gid_index = ctx.gids().iter().position(|gid| *gid == local).unwrap_or(0);
                let path = PeerPath { traffic_class: plan.traffic_class, ..PeerPath::to(end) };
                ahs.push(pd.create_ah(gid_index, &path).map_err(|why| talk.failed(why))?);
                qps.push(qp.ready().map_err(|(_, why)| talk.failed(why))?);
                continue;
            }
            let connected = session::connect_qp(&ctx, qp, end, &options(plan, theirs, terms.mtu));
            qps.push(connected.map_err(|why| talk.failed(why))?);
        }
        let watch = talk.wire().watch()?;
        let gone = Cell::new(None);
        let bench = Self { ctx, cqs, channel, mr, qps, ahs, own, theirs, terms, peer, watch, gone };
        bench.meet_connected(plan, talk)?;
        Ok(bench)
    }

    /// Both sides tell everything again, and meet once.
    fn meet_connected(&self, plan: &Plan, talk: &mut Talk) -> Result<(), Failure> {
        if plan.test.is_send() {
            talk.keys(&self.own[0])?;
        }
        self.own.iter().try_for_each(|own| talk.keys(own).map(drop))?;
        if !plan.test.is_send() {
            talk.keys(&self.own[0])?;
        }
        Ok(())
    }

    /// Bytes of each queue pair's memory, in which it sends and in which it receives.
    fn area(&self) -> usize {
        self.mr.len() / 2 / self.qps.len()
    }

    /// Where a queue pair's messages come from and go to.
    #[must_use]
    pub fn lane(&self, index: usize) -> Lane<'_> {
        let (area, theirs) = (self.area(), &self.theirs[index]);
        Lane {
            qp: &self.qps[index],
            source: index * area,
            landing: (self.qps.len() + index) * area,
            remote: theirs.address,
            rkey: Key(theirs.rkey),
            to: self.ahs.get(index).map(|ah| ah.to(Qpn::new(theirs.qpn), QKEY)),
        }
    }

    /// All of them.
    #[must_use]
    pub fn lanes(&self) -> Lanes<'_> {
        Lanes {
            ctx: &self.ctx,
            cqs: &self.cqs,
            channel: self.channel.as_ref(),
            mr: &self.mr,
            lanes: (0..self.qps.len()).map(|index| self.lane(index)).collect(),
        }
    }

    /// The sum of all words where the peer's messages land: they begin at 0.
    #[must_use]
    pub fn landed_sum(&self) -> u64 {
        let half = self.mr.len() / 2;
        let words = (half..self.mr.len()).step_by(8);
        words.fold(0, |sum, at| sum.wrapping_add(self.mr.load_u64(at)))
    }

    /// What is done with them for messages of a size.
    #[must_use]
    pub fn flow(&self, plan: &Plan, size: usize) -> FlowPlan {
        let cycle = self.terms.cycle_buffer as usize;
        let taken = plan.head() + size;
        let stride = taken.max(1).next_multiple_of(self.terms.cache_line as usize);
        let sends = plan.client || plan.both;
        let receives = plan.test.is_send() && (!plan.client || plan.both);
        FlowPlan {
            op: plan.op().filter(|_| sends),
            receive: if receives { Receive::Until } else { Receive::No },
            size,
            slots: if taken <= cycle / 2 { cycle / stride } else { 1 },
            stride,
            depth: plan.tx_depth as usize,
            recv_depth: plan.rx_depth as usize,
            list: plan.post_list as usize,
            signal_every: plan.cq_mod as usize,
            until: plan.until,
            mark_last: false,
            second: plan.test.is_send() && plan.both && !plan.client,
        }
    }

    /// Called while nothing happens: gives up when that takes too long, or when the peer's words have ended and with them its packets.
    ///
    /// # Errors
    /// It has come to that.
    pub fn idle(&self, idle: Duration) -> Result<(), Trouble> {
        const SOON: Duration = Duration::from_millis(5);
        if idle < SOON {
            return Ok(());
        }
        if idle > PATIENCE {
            return Err(Trouble::Measure(MeasureError::Silence {
                what: "packet",
                patience: PATIENCE,
            }));
        }
        if self.qps.iter().any(|qp| qp.state() == QpState::Err) {
            // Who waits for memory has not polled for the reason.
            return Err(Trouble::Measure(MeasureError::Completion(self.why_broken())));
        }
        if self.gone.get().is_none() && self.watch.is_gone() {
            self.gone.set(Some(Instant::now()));
        }
        match self.gone.get() {
            Some(since) if since.elapsed() > GRACE => {
                Err(Trouble::Peer("it closed the connection: what does it say there?"))
            }
            _ => Ok(()),
        }
    }

    /// The status with which a broken queue pair ended.
    fn why_broken(&self) -> WcStatus {
        for cq in &self.cqs {
            while let Ok(Some(wc)) = cq.poll_one() {
                if wc.status != WcStatus::Success {
                    return wc.status;
                }
            }
        }
        WcStatus::WrFlushErr
    }

    /// What to tell the user.
    pub fn failure(&self, talk: &Talk, trouble: &Trouble) -> Failure {
        match trouble {
            Trouble::Peer(why) => talk.failed(why),
            Trouble::Measure(MeasureError::Completion(status)) => {
                talk.failed(diagnosis::of_status(&self.ctx, self.peer, *status))
            }
            Trouble::Measure(MeasureError::Silence { patience, .. }) => {
                let why = diagnosis::of_silence(&self.ctx, self.peer, *patience);
                talk.failed(format_args!("{why}; or was it given another test, -n or -s?"))
            }
            Trouble::Measure(MeasureError::Verbs(error)) => talk.failed(error),
        }
    }
}

/// What the peer is told of a queue pair.
fn keys(plan: &Plan, end: &Endpoint, mr: &Mr, area: usize, index: usize) -> Keys {
    Keys {
        out_reads: plan.out_reads.into(),
        qpn: end.qpn.value(),
        psn: end.psn.value(),
        rkey: mr.rkey().0,
        address: mr.address() + ((plan.qps as usize + index) * area) as u64,
        gid: gid::of(end.address),
    }
}

/// What a queue pair is connected to, if what the peer told of it can be meant.
fn endpoint(plan: &Plan, theirs: &Keys, local: IpAddr, mtu: Mtu) -> Result<Endpoint, String> {
    if theirs.qpn < 2 {
        return Err(format!("{} is no number of a queue pair", theirs.qpn));
    }
    let space = 2 * plan.size_max().max(PAGE as usize) as u64;
    if !plan.test.is_send() && theirs.address.checked_add(space).is_none() {
        return Err(format!("its memory at {:#x} has no end", theirs.address));
    }
    if plan.test.is_atomic() && !theirs.address.is_multiple_of(8) {
        return Err(format!("its memory at {:#x} takes no atomics", theirs.address));
    }
    let address = gid::address(theirs.gid, "-x")?;
    gid::same_family(local, address, "-x")?;
    Ok(Endpoint {
        address,
        qpn: Qpn::new(theirs.qpn),
        psn: Psn::new(theirs.psn),
        mtu,
        budget: Budget::STRANGER,
    })
}

fn options(plan: &Plan, theirs: &Keys, mtu: Mtu) -> ConnectOptions {
    ConnectOptions {
        mtu: Some(mtu),
        max_rd_atomic: theirs.out_reads.clamp(1, READS_MAX) as u8,
        max_dest_rd_atomic: plan.out_reads,
        timeout: plan.timeout,
        traffic_class: plan.traffic_class,
        ..ConnectOptions::default()
    }
}
