//! Ranges of a peer's memory that it has admitted before.

use crate::types::Key;
use crate::verbs::SendOp;

/// Ranges to which a peer has admitted WRITEs of several packets. As long as a key is valid, it
/// names the same memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Admitted([Range; 4]);

#[derive(Debug, Clone, Copy, Default)]
struct Range {
    rkey: Key,
    from: u64,
    to: u64,
}

impl Range {
    fn of(op: &SendOp, len: u32) -> Option<Self> {
        let SendOp::Write { remote: from, rkey, .. } = *op else { return None };
        Some(Self { rkey, from, to: from.checked_add(len.into())? })
    }
}

impl Admitted {
    /// A request of `len` bytes was executed.
    pub(super) fn executed(&mut self, op: &SendOp, len: u32) {
        let Some(range) = Range::of(op, len) else { return };
        let known = &mut self.0[place(range.rkey)];
        let more = range.rkey == known.rkey && range.from <= known.to && range.to >= known.from;
        *known = match more {
            true => {
                let (from, to) = (range.from.min(known.from), range.to.max(known.to));
                Range { from, to, ..range }
            }
            false => range,
        };
    }

    pub(super) fn has(&self, op: &SendOp, len: u32) -> bool {
        Range::of(op, len).is_some_and(|range| {
            let known = self.0[place(range.rkey)];
            range.rkey == known.rkey && range.from >= known.from && range.to <= known.to
        })
    }
}

/// The place of a key among the ranges of its peer. Its low 8 bits are its owner's choice.
fn place(rkey: Key) -> usize {
    (rkey.0 >> 8 ^ rkey.0) as usize % 4
}
