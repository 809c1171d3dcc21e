//! A shard: an engine, the port that carries its packets, and the loop that drives both.
//!
//! Each part owns its state: [`Io`] the port, [`Router`] the ways to other threads, shards and
//! processes, [`CmOwners`] the owners of connections, [`Cork`] and [`Flood`] when packets leave and
//! when they are read, [`Drivers`] the threads. The loop gives them the engine and the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rocinante_netdev::{AnyPort, Port};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::{Engine, TxStop, Urgency};

use super::clock::Clock;
use super::cm::CmOwners;
use super::cork::Cork;
use super::drivers::Drivers;
use super::events::Owner;
use super::faults::DeviceFaults;
use super::flood::Flood;
use super::host::{Ended, Host};
use super::io::Io;
use super::publish::Turns;
use super::router::Router;
use crate::model::event::AsyncEvent;
use crate::provider::memory::faults;
use crate::provider::trace;
use crate::tuning::overload::{self, OVERLOADED_FROM, OVERLOADED_UNTIL};
use crate::tuning::shard::{HELD_UP, OVERDUE_MAX, ROUNDS, RX_BURST, TX_BURST};

/// The parts that one thread at a time drives.
pub struct Shard {
    pub engine: Engine,
    pub host: Host,
    pub(super) io: Io,
    pub(super) router: Router,
    /// The packets and events of the connection manager.
    pub cm_owners: CmOwners,
    /// Requests and acknowledgements that wait to leave together with more.
    pub(super) cork: Cork,
    pub(super) flood: Flood,
    pub(super) drivers: Drivers,
    pub(super) clock: Clock,
    /// Full bursts read since a deadline passed: the packet that it waits for may be behind them.
    overdue: u32,
    /// Events that are not the engine's.
    events: VecDeque<AsyncEvent>,
    /// Of publishing.
    pub(super) turns: Turns,
    /// The counters as last reported.
    told: trace::Watch,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Shard {
    /// A shard of the device `name`.
    pub(super) fn new(
        name: &str,
        engine: Engine,
        port: AnyPort,
        host: Host,
        router: Router,
    ) -> Self {
        Self {
            engine,
            host,
            io: Io::new(port),
            router,
            cm_owners: CmOwners::default(),
            cork: Cork::new(),
            flood: Flood::default(),
            drivers: Drivers::new(),
            clock: Clock::start(),
            overdue: 0,
            events: VecDeque::new(),
            turns: Turns::default(),
            told: trace::Watch::new(name),
        }
    }

    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Posts requests of other threads.
    #[inline]
    pub(super) fn take_staged(&mut self) {
        self.router.staging.take(&mut self.engine, &mut self.host);
    }

    /// Turns the port's reports of arrivals on or off: see [`Drivers::watch`].
    pub(super) fn watch(&mut self, wished: bool) -> bool {
        self.drivers.watch(wished, &mut self.io)
    }

    /// Whether the port is left alone for a moment.
    pub(super) fn is_flooded(&self) -> bool {
        self.flood.resume_at().is_some()
    }

    /// When to drive again if nothing else happens.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let engine = Time::earlier(self.engine.poll_timeout(), self.cork.deadline());
        Time::earlier(Time::earlier(engine, self.flood.resume_at()), self.io.chores_by())
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
        faults::take_signals(now);
        self.transmit(now);
    }

    /// As [`send_waiting`](Self::send_waiting), and acknowledges packets for which the peers have
    /// not asked yet: of this queue pair, which stops to answer, or of all, because the program
    /// ends.
    pub(super) fn send_last(&mut self, of: Option<Qpn>) {
        self.engine.acknowledge_unasked(of);
        self.send_waiting();
    }

    /// Sends at once the datagrams that faults delay.
    pub(super) fn let_go(&mut self) {
        self.io.port.let_go();
    }

    /// Receives, handles deadlines, sends. Returns whether anything happened, so that more may
    /// soon.
    ///
    /// With `hold`, plain acknowledgements of a message may wait for the next call
    /// ([`Cork::keeps`]): the program is about to see the message, and its answer leaves with them,
    /// in one system call. `exit.rs` sends held acknowledgements when the program exits.
    pub(crate) fn drive(&mut self, hold: bool) -> bool {
        let mut any = false;
        let mut now = self.now();
        self.drivers.drive(now, hold);
        faults::take_signals(now);
        let mut drained = true;
        for round in 0..ROUNDS {
            if round > 0 {
                now = self.now();
            }
            let mailed = self.router.read_mail(now, &mut self.engine, &mut self.host);
            let received = self.receive(now);
            drained = received < RX_BURST;
            self.drivers.looked(received);
            self.router.execute(drained, self.clock, &mut self.engine, &mut self.host);
            // A program that sees completions may post receives before more comes.
            let news = self.host.has_pending();
            self.handle_timeout(now, drained);
            self.serve_cm(now);
            self.probe(now);
            self.router.write_mail(&mut self.engine);
            any |= mailed || received > 0;
            let completes = news && self.host.has_pending_receives();
            let engine = &self.engine;
            let keeps =
                hold && !mailed && self.cork.keeps(received, completes, || engine.urgency());
            if !keeps {
                any |= self.transmit(now);
            }
            self.deliver();
            if drained || news {
                break;
            }
        }
        if self.drivers.has_received() {
            self.host.after_packets(now);
        }
        self.cork.driven();
        if self.io.has_chores(now) {
            self.attend();
        }
        self.flood.driven(now, drained);
        if self.turns.is_due(now) {
            self.publish(now);
        }
        any && !self.is_flooded()
    }

    /// Handles deadlines, unless there is more to read: a thread that did not run for a while finds
    /// the expected packet among those that have arrived meanwhile.
    fn handle_timeout(&mut self, now: Time, drained: bool) {
        if self.engine.poll_timeout().is_none_or(|due| due > now) {
            return;
        }
        if drained || self.overdue == OVERDUE_MAX {
            self.overdue = 0;
            self.router.leave_requests(now, &mut self.engine);
            self.engine.handle_timeout(now, &mut self.host);
        } else {
            self.overdue += 1;
        }
    }

    /// Whether the engine or the port has packets to send.
    pub(super) fn has_to_send(&self) -> bool {
        self.engine.urgency() != Urgency::Idle || self.io.wants_write()
    }

    /// Sends what there is to send.
    fn transmit(&mut self, now: Time) -> bool {
        self.cork.pull();
        if !self.has_to_send() {
            return false;
        }
        let mut now = now;
        loop {
            self.host.before_packets(now);
            let waited = self.io.wants_write();
            let sent = self.engine.poll_transmit(now, TX_BURST, &mut self.host, &mut self.io);
            let progress = sent.packets > 0;
            self.io.flush();
            self.io.run_stats.departed(&self.io.port, &mut self.engine);
            if progress {
                let left = self.now();
                if left.since(now) > HELD_UP {
                    self.engine.left_late(now, left);
                }
                now = left;
                self.host.after_packets(now);
            }
            match sent.stop {
                // The flush made room, perhaps only by packets that waited before: no other look is
                // due.
                TxStop::SinkFull if (progress || waited) && !self.io.wants_write() => {}
                TxStop::Idle | TxStop::SinkFull | TxStop::Budget => break,
            }
        }
        self.probe(now);
        self.deliver();
        true
    }

    /// Sends posted requests, unless they should wait for more ([`Cork::posted`]).
    pub(crate) fn posted(&mut self, requests: u32, urgency: Urgency) {
        let clock = self.clock;
        if self.cork.posted(requests, urgency, || clock.now()) {
            self.send_waiting();
        }
        self.deliver();
    }

    fn receive(&mut self, now: Time) -> usize {
        if self.io.is_unusual() {
            return self.receive_unusual(now);
        }
        self.watch_load();
        let Self { engine, host, router, .. } = self;
        let used_before = accepted(engine) + router.handed_over();
        let received = self.io.port.receive(RX_BURST, |datagram| {
            if let Some(datagram) = router.route(&datagram) {
                // A receive posted before the peer sent is there for that message, whichever thread
                // drives.
                router.staging.take(engine, host);
                host.before_packets(now);
                engine.handle_datagram(now, &datagram, host);
            }
        });
        self.received(now, used_before, received)
    }

    /// The same for a port that is unusual.
    #[cold]
    fn receive_unusual(&mut self, now: Time) -> usize {
        if self.io.is_broken() {
            return 0;
        }
        self.watch_load();
        let Self { engine, host, router, .. } = self;
        let used_before = accepted(engine) + router.handed_over();
        let received = self.io.port.receive(RX_BURST, |datagram| {
            let Some(datagram) = router.route(&datagram) else { return };
            router.staging.take(engine, host);
            host.judge(now, &datagram, engine);
        });
        self.received(now, used_before, received)
    }

    /// Handles the result of the port's `receive`. Returns the number of datagrams.
    #[inline(always)]
    fn received(&mut self, now: Time, used_before: u64, received: std::io::Result<usize>) -> usize {
        let wasted_elsewhere = self.router.routed();
        let received = received.unwrap_or_else(|_| {
            self.break_down();
            0
        });
        self.io.run_stats.arrived(&self.io.port, &mut self.engine);
        // The owner judges datagrams handed over to it, and reports later.
        let used = accepted(&self.engine) + self.router.handed_over() - used_before;
        let wasted = (received as u64).saturating_sub(used);
        self.flood.add(now, wasted + wasted_elsewhere);
        received
    }

    /// Tells the engine of a receive queue that is overloaded, and of one that is not any more.
    #[inline(always)]
    fn watch_load(&mut self) {
        if overload::ENABLED
            && (self.engine.is_overloaded() || self.io.port.is_filled(OVERLOADED_FROM))
        {
            self.look_for_overload();
        }
    }

    /// Whether the receive queue is overloaded, or still is.
    #[cold]
    fn look_for_overload(&mut self) {
        let is_overloaded =
            !self.engine.is_overloaded() || self.io.port.is_filled(OVERLOADED_UNTIL);
        self.engine.set_overloaded(is_overloaded);
    }

    /// Faults of the device decide from now on.
    pub(super) fn meet(&mut self, faults: &Arc<DeviceFaults>) {
        self.host.meet(faults);
        if faults.judges_receives() {
            self.io.judge();
        }
    }

    /// Announces an event to all contexts.
    pub(super) fn announce(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
    }

    /// The interface is gone.
    pub fn break_down(&mut self) {
        if !self.io.break_down() {
            return;
        }
        self.host.break_all(&mut self.engine);
        self.deliver();
        let (is_first, is_last) = self.router.breaks();
        // The device has one such event.
        if is_first {
            self.events.push_back(AsyncEvent::DeviceFatal);
        }
        let Host { cqs, woken, .. } = &mut self.host;
        if is_last {
            cqs.iter().for_each(|cq| cq.gone(woken));
        }
        self.cm_owners.fail(woken);
    }

    /// Executes the waiting commands for a queue pair before a query or a change of it. The caller
    /// then sees the state that the connection manager has set, and the end of an old connection
    /// cannot end the next.
    pub(super) fn settle(&mut self, qpn: Qpn) {
        if self.router.has_commands() {
            self.drive(false);
        }
        // This terminates: each call brings the command's last round nearer, drained or not.
        while self.router.is_to_break(qpn) {
            self.drive(false);
        }
    }

    /// Hands completions to their queues.
    pub(crate) fn deliver(&mut self) {
        while self.host.has_pending() {
            let mut all: Vec<Ended> = Vec::new();
            self.host.deliver(|ended| {
                all.push(ended);
                if let Ended::Queue(cq, true) = ended {
                    self.events.push_back(AsyncEvent::CqOverflow { cq: cq.0 });
                }
            });
            for ended in all {
                match ended {
                    Ended::Pairs => self.host.break_judged(&mut self.engine),
                    Ended::Queue(cq, news) => {
                        self.engine.cq_overflow(cq, &mut self.host);
                        if news {
                            self.router.overflowed(cq);
                        }
                    }
                }
            }
        }
    }

    /// After a wake-up by the port and a drive: if no datagram came, a route, a neighbour or the
    /// link has changed, so the chores are done.
    pub(super) fn hear(&mut self) {
        if !self.drivers.has_received() {
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
        let pause = self.io.maintain();
        self.io.rest(now, pause.into_iter().chain(until_idle).min());
        // A path that this adds has chores of its own.
        if self.router.end_for_neighbours(now, &mut self.engine) {
            self.serve_cm(now);
        }
    }

    pub fn remove_path(&mut self, path: u32) {
        self.io.remove_path(path);
    }

    /// Number of paths without those of QP1.
    pub(super) fn paths_of_queue_pairs(&self) -> usize {
        self.io.paths() - self.cm_owners.ways.count()
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
        let srq = self.router.number_of(srq);
        Some((Some(Owner::Srq(srq)), AsyncEvent::SrqLimitReached { srq }))
    }
}

/// Datagrams that were for something.
#[inline]
pub(super) fn accepted(engine: &Engine) -> u64 {
    engine.counters().rcvd_pkts + engine.counters().rcvd_cnp
}
