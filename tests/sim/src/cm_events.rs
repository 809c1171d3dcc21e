//! The invariants of connections: the meaning of each event of a connection manager, and whether it
//! may come.

use rocinante_stack::cm::{CmEvent, ConnId, Ended, QpSide, Reply, Request};
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::cm::{RejReason, code_to_ns};

use crate::check::Verdict;
use crate::talk::{Notice, Step, Talk, carries, read_words, service};
use crate::world::{Stage, World};

/// Bytes of private data in a request, a reply and a rejection.
const REQUEST: usize = 56;
const REPLY: usize = 196;
const REJECTION: usize = 148;

impl World<'_> {
    /// Judges the events of the connection manager of `host`.
    pub(crate) fn poll_cm(&mut self, host: usize) -> Verdict {
        if !self.has_manager(host) {
            return Ok(());
        }
        loop {
            let event = match &mut self.hosts[host].engine {
                Some(engine) => engine.cm().and_then(|cm| cm.poll_event()),
                None => return Ok(()),
            };
            let Some(event) = event else { break };
            if self.trace {
                eprintln!("{:>12} host {host}: {event:?}", self.now);
            }
            self.tally.digest.add(self.now ^ 0xc0);
            self.on_cm_event(host, event).map_err(|why| format!("host {host}: {why}"))?;
        }
        let (known, talks) = (self.manager(host)?.len(), self.hosts[host].users.talks.len());
        if known != talks {
            return Err(format!(
                "host {host} has {known} connections, and its programs know {talks}"
            ));
        }
        Ok(())
    }

    fn on_cm_event(&mut self, host: usize, event: CmEvent) -> Verdict {
        match event {
            CmEvent::Request { listener, conn, request } => {
                let here = &self.hosts[host].users.listening;
                if !here.iter().flatten().any(|listening| listening.id == listener) {
                    return Err("a request for a service without a listener".into());
                }
                let mut talk = self.requested(host, &request)?;
                talk.listener = Some(listener);
                let notice = Notice::Request(talk.call);
                let users = &mut self.hosts[host].users;
                users.notices.push((conn, notice));
                match users.talks.insert(conn, talk) {
                    None => Ok(()),
                    Some(_) => Err(format!("two connections are {conn:?}")),
                }
            }
            CmEvent::Replied { conn, reply } => {
                self.replied(host, conn, &reply)?;
                self.note(host, conn, Notice::Replied)
            }
            CmEvent::Established { conn } => {
                self.established(host, conn)?;
                self.note(host, conn, Notice::Established)
            }
            CmEvent::Rejected { conn, reason, private } => {
                self.rejected(host, conn, reason, &private)?;
                self.over(host, conn)
            }
            CmEvent::TimedOut { conn } => {
                self.timed_out(host, conn)?;
                self.over(host, conn)
            }
            CmEvent::Disconnected { conn, ended } => {
                self.disconnected(host, conn, &ended)?;
                self.over(host, conn)
            }
            CmEvent::Released { conn, qpn } => self.released(host, conn, qpn),
            other => Err(format!("{other:?}, which was not requested")),
        }
    }

    fn talk(&self, host: usize, conn: ConnId) -> Result<&Talk, String> {
        let talk = self.hosts[host].users.talks.get(&conn);
        talk.ok_or_else(|| format!("an event of {conn:?}, which is not there"))
    }

    fn note(&mut self, host: usize, conn: ConnId, notice: Notice) -> Verdict {
        self.hosts[host].users.notices.push((conn, notice));
        Ok(())
    }

    /// The one event that ends a connection.
    fn over(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        if talk.ended || talk.given_up {
            return Err(format!("{conn:?} ends twice: {talk:?}"));
        }
        (talk.ended, talk.over_at) = (true, now);
        if self.calls[talk.call].end.is_some() {
            let farewell = (conn, talk.call, talk.active);
            self.hosts[host].users.farewells.push(farewell);
        }
        self.note(host, conn, Notice::Ended)
    }

    /// A peer's request: it must be that of its program.
    fn requested(&mut self, host: usize, request: &Request) -> Result<Talk, String> {
        let (id, _) = read_words(&request.private).ok_or("a request without words")?;
        let call = self.calls.get(id).ok_or("a request that was not made")?;
        let (local, remote) = (self.hosts[host].addr, self.hosts[call.from].addr);
        let right = (call.to, service(call.service)) == (host, request.service)
            && (request.local, request.peer) == (local, (remote, call.source_port).into())
            && request.side == call.side
            && (request.transport, request.mtu) == (call.transport, call.mtu)
            && (request.ack_timeout, request.retry_count) == (call.ack_timeout, call.retry_count)
            && request.traffic_class == 0;
        if !right || request.private.len() != REQUEST || !carries(&request.private, &call.private) {
            return Err(format!("{request:?} differs from the call: {call:?}"));
        }
        let mut talk = Talk::new(id, false, call.from, Step::Asked, self.now);
        (talk.far_qpn, talk.far_id) = (call.side.qpn, call.conn.0);
        talk.far_guid = call.guid;
        Ok(talk)
    }

    /// The peer accepts: the reply must have its program's words.
    fn replied(&mut self, host: usize, conn: ConnId, reply: &Reply) -> Verdict {
        let now = self.now;
        let talk = self.talk(host, conn)?;
        let (id, answer) = read_words(&reply.private).ok_or("a reply without words")?;
        let accepted = self.calls[talk.call].accepts.get(answer).filter(|_| id == talk.call);
        let accepted = accepted.ok_or("a reply that was not given")?;
        let side = QpSide { announced: reply.side.announced, ..accepted.side };
        let carried = reply.private.len() == REPLY && carries(&reply.private, &accepted.private);
        if talk.step != Step::Asking || talk.is_over() || reply.side != side || !carried {
            return Err(format!("{talk:?} is answered by {reply:?}, not {accepted:?}"));
        }
        let (far_id, far_guid) = (accepted.conn.0, accepted.guid);
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.step, talk.since, talk.accept) = (Step::Replied, now, Some(answer));
        (talk.far_qpn, talk.far_id, talk.far_guid) = (reply.side.qpn, far_id, far_guid);
        Ok(())
    }

    fn established(&mut self, host: usize, conn: ConnId) -> Verdict {
        let now = self.now;
        let talk = self.talk(host, conn)?;
        let far = self.counterpart(host, talk);
        let ready = far.is_none_or(|far| far.step == Step::Established);
        if talk.step != Step::Accepted || talk.is_over() || !ready {
            return Err(format!("{talk:?} is established, and its peer is {far:?}"));
        }
        let Some(talk) = self.hosts[host].users.talks.get_mut(&conn) else { return Ok(()) };
        (talk.step, talk.since) = (Step::Established, now);
        Ok(())
    }

    fn rejected(
        &mut self,
        host: usize,
        conn: ConnId,
        reason: RejReason,
        private: &[u8],
    ) -> Verdict {
        let talk = self.talk(host, conn)?;
        if talk.step == Step::Established {
            return Err(format!("{talk:?} is rejected"));
        }
        if !self.was_refused(talk, reason, Some(private)) {
            let said = &self.calls[talk.call].refusals;
            return Err(format!(
                "{talk:?} is rejected with {reason:?} and {private:?}; said was {said:?}"
            ));
        }
        let (call, active) = (talk.call, talk.active);
        if active {
            self.calls[call].refused = Some(reason);
        }
        Ok(())
    }

    /// Whether the peer refused for this reason. Private data of `None` is unknown, and matches
    /// any.
    fn was_refused(&self, talk: &Talk, reason: RejReason, private: Option<&[u8]>) -> bool {
        let said = &self.calls[talk.call].refusals[usize::from(!talk.active)];
        said.iter().any(|(why, words)| {
            // A rejection by the manager itself has no words.
            let heard = private.is_none_or(|told| match told.len() {
                0 => words.is_empty(),
                len => len == REJECTION && carries(told, words),
            });
            *why == reason && heard
        })
    }

    /// A timeout, of the peer or of the program: checks that it is not too early.
    fn timed_out(&mut self, host: usize, conn: ConnId) -> Verdict {
        let users = &self.hosts[host].users;
        let talk = self.talk(host, conn)?;
        let (waited, call, active) = (self.now - talk.since, talk.call, talk.active);
        let due = match talk.step {
            Step::Asking | Step::Accepted => users.asks_for(),
            Step::Asked | Step::Replied => users.patience(),
            Step::Established => u64::MAX,
        };
        if waited < due || self.stage == Stage::Prove {
            return Err(format!("{talk:?} is said to have timed out after {waited} ns"));
        }
        // The peer gets this rejection.
        self.calls[call].refusals[usize::from(active)].push((RejReason::TIMEOUT, Vec::new()));
        Ok(())
    }

    fn disconnected(&mut self, host: usize, conn: ConnId, ended: &Ended) -> Verdict {
        let talk = self.talk(host, conn)?;
        let far = self.counterpart(host, talk);
        let peer_left = far.is_none_or(Talk::is_over);
        let waited = self.now - talk.over_at;
        let right = match *ended {
            Ended::ByUs => talk.leaving,
            Ended::Unanswered => {
                talk.leaving
                    && waited >= self.hosts[host].users.asks_for()
                    && self.stage != Stage::Prove
            }
            Ended::ByPeer => peer_left,
            // No manager here asks whether its peers are still there.
            Ended::Gone => false,
            Ended::Stale => peer_left || talk.mistaken,
            Ended::Rejected { reason, ref private } => {
                peer_left && self.was_refused(talk, reason, Some(private))
            }
        };
        if !right || matches!(talk.step, Step::Asking | Step::Asked) {
            return Err(format!("{talk:?} ends by {ended:?}, and its peer is {far:?}"));
        }
        Ok(())
    }

    /// The other side of a connection, if its host has not forgotten it.
    pub(crate) fn counterpart(&self, host: usize, talk: &Talk) -> Option<&Talk> {
        let call = &self.calls[talk.call];
        let users = &self.hosts[talk.peer].users;
        if talk.active {
            let accepted = &call.accepts[talk.accept?];
            return users.talks.get(&accepted.conn).filter(|_| users.boot == accepted.boot);
        }
        debug_assert_eq!(call.to, host);
        let far = users.talks.get(&call.conn).filter(|_| users.boot == call.boot)?;
        (far.accept.is_some() && far.accept == talk.accept).then_some(far)
    }

    /// The connection is forgotten, and its queue pair's number is free: checks that this is not
    /// too early.
    fn released(&mut self, host: usize, conn: ConnId, qpn: Qpn) -> Verdict {
        let talk = self.talk(host, conn)?;
        let timeout = self.calls[talk.call].ack_timeout.clamp(14, 22);
        let due = if talk.was_open() { 2 * code_to_ns(timeout) } else { 0 };
        let over = talk.given_up || talk.ended;
        if !over || self.now - talk.over_at < due || qpn != talk.qpn {
            return Err(format!("{qpn} is released too early, or is not the one of {talk:?}"));
        }
        if let Some(talk) = self.hosts[host].users.talks.remove(&conn) {
            self.release(host, &talk, qpn);
        }
        self.tally.released += 1;
        Ok(())
    }
}
