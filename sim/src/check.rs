//! The invariants: whatever an engine does is compared with what the model expects, at once.

use rocinante_stack::verbs::{Cqe, QpEvent, QpState, WcStatus};

use crate::memory::{Effect, Zone, owner};
use crate::model::{EndId, Phase};
use crate::network::Packet;
use crate::world::World;

/// Whether all is as it must be; or what is not.
pub(crate) type Verdict = Result<(), String>;

/// The packet that is being handled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    pub(crate) harmed: bool,
    pub(crate) psn: u32,
    pub(crate) generation: u32,
}

impl Context {
    pub(crate) fn of(packet: &Packet) -> Self {
        let psn = packet
            .bytes
            .get(9..12)
            .map_or(0, |psn| u32::from(psn[0]) << 16 | u32::from(psn[1]) << 8 | u32::from(psn[2]));
        Self { harmed: packet.harmed, psn, generation: packet.generation }
    }
}

impl World<'_> {
    /// Judges what the engine of `host` did in the call that just returned.
    pub(crate) fn settle(&mut self, host: usize, context: Option<&Context>) -> Verdict {
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
        self.look(host)
    }

    fn judge(
        &mut self,
        host: usize,
        effect: &Effect,
        bytes: &[u8],
        context: Option<&Context>,
    ) -> Verdict {
        match *effect {
            Effect::Place { len: 0, .. } => Ok(()),
            Effect::Place { at, from, len } => {
                let (end, zone) = self.owner(host, at, len as u64)?;
                let bytes = &bytes[from..from + len];
                self.tally.digest.add(at ^ (len as u64) << 40);
                match zone {
                    Zone::Local => self.answered(end, at, bytes),
                    Zone::Receive => self.filled(end, at, bytes, context),
                    Zone::Window => self.written(end, at, bytes, context),
                    Zone::Constant | Zone::Words => Err(format!("{zone:?} was written")),
                }
            }
            Effect::Atomic { at, op, found } => {
                let (end, zone) = self.owner(host, at, 8)?;
                if zone != Zone::Words {
                    return Err(format!("an atomic in {zone:?}"));
                }
                self.calculated(end, at, op, found)
            }
            Effect::Complete(cqe) => self.completed(host, &cqe, context),
            Effect::SendRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                let stream = self.ends[end].current().ok_or("retired nothing that is known")?;
                stream.retired += u64::from(count);
                self.retire(end)
            }
            Effect::RecvRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                self.ends[end].receives_retired += u64::from(count);
                self.ends[end].touched = true;
                Ok(())
            }
        }
    }

    fn end_of(&self, cookie: u64) -> Result<EndId, String> {
        usize::try_from(cookie)
            .ok()
            .filter(|end| *end < self.ends.len())
            .ok_or_else(|| format!("the cookie {cookie} is nobody's"))
    }

    fn owner(&self, host: usize, at: u64, len: u64) -> Result<(EndId, Zone), String> {
        let (index, zone, _) = owner(at, len).ok_or_else(|| format!("{at:#x} is nobody's"))?;
        self.hosts[host].ends.get(index).map(|end| (*end, zone)).ok_or_else(|| "nobody's".into())
    }

    fn completed(&mut self, host: usize, cqe: &Cqe, context: Option<&Context>) -> Verdict {
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
        if cqe.wr_id >> RECEIVE & 1 == 1 {
            self.received(end, cqe, context)
        } else {
            self.sent(end, cqe)
        }
    }

    /// Asynchronous events.
    fn events(&mut self, host: usize) -> Verdict {
        loop {
            let Some(engine) = &mut self.hosts[host].engine else { return Ok(()) };
            let Some((qpn, event)) = engine.poll_event() else { return Ok(()) };
            let of = |end: &&EndId| self.ends[**end].qpn == Some(qpn);
            let Some(end) = self.hosts[host].ends.iter().find(of).copied() else {
                return Err(format!("{event:?} of {qpn}, which is not there"));
            };
            self.ends[end].touched = true;
            self.tally.digest.add(event as u64 + 77);
            match event {
                QpEvent::AccessErr => self.refused(end, WcStatus::RemAccessErr)?,
                QpEvent::ReqErr => self.refused(end, WcStatus::RemInvReqErr)?,
                QpEvent::Fatal | QpEvent::LastWqeReached => {
                    return Err(format!("end {end}: {event:?} for no reason"));
                }
                QpEvent::CommEst | QpEvent::SqDrained => {}
            }
        }
    }

    /// Looks at the queue pairs that something happened to.
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
        if !matches!(state, QpState::Err | QpState::Sqe) {
            return Ok(());
        }
        if this.outstanding() > 0 || (state == QpState::Err && !this.receives.is_empty()) {
            return Err(format!(
                "end {end} is {state}, but {} requests and {} receives are not flushed",
                this.outstanding(),
                this.receives.len()
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

/// The bit of `wr_id` by which receives are told from sends.
pub(crate) const RECEIVE: u32 = 63;
