//! The measuring loops of the command line: latency, rate, bandwidth.
//!
//! The loops use connected queue pairs and spin: a measurement has its core for itself. The owner
//! of a region sends from its first half. The peer's data arrives in the other half. So both sides
//! of a measurement use regions of the same length.
//!
//! The calls of the two sides:
//!
//! | measurement | client | server |
//! |---|---|---|
//! | latency of WRITE | [`write_latency`], [`Side::First`] | [`write_latency`], [`Side::Second`] |
//! | latency of SEND | [`send_latency`], [`Side::First`] | [`send_latency`], [`Side::Second`] |
//! | latency of READ and atomics | [`round_trips`] | [`serve`] |
//! | rate, bandwidth of WRITE and READ | [`bulk`] | [`serve`] |
//! | rate, bandwidth of SEND | [`bulk`] | [`post_receives`], then [`receive_bulk`] |
//! | bandwidth in both directions | [`Lanes::flow`] | [`Lanes::flow`] |

mod bulk;
mod connected;
mod flow;
mod latency;
mod spread;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;
use rocinante::verbs::{Destination, PostListError, QpState};
use rocinante::{CompChannel, Context, Cq, Mr, Qp, RemoteSlice, VerbsError, Wc, WcStatus};

use crate::quiet::Quiet;
pub use bulk::{Bulk, BulkOp, BulkResult, bulk, bulk_with_shares, post_receives, receive_bulk};
pub use connected::{Connected, Connecting};
pub use flow::{FlowPlan, Flowed, Idle, Lane, Lanes, Receive};
pub use latency::{
    Pinging, RoundTrip, Side, round_trips, round_trips_apart, send_latency, write_latency,
};
pub use latency::{Times, histogram, record};
pub use spread::{Spread, jain};

/// One end of a connection, with everything that a measurement uses.
#[derive(Debug, Clone, Copy)]
pub struct End<'a> {
    /// The device.
    pub ctx: &'a Context,
    /// The connected queue pair.
    pub qp: &'a Qp,
    /// The completion queue of both its queues. It must serve nothing else while a measurement
    /// runs.
    pub cq: &'a Cq,
    /// The local region.
    pub mr: &'a Mr,
    /// The peer's region.
    pub remote: RemoteSlice,
    /// The destination of its datagrams, if it sends any.
    pub to: Option<Destination>,
    /// The channel of its completion queue to sleep on, instead of polling.
    pub channel: Option<&'a CompChannel>,
    /// Time without progress after which the measurement gives up.
    pub patience: Duration,
}

impl<'a> End<'a> {
    /// An end that polls.
    #[must_use]
    pub fn new(
        ctx: &'a Context,
        qp: &'a Qp,
        cq: &'a Cq,
        mr: &'a Mr,
        remote: RemoteSlice,
        patience: Duration,
    ) -> Self {
        Self { ctx, qp, cq, mr, remote, to: None, channel: None, patience }
    }
}

/// The end of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// After this many messages. At least one is sent.
    Messages(u64),
    /// After this time.
    Time(Duration),
}

impl Until {
    /// Whether the message `number` (from 1), which begins after `elapsed`, is the last.
    fn is_last(self, number: u64, elapsed: Duration) -> bool {
        match self {
            Self::Messages(messages) => number >= messages,
            Self::Time(time) => elapsed >= time,
        }
    }
}

/// The result of a measurement, or of a step of it.
pub type Result<T = (), E = MeasureError> = std::result::Result<T, E>;

/// The reason why a measurement could not be finished.
#[derive(Debug)]
pub enum MeasureError {
    /// A call failed.
    Verbs(VerbsError),
    /// A request failed.
    Completion(WcStatus),
    /// Nothing happened for as long as [`End::patience`].
    Silence {
        /// The awaited event.
        what: &'static str,
        /// The time limit.
        patience: Duration,
    },
}

impl fmt::Display for MeasureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verbs(error) => error.fmt(f),
            Self::Completion(status) => write!(f, "a request ended in {status}"),
            Self::Silence { what, patience } => {
                write!(f, "no {what} within {} s", patience.as_secs_f64())
            }
        }
    }
}

impl std::error::Error for MeasureError {}

impl From<VerbsError> for MeasureError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}

impl From<PostListError> for MeasureError {
    fn from(error: PostListError) -> Self {
        Self::Verbs(error.into())
    }
}

/// Longest sleep before the next look at the queue pair's state.
const NAP: Duration = Duration::from_millis(50);
/// Longest time without a packet for a side that only answers.
const PATIENCE: Duration = Duration::from_secs(20);

/// The other side of [`bulk`] and [`round_trips`]: drives the device on this thread until the peer
/// reaches the barrier `name`, too. Continues as long as packets arrive. A device of the kernel
/// drives itself, maybe with threads that need this core, so this thread sleeps then. Error:
/// [`VerbsError::Exchange`] as [`Exchange::barrier_while`].
pub fn serve(ctx: &Context, exchange: &mut Exchange, name: &str) -> Result<(), VerbsError> {
    let mut quiet = Quiet::new(ctx, PATIENCE);
    if ctx.backend().is_none() {
        return exchange.barrier_while(name, || quiet.goes_on());
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let result = exchange.barrier_while(name, || quiet.goes_on());
            done.store(true, Ordering::Release);
            result
        });
        while !done.load(Ordering::Acquire) {
            ctx.progress();
            std::hint::spin_loop();
        }
        waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl End<'_> {
    /// Offset of the half of the local region where the peer's data arrives.
    fn landing(&self) -> usize {
        self.mr.len() / 2
    }

    /// Address of the half of the peer's region where our data arrives.
    fn remote_landing(&self) -> u64 {
        self.remote.address + self.remote.len / 2
    }

    /// Polls until there is a completion. Fails unless its status is a success.
    fn wait(&self, what: &'static str) -> Result<Wc> {
        self.spin(what, || self.cq.poll_one()?.map(succeeded).transpose())
    }

    /// Calls `look`, which drives the device, until it finds something.
    fn spin<T>(
        &self,
        what: &'static str,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        // A side that sleeps leaves the processor to the other at once.
        let looks = if self.channel.is_some() { 1 } else { 64 };
        let mut deadline = None;
        loop {
            for _ in 0..looks {
                if let Some(found) = look()? {
                    return Ok(found);
                }
                std::hint::spin_loop();
            }
            if self.qp.state() == QpState::Err {
                // A side that waits for memory has not polled for the status that broke it.
                return Err(MeasureError::Completion(cause(WcStatus::WrFlushErr, self.cq)));
            }
            let now = Instant::now();
            if now >= *deadline.get_or_insert(now + self.patience) {
                return Err(MeasureError::Silence { what, patience: self.patience });
            }
            let Some(channel) = self.channel else {
                // The other side may need this core.
                std::thread::yield_now();
                continue;
            };
            if let Some(found) = sleep(channel, self.cq, NAP, &mut look)? {
                return Ok(found);
            }
        }
    }
}

/// The cause of a request that ended in `status`. A flushed request failed because of another one,
/// whose completion may still be in `cq`.
fn cause(status: WcStatus, cq: &Cq) -> WcStatus {
    let says_why = |status| !matches!(status, WcStatus::Success | WcStatus::WrFlushErr);
    if says_why(status) {
        return status;
    }
    while let Ok(Some(wc)) = cq.poll_one() {
        if says_why(wc.status) {
            return wc.status;
        }
    }
    WcStatus::WrFlushErr
}

/// Sleeps until `cq` announces a completion on `channel`, or `patience` is over. Arms the queue and
/// then calls `look`, because a completion before the arming makes no event. Returns without
/// sleeping if `look` finds something.
fn sleep<T>(
    channel: &CompChannel,
    cq: &Cq,
    patience: Duration,
    look: impl FnOnce() -> Result<Option<T>>,
) -> Result<Option<T>> {
    cq.req_notify(false)?;
    if let Some(found) = look()? {
        return Ok(Some(found));
    }
    match channel.wait_event(Some(patience)) {
        Err(VerbsError::TimedOut) => Ok(None),
        other => Ok(other.map(|_| None)?),
    }
}

fn succeeded(wc: Wc) -> Result<Wc> {
    if wc.status == WcStatus::Success { Ok(wc) } else { Err(MeasureError::Completion(wc.status)) }
}

/// Connected pairs for tests of the loops.
#[cfg(test)]
mod pair {
    use super::*;
    use rocinante::device::Backend;
    use rocinante::{Access, ConnectOptions, OpenOptions, PreparedQp};
    use std::net::{IpAddr, TcpListener};

    pub(super) struct Owner {
        ctx: Context,
        pub(super) cq: Cq,
        pub(super) mr: Mr,
        pub(super) qp: Qp,
    }

    impl Owner {
        pub(super) fn end(&self, peer: RemoteSlice) -> End<'_> {
            let Self { ctx, cq, mr, qp } = self;
            End::new(ctx, qp, cq, mr, peer, Duration::from_secs(10))
        }

        pub(super) fn ctx(&self) -> &Context {
            &self.ctx
        }

        pub(super) fn region(&self) -> RemoteSlice {
            self.mr.remote()
        }
    }

    struct Half {
        ctx: Context,
        cq: Cq,
        mr: Mr,
        qp: PreparedQp,
    }

    fn half(address: IpAddr) -> Half {
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(address).unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(1024).unwrap());
        let mr = pd.allocate(1 << 20, Access::ALL).unwrap();
        let qp =
            pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(256).max_recv_wr(256).build().unwrap();
        Half { ctx, cq, mr, qp }
    }

    /// Two connected ends over loopback.
    pub(super) fn connected() -> [Owner; 2] {
        let (here, there) = rocinante::doc::addresses();
        let (a, b) = (half(here), half(there));
        let (at_a, at_b) = (a.qp.endpoint(), b.qp.endpoint());
        [(a, at_b), (b, at_a)].map(|(half, peer)| {
            let Half { ctx, cq, mr, qp } = half;
            let qp = qp.connect(&peer, &ConnectOptions::default()).unwrap();
            Owner { ctx, cq, mr, qp }
        })
    }

    /// Runs both sides, each on its own thread.
    pub(super) fn both<A: Send, B: Send>(
        first: impl FnOnce(&End<'_>, &mut Exchange) -> A + Send,
        second: impl FnOnce(&End<'_>, &mut Exchange) -> B + Send,
    ) -> (A, B) {
        let [a, b] = connected();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut exchange = Exchange::accept_from(&listener).unwrap();
                second(&b.end(a.region()), &mut exchange)
            });
            let mut exchange = Exchange::connect(at, Duration::from_secs(5)).unwrap();
            let one = first(&a.end(b.region()), &mut exchange);
            (one, other.join().unwrap())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante::device::Backend;
    use rocinante::verbs::{SendData, SendOp};
    use rocinante::{Access, ConnectOptions, OpenOptions, SendWr};

    /// A request completes after the last look and before the queue is armed. It makes no event.
    #[test]
    fn what_completes_between_a_look_and_the_arming_is_not_slept_on() {
        const NEVER: Duration = Duration::from_secs(30);
        let (here, _) = rocinante::doc::addresses();
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(here).unwrap();
        let channel = ctx.create_comp_channel().unwrap();
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq_with(8, &channel).unwrap());
        let mr = pd.allocate(64, Access::ALL).unwrap();
        let [a, b] = [(); 2].map(|()| pd.qp(&cq, &cq).access(Access::ALL).build().unwrap());
        let (at_a, at_b) = (a.endpoint(), b.endpoint());
        let options = ConnectOptions::default();
        let [a, _b] = [(a, at_b), (b, at_a)].map(|(qp, to)| qp.connect(&to, &options).unwrap());
        assert!(cq.poll_one().unwrap().is_none());
        let (op, sges) =
            (SendOp::Write { remote: mr.address(), rkey: mr.rkey(), imm: None }, [mr.sge(0, 64)]);
        let data = SendData::Sges(&sges);
        let wr = SendWr::new(op, data).wr_id(7);
        a.post_send(&[wr]).unwrap();
        // Its acknowledgement has arrived.
        while ctx.counters().transport.rcvd_pkts < 2 {
            ctx.progress();
        }
        let start = Instant::now();
        let found = sleep(&channel, &cq, NEVER, || Ok(cq.poll_one()?)).unwrap();
        assert_eq!(found.map(|wc| wc.wr_id), Some(7));
        assert!(start.elapsed() < NEVER);
        // Now the next completion makes an event.
        a.post_send(&[wr]).unwrap();
        assert!(sleep(&channel, &cq, NEVER, || Ok(None::<()>)).unwrap().is_none());
        assert!(start.elapsed() < NEVER);
        assert!(cq.poll_one().unwrap().is_some());
    }
}
