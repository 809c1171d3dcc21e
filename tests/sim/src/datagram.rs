//! Datagrams. They are parsed again here, and the model decides on the fate of each before the
//! engine gets it.

use std::net::IpAddr;

use rocinante_stack::verbs::{AhId, Cqe, Destination, QpType, SendOp, WcOpcode, WcStatus};
use rocinante_stack::{PeerAddress, PeerKind, types::Qpn};

use crate::check::{Context, Verdict};
use crate::draft::Draft;
use crate::mads::is_mad;
use crate::model::{EndId, Op, Phase, Receive, locate};
use crate::network::Packet;
use crate::traffic::HOP_LIMIT;
use crate::world::{Host, Stage, World};

/// Bytes before the payload of a datagram in its receive.
pub(crate) const GRH: u32 = 40;
const BTH: usize = 12;
const DETH: usize = 8;
const IMMEDIATE: usize = 4;
const ICRC: usize = 4;
/// UD SEND ONLY, and with immediate data.
const PLAIN: u8 = 0x64;
const WITH_IMMEDIATE: u8 = 0x65;

/// A datagram on the wire.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Letter<'a> {
    pub(crate) to: u32,
    pub(crate) from: u32,
    psn: u32,
    qkey: u32,
    imm: Option<[u8; 4]>,
    solicited: bool,
    payload: &'a [u8],
}

impl<'a> Letter<'a> {
    /// Parses it; `None` if it is something else.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let imm = match *bytes.first()? {
            PLAIN => None,
            WITH_IMMEDIATE => bytes.get(BTH + DETH..)?.first_chunk().copied(),
            _ => return None,
        };
        let begin = BTH + DETH + imm.map_or(0, |imm| imm.len().min(IMMEDIATE));
        let padding = usize::from(bytes[1] >> 4 & 3);
        Some(Self {
            to: word(4)? & 0xff_ffff,
            from: word(BTH + 4)? & 0xff_ffff,
            psn: word(8)? & 0xff_ffff,
            qkey: word(BTH)?,
            imm,
            solicited: bytes[1] & 0x80 != 0,
            payload: bytes.get(begin..bytes.len().checked_sub(ICRC + padding)?)?,
        })
    }
}

impl Letter<'_> {
    fn summary(&self) -> String {
        let Self { to, psn, qkey, imm, solicited, payload, .. } = self;
        let hash = payload.iter().fold(0, |hash: u32, byte| hash.rotate_left(5) ^ u32::from(*byte));
        format!(
            "to {to:x}, psn {psn:x}, Q_Key {qkey:x}, {imm:?}, solicited {solicited}, {} bytes {hash:x}",
            payload.len()
        )
    }
}

/// The right fate of an incoming packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is not a datagram, or not a valid one.
    Unknown,
    /// It is accepted as a whole.
    Taken,
    /// It is dropped, and changes nothing.
    Dropped,
    /// It gets a receive with memory that must be refused, which breaks its queue pair.
    Breaks,
}

impl World<'_> {
    pub(crate) fn is_datagram(&self, end: EndId) -> bool {
        self.connections[end / 2].qp_type == QpType::Ud
    }

    /// The right fate of a packet.
    pub(crate) fn fate(&self, packet: &Packet) -> Fate {
        if packet.harmed {
            return Fate::Unknown;
        }
        let (Some(letter), Some(end)) = (Letter::read(&packet.bytes), packet.end) else {
            return Fate::Unknown;
        };
        let this = &self.ends[end];
        let there = this.qpn.is_some_and(|qpn| qpn.value() == letter.to);
        if !self.is_datagram(end) || !there || this.phase != Phase::Ready {
            return Fate::Dropped;
        }
        let right = this.terms.qkey[end % 2] == letter.qkey;
        match self.next_receive(end) {
            Some(receive) if right && receive.room as usize >= 40 + letter.payload.len() => {
                if receive.bad {
                    Fate::Breaks
                } else {
                    Fate::Taken
                }
            }
            _ => Fate::Dropped,
        }
    }

    /// After a packet was handled: checks its fate.
    pub(crate) fn befell(&mut self, packet: &Packet, fate: Fate) -> Verdict {
        let Some(end) = packet.end.filter(|_| fate != Fate::Unknown) else { return Ok(()) };
        let arrived = std::mem::take(&mut self.ends[end].letters.arrived);
        let broke = self.ends[end].phase != Phase::Ready;
        match fate {
            Fate::Taken if !arrived => {
                Err(format!("end {end}: a datagram that was all right was not taken"))
            }
            Fate::Dropped if arrived => {
                Err(format!("end {end}: a datagram was taken that had to be dropped"))
            }
            Fate::Breaks if arrived || !broke => {
                Err(format!("end {end}: a datagram was taken where there was no memory for it"))
            }
            _ => Ok(()),
        }
    }

    /// The engine placed bytes of a datagram, or of the header before it, in a receive of `end`.
    pub(crate) fn delivered(
        &mut self,
        end: EndId,
        at: u64,
        bytes: &[u8],
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let context = context.ok_or("a datagram out of nowhere")?;
        let letter = Letter::read(&context.packet.bytes).ok_or("a datagram that is none")?;
        let mut expected = self.header(context.packet).to_vec();
        expected.extend_from_slice(letter.payload);
        self.take_receive(end);
        let receive = self.next_receive(end).ok_or("a datagram without a receive")?;
        let offset = self.ends[end].letters.placed;
        let right = expected.get(offset as usize..offset as usize + bytes.len()) == Some(bytes);
        match locate(&receive.list, offset) {
            Some((place, room)) if right && place == at && bytes.len() <= room as usize => {}
            place => {
                return Err(format!(
                    "end {end}: byte {offset} of a datagram and its header placed at {at:#x}, {place:x?}: right {right}"
                ));
            }
        }
        self.ends[end].letters.placed += bytes.len() as u32;
        Ok(())
    }

    /// The IP header of a packet, as verbs show it.
    fn header(&self, packet: &Packet) -> [u8; GRH as usize] {
        let mut header = [0; GRH as usize];
        let length = (packet.bytes.len() + 8) as u16;
        match (self.hosts[packet.from].addr, self.hosts[packet.dst].addr) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let [high, low] = packet.id.to_be_bytes();
                let [long, short] = (length + 20).to_be_bytes();
                let begin = [0x45, packet.tos, long, short, high, low, 0x40, 0, HOP_LIMIT, 17];
                header[20..30].copy_from_slice(&begin);
                header[32..36].copy_from_slice(&src.octets());
                header[36..40].copy_from_slice(&dst.octets());
                let words =
                    header[20..].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
                // All words add up to all ones. Of the two zeros of the ones' complement a sum of
                // words that are not all 0 is never the positive one (RFC 1624).
                let missing = (0xfffe - (words.sum::<u32>() - 1) % 0xffff) as u16;
                header[30..32].copy_from_slice(&missing.to_be_bytes());
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                header[..2].copy_from_slice(&(0x6000 | u16::from(packet.tos) << 4).to_be_bytes());
                header[4..6].copy_from_slice(&length.to_be_bytes());
                (header[6], header[7]) = (17, HOP_LIMIT);
                header[8..24].copy_from_slice(&src.octets());
                header[24..40].copy_from_slice(&dst.octets());
            }
            _ => {}
        }
        header
    }

    /// A receive of `end`, a datagram queue pair, completed.
    pub(crate) fn datagram_received(
        &mut self,
        end: EndId,
        receive: &Receive,
        cqe: &Cqe,
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let packet = context.ok_or("a datagram out of nowhere")?.packet;
        let letter = Letter::read(&packet.bytes).ok_or("a datagram that is none")?;
        let this = &mut self.ends[end];
        let placed = std::mem::take(&mut this.letters.placed);
        if cqe.status == WcStatus::LocProtErr && receive.bad {
            this.reason.get_or_insert(cqe.status);
            return Ok(());
        }
        let expected = (WcStatus::Success, WcOpcode::Recv, GRH + letter.payload.len() as u32);
        if (cqe.status, cqe.opcode, cqe.byte_len) != expected || placed != expected.2 {
            return Err(format!(
                "end {end}: {placed} bytes of a datagram, {cqe:?}: not {expected:?}"
            ));
        }
        let expected = (letter.imm, letter.solicited, Some(Qpn::new(letter.from)));
        let sender = cqe.sender.map(|sender| sender.qpn);
        if (cqe.imm, cqe.solicited, sender) != expected || cqe.invalidated.is_some() {
            return Err(format!(
                "end {end}: a datagram arrived as {cqe:?} instead of {expected:?}"
            ));
        }
        if std::mem::replace(&mut this.letters.arrived, true) {
            return Err(format!("end {end}: a datagram was taken twice"));
        }
        this.letters.coming = this.letters.coming.saturating_sub(1);
        Ok(())
    }

    /// A packet leaves host `from`. If it is a datagram, it must be its sender's next one, as
    /// posted.
    pub(crate) fn letter_left(&mut self, from: usize, bytes: &[u8]) -> Verdict {
        if is_mad(bytes) {
            return Ok(());
        }
        let Some(letter) = Letter::read(bytes) else { return Ok(()) };
        let sender = |end: &&EndId| self.ends[**end].qpn == Some(Qpn::new(letter.from));
        let Some(end) = self.hosts[from].ends.iter().find(sender).copied() else {
            return Err(format!("a datagram of {:x}, which is not there", letter.from));
        };
        let start = self.ends[end].terms.psn[end % 2];
        let low_of = |to: EndId| self.number(to);
        let stream = self.ends[end].stream(self.ends[end].generation).ok_or("no stream")?;
        let number = stream.left.max(stream.popped);
        let request = stream.get(number).ok_or("a datagram that was not posted")?;
        let Op::Datagram { to, qkey, imm } = request.op else { return Err("no datagram".into()) };
        let expected = Letter {
            to: low_of(to),
            from: letter.from,
            psn: start.wrapping_add(number as u32) & 0xff_ffff,
            qkey,
            imm,
            solicited: request.solicited,
            payload: &request.data,
        };
        if letter != expected || request.bad.is_some() {
            return Err(format!(
                "end {end}: datagram {number} left as {} instead of {}, bad {:?}",
                letter.summary(),
                expected.summary(),
                request.bad
            ));
        }
        if let Some(stream) = self.ends[end].current() {
            stream.left = number + 1;
        }
        Ok(())
    }

    /// A datagram to any end; in the storm now and then with a wrong Q_Key.
    pub(crate) fn letter(&mut self, end: EndId) -> Option<Draft> {
        let targets: Vec<EndId> = (0..self.ends.len()).filter(|to| self.is_datagram(*to)).collect();
        let to = self.random.of(&targets);
        if self.stage == Stage::Prove && self.receives_due(to) >= self.receives_ready(to) {
            return None;
        }
        let len = self.length(end).min(u64::from(self.hosts[0].config.port_mtu.bytes()));
        let imm = self.random.one_in(2).then(|| self.random.bits().to_be_bytes());
        let own = self.ends[end].terms.qkey[end % 2];
        let right = self.ends[to].terms.qkey[to % 2];
        let wrong = self.stage == Stage::Storm && self.random.one_in(12);
        let wrong = wrong && self.has.faults.wrong_qkey;
        self.tally.faults.wrong_qkey += u64::from(wrong);
        let asked =
            if wrong { self.random.of(&[right ^ 1, right ^ 0x4000_0000, own]) } else { right };
        // With the highest bit set, the sender's own key is sent instead.
        let qkey = if asked >> 31 == 1 { own } else { asked };
        let (ah, bad) = self.handle(end, self.ends[to].host)?;
        let mut data = vec![0; usize::try_from(len).unwrap_or_default()];
        self.random.fill(&mut data);
        let qpn = Qpn::new(self.number(to));
        let op = SendOp::SendTo { to: Destination { ah, qpn, qkey: asked }, imm };
        if self.stage == Stage::Prove {
            if qkey != right {
                return None;
            }
            self.ends[to].letters.coming += 1;
        }
        let model = Op::Datagram { to, qkey, imm };
        let len = data.len() as u32;
        Some(Draft { op, model, len, data, bad, overruns: 0, through: None, excused: false })
    }

    /// An address handle of `end` for the host `to`, and the status that its use must have. Seldom
    /// the handle is destroyed, or belongs to another end.
    fn handle(&mut self, end: EndId, to: usize) -> Option<(AhId, Option<WcStatus>)> {
        let (local, remote) = (self.hosts[self.ends[end].host].addr, self.hosts[to].addr);
        let host = self.ends[end].host;
        let garbage = self.stage == Stage::Storm && self.random.one_in(150);
        if garbage && self.has.faults.garbage_local {
            let pd = self.ends[end].pd;
            let other = self.hosts[host].ends.iter().find(|other| self.ends[**other].pd != pd);
            let other = other.and_then(|other| *self.ends[*other].letters.handles.get(to)?);
            let wrong = if self.random.one_in(2) { other } else { self.ends[end].letters.stale };
            if let Some(wrong) = wrong {
                self.tally.faults.garbage_local += 1;
                return Some((wrong, Some(WcStatus::LocProtErr)));
            }
        }
        let (pd, budget) = (self.domain(end), self.announced(to));
        let kind = PeerKind::announced(budget, None);
        let (hosts, letters) = (self.hosts.len(), &mut self.ends[end].letters);
        letters.handles.resize(hosts, None);
        if let Some(handle) = letters.handles[to] {
            return Some((handle, None));
        }
        let engine = self.hosts[host].engine.as_mut()?;
        let handle =
            engine.create_ah(pd, &PeerAddress { local, remote, path: to as u32, budget, kind })?;
        letters.handles[to] = Some(handle);
        self.tally.steps += 1;
        Some((handle, None))
    }

    /// Destroys a handle while datagrams name it.
    pub(crate) fn drop_handle(&mut self, end: EndId) -> Verdict {
        let Host { engine: Some(engine), .. } = &mut self.hosts[self.ends[end].host] else {
            return Ok(());
        };
        let letters = &mut self.ends[end].letters;
        let Some(handle) = letters.handles.iter_mut().find_map(Option::take) else {
            return Ok(());
        };
        letters.stale = Some(handle);
        self.tally.steps += 1;
        if !engine.destroy_ah(handle) {
            return Err(format!("end {end}: an address handle was not there"));
        }
        for stream in &mut self.ends[end].streams {
            stream.pending_mut().for_each(|request| request.excuses.push(WcStatus::LocProtErr));
        }
        Ok(())
    }
}
