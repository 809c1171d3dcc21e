//! An engine that keeps a list, and a shard with one deadline.

use std::sync::Arc;
use std::time::Duration;

use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::{Cqe, RecvWr, SendWr, WcOpcode, WcStatus};
use rocinante_stack::{PostError, Urgency};

use self::host::Host;
use super::Peer;
use super::announce::CqShared;
use super::events::Owner;
use super::front::QpShared;
use super::mail::Letters;
use super::staging::Staging;
use crate::model::event::AsyncEvent;
use crate::provider::sync::Ordering;
use crate::provider::wake::{self, BorrowedFd, OwnedFd, clock};

#[derive(Debug, Default)]
pub struct Engine {
    /// All requests posted to it.
    pub posted: Vec<u64>,
    /// Sends that have not left yet.
    fresh: Vec<u64>,
    is_reset: bool,
}

impl Engine {
    pub(super) fn post_send(
        &mut self,
        _: Qpn,
        wr: &SendWr<'_>,
        _: &mut Host,
    ) -> Result<(), PostError> {
        self.post(wr.wr_id)?;
        self.fresh.push(wr.wr_id);
        Ok(())
    }

    pub(super) fn post_recv(
        &mut self,
        _: Qpn,
        wr: &RecvWr<'_>,
        _: &mut Host,
    ) -> Result<(), PostError> {
        self.post(wr.wr_id)
    }

    pub(super) fn post_urgency(&self, _: Qpn) -> Urgency {
        Urgency::Now
    }

    pub(super) fn reset(&mut self) {
        self.is_reset = true;
        self.posted.clear();
        self.fresh.clear();
    }

    pub(super) fn set_up_again(&mut self) {
        self.is_reset = false;
    }

    fn post(&mut self, wr_id: u64) -> Result<(), PostError> {
        if self.is_reset {
            return Err(PostError::State);
        }
        self.posted.push(wr_id);
        Ok(())
    }
}

pub mod host {
    use crate::provider::wakers::Woken;

    /// The engine's interface to its caller.
    #[derive(Debug, Default)]
    pub struct Host {
        pub(in crate::soft) woken: Woken,
    }
}

#[derive(Debug)]
pub struct Shard {
    pub engine: Engine,
    pub host: Host,
    pub held: bool,
    pub(super) io: Io,
    pub(super) router: Router,
    pub(super) drivers: Drivers,
    peer: Peer,
    cq: Arc<CqShared>,
    qp: Arc<QpShared>,
    timer: Option<Time>,
    /// Whether an acknowledgement is due.
    owed: bool,
    acknowledged: OwnedFd,
    events: Vec<AsyncEvent>,
    letters: Letters,
}

/// A port that never breaks, and always takes more.
#[derive(Debug)]
pub struct Io(OwnedFd);

impl Io {
    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        &self.0
    }

    pub(super) fn is_broken(&self) -> bool {
        false
    }

    pub(super) fn wants_write(&self) -> bool {
        false
    }
}

/// Requests, datagrams and commands that other threads left.
#[derive(Debug, Default)]
pub struct Router {
    pub(super) staging: Arc<Staging>,
}

/// The threads that drive.
#[derive(Debug)]
pub struct Drivers {
    is_watched: bool,
    received: u64,
    parked_until: Time,
}

impl Drivers {
    pub(super) fn is_watched(&self) -> bool {
        self.is_watched
    }

    pub(super) fn is_busy(&self) -> bool {
        self.received > 0
    }

    /// Always, as after long polling.
    pub(super) fn polls_without_pause(&mut self) -> bool {
        true
    }

    pub(super) fn assist(&mut self, _: bool) {}

    /// Always: the code must also work if this is wrong.
    pub(super) fn has_driven_within(&self, _: Duration, _: Time) -> bool {
        true
    }

    pub(super) fn park_until(&mut self, due: Time) {
        self.parked_until = due;
    }

    pub(super) fn parked_until(&self) -> Time {
        self.parked_until
    }
}

/// The retransmission timeout.
const TIMEOUT: Duration = Duration::from_millis(100);

impl Shard {
    pub(super) fn new(
        [port, acknowledged]: &[OwnedFd; 2],
        peer: Peer,
        cq: Arc<CqShared>,
        qp: Arc<QpShared>,
    ) -> Self {
        Self {
            engine: Engine::default(),
            host: Host::default(),
            held: false,
            io: Io(port.clone()),
            router: Router::default(),
            drivers: Drivers { is_watched: true, received: 0, parked_until: Time(u64::MAX) },
            peer,
            cq,
            qp,
            timer: None,
            owed: false,
            acknowledged: acknowledged.clone(),
            events: Vec::new(),
            letters: Letters::default(),
        }
    }

    pub(super) fn take_staged(&mut self) {
        self.router.staging.take(&mut self.engine, &mut self.host);
    }

    pub(super) fn watch(&mut self, wished: bool) -> bool {
        self.drivers.is_watched = wished;
        self.io.0.watch(wished);
        true
    }

    pub(super) fn is_flooded(&self) -> bool {
        false
    }

    pub(super) fn now(&self) -> Time {
        Time(clock::now())
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        self.timer
    }

    pub(super) fn needed(&self) -> Option<Time> {
        if self.held { Some(Time(0)) } else { self.deadline() }
    }

    pub(super) fn drive(&mut self, hold: bool) -> bool {
        let mailed = self.router.staging.mail.take(&mut self.letters);
        let mut arrived = self.io.0.drain();
        arrived += self.letters.commands().filter(|_| mailed).count() as u64;
        for _ in 0..arrived {
            self.take_staged();
            self.drivers.received += 1;
            self.complete(1000 + self.drivers.received);
        }
        let expired = self.timer.is_some_and(|due| due <= self.now());
        if expired {
            self.timer = None;
            self.events.push(AsyncEvent::Expired);
            self.complete(2000);
        }
        self.owed |= arrived > 0 && self.peer == Peer::Silent;
        self.held = hold && self.owed && !self.held;
        if !self.held {
            self.transmit();
        }
        arrived > 0 || expired
    }

    pub(super) fn hear(&mut self) {}

    pub(super) fn tell(&mut self) -> Option<Duration> {
        None
    }

    pub(super) fn posted(&mut self, _: u32, _: Urgency) {
        self.transmit();
    }

    pub(super) fn deliver(&mut self) {}

    pub(super) fn poll_event(&mut self) -> Option<(Option<Owner>, AsyncEvent)> {
        self.events.pop().map(|event| (None, event))
    }

    /// Sends all posted requests.
    fn transmit(&mut self) {
        self.held = false;
        if std::mem::take(&mut self.owed) {
            wake::notify(&self.acknowledged);
        }
        let sends = std::mem::take(&mut self.engine.fresh);
        match self.peer {
            Peer::Silent if !sends.is_empty() => {
                self.timer = Some(Time(clock::now() + TIMEOUT.as_nanos() as u64));
            }
            Peer::Silent => {}
            Peer::Near => {
                for wr_id in sends {
                    self.complete(wr_id);
                    let retired = self.qp.send_retired.load(Ordering::Relaxed) + 1;
                    self.qp.send_retired.store(retired, Ordering::Relaxed);
                }
            }
        }
    }

    fn complete(&mut self, wr_id: u64) {
        self.cq.push(std::iter::once(cqe(wr_id)), &mut self.host.woken);
    }
}

/// A successful completion.
pub fn cqe(wr_id: u64) -> Cqe {
    Cqe {
        wr_id,
        status: WcStatus::Success,
        opcode: WcOpcode::Send,
        byte_len: 0,
        imm: None,
        invalidated: None,
        qpn: Qpn::default(),
        context: 0,
        sender: None,
        solicited: false,
    }
}
