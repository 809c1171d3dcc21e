//! Requests in flight in one direction or in both, over queue pairs that each have memory of their own.
//!
//! [`bulk`](super::bulk) measures one direction between two sides that share what they know; here each queue pair has its own target, both
//! directions may run at once, and nothing but counts or the time need say when it ends, as between programs that are not both ours.

use std::time::{Duration, Instant};

use rocinante::{
    CompChannel, Context, Cq, Destination, GRH_LEN, Key, Mr, Qp, QpType, RecvWr, SendData, SendOp,
    SendWr, Sge, Wc, WcOpcode,
};

use super::{BulkOp, MeasureError, Until, succeeded};

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

/// How far a flow has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flowed {
    /// Messages sent and completed.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
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
    /// Posts the receives with which a flow begins. To be called before the peer sends.
    ///
    /// # Errors
    /// A receive that cannot be posted.
    pub fn post_receives(&self, plan: &FlowPlan) -> Result<(), MeasureError> {
        for index in 0..self.lanes.len() {
            (0..plan.first_receives()).try_for_each(|number| self.receive(plan, index, number))?;
        }
        Ok(())
    }

    fn receive(&self, plan: &FlowPlan, index: usize, number: u64) -> Result<(), MeasureError> {
        let lane = &self.lanes[index];
        let sges = [self.mr.sge(lane.landing + plan.offset(number), lane.head() + plan.size)];
        let wr_id = (index as u64) << NUMBER_BITS;
        Ok(lane.qp.post_recv(&[RecvWr { wr_id, sges: &sges }])?)
    }

    /// Runs a flow, after [`post_receives`](Self::post_receives). `observe` hears how far it is whenever something has completed; `idle` is called,
    /// with the time since that happened, when nothing has, and may give up.
    ///
    /// # Errors
    /// A failed request, or what `idle` says.
    pub fn flow<E: From<MeasureError>>(
        &self,
        plan: &FlowPlan,
        mut observe: impl FnMut(&Flowed),
        mut idle: impl FnMut(Duration) -> Result<(), E>,
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
                idle(last.elapsed())?;
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
                self.complete(&succeeded(wc)?)?;
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
        self.counts.iter().all(|count| {
            let sent = count.posted == count.quota && count.completed == count.quota;
            let received = match self.plan.receive {
                Receive::No => true,
                Receive::Until => count.received >= self.plan.messages(),
                Receive::Marked => count.marked,
            };
            sent && received
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::pair::{Owner, connected};
    use super::*;

    fn plan(op: Option<BulkOp>, receive: Receive, until: Until) -> FlowPlan {
        FlowPlan {
            op,
            receive,
            size: 300,
            slots: 12,
            stride: 320,
            depth: 16,
            recv_depth: 24,
            list: 1,
            signal_every: 4,
            until,
            mark_last: false,
            second: false,
        }
    }

    fn lanes<'a>(here: &'a Owner, there: &Owner) -> Lanes<'a> {
        let remote = there.region();
        let lane = Lane {
            qp: &here.qp,
            source: 0,
            landing: here.mr.len() / 2,
            remote: remote.address + remote.len / 2,
            rkey: remote.key(),
            to: None,
        };
        let (ctx, cqs) = (here.ctx(), std::slice::from_ref(&here.cq));
        Lanes { ctx, cqs, channel: None, mr: &here.mr, lanes: vec![lane] }
    }

    fn patient(idle: Duration) -> Result<(), MeasureError> {
        let patience = Duration::from_secs(10);
        if idle < patience {
            Ok(())
        } else {
            Err(MeasureError::Silence { what: "anything", patience })
        }
    }

    /// Both sides, each on a thread, with receives posted on both before either begins.
    fn both(a: &FlowPlan, b: &FlowPlan) -> (Flowed, Flowed) {
        let [first, second] = connected();
        let (ours, theirs) = (lanes(&first, &second), lanes(&second, &first));
        ours.post_receives(a).unwrap();
        theirs.post_receives(b).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| theirs.flow(b, |_| (), patient).unwrap());
            (ours.flow(a, |_| (), patient).unwrap(), other.join().unwrap())
        })
    }

    #[test]
    fn sends_cross_each_other() {
        let first = plan(Some(BulkOp::Send), Receive::Until, Until::Messages(1001));
        let second = FlowPlan { second: true, list: 5, ..first };
        let (a, b) = both(&first, &second);
        assert_eq!((a.sent, a.received), (1001, 1001));
        assert_eq!((b.sent, b.received), (1001, 1001));
    }

    #[test]
    fn time_ends_a_flow_by_a_mark_or_at_once() {
        let until = Until::Time(Duration::from_millis(80));
        let marked =
            FlowPlan { mark_last: true, ..plan(Some(BulkOp::Send), Receive::Marked, until) };
        let (a, b) = both(&marked, &marked);
        assert_eq!((a.sent, b.sent), (b.received, a.received));
        let once = plan(Some(BulkOp::Send), Receive::No, until);
        let (a, b) = both(&once, &plan(None, Receive::Until, until));
        assert!(a.elapsed >= Duration::from_millis(80) && a.sent > 0 && b.received > 0);
        assert!(b.elapsed >= Duration::from_millis(80) && b.sent == 0);
    }

    #[test]
    fn atomics_reach_their_places() {
        let [a, b] = connected();
        let ours = lanes(&a, &b);
        let until = Until::Messages(100);
        let what = FlowPlan {
            size: 8,
            slots: 7,
            stride: 64,
            ..plan(Some(BulkOp::FetchAdd), Receive::No, until)
        };
        let flowed = ours.flow(&what, |_| (), patient).unwrap();
        assert_eq!(flowed.sent, 100);
        let half = b.mr.len() / 2;
        let counts: Vec<u64> = (0..8).map(|slot| b.mr.load_u64(half + slot * 64)).collect();
        assert_eq!(counts, [15, 15, 14, 14, 14, 14, 14, 0]);
    }

    #[test]
    fn reads_and_writes_flow_with_nobody_at_the_other_end() {
        let [a, b] = connected();
        let ours = lanes(&a, &b);
        for op in [BulkOp::Read, BulkOp::Write, BulkOp::CompareSwap] {
            let size = if op == BulkOp::CompareSwap { 8 } else { 300 };
            let what = FlowPlan { size, ..plan(Some(op), Receive::No, Until::Messages(77)) };
            let mut seen = 0;
            let flowed = ours.flow(&what, |so_far| seen = so_far.sent, patient).unwrap();
            assert_eq!((flowed.sent, seen), (77, 77));
        }
    }

    #[test]
    fn whoever_waits_may_give_up() {
        let [a, b] = connected();
        let ours = lanes(&a, &b);
        let what = plan(None, Receive::Until, Until::Messages(1));
        let error = ours.flow(
            &what,
            |_| (),
            |idle| {
                let patience = Duration::from_millis(50);
                if idle < patience {
                    Ok(())
                } else {
                    Err(MeasureError::Silence { what: "message", patience })
                }
            },
        );
        assert!(matches!(error, Err(MeasureError::Silence { .. })));
    }
}
