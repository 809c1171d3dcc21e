//! Memory regions: keys, permissions, and the proof that an access was checked.
//!
//! The engine never touches user memory. It asks the [`RegionTable`] whether a key admits an access, gets a
//! [`Checked`] that nothing else can make, and hands that to the [`Memory`] of its caller.

use core::fmt;
use core::marker::PhantomData;

use crate::types::Key;

/// A protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PdId(pub u32);

/// What a region or a queue pair permits (`enum ibv_access_flags`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u8);

impl Access {
    /// Only local reads.
    pub const NONE: Self = Self(0);
    /// `IBV_ACCESS_LOCAL_WRITE`: receives, READ responses and atomic results may be placed.
    pub const LOCAL_WRITE: Self = Self(1);
    /// `IBV_ACCESS_REMOTE_WRITE`.
    pub const REMOTE_WRITE: Self = Self(2);
    /// `IBV_ACCESS_REMOTE_READ`.
    pub const REMOTE_READ: Self = Self(4);
    /// `IBV_ACCESS_REMOTE_ATOMIC`.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// All of them.
    pub const ALL: Self = Self(15);

    /// The bits, as in `enum ibv_access_flags`.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0 as u32
    }

    /// From the bits of `enum ibv_access_flags`; `None` if one is set that is not known here.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !15 == 0 {
            #[allow(clippy::cast_possible_truncation)]
            Some(Self(bits as u8))
        } else {
            None
        }
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether everything in `other` is permitted.
    #[must_use]
    pub const fn admits(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether remote writing or atomics are permitted without local writing, which verbs forbid
    /// (`ibv_reg_mr(3)`).
    #[must_use]
    pub const fn is_contradictory(self) -> bool {
        self.0 & (Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0) != 0
            && self.0 & Self::LOCAL_WRITE.0 == 0
    }
}

impl core::ops::BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.with(other)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::LOCAL_WRITE, "LOCAL_WRITE"),
            (Self::REMOTE_WRITE, "REMOTE_WRITE"),
            (Self::REMOTE_READ, "REMOTE_READ"),
            (Self::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
        ];
        let mut any = false;
        for (flag, name) in names {
            if self.admits(flag) {
                write!(f, "{}{name}", if any { " | " } else { "" })?;
                any = true;
            }
        }
        if any { Ok(()) } else { f.write_str("NONE") }
    }
}

/// A registered range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its protection domain.
    pub pd: PdId,
    /// The address by which work requests and peers name its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where its first byte is for [`Memory`]: an address in the process, an offset in an arena.
    pub host: u64,
    /// What it permits.
    pub access: Access,
}

/// Why an access was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessError {
    /// No region has this key (any more).
    Key,
    /// The region belongs to another protection domain.
    Pd,
    /// The range is not inside the region, or wraps around.
    Range,
    /// The region does not permit it.
    Permission,
}

/// The registered regions by key.
///
/// A key is 24 random bits, by which the table finds the region, and 8 bits that belong to the consumer and that must
/// match too. Capacity is fixed; look-ups do not allocate.
#[derive(Debug)]
pub struct RegionTable {
    /// Open addressing with linear probing and no tombstones; a power of two, at most half full.
    slots: Box<[Slot]>,
    used: usize,
    max: usize,
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Empty,
    Taken(Key, Region),
}

impl RegionTable {
    /// A table for at most `max` regions.
    #[must_use]
    pub fn new(max: usize) -> Self {
        let slots = vec![Slot::Empty; (max.max(1) * 2).next_power_of_two()].into_boxed_slice();
        Self { slots, used: 0, max }
    }

    /// How many regions are registered.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.used
    }

    /// Whether none is.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Registers a region under a key drawn from `random`; `None` if the table is full or the region
    /// wraps around the address space.
    pub fn insert(&mut self, region: Region, random: u32) -> Option<Key> {
        region.start.checked_add(region.len)?;
        region.host.checked_add(region.len)?;
        if self.used >= self.max {
            return None;
        }
        let mut key = random;
        // Keys that look like an index are what programs send by mistake: 0 is never given.
        while key >> 8 == 0 || self.find_tag(key).is_some() {
            key = key.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15);
        }
        let mut at = self.home(key);
        while matches!(self.slots[at], Slot::Taken(..)) {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = Slot::Taken(Key(key), region);
        self.used += 1;
        Some(Key(key))
    }

    /// Removes a region: from now on its key is refused.
    pub fn remove(&mut self, key: Key) -> Option<Region> {
        let at = self.find_tag(key.0)?;
        let Slot::Taken(found, region) = self.slots[at] else { return None };
        if found != key {
            return None;
        }
        self.close_gap(at);
        self.used -= 1;
        Some(region)
    }

    /// Empties a slot and moves what comes behind it up, so that every chain stays whole.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let Slot::Taken(key, _) = self.slots[at] else { break };
            // It may move up if its chain begins at the gap or before.
            if at.wrapping_sub(self.home(key.0)) & mask >= at.wrapping_sub(gap) & mask {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
        }
        self.slots[gap] = Slot::Empty;
    }

    /// The region of a key.
    #[must_use]
    #[inline]
    pub fn get(&self, key: Key) -> Option<&Region> {
        match &self.slots[self.find_tag(key.0)?] {
            Slot::Taken(found, region) if *found == key => Some(region),
            _ => None,
        }
    }

    /// Checks an access of `len` bytes at `addr` through `key`, by a queue pair of `pd`, that needs `need`.
    ///
    /// # Errors
    /// [`AccessError`] says what is wrong first.
    #[inline]
    pub fn check(
        &self,
        key: Key,
        pd: PdId,
        addr: u64,
        len: u32,
        need: Access,
    ) -> Result<Checked<()>, AccessError> {
        let region = self.get(key).ok_or(AccessError::Key)?;
        if region.pd != pd {
            return Err(AccessError::Pd);
        }
        if !region.access.admits(need) {
            return Err(AccessError::Permission);
        }
        let offset = addr.checked_sub(region.start).ok_or(AccessError::Range)?;
        let end = offset.checked_add(u64::from(len)).ok_or(AccessError::Range)?;
        if end > region.len {
            return Err(AccessError::Range);
        }
        Ok(Checked { host: region.host + offset, len, right: PhantomData })
    }

    fn home(&self, key: u32) -> usize {
        ((key >> 8).wrapping_mul(0x9e37_79b1) >> 7) as usize & (self.slots.len() - 1)
    }

    fn find_tag(&self, key: u32) -> Option<usize> {
        let mut at = self.home(key);
        loop {
            match &self.slots[at] {
                Slot::Empty => return None,
                Slot::Taken(found, _) if found.0 >> 8 == key >> 8 => return Some(at),
                Slot::Taken(..) => at = (at + 1) & (self.slots.len() - 1),
            }
        }
    }
}

/// Right to write: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Write {}

/// Right to read: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Read {}

/// Right to a read-modify-write of eight aligned bytes: see [`Checked`].
#[derive(Debug, Clone, Copy)]
pub enum Atomic {}

/// A range of memory that the region table admitted, for one kind of access. Only this module makes one.
#[derive(Debug, Clone, Copy)]
pub struct Checked<Right> {
    host: u64,
    len: u32,
    right: PhantomData<Right>,
}

impl<Right> Checked<Right> {
    /// Where it begins, in the coordinates of [`Region::host`].
    #[must_use]
    pub const fn host(&self) -> u64 {
        self.host
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    const fn with<Other>(self) -> Checked<Other> {
        Checked { host: self.host, len: self.len, right: PhantomData }
    }
}

impl RegionTable {
    /// A local source: any region of the protection domain may be read.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn local_read(&self, pd: PdId, sge: &Sge) -> Result<Checked<Read>, AccessError> {
        self.check(sge.lkey, pd, sge.addr, sge.len, Access::NONE).map(Checked::with)
    }

    /// A local destination.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn local_write(&self, pd: PdId, sge: &Sge) -> Result<Checked<Write>, AccessError> {
        self.check(sge.lkey, pd, sge.addr, sge.len, Access::LOCAL_WRITE).map(Checked::with)
    }

    /// The target of a remote WRITE.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn remote_write(&self, pd: PdId, at: &Sge) -> Result<Checked<Write>, AccessError> {
        self.check(at.lkey, pd, at.addr, at.len, Access::REMOTE_WRITE).map(Checked::with)
    }

    /// The source of a remote READ.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn remote_read(&self, pd: PdId, at: &Sge) -> Result<Checked<Read>, AccessError> {
        self.check(at.lkey, pd, at.addr, at.len, Access::REMOTE_READ).map(Checked::with)
    }

    /// The target of a remote atomic: eight bytes, aligned for peers and in the process.
    ///
    /// # Errors
    /// See [`RegionTable::check`]; [`AccessError::Range`] also if it is not aligned in the process.
    pub fn remote_atomic(
        &self,
        pd: PdId,
        addr: u64,
        rkey: Key,
    ) -> Result<Checked<Atomic>, AccessError> {
        let checked = self.check(rkey, pd, addr, 8, Access::REMOTE_ATOMIC)?;
        if checked.host % 8 != 0 {
            return Err(AccessError::Range);
        }
        Ok(checked.with())
    }
}

/// A scatter-gather element: a range of a registered region (`struct ibv_sge`, and laid out as that).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the region.
    pub lkey: Key,
}

/// A read-modify-write of eight bytes in the byte order of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    /// Store `swap` if the value equals `compare`.
    CompareSwap {
        /// The value to compare with.
        compare: u64,
        /// The value to store.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd {
        /// The value to add.
        add: u64,
    },
}

/// User memory, as the engine's caller has it: a vector in the simulator, the process itself in the verbs API.
pub trait Memory {
    /// The registered regions.
    fn regions(&self) -> &RegionTable;

    /// Copies `src` to `dst` (as long as `src`), in ascending order of addresses, aligned words whole, and so that who
    /// sees the last byte sees all bytes.
    fn place(&mut self, dst: Checked<Write>, src: &[u8]);

    /// Copies `src` to `dst` (as long as `src`).
    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]);

    /// Performs an atomic, against local threads too, and returns the value found.
    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(start: u64, len: u64, access: Access) -> Region {
        Region { pd: PdId(1), start, len, host: 4096, access }
    }

    #[test]
    fn ranges_and_rights_are_checked() {
        let mut table = RegionTable::new(4);
        let rw = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let key = table.insert(region(0x1000, 64, rw), 0x1234_5678).unwrap();
        let at = |addr, len, lkey| Sge { addr, len, lkey };
        assert_eq!(table.remote_write(PdId(1), &at(0x1000, 64, key)).unwrap().host(), 4096);
        assert_eq!(table.remote_write(PdId(1), &at(0x1040, 0, key)).unwrap().len(), 0);
        let refused = |sge: &Sge, pd| table.remote_write(pd, sge).unwrap_err();
        assert_eq!(refused(&at(0x1000, 65, key), PdId(1)), AccessError::Range);
        assert_eq!(refused(&at(0xfff, 1, key), PdId(1)), AccessError::Range);
        assert_eq!(refused(&at(u64::MAX, u32::MAX, key), PdId(1)), AccessError::Range);
        assert_eq!(refused(&at(0x1000, 1, key), PdId(2)), AccessError::Pd);
        assert_eq!(refused(&at(0x1000, 1, Key(key.0 ^ 1)), PdId(1)), AccessError::Key);
        let read = table.remote_read(PdId(1), &at(0x1000, 1, key)).unwrap_err();
        assert_eq!(read, AccessError::Permission);
    }

    #[test]
    fn a_removed_key_is_refused_and_others_stay_reachable() {
        let mut table = RegionTable::new(64);
        let keys: Vec<Key> = (0..64u32)
            .map(|i| table.insert(region(u64::from(i) << 20, 64, Access::ALL), i << 8).unwrap())
            .collect();
        assert!(table.insert(region(0, 1, Access::ALL), 99 << 8).is_none());
        for gone in keys.iter().step_by(2) {
            assert!(table.remove(*gone).is_some());
            assert!(table.remove(*gone).is_none());
        }
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(table.get(*key).is_some(), i % 2 == 1);
        }
        assert_eq!(table.len(), 32);
    }

    #[test]
    fn churn_leaves_no_trace() {
        let mut table = RegionTable::new(32);
        let (mut state, mut live) = (1u32, Vec::new());
        for _ in 0..20_000 {
            state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            if live.len() == 32 || (state >> 31 == 1 && !live.is_empty()) {
                let gone: Key = live.swap_remove(state as usize % live.len());
                assert!(table.remove(gone).is_some());
                assert!(table.get(gone).is_none());
            } else {
                live.push(table.insert(region(0, 64, Access::ALL), state).unwrap());
            }
            assert!(live.iter().all(|key| table.get(*key).is_some()));
            assert_eq!(table.len(), live.len());
        }
        live.iter().for_each(|key| assert!(table.remove(*key).is_some()));
        assert!(table.slots.iter().all(|slot| matches!(slot, Slot::Empty)));
    }

    #[test]
    fn regions_never_wrap() {
        let mut table = RegionTable::new(4);
        assert!(table.insert(region(u64::MAX - 3, 8, Access::ALL), 1 << 8).is_none());
    }
}
