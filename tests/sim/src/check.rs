//! The invariants: each action of an engine is compared with the model at once.

use rocinante_stack::verbs::{CqId, Cqe, QpEvent, QpState, WcStatus};

use crate::memory::{Effect, Zone, owner};
use crate::model::{EndId, Phase};
use crate::network::Packet;
use crate::receives::Owner;
use crate::world::World;

/// `Ok` if all invariants hold; else the violation.
pub(crate) type Verdict = Result<(), String>;

/// The packet being handled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) packet: &'a Packet,
    pub(crate) harmed: bool,
    pub(crate) psn: u32,
    pub(crate) generation: u32,
    /// The end that it is addressed to.
    pub(crate) to: Option<EndId>,
}

impl<'a> Context<'a> {
    pub(crate) fn of(packet: &'a Packet) -> Self {
        let psn = packet
            .bytes
            .get(9..12)
            .map_or(0, |psn| u32::from(psn[0]) << 16 | u32::from(psn[1]) << 8 | u32::from(psn[2]));
        let (harmed, generation, to) = (packet.harmed, packet.generation, packet.end);
        Self { packet, harmed, psn, generation, to }
    }
}

impl World<'_> {
    /// Judges the effects of the last call of the engine of `host`.
    pub(crate) fn settle(&mut self, host: usize, context: Option<&Context<'_>>) -> Verdict {
        let ram = &mut self.hosts[host].ram;
        if let Some(wrong) = ram.wrong.get_mut().take() {
            return Err(wrong);
        }
        let effects = std::mem::take(&mut ram.effects);
        let bytes = std::mem::take(&mut ram.bytes);
        if let Some(context) = context
            && context.harmed
            && !effects.is_empty()
        {
            return Err(format!("a damaged or misrouted packet had effects: {effects:?}"));
        }
        for effect in &effects {
            self.judge(host, effect, &bytes, context)?;
        }
        let ram = &mut self.hosts[host].ram;
        (ram.effects, ram.bytes) = (effects, bytes);
        ram.effects.clear();
        ram.bytes.clear();
        self.events(host)?;
        self.poll_cm(host)?;
        self.weigh(host)?;
        self.look(host)
    }

    fn judge(
        &mut self,
        host: usize,
        effect: &Effect,
        bytes: &[u8],
        context: Option<&Context<'_>>,
    ) -> Verdict {
        match *effect {
            Effect::Place { len: 0, .. } => Ok(()),
            Effect::Place { at, from, len } => {
                let (owner, zone) = self.owner(host, at, len as u64)?;
                let end = match (owner, context.and_then(|context| context.to)) {
                    (Owner::End(end), _) => end,
                    (Owner::Shared(at), Some(end)) if self.ends[end].srq == Some(at) => end,
                    (Owner::Shared(_), to) => {
                        return Err(format!("{to:?} filled a receive of another's queue"));
                    }
                };
                let bytes = &bytes[from..from + len];
                self.tally.digest.add(at ^ (len as u64) << 40);
                match zone {
                    Zone::Local => self.answered(end, at, bytes),
                    Zone::Receive if self.is_datagram(end) => {
                        self.delivered(end, at, bytes, context)
                    }
                    Zone::Receive => self.filled(end, at, bytes, context),
                    Zone::Window => self.written(end, at, bytes, context),
                    Zone::Constant | Zone::Words => Err(format!("{zone:?} was written")),
                }
            }
            Effect::Atomic { at, op, found } => match self.owner(host, at, 8)? {
                (Owner::End(end), Zone::Words) => self.calculated(end, at, op, found),
                (_, zone) => Err(format!("an atomic in {zone:?}")),
            },
            Effect::Complete(cq, cqe) => self.completed(host, cq, &cqe, context),
            Effect::SendRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                let stream = self.ends[end].current().ok_or("retired nothing that is known")?;
                stream.retired += u64::from(count);
                self.retire(end)
            }
            Effect::RecvRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                if self.ends[end].srq.is_some() {
                    return Err(format!("end {end}: {count} receives retired that are shared"));
                }
                self.ends[end].receives_retired += u64::from(count);
                self.ends[end].touched = true;
                Ok(())
            }
        }
    }

    fn end_of(&self, cookie: u32) -> Result<EndId, String> {
        usize::try_from(cookie)
            .ok()
            .filter(|end| *end < self.ends.len())
            .ok_or_else(|| format!("the cookie {cookie} has no owner"))
    }

    fn owner(&self, host: usize, at: u64, len: u64) -> Result<(Owner, Zone), String> {
        let (index, zone, _) = owner(at, len).ok_or_else(|| format!("{at:#x} has no owner"))?;
        let host = &self.hosts[host];
        let end = host.ends.get(index).copied().map(Owner::End);
        let shared = || host.srqs.iter().position(|srq| srq.index == index).map(Owner::Shared);
        end.or_else(shared).map(|owner| (owner, zone)).ok_or_else(|| "no owner".into())
    }

    fn completed(
        &mut self,
        host: usize,
        cq: CqId,
        cqe: &Cqe,
        context: Option<&Context<'_>>,
    ) -> Verdict {
        self.tally.completions += 1;
        self.tally
            .digest
            .add(cqe.wr_id ^ (cqe.status as u64) << 56 ^ u64::from(cqe.byte_len) << 32);
        let end = self.hosts[host]
            .ends
            .iter()
            .copied()
            .find(|end| self.ends[*end].qpn == Some(cqe.qpn))
            .ok_or_else(|| format!("a completion of {} which is not there", cqe.qpn))?;
        self.ends[end].touched = true;
        if self.trace {
            eprintln!("{:>12} end {end}: {cqe:?}", self.now);
        }
        let receives = cqe.wr_id >> RECEIVE & 1 == 1;
        if cq != queue_of(end, receives) {
            return Err(format!("end {end}: {cqe:?} in another's completion queue, {cq:?}"));
        }
        if receives { self.received(end, cqe, context) } else { self.sent(end, cqe) }
    }

    /// Asynchronous events.
    fn events(&mut self, host: usize) -> Verdict {
        loop {
            let Some(engine) = &mut self.hosts[host].engine else { return Ok(()) };
            let Some((qpn, event)) = engine.poll_event() else {
                return self.limit_events(host);
            };
            let of = |end: &&EndId| self.ends[**end].qpn == Some(qpn);
            let Some(end) = self.hosts[host].ends.iter().find(of).copied() else {
                return Err(format!("{event:?} of {qpn}, which is not there"));
            };
            self.ends[end].touched = true;
            self.tally.digest.add(event as u64 + 77);
            match event {
                QpEvent::AccessErr => self.refused(end, WcStatus::RemAccessErr)?,
                QpEvent::ReqErr => self.refused(end, WcStatus::RemInvReqErr)?,
                QpEvent::LastWqeReached
                    if self.ends[end].srq.is_some() && !self.ends[end].last_reached =>
                {
                    self.ends[end].last_reached = true;
                }
                QpEvent::Fatal if self.ends[end].overrun => self.ends[end].overrun = false,
                QpEvent::Fatal | QpEvent::LastWqeReached => {
                    return Err(format!("end {end}: {event:?} for no reason"));
                }
                QpEvent::CommEst | QpEvent::SqDrained => {}
                other => return Err(format!("end {end}: {other:?} is new")),
            }
        }
    }

    /// Checks the queue pairs that were touched.
    fn look(&mut self, host: usize) -> Verdict {
        for at in 0..self.hosts[host].ends.len() {
            let end = self.hosts[host].ends[at];
            if std::mem::take(&mut self.ends[end].touched) {
                self.look_at(host, end)?;
            }
        }
        Ok(())
    }

    fn look_at(&mut self, host: usize, end: EndId) -> Verdict {
        let Some(engine) = &self.hosts[host].engine else { return Ok(()) };
        let this = &mut self.ends[end];
        if let Some(stream) = this.stream(this.generation)
            && stream.retired != stream.popped
        {
            return Err(format!(
                "end {end}: {} requests retired, {} completed",
                stream.retired, stream.popped
            ));
        }
        if this.receives_retired != this.receives_popped {
            return Err(format!("end {end}: the count of retired receives is wrong"));
        }
        let Some((state, ..)) = this.qpn.and_then(|qpn| engine.query_qp(qpn)) else {
            return Ok(());
        };
        if this.overrun || (this.last_reached && state != QpState::Err) {
            return Err(format!("end {end} is {state}, and its events say something else"));
        }
        if !matches!(state, QpState::Err | QpState::Sqe) {
            return Ok(());
        }
        if state == QpState::Err && this.srq.is_some() && !this.last_reached {
            return Err(format!("end {end} broke, and did not say that it takes no more receives"));
        }
        if this.outstanding() > 0 || (state == QpState::Err && this.receives_held() > 0) {
            return Err(format!(
                "end {end} is {state}, but {} requests and {} receives are not flushed",
                this.outstanding(),
                this.receives_held()
            ));
        }
        let Some(reason) = this.reason else {
            return Err(format!("end {end} broke for no reason"));
        };
        if state == QpState::Sqe {
            this.stopped = true;
        } else if this.phase == Phase::Ready {
            this.phase = Phase::Broken;
            *self.tally.ended.entry(reason.name()).or_default() += 1;
            self.rejoin(end);
        }
        Ok(())
    }
}

/// The completion queue in which an end's requests, or its receives, complete.
pub(crate) const fn queue_of(end: EndId, receives: bool) -> CqId {
    CqId((end as u32 >> 1 & 1) << 1 | receives as u32)
}

/// The bit of `wr_id` that distinguishes receives from sends.
pub(crate) const RECEIVE: u32 = 63;
