//! The work of programs: requests and receives of every kind, at random; now and then wrong ones.

use rocinante_stack::PostError;
use rocinante_stack::mem::{PdId, Sge};
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{Destination, QpType, RecvWr, SendData, SendOp, SendWr, WcStatus};

use crate::check::{RECEIVE, Verdict};
use crate::memory::{DEPTH, LONGEST, Zone, stride};
use crate::model::{EndId, Op, Phase, Piece, Receive, Request, Stream, peer};
use crate::receives::Shared;
use crate::world::{Host, Stage, World};

/// Elements of a request, and bytes of inline data.
pub(crate) const SGES: u32 = 4;
pub(crate) const INLINE: u32 = 64;

/// The first address of an end's memory, as its keys name it: low, in the middle, and at the very
/// end of the 64-bit range.
pub(crate) fn base_of(end: EndId, arena: u64) -> u64 {
    match end % 3 {
        0 => 0x10_0000,
        1 => 0x7f12_3456_7000,
        _ => (u64::MAX - arena) & !4095,
    }
}

impl World<'_> {
    /// A turn of the program at `end`.
    pub(crate) fn work(&mut self, end: EndId) -> Verdict {
        let host = &self.hosts[self.ends[end].host];
        if host.stalled || host.engine.is_none() || self.ends[end].phase != Phase::Ready {
            return Ok(());
        }
        if self.stage == Stage::End {
            return Ok(());
        }
        if self.ends[end].stopped {
            return self.go_on(end);
        }
        if self.must_be_cleaned(end) {
            return self.fail(end);
        }
        self.register(end, Zone::Local);
        self.register(end, Zone::Receive);
        if self.stage != Stage::Storm || self.random.one_in(20) {
            Zone::ALL.into_iter().for_each(|zone| self.register(end, zone));
        }
        let binds = self.stage == Stage::Storm && self.random.one_in(30);
        if binds && self.has.policies.windows {
            self.bind_by_verb(end)?;
        }
        let at = self.ends[end].host;
        if self.stage == Stage::Heal
            && let Some(srq) = self.hosts[at].srqs.iter().position(Shared::is_spoilt)
        {
            return self.renew(at, srq);
        }
        if let Some(srq) = self.ends[end].srq
            && self.now >= self.ends[end].starved_until
        {
            self.tend(at, srq)?;
        }
        while self.ends[end].receives.len() < DEPTH as usize
            && self.ends[end].srq.is_none()
            && self.now >= self.ends[end].starved_until
            && !self.random.one_in(3)
        {
            self.post_receive(end)?;
        }
        while self.may_post(end) && !self.random.one_in(3) {
            if self.is_terse(end) && !self.answers(end) {
                break;
            }
            self.post(end)?;
        }
        let errs = self.stage == Stage::Storm && self.random.one_in(80);
        if errs && self.has.faults.garbage_call {
            self.call_wrongly(end)?;
        }
        Ok(())
    }

    /// Whether receives are posted that must fail: they would spoil the proof.
    fn must_be_cleaned(&self, end: EndId) -> bool {
        let this = &self.ends[end];
        let spoilt = this.receives.iter().chain(&this.taken).any(Receive::is_spoilt);
        self.stage == Stage::Heal && spoilt
    }

    /// Whether something has come since the program last posted; now and then it does not wait for
    /// that.
    fn answers(&mut self, end: EndId) -> bool {
        let far = &self.ends[peer(end)];
        let executed = far.stream(self.ends[end].generation).map_or(0, |stream| stream.exec);
        let notices = executed != core::mem::replace(&mut self.ends[end].answered, executed);
        notices || self.random.one_in(6)
    }

    fn may_post(&self, end: EndId) -> bool {
        let this = &self.ends[end];
        let Some(stream) = this.stream(this.generation) else { return false };
        let room = stream.outstanding() < DEPTH && self.is_open(end);
        match self.stage {
            Stage::Storm => room,
            Stage::Heal | Stage::End => false,
            Stage::Prove => {
                // Without a receive a requester may give up at once, and an unreliable connection
                // loses the message.
                let far = peer(end);
                let ready =
                    self.is_datagram(end) || self.receives_due(far) < self.receives_ready(far);
                room && stream.next() < stream.proof && ready
            }
        }
    }

    /// Receives available to `end`.
    pub(crate) fn receives_ready(&self, end: EndId) -> u64 {
        let this = &self.ends[end];
        let shared = this.srq.map(|srq| &self.hosts[this.host].srqs[srq].posted);
        shared.unwrap_or(&this.receives).len() as u64
    }

    /// Receives that messages in flight may take of those.
    pub(crate) fn receives_due(&self, end: EndId) -> u64 {
        let this = &self.ends[end];
        let shares = |other: &&EndId| {
            **other == end || (this.srq.is_some() && self.ends[**other].srq == this.srq)
        };
        let sharers = self.hosts[this.host].ends.iter().filter(shares);
        let due = sharers.map(|other| {
            let stream = self.ends[peer(*other)].stream(self.ends[*other].generation);
            let asked = stream.filter(|_| !self.is_datagram(*other));
            // Not the requests at the end of a stream that take no receive: the model does not see
            // when those are executed, and several streams may share a queue.
            let asked = asked.map_or(0, Stream::receives_due);
            asked + self.ends[*other].letters.coming
        });
        due.sum()
    }

    pub(crate) fn length(&mut self, end: EndId) -> u64 {
        let mtu = u64::from(self.ends[end].terms.mtu.bytes());
        match self.random.below(6) {
            0 => self.random.below(4),
            1 => mtu * self.random.below(4),
            2 => mtu * self.random.range(1, 4) - 1 + self.random.below(3),
            _ => self.random.below(LONGEST + 1),
        }
        .min(LONGEST)
    }

    /// One to four pieces that hold `len` bytes in the slot of `capacity` bytes at `at`, with holes
    /// between them.
    pub(crate) fn pieces(&mut self, at: u64, len: u64, capacity: u64) -> Vec<Piece> {
        let (mut list, mut left, mut spare) = (Vec::new(), len, capacity - len);
        let mut at = at;
        for _ in 0..self.random.below(u64::from(SGES)) {
            let part = self.random.below(left + 1);
            let hole = self.random.below(spare.min(64) + 1);
            list.push((at, part as u32));
            at += part + hole;
            left -= part;
            spare -= hole;
        }
        list.push((at, left as u32));
        list
    }

    /// A list for the engine, with the key of its zone.
    fn sges(&self, end: EndId, zone: Zone, list: &[Piece]) -> Vec<Sge> {
        let this = &self.ends[end];
        let base = base_of(end, self.hosts[this.host].ram.arena.len() as u64);
        let lkey = this.keys[zone as usize].unwrap_or_default();
        list.iter().map(|(at, len)| Sge { addr: base + at, len: *len, lkey }).collect()
    }

    fn post_receive(&mut self, end: EndId) -> Verdict {
        let garbage = self.stage == Stage::Storm && self.random.one_in(150);
        let garbage = garbage && self.has.faults.garbage_receive;
        let number = self.ends[end].receives_posted;
        let this = &mut self.ends[end];
        this.receives_posted += 1;
        let id = 1 << RECEIVE | u64::from(this.generation) << 32 | number & 0xffff_ffff;
        let slot = this.index as u64 * stride() + Zone::Receive.offset() + number % DEPTH * LONGEST;
        let short = garbage && self.random.one_in(2);
        let room = if short { self.random.below(LONGEST) } else { LONGEST };
        let list = self.pieces(slot, room, LONGEST);
        let mut sges = self.sges(end, Zone::Receive, &list);
        let bad = garbage && !short;
        if bad {
            let key = self.bad_key(end, Zone::Receive);
            sges.iter_mut().for_each(|sge| sge.lkey = key);
        }
        self.tally.faults.garbage_receive += u64::from(garbage);
        let receive = Receive { id, list, room: room as u32, bad, slot: 0 };
        let wr = RecvWr { wr_id: id, sges: &sges };
        self.tally.steps += 1;
        self.tally.ops += 1;
        let Some(qpn) = self.ends[end].qpn else { return Ok(()) };
        let host = self.ends[end].host;
        self.ends[end].receives.push_back(receive);
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        let posted = engine.post_recv(qpn, &wr, ram);
        if let Err(error) = posted {
            return Err(format!("end {end}: a receive cannot be posted: {error}"));
        }
        self.settle(host, None)?;
        self.plan_transmit(host);
        Ok(())
    }

    /// A key that must be refused in place of that of `zone`: unknown, stale, or of another domain.
    pub(crate) fn bad_key(&mut self, end: EndId, zone: Zone) -> Key {
        let right = self.ends[end].keys[zone as usize].unwrap_or_default();
        let (host, pd) = (self.ends[end].host, self.ends[end].pd);
        let stranger = self.hosts[host].ends.iter().find(|other| self.ends[**other].pd != pd);
        match (self.random.below(3), self.ends[end].stale, stranger) {
            (0, Some(stale), _) if self.hosts[host].ram.regions.get(stale).is_none() => stale,
            (1, _, Some(stranger)) => {
                self.ends[*stranger].keys[zone as usize].unwrap_or(Key(right.0 ^ 1))
            }
            _ => Key(right.0 ^ 1 << self.random.below(32)),
        }
    }

    /// Posts a random request.
    fn post(&mut self, end: EndId) -> Verdict {
        let garbage = self.stage == Stage::Storm && self.random.one_in(100);
        let draft = if self.is_datagram(end) { self.letter(end) } else { self.draft(end) };
        let Some(mut draft) = draft else { return Ok(()) };
        let local = garbage && self.random.one_in(3);
        if garbage && !local && self.has.faults.garbage_remote {
            self.spoil(end, &mut draft);
        }
        let local = local && self.has.faults.garbage_local;
        let this = &self.ends[end];
        let Some(stream) = this.stream(this.generation) else { return Ok(()) };
        let number = stream.next();
        let (first, generation) = (stream.packets, this.generation);
        let slot = this.index as u64 * stride() + Zone::Local.offset() + number % DEPTH * LONGEST;
        let result = draft.op.has_result();
        let list = self.pieces(slot, u64::from(draft.len), LONGEST);
        let mut sges = self.sges(end, Zone::Local, &list);
        let short = !result && draft.len <= INLINE && !local;
        let terse = self.is_terse(end) && matches!(draft.model, Op::Write { .. });
        let inline = short && (terse || self.random.one_in(2));
        if !result {
            self.store(end, &list, &draft.data);
        }
        if local && draft.len > 0 {
            let key = self.bad_key(end, Zone::Local);
            sges.iter_mut().for_each(|sge| sge.lkey = key);
            draft.bad = Some(WcStatus::LocProtErr);
            self.tally.faults.garbage_local += 1;
        }
        let last = self.ends[end].outstanding() + 1 == DEPTH;
        let usual = self.stage == Stage::Prove || !self.random.one_in(4);
        let signaled = last || if terse { self.random.one_in(8) } else { usual };
        let fence = self.ends[end].fence || self.random.one_in(8);
        if !draft.model.is_local() {
            self.ends[end].fence = matches!(draft.model, Op::Read { .. });
        }
        let id = u64::from(generation) << 32 | number;
        let solicited = self.random.one_in(3);
        let mtu = self.ends[end].terms.mtu.bytes();
        let request = Request {
            id,
            op: draft.model,
            opcode: draft.opcode(),
            len: draft.len,
            data: draft.data.clone(),
            list,
            signaled,
            solicited,
            first,
            packets: u64::from(draft.len.div_ceil(mtu).max(u32::from(!draft.model.is_local()))),
            bad: draft.bad,
            overruns: draft.overruns,
            through: draft.through,
            void: false,
            excuses: if draft.excused { vec![WcStatus::RemAccessErr] } else { Vec::new() },
            found: None,
            answered: 0,
        };
        let data = if inline { SendData::Inline(&draft.data) } else { SendData::Sges(&sges) };
        let mut wr = SendWr::new(draft.op, data).wr_id(id).signaled(signaled);
        wr.solicited = solicited;
        wr.fence = fence;
        if let Some(stream) = self.ends[end].current() {
            stream.push(request);
        }
        self.tally.ops += 1;
        self.hand_over(end, &wr)
    }

    fn hand_over(&mut self, end: EndId, wr: &SendWr<'_>) -> Verdict {
        self.tally.steps += 1;
        let Some(qpn) = self.ends[end].qpn else { return Ok(()) };
        let host = self.ends[end].host;
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        if self.trace {
            eprintln!("{:>12} end {end} posts {wr:?}", self.now);
        }
        if let Err(error) = engine.post_send(qpn, wr, ram) {
            return Err(format!("end {end}: {:?} cannot be posted: {error}", wr.op));
        }
        self.settle(host, None)?;
        self.plan_transmit(host);
        Ok(())
    }

    /// The program writes the bytes that it is about to send.
    fn store(&mut self, end: EndId, list: &[Piece], data: &[u8]) {
        let ram = &mut self.hosts[self.ends[end].host].ram;
        let mut data = data;
        for (at, len) in list {
            let (now, later) = data.split_at(*len as usize);
            ram.slice_mut(*at, u64::from(*len)).copy_from_slice(now);
            data = later;
        }
    }

    /// A call that must be refused, and must change nothing.
    fn call_wrongly(&mut self, end: EndId) -> Verdict {
        let (host, reliable) =
            (self.ends[end].host, self.connections[end / 2].qp_type == QpType::Rc);
        let Some(qpn) = self.ends[end].qpn else { return Ok(()) };
        let sge = Sge { addr: 0, len: 8, lkey: Key(0x1234_5600) };
        let many = [sge; SGES as usize + 1];
        let huge = [Sge { len: u32::MAX, ..sge }];
        let bytes = [0; INLINE as usize + 1];
        let datagrams = self.is_datagram(end);
        let send = SendOp::Send { imm: None };
        let read = SendOp::Read { remote: 0, rkey: sge.lkey };
        let odd = SendOp::FetchAdd { remote: 4, rkey: sge.lkey, add: 1 };
        let datagram = SendOp::SendTo { to: Destination::default(), imm: None };
        let nobody = Qpn::new(qpn.value() ^ 0x8000);
        let longer = [Sge { len: self.hosts[host].config.port_mtu.bytes() + 1, ..sge }];
        let (send, datagram) = if datagrams { (datagram, send) } else { (send, datagram) };
        let (qpn, op, data, expected) = match self.random.below(6) {
            0 => (qpn, send, SendData::Sges(&many), PostError::TooManySges),
            1 => (qpn, send, SendData::Inline(&bytes), PostError::InlineTooLong),
            2 => (qpn, send, SendData::Sges(&huge), PostError::TooLong),
            3 if reliable => (qpn, read, SendData::Inline(&bytes[..8]), PostError::InlineResponse),
            4 if reliable => (qpn, odd, SendData::Sges(&many[..1]), PostError::BadAtomic),
            3 if datagrams => (qpn, send, SendData::Sges(&longer), PostError::BeyondMtu),
            5 => (nobody, send, SendData::Sges(&many[..1]), PostError::UnknownQp),
            _ => (qpn, datagram, SendData::Sges(&many[..1]), PostError::Operation),
        };
        let expected = match expected {
            PostError::UnknownQp | PostError::Operation => expected,
            _ if self.ends[end].outstanding() >= DEPTH => PostError::Full,
            other => other,
        };
        let wr = SendWr::new(op, data);
        self.tally.steps += 1;
        self.tally.faults.garbage_call += 1;
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        let found = engine.post_send(qpn, &wr, ram);
        if found != Err(expected) {
            return Err(format!("end {end}: {op:?} was answered with {found:?}, not {expected:?}"));
        }
        self.settle(host, None)
    }

    pub(crate) fn domain(&self, end: EndId) -> PdId {
        PdId(self.ends[end].pd)
    }
}
