//! Queue pairs that are connected to a perftest program's, and the memory behind them, laid out as there: first what each queue pair
//! sends from, then where each queue pair's messages land.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::{CompChannel, Context, Cq, Key, Mr, QpState, WcStatus};

use super::connect::{Connected, Parts, Target};
use super::managed::Side;
use super::message::Keys;
use super::plan::Plan;
use super::talk::{PATIENCE, Talk, Terms};
use crate::compat::wire::Watch;
use crate::measure::{self, FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Receive, Until};
use crate::output::Failure;
use crate::session::diagnosis;
use crate::session::join::Joined;

/// Bytes of a page of memory here, as the peer is told: the messages of a queue pair take so many in turn.
pub const PAGE: u32 = 4096;
/// How far apart they are, at least.
pub const CACHE_LINE: u32 = 64;
/// How long a peer whose words have ended may finish what is on its way.
const GRACE: Duration = Duration::from_secs(1);
/// How long the end of all connections may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// Once the peer says that it has sent everything, what has not come after so much silence is lost.
const LOST_AFTER_WORDS: Duration = Duration::from_millis(200);
/// The same if it says nothing, because it waits as well.
const LOST: Duration = Duration::from_secs(5);

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
    pub qps: Vec<Joined>,
    /// Where the datagrams of each go, if they are for those and send any.
    targets: Vec<Target>,
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
    /// Makes queue pairs, tells of them, connects them: by the connection manager if there is a side of it.
    ///
    /// # Errors
    /// Limits; the peer says something else, goes or stays silent; its address cannot be reached.
    pub(super) fn connect(
        ctx: Context,
        plan: &mut Plan,
        talk: &mut Talk,
        side: Option<Side>,
    ) -> Result<Self, Failure> {
        let active = ctx.query_device().active_mtu;
        let mtu = plan.mtu.unwrap_or(active);
        if mtu > active {
            return Err(Failure::Failed(format!(
                "path MTU {mtu} does not fit {}, which takes {active}: give -m {active}, or raise the MTU of its link",
                ctx.name()
            )));
        }
        let mut terms = talk.agree(PAGE, CACHE_LINE, mtu)?;
        plan.fit(terms.mtu)?;
        let parts = Parts::new(ctx, plan, &terms)?;
        let connected = match side {
            Some(side) => parts.manage(side, plan, talk, &terms),
            None => parts.swap(plan, talk, &terms),
        };
        let Connected { qps, targets, own, theirs, peer, mtu } = connected?;
        terms.mtu = mtu;
        let watch = talk.wire().watch()?;
        let Parts { ctx, cqs, channel, mr, .. } = parts;
        let gone = Cell::new(None);
        let bench =
            Self { ctx, cqs, channel, mr, qps, targets, own, theirs, terms, peer, watch, gone };
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
            to: self.targets.get(index).map(Target::to),
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
            // A receive that is left because a message was lost takes one of a later size.
            room: if plan.loses() { plan.size_max() } else { size },
            slots: if taken <= cycle / 2 && !(plan.loses() && plan.all) {
                cycle / stride
            } else {
                1
            },
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

    /// Called while nothing happens in a flow: where messages may be lost, those that have not come in time are.
    ///
    /// # Errors
    /// As [`idle`](Self::idle).
    pub fn idle_flow(&self, plan: &Plan, so_far: &Flowed, idle: Duration) -> Result<Idle, Trouble> {
        let timed = matches!(plan.until, Until::Time(_));
        if plan.loses() && !timed && so_far.all_sent && so_far.received > 0 {
            let patience = if self.watch.has_said() { LOST_AFTER_WORDS } else { LOST };
            if idle >= patience {
                return Ok(Idle::End);
            }
        }
        self.idle(idle).map(|()| Idle::Wait)
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
            return Err(self.broken(WcStatus::WrFlushErr));
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

    /// A request ended in `status`.
    pub fn broken(&self, status: WcStatus) -> Trouble {
        Trouble::Measure(MeasureError::Completion(measure::cause(status, &self.cqs)))
    }

    /// Ends the connections that the connection manager made: the client asks for that, and perftest's waits until the server has answered.
    pub fn end(self, plan: &Plan) {
        let deadline = Instant::now() + FAREWELL;
        let managed = || self.qps.iter().filter_map(Joined::managed);
        // Who has gone is told no more.
        if plan.client {
            managed().for_each(|connection| drop(connection.disconnect()));
        }
        for connection in managed() {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = connection.wait_disconnected(left);
        }
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
