//! The memory of a host. It records all accesses of the engine.
//!
//! Each end of a connection owns a stretch of the arena, divided into zones with guards between
//! them. A zone is registered as one region, or not registered at the moment. The accesses of the
//! engine are checked again here, by zone and without the engine's own table.

use std::cell::RefCell;

use rocinante_stack::Completions;
use rocinante_stack::mem::{
    Access, AccessError, Atomic, AtomicOp, Checked, Memory, Read, RegionTable, Write,
};
use rocinante_stack::verbs::{CqId, Cqe};

/// The longest message, and the depth of queues.
pub(crate) const LONGEST: u64 = 4608;
pub(crate) const DEPTH: u64 = 8;

/// Bytes after each zone that belong to no region.
const GUARD: u64 = 64;

/// A stretch of memory for one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Zone {
    /// Sources of SEND and WRITE, destinations of READ and atomics: one slot for each request.
    Local,
    /// Receives: one slot for each.
    Receive,
    /// Written and read by the peer.
    Window,
    /// Read by the peer, and never written.
    Constant,
    /// Two words for the peer's atomics.
    Words,
}

impl Zone {
    pub(crate) const ALL: [Self; 5] =
        [Self::Local, Self::Receive, Self::Window, Self::Constant, Self::Words];

    pub(crate) const fn len(self) -> u64 {
        match self {
            Self::Local | Self::Receive => DEPTH * LONGEST,
            Self::Window | Self::Constant => LONGEST,
            Self::Words => 16,
        }
    }

    /// Offset in an end's stretch.
    pub(crate) fn offset(self) -> u64 {
        Self::ALL.iter().take_while(|zone| **zone != self).map(|zone| zone.len() + GUARD).sum()
    }

    /// Rights of a region over the zone.
    pub(crate) fn access(self) -> Access {
        match self {
            Self::Local | Self::Receive => Access::LOCAL_WRITE,
            Self::Window => {
                let shown = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::FLUSH_GLOBAL;
                shown | Access::LOCAL_WRITE | Access::MW_BIND
            }
            Self::Constant => Access::REMOTE_READ,
            Self::Words => Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
        }
    }
}

/// Bytes of the arena for each end.
pub(crate) fn stride() -> u64 {
    Zone::Words.offset() + Zone::Words.len() + GUARD
}

/// The owner of these bytes: the index of its end on the host, the zone, and the offset in the
/// zone. `None` if the bytes are not within one zone.
pub(crate) fn owner(at: u64, len: u64) -> Option<(usize, Zone, u64)> {
    let (index, within) = (at / stride(), at % stride());
    let zone = Zone::ALL.into_iter().find(|zone| {
        let first = zone.offset();
        within >= first && within + len <= first + zone.len()
    })?;
    let index = index as usize;
    Some((index, zone, within - zone.offset()))
}

/// An effect of the engine during one call.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// Bytes were stored; `from` is their offset in [`Ram::bytes`].
    Place {
        at: u64,
        from: usize,
        len: usize,
    },
    /// A word was changed, or compared.
    Atomic {
        at: u64,
        op: AtomicOp,
        found: u64,
    },
    Complete(CqId, Cqe),
    SendRetired {
        cookie: u32,
        count: u32,
    },
    RecvRetired {
        cookie: u32,
        count: u32,
    },
}

/// The memory of a host.
#[derive(Debug)]
pub(crate) struct Ram {
    pub(crate) regions: RegionTable,
    pub(crate) arena: Vec<u8>,
    /// Which zones of each end are registered.
    pub(crate) registered: Vec<[bool; 5]>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) bytes: Vec<u8>,
    /// An access that the engine should not have made.
    pub(crate) wrong: RefCell<Option<String>>,
    pub(crate) placed: u64,
}

impl Ram {
    pub(crate) fn new(ends: usize) -> Self {
        Self {
            // And two windows of each end.
            regions: RegionTable::new(ends * (Zone::ALL.len() + 2)),
            arena: vec![0; ends * stride() as usize],
            registered: vec![[false; 5]; ends],
            effects: Vec::new(),
            bytes: Vec::new(),
            wrong: RefCell::new(None),
            placed: 0,
        }
    }

    pub(crate) fn slice(&self, at: u64, len: u64) -> &[u8] {
        let (at, len) = (at as usize, len as usize);
        &self.arena[at..at + len]
    }

    pub(crate) fn slice_mut(&mut self, at: u64, len: u64) -> &mut [u8] {
        let (at, len) = (at as usize, len as usize);
        &mut self.arena[at..at + len]
    }

    /// Checks an access by zone. Returns whether the bytes exist at all.
    fn admit(&self, what: &str, at: u64, len: u64, need: Access) -> bool {
        if len == 0 {
            return false;
        }
        let verdict = match owner(at, len) {
            None => Err("outside of every region".to_owned()),
            Some((index, zone, _)) => match self.registered.get(index) {
                Some(zones) if !zones[zone as usize] => Err(format!("in {zone:?}, not registered")),
                Some(_) if !zone.access().admits(need) => {
                    Err(format!("in {zone:?}, not permitted"))
                }
                Some(_) => Ok(()),
                None => Err("outside of the arena".to_owned()),
            },
        };
        if let Err(why) = &verdict {
            let mut wrong = self.wrong.borrow_mut();
            wrong.get_or_insert_with(|| format!("{what} of {len} bytes at {at:#x}: {why}"));
        }
        at.checked_add(len).is_some_and(|end| end <= self.arena.len() as u64)
    }
}

impl Memory for Ram {
    fn regions(&self) -> &RegionTable {
        &self.regions
    }

    fn regions_mut(&mut self) -> &mut RegionTable {
        &mut self.regions
    }

    fn place(&mut self, dst: Checked<Write>, src: &[u8]) -> Result<(), AccessError> {
        let (at, len) = (dst.host(), src.len() as u64);
        if u64::from(dst.len()) != len {
            *self.wrong.borrow_mut() = Some("a range is not as long as its data".into());
        }
        if self.admit("a store", at, len, Access::LOCAL_WRITE) {
            self.slice_mut(at, len).copy_from_slice(src);
        }
        self.placed += len;
        let from = self.bytes.len();
        self.bytes.extend_from_slice(src);
        self.effects.push(Effect::Place { at, from, len: src.len() });
        Ok(())
    }

    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<(), AccessError> {
        let (at, len) = (src.host(), dst.len() as u64);
        if self.admit("a load", at, len, Access::NONE) {
            dst.copy_from_slice(self.slice(at, len));
        }
        Ok(())
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> Result<u64, AccessError> {
        let at = at.host();
        if !self.admit("an atomic", at, 8, Access::REMOTE_ATOMIC) {
            return Ok(0);
        }
        let word = self.slice_mut(at, 8);
        let found = u64::from_ne_bytes(word.try_into().unwrap_or_default());
        let stored = match op {
            AtomicOp::CompareSwap { compare, swap } if found == compare => swap,
            AtomicOp::CompareSwap { .. } => found,
            AtomicOp::FetchAdd { add } => found.wrapping_add(add),
        };
        word.copy_from_slice(&stored.to_ne_bytes());
        self.effects.push(Effect::Atomic { at, op, found });
        Ok(found)
    }
}

impl Completions for Ram {
    fn complete(&mut self, cq: CqId, cqe: Cqe) {
        self.effects.push(Effect::Complete(cq, cqe));
    }

    fn send_retired(&mut self, cookie: u32, count: u32) {
        self.effects.push(Effect::SendRetired { cookie, count });
    }

    fn recv_retired(&mut self, cookie: u32, count: u32) {
        self.effects.push(Effect::RecvRetired { cookie, count });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_owner_or_none() {
        let second = stride() + Zone::Window.offset();
        assert_eq!(owner(second + 5, 10), Some((1, Zone::Window, 5)));
        assert_eq!(owner(second + Zone::Window.len() - 1, 2), None);
        assert_eq!(owner(second - 1, 1), None);
        assert_eq!(Zone::Words.offset() % 8, 0);
        assert_eq!(stride() % 8, 0);
    }
}
