//! The entries of the region table.

use super::access::Access;
use super::region::Region;
use crate::types::{Key, Qpn};

/// The type of a memory window (`enum ibv_mw_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MwType {
    /// Bound by a verb, as often as the program likes; each queue pair of its protection domain may
    /// use it.
    Type1,
    /// Bound by a work request, for the one queue pair that it was posted to, under a key with the
    /// consumer's low 8 bits. It must be invalidated before it is bound again.
    Type2,
}

/// The kind of an entry of the table.
#[derive(Debug, Clone, Copy)]
pub(super) enum EntryKind {
    /// A region, and the number of windows bound to it.
    Region { windows: u32 },
    /// A window, and the key of its region if it is bound.
    Window { mw_type: MwType, region: Option<Key> },
}

#[derive(Debug, Clone)]
pub(super) enum Slot {
    Empty,
    Taken(Key, Entry),
}

/// A region, or the part of one that a window shows now.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) region: Region,
    /// The only queue pair that it admits; 0 if it admits all of the domain. No queue pair has
    /// number 0.
    pub(super) owner: Qpn,
    pub(super) kind: EntryKind,
}

impl Entry {
    pub(super) const fn new(region: Region, owner: Qpn, kind: EntryKind) -> Self {
        Self { region, owner, kind }
    }

    /// Without the permission to use a local key, which the caller does not know of.
    pub(super) fn plain(&self) -> Region {
        Region { access: self.region.access.without(Access::LOCAL), ..self.region }
    }
}
