//! SENDs in flight in one direction or in both, which may be lost.
//!
//! [`bulk`](super::bulk) measures one direction, in which nothing is lost. A flow may run in both
//! directions at once, and ends by counts, by the time, or by a mark in the last message.

use std::time::{Duration, Instant};

use rocinante::verbs::{
    Destination, GRH_LEN, PostError, PostListError, QpType, SendData, SendOp, Sge, WcOpcode,
};
use rocinante::{CompChannel, Context, Cq, Mr, Qp, RecvWr, SendWr, Wc, WcStatus};

use super::{MeasureError, Result, Until};

/// A queue pair and the memory of its messages.
#[derive(Debug, Clone, Copy)]
pub struct Lane<'a> {
    /// The queue pair, connected.
    pub qp: &'a Qp,
    /// Offset in the local region: the target of received messages. Messages to send are at its
    /// beginning.
    pub landing: usize,
    /// The destination of its datagrams, if it sends any.
    pub to: Option<Destination>,
}

impl Lane<'_> {
    /// A message. `mark` adds immediate data.
    fn request(&self, mark: bool) -> SendOp {
        let imm = mark.then_some([0; 4]);
        match self.to {
            Some(to) => SendOp::SendTo { to, imm },
            None => SendOp::Send { imm },
        }
    }

    /// Bytes before a message in its receive.
    pub(crate) fn head(&self) -> usize {
        if self.qp.qp_type() == QpType::Ud { GRH_LEN } else { 0 }
    }
}

/// Lanes and the objects that they share.
#[derive(Debug)]
pub struct Lanes<'a> {
    /// The device.
    pub ctx: &'a Context,
    /// Their completion queue.
    pub cq: &'a Cq,
    /// The channel of completion events, if this side sleeps for them.
    pub channel: Option<&'a CompChannel>,
    /// The local region.
    pub mr: &'a Mr,
    /// The queue pairs.
    pub lanes: Vec<Lane<'a>>,
}

/// The parameters of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPlan {
    /// Whether this side sends.
    pub sends: bool,
    /// Whether, and until when, messages are received.
    pub receive: Receive,
    /// Bytes of each message.
    pub size: usize,
    /// Number of places that the messages of a lane cycle through.
    pub slots: usize,
    /// Bytes from one place to the next.
    pub stride: usize,
    /// Requests outstanding per lane.
    pub depth: usize,
    /// Receives outstanding per lane.
    pub recv_depth: usize,
    /// Requests posted at once.
    pub list: usize,
    /// One request in this many is signaled.
    pub signal_every: usize,
    /// The end of the flow. Messages count per lane and direction.
    pub until: Until,
    /// Whether the last message of a lane has immediate data. If not, the flow ends without waiting
    /// for requests that are outstanding when the time is over.
    pub mark_last: bool,
}

/// Whether, and until when, messages are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receive {
    /// This side receives none.
    No,
    /// Until [`FlowPlan::until`].
    Until,
    /// Until each lane has received a message with immediate data.
    Marked,
}

/// What to do while nothing completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Keep waiting.
    Wait,
    /// End the flow without the missing messages, which are lost.
    End,
}

/// The progress of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flowed {
    /// Messages sent and completed.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Whether all messages are sent.
    pub all_sent: bool,
    /// Time since the first message was posted or received.
    pub elapsed: Duration,
}

/// The counts of one lane.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    posted: u64,
    completed: u64,
    recv_posted: u64,
    received: u64,
    marked: bool,
    /// Number of messages to send.
    quota: u64,
}

/// A `wr_id` has the index of the lane in its high bits. These low bits have the number of requests
/// that the lane had posted.
const NUMBER_BITS: u32 = 48;

/// A running flow.
struct Run<'a, 'b> {
    lanes: &'b Lanes<'a>,
    plan: &'b FlowPlan,
    counts: Vec<Count>,
    start: Option<Instant>,
    flowed: Flowed,
}

impl Lanes<'_> {
    /// Posts the first receives of a flow. Call it before the peer sends. If messages of an earlier
    /// flow were lost, their receives are left and serve this flow. So a full receive queue is no
    /// error. Error: a receive cannot be posted.
    pub fn post_receives(&self, plan: &FlowPlan) -> Result {
        for index in 0..self.lanes.len() {
            for number in 0..plan.first_receives() {
                match self.receive(plan, index, number) {
                    Err(full) if full.error == PostError::Full => break,
                    posted => posted?,
                }
            }
        }
        Ok(())
    }

    fn receive(&self, plan: &FlowPlan, index: usize, number: u64) -> Result<(), PostListError> {
        let lane = &self.lanes[index];
        let sges = [self.mr.sge(lane.landing + plan.offset(number), lane.head() + plan.size)];
        let wr_id = (index as u64) << NUMBER_BITS;
        lane.qp.post_recv(&[RecvWr { wr_id, sges: &sges }])
    }

    /// Runs a flow, after [`post_receives`](Self::post_receives). Calls `observe` with the progress
    /// after each completion. Calls `idle` while nothing completes, with the time since the last
    /// completion; it may end the flow or give up. Error: a request fails, or `idle` returns an
    /// error.
    pub fn flow<E: From<MeasureError>>(
        &self,
        plan: &FlowPlan,
        mut observe: impl FnMut(&Flowed),
        mut idle: impl FnMut(&Flowed, Duration) -> Result<Idle, E>,
    ) -> Result<Flowed, E> {
        let places = self.places(plan);
        let mut list = Vec::with_capacity(plan.list.max(1));
        let mut run = Run::new(self, plan);
        let mut out = [Wc::default(); 32];
        let mut last = Instant::now();
        let mut looks = 0u32;
        loop {
            run.post(&places, &mut list)?;
            let count = run.look(&mut out)?;
            if count > 0 {
                observe(&run.flowed);
            }
            if run.is_over() {
                return Ok(run.flowed);
            }
            looks += 1;
            if count > 0 {
                (last, looks) = (Instant::now(), 0);
            } else if looks.is_multiple_of(64) {
                if idle(&run.flowed, last.elapsed())? == Idle::End {
                    return Ok(run.flowed);
                }
                if self.sleep(|| run.look(&mut out))? > 0 {
                    observe(&run.flowed);
                    (last, looks) = (Instant::now(), 0);
                }
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// The places from which messages are sent.
    fn places(&self, plan: &FlowPlan) -> Vec<[Sge; 1]> {
        let place = |number| [self.mr.sge(plan.offset(number), plan.size)];
        (0..plan.slots.max(1) as u64).map(place).collect()
    }

    /// Yields the core, or sleeps until something completes. Returns the number of completions that
    /// `look` found.
    fn sleep(&self, look: impl FnOnce() -> Result<usize>) -> Result<usize> {
        // Longest sleep before the next look at the peer.
        const NAP: Duration = Duration::from_millis(50);
        let Some(channel) = self.channel else {
            std::thread::yield_now();
            return Ok(0);
        };
        let look = || Ok(Some(look()?).filter(|count| *count > 0));
        Ok(super::sleep(channel, self.cq, NAP, look)?.unwrap_or(0))
    }
}

impl FlowPlan {
    /// Offset of the message with this number in a lane's memory.
    fn offset(&self, number: u64) -> usize {
        (number % self.slots.max(1) as u64) as usize * self.stride
    }

    fn first_receives(&self) -> u64 {
        let depth = self.recv_depth as u64;
        match (self.receive, self.until) {
            (Receive::No, _) => 0,
            (Receive::Until, Until::Messages(all)) => depth.min(all),
            (Receive::Until | Receive::Marked, _) => depth,
        }
    }

    fn messages(&self) -> u64 {
        match self.until {
            Until::Messages(all) => all,
            Until::Time(_) => u64::MAX,
        }
    }
}

impl<'a, 'b> Run<'a, 'b> {
    fn new(lanes: &'b Lanes<'a>, plan: &'b FlowPlan) -> Self {
        let quota = if plan.sends { plan.messages() } else { 0 };
        let count = Count { quota, recv_posted: plan.first_receives(), ..Count::default() };
        Self {
            lanes,
            plan,
            counts: vec![count; lanes.lanes.len()],
            start: plan.sends.then(Instant::now),
            flowed: Flowed::default(),
        }
    }

    fn post<'p>(&mut self, places: &'p [[Sge; 1]], list: &mut Vec<SendWr<'p>>) -> Result {
        if !self.plan.sends {
            return Ok(());
        }
        for index in 0..self.counts.len() {
            while self.fill(index, places, list) {
                self.lanes.lanes[index].qp.post_send(list)?;
            }
        }
        Ok(())
    }

    /// Fills a list for one lane. Returns `false` if the lane has no room for it.
    fn fill<'p>(
        &mut self,
        index: usize,
        places: &'p [[Sge; 1]],
        list: &mut Vec<SendWr<'p>>,
    ) -> bool {
        let (plan, count, lane) = (self.plan, &mut self.counts[index], &self.lanes.lanes[index]);
        let wanted = (plan.list.clamp(1, plan.depth) as u64).min(count.quota - count.posted);
        let outstanding = count.posted - count.completed;
        if wanted == 0 || outstanding + wanted > plan.depth as u64 {
            return false;
        }
        list.clear();
        for _ in 0..wanted {
            let sges = &places[(count.posted % places.len() as u64) as usize];
            count.posted += 1;
            let last = count.posted == count.quota;
            list.push(
                SendWr::new(lane.request(last && plan.mark_last), SendData::Sges(sges))
                    .wr_id((index as u64) << NUMBER_BITS | count.posted)
                    .signaled(last || count.posted.is_multiple_of(plan.signal_every.max(1) as u64)),
            );
        }
        true
    }

    /// Takes completions, and returns their number.
    fn look(&mut self, out: &mut [Wc; 32]) -> Result<usize> {
        let completed = self.lanes.cq.poll(out).map_err(MeasureError::from)?;
        let found = completed.len();
        for wc in completed {
            if wc.status != WcStatus::Success {
                let status = super::cause(wc.status, self.lanes.cq);
                return Err(MeasureError::Completion(status));
            }
            self.complete(wc)?;
        }
        if let Some(start) = self.start.filter(|_| found > 0 || self.time().is_some()) {
            self.flowed.elapsed = start.elapsed();
        }
        Ok(found)
    }

    fn complete(&mut self, wc: &Wc) -> Result {
        let index = (wc.wr_id >> NUMBER_BITS) as usize;
        let count = &mut self.counts[index];
        if wc.opcode != WcOpcode::Recv {
            let number = wc.wr_id & ((1 << NUMBER_BITS) - 1);
            self.flowed.sent += number - count.completed;
            count.completed = number;
            return Ok(());
        }
        self.start.get_or_insert_with(Instant::now);
        self.flowed.received += 1;
        count.received += 1;
        count.marked |= wc.imm.is_some();
        let marked_end = self.plan.receive == Receive::Marked;
        if marked_end || count.recv_posted < self.plan.messages() {
            let number = count.recv_posted;
            count.recv_posted += 1;
            self.lanes.receive(self.plan, index, number)?;
        }
        Ok(())
    }

    fn time(&self) -> Option<Duration> {
        match self.plan.until {
            Until::Time(time) => Some(time),
            Until::Messages(_) => None,
        }
    }

    fn is_over(&mut self) -> bool {
        if self.time().is_some_and(|time| self.start.is_some() && self.flowed.elapsed >= time) {
            if !self.plan.mark_last {
                return true;
            }
            // Sends one more message, marked as the last.
            let ends = |count: &mut Count| count.quota = count.quota.min(count.posted + 1);
            self.counts.iter_mut().filter(|_| self.plan.sends).for_each(ends);
        }
        let sent = |count: &Count| count.posted == count.quota && count.completed == count.quota;
        self.flowed.all_sent = self.counts.iter().all(sent);
        let received = |count: &Count| match self.plan.receive {
            Receive::No => true,
            Receive::Until => count.received >= self.plan.messages(),
            Receive::Marked => count.marked,
        };
        self.flowed.all_sent && self.counts.iter().all(received)
    }
}

#[cfg(test)]
mod tests;
