//! The lives of hosts and connections: made, broken, and made again with the same numbers.

use rocinante_stack::mem::{Access, MwType, Region};
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::{QpState, QpType, WcStatus};
use rocinante_stack::{PeerAddress, PeerKind, QpAttr, QpInit};

use crate::check::{Verdict, queue_of};
use crate::marks::Marks;
use crate::memory::{DEPTH, Zone, stride};
use crate::model::{Connection, End, EndId, Letters, Phase, Stream, Terms, peer};
use crate::network::{Event, LATE_MAX};
use crate::windows::Pane;
use crate::work::{INLINE, SGES, base_of};
use crate::world::{Host, World};

/// After this time nothing of an earlier life is in flight: the longest delay, behind the longest
/// queue.
const FORGOTTEN: u64 = LATE_MAX + 1_000_000;

/// A new life's PSNs begin so far behind the last one's that none of its packets is near the new
/// window.
const APART: u32 = 1 << 22;

impl World<'_> {
    /// An end, before it is connected.
    pub(crate) fn end(&mut self, host: usize, index: usize) -> End {
        let terms = self.terms([0; 2]);
        let low = 0x100 + (self.ends.len() as u32) * self.apart();
        End {
            host,
            index,
            pd: 1 + u32::from(self.random.one_in(2)),
            home: low,
            low,
            dest: 0,
            marks: Marks::default(),
            conn: None,
            qpn: None,
            generation: 0,
            terms,
            phase: Phase::Absent,
            keys: [None; 5],
            stale: None,
            streams: Default::default(),
            receives: Default::default(),
            receives_posted: 0,
            receives_retired: 0,
            receives_popped: 0,
            srq: None,
            taken: None,
            last_reached: false,
            overrun: false,
            letters: Letters::default(),
            panes: [MwType::Type1, MwType::Type2].map(Pane::new),
            reason: None,
            touched: false,
            fence: false,
            answered: 0,
            starved_until: 0,
            draining: false,
            stopped: false,
        }
    }

    /// A connection, before its first life.
    pub(crate) fn connection(&mut self) -> Connection {
        let (random, has) = (&mut self.random, self.has.policies);
        let near_the_end = |n: u64| (0x100_0000 - n) as u32 & 0xff_ffff;
        let psn = [random.below(900), random.below(900)].map(near_the_end);
        let types = [QpType::Rc, QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud];
        let qp_type = match random.of(&types) {
            QpType::Uc if !has.unreliable => QpType::Rc,
            QpType::Ud if !has.datagrams => QpType::Rc,
            drawn => drawn,
        };
        let managed = Self::can_be_managed(qp_type) && random.one_in(2) && has.managed;
        let terms = self.terms(psn);
        Connection { qp_type, generation: 0, terms, managed, crashed: false, rejoining: false }
    }

    /// The terms of both ends.
    fn terms(&mut self, psn: [u32; 2]) -> Terms {
        let (random, has) = (&mut self.random, self.has);
        let lacks = [
            Access::REMOTE_WRITE,
            Access::REMOTE_READ,
            Access::REMOTE_ATOMIC,
            Access::FLUSH_GLOBAL,
        ];
        let lacks = if random.one_in(8) { random.of(&lacks) } else { Access::NONE };
        let access = Access::ALL.with(Access::FLUSH_GLOBAL).without(lacks);
        let (mtu, rnr_retry) = (Mtu::ALL[random.index(4)], random.of(&[0, 3, 7, 7, 7]));
        let terse = random.one_in(5) && has.policies.terse;
        let mut small = |low: u64, high: u64| random.range(low, high) as u8;
        let terms = Terms {
            mtu,
            psn,
            terse,
            // A requester that seldom asks for an ACK needs a long timeout.
            timeout: if terse { small(11, 13) } else { small(7, 11) },
            retry_cnt: small(0, 8),
            rnr_retry,
            rd_atomic: small(1, 7),
            min_rnr_timer: small(1, 14),
            access,
            qkey: [random.bits(), random.bits()],
        };
        Terms { rd_atomic: if has.scarcity.small_windows { 1 } else { terms.rd_atomic }, ..terms }
    }

    /// Schedules a new life of the connection of `end`.
    pub(crate) fn rejoin(&mut self, end: EndId) {
        let connection = &mut self.connections[end / 2];
        if !connection.rejoining {
            connection.rejoining = true;
            let later = self.now + self.random.range(100_000, 2_000_000);
            self.agenda.at(later, Event::Rejoin(end / 2));
        }
    }

    /// Begins a new life of a connection: one end joins, and later the other.
    pub(crate) fn begin_again(&mut self, at: usize) -> Verdict {
        let ends = [2 * at, 2 * at + 1];
        if ends.iter().any(|end| self.hosts[self.ends[*end].host].stalled) {
            self.agenda.at(self.now + 50_000, Event::Rejoin(at));
            return Ok(());
        }
        let down = |end: &EndId| self.hosts[self.ends[*end].host].engine.is_none();
        let Connection { qp_type, generation, terms, managed, crashed, .. } = self.connections[at];
        if managed && ends.iter().any(down) {
            self.agenda.at(self.now + 50_000, Event::Rejoin(at));
            return Ok(());
        }
        let generation = generation + 1;
        let mut psn = terms.psn;
        // Queue pair numbers that wait for their release keep the last life's packets away.
        let same = managed && !crashed && generation > 1 && self.random.one_in(2);
        let same = same && self.has.faults.same_psn;
        self.tally.faults.same_psn += u64::from(same);
        for psn in psn.iter_mut().filter(|_| !same) {
            let step = APART + self.random.below(1 << 20) as u32;
            *psn = (*psn + step) & 0xff_ffff;
        }
        let terms = self.terms(psn);
        self.connections[at] =
            Connection { qp_type, generation, terms, managed, crashed: false, rejoining: true };
        let first = self.random.index(2);
        if managed {
            return self.dial(ends[first]);
        }
        let mut delay = self.random.of(&[0, 0, 1_000_000]);
        let mut start = self.now;
        if qp_type == QpType::Uc {
            // An end that takes any packet may appear only once nothing of the last life is in
            // flight.
            for end in ends {
                self.leave(end)?;
            }
            (start, delay) = (start + FORGOTTEN, 0);
        }
        self.agenda.at(start, Event::Join(ends[first], generation));
        let later = start + self.random.below(1 + delay);
        self.agenda.at(later, Event::Join(ends[1 - first], generation));
        Ok(())
    }

    /// Destroys the queue pair of an end, or resets it.
    pub(crate) fn leave(&mut self, end: EndId) -> Verdict {
        let host = self.ends[end].host;
        let destroys = self.random.one_in(2) || self.is_managed(end);
        let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { return Ok(()) };
        let Some(qpn) = self.ends[end].qpn else { return Ok(()) };
        self.tally.steps += 1;
        let done = if destroys {
            self.ends[end].qpn = None;
            engine.destroy_qp(qpn)
        } else {
            let attr = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
            engine.modify_qp(qpn, &attr, ram)
        };
        if let Err(error) = done {
            return Err(format!("end {end} cannot go: {error}"));
        }
        self.forget(end);
        self.settle(host, None)
    }

    /// Requests posted at an end never complete.
    pub(crate) fn forget(&mut self, end: EndId) {
        self.give_back(end);
        self.close_pane(end);
        let this = &mut self.ends[end];
        this.phase = Phase::Absent;
        this.receives.clear();
        this.receives_popped = this.receives_retired;
        (this.reason, this.fence, this.draining, this.stopped) = (None, false, false, false);
        (this.last_reached, this.overrun) = (false, false);
        this.marks = Marks::default();
        if let Some(stream) = this.current() {
            stream.abandon();
        }
    }

    /// An end joins the present life of its connection.
    pub(crate) fn join(&mut self, end: EndId, generation: u32) -> Verdict {
        let host = self.ends[end].host;
        if self.hosts[host].stalled {
            self.agenda.at(self.now + 50_000, Event::Join(end, generation));
            return Ok(());
        }
        // If the host is down, its restart joins the end.
        let down = self.hosts[host].engine.is_none();
        let late = self.connections[end / 2].generation != generation;
        if down || late || self.ends[end].generation == generation {
            return Ok(());
        }
        self.leave(end)?;
        self.enter(end);
        let qpn = match self.ends[end].qpn {
            Some(qpn) => qpn,
            None => self.create(end)?,
        };
        if qpn.value() != self.number(end) {
            return Err(format!("end {end} has the number {qpn}, which it did not have before"));
        }
        self.ends[end].qpn = Some(qpn);
        self.bring_up(end, self.number(peer(end)))?;
        self.joined(end, false);
        Ok(())
    }

    /// An end begins with the present life of its connection.
    pub(crate) fn enter(&mut self, end: EndId) {
        let Connection { generation, terms, .. } = self.connections[end / 2];
        let far = self.ends[peer(end)].generation;
        let this = &mut self.ends[end];
        (this.generation, this.terms) = (generation, terms);
        this.streams.retain(|stream| stream.generation == far);
        this.streams.push_back(Stream::new(generation));
        let streams = &mut self.ends[peer(end)].streams;
        streams.retain(|stream| stream.generation == far || stream.generation == generation);
        for zone in Zone::ALL {
            self.register(end, zone);
        }
        self.make_panes(end);
    }

    /// The queue pair of an end is connected. If the connection manager `asked` this end, its
    /// peer's queue pair is certainly not connected yet.
    pub(crate) fn joined(&mut self, end: EndId, asked: bool) {
        let generation = self.ends[end].generation;
        self.ends[end].phase = Phase::Ready;
        if self.ends[peer(end)].generation == generation && !asked {
            self.connections[end / 2].rejoining = false;
            if self.ends[peer(end)].phase != Phase::Ready {
                // It broke while it was alone.
                self.rejoin(end);
            }
        }
        self.plan_transmit(self.ends[end].host);
    }

    /// Registers a zone, unless it is registered.
    pub(crate) fn register(&mut self, end: EndId, zone: Zone) {
        let this = &self.ends[end];
        if this.keys[zone as usize].is_some() {
            return;
        }
        let pd = self.domain(end);
        let ram = &mut self.hosts[this.host].ram;
        let host = this.index as u64 * stride() + zone.offset();
        let start = base_of(end, ram.arena.len() as u64) + host;
        let region = Region { pd, start, len: zone.len(), host, access: zone.access() };
        ram.registered[this.index][zone as usize] = true;
        self.ends[end].keys[zone as usize] = ram.regions.insert(region, self.random.bits());
        self.tally.steps += 1;
    }

    /// Makes a queue pair.
    pub(crate) fn create(&mut self, end: EndId) -> Result<Qpn, String> {
        let at = self.ends[end].host;
        let connection = self.connections[end / 2];
        let srq = self.ends[end].srq.and_then(|srq| self.hosts[at].srqs[srq].id);
        let init = QpInit {
            qp_type: connection.qp_type,
            pd: self.domain(end),
            send_cq: queue_of(end, false),
            recv_cq: queue_of(end, true),
            srq,
            max_send_wr: DEPTH as u32,
            max_recv_wr: DEPTH as u32,
            max_send_sge: SGES,
            max_recv_sge: SGES,
            max_inline_data: INLINE,
            sq_sig_all: false,
            cookie: end as u32,
            context: 0,
        };
        let engine = self.hosts[at].engine.as_mut().ok_or("the host is down")?;
        engine.create_qp(&init, self.ends[end].home).ok_or_else(|| "no queue pair".into())
    }

    /// Takes a queue pair from RESET to RTS.
    pub(crate) fn bring_up(&mut self, end: EndId, dest: u32) -> Verdict {
        let (at, far) = (self.ends[end].host, peer(end));
        let connection = self.connections[end / 2];
        self.ends[end].dest = dest;
        let remote = self.ends[far].host;
        let budget = self.announced(remote);
        let peer = PeerAddress {
            local: self.hosts[at].addr,
            remote: self.hosts[remote].addr,
            path: remote as u32,
            budget,
            kind: PeerKind::announced(budget, None),
        };
        let host = &mut self.hosts[at];
        let (Some(engine), Some(qpn)) = (&mut host.engine, self.ends[end].qpn) else {
            return Ok(());
        };
        for attr in steps(&connection, peer, dest, end % 2) {
            self.tally.steps += 1;
            if let Err(error) = engine.modify_qp(qpn, &attr, &mut host.ram) {
                return Err(format!("end {end} cannot be connected: {error}"));
            }
        }
        self.settle(at, None)
    }

    /// Restarts a host that is down, with the same numbers.
    pub(crate) fn restart(&mut self, host: usize) -> Verdict {
        if self.hosts[host].engine.is_some() {
            return Ok(());
        }
        self.start(host)?;
        for end in self.hosts[host].ends.clone() {
            let connection = &self.connections[end / 2];
            if self.ends[end].generation < connection.generation && !connection.managed {
                let pause = if connection.qp_type == QpType::Uc { FORGOTTEN } else { 0 };
                self.agenda.at(self.now + pause, Event::Join(end, connection.generation));
            }
        }
        Ok(())
    }

    pub(crate) fn end_life(&mut self, end: EndId, how: &'static str) {
        if self.ends[end].phase == Phase::Ready {
            *self.tally.ended.entry(how).or_default() += 1;
        }
        self.forget(end);
    }

    pub(crate) fn destroy(&mut self, end: EndId) -> Verdict {
        let host = self.ends[end].host;
        self.tally.steps += 1;
        if let (Some(engine), Some(qpn)) = (&mut self.hosts[host].engine, self.ends[end].qpn.take())
        {
            engine.destroy_qp(qpn).map_err(|error| format!("end {end}: {error}"))?;
        }
        self.end_life(end, "destroyed");
        self.rejoin(end);
        self.settle(host, None)
    }

    pub(crate) fn reset(&mut self, end: EndId) -> Verdict {
        self.change(end, QpState::Reset)?;
        self.end_life(end, "reset");
        self.rejoin(end);
        self.settle(self.ends[end].host, None)
    }

    /// The program breaks the queue pair: all its requests must be flushed.
    pub(crate) fn fail(&mut self, end: EndId) -> Verdict {
        self.ends[end].reason.get_or_insert(WcStatus::WrFlushErr);
        self.ends[end].touched = true;
        self.change(end, QpState::Err)?;
        self.settle(self.ends[end].host, None)
    }

    /// Back to RTS from SQD or SQE.
    pub(crate) fn go_on(&mut self, end: EndId) -> Verdict {
        self.ends[end].stopped = false;
        self.ends[end].reason = None;
        self.change(end, QpState::Rts)?;
        let host = self.ends[end].host;
        self.settle(host, None)?;
        self.plan_transmit(host);
        Ok(())
    }

    pub(crate) fn change(&mut self, end: EndId, state: QpState) -> Verdict {
        self.tally.steps += 1;
        let host = &mut self.hosts[self.ends[end].host];
        let (Some(engine), Some(qpn)) = (&mut host.engine, self.ends[end].qpn) else {
            return Ok(());
        };
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        engine
            .modify_qp(qpn, &attr, &mut host.ram)
            .map_err(|error| format!("end {end} cannot go to {state}: {error}"))
    }
}

/// The attributes of INIT, RTR and RTS for the side `at`.
fn steps(connection: &Connection, peer: PeerAddress, dest: u32, at: usize) -> [QpAttr; 3] {
    let terms = &connection.terms;
    let attr = QpAttr {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(terms.access),
        qkey: Some(terms.qkey[at]),
        peer: Some(peer),
        path_mtu: Some(terms.mtu),
        dest_qpn: Some(rocinante_stack::types::Qpn::new(dest)),
        rq_psn: Some(Psn::new(terms.psn[1 - at])),
        max_dest_rd_atomic: Some(terms.rd_atomic),
        min_rnr_timer: Some(terms.min_rnr_timer),
        sq_psn: Some(Psn::new(terms.psn[at])),
        max_rd_atomic: Some(terms.rd_atomic),
        retry_cnt: Some(terms.retry_cnt),
        rnr_retry: Some(terms.rnr_retry),
        timeout: Some(terms.timeout),
        ..QpAttr::default()
    };
    attr.steps(connection.qp_type)
}
