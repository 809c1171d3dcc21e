//! FLUSH and ATOMIC WRITE (IBA 1.5) on registered memory: their arguments, and whether a region
//! admits them.

use super::access::{Access, AccessError, Accessor};
use super::region::{Checked, Sge, Write};
use super::table::RegionTable;
use crate::types::Key;

/// The placement that a FLUSH asks for (the placement type of the FETH, `enum ib_placement_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placement(u8);

impl Placement {
    /// The bytes written are visible to all that can see the memory (`IBV_FLUSH_GLOBAL`).
    pub const GLOBAL: Self = Self(1);
    /// The bytes written survive a loss of power (`IBV_FLUSH_PERSISTENT`).
    pub const PERSISTENT: Self = Self(2);

    /// From the four bits of the header; `None` if they ask for nothing, or for something unknown.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            1..=3 => Some(Self(bits)),
            _ => None,
        }
    }

    /// The four bits of the header.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether everything in `other` is asked for.
    #[must_use]
    pub const fn admits(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Permissions that the region and the queue pair must have.
    #[must_use]
    pub const fn needs(self) -> Access {
        let mut needs = Access::NONE;
        if self.admits(Self::GLOBAL) {
            needs = needs.with(Access::FLUSH_GLOBAL);
        }
        if self.admits(Self::PERSISTENT) {
            needs = needs.with(Access::FLUSH_PERSISTENT);
        }
        needs
    }
}

/// The extent of a FLUSH (the selectivity level of the FETH, `enum ib_selectivity_level`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlushLevel {
    /// A range of a region.
    Range,
    /// The whole region; the named range is ignored.
    Region,
}

impl RegionTable {
    /// The target of an ATOMIC WRITE: eight bytes, aligned for peers and in the process.
    ///
    /// # Errors
    /// See [`RegionTable::check`]; [`AccessError::Range`] also if it is not aligned in the process.
    pub fn remote_store(
        &self,
        by: Accessor,
        addr: u64,
        rkey: Key,
    ) -> Result<Checked<Write>, AccessError> {
        let checked = self.check(rkey, by, addr, 8, Access::REMOTE_WRITE)?;
        if checked.host % 8 != 0 {
            return Err(AccessError::Range);
        }
        Ok(checked.with())
    }

    /// The memory that a FLUSH names: the range `at`, or the whole region of its key.
    ///
    /// # Errors
    /// See [`RegionTable::check`]; [`AccessError::Permission`] also for persistence, because no
    /// region is known to be on persistent memory.
    pub fn remote_flush(
        &self,
        by: Accessor,
        at: &Sge,
        level: FlushLevel,
        placement: Placement,
    ) -> Result<(), AccessError> {
        let region = self.get(at.lkey).ok_or(AccessError::Key)?;
        let (addr, len) = match level {
            FlushLevel::Range => (at.addr, at.len),
            FlushLevel::Region => (region.start, 0),
        };
        self.check(at.lkey, by, addr, len, placement.needs())?;
        if placement.admits(Placement::PERSISTENT) {
            return Err(AccessError::Permission);
        }
        Ok(())
    }
}
