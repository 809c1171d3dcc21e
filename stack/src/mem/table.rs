//! The table of regions and windows, and the checks.

use core::marker::PhantomData;
use std::collections::TryReserveError;

use super::access::{Access, AccessError, Accessor, PdId};
use super::entry::{Entry, EntryKind, Slot};
use super::region::{Atomic, Checked, Read, Region, Sge, Write};
use crate::types::{Key, Qpn};

/// The slots of a table with few entries.
const SLOTS_MIN: usize = 32;
/// Bytes that are left when the table has grown.
const SPARE: usize = 64 << 10;

/// The registered regions and the windows by key.
///
/// The upper 24 bits of a key are random; the table finds the region or window by them. The lower 8
/// bits belong to the consumer and must match too. Capacity is fixed; look-ups do not allocate.
#[derive(Debug)]
pub struct RegionTable {
    /// Open addressing with linear probing and no tombstones; a power of two, at most half full.
    pub(super) slots: Box<[Slot]>,
    used: usize,
    max: usize,
    /// Windows that belong to a queue pair.
    pub(super) owned: usize,
}

impl RegionTable {
    /// A table for at most `max` regions and windows.
    #[must_use]
    pub fn new(max: usize) -> Self {
        let slots = vec![Slot::Empty; SLOTS_MIN].into();
        Self { slots, used: 0, max, owned: 0 }
    }

    /// Number of regions and windows.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.used
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Registers a region under a key drawn from `random`; `None` if the table is full or the
    /// region wraps around the address space.
    pub fn insert(&mut self, region: Region, random: u32) -> Option<Key> {
        region.start.checked_add(region.len)?;
        region.host.checked_add(region.len)?;
        let region = Region { access: region.access.with(Access::LOCAL), ..region };
        let kind = EntryKind::Region { windows: 0 };
        self.insert_entry(Entry::new(region, Qpn::default(), kind), random)
    }

    /// Changes the protection domain and the permissions of the region `key`, which keeps its key
    /// and its memory. Returns whether there is such a region.
    pub fn change(&mut self, key: Key, pd: PdId, access: Access) -> bool {
        let at = self.find(key);
        let Some(Slot::Taken(_, Entry { region, kind: EntryKind::Region { .. }, .. })) =
            at.map(|at| &mut self.slots[at])
        else {
            return false;
        };
        (region.pd, region.access) = (pd, access.with(Access::LOCAL));
        true
    }

    /// Registers `region` in the place of the region `key`, which is refused from now on. `None`,
    /// with nothing changed, if there is no such region, or if the new one wraps around the address
    /// space.
    pub fn replace(&mut self, key: Key, region: Region, random: u32) -> Option<Key> {
        region.start.checked_add(region.len)?;
        region.host.checked_add(region.len)?;
        self.remove(key)?;
        // The slot is free now. The new key must differ: the old key must not reach the new memory.
        self.insert(region, if random >> 8 == key.0 >> 8 { !random } else { random })
    }

    pub(super) fn insert_entry(&mut self, entry: Entry, random: u32) -> Option<Key> {
        if self.used >= self.max {
            return None;
        }
        let mut key = random;
        // Programs send keys that look like an index by mistake: 0 is never given.
        while key >> 8 == 0 || self.find_tag(key).is_some() {
            key = key.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15);
        }
        self.reserve().ok()?;
        self.used += 1;
        self.place(Slot::Taken(Key(key), entry));
        Some(Key(key))
    }

    /// Makes room for another entry.
    ///
    /// # Errors
    /// There is no memory. The table stays as it was.
    pub fn reserve(&mut self) -> Result<(), TryReserveError> {
        if (self.used + 1) * 2 <= self.slots.len() {
            return Ok(());
        }
        let twice = empty(self.slots.len() * 2)?;
        for slot in std::mem::replace(&mut self.slots, twice) {
            self.place(slot);
        }
        Ok(())
    }

    /// Puts an entry where look-ups find it.
    fn place(&mut self, slot: Slot) {
        let Slot::Taken(key, _) = slot else { return };
        let mut at = self.home(key.0);
        while matches!(self.slots[at], Slot::Taken(..)) {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = slot;
    }

    /// Removes a region: from now on its key is refused, and so are those of the windows that are
    /// bound to it.
    pub fn remove(&mut self, key: Key) -> Option<Region> {
        let at = self.find(key)?;
        let Slot::Taken(_, entry) = &self.slots[at] else { return None };
        let EntryKind::Region { windows } = entry.kind else { return None };
        let region = entry.plain();
        if windows > 0 {
            self.revoke_windows_to(key);
        }
        self.empty(at);
        Some(region)
    }

    pub(super) fn empty(&mut self, at: usize) {
        self.close_gap(at);
        self.used -= 1;
    }

    /// Empties a slot and moves later entries up, so that every chain stays whole.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let Slot::Taken(key, _) = self.slots[at] else { break };
            // An entry may move up if its chain begins at the gap or before.
            if at.wrapping_sub(self.home(key.0)) & mask >= at.wrapping_sub(gap) & mask {
                self.slots.swap(gap, at);
                gap = at;
            }
        }
        self.slots[gap] = Slot::Empty;
    }

    /// The region of a key, or the part that its window shows.
    #[must_use]
    pub fn get(&self, key: Key) -> Option<Region> {
        self.entry(key).map(Entry::plain)
    }

    #[inline(always)]
    fn entry(&self, key: Key) -> Option<&Entry> {
        // Most entries are in the first slot of their chain.
        match &self.slots[self.home(key.0)] {
            Slot::Taken(found, entry) if *found == key => Some(entry),
            _ => self.search(key),
        }
    }

    #[inline(never)]
    fn search(&self, key: Key) -> Option<&Entry> {
        match &self.slots[self.find(key)?] {
            Slot::Taken(_, entry) => Some(entry),
            Slot::Empty => None,
        }
    }

    /// Checks an access of `len` bytes at `addr` through `key`, by queue pair `by`, that needs
    /// `need`.
    ///
    /// # Errors
    /// [`AccessError`] names the first fault found.
    #[inline(always)]
    pub fn check(
        &self,
        key: Key,
        by: Accessor,
        addr: u64,
        len: u32,
        need: Access,
    ) -> Result<Checked<()>, AccessError> {
        let entry = self.entry(key).ok_or(AccessError::Key)?;
        let Entry { region, owner, .. } = entry;
        if region.pd != by.pd {
            return Err(AccessError::Pd);
        }
        if !region.access.admits(need) {
            return Err(AccessError::Permission);
        }
        if *owner != Qpn::default() && *owner != by.qpn {
            return Err(AccessError::Qp);
        }
        let last = region.len.checked_sub(len.into()).ok_or(AccessError::Range)?;
        // That of an address before the region wraps to more than any region is long.
        let offset = addr.wrapping_sub(region.start);
        if offset > last {
            return Err(AccessError::Range);
        }
        Ok(Checked { host: region.host + offset, len, right: PhantomData })
    }

    #[inline]
    fn home(&self, key: u32) -> usize {
        ((key >> 8).wrapping_mul(0x9e37_79b1) >> 7) as usize & (self.slots.len() - 1)
    }

    /// Where the region or window `key` is.
    pub(super) fn find(&self, key: Key) -> Option<usize> {
        let at = self.find_tag(key.0)?;
        matches!(self.slots[at], Slot::Taken(found, _) if found == key).then_some(at)
    }

    pub(super) fn find_tag(&self, key: u32) -> Option<usize> {
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

/// Slots without entries: a power of two.
fn empty(slots: usize) -> Result<Box<[Slot]>, TryReserveError> {
    // Its caller still allocates little things: there is room for these, too.
    let mut spare: Vec<u8> = Vec::new();
    spare.try_reserve_exact(SPARE)?;
    std::hint::black_box(&mut spare);
    let mut all = Vec::new();
    all.try_reserve_exact(slots)?;
    all.resize(slots, Slot::Empty);
    Ok(all.into())
}

/// Regions have no owner, and windows no local key.
const fn local(pd: PdId) -> Accessor {
    Accessor { pd, qpn: Qpn::new(0) }
}

impl RegionTable {
    /// A local source: any region of the protection domain may be read.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn local_read(&self, pd: PdId, sge: &Sge) -> Result<Checked<Read>, AccessError> {
        self.check(sge.lkey, local(pd), sge.addr, sge.len, Access::LOCAL).map(Checked::with)
    }

    /// A local destination.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn local_write(&self, pd: PdId, sge: &Sge) -> Result<Checked<Write>, AccessError> {
        const NEED: Access = Access::LOCAL.with(Access::LOCAL_WRITE);
        self.check(sge.lkey, local(pd), sge.addr, sge.len, NEED).map(Checked::with)
    }

    /// The target of a remote WRITE.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn remote_write(&self, by: Accessor, at: &Sge) -> Result<Checked<Write>, AccessError> {
        self.check(at.lkey, by, at.addr, at.len, Access::REMOTE_WRITE).map(Checked::with)
    }

    /// The source of a remote READ.
    ///
    /// # Errors
    /// See [`RegionTable::check`].
    #[inline]
    pub fn remote_read(&self, by: Accessor, at: &Sge) -> Result<Checked<Read>, AccessError> {
        self.check(at.lkey, by, at.addr, at.len, Access::REMOTE_READ).map(Checked::with)
    }

    /// The target of a remote atomic: eight bytes, aligned for peers and in the process.
    ///
    /// # Errors
    /// See [`RegionTable::check`]; [`AccessError::Range`] also if it is not aligned in the process.
    pub fn remote_atomic(
        &self,
        by: Accessor,
        addr: u64,
        rkey: Key,
    ) -> Result<Checked<Atomic>, AccessError> {
        let checked = self.check(rkey, by, addr, 8, Access::REMOTE_ATOMIC)?;
        if checked.host % 8 != 0 {
            return Err(AccessError::Range);
        }
        Ok(checked.with())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(pd: u32) -> Accessor {
        Accessor { pd: PdId(pd), qpn: Qpn::new(77) }
    }

    fn region(start: u64, len: u64, access: Access) -> Region {
        Region { pd: PdId(1), start, len, host: 4096, access }
    }

    #[test]
    fn ranges_and_rights_are_checked() {
        let mut table = RegionTable::new(4);
        let rw = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let key = table.insert(region(0x1000, 64, rw), 0x1234_5678).unwrap();
        let at = |addr, len, lkey| Sge { addr, len, lkey };
        assert_eq!(table.remote_write(by(1), &at(0x1000, 64, key)).unwrap().host(), 4096);
        assert_eq!(table.remote_write(by(1), &at(0x1040, 0, key)).unwrap().len(), 0);
        let refused = |sge: &Sge, pd| table.remote_write(by(pd), sge).unwrap_err();
        assert_eq!(refused(&at(0x1000, 65, key), 1), AccessError::Range);
        assert_eq!(refused(&at(0xfff, 1, key), 1), AccessError::Range);
        assert_eq!(refused(&at(u64::MAX, u32::MAX, key), 1), AccessError::Range);
        assert_eq!(refused(&at(0x1000, 1, key), 2), AccessError::Pd);
        assert_eq!(refused(&at(0x1000, 1, Key(key.0 ^ 1)), 1), AccessError::Key);
        let read = table.remote_read(by(1), &at(0x1000, 1, key)).unwrap_err();
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
    fn the_table_grows_with_its_entries() {
        let mut table = RegionTable::new(1000);
        let keys: Vec<Key> = (0..1000u32)
            .map(|i| {
                let slots = table.slots.len();
                let key = table.insert(region(u64::from(i), 64, Access::ALL), i << 8).unwrap();
                assert!(table.slots.len() == slots || table.slots.len() == 2 * slots);
                assert!(table.slots.len() >= 2 * table.len());
                key
            })
            .collect();
        assert_eq!((SLOTS_MIN, table.slots.len()), (32, 2048));
        for (i, key) in keys.into_iter().enumerate() {
            assert_eq!(table.get(key).unwrap().start, i as u64);
            assert!(table.remove(key).is_some());
        }
        assert!(table.slots.iter().all(|slot| matches!(slot, Slot::Empty)));
    }

    #[test]
    fn churn_leaves_no_trace() {
        let mut table = RegionTable::new(32);
        let (mut state, mut live) = (1u32, Vec::new());
        for _ in 0..if cfg!(miri) { 300 } else { 20_000 } {
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
    fn a_region_keeps_its_key_when_domain_and_permissions_change() {
        let mut table = RegionTable::new(4);
        let [key, other] =
            [1, 2].map(|n| table.insert(region(0, 64, Access::REMOTE_READ), n << 8).unwrap());
        let write = |table: &RegionTable, pd, key| {
            table.remote_write(by(pd), &Sge { addr: 0, len: 8, lkey: key }).map(|_| ())
        };
        assert_eq!(write(&table, 1, key), Err(AccessError::Permission));
        assert!(table.change(key, PdId(2), Access::LOCAL_WRITE | Access::REMOTE_WRITE));
        assert_eq!(write(&table, 1, key), Err(AccessError::Pd));
        assert_eq!(write(&table, 2, key), Ok(()));
        assert_eq!(write(&table, 1, other), Err(AccessError::Permission));
        assert!(table.local_read(PdId(2), &Sge { addr: 0, len: 8, lkey: key }).is_ok());
        let window = table.insert_window(PdId(1), crate::mem::MwType::Type1, 3 << 8).unwrap();
        for none in [window, Key(77 << 8)] {
            assert!(!table.change(none, PdId(1), Access::ALL));
        }
    }

    #[test]
    fn regions_never_wrap() {
        let mut table = RegionTable::new(4);
        assert!(table.insert(region(u64::MAX - 3, 8, Access::ALL), 1 << 8).is_none());
    }
}
