//! The programs that use connection managers: they listen, call, accept, reject, end and forget, at
//! random.

use std::collections::BTreeSet;

use rocinante_stack::cm::{Accept, CmError, ConnId, Connect, ConnectionManager, QpSide};
use rocinante_stack::types::{Mtu, Psn, Qpn, Time};
use rocinante_stack::wire::cm::{CommId, RejReason, Transport};

use crate::check::Verdict;
use crate::network::Event;
use crate::talk::{Accepted, Call, Listening, Plan, SERVICES, Step, Talk, service, words};
use crate::world::{Stage, World};

/// Backlogs of the listeners that the proof needs.
const AMPLE: usize = 16;

impl World<'_> {
    /// A turn of the programs of `host` that use its connection manager.
    pub(crate) fn turn(&mut self, host: usize) -> Verdict {
        let pause = match self.stage {
            Stage::Storm => self.hosts[host].users.pause,
            Stage::Heal => 100_000,
            Stage::Prove => 10_000,
            Stage::End => 1_000_000,
        };
        let later = self.now + 1 + self.random.below(pause);
        self.agenda.at(later, Event::Turn(host));
        if !self.has_manager(host) {
            return Ok(());
        }
        let this = &self.hosts[host];
        if this.stalled || this.engine.is_none() || self.now < self.asleep_until {
            return Ok(());
        }
        match self.stage {
            Stage::Storm => {
                self.listen_or_not(host)?;
                if self.random.one_in(3) {
                    self.call_anybody(host, None)?;
                }
            }
            Stage::Heal => self.listen_everywhere(host)?,
            Stage::Prove => self.call_for_the_proof(host)?,
            Stage::End => (0..SERVICES).try_for_each(|at| self.unlisten(host, at))?,
        }
        for (conn, call, active) in std::mem::take(&mut self.hosts[host].users.farewells) {
            self.notice(conn, call, active)?;
        }
        let conns: Vec<ConnId> = self.hosts[host].users.talks.keys().copied().collect();
        conns.into_iter().try_for_each(|conn| self.consider(host, conn))
    }

    fn listen_or_not(&mut self, host: usize) -> Verdict {
        for at in 0..SERVICES {
            match self.hosts[host].users.listening[at] {
                None if self.random.one_in(2) => {
                    let backlog = self.random.of(&[1, 2, 6]);
                    self.listen(host, at, backlog)?;
                }
                Some(_) if self.random.one_in(60) => self.unlisten(host, at)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn listen_everywhere(&mut self, host: usize) -> Verdict {
        for at in 0..SERVICES {
            if self.hosts[host].users.listening[at].is_none_or(|it| it.backlog != AMPLE) {
                self.unlisten(host, at)?;
                self.listen(host, at, AMPLE)?;
            }
        }
        Ok(())
    }

    fn listen(&mut self, host: usize, at: usize, backlog: usize) -> Verdict {
        let address = Some(self.hosts[host].addr).filter(|_| self.random.one_in(2));
        let id = self.manager(host)?.listen(service(at), address, backlog);
        let id = id.map_err(|error| format!("host {host} cannot listen: {error}"))?;
        let again = self.manager(host)?.listen(service(at), address, backlog);
        if again != Err(CmError::InUse) {
            return Err(format!("host {host} listens twice to one port: {again:?}"));
        }
        self.hosts[host].users.listening[at] = Some(Listening { id, backlog });
        self.after_call(host)
    }

    /// Ends a listener. The program has seen some of its requests, and decides on them later.
    fn unlisten(&mut self, host: usize, at: usize) -> Verdict {
        let Some(Listening { id, .. }) = self.hosts[host].users.listening[at].take() else {
            return Ok(());
        };
        let (now, sees) = (self.now, self.random.one_in(2));
        let mut unseen = BTreeSet::new();
        for (conn, talk) in &mut self.hosts[host].users.talks {
            let waits = talk.step == Step::Asked && !talk.is_over();
            if waits && talk.listener == Some(id) && !sees {
                unseen.insert(*conn);
                (talk.given_up, talk.over_at) = (true, now);
                let refusals = &mut self.calls[talk.call].refusals[0];
                refusals.push((RejReason::INVALID_SERVICE_ID, Vec::new()));
            }
        }
        self.manager(host)?.unlisten(id, |conn| !unseen.contains(&conn));
        self.after_call(host)
    }

    fn call_for_the_proof(&mut self, host: usize) -> Verdict {
        if !self.hosts[host].users.proof.is_empty() {
            return Ok(());
        }
        self.hosts[host].users.numbers = 16;
        for plan in [Plan::Accept, Plan::Reject, Plan::Nobody] {
            let call = self.calls.len();
            self.call_anybody(host, Some(plan))?;
            self.hosts[host].users.proof.push(call);
        }
        Ok(())
    }

    /// Requests a connection to another host, for a queue pair that does not really exist.
    fn call_anybody(&mut self, host: usize, plan: Option<Plan>) -> Verdict {
        let Some(qpn) = self.hosts[host].users.free_number(&mut self.random) else { return Ok(()) };
        let others = |to: &usize| *to != host && self.has_manager(*to);
        let others: Vec<usize> = (0..self.hosts.len()).filter(others).collect();
        let to = self.random.of(&others);
        let nobody = plan.map_or(self.random.one_in(10), |plan| plan == Plan::Nobody);
        let at = if nobody { SERVICES } else { self.random.index(SERVICES) };
        let (call, random) = (self.calls.len(), &mut self.random);
        let call = Call {
            from: host,
            boot: self.hosts[host].users.boot,
            to,
            conn: ConnId(CommId(0)),
            guid: self.hosts[host].users.config.ca_guid,
            service: at,
            side: side(qpn, random.of(&[0, 0xff_ffff, 0x12_3456])),
            transport: random.of(&[Transport::Rc, Transport::Rc, Transport::Uc]),
            mtu: random.of(&Mtu::ALL),
            ack_timeout: random.of(&[0, 8, 14, 15]),
            retry_count: 7,
            source_port: random.of(&[0, 40_000]),
            private: words(call, 0, 56, random),
            plan,
            end: None,
            accepts: Vec::new(),
            refusals: Default::default(),
            refused: None,
        };
        self.ask(call).map(|_| ())
    }

    /// Asks for a connection. Returns whether that was possible.
    pub(crate) fn ask(&mut self, mut call: Call) -> Result<bool, String> {
        let (host, now) = (call.from, self.now);
        let ends = [host, call.to].map(|host| self.hosts[host].addr);
        let ask = Connect {
            transport: call.transport,
            mtu: call.mtu,
            ack_timeout: call.ack_timeout,
            retry_count: call.retry_count,
            private: &call.private,
            ..Connect::new(ends, service(call.service), call.source_port, call.side)
        };
        let users = &self.hosts[host].users;
        let full = users.talks.len() >= users.config.max_connections;
        match self.manager(host)?.connect(Time(now), &ask) {
            Err(CmError::Full) if full => return Ok(false),
            Ok(conn) if !full => call.conn = conn,
            found => return Err(format!("host {host} calls {}: {found:?}", call.to)),
        }
        let mut talk = Talk::new(self.calls.len(), true, call.to, Step::Asking, now);
        talk.qpn = call.side.qpn;
        let conn = call.conn;
        self.tally.calls += 1;
        self.calls.push(call);
        if self.hosts[host].users.talks.insert(conn, talk).is_some() {
            return Err(format!("host {host} has two connections {conn:?}"));
        }
        self.after_call(host).map(|()| true)
    }

    /// The program looks at one of its connections.
    fn consider(&mut self, host: usize, conn: ConnId) -> Verdict {
        let Some(talk) = self.hosts[host].users.talks.get(&conn).cloned() else { return Ok(()) };
        if let Some(end) = self.calls[talk.call].end {
            return self.consider_managed(host, conn, end);
        }
        if talk.is_over() {
            return self.call_too_late(host, conn);
        }
        let plan = self.calls[talk.call].plan;
        let roll = match self.stage {
            Stage::Storm => self.random.below(30),
            _ => 0,
        };
        let ends = self.stage != Stage::Prove;
        // Half of the connections last.
        let lasts = talk.call.is_multiple_of(2) && !self.random.one_in(40);
        let stays = lasts && self.stage == Stage::Storm;
        match (talk.step, self.stage) {
            (Step::Asked, Stage::Storm) if roll < 10 => self.accept(host, conn),
            (Step::Asked, Stage::Prove) if plan == Some(Plan::Accept) => self.accept(host, conn),
            (Step::Asked | Step::Replied, Stage::Storm) if roll == 29 => {
                self.forget_talk(host, conn)
            }
            (Step::Replied, Stage::Storm) if roll < 15 => self.establish(host, conn),
            (Step::Replied, Stage::Prove) => self.establish(host, conn),
            (Step::Asked | Step::Replied, Stage::Storm) if roll > 26 => self.reject(host, conn),
            (Step::Asked | Step::Replied, Stage::Heal | Stage::End | Stage::Prove) => {
                self.reject(host, conn)
            }
            (Step::Established, _) if stays => Ok(()),
            (Step::Accepted | Step::Established, Stage::Storm) if roll == 29 => {
                self.forget_talk(host, conn)
            }
            (Step::Accepted, Stage::Storm) if roll > 0 => Ok(()),
            (Step::Established | Step::Accepted, _) if roll < 2 && ends => {
                self.disconnect(host, conn)
            }
            (Step::Asking, Stage::Storm) if roll == 29 => self.forget_talk(host, conn),
            _ => Ok(()),
        }
    }

    /// A connection that is over cannot be accepted, established or ended.
    fn call_too_late(&mut self, host: usize, conn: ConnId) -> Verdict {
        if self.stage != Stage::Storm || !self.random.one_in(400) {
            return Ok(());
        }
        let (now, roll) = (Time(self.now), self.random.below(3));
        let side = side(Qpn::new(0x77), 0);
        let manager = self.manager(host)?;
        let found = match roll {
            0 => manager.accept(now, conn, &Accept { side, keep_alive: None, private: &[] }),
            1 => manager.establish(conn, &[]),
            _ => manager.disconnect(now, conn, &[]),
        };
        if found != Err(CmError::Unknown) {
            return Err(format!("host {host}: {conn:?} is over, and a call says {found:?}"));
        }
        self.after_call(host)
    }

    fn accept(&mut self, host: usize, conn: ConnId) -> Verdict {
        let Some(qpn) = self.hosts[host].users.free_number(&mut self.random) else {
            return self.reject(host, conn);
        };
        let psn = self.random.of(&[0, 0xff_ffff, 0x65_4321]);
        self.accept_with(host, conn, side(qpn, psn))
    }

    pub(crate) fn accept_with(&mut self, host: usize, conn: ConnId, side: QpSide) -> Verdict {
        let (now, boot) = (self.now, self.hosts[host].users.boot);
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        let answers = &mut self.calls[talk.call].accepts;
        let private = words(talk.call, answers.len(), 196, &mut self.random);
        (talk.accept, talk.qpn) = (Some(answers.len()), side.qpn);
        (talk.step, talk.since) = (Step::Accepted, now);
        let guid = self.hosts[host].users.config.ca_guid;
        answers.push(Accepted { guid, boot, conn, side, private: private.clone() });
        let accepted = self.manager(host)?.accept(
            Time(now),
            conn,
            &Accept { side, keep_alive: None, private: &private },
        );
        accepted.map_err(|error| format!("host {host} cannot accept {conn:?}: {error}"))?;
        self.after_call(host)
    }

    pub(crate) fn establish(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.step, talk.since) = (Step::Established, now);
        let established = self.manager(host)?.establish(conn, b"go on");
        established.map_err(|error| format!("host {host} cannot establish {conn:?}: {error}"))?;
        self.after_call(host)
    }

    pub(crate) fn reject(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.given_up, talk.over_at) = (true, now);
        let private = words(talk.call, 0, 148, &mut self.random);
        let reason = RejReason::CONSUMER;
        self.calls[talk.call].refusals[usize::from(talk.active)].push((reason, private.clone()));
        let rejected = self.manager(host)?.reject(conn, reason, &private);
        rejected.map_err(|error| format!("host {host} cannot reject {conn:?}: {error}"))?;
        self.after_call(host)
    }

    pub(crate) fn forget_talk(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.given_up, talk.over_at) = (true, now);
        let refusals = &mut self.calls[talk.call].refusals;
        match talk.step {
            Step::Asking => refusals[1].push((RejReason::TIMEOUT, Vec::new())),
            Step::Asked | Step::Replied => {
                refusals[usize::from(talk.active)].push((RejReason::CONSUMER, Vec::new()));
            }
            Step::Accepted | Step::Established => {}
        }
        self.manager(host)?.forget(Time(now), conn);
        self.after_call(host)
    }

    pub(crate) fn disconnect(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.leaving, talk.over_at) = (true, now);
        let ended = self.manager(host)?.disconnect(Time(now), conn, b"farewell");
        ended.map_err(|error| format!("host {host} cannot end {conn:?}: {error}"))?;
        self.after_call(host)
    }

    pub(crate) fn manager(&mut self, host: usize) -> Result<&mut ConnectionManager, String> {
        let engine = self.hosts[host].engine.as_mut().ok_or("the host is down")?;
        engine.cm().ok_or_else(|| "the connection manager was not started".into())
    }

    /// After a call of the connection manager.
    fn after_call(&mut self, host: usize) -> Verdict {
        self.tally.steps += 1;
        self.settle(host, None)?;
        self.plan_transmit(host);
        Ok(())
    }
}

/// The attributes of a queue pair that does not really exist.
fn side(qpn: Qpn, psn: u32) -> QpSide {
    let side = QpSide::new(qpn, Psn::new(psn));
    QpSide { responder_resources: 3, initiator_depth: 5, rnr_retry: 6, ..side }
}

impl World<'_> {
    /// Whether no connection of a queue pair that does not really exist is left, and each port has
    /// a listener with room.
    pub(crate) fn no_call_is_open(&self) -> bool {
        self.hosts.iter().enumerate().all(|(at, host)| {
            let ample = |it: &Option<Listening>| it.is_some_and(|it| it.backlog == AMPLE);
            let managed = |talk: &Talk| self.calls[talk.call].end.is_some() && !talk.is_over();
            let listens = !self.has_manager(at) || host.users.listening.iter().all(ample);
            host.users.talks.values().all(managed) && listens
        }) && self.managed_are_open()
    }

    /// Whether each call of the proof had its planned result.
    pub(crate) fn calls_are_proven(&self) -> bool {
        let proven = |call: &Call| {
            let here = self.hosts[call.from].users.talks.get(&call.conn);
            let far = here.and_then(|talk| self.counterpart(call.from, talk));
            match call.plan {
                Some(Plan::Accept) => {
                    let open = |talk: &Talk| talk.step == Step::Established;
                    here.is_some_and(open) && far.is_some_and(open)
                }
                Some(Plan::Reject) => call.refused == Some(RejReason::CONSUMER),
                Some(Plan::Nobody) => call.refused == Some(RejReason::INVALID_SERVICE_ID),
                None => true,
            }
        };
        let hosts = (0..self.hosts.len()).filter(|host| self.has_manager(*host));
        { hosts }.all(|host| !self.hosts[host].users.proof.is_empty())
            && self.calls.iter().all(proven)
    }

    /// Whether no connection and no listener is left.
    pub(crate) fn all_is_released(&mut self) -> bool {
        let idle = |it: &Option<Listening>| it.is_none();
        self.hosts
            .iter()
            .all(|host| host.users.talks.is_empty() && host.users.listening.iter().all(idle))
    }
}
