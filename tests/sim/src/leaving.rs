//! Packets that leave a host: each packet of a request leaves in order, and none before its
//! predecessors, whether or not the port had room at once.

use rocinante_stack::types::Psn;
use rocinante_stack::verbs::QpType;

use crate::check::Verdict;
use crate::model::{EndId, Phase, peer};
use crate::world::World;

/// Opcodes of a reliable connection: the READ request, and the responses. All others are requests.
const READ: u8 = 0x0c;
const ANSWERS: core::ops::RangeInclusive<u8> = 0x0d..=0x12;
/// Offset of the length in the RETH of a READ.
const LENGTH: usize = 12 + 12;

impl World<'_> {
    /// A packet leaves `from`: a request must be the next one of its queue pair, or one that left
    /// before.
    pub(crate) fn request_left(&mut self, from: usize, to: usize, bytes: &[u8]) -> Verdict {
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let (dest, psn) = (word(4).unwrap_or(0) & 0xff_ffff, word(8).unwrap_or(0) & 0xff_ffff);
        let kind = match bytes[0] >> 5 {
            0 if !ANSWERS.contains(&bytes[0]) => QpType::Rc,
            1 => QpType::Uc,
            _ => return Ok(()),
        };
        let sends = |end: &&EndId| {
            let this = &self.ends[**end];
            let to_peer = (this.dest, self.ends[peer(**end)].host) == (dest, to);
            to_peer && this.phase == Phase::Ready && self.connections[**end / 2].qp_type == kind
        };
        let Some(end) = self.hosts[from].ends.iter().find(sends).copied() else {
            return Err(format!("host {from} sends a request to {dest:x}, and has no such end"));
        };
        let terms = &self.ends[end].terms;
        let start = terms.psn[end % 2];
        let pieces = match bytes[0] {
            READ => word(LENGTH).unwrap_or(0).div_ceil(terms.mtu.bytes()).max(1),
            _ => 1,
        };
        let number = u64::from(Psn::new(psn.wrapping_sub(start)).value());
        let stream = self.ends[end].current().ok_or("a request without a stream")?;
        let again = kind == QpType::Rc && number < stream.sent;
        if number != stream.sent && !again {
            let due = stream.sent;
            return Err(format!("end {end} sends packet {number}, and packet {due} is next"));
        }
        stream.sent = stream.sent.max(number + u64::from(pieces));
        Ok(())
    }
}
