//! Queue pairs connected to those of a perftest program, and their memory. The layout of the memory
//! is perftest's: first the send areas of all queue pairs, then their receive areas.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::verbs::{Key, QpState};
use rocinante::{CompChannel, Context, Cq, Mr, WcStatus};

use super::connect::{ConnectedQps, PerftestParts, Target};
use super::managed::ManagedSide;
use super::message::Keys;
use super::plan::PerftestPlan;
use super::talk::{PATIENCE, Talk, Terms};
use crate::compat::wire::Watch;
use crate::measure::{self, FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Receive, Until};
use crate::output::Failure;
use crate::session::diagnosis::{self, Unanswered};
use crate::session::join::Joined;

/// Bytes of a memory page, as the peer is told. The messages of a queue pair cycle through this
/// many bytes.
pub const PAGE: u32 = 4096;
/// Smallest distance between two messages, in bytes.
pub const CACHE_LINE: u32 = 64;
/// Time in which a peer that ended its connection may finish the packets in flight.
const GRACE: Duration = Duration::from_secs(1);
/// Time limit for ending all connections.
const FAREWELL: Duration = Duration::from_secs(2);
/// Messages count as lost after this much silence, once the peer says that it has sent everything.
const LOST_AFTER_WORDS: Duration = Duration::from_millis(200);
/// The same while the peer says nothing, because it waits as well.
const LOST: Duration = Duration::from_secs(5);

/// The queue pairs of a measurement and their memory.
#[derive(Debug)]
pub struct Bench {
    /// The device.
    pub ctx: Context,
    /// The completion queues of sends and of receives.
    pub cqs: [Cq; 2],
    /// The channel of completion events, if this side sleeps for them.
    pub channel: Option<CompChannel>,
    /// The region.
    pub mr: Mr,
    /// The queue pairs.
    pub qps: Vec<Joined>,
    /// The destination of each queue pair's datagrams, if it sends any.
    targets: Vec<Target>,
    /// The keys of the queue pairs that the peer was sent.
    pub own: Vec<Keys>,
    /// The keys of the peer's queue pairs.
    pub theirs: Vec<Keys>,
    /// The terms that both sides agreed on.
    pub terms: Terms,
    /// The address of the peer's packets.
    pub peer: IpAddr,
    watch: Watch,
    /// When the peer ended its connection, if it did.
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
    /// Creates queue pairs, exchanges their keys, and connects them: through the connection manager
    /// if `side` is given.
    ///
    /// # Errors
    /// A limit is exceeded; the peer says something else, goes or stays silent; its address cannot
    /// be reached.
    pub(super) fn connect(
        ctx: Context,
        plan: &mut PerftestPlan,
        talk: &mut Talk,
        side: Option<ManagedSide>,
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
        let parts = PerftestParts::new(ctx, plan, &terms)?;
        let connected = match side {
            Some(side) => parts.manage(side, plan, talk, &terms),
            None => parts.swap(plan, talk, &terms),
        };
        let ConnectedQps { qps, targets, own, theirs, peer, mtu } = connected?;
        terms.mtu = mtu;
        let watch = talk.wire().watch()?;
        let PerftestParts { ctx, cqs, channel, mr, .. } = parts;
        let gone = Cell::new(None);
        let bench =
            Self { ctx, cqs, channel, mr, qps, targets, own, theirs, terms, peer, watch, gone };
        bench.meet_connected(plan, talk)?;
        Ok(bench)
    }

    /// Both sides send all keys again, and meet once.
    fn meet_connected(&self, plan: &PerftestPlan, talk: &mut Talk) -> Result<(), Failure> {
        if plan.test.is_send() {
            talk.keys(&self.own[0])?;
        }
        self.own.iter().try_for_each(|own| talk.keys(own).map(drop))?;
        if !plan.test.is_send() {
            talk.keys(&self.own[0])?;
        }
        Ok(())
    }

    /// Bytes of each queue pair's send area, and of its receive area.
    fn area(&self) -> usize {
        self.mr.len() / 2 / self.qps.len()
    }

    /// The memory and addresses that a queue pair's messages use.
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

    /// All lanes.
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

    /// The sum of all words in the receive areas. They start at 0.
    #[must_use]
    pub fn landed_sum(&self) -> u64 {
        let half = self.mr.len() / 2;
        let words = (half..self.mr.len()).step_by(8);
        words.fold(0, |sum, at| sum.wrapping_add(self.mr.load_u64(at)))
    }

    /// The flow for messages of `size` bytes.
    #[must_use]
    pub fn flow(&self, plan: &PerftestPlan, size: usize) -> FlowPlan {
        let cycle = self.terms.cycle_buffer as usize;
        let taken = plan.head() + size;
        let stride = taken.max(1).next_multiple_of(self.terms.cache_line as usize);
        let sends = plan.client || plan.both;
        let receives = plan.test.is_send() && (!plan.client || plan.both);
        FlowPlan {
            op: plan.op().filter(|_| sends),
            receive: if receives { Receive::Until } else { Receive::No },
            size,
            // If a message was lost, its receive takes a message of a later size.
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

    /// To be called while a flow makes no progress. Ends a flow that may lose messages when the
    /// missing ones are overdue.
    ///
    /// # Errors
    /// As [`idle`](Self::idle).
    pub fn idle_flow(
        &self,
        plan: &PerftestPlan,
        so_far: &Flowed,
        idle: Duration,
    ) -> Result<Idle, Trouble> {
        let timed = matches!(plan.until, Until::Time(_));
        if plan.loses() && !timed && so_far.all_sent && so_far.received > 0 {
            let patience = if self.watch.has_message() { LOST_AFTER_WORDS } else { LOST };
            if idle >= patience {
                return Ok(Idle::End);
            }
        }
        self.idle(idle).map(|()| Idle::Wait)
    }

    /// To be called while nothing happens. Gives up when that takes too long, or some time after
    /// the peer ended its connection.
    ///
    /// # Errors
    /// The silence lasts too long, the peer is gone, or a queue pair is in the error state.
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
            // A test that waits for memory has not polled, so the reason is still in the completion
            // queue.
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

    /// The error for a request that ended in `status`.
    pub fn broken(&self, status: WcStatus) -> Trouble {
        Trouble::Measure(MeasureError::Completion(measure::cause(status, &self.cqs)))
    }

    /// Ends the connections that the connection manager made. The client asks for the end, and
    /// perftest's client waits until the server has answered.
    pub fn end(self, plan: &PerftestPlan) {
        let deadline = Instant::now() + FAREWELL;
        let managed = || self.qps.iter().filter_map(Joined::managed);
        // The peer may be gone: then disconnecting fails, which does not matter.
        if plan.client {
            managed().for_each(|connection| drop(connection.disconnect()));
        }
        for connection in managed() {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = connection.wait_disconnected(left);
        }
    }

    /// The error for the user. `unanswered` is of the messages of this measurement.
    pub fn failure(&self, talk: &Talk, trouble: &Trouble, unanswered: Unanswered) -> Failure {
        match trouble {
            Trouble::Peer(why) => talk.failed(why),
            Trouble::Measure(MeasureError::Completion(status)) => {
                let why = diagnosis::of_status(&self.ctx, self.peer, *status, unanswered);
                why.told(|text| talk.failed(text).to_string())
            }
            Trouble::Measure(MeasureError::Silence { patience, .. }) => {
                let why = diagnosis::of_silence(&self.ctx, self.peer, *patience, unanswered);
                why.told(|text| {
                    let text = format_args!("{text}; or was it given another test, -n or -s?");
                    talk.failed(text).to_string()
                })
            }
            Trouble::Measure(MeasureError::Verbs(error)) => talk.failed(error),
        }
    }
}
