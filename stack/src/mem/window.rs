//! Memory windows: keys of their own to parts of a region, which work requests bind and invalidate.
//!
//! A window is an entry of the table like a region, so an access costs the same through either. An
//! unbound window permits nothing. Of the specification's two kinds of type 2 this is 2B: a window
//! belongs to the queue pair that bound it, and only the peer of that queue pair may use it (IBTA
//! volume 1, 10.6.7.2 \[M\]; `rxe_mw.c` of Linux; its citations of clauses are repeated here).

use super::access::{Access, Accessor, PdId};
use super::entry::{Entry, EntryKind, MwType, Slot};
use super::region::Region;
use super::table::RegionTable;
use crate::types::{Key, Qpn};

/// The binding of a window (`struct ibv_mw_bind_info`, and the key).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The window's key until now.
    pub mw: Key,
    /// Its low 8 bits become those of the window's key. The key keeps its other bits, and those of
    /// this value are ignored.
    pub rkey: Key,
    /// The local key of the region.
    pub region: Key,
    /// Address of the first byte, as local work requests name it.
    pub addr: u64,
    /// Length in bytes; 0 unbinds a window of type 1.
    pub len: u64,
    /// Permissions of peers: remote flags, and [`Access::ZERO_BASED`].
    pub access: Access,
}

/// Why a window was not bound or invalidated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WindowError {
    /// No window has this key (any more).
    Key,
    /// Window, region and queue pair are not of one protection domain.
    Pd,
    /// It is bound already. When invalidating: it is not bound for this queue pair.
    State,
    /// A window of type 1 can be neither invalidated nor zero-based. A window of type 2 cannot be
    /// bound to zero bytes.
    Type,
    /// No region has this local key.
    Region,
    /// The region does not let windows be bound, or not with that permission.
    Permission,
    /// The window would not be inside the region.
    Range,
}

/// All that a window can permit.
const REMOTE: Access =
    WRITES.with(Access::REMOTE_READ).with(Access::FLUSH_GLOBAL).with(Access::FLUSH_PERSISTENT);
/// Permissions that change memory.
const WRITES: Access = Access::REMOTE_WRITE.with(Access::REMOTE_ATOMIC);

impl RegionTable {
    /// Makes an unbound window, under a key drawn from `random`; `None` if the table is full.
    pub fn insert_window(&mut self, pd: PdId, mw_type: MwType, random: u32) -> Option<Key> {
        let kind = EntryKind::Window { mw_type, region: None };
        self.insert_entry(Entry::new(unbound(pd), Qpn::default(), kind), random)
    }

    /// Removes a window. The low 8 bits of its key may have changed meanwhile. From now on the key
    /// is refused. Returns whether the window existed.
    pub fn remove_window(&mut self, key: Key) -> bool {
        let Some(at) = self.find_tag(key.0) else { return false };
        if self.window(at).is_none() {
            return false;
        }
        self.unbind(at);
        self.empty(at);
        true
    }

    /// Whether windows are bound to the region `key`.
    #[must_use]
    pub fn has_windows(&self, key: Key) -> bool {
        let entry = self.find(key).map(|at| &self.slots[at]);
        matches!(
            entry,
            Some(Slot::Taken(_, Entry { kind: EntryKind::Region { windows: 1.. }, .. }))
        )
    }

    /// Binds a window; the request was posted to the queue pair `by`.
    ///
    /// # Errors
    /// [`WindowError`]; nothing has changed then.
    pub fn bind(&mut self, by: Accessor, bind: &Bind) -> Result<(), WindowError> {
        let at = self.find_tag(bind.mw.0).ok_or(WindowError::Key)?;
        let (key, pd, mw_type) = self.window(at).ok_or(WindowError::Key)?;
        if mw_type == MwType::Type2 && bind.mw != key {
            return Err(WindowError::Key);
        }
        let rkey = Key(key.0 & !0xff | bind.rkey.0 & 0xff);
        // C10-72
        if pd != by.pd {
            return Err(WindowError::Pd);
        }
        let zero_based = bind.access.admits(Access::ZERO_BASED);
        let owner = match mw_type {
            // o10-36.2.2
            MwType::Type1 if zero_based => return Err(WindowError::Type),
            MwType::Type1 => Qpn::default(),
            // o10-37.2.30
            MwType::Type2 if self.region_of(at).is_some() => return Err(WindowError::State),
            // o10-37.2.40
            MwType::Type2 if bind.len == 0 => return Err(WindowError::Type),
            MwType::Type2 => by.qpn,
        };
        let shown = match bind.len {
            0 => None,
            _ => Some(self.part(by.pd, bind)?),
        };
        self.unbind(at);
        let region = shown.unwrap_or(unbound(pd));
        let to = shown.map(|_| bind.region);
        if let Some(to) = to {
            self.count_windows(to, 1);
        }
        self.owned += usize::from(owner != Qpn::default());
        let kind = EntryKind::Window { mw_type, region: to };
        self.slots[at] = Slot::Taken(rkey, Entry::new(region, owner, kind));
        Ok(())
    }

    /// The range that the window will show.
    fn part(&self, pd: PdId, bind: &Bind) -> Result<Region, WindowError> {
        let at = self.find(bind.region).ok_or(WindowError::Region)?;
        let Slot::Taken(_, Entry { region, kind: EntryKind::Region { .. }, .. }) = self.slots[at]
        else {
            return Err(WindowError::Region);
        };
        if region.pd != pd {
            return Err(WindowError::Pd);
        }
        // C10-73; also, no window is bound to a zero-based region.
        if !region.access.admits(Access::MW_BIND) || region.access.admits(Access::ZERO_BASED) {
            return Err(WindowError::Permission);
        }
        let wanted = bind.access.without(Access::ZERO_BASED);
        let writes = wanted != wanted.without(WRITES);
        // C10-74
        if !REMOTE.admits(wanted) || (writes && !region.access.admits(Access::LOCAL_WRITE)) {
            return Err(WindowError::Permission);
        }
        // C10-75
        let offset = bind.addr.checked_sub(region.start).ok_or(WindowError::Range)?;
        if offset.checked_add(bind.len).is_none_or(|end| end > region.len) {
            return Err(WindowError::Range);
        }
        let start = if bind.access.admits(Access::ZERO_BASED) { 0 } else { bind.addr };
        Ok(Region { pd, start, len: bind.len, host: region.host + offset, access: wanted })
    }

    /// Invalidates the window `key`. The request was posted to the queue pair `by`, or its peer
    /// sent it. The window must be of type 2 and bound for that queue pair. Regions are never
    /// invalidated.
    ///
    /// # Errors
    /// [`WindowError`]; nothing has changed then.
    pub fn invalidate(&mut self, by: Accessor, key: Key) -> Result<(), WindowError> {
        let at = self.find(key).ok_or(WindowError::Key)?;
        let (_, pd, mw_type) = self.window(at).ok_or(WindowError::Key)?;
        if pd != by.pd {
            return Err(WindowError::Pd);
        }
        // o10-37.2.26
        if mw_type == MwType::Type1 {
            return Err(WindowError::Type);
        }
        let Slot::Taken(_, Entry { owner, .. }) = self.slots[at] else {
            return Err(WindowError::Key);
        };
        if owner != by.qpn {
            return Err(WindowError::State);
        }
        self.unbind(at);
        Ok(())
    }

    /// Unbinds all windows of a queue pair that is gone or was reset: its number may be given out
    /// again.
    pub fn free_windows(&mut self, qpn: Qpn) {
        if self.owned > 0 && qpn != Qpn::default() {
            self.unbind_all(|entry| entry.owner == qpn);
        }
    }

    /// Unbinds all windows of a region that goes away.
    pub(super) fn revoke_windows_to(&mut self, key: Key) {
        self.unbind_all(|entry| {
            matches!(entry.kind, EntryKind::Window { region: Some(region), .. } if region == key)
        });
    }

    fn unbind_all(&mut self, which: impl Fn(&Entry) -> bool) {
        for at in 0..self.slots.len() {
            if matches!(&self.slots[at], Slot::Taken(_, entry) if which(entry)) {
                self.unbind(at);
            }
        }
    }

    /// Key, domain and type of the window in a slot.
    fn window(&self, at: usize) -> Option<(Key, PdId, MwType)> {
        match &self.slots[at] {
            Slot::Taken(key, Entry { region, kind: EntryKind::Window { mw_type, .. }, .. }) => {
                Some((*key, region.pd, *mw_type))
            }
            _ => None,
        }
    }

    /// The region to which the window in a slot is bound.
    fn region_of(&self, at: usize) -> Option<Key> {
        match &self.slots[at] {
            Slot::Taken(_, Entry { kind: EntryKind::Window { region, .. }, .. }) => *region,
            _ => None,
        }
    }

    /// Unbinds the window in this slot: it permits nothing any more.
    fn unbind(&mut self, at: usize) {
        let Slot::Taken(_, entry) = &mut self.slots[at] else { return };
        let EntryKind::Window { region, .. } = &mut entry.kind else { return };
        let from = region.take();
        let owner = std::mem::take(&mut entry.owner);
        entry.region = unbound(entry.region.pd);
        self.owned -= usize::from(owner != Qpn::default());
        if let Some(from) = from {
            self.count_windows(from, -1);
        }
    }

    fn count_windows(&mut self, region: Key, change: i32) {
        if let Some(at) = self.find(region)
            && let Slot::Taken(_, Entry { kind: EntryKind::Region { windows }, .. }) =
                &mut self.slots[at]
        {
            *windows = windows.saturating_add_signed(change);
        }
    }
}

/// An unbound window's entry.
const fn unbound(pd: PdId) -> Region {
    Region { pd, start: 0, len: 0, host: 0, access: Access::NONE }
}

#[cfg(test)]
mod tests {
    use super::super::{AccessError, Sge};
    use super::*;

    const PD: PdId = PdId(1);
    const QP: Accessor = Accessor { pd: PD, qpn: Qpn::new(17) };
    const OTHER: Accessor = Accessor { pd: PD, qpn: Qpn::new(18) };
    const OPEN: Access = Access::LOCAL_WRITE.with(Access::MW_BIND);

    fn table() -> (RegionTable, Key) {
        let mut table = RegionTable::new(8);
        let region = Region { pd: PD, start: 0x1000, len: 0x1000, host: 64, access: OPEN };
        let key = table.insert(region, 0x1234_5600).unwrap();
        (table, key)
    }

    fn bind(mw: Key, region: Key) -> Bind {
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        Bind { mw, rkey: next(mw), region, addr: 0x1100, len: 0x100, access }
    }

    fn next(key: Key) -> Key {
        Key(key.0 & !0xff | (key.0 + 1) & 0xff)
    }

    fn write(
        table: &RegionTable,
        by: Accessor,
        key: Key,
        addr: u64,
        len: u32,
    ) -> Result<u64, AccessError> {
        table.remote_write(by, &Sge { addr, len, lkey: key }).map(|checked| checked.host())
    }

    #[test]
    fn a_window_admits_what_it_shows_and_its_owner_only() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type2, 0xabcd_ef00).unwrap();
        assert_eq!(write(&table, QP, mw, 0x1100, 1), Err(AccessError::Permission));
        let bind = bind(mw, region);
        table.bind(QP, &bind).unwrap();
        let key = bind.rkey;
        assert_eq!(write(&table, QP, key, 0x1100, 0x100), Ok(64 + 0x100));
        assert_eq!(write(&table, QP, key, 0x10ff, 1), Err(AccessError::Range));
        assert_eq!(write(&table, QP, key, 0x1101, 0x100), Err(AccessError::Range));
        assert_eq!(write(&table, QP, mw, 0x1100, 1), Err(AccessError::Key));
        assert_eq!(write(&table, OTHER, key, 0x1100, 1), Err(AccessError::Qp));
        let of_other_pd = Accessor { pd: PdId(2), ..QP };
        assert_eq!(write(&table, of_other_pd, key, 0x1100, 1), Err(AccessError::Pd));
        // Neither a peer by the region's own key, which permits nothing to peers, nor local code by
        // the window's key.
        assert_eq!(write(&table, QP, region, 0x1100, 1), Err(AccessError::Permission));
        let sge = Sge { addr: 0x1100, len: 1, lkey: key };
        assert_eq!(table.local_read(PD, &sge).unwrap_err(), AccessError::Permission);
        assert!(table.local_write(PD, &Sge { lkey: region, ..sge }).is_ok());
        assert_eq!(table.remote_atomic(QP, 0x1100, key).unwrap_err(), AccessError::Permission);
    }

    #[test]
    fn what_the_specification_refuses() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type2, 0xabcd_ef00).unwrap();
        let good = bind(mw, region);
        let closed = Region { pd: PD, start: 0, len: 64, host: 0, access: Access::LOCAL_WRITE };
        let closed = table.insert(closed, 0x7777_0000).unwrap();
        let read_only =
            Region { pd: PD, start: 0x1000, len: 0x1000, host: 0, access: Access::MW_BIND };
        let read_only = table.insert(read_only, 0x8888_0000).unwrap();
        let foreign = Region { pd: PdId(2), start: 0x1000, len: 0x1000, host: 0, access: OPEN };
        let foreign = table.insert(foreign, 0x9999_0000).unwrap();
        let zero =
            Region { pd: PD, start: 0, len: 0x2000, host: 0, access: OPEN | Access::ZERO_BASED };
        let zero = table.insert(zero, 0x6666_0000).unwrap();
        let refused = [
            (Bind { mw: Key(mw.0 ^ 1), ..good }, WindowError::Key),
            (Bind { mw: region, rkey: region, ..good }, WindowError::Key),
            (Bind { len: 0, ..good }, WindowError::Type),
            (Bind { region: Key(region.0 ^ 1), ..good }, WindowError::Region),
            (Bind { region: mw, ..good }, WindowError::Region),
            (Bind { region: closed, addr: 0, len: 8, ..good }, WindowError::Permission),
            (Bind { region: read_only, ..good }, WindowError::Permission),
            (Bind { region: foreign, ..good }, WindowError::Pd),
            (Bind { region: zero, ..good }, WindowError::Permission),
            (Bind { access: Access::LOCAL_WRITE, ..good }, WindowError::Permission),
            (Bind { addr: 0xfff, ..good }, WindowError::Range),
            (Bind { addr: 0x1f01, ..good }, WindowError::Range),
            (Bind { len: u64::MAX, ..good }, WindowError::Range),
            (Bind { addr: u64::MAX, ..good }, WindowError::Range),
        ];
        let before = format!("{table:?}");
        for (bind, why) in refused {
            assert_eq!(table.bind(QP, &bind), Err(why), "{bind:?}");
        }
        assert_eq!(before, format!("{table:?}"), "nothing has changed");
        assert_eq!(table.bind(Accessor { pd: PdId(2), ..QP }, &good), Err(WindowError::Pd));
        // Without writing, the binding needs no local right to write.
        table.bind(QP, &Bind { region: read_only, access: Access::REMOTE_READ, ..good }).unwrap();
        assert_eq!(table.bind(QP, &Bind { mw: good.rkey, ..good }), Err(WindowError::State));
    }

    #[test]
    fn who_may_invalidate_what() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type2, 0xabcd_ef00).unwrap();
        assert_eq!(table.invalidate(QP, mw), Err(WindowError::State));
        let bind = bind(mw, region);
        table.bind(QP, &bind).unwrap();
        assert!(table.has_windows(region));
        assert_eq!(table.invalidate(QP, mw), Err(WindowError::Key));
        assert_eq!(table.invalidate(OTHER, bind.rkey), Err(WindowError::State));
        assert_eq!(table.invalidate(QP, region), Err(WindowError::Key));
        table.invalidate(QP, bind.rkey).unwrap();
        assert!(!table.has_windows(region));
        assert_eq!(write(&table, QP, bind.rkey, 0x1100, 1), Err(AccessError::Permission));
        assert_eq!(table.invalidate(QP, bind.rkey), Err(WindowError::State));
        // Free again, for any queue pair of its domain.
        let again = Bind { mw: bind.rkey, rkey: next(bind.rkey), ..bind };
        table.bind(OTHER, &again).unwrap();
        assert_eq!(write(&table, OTHER, again.rkey, 0x1100, 1), Ok(64 + 0x100));
        // The queue pair goes away.
        table.free_windows(QP.qpn);
        assert!(table.has_windows(region));
        table.free_windows(OTHER.qpn);
        assert!(!table.has_windows(region) && table.owned == 0);
        assert!(write(&table, OTHER, again.rkey, 0x1100, 1).is_err());
    }

    /// A refused new binding, which would show another part, leaves the window as it was, with its
    /// key.
    #[test]
    fn a_window_whose_next_binding_is_refused_still_shows_what_it_did() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type1, 0xabcd_ef00).unwrap();
        let first = bind(mw, region);
        table.bind(QP, &first).unwrap();
        let before = format!("{table:?}");
        let next = Bind { mw: first.rkey, rkey: next(first.rkey), ..first };
        for (refused, why) in [
            (Bind { addr: 0x1f01, ..next }, WindowError::Range),
            (Bind { region: Key(region.0 ^ 1), ..next }, WindowError::Region),
            (Bind { access: Access::LOCAL_WRITE, ..next }, WindowError::Permission),
        ] {
            assert_eq!(table.bind(QP, &refused), Err(why));
        }
        assert_eq!(before, format!("{table:?}"));
        assert!(table.has_windows(region) && write(&table, QP, first.rkey, 0x1100, 1).is_ok());
    }

    #[test]
    fn type_1_is_bound_again_and_again_and_not_invalidated() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type1, 0xabcd_effe).unwrap();
        let first = bind(mw, region);
        let zero_based = Bind { access: first.access | Access::ZERO_BASED, ..first };
        assert_eq!(table.bind(QP, &zero_based), Err(WindowError::Type));
        table.bind(QP, &first).unwrap();
        assert!(write(&table, OTHER, first.rkey, 0x1100, 1).is_ok());
        assert_eq!(table.invalidate(QP, first.rkey), Err(WindowError::Type));
        let second = Bind { mw: first.rkey, rkey: next(first.rkey), addr: 0x1800, ..first };
        table.bind(QP, &second).unwrap();
        assert_eq!(write(&table, QP, first.rkey, 0x1100, 1), Err(AccessError::Key));
        assert_eq!(write(&table, QP, second.rkey, 0x1800, 1), Ok(64 + 0x800));
        let unbind = Bind { mw: second.rkey, rkey: next(second.rkey), len: 0, ..second };
        table.bind(QP, &unbind).unwrap();
        assert!(!table.has_windows(region));
        assert_eq!(write(&table, QP, unbind.rkey, 0x1800, 1), Err(AccessError::Permission));
    }

    /// Programs may set any bits above the low 8, and a device takes the low 8 alone.
    #[test]
    fn a_binding_gives_the_low_bits_of_the_key() {
        for mw_type in [MwType::Type1, MwType::Type2] {
            let (mut table, region) = table();
            let mw = table.insert_window(PD, mw_type, 0xabcd_ef00).unwrap();
            for given in [0xba, 0xffff_ffbb, !mw.0 & !0xff | 0xbc] {
                let now = table.window(table.find_tag(mw.0).unwrap()).unwrap().0;
                table.bind(QP, &Bind { rkey: Key(given), ..bind(now, region) }).unwrap();
                let key = Key(mw.0 & !0xff | given & 0xff);
                assert!(write(&table, QP, key, 0x1100, 1).is_ok());
                assert_eq!(write(&table, QP, now, 0x1100, 1), Err(AccessError::Key));
                if mw_type == MwType::Type2 {
                    table.invalidate(QP, key).unwrap();
                }
            }
            assert_eq!(table.len(), 2);
        }
    }

    #[test]
    fn zero_based_windows_count_from_their_first_byte() {
        let (mut table, region) = table();
        let mw = table.insert_window(PD, MwType::Type2, 0xabcd_ef00).unwrap();
        let bind = bind(mw, region);
        let bind = Bind { access: bind.access | Access::ZERO_BASED, ..bind };
        table.bind(QP, &bind).unwrap();
        assert_eq!(write(&table, QP, bind.rkey, 0, 0x100), Ok(64 + 0x100));
        assert_eq!(write(&table, QP, bind.rkey, 0xff, 2), Err(AccessError::Range));
        assert_eq!(write(&table, QP, bind.rkey, 0x1100, 1), Err(AccessError::Range));
    }

    #[test]
    fn with_its_region_or_itself_the_key_goes() {
        let (mut table, region) = table();
        let windows = [1, 2, 3].map(|n| {
            let mw = table.insert_window(PD, MwType::Type2, n << 16).unwrap();
            let bind = bind(mw, region);
            table.bind(QP, &bind).unwrap();
            bind.rkey
        });
        // Any key that the window had removes it.
        assert!(table.remove_window(Key(windows[0].0 ^ 0xff)));
        assert!(!table.remove_window(windows[0]) && !table.remove_window(region));
        assert_eq!(write(&table, QP, windows[0], 0x1100, 1), Err(AccessError::Key));
        assert!(table.remove(windows[1]).is_none());
        assert!(write(&table, QP, windows[1], 0x1100, 1).is_ok());
        table.remove(region).unwrap();
        assert_eq!((table.len(), table.owned), (2, 0));
        for key in &windows[1..] {
            assert_eq!(write(&table, QP, *key, 0x1100, 1), Err(AccessError::Permission));
            assert!(table.remove_window(*key));
        }
        assert!(table.is_empty());
    }

    #[test]
    fn a_region_registered_anew_has_another_key() {
        let (mut table, region) = table();
        let changed = Region { pd: PdId(2), start: 0, len: 16, host: 8, access: Access::ALL };
        let key = table.replace(region, changed, region.0).unwrap();
        assert_ne!(key.0 >> 8, region.0 >> 8);
        assert_eq!(table.get(key), Some(changed));
        assert_eq!((table.get(region), table.len()), (None, 1));
        assert_eq!(table.replace(region, changed, 1), None);
        let wraps = Region { start: u64::MAX, ..changed };
        assert_eq!(table.replace(key, wraps, 1), None);
        assert_eq!(table.get(key), Some(changed));
    }
}
