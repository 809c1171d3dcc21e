//! A shard: an engine, the port that carries its packets, and the loop that drives both.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_netdev::{AnyPort, PathId, PathSpec, Port};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::CqId;
use rocinante_stack::wire::MadBytes;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::{Engine, TxStop, Urgency};

use super::cm::Post;
use super::cork::Cork;
use super::density::Density;
use super::events::Owner;
use super::flood::Flood;
use super::host::Host;
use super::mail::Order;
use super::neighbours::Neighbours;
use super::others::Others;
use super::sink::{Paths, Sink, translate};
use super::staging::Staging;
use crate::model::event::AsyncEvent;
use crate::provider::trace;
use crate::tuning::cork::{HELD_MAX, HELD_UNASKED};
use crate::tuning::crowd::{CROWDED_FROM, CROWDED_UNTIL};
use crate::tuning::shard::{
    ARRIVALS, HELD_UP, OVERDUE_MAX, PAUSE_MAX, PAUSE_MIN, POLLS, ROUNDS, RX_BURST, TX_BURST,
};
use crate::tuning::{crowd, flood};

/// The parts that one thread at a time drives.
pub struct Shard {
    pub engine: Engine,
    pub(crate) port: AnyPort,
    pub host: Host,
    paths: Paths,
    /// The packets and events of the connection manager.
    pub post: Post,
    /// Requests posted by threads that do not hold the shard.
    pub(super) staging: Arc<Staging>,
    /// The other shards of the device, if there are some.
    pub(super) others: Option<Box<Others>>,
    /// Other processes on its addresses, if it shares them.
    pub(super) neighbours: Option<Box<Neighbours>>,
    pub(super) started: Instant,
    /// When the port's chores are to be looked at, if the shard is driven then; and when it must be
    /// for that.
    chores_at: Time,
    chores_by: Option<Time>,
    /// Requests and acknowledgements that wait to leave together with more.
    pub(super) cork: Cork,
    /// The program was shown a completed receive or a message of several packets, and has posted
    /// nothing since.
    shown: bool,
    /// It answered the last ones that it was shown: it posted before it was shown more.
    answers: bool,
    /// Something was received when it was last driven.
    received: bool,
    /// Full bursts read since a deadline passed: the packet that it waits for may be behind them.
    overdue: u32,
    density: Density,
    flood: Flood,
    /// The port is left alone until then, because of a flood.
    pub(super) resume_at: Option<Time>,
    /// Datagrams that the kernel refused, and its last errno.
    pub(crate) refused: (u64, i32),
    /// Whether the port's descriptor reports arrivals, and the number of looks in a row since then
    /// that found some.
    watched: bool,
    arrivals: u32,
    /// When the program drove last.
    driven_at: Time,
    /// How often the program has polled since, while the background thread slept.
    polls: u32,
    /// The background thread wakes for each packet, however often the program polls.
    assisted: bool,
    /// When the background thread looks again, while it sleeps.
    pub(super) parked_until: Time,
    /// The port broke: the interface is gone.
    pub(crate) broken: Option<io::Error>,
    /// Events that are not the engine's.
    events: VecDeque<AsyncEvent>,
    /// The counters as last reported.
    pub(super) told: trace::Watch,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Shard {
    pub(super) fn new(
        engine: Engine,
        port: AnyPort,
        host: Host,
        others: Option<Box<Others>>,
    ) -> Self {
        let staging = others.as_ref().map_or_else(Arc::default, |others| others.own_staging());
        Self {
            engine,
            port,
            host,
            paths: Paths::default(),
            post: Post::default(),
            staging,
            others,
            neighbours: None,
            started: Instant::now(),
            chores_at: Time(0),
            chores_by: None,
            cork: Cork::new(),
            shown: false,
            answers: false,
            received: false,
            overdue: 0,
            density: Density::default(),
            flood: Flood::default(),
            resume_at: None,
            refused: (0, 0),
            watched: true,
            arrivals: 0,
            driven_at: Time(0),
            assisted: false,
            polls: 0,
            parked_until: Time(u64::MAX),
            broken: None,
            events: VecDeque::new(),
            told: trace::Watch::default(),
        }
    }

    /// Readable while the port has something, writable while it takes more.
    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.port.wait_fd()
    }

    /// Posts requests of other threads.
    pub(super) fn take_staged(&mut self) {
        self.staging.take(&mut self.engine, &mut self.host);
    }

    /// Whether that is so: see [`watch`](Self::watch).
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.watched
    }

    /// Whether arrivals are too frequent for a report of each.
    pub(super) fn is_busy(&self) -> bool {
        self.arrivals > ARRIVALS
    }

    /// Whether the program drove in the last `span`.
    pub(super) fn was_driven_within(&self, span: Duration) -> bool {
        Duration::from_nanos(self.now().since(self.driven_at)) <= span
    }

    /// Counts a poll while the background thread sleeps on the port. Returns whether the program
    /// does nothing but poll.
    pub(super) fn is_polled_without_pause(&mut self) -> bool {
        self.polls = self.polls.saturating_add(1);
        self.polls > POLLS && !self.assisted
    }

    /// Says whether the program needs the background thread beside its own polls.
    pub(super) fn assist(&mut self, assisted: bool) {
        self.assisted = assisted;
    }

    /// Turns the descriptor's reports of arrivals on, or spares the kernel that. Returns whether
    /// they are as wished.
    pub(super) fn watch(&mut self, wished: bool) -> bool {
        (self.arrivals, self.polls) = (0, 0);
        if wished != self.watched && self.port.watch(wished).is_ok() {
            self.watched = wished;
        }
        self.watched == wished
    }

    /// Whether packets to send wait for the port to take more.
    pub(super) fn wants_write(&self) -> bool {
        self.port.wants_write()
    }

    pub fn now(&self) -> Time {
        now_since(self.started)
    }

    /// Whether the port is left alone for a moment.
    pub(super) fn is_flooded(&self) -> bool {
        self.resume_at.is_some()
    }

    /// When to drive again if nothing else happens.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let engine = Time::earlier(self.engine.poll_timeout(), self.cork.deadline());
        Time::earlier(Time::earlier(engine, self.resume_at), self.chores_by)
    }

    /// When the background thread must drive at the latest if the program does not.
    pub(crate) fn needed(&self) -> Option<Time> {
        // Corked requests wait for the program's next call, which may never come.
        if self.cork.is_in() { Some(Time(0)) } else { self.deadline() }
    }

    /// Sends corked requests, and those just taken over from the program: their queue pair is about
    /// to change.
    pub(super) fn send_waiting(&mut self) {
        let now = self.now();
        self.transmit(now);
    }

    /// As [`send_waiting`](Self::send_waiting), and acknowledges packets for which the peers have
    /// not asked yet: of this queue pair, which stops to answer, or of all, because the program
    /// ends.
    pub(super) fn send_last(&mut self, of: Option<Qpn>) {
        self.engine.acknowledge_unasked(of);
        self.send_waiting();
    }

    /// Receives, handles deadlines, sends. Returns whether anything happened, so that more may
    /// soon.
    ///
    /// With `hold`, plain acknowledgements of a message wait for the next call: the program is
    /// about to see the message, and its answer leaves with them, in one system call. Those of a
    /// completed receive, and of more than [`HELD_UNASKED`] packets, wait only for a program that
    /// answered the one before: any other may end right after the completion, or look seldom, and
    /// its peer would ask or wait in vain. `exit.rs` sends held acknowledgements when the program
    /// exits.
    pub(crate) fn drive(&mut self, hold: bool) -> bool {
        let mut any = false;
        let mut now = self.now();
        if hold {
            self.driven_at = now;
        }
        let mut drained = true;
        self.received = false;
        self.host.before_packets(now);
        for round in 0..ROUNDS {
            if round > 0 {
                now = self.now();
            }
            let mailed = self.read_mail(now);
            let received = self.receive(now);
            drained = received < RX_BURST;
            self.received |= received > 0;
            self.arrivals = self.arrivals.saturating_add(u32::from(received > 0));
            self.obey(drained);
            // A program that sees completions may post receives before more comes.
            let news = self.host.has_pending();
            self.handle_timeout(now, drained);
            self.serve_cm(now);
            self.introduce(now);
            self.write_mail();
            let few = !mailed && (1..=HELD_MAX).contains(&received);
            let completes = news && self.host.has_pending_receives();
            let shows = few && (completes || received > HELD_UNASKED);
            if shows && hold && std::mem::replace(&mut self.shown, true) {
                self.answers = false;
            }
            let may_wait = hold && few && (!shows || self.answers);
            any |= mailed || received > 0;
            if !(may_wait && self.cork.keeps(self.engine.urgency())) {
                any |= self.transmit(now);
            }
            self.deliver();
            if drained || news {
                break;
            }
        }
        if self.received {
            self.host.after_packets(now);
        }
        self.cork.driven();
        if now >= self.chores_at {
            self.attend();
        }
        self.resume_at = (drained && self.flood.is_on(now)).then(|| now.after(flood::PAUSE));
        any && self.resume_at.is_none()
    }

    /// Handles deadlines, unless there is more to read: a thread that did not run for a while finds
    /// the expected packet among those that have arrived meanwhile.
    fn handle_timeout(&mut self, now: Time, drained: bool) {
        if self.engine.poll_timeout().is_none_or(|due| due > now) {
            return;
        }
        if drained || self.overdue == OVERDUE_MAX {
            self.overdue = 0;
            self.engine.handle_timeout(now, &mut self.host);
        } else {
            self.overdue += 1;
        }
    }

    /// Sends what there is to send.
    pub(crate) fn transmit(&mut self, now: Time) -> bool {
        self.cork.pull();
        if self.engine.urgency() == Urgency::Idle && !self.port.wants_write() {
            return false;
        }
        let mut now = now;
        self.host.before_packets(now);
        loop {
            let (port, paths) = (&mut self.port, &mut self.paths);
            let mut sink = Sink { port, paths, refused: &mut self.refused };
            let waited = sink.port.wants_write();
            let sent = self.engine.poll_transmit(now, TX_BURST, &mut self.host, &mut sink);
            let progress = sent.packets > 0;
            let refused = &mut self.refused;
            self.port.flush(|failure| {
                refused.0 += u64::from(failure.datagrams);
                refused.1 = failure.errno;
            });
            self.density.departed(&self.port, &mut self.engine);
            if progress {
                let left = self.now();
                if left.since(now) > HELD_UP {
                    self.engine.left_late(now, left);
                }
                now = left;
            }
            match sent.stop {
                // The flush made room, perhaps only by packets that waited before: no other look is
                // due.
                TxStop::SinkFull if (progress || waited) && !self.port.wants_write() => {}
                TxStop::Idle | TxStop::SinkFull | TxStop::Budget => break,
            }
        }
        self.introduce(now);
        self.deliver();
        true
    }

    /// Sends posted requests, unless they should wait for more ([`Cork::posted`]).
    pub(crate) fn posted(&mut self, requests: u32, urgency: Urgency) {
        if std::mem::take(&mut self.shown) {
            self.answers = true;
        }
        let started = self.started;
        if self.cork.posted(requests, urgency, || now_since(started)) {
            let now = self.now();
            self.transmit(now);
        }
        self.deliver();
    }

    /// Sends a management datagram on a path. Returns whether there was room.
    pub(super) fn send_mad(&mut self, mad: &MadBytes, path: u32) -> bool {
        let Self { port, paths, refused, engine, .. } = self;
        engine.send_mad(mad, path, &mut Sink { port, paths, refused })
    }

    fn receive(&mut self, now: Time) -> usize {
        if self.broken.is_some() {
            return 0;
        }
        if crowd::ENABLED && (self.engine.is_crowded() || self.port.is_filled(CROWDED_FROM)) {
            self.look_for_a_crowd();
        }
        let before_elsewhere = self.handed_over();
        let (engine, host, staging) = (&mut self.engine, &mut self.host, &self.staging);
        let before = accepted(engine);
        let (others, neighbours) = (&mut self.others, &mut self.neighbours);
        let received = self.port.receive(RX_BURST, |datagram| {
            if let Some(neighbours) = neighbours
                && neighbours.hand_over(&datagram)
            {
                return;
            }
            let datagram = translate(&datagram);
            if let Some(others) = others
                && others.hand_over(&datagram)
            {
                return;
            }
            // A receive posted before the peer sent is there for that message, whichever thread
            // drives.
            staging.take(engine, host);
            engine.handle_datagram(now, &datagram, host);
        });
        let mut wasted_elsewhere = 0;
        if let Some(others) = others {
            others.ring();
            wasted_elsewhere = self.staging.mail.take_wasted();
        }
        let received = received.unwrap_or_else(|error| {
            self.break_down(error);
            0
        });
        self.density.arrived(&self.port, &mut self.engine);
        // The owner judges datagrams handed over to it, and reports later.
        let elsewhere = self.handed_over() - before_elsewhere;
        let used = accepted(&self.engine) - before + elsewhere;
        let wasted = (received as u64).saturating_sub(used);
        self.flood.add(now, wasted + wasted_elsewhere);
        received
    }

    /// Whether the receive queue is crowded, or still is.
    #[cold]
    fn look_for_a_crowd(&mut self) {
        let is_crowded = !self.engine.is_crowded() || self.port.is_filled(CROWDED_UNTIL);
        self.engine.set_crowded(is_crowded);
    }

    /// The port is good for nothing any more.
    pub fn break_down(&mut self, error: io::Error) {
        if self.broken.replace(error).is_some() {
            return;
        }
        self.host.break_all(&mut self.engine);
        self.deliver();
        let (is_first, is_last) =
            self.others.as_ref().map_or((true, true), |others| others.breaks());
        // The device has one such event.
        if is_first {
            self.events.push_back(AsyncEvent::DeviceFatal);
        }
        let Host { cqs, woken, .. } = &mut self.host;
        if is_last {
            cqs.iter().for_each(|cq| cq.gone(woken));
        }
        self.post.fail(woken);
    }

    /// Hands completions to their queues.
    pub(crate) fn deliver(&mut self) {
        while self.host.has_pending() {
            let mut full: Vec<(CqId, bool)> = Vec::new();
            self.host.deliver(|cq, news| {
                full.push((cq, news));
                if news {
                    self.events.push_back(AsyncEvent::CqOverflow { cq: cq.0 });
                }
            });
            for (cq, news) in full {
                self.engine.cq_overflow(cq, &mut self.host);
                if let (Some(others), true) = (&mut self.others, news) {
                    others.order_all(Order::Overflow(cq));
                    others.ring();
                }
            }
        }
    }

    /// For a thread that the port woke and that then drove: if there was nothing to receive, it was
    /// news of the network.
    pub(super) fn hear(&mut self) {
        if !self.received {
            self.attend();
        }
    }

    /// Tells which counters have grown. Returns when to do so again, if it is too early now.
    #[inline]
    pub(super) fn tell(&mut self) -> Option<Duration> {
        self.told.look(self.engine.counters(), self.engine.drops())
    }

    /// Does the chores.
    #[cold]
    fn attend(&mut self) {
        let _ = self.tell();
        let now = self.now();
        let until_idle = self.tidy_cm_paths(now);
        let pause = self
            .port
            .maintain()
            // A port whose interface is gone has nothing left to do.
            .filter(|_| self.broken.is_none())
            .map(|pause| u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX).max(PAUSE_MIN));
        self.end_for_neighbours(now);
        let pause = pause.into_iter().chain(until_idle).min();
        self.chores_by = pause.map(|pause| now.after(pause));
        self.chores_at = now.after(pause.map_or(PAUSE_MAX, |pause| pause.min(PAUSE_MAX)));
    }

    /// Registers a path.
    pub(crate) fn add_path(&mut self, spec: &PathSpec) -> io::Result<u32> {
        let path = self.port.add_path(spec)?;
        let ip = match (spec.local, spec.remote) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => IpFields::V4 { src, dst, id: 0, flags: DF },
            (IpAddr::V6(src), IpAddr::V6(dst)) => IpFields::V6 { src, dst },
            _ => return Err(io::Error::from(io::ErrorKind::InvalidInput)),
        };
        self.paths.set(path.id, Some(Template::new(&ip, path.src_port)));
        (self.chores_at, self.chores_by) = (Time(0), Some(Time(0)));
        Ok(path.id.0)
    }

    pub fn remove_path(&mut self, path: u32) {
        self.port.remove_path(PathId(path));
        self.paths.set(PathId(path), None);
    }

    /// Number of paths without those of QP1.
    pub(super) fn paths_of_queue_pairs(&self) -> usize {
        self.paths.used - self.post.ways.count()
    }

    /// The next asynchronous event, and the object that it is of, if it is of one.
    pub(crate) fn poll_event(&mut self) -> Option<(Option<Owner>, AsyncEvent)> {
        if let Some(event) = self.events.pop_front() {
            let owner = match event {
                AsyncEvent::CqOverflow { cq } => Some(Owner::Cq(cq)),
                _ => None,
            };
            return Some((owner, event));
        }
        while let Some((qpn, event)) = self.engine.poll_event() {
            // A queue pair that is gone has no events.
            if let Some((_, _, init)) = self.engine.query_qp(qpn) {
                return Some((Some(init.pd.into()), AsyncEvent::Qp { qpn, event }));
            }
        }
        let srq = self.engine.poll_srq_event()?;
        let srq = self.number_of(srq);
        Some((Some(Owner::Srq(srq)), AsyncEvent::SrqLimitReached { srq }))
    }
}

/// The shard's time.
pub(super) fn now_since(started: Instant) -> Time {
    let nanoseconds = started.elapsed().as_nanos();
    // Time begins at one second, so that it can be subtracted from.
    Time(1_000_000_000 + u64::try_from(nanoseconds).unwrap_or(u64::MAX / 2))
}

/// Datagrams that were for something.
#[inline]
pub(super) fn accepted(engine: &Engine) -> u64 {
    engine.counters().rcvd_pkts + engine.counters().rcvd_cnp
}
