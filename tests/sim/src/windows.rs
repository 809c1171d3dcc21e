//! Memory windows: keys to a part of an end's memory, given and taken back while the peer uses
//! them.

use rocinante_stack::mem::{Access, Accessor, Bind, MwType};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};

use crate::check::Verdict;
use crate::draft::Draft;
use crate::memory::{LONGEST, Zone, stride};
use crate::model::{EndId, Op, Stream, peer};
use crate::work::base_of;
use crate::world::{Stage, World};

/// The part of a region that the peer reaches through a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shows {
    Nothing,
    Part,
    /// A change is in flight.
    Either,
}

/// A window of an end, or the place for one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pane {
    mw_type: MwType,
    pub(crate) key: Option<Key>,
    /// The previous key.
    old: Option<Key>,
    pub(crate) shows: Shows,
    /// The part of the zone, and the rights there.
    from: u64,
    len: u64,
    access: Access,
    /// Whether a request that binds or invalidates it is outstanding.
    pending: bool,
    /// Whether the region was deregistered since that was posted.
    revoked: bool,
    /// The part that it showed before that.
    before: Shows,
}

impl Pane {
    pub(crate) const fn new(mw_type: MwType) -> Self {
        Self {
            mw_type,
            key: None,
            old: None,
            shows: Shows::Nothing,
            from: 0,
            len: 0,
            access: Access::NONE,
            pending: false,
            revoked: false,
            before: Shows::Nothing,
        }
    }

    /// The window exists no longer.
    pub(crate) fn forget(&mut self) {
        *self = Self { old: self.key.or(self.old), ..Self::new(self.mw_type) };
    }
}

/// A way to a range of the peer's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) at: u64,
    pub(crate) rkey: Key,
    pub(crate) len: u64,
    /// Whether it leads through a window.
    pub(crate) pane: bool,
    pub(crate) bad: bool,
    pub(crate) excused: bool,
}

/// The index of the window of type 2 among an end's.
const OWN: usize = 1;

impl World<'_> {
    /// Makes the windows that an end lacks.
    pub(crate) fn make_panes(&mut self, end: EndId) {
        let pd = self.domain(end);
        for at in 0..2 {
            let random = self.random.bits();
            let ram = &mut self.hosts[self.ends[end].host].ram;
            let pane = &mut self.ends[end].panes[at];
            if pane.key.is_none() {
                pane.key = ram.regions.insert_window(pd, pane.mw_type, random);
                self.tally.steps += 1;
            }
        }
    }

    /// The queue pair of `end` is gone or was reset: its window of type 2 is invalid.
    pub(crate) fn close_pane(&mut self, end: EndId) {
        self.doubt(end, OWN);
        self.void(end, OWN);
        let this = &mut self.ends[end];
        let ram = &mut self.hosts[this.host].ram;
        if let Some(key) = this.panes[OWN].key {
            ram.regions.remove_window(key);
        }
        this.panes[OWN].forget();
    }

    /// The host of `end` is down, with all its registrations.
    pub(crate) fn lose_panes(&mut self, end: EndId) {
        for at in 0..2 {
            self.doubt(end, at);
            self.void(end, at);
            self.ends[end].panes[at].forget();
        }
    }

    /// The region is deregistered: its windows show nothing.
    pub(crate) fn revoke_panes(&mut self, end: EndId) {
        for at in 0..2 {
            let pane = &mut self.ends[end].panes[at];
            (pane.shows, pane.revoked) = (Shows::Nothing, pane.pending);
            self.doubt(end, at);
            self.void(end, at);
        }
        let Some(stream) = self.ends[end].current() else { return };
        for request in stream.pending_mut() {
            match request.op {
                Op::Bind => request.excuses.push(WcStatus::MwBindErr),
                Op::Invalidate => request.excuses.push(WcStatus::LocQpOpErr),
                _ => {}
            }
        }
    }

    /// Whether a request of the peer goes through the window `key`.
    fn is_used(&self, end: EndId, key: Key) -> bool {
        let mut pending = self.ends[peer(end)].streams.iter().flat_map(Stream::pending);
        pending.any(|request| request.through == Some(key))
    }

    /// Requests through the window may be refused from now on.
    fn doubt(&mut self, end: EndId, at: usize) {
        let key = self.ends[end].panes[at].key;
        for stream in &mut self.ends[peer(end)].streams {
            let through = stream.pending_mut().filter(|request| request.through == key);
            through.for_each(|request| request.excuses.push(WcStatus::RemAccessErr));
        }
    }

    /// Requests through the window that are not executed yet must not be executed any more.
    fn void(&mut self, end: EndId, at: usize) {
        let key = self.ends[end].panes[at].key;
        for stream in &mut self.ends[peer(end)].streams {
            let through = stream.pending_mut().filter(|request| request.through == key);
            through.for_each(|request| request.void |= key.is_some());
        }
    }

    /// Draws a range and rights for a window, under the key that follows its own.
    fn draw(&mut self, end: EndId, at: usize) -> Option<Bind> {
        let region = self.ends[end].keys[Zone::Window as usize]?;
        let from = self.random.below(LONGEST / 2);
        let len = self.random.range(1, LONGEST - from + 1);
        let both = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let access = self.random.of(&[both, both, Access::REMOTE_WRITE, Access::REMOTE_READ]);
        let this = &mut self.ends[end];
        let arena = self.hosts[this.host].ram.arena.len() as u64;
        let start = base_of(end, arena) + this.index as u64 * stride() + Zone::Window.offset();
        let pane = &mut this.panes[at];
        let mw = pane.key?;
        let rkey = Key(mw.0 & !0xff | mw.0.wrapping_add(1) & 0xff);
        (pane.key, pane.old) = (Some(rkey), Some(mw));
        (pane.from, pane.len, pane.access) = (from, len, access);
        Some(Bind { mw, rkey, region, addr: start + from, len, access })
    }

    /// The program binds the window of type 1 anew, or unbinds it.
    pub(crate) fn bind_by_verb(&mut self, end: EndId) -> Verdict {
        let this = &self.ends[end];
        if this.panes[0].key.is_none() || this.keys[Zone::Window as usize].is_none() {
            return Ok(());
        }
        self.doubt(end, 0);
        self.void(end, 0);
        let Some(mut bind) = self.draw(end, 0) else { return Ok(()) };
        let away = self.random.one_in(4);
        if away {
            bind.len = 0;
        }
        let (pd, qpn) = (self.domain(end), self.ends[end].qpn.unwrap_or_default());
        let regions = &mut self.hosts[self.ends[end].host].ram.regions;
        self.tally.steps += 1;
        if let Err(error) = regions.bind(Accessor { pd, qpn }, &bind) {
            return Err(format!("end {end}: {bind:?} is refused: {error:?}"));
        }
        self.ends[end].panes[0].shows = if away { Shows::Nothing } else { Shows::Part };
        Ok(())
    }

    /// A request that binds the window of type 2, or invalidates it; seldom a wrong one.
    pub(crate) fn pane_draft(&mut self, end: EndId) -> Option<Draft> {
        let garbage = self.stage == Stage::Storm && self.random.one_in(40);
        let garbage = garbage && self.has.faults.garbage_local;
        let Pane { key, shows, pending, .. } = self.ends[end].panes[OWN];
        let key = key.filter(|_| !pending)?;
        if self.stage == Stage::Prove && self.is_used(end, key) {
            return None;
        }
        let (op, model, bad) = match shows {
            Shows::Part if garbage => {
                let rkey = Key(key.0 ^ 0x55);
                (SendOp::LocalInv { rkey }, Op::Invalidate, Some(WcStatus::LocQpOpErr))
            }
            Shows::Nothing if garbage && self.random.one_in(2) => {
                (SendOp::LocalInv { rkey: key }, Op::Invalidate, Some(WcStatus::LocQpOpErr))
            }
            Shows::Part => (SendOp::LocalInv { rkey: key }, Op::Invalidate, None),
            _ => {
                let Bind { mw, rkey, mut region, addr, mut len, access } = self.draw(end, OWN)?;
                let bad = garbage.then_some(WcStatus::MwBindErr);
                match (garbage, self.random.one_in(2)) {
                    (true, true) => region = Key(region.0 ^ 0x100),
                    (true, false) => len = LONGEST + 1,
                    _ => {}
                }
                (SendOp::BindMw { mw, rkey, region, addr, len, access }, Op::Bind, bad)
            }
        };
        self.tally.faults.garbage_local += u64::from(bad.is_some());
        if model == Op::Invalidate {
            self.doubt(end, OWN);
        }
        let pane = &mut self.ends[end].panes[OWN];
        (pane.pending, pane.revoked) = (true, false);
        (pane.before, pane.shows) = (shows, Shows::Either);
        Some(Draft {
            op,
            model,
            len: 0,
            data: Vec::new(),
            bad,
            overruns: 0,
            through: None,
            excused: false,
        })
    }

    /// A request that binds or invalidates has succeeded.
    pub(crate) fn pane_changed(&mut self, end: EndId, op: Op) {
        if op == Op::Invalidate {
            self.void(end, OWN);
        }
        let pane = &mut self.ends[end].panes[OWN];
        pane.pending = false;
        pane.shows = if op == Op::Bind && !pane.revoked { Shows::Part } else { Shows::Nothing };
    }

    /// It failed: a window that was to be bound keeps its key.
    pub(crate) fn pane_unchanged(&mut self, end: EndId, op: Op) {
        let pane = &mut self.ends[end].panes[OWN];
        pane.pending = false;
        pane.shows = if pane.revoked { Shows::Nothing } else { pane.before };
        if op == Op::Bind {
            pane.key = pane.old.take();
        }
    }

    /// A SEND that invalidates the peer's window, if that is bound; seldom another key.
    pub(crate) fn send_inv(&mut self, end: EndId) -> Option<(SendOp, Op)> {
        let far = peer(end);
        let Pane { key, shows, pending, .. } = self.ends[far].panes[OWN];
        let key = key?;
        let garbage = self.stage == Stage::Storm && self.random.one_in(60);
        if garbage && self.has.faults.garbage_remote {
            self.tally.faults.garbage_remote += 1;
            let rkey = Key(key.0 ^ self.random.of(&[0x80, 0x100]));
            return Some((SendOp::SendInv { rkey }, Op::SendInv { key: rkey, wrong: true }));
        }
        if shows != Shows::Part || pending {
            return None;
        }
        self.doubt(far, OWN);
        let pane = &mut self.ends[far].panes[OWN];
        (pane.pending, pane.revoked, pane.shows) = (true, false, Shows::Either);
        Some((SendOp::SendInv { rkey: key }, Op::SendInv { key, wrong: false }))
    }

    /// Whether a SEND that arrived at `end` may have had nothing to invalidate.
    pub(crate) fn may_be_gone(&self, end: EndId, key: Key, wrong: bool) -> bool {
        let pane = &self.ends[end].panes[OWN];
        wrong || pane.key != Some(key) || pane.shows == Shows::Nothing
    }

    /// A way of `end` to up to `len` bytes of the peer's zone, with the rights `need`: by the
    /// region's key, or through a window.
    pub(crate) fn way(&mut self, end: EndId, len: u64, need: Access, reliable: bool) -> Way {
        let start = self.random.below(LONGEST - len + 1);
        let (choice, dare) = (self.random.index(4), self.random.one_in(12));
        let storm = self.stage == Stage::Storm;
        let refused = reliable && self.has.faults.garbage_remote;
        let far = &self.ends[peer(end)];
        let zone = far.index as u64 * stride() + Zone::Window.offset();
        let key = far.keys[Zone::Window as usize].or(far.stale).unwrap_or_default();
        let direct =
            Way { at: zone + start, rkey: key, len, pane: false, bad: false, excused: false };
        let Some(pane) = far.panes.get(choice).filter(|_| len > 0).copied() else { return direct };
        let Some(key) = pane.key else { return direct };
        let permitted = pane.shows == Shows::Part && pane.access.admits(need);
        let len = len.min(pane.len.max(1));
        let at = zone + pane.from + self.random.below(pane.len.max(len) - len + 1);
        let through = Way { at, rkey: key, len, pane: true, bad: false, excused: false };
        match pane.shows {
            _ if permitted => through,
            Shows::Either if storm && dare && pane.access.admits(need) => {
                Way { excused: true, ..through }
            }
            Shows::Either => direct,
            Shows::Part | Shows::Nothing if storm && dare && refused => {
                self.tally.faults.garbage_remote += 1;
                let was = pane.old.filter(|_| pane.shows == Shows::Nothing && !pane.pending);
                let rkey = was.filter(|_| start.is_multiple_of(2)).unwrap_or(key);
                // The window does not admit this access, or its key is out of date: it must fail.
                Way { rkey, pane: false, bad: true, ..through }
            }
            Shows::Part | Shows::Nothing => direct,
        }
    }

    /// The address and key behind a window of type 2 of another end that shares host and domain
    /// with the peer of `end`.
    pub(crate) fn other_pane(&self, end: EndId, len: u64) -> Option<(u64, Key)> {
        let far = peer(end);
        let (host, pd) = (self.ends[far].host, self.ends[far].pd);
        let arena = self.hosts[host].ram.arena.len() as u64;
        self.hosts[host].ends.iter().find_map(|other| {
            let this = &self.ends[*other];
            let pane = &this.panes[OWN];
            let shown = pane.shows == Shows::Part && pane.len >= len;
            if *other == far || this.pd != pd || !shown {
                return None;
            }
            let place = this.index as u64 * stride() + Zone::Window.offset() + pane.from;
            Some((base_of(*other, arena) + place, pane.key?))
        })
    }
}
