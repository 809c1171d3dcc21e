//! Many requests in flight: rate and bandwidth.

use std::time::{Duration, Instant};

use rocinante::verbs::{Key, SendData, SendOp, Sge};
use rocinante::{RecvWr, SendWr, Wc};

use super::{End, Result, Until, succeeded};

/// The operation of a bulk transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BulkOp {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// SEND; the peer receives by [`receive_bulk`].
    Send,
    /// Fetch and add 1.
    FetchAdd,
    /// Compare with 0 and swap with 0.
    CompareSwap,
}

impl BulkOp {
    /// The request. `mark` adds immediate data to a SEND.
    pub(crate) const fn request(self, remote: u64, rkey: Key, mark: bool) -> SendOp {
        match self {
            Self::Write => SendOp::Write { remote, rkey, imm: None },
            Self::Read => SendOp::Read { remote, rkey },
            Self::Send => SendOp::Send { imm: if mark { Some([0; 4]) } else { None } },
            Self::FetchAdd => SendOp::FetchAdd { remote, rkey, add: 1 },
            Self::CompareSwap => SendOp::CompareSwap { remote, rkey, compare: 0, swap: 0 },
        }
    }
}

/// The parameters of [`bulk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bulk {
    /// The operation.
    pub op: BulkOp,
    /// Bytes of each message, at most half a region.
    pub size: usize,
    /// Requests outstanding per queue pair; at most its send queue's depth.
    pub depth: usize,
    /// Requests posted at once.
    pub list: usize,
    /// One request in this many is signaled; at most the depth.
    pub signal_every: usize,
    /// Whether messages of WRITEs and SENDs go inline.
    pub inline: bool,
    /// When to stop posting. Messages count over all queue pairs.
    pub until: Until,
}

impl Bulk {
    /// Large messages: each posted and completed by itself.
    #[must_use]
    pub const fn large(op: BulkOp, size: usize, depth: usize, until: Until) -> Self {
        Self { op, size, depth, list: 1, signal_every: 1, inline: false, until }
    }

    /// Small messages at the highest rate: lists of 32, 512 outstanding, one completion per 32.
    #[must_use]
    pub const fn small(op: BulkOp, size: usize, until: Until) -> Self {
        Self { op, size, depth: 512, list: 32, signal_every: 32, inline: false, until }
    }
}

/// The result of [`bulk`] and [`receive_bulk`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BulkResult {
    /// Messages completed.
    pub messages: u64,
    /// Their payload.
    pub bytes: u64,
    /// From the call to the last completion.
    pub elapsed: Duration,
}

impl BulkResult {
    /// 10⁶ messages per second.
    #[must_use]
    pub fn mops(&self) -> f64 {
        self.messages as f64 / self.elapsed.as_secs_f64() / 1e6
    }

    /// 10⁹ payload bits per second.
    #[must_use]
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elapsed.as_secs_f64() / 1e9
    }
}

/// Keeps requests outstanding on every queue pair of `ends` until `what.until`, then waits for the
/// rest. All `ends` share the device, the completion queue, the region and the peer's region. Calls
/// `observe` with the result so far after each completion. Error: a request fails, or there is no
/// progress.
pub fn bulk(ends: &[End<'_>], what: &Bulk, observe: impl FnMut(&BulkResult)) -> Result<BulkResult> {
    Ok(bulk_with_shares(ends, what, observe)?.0)
}

/// As [`bulk`]. Returns also the number of messages of each queue pair that had completed when the
/// time was over. Error: a request fails, or there is no progress.
pub fn bulk_with_shares(
    ends: &[End<'_>],
    what: &Bulk,
    mut observe: impl FnMut(&BulkResult),
) -> Result<(BulkResult, Vec<u64>)> {
    let Some(first) = ends.first() else { return Ok((BulkResult::default(), Vec::new())) };
    let places = Places::new(first, what);
    let mut streams = Stream::all(ends, what);
    let mut list = Vec::with_capacity(what.list.max(1));
    let mut result = BulkResult::default();
    let mut shares = None;
    let mut out = [Wc::default(); 32];
    let start = Instant::now();
    loop {
        // Posts in turns until all queues are full, and only then polls, as perftest does.
        let mut room = true;
        while std::mem::take(&mut room) {
            for stream in &mut streams {
                stream.post(what, &places, &mut list)?;
                room |= stream.room(what) > 0;
            }
        }
        let count = first.spin("completion", || {
            let count = first.cq.poll(&mut out)?.len();
            Ok((count > 0).then_some(count))
        })?;
        for wc in &out[..count] {
            let wc = succeeded(*wc)?;
            let stream = &mut streams[(wc.wr_id >> NUMBER_BITS) as usize];
            result.messages += stream.complete(&wc);
        }
        result.elapsed = start.elapsed();
        if count > 0 {
            result.bytes = result.messages * what.size as u64;
            observe(&result);
        }
        if streams.iter().all(Stream::is_done) {
            return Ok((result, shares.unwrap_or_else(|| completed(&streams))));
        }
        if matches!(what.until, Until::Time(time) if result.elapsed >= time) {
            shares.get_or_insert_with(|| completed(&streams));
            // The next request of each is its last one.
            streams.iter_mut().for_each(|it| it.quota = it.quota.min(it.posted + 1));
        }
    }
}

fn completed(streams: &[Stream<'_>]) -> Vec<u64> {
    streams.iter().map(|stream| stream.completed).collect()
}

/// A `wr_id` has the index of the queue pair in its high bits. These low bits have the number of
/// requests that the queue pair had posted.
const NUMBER_BITS: u32 = 48;

/// The requests of one queue pair.
#[derive(Debug)]
struct Stream<'a> {
    end: &'a End<'a>,
    index: u64,
    posted: u64,
    completed: u64,
    /// Number of requests to post in all. The last one is signaled, and has immediate data if it is
    /// a SEND.
    quota: u64,
}

impl<'a> Stream<'a> {
    fn all(ends: &'a [End<'a>], what: &Bulk) -> Vec<Self> {
        let count = ends.len() as u64;
        let quota = |index| match what.until {
            Until::Messages(all) => (all / count + u64::from(index < all % count)).max(1),
            Until::Time(_) => u64::MAX,
        };
        let streams = (0..).zip(ends);
        streams
            .map(|(index, end)| Self { end, index, posted: 0, completed: 0, quota: quota(index) })
            .collect()
    }

    fn outstanding(&self) -> u64 {
        self.posted - self.completed
    }

    /// Number of requests to post now: a full list, or the rest if it is shorter; 0 if they do not
    /// fit.
    fn room(&self, what: &Bulk) -> u64 {
        let list = (what.list.clamp(1, what.depth) as u64).min(self.quota - self.posted);
        if what.depth as u64 - self.outstanding() >= list { list } else { 0 }
    }

    fn is_done(&self) -> bool {
        self.posted == self.quota && self.outstanding() == 0
    }

    fn post<'p>(&mut self, what: &Bulk, places: &'p Places, list: &mut Vec<SendWr<'p>>) -> Result {
        list.clear();
        for _ in 0..self.room(what) {
            self.posted += 1;
            let last = self.posted == self.quota;
            let signaled = last || self.posted.is_multiple_of(what.signal_every as u64);
            list.push(places.request(self.index, self.posted, signaled, last));
        }
        if list.is_empty() { Ok(()) } else { Ok(self.end.qp.post_send(list)?) }
    }

    fn complete(&mut self, wc: &Wc) -> u64 {
        let number = wc.wr_id & ((1 << NUMBER_BITS) - 1);
        let new = number - self.completed;
        self.completed = number;
        new
    }
}

/// The local and remote memory of the messages.
struct Places {
    op: BulkOp,
    local: Vec<[Sge; 1]>,
    /// The bytes of a message that goes inline.
    inline: Option<Vec<u8>>,
    remote: u64,
    rkey: Key,
    size: u64,
}

impl Places {
    /// Gives messages in flight different memory, as far as the region is large enough.
    fn new(end: &End<'_>, what: &Bulk) -> Self {
        let half = end.mr.len().min(end.remote.len as usize) / 2;
        let slots = (half / what.size.max(1)).clamp(1, what.depth.max(1));
        let (local, remote) = match what.op {
            BulkOp::Read | BulkOp::FetchAdd | BulkOp::CompareSwap => {
                (end.landing(), end.remote.address)
            }
            BulkOp::Write | BulkOp::Send => (0, end.remote_landing()),
        };
        let goes_inline = what.inline && matches!(what.op, BulkOp::Write | BulkOp::Send);
        Self {
            op: what.op,
            inline: goes_inline.then(|| end.mr.to_vec(0, what.size)),
            local: (0..slots).map(|i| [end.mr.sge(local + i * what.size, what.size)]).collect(),
            remote,
            rkey: end.remote.rkey,
            size: what.size as u64,
        }
    }

    fn request(&self, index: u64, number: u64, signaled: bool, last: bool) -> SendWr<'_> {
        let slot = number % self.local.len() as u64;
        let (remote, rkey) = (self.remote + slot * self.size, self.rkey);
        let op = self.op.request(remote, rkey, last);
        let data = match &self.inline {
            Some(bytes) => SendData::Inline(bytes),
            None => SendData::Sges(&self.local[slot as usize]),
        };
        SendWr::new(op, data).wr_id(index << NUMBER_BITS | number).signaled(signaled)
    }
}

/// Posts `depth` receives of `size` bytes on every queue pair of `ends`, for [`receive_bulk`]. Call
/// it before the peer begins. Error: a receive cannot be posted.
pub fn post_receives(ends: &[End<'_>], size: usize, depth: usize) -> Result {
    for (index, end) in ends.iter().enumerate() {
        for slot in 0..depth {
            receive(end, index, slot as u64, size)?;
        }
    }
    Ok(())
}

fn receive(end: &End<'_>, index: usize, slot: u64, size: usize) -> Result {
    let slots = (end.mr.len() / 2 / size.max(1)).max(1);
    let offset = end.landing() + slot as usize % slots * size;
    let sge = [end.mr.sge(offset, size)];
    Ok(end.qp.post_recv(&[RecvWr { wr_id: (index as u64) << NUMBER_BITS | slot, sges: &sge }])?)
}

/// Receives the messages that [`bulk`] sends with [`BulkOp::Send`], until the last one of every
/// queue pair of `ends`. Call it when the peer begins: the time runs from the call on, because a
/// first poll may find many messages at once, and all of them took time. Error: a request fails, or
/// there is no progress.
pub fn receive_bulk(
    ends: &[End<'_>],
    size: usize,
    mut observe: impl FnMut(&BulkResult),
) -> Result<BulkResult> {
    let Some(first) = ends.first() else { return Ok(BulkResult::default()) };
    let mut result = BulkResult::default();
    let mut open = ends.len();
    let mut out = [Wc::default(); 32];
    let start = Instant::now();
    while open > 0 {
        let count = first.spin("message", || {
            Ok(Some(first.cq.poll(&mut out)?.len()).filter(|count| *count > 0))
        })?;
        for wc in &out[..count] {
            let wc = succeeded(*wc)?;
            result.messages += 1;
            result.bytes += u64::from(wc.byte_len);
            open -= usize::from(wc.imm.is_some());
            let (index, slot) = (wc.wr_id >> NUMBER_BITS, wc.wr_id & ((1 << NUMBER_BITS) - 1));
            receive(&ends[index as usize], index as usize, slot, size)?;
        }
        result.elapsed = start.elapsed();
        observe(&result);
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::super::pair::{both, connected};
    use super::*;

    #[test]
    fn all_messages_complete_whatever_the_lists() {
        let [a, b] = connected();
        let end = [a.end(b.region())];
        for (size, depth, list, signal_every, messages) in
            [(64, 64, 32, 16, 1000), (64, 7, 3, 2, 50), (0, 16, 16, 5, 17), (4000, 4, 8, 4, 33)]
        {
            let until = Until::Messages(messages);
            let inline = size == 64 && list == 3;
            let what = Bulk { op: BulkOp::Write, size, depth, list, signal_every, inline, until };
            let mut last = 0;
            let result = bulk(&end, &what, |so_far| last = so_far.messages).unwrap();
            assert_eq!((result.messages, last), (messages, messages), "{what:?}");
            assert_eq!(result.bytes, result.messages * size as u64);
        }
    }

    #[test]
    fn reads_and_time() {
        let [a, b] = connected();
        let until = Until::Time(Duration::from_millis(50));
        let what = Bulk::large(BulkOp::Read, 10_000, 8, until);
        let result = bulk(&[a.end(b.region())], &what, |_| ()).unwrap();
        assert!(result.messages > 1 && result.elapsed >= Duration::from_millis(50), "{result:?}");
        assert!(result.gbps() > 0.0 && result.mops() > 0.0);
    }

    #[test]
    fn sends_are_received() {
        let (sent, received) = both(
            |end, exchange| {
                exchange.barrier("posted").unwrap();
                let what = Bulk::large(BulkOp::Send, 3000, 16, Until::Messages(200));
                bulk(std::slice::from_ref(end), &what, |_| ()).unwrap()
            },
            |end, exchange| {
                let ends = std::slice::from_ref(end);
                post_receives(ends, 3000, 32).unwrap();
                exchange.barrier("posted").unwrap();
                receive_bulk(ends, 3000, |_| ()).unwrap()
            },
        );
        assert_eq!((sent.messages, sent.bytes), (received.messages, received.bytes));
    }

    /// The first poll finds all messages. They did not arrive in no time.
    #[test]
    fn the_time_of_the_first_messages_counts() {
        const PAUSE: Duration = Duration::from_secs(2);
        let begins = std::sync::Barrier::new(2);
        let (_, received) = both(
            |end, exchange| {
                exchange.barrier("posted").unwrap();
                begins.wait();
                std::thread::sleep(PAUSE);
                let what = Bulk::small(BulkOp::Send, 64, Until::Messages(16));
                bulk(std::slice::from_ref(end), &what, |_| ()).unwrap()
            },
            |end, exchange| {
                let ends = std::slice::from_ref(end);
                post_receives(ends, 64, 32).unwrap();
                exchange.barrier("posted").unwrap();
                begins.wait();
                receive_bulk(ends, 64, |_| ()).unwrap()
            },
        );
        // Half: this thread may have come late.
        assert!(received.messages == 16 && received.elapsed > PAUSE / 2, "{received:?}");
    }
}
