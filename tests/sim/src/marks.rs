//! Congestion marks: the receiver of a marked packet of a reliable connection owes its sender a
//! notification, at most one in 50 µs. No other end sends one.

use rocinante_stack::verbs::QpType;

use crate::check::Verdict;
use crate::model::Phase;
use crate::network::Packet;
use crate::world::World;

/// The notification that an end owes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Marks {
    owes: bool,
    /// The time of the marked packet that caused the last notification.
    last: Option<u64>,
}

/// At most one notification in this time, nanoseconds.
const PACE: u64 = 50_000;
/// The mark "congestion experienced" of the IP header.
const MARK: u8 = 3;
/// The opcode of a notification, and its length: BTH, 16 zeros, ICRC.
const CNP: u8 = 0x81;
const CNP_LEN: usize = 12 + 16 + 4;
/// The bit BECN, in the fifth byte of the BTH.
const BECN: u8 = 0x40;

impl World<'_> {
    /// A packet is about to be handled: its receiver may owe a notification after it.
    pub(crate) fn marked(&mut self, packet: &Packet) {
        let marked = packet.tos & MARK == MARK && !packet.harmed;
        let Some(end) = packet.end.filter(|_| marked && packet.bytes[0] != CNP) else { return };
        let reliable = self.connections[end / 2].qp_type == QpType::Rc;
        let this = &mut self.ends[end];
        let addressed =
            this.qpn.is_some_and(|qpn| qpn.value().to_be_bytes()[1..] == packet.bytes[5..8]);
        if !reliable || !addressed || this.phase != Phase::Ready {
            return;
        }
        if this.marks.last.is_none_or(|last| self.now - last >= PACE) {
            this.marks = Marks { owes: true, last: Some(self.now) };
        }
    }

    /// A packet leaves: if it is a notification, its sender owed it.
    pub(crate) fn notified(&mut self, from: usize, to: usize, bytes: &[u8]) -> Verdict {
        if bytes[0] != CNP {
            return Ok(());
        }
        let dest = u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]);
        let sends = |end: &&usize| {
            let peers_host = self.ends[crate::model::peer(**end)].host;
            (self.ends[**end].dest, peers_host) == (dest, to) && self.ends[**end].marks.owes
        };
        let sender = self.hosts[from].ends.iter().find(sends).copied();
        let sender = sender.ok_or_else(|| {
            format!("host {from} sends a notification to {dest:x}, which is not due")
        })?;
        self.ends[sender].marks.owes = false;
        let zeros = bytes[12..28].iter().all(|byte| *byte == 0);
        if bytes.len() != CNP_LEN || !zeros || bytes[4] & BECN == 0 {
            return Err(format!("end {sender} sends a notification that is none: {bytes:x?}"));
        }
        self.tally.notifications += 1;
        Ok(())
    }

    /// The engine of `host` has nothing more to send: no notification is due.
    pub(crate) fn owes_nothing(&self, host: usize) -> Verdict {
        let owes =
            |end: &&usize| self.ends[**end].marks.owes && self.ends[**end].phase == Phase::Ready;
        match self.hosts[host].ends.iter().find(owes) {
            Some(end) => Err(format!("end {end} took a marked packet, and does not say so")),
            None => Ok(()),
        }
    }
}
