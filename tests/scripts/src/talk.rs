//! The vocabulary of scripts.

use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Psn};
use rocinante_stack::verbs::{QpState, SendOp, WcOpcode, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode, Packet, Place, Syndrome};

use crate::departures::Departure;
use crate::packet::{aeth, atomic_eth, packet, reth};
use crate::subject::{Completion, Options, Range, Remote, Step, Subject};
use crate::trace::describe_all;

/// Length of region 0. It has all rights, and requests use it by default.
pub const REGION: usize = 64 << 10;

/// The target address of a subject's own requests: memory of the script, which really has none.
pub const REMOTE: u64 = 0x9000;

/// How often a state is polled until it is reached.
const LOOKS: u32 = 10_000;

/// A script's talk with its subject. PSNs are relative to the first of their direction.
pub struct Talk<'a> {
    subject: &'a mut dyn Subject,
    options: Options,
    memory: Remote,
    /// The last packet that the script sent; it also holds the destination queue pair.
    last: Vec<u8>,
}

impl<'a> Talk<'a> {
    /// A talk with a subject that has no resources yet. Error: it cannot register memory.
    pub fn new(subject: &'a mut dyn Subject) -> Step<Self> {
        let memory = subject.register(REGION, Access::ALL, false)?;
        Ok(Self { subject, options: Options::default(), memory, last: vec![] })
    }

    /// Whether the subject is known to depart here as `_departure` says: then the script expects
    /// exactly that.
    pub(crate) fn departs(&self, _departure: &'static Departure) -> bool {
        self.subject.is_soft_roce()
    }

    /// A new connection for the next steps, with zeros in the first 8 KiB of region 0.
    pub(crate) fn begin(&mut self, options: Options) -> Step {
        self.options = options;
        self.subject.connect(&options)?;
        self.subject.store(0, 0, &[0; 8192])
    }

    // ---- the subject's program ----

    /// A range of region 0.
    pub(crate) fn at(offset: usize, len: usize) -> Range {
        Range { region: 0, offset, len }
    }

    pub(crate) fn post(&mut self, wr_id: u64, op: SendOp, ranges: &[Range]) -> Step {
        self.subject.post_send(wr_id, op, ranges, false)
    }

    pub(crate) fn post_fenced(&mut self, wr_id: u64, op: SendOp, ranges: &[Range]) -> Step {
        self.subject.post_send(wr_id, op, ranges, true)
    }

    /// Posts a SEND of the first bytes of region 0.
    pub(crate) fn send(&mut self, wr_id: u64, len: usize) -> Step {
        self.post(wr_id, SendOp::Send { imm: None }, &[Self::at(0, len)])
    }

    /// Posts a READ to the first bytes of region 0.
    pub(crate) fn read(&mut self, wr_id: u64, len: usize) -> Step {
        self.post(wr_id, SendOp::Read { remote: REMOTE, rkey: Key(0x99) }, &[Self::at(0, len)])
    }

    /// Posts a fetch-and-add of 1; its result goes to `offset`.
    pub(crate) fn add(&mut self, wr_id: u64, offset: usize) -> Step {
        let op = SendOp::FetchAdd { remote: REMOTE, rkey: Key(0x99), add: 1 };
        self.post(wr_id, op, &[Self::at(offset, 8)])
    }

    pub(crate) fn post_recv(&mut self, wr_id: u64, ranges: &[Range]) -> Step {
        self.subject.post_recv(wr_id, ranges)
    }

    pub(crate) fn store(&mut self, offset: usize, bytes: &[u8]) -> Step {
        self.subject.store(0, offset, bytes)
    }

    pub(crate) fn register(&mut self, len: usize, access: Access, foreign: bool) -> Step<Remote> {
        self.subject.register(len, access, foreign)
    }

    pub(crate) fn deregister(&mut self, region: usize) -> Step {
        self.subject.deregister(region)
    }

    pub(crate) fn modify(&mut self, state: QpState) -> Step {
        self.subject.modify(state)
    }

    /// Checks that region 0 has these bytes.
    pub(crate) fn holds(&mut self, offset: usize, bytes: &[u8]) -> Step {
        let found = self.subject.load(Self::at(offset, bytes.len()))?;
        match found.iter().zip(bytes).position(|(is, want)| is != want) {
            None => Ok(()),
            Some(at) => {
                let (is, want) = (found[at], bytes[at]);
                Err(format!("byte {} of its memory is {is:#x} instead of {want:#x}", offset + at))
            }
        }
    }

    /// Checks that these requests complete now, in this order, and no others.
    pub(crate) fn ends(&mut self, wanted: &[(u64, WcStatus)]) -> Step {
        for (wr_id, status) in wanted {
            self.ends_as(*wr_id, &[*status])?;
        }
        self.nothing_ends()
    }

    /// Checks that the next completion is that of `wr_id` and has one of these statuses.
    pub(crate) fn ends_as(&mut self, wr_id: u64, wanted: &[WcStatus]) -> Step {
        let Completion { wr_id: id, status, .. } = self.completion()?;
        if id == wr_id && wanted.iter().any(|wanted| wanted.name() == status) {
            return Ok(());
        }
        Err(format!("request {id} ended in {status}, instead of {wr_id} in {wanted:?}"))
    }

    /// Checks that these requests and receives complete with this status, in any order, and no
    /// others.
    pub(crate) fn ends_in_any_order(&mut self, wanted: &[u64], status: WcStatus) -> Step {
        let mut left = wanted.to_vec();
        while !left.is_empty() {
            let found = self.completion()?;
            let at = left.iter().position(|id| *id == found.wr_id && found.status == status.name());
            left.swap_remove(at.ok_or_else(|| format!("{found:?}, but not {left:?} in {status}"))?);
        }
        self.nothing_ends()
    }

    /// Checks that the receive `wr_id` completes, for a SEND or a WRITE with immediate.
    pub(crate) fn received(&mut self, wr_id: u64, len: u32, imm: Option<[u8; 4]>) -> Step {
        self.received_as(wr_id, WcOpcode::Recv, len, imm)
    }

    pub(crate) fn received_as(
        &mut self,
        wr_id: u64,
        opcode: WcOpcode,
        byte_len: u32,
        imm: Option<[u8; 4]>,
    ) -> Step {
        let status = WcStatus::Success.name().to_owned();
        let wanted = Completion { wr_id, status, opcode, byte_len, imm };
        let found = self.completion()?;
        if found == wanted { Ok(()) } else { Err(format!("{found:?} instead of {wanted:?}")) }
    }

    /// Whether a completion is there; if so, it must be this one.
    pub(crate) fn has_ended(&mut self, wr_id: u64, status: WcStatus) -> Step<bool> {
        match self.subject.completion(false)? {
            None => Ok(false),
            Some(found) if (found.wr_id, found.status.as_str()) == (wr_id, status.name()) => {
                Ok(true)
            }
            Some(found) => Err(format!("{found:?} instead of {wr_id} in {status}")),
        }
    }

    fn completion(&mut self) -> Step<Completion> {
        self.subject.completion(true)?.ok_or_else(|| "nothing completes".into())
    }

    /// Checks that no completion is there. The script must have seen a response to a later request,
    /// or know that nothing is in flight.
    pub(crate) fn nothing_ends(&mut self) -> Step {
        match self.subject.completion(false)? {
            None => Ok(()),
            Some(found) => Err(format!("{found:?}, though nothing should complete")),
        }
    }

    /// Checks that the queue pair is in this state, or soon will be: a NAK may leave before the
    /// state changes.
    pub(crate) fn becomes(&mut self, wanted: QpState) -> Step {
        let mut found = self.subject.state()?;
        for _ in 0..LOOKS {
            if found == wanted {
                return Ok(());
            }
            found = self.subject.state()?;
        }
        Err(format!("its state is {found:?} instead of {wanted:?}"))
    }

    // ---- packets from the script ----

    /// A RETH for region 0.
    pub(crate) fn reth(&self, offset: usize, len: u32) -> Vec<u8> {
        reth(self.memory.address + offset as u64, self.memory.rkey, len)
    }

    /// An AtomicETH for region 0.
    pub(crate) fn atomic_eth(&self, offset: usize, swap_add: u64, compare: u64) -> Vec<u8> {
        atomic_eth(self.memory.address + offset as u64, self.memory.rkey, swap_add, compare)
    }

    /// The address and key of region 0.
    pub(crate) fn memory(&self) -> Remote {
        self.memory
    }

    /// Sends a request with the headers behind the BTH and the payload. It has AckReq if it ends a
    /// message.
    pub(crate) fn ask(&mut self, opcode: Opcode, psn: i64, rest: &[&[u8]]) -> Step {
        let ends =
            opcode.info().is_some_and(|info| matches!(info.place, Place::Last | Place::Only));
        self.ask_with(opcode, psn, rest, ends)
    }

    /// As [`ask`](Self::ask), with or without AckReq.
    pub(crate) fn ask_with(
        &mut self,
        opcode: Opcode,
        psn: i64,
        rest: &[&[u8]],
        ack_req: bool,
    ) -> Step {
        let packet = self.packet(opcode, self.options.psn[1], psn, ack_req, rest);
        self.receive(packet)
    }

    /// Sends a WRITE of one packet to region 0.
    pub(crate) fn write(&mut self, psn: i64, offset: usize, bytes: &[u8]) -> Step {
        let header = self.reth(offset, bytes.len() as u32);
        self.ask(Opcode::RC_RDMA_WRITE_ONLY, psn, &[&header, bytes])
    }

    /// Sends a READ request for region 0.
    pub(crate) fn ask_read(&mut self, psn: i64, offset: usize, len: u32) -> Step {
        let header = self.reth(offset, len);
        self.ask(Opcode::RC_RDMA_READ_REQUEST, psn, &[&header])
    }

    /// Sends a fetch-and-add for region 0.
    pub(crate) fn ask_add(&mut self, psn: i64, offset: usize, add: u64) -> Step {
        let header = self.atomic_eth(offset, add, 0);
        self.ask(Opcode::RC_FETCH_ADD, psn, &[&header])
    }

    /// Sends an acknowledgement with this syndrome.
    pub(crate) fn answer(&mut self, psn: i64, syndrome: Syndrome) -> Step {
        self.respond(Opcode::RC_ACKNOWLEDGE, psn, &[&aeth(syndrome, 0)])
    }

    pub(crate) fn ack(&mut self, psn: i64) -> Step {
        self.answer(psn, Syndrome::ACK_UNLIMITED)
    }

    pub(crate) fn nak(&mut self, psn: i64, code: NakCode) -> Step {
        self.answer(psn, Syndrome::nak(code))
    }

    pub(crate) fn rnr(&mut self, psn: i64, timer: u8) -> Step {
        self.answer(psn, Syndrome::rnr(timer))
    }

    /// Sends a READ response.
    pub(crate) fn data(&mut self, opcode: Opcode, psn: i64, payload: &[u8]) -> Step {
        let middle = opcode == Opcode::RC_RDMA_READ_RESPONSE_MIDDLE;
        let header = if middle { vec![] } else { aeth(Syndrome::ACK_UNLIMITED, 0) };
        self.respond(opcode, psn, &[&header, payload])
    }

    /// Sends the response to an atomic.
    pub(crate) fn found(&mut self, psn: i64, found: u64) -> Step {
        let rest = [&aeth(Syndrome::ACK_UNLIMITED, 0)[..], &found.to_be_bytes()];
        self.respond(Opcode::RC_ATOMIC_ACKNOWLEDGE, psn, &rest)
    }

    pub(crate) fn respond(&mut self, opcode: Opcode, psn: i64, rest: &[&[u8]]) -> Step {
        let packet = self.packet(opcode, self.options.psn[0], psn, false, rest);
        self.receive(packet)
    }

    fn packet(&self, opcode: Opcode, first: u32, psn: i64, ack: bool, rest: &[&[u8]]) -> Vec<u8> {
        let psn = Psn::new((i64::from(first) + psn) as u32);
        packet(opcode, self.subject.qpn(), psn, ack, rest)
    }

    fn receive(&mut self, packet: Vec<u8>) -> Step {
        self.last.clone_from(&packet);
        self.subject.receive(packet, true)
    }

    /// Sends the last packet again, with its ICRC.
    pub(crate) fn once_more(&mut self) -> Step {
        self.subject.receive(self.last.clone(), true)
    }

    /// Sends an earlier packet again, perhaps for another connection of the same queue pair.
    pub(crate) fn replay(&mut self, packet: &[u8]) -> Step {
        self.subject.receive(packet.to_vec(), true)
    }

    /// Sends the last packet, changed. With `seal` it gets a new ICRC, otherwise it keeps the old
    /// one.
    pub(crate) fn changed(&mut self, change: impl FnOnce(&mut [u8]), seal: bool) -> Step {
        let mut packet = self.last.clone();
        change(&mut packet);
        self.subject.receive(packet, seal)
    }

    /// The last packet.
    pub(crate) fn last(&self) -> &[u8] {
        &self.last
    }

    // ---- packets from the subject ----

    /// Checks that the subject's next packets are these, in this order. Returns their payload,
    /// joined. A line without an MSN fits any MSN: it is not agreed whether a repeated response
    /// carries the first MSN or the latest.
    pub(crate) fn says(&mut self, wanted: &[&str]) -> Step<Vec<u8>> {
        let mut payload = Vec::new();
        for wanted in wanted {
            let (line, bytes) =
                self.next(true)?.ok_or_else(|| format!("nothing comes instead of {wanted:?}"))?;
            if !fits(&line, wanted) {
                return Err(format!("{line:?} instead of {wanted:?}"));
            }
            payload.extend_from_slice(&bytes);
        }
        Ok(payload)
    }

    /// Checks that the subject sends these packets in this order, perhaps with other, repeated
    /// packets between them. Returns their payload.
    pub(crate) fn comes_to(&mut self, wanted: &[&str]) -> Step<Vec<u8>> {
        /// More packets than a subject repeats in the time that it gets.
        const MANY: usize = 1000;
        let (mut payload, mut passed) = (Vec::new(), Vec::new());
        for wanted in wanted {
            loop {
                let next = self.next(true)?;
                let (line, bytes) = next.ok_or_else(|| format!("{passed:?}, but no {wanted:?}"))?;
                if fits(&line, wanted) {
                    payload.extend_from_slice(&bytes);
                    break;
                }
                passed.push(line);
                if passed.len() == MANY {
                    return Err(format!("{MANY} packets, but no {wanted:?}: {:?}", &passed[..9]));
                }
            }
        }
        Ok(payload)
    }

    /// Checks that the subject sends nothing: not before it reports its state, nor for a moment
    /// after. A later packet is noticed in the next step of the script.
    pub(crate) fn quiet(&mut self) -> Step {
        self.subject.state()?;
        match self.next(false)? {
            None => Ok(()),
            Some((line, _)) => Err(format!("{line:?}, though nothing should be said")),
        }
    }

    /// The subject's next packet as a line, and its payload.
    pub(crate) fn next(&mut self, wait: bool) -> Step<Option<(String, Vec<u8>)>> {
        let Some(bytes) = self.subject.say(wait)? else { return Ok(None) };
        let packet = Packet::parse(&bytes).map_err(|error| format!("no packet: {error:?}"))?;
        Ok(Some((describe_all(&packet, self.options.psn), packet.payload().to_vec())))
    }

    /// Checks that the subject still acknowledges an empty WRITE with this PSN, with the MSN `msn`.
    pub(crate) fn serves(&mut self, psn: i64, msn: u32) -> Step {
        self.write(psn, 0, &[])?;
        self.says(&[&format!("ACK #{psn} msn {msn}")]).map(drop)
    }
}

/// Whether a packet is the expected one.
fn fits(line: &str, wanted: &str) -> bool {
    match line.strip_prefix(wanted) {
        Some(rest) => rest.is_empty() || rest.starts_with(" msn "),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn only_the_msn_may_be_left_out() {
        assert!(fits("ACK #1 msn 2", "ACK #1 msn 2") && fits("ACK #1 msn 2", "ACK #1"));
        assert!(!fits("ACK #1 msn 2", "ACK #1 msn 3") && !fits("ACK #1 msn 22", "ACK #1 msn 2"));
        assert!(!fits("ACK #11 msn 2", "ACK #1") && !fits("READ #1 @0+8", "READ #1"));
    }
}
