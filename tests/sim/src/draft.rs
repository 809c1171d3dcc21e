//! The requests of programs: valid ones of every kind, and how to make one wrong.

use rocinante_stack::mem::{Access, AtomicOp, FlushLevel, Placement};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpType, SendOp, WcOpcode, WcStatus};

use crate::memory::{LONGEST, Zone, stride};
use crate::model::{EndId, Op, peer};
use crate::windows::Way;
use crate::work::{INLINE, base_of};
use crate::world::{Stage, World};

/// A kind of request: a short WRITE.
const TERSE: u64 = 13;

/// A request for the engine.
pub(crate) struct Draft {
    pub(crate) op: SendOp,
    pub(crate) model: Op,
    pub(crate) len: u32,
    pub(crate) data: Vec<u8>,
    pub(crate) bad: Option<WcStatus>,
    /// Nonzero if only its end is outside: the number of bytes inside, which the requester may send
    /// as messages of their own.
    pub(crate) overruns: u32,
    /// The key of the window through which it goes.
    pub(crate) through: Option<Key>,
    /// Whether it may be refused by the time it arrives.
    pub(crate) excused: bool,
}

impl Draft {
    /// The opcode that its completion must have.
    pub(crate) fn opcode(&self) -> WcOpcode {
        match self.model {
            Op::Send { .. } | Op::SendInv { .. } | Op::Datagram { .. } => WcOpcode::Send,
            Op::Write { .. } => WcOpcode::RdmaWrite,
            Op::Read { .. } => WcOpcode::RdmaRead,
            Op::Atomic { op: AtomicOp::CompareSwap { .. }, .. } => WcOpcode::CompSwap,
            Op::Atomic { .. } => WcOpcode::FetchAdd,
            Op::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            Op::Flush => WcOpcode::Flush,
            Op::Bind => WcOpcode::BindMw,
            Op::Invalidate => WcOpcode::LocalInv,
        }
    }
}

/// The rights that a request needs at the peer, and its way there.
struct Intent {
    op: SendOp,
    model: Op,
    len: u64,
    need: Access,
    zone: Option<Zone>,
    way: Option<Way>,
}

impl World<'_> {
    /// A valid request, as far as the connection permits it.
    pub(crate) fn draft(&mut self, end: EndId) -> Option<Draft> {
        let reliable = self.connections[end / 2].qp_type == QpType::Rc;
        let terse = self.is_terse(end) && !self.random.one_in(4);
        let kind = if terse { TERSE } else { self.random.below(if reliable { 13 } else { 5 }) };
        let kind = self.permitted(kind);
        if kind == 4 || kind == 12 {
            return self.pane_draft(end);
        }
        let Intent { op, model, len, need, zone, way } = self.plan(end, kind, reliable)?;
        let far = &self.ends[peer(end)];
        let mut bad = None;
        let asks = len > 0 || model == Op::Flush;
        if zone.is_some_and(|zone| far.keys[zone as usize].is_none()) && asks && reliable {
            bad = Some(WcStatus::RemAccessErr);
        }
        if way.is_some_and(|way| way.bad) {
            bad = Some(WcStatus::RemAccessErr);
        }
        let persistent = matches!(
            op,
            SendOp::Flush { placement, .. } if placement.admits(Placement::PERSISTENT)
        );
        if !self.ends[end].terms.access.admits(need) || persistent {
            // Seldom: it breaks the connection.
            let dares = self.stage == Stage::Storm && reliable && self.random.one_in(30);
            if !dares || !self.has.faults.garbage_remote {
                return None;
            }
            self.tally.faults.garbage_remote += 1;
            bad = Some(WcStatus::RemInvReqErr);
        }
        let mut data = vec![0; if op.has_result() { 0 } else { len as usize }];
        self.random.fill(&mut data);
        let through = way.filter(|way| way.pane).map(|way| way.rkey);
        let excused = way.is_some_and(|way| way.excused);
        Some(Draft { op, model, len: len as u32, data, bad, overruns: 0, through, excused })
    }

    /// A request of this kind, or a SEND in the place of one that the run omits: a connection
    /// permits SEND, whichever rights it lacks.
    fn permitted(&self, kind: u64) -> u64 {
        let has = &self.has.policies;
        let has = match kind {
            2 | 3 => has.writes,
            5 | 6 => has.reads,
            7..=9 => has.atomics,
            10 => has.flushes,
            4 | 11 | 12 => has.windows,
            _ => true,
        };
        if has { kind } else { 0 }
    }

    /// Whether the program's requests are terse: few, short, and waiting for an answer.
    pub(crate) fn is_terse(&self, end: EndId) -> bool {
        self.connections[end / 2].qp_type == QpType::Rc && self.ends[end].terms.terse
    }

    /// The operation of a request of this kind.
    fn plan(&mut self, end: EndId, kind: u64, reliable: bool) -> Option<Intent> {
        let (len, terse) = (self.length(end), kind == TERSE);
        let far = peer(end);
        let base = base_of(far, self.hosts[self.ends[far].host].ram.arena.len() as u64);
        let imm = self.random.one_in(2).then(|| self.random.bits().to_be_bytes());
        let none = Access::NONE;
        let plan =
            |op, model, len, need, zone, way| Some(Intent { op, model, len, need, zone, way });
        match kind {
            0 | 1 => plan(SendOp::Send { imm }, Op::Send { imm }, len, none, None, None),
            2 | 3 | TERSE => {
                let len = if terse { self.random.below(u64::from(INLINE) + 1) } else { len };
                let imm = imm.filter(|_| !terse);
                let way = self.way(end, len, Access::REMOTE_WRITE, reliable);
                let op = SendOp::Write { remote: base + way.at, rkey: way.rkey, imm };
                let model = Op::Write { at: way.at, imm };
                let zone = Some(Zone::Window).filter(|_| !way.pane && !way.bad);
                plan(op, model, way.len, Access::REMOTE_WRITE, zone, Some(way))
            }
            5 => {
                let way = self.way(end, len, Access::REMOTE_READ, reliable);
                let op = SendOp::Read { remote: base + way.at, rkey: way.rkey };
                let zone = Some(Zone::Window).filter(|_| !way.pane && !way.bad);
                plan(op, Op::Read { at: way.at }, way.len, Access::REMOTE_READ, zone, Some(way))
            }
            6 => {
                let (zone, key) = self.remote_zone(far, Zone::Constant);
                let at = zone + self.random.below(LONGEST - len + 1);
                let op = SendOp::Read { remote: base + at, rkey: key };
                let zone = Some(Zone::Constant);
                plan(op, Op::Read { at }, len, Access::REMOTE_READ, zone, None)
            }
            7 | 8 => {
                let (op, model) = self.atomic(far, base, kind == 7, imm.is_some());
                plan(op, model, 8, Access::REMOTE_ATOMIC, Some(Zone::Words), None)
            }
            9 => {
                let (zone, rkey) = self.remote_zone(far, Zone::Window);
                let at = zone + self.random.below(LONGEST / 8) * 8;
                let op = SendOp::AtomicWrite { remote: base + at, rkey };
                let zone = Some(Zone::Window);
                plan(op, Op::AtomicWrite { at }, 8, Access::REMOTE_WRITE, zone, None)
            }
            10 => {
                let (zone, rkey) = self.remote_zone(far, Zone::Window);
                let remote = base + zone + self.random.below(LONGEST - len + 1);
                let level = self.random.of(&[FlushLevel::Range, FlushLevel::Region]);
                let persistent = self.random.one_in(10);
                let placement = if persistent { Placement::PERSISTENT } else { Placement::GLOBAL };
                let op = SendOp::Flush { remote, rkey, len: len as u32, placement, level };
                plan(op, Op::Flush, 0, Access::FLUSH_GLOBAL, Some(Zone::Window), None)
            }
            _ => {
                let (op, model) = self.send_inv(end)?;
                plan(op, model, len, none, None, None)
            }
        }
    }

    /// The address and key of a zone of `far`. While the zone is not registered, its last key will
    /// do: the request is refused.
    fn remote_zone(&self, far: EndId, zone: Zone) -> (u64, Key) {
        let this = &self.ends[far];
        let key = this.keys[zone as usize].or(this.stale).unwrap_or_default();
        (this.index as u64 * stride() + zone.offset(), key)
    }

    fn atomic(&mut self, far: EndId, base: u64, adds: bool, matches: bool) -> (SendOp, Op) {
        let (words, rkey) = self.remote_zone(far, Zone::Words);
        let at = words + self.random.below(2) * 8;
        let (one, swap) = (self.random.next(), self.random.next());
        let ram = &self.hosts[self.ends[far].host].ram;
        let found = ram.slice(at, 8).try_into().map_or(0, u64::from_ne_bytes);
        let compare = if matches { found } else { one };
        let remote = base + at;
        let (op, atomic) = if adds {
            (SendOp::FetchAdd { remote, rkey, add: swap }, AtomicOp::FetchAdd { add: swap })
        } else {
            let op = SendOp::CompareSwap { remote, rkey, compare, swap };
            (op, AtomicOp::CompareSwap { compare, swap })
        };
        (op, Op::Atomic { at, op: atomic })
    }

    /// Makes a request wrong, so that the peer must refuse it.
    pub(crate) fn spoil(&mut self, end: EndId, draft: &mut Draft) {
        let reliable = self.connections[end / 2].qp_type == QpType::Rc;
        if draft.len == 0 || draft.bad.is_some() || !reliable {
            return;
        }
        let far = peer(end);
        let foreign = [Zone::Receive, Zone::Constant, Zone::Words, Zone::Window, Zone::Local];
        let zone = match draft.model {
            Op::Read { .. } => self.random.of(&foreign[..1]),
            Op::Write { .. } => self.random.of(&foreign[..3]),
            Op::Atomic { .. } => self.random.of(&foreign[..2]),
            Op::AtomicWrite { .. } => Zone::Constant,
            _ => return,
        };
        let here = Zone::Window;
        let wrong_key = self.bad_key(far, if draft.op.is_atomic() { Zone::Words } else { here });
        let arena = self.hosts[self.ends[far].host].ram.arena.len() as u64;
        let place = base_of(far, arena) + self.ends[far].index as u64 * stride();
        let other =
            (place + zone.offset(), self.ends[far].keys[zone as usize].unwrap_or(wrong_key));
        let beyond = self.random.range(1, 9).min(u64::from(draft.len));
        let len = u64::from(draft.len);
        let stranger = self.other_pane(end, len);
        // A window of another end is seldom there.
        let tries = stranger.is_some() && self.random.one_in(2);
        let way = if tries { 1 } else { self.random.below(6) };
        if let (Op::Write { at, imm: None }, 3) = (&mut draft.model, way) {
            *at =
                self.ends[far].index as u64 * stride() + here.offset() + here.len() - len + beyond;
            if self.hosts[self.ends[end].host].config.split_writes {
                draft.overruns = (len - beyond) as u32;
            }
        }
        match &mut draft.op {
            SendOp::Write { remote, rkey, .. } | SendOp::Read { remote, rkey } => match way {
                0 => *rkey = wrong_key,
                1 => (*remote, *rkey) = stranger.unwrap_or((*remote, wrong_key)),
                // Another region, without the right.
                2 => (*remote, *rkey) = other,
                // Its end, or its beginning, is outside.
                3 => *remote = place + here.offset() + here.len() - len + beyond,
                _ => *remote = place + here.offset() - beyond,
            },
            SendOp::CompareSwap { remote, rkey, .. } | SendOp::FetchAdd { remote, rkey, .. } => {
                match way {
                    0 | 1 => *rkey = wrong_key,
                    2 => (*remote, *rkey) = other,
                    3 => *remote = place + Zone::Words.offset() + 16,
                    _ => *remote = place + Zone::Words.offset() - 8,
                }
            }
            SendOp::AtomicWrite { remote, rkey } => match way {
                0..=3 => *rkey = wrong_key,
                _ => (*remote, *rkey) = other,
            },
            _ => return,
        }
        if matches!(way, 3..)
            && let (Some(key), SendOp::Read { rkey, .. }) =
                (self.ends[far].keys[here as usize], &mut draft.op)
        {
            // The key may have been that of the constant zone.
            *rkey = key;
        }
        (draft.bad, draft.through) = (Some(WcStatus::RemAccessErr), None);
        self.tally.faults.garbage_remote += 1;
    }
}
