//! Connections of real queue pairs by the connection manager. The queue pairs' numbers are those
//! that it carried, and wait until it releases them.

use rocinante_stack::cm::{ConnId, QpSide};
use rocinante_stack::types::{Psn, Qpn};
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::cm::{CommId, Transport};

use crate::check::Verdict;
use crate::model::{Connection, EndId, Phase, peer};
use crate::talk::{Call, CallId, SERVICES, Step, Talk, words};
use crate::world::{Stage, World};

impl World<'_> {
    pub(crate) fn is_managed(&self, end: EndId) -> bool {
        self.connections[end / 2].managed
    }

    /// An end requests the next life of its connection from the other end.
    pub(crate) fn dial(&mut self, end: EndId) -> Verdict {
        self.hang_up(end)?;
        self.enlist(end)?;
        let (host, to) = (self.ends[end].host, self.ends[peer(end)].host);
        let Connection { generation, terms, .. } = self.connections[end / 2];
        let (id, side) = (self.calls.len(), self.side(end));
        let call = Call {
            from: host,
            boot: self.hosts[host].users.boot,
            to,
            conn: ConnId(CommId(0)),
            guid: self.hosts[host].users.config.ca_guid,
            service: self.random.index(SERVICES),
            side,
            transport: Transport::Rc,
            mtu: terms.mtu,
            ack_timeout: terms.timeout,
            retry_count: terms.retry_cnt,
            source_port: 0,
            private: words(id, 0, 56, &mut self.random),
            plan: None,
            end: Some((end, generation)),
            accepts: Vec::new(),
            refusals: Default::default(),
            refused: None,
        };
        if !self.ask(call)? {
            self.dial_again(end);
            return Ok(());
        }
        self.ends[end].conn = Some(self.calls[id].conn);
        self.keep(end, None)
    }

    /// The call of `end` failed.
    fn dial_again(&mut self, end: EndId) {
        self.ends[end].conn = None;
        self.connections[end / 2].rejoining = false;
        self.rejoin(end);
    }

    /// Gives up the connection of an end.
    fn hang_up(&mut self, end: EndId) -> Verdict {
        let host = self.ends[end].host;
        let Some(conn) = self.ends[end].conn.take() else { return Ok(()) };
        let Some(talk) = self.hosts[host].users.talks.get(&conn) else { return Ok(()) };
        match talk.step {
            _ if talk.is_over() => Ok(()),
            Step::Accepted | Step::Established if self.random.one_in(2) => {
                self.disconnect(host, conn)
            }
            _ => self.forget_talk(host, conn),
        }
    }

    /// Makes the queue pair of an end for the present life, with a number that no connection uses.
    fn enlist(&mut self, end: EndId) -> Verdict {
        let host = self.ends[end].host;
        self.leave(end)?;
        self.enter(end);
        let qpn = self.create(end)?;
        if self.hosts[host].users.talks.values().any(|talk| talk.qpn == qpn) {
            return Err(format!("end {end} has the number {qpn}, which is not released"));
        }
        self.ends[end].low = qpn.value() & 0xffff;
        self.ends[end].qpn = Some(qpn);
        self.settle(host, None)
    }

    /// The peer's view of the queue pair of `end`.
    fn side(&self, end: EndId) -> QpSide {
        let terms = &self.connections[end / 2].terms;
        QpSide {
            qpn: self.ends[end].qpn.unwrap_or_default(),
            psn: Psn::new(terms.psn[peer(end) % 2]),
            responder_resources: terms.rd_atomic,
            initiator_depth: terms.rd_atomic,
            rnr_retry: terms.rnr_retry,
            flow_control: true,
            srq: self.ends[end].srq.is_some(),
            announced: None,
        }
    }

    /// Keeps the number of a queue pair until its connection is released. `awaited_by` is the
    /// connection that the first message to that number establishes.
    fn keep(&mut self, end: EndId, awaited_by: Option<ConnId>) -> Verdict {
        let host = self.ends[end].host;
        let (Some(engine), Some(qpn)) = (&mut self.hosts[host].engine, self.ends[end].qpn) else {
            return Ok(());
        };
        engine.reserve_qpn(qpn);
        if let Some(conn) = awaited_by {
            engine.await_message(qpn, conn);
        }
        self.settle(host, None)
    }

    /// A connection is forgotten: its queue pair's number may be used again.
    pub(crate) fn release(&mut self, host: usize, talk: &Talk, qpn: Qpn) {
        if self.calls[talk.call].end.is_some()
            && let Some(engine) = &mut self.hosts[host].engine
        {
            engine.release_qpn(qpn);
        }
    }

    /// The program looks at a connection of a real queue pair: of the end `caller`, or of its peer.
    pub(crate) fn consider_managed(
        &mut self,
        host: usize,
        conn: ConnId,
        (caller, generation): (EndId, u32),
    ) -> Verdict {
        let Some(talk) = self.hosts[host].users.talks.get(&conn) else { return Ok(()) };
        let end = if talk.active { caller } else { peer(caller) };
        let (step, far_qpn) = (talk.step, talk.far_qpn);
        if talk.is_over() {
            return Ok(());
        }
        let current = self.connections[end / 2].generation == generation;
        let own = self.ends[end].conn == Some(conn);
        let slow = self.stage == Stage::Storm && self.random.one_in(3);
        match step {
            _ if self.stage == Stage::End || !current => self.leave_talk(host, conn),
            Step::Asked if self.ends[end].generation == generation => self.reject(host, conn),
            Step::Asked | Step::Replied | Step::Asking if slow => Ok(()),
            Step::Asked => {
                self.hang_up(end)?;
                self.enlist(end)?;
                self.bring_up(end, far_qpn.value())?;
                self.joined(end, true);
                self.ends[end].conn = Some(conn);
                self.accept_with(host, conn, self.side(end))?;
                self.keep(end, Some(conn))
            }
            // Its queue pair broke or was destroyed before it was connected.
            Step::Replied if own && self.is_spoilt(end) => {
                self.hang_up(end)?;
                self.dial_again(end);
                Ok(())
            }
            Step::Replied if own => {
                self.bring_up(end, far_qpn.value())?;
                self.joined(end, false);
                self.establish(host, conn)
            }
            Step::Asking => Ok(()),
            _ if !own => self.leave_talk(host, conn),
            // Its queue pair broke or was destroyed.
            _ if self.ends[end].phase != Phase::Ready => self.hang_up(end),
            _ => Ok(()),
        }
    }

    fn leave_talk(&mut self, host: usize, conn: ConnId) -> Verdict {
        match self.hosts[host].users.talks.get(&conn).map(|talk| talk.step) {
            Some(Step::Asked | Step::Replied) => self.reject(host, conn),
            Some(Step::Accepted | Step::Established) => self.disconnect(host, conn),
            Some(Step::Asking) => self.forget_talk(host, conn),
            None => Ok(()),
        }
    }

    /// The program of a queue pair sees that its connection has ended.
    pub(crate) fn notice(&mut self, conn: ConnId, call: CallId, active: bool) -> Verdict {
        let Some((caller, generation)) = self.calls[call].end else { return Ok(()) };
        let end = if active { caller } else { peer(caller) };
        if self.ends[end].conn != Some(conn) || self.stage == Stage::End {
            return Ok(());
        }
        self.ends[end].conn = None;
        if self.ends[end].phase == Phase::Ready {
            return self.fail(end);
        }
        if active && self.connections[end / 2].generation == generation {
            self.dial_again(end);
        } else {
            self.rejoin(end);
        }
        Ok(())
    }

    /// Whether an end waits for its connection with a queue pair that cannot be connected any more.
    fn is_spoilt(&self, end: EndId) -> bool {
        self.ends[end].reason.is_some() || self.ends[end].qpn.is_none()
    }

    /// Whether the program at `end` may send. With the connection manager, both sides must be
    /// ready.
    pub(crate) fn is_open(&self, end: EndId) -> bool {
        let this = &self.ends[end];
        let talks = &self.hosts[this.host].users.talks;
        let talk = this.conn.and_then(|conn| talks.get(&conn));
        !self.is_managed(end) || talk.is_some_and(|talk| talk.step == Step::Established)
    }

    /// Whether the connection manager has made all its connections, on both sides.
    pub(crate) fn managed_are_open(&self) -> bool {
        self.ends.iter().enumerate().all(|(at, end)| {
            let talks = &self.hosts[end.host].users.talks;
            let talk = end.conn.and_then(|conn| talks.get(&conn));
            let open = |talk: &Talk| talk.step == Step::Established && !talk.is_over();
            !self.is_managed(at) || talk.is_some_and(open)
        })
    }

    /// Whether the connection manager may make a connection of this kind.
    pub(crate) const fn can_be_managed(qp_type: QpType) -> bool {
        // An unreliable one would accept packets in flight from its number's last life.
        matches!(qp_type, QpType::Rc)
    }
}
