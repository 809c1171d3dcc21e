//! Requests in flight in one direction or in both, over queue pairs that each have memory of their own.
//!
//! [`bulk`](super::bulk) measures one direction between two sides that share what they know; here each queue pair has its own target, both
//! directions may run at once, and nothing but counts or the time need say when it ends, as between programs that are not both ours.

use std::time::{Duration, Instant};

use rocinante::{
    CompChannel, Context, Cq, Destination, GRH_LEN, Key, Mr, PostError, PostListError, Qp, QpType,
    RecvWr, SendData, SendOp, SendWr, Sge, Wc, WcOpcode, WcStatus,
};

use super::{BulkOp, MeasureError, Until};

/// A queue pair and where its messages come from and go to.
#[derive(Debug, Clone, Copy)]
pub struct Lane<'a> {
    /// Connected.
    pub qp: &'a Qp,
    /// Offset in the local region from which it sends, and into which READs and atomics return.
    pub source: usize,
    /// Offset in the local region at which what it receives lands.
    pub landing: usize,
    /// The peer's address at which its requests aim.
    pub remote: u64,
    /// The key of the peer's region.
    pub rkey: Key,
    /// Where its datagrams go, if it is for those.
    pub to: Option<Destination>,
}

impl Lane<'_> {
    /// A request that aims at a byte of the peer's memory, or where the datagrams go; `mark` adds immediate data to a SEND.
    pub(crate) fn request(&self, op: BulkOp, offset: u64, mark: bool) -> SendOp {
        match (op.request(self.remote.wrapping_add(offset), self.rkey, mark), self.to) {
            (SendOp::Send { imm }, Some(to)) => SendOp::SendTo { to, imm },
            (op, _) => op,
        }
    }

    /// Bytes that come before a message in its receive.
    pub(crate) fn head(&self) -> usize {
        if self.qp.qp_type() == QpType::Ud { GRH_LEN } else { 0 }
    }
}

/// Lanes with what they share.
#[derive(Debug)]
pub struct Lanes<'a> {
    /// The device.
    pub ctx: &'a Context,
    /// The queues to which they complete: one, or one for each direction.
    pub cqs: &'a [Cq],
    /// What announces completions, if they are slept for.
    pub channel: Option<&'a CompChannel>,
    /// The local region.
    pub mr: &'a Mr,
    /// The queue pairs.
    pub lanes: Vec<Lane<'a>>,
}

/// What to do with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPlan {
    /// What is sent, if something is.
    pub op: Option<BulkOp>,
    /// Whether, and until when, messages are received.
    pub receive: Receive,
    /// Bytes of each message.
    pub size: usize,
    /// Bytes that each receive takes of messages: this size, or more where what is left of one flow may serve another.
    pub room: usize,
    /// Places that messages of a lane take in turn.
    pub slots: usize,
    /// Bytes from one place to the next.
    pub stride: usize,
    /// Requests outstanding per lane.
    pub depth: usize,
    /// Receives outstanding per lane.
    pub recv_depth: usize,
    /// Requests posted at once.
    pub list: usize,
    /// One of so many requests makes a completion.
    pub signal_every: usize,
    /// When to end. Messages count per lane and direction.
    pub until: Until,
    /// Whether the last message of a lane carries immediate data; if not, requests that are outstanding when the time is over are left.
    pub mark_last: bool,
    /// Whether sending begins only when something was received.
    pub second: bool,
}

/// Whether, and until when, messages are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receive {
    /// They are not.
    No,
    /// As [`FlowPlan::until`] says.
    Until,
    /// Until one with immediate data has come on each lane.
    Marked,
}

/// What happens while nothing completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// It will.
    Wait,
    /// The messages that did not come are lost: the flow ends with those that did.
    End,
}

/// How far a flow has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flowed {
    /// Messages sent and completed.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Whether nothing is left to send.
    pub all_sent: bool,
    /// Since the first was posted or received.
    pub elapsed: Duration,
}

/// One lane's account.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    posted: u64,
    completed: u64,
    recv_posted: u64,
    received: u64,
    marked: bool,
    /// How many to send.
    quota: u64,
}

/// A `wr_id` is the index of the lane and, in these low bits, how many requests it had posted.
const NUMBER_BITS: u32 = 48;

/// A flow that runs.
struct Run<'a, 'b> {
    lanes: &'b Lanes<'a>,
    plan: &'b FlowPlan,
    counts: Vec<Count>,
    start: Option<Instant>,
    flowed: Flowed,
}

impl Lanes<'_> {
    /// Posts the receives with which a flow begins. To be called before the peer sends. Those that a flow before it left, because messages were
    /// lost, serve this one: a queue that is full is full enough.
    ///
    /// # Errors
    /// A receive that cannot be posted.
    pub fn post_receives(&self, plan: &FlowPlan) -> Result<(), MeasureError> {
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
        let sges = [self.mr.sge(lane.landing + plan.offset(number), lane.head() + plan.room)];
        let wr_id = (index as u64) << NUMBER_BITS;
        lane.qp.post_recv(&[RecvWr { wr_id, sges: &sges }])
    }

    /// Runs a flow, after [`post_receives`](Self::post_receives). `observe` hears how far it is whenever something has completed; `idle` is asked,
    /// with the time since that happened, when nothing has, and may end it or give up.
    ///
    /// # Errors
    /// A failed request, or what `idle` says.
    pub fn flow<E: From<MeasureError>>(
        &self,
        plan: &FlowPlan,
        mut observe: impl FnMut(&Flowed),
        mut idle: impl FnMut(&Flowed, Duration) -> Result<Idle, E>,
    ) -> Result<Flowed, E> {
        let places = self.places(plan);
        let mut list = Vec::with_capacity(plan.list.max(1));
        let mut run = Run::new(self, plan);
        let mut out = [None; 32];
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
                if self.sleep(plan, || run.look(&mut out))? > 0 {
                    observe(&run.flowed);
                    (last, looks) = (Instant::now(), 0);
                }
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// The places from which each lane's messages are sent.
    fn places(&self, plan: &FlowPlan) -> Vec<Vec<[Sge; 1]>> {
        let place =
            |lane: &Lane<'_>, number| [self.mr.sge(lane.source + plan.offset(number), plan.size)];
        let of = |lane| (0..plan.slots.max(1) as u64).map(|number| place(lane, number)).collect();
        self.lanes.iter().map(of).collect()
    }

    /// Lets others have the core, or sleeps until something completes. What `look` found meanwhile.
    fn sleep(
        &self,
        plan: &FlowPlan,
        look: impl FnOnce() -> Result<usize, MeasureError>,
    ) -> Result<usize, MeasureError> {
        // At most until the peer is looked after.
        const NAP: Duration = Duration::from_millis(50);
        let Some(channel) = self.channel.filter(|_| matches!(plan.until, Until::Messages(_)))
        else {
            std::thread::yield_now();
            return Ok(0);
        };
        let look = || Ok(Some(look()?).filter(|count| *count > 0));
        Ok(super::sleep(channel, self.cqs, NAP, look)?.unwrap_or(0))
    }
}

impl FlowPlan {
    /// Where the message with this number lies in a lane's memory.
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
        let quota = if plan.op.is_some() { plan.messages() } else { 0 };
        let count = Count { quota, recv_posted: plan.first_receives(), ..Count::default() };
        Self {
            lanes,
            plan,
            counts: vec![count; lanes.lanes.len()],
            start: (!plan.second && plan.op.is_some()).then(Instant::now),
            flowed: Flowed::default(),
        }
    }

    fn post<'p>(
        &mut self,
        places: &'p [Vec<[Sge; 1]>],
        list: &mut Vec<SendWr<'p>>,
    ) -> Result<(), MeasureError> {
        if self.start.is_none() || self.plan.op.is_none() {
            return Ok(());
        }
        for (index, places) in places.iter().enumerate() {
            while self.fill(index, places, list) {
                self.lanes.lanes[index].qp.post_send(list)?;
            }
        }
        Ok(())
    }

    /// Fills a list for one lane, if there is room for it.
    fn fill<'p>(
        &mut self,
        index: usize,
        places: &'p [[Sge; 1]],
        list: &mut Vec<SendWr<'p>>,
    ) -> bool {
        let (plan, count, lane) = (self.plan, &mut self.counts[index], &self.lanes.lanes[index]);
        let Some(op) = plan.op else { return false };
        let wanted = (plan.list.clamp(1, plan.depth) as u64).min(count.quota - count.posted);
        let outstanding = count.posted - count.completed;
        if wanted == 0 || outstanding + wanted > plan.depth as u64 {
            return false;
        }
        list.clear();
        for _ in 0..wanted {
            let offset = plan.offset(count.posted) as u64;
            let sges = &places[(count.posted % places.len() as u64) as usize];
            count.posted += 1;
            let last = count.posted == count.quota;
            list.push(SendWr {
                wr_id: (index as u64) << NUMBER_BITS | count.posted,
                op: lane.request(op, offset, last && plan.mark_last),
                data: SendData::Sges(sges),
                signaled: last || count.posted.is_multiple_of(plan.signal_every.max(1) as u64),
                solicited: false,
                fence: false,
            });
        }
        true
    }

    /// Takes completions: how many.
    fn look(&mut self, out: &mut [Option<Wc>; 32]) -> Result<usize, MeasureError> {
        let mut found = 0;
        for cq in self.lanes.cqs {
            let count = cq.poll(out).map_err(MeasureError::from)?;
            found += count;
            for wc in out.iter_mut().take(count).filter_map(Option::take) {
                if wc.status != WcStatus::Success {
                    let status = super::cause(wc.status, self.lanes.cqs);
                    return Err(MeasureError::Completion(status));
                }
                self.complete(&wc)?;
            }
        }
        if let Some(start) = self.start.filter(|_| found > 0 || self.time().is_some()) {
            self.flowed.elapsed = start.elapsed();
        }
        Ok(found)
    }

    fn complete(&mut self, wc: &Wc) -> Result<(), MeasureError> {
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
            // One more, which says that it is the last.
            let ends = |count: &mut Count| count.quota = count.quota.min(count.posted + 1);
            self.counts.iter_mut().filter(|_| self.plan.op.is_some()).for_each(ends);
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
