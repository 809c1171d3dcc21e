//! The scenarios, and their needs.

use super::cell::{Requester, Setting};
use super::node::{Node, Step};
use super::verdict::cannot;
use super::wire::{Losing, Wire};
use super::{datagrams, errors, faults, flush, multicast, operations, shared, unreliable, windows};
use crate::agent::machine::Kind;
use crate::agent::proto::{
    ALL, Connection, FLUSH_GLOBAL, LOCAL_WRITE, QpState, REMOTE_WRITE, Service,
};
use crate::guest::Link;

/// Two connected sides.
pub struct Session<'a> {
    /// The requesting side.
    pub active: Node,
    /// The responding side.
    pub passive: Node,
    /// How they are connected.
    pub plan: Plan,
    wire: Box<dyn Wire + 'a>,
    noticed: Vec<String>,
}

/// How the sides of a scenario are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Options of both sides, except the path MTU and the PSNs.
    pub how: Connection,
    /// The transport service.
    pub service: Service,
    /// Queue pairs of each side.
    pub qps: usize,
    /// Receives in the queue that the passive side's queue pairs share; `None` if each has its own
    /// queue.
    pub shared: Option<u32>,
    /// First PSNs: of the active side, and of the passive side.
    pub psns: [u32; 2],
    /// Rights of the passive side's queue pair.
    pub access: u32,
    /// Whether Rocinante's acknowledgements carry credits for its posted receives, as hardware's
    /// do.
    pub credits: bool,
}

impl Plan {
    fn usual(mtu: u32) -> Self {
        Self {
            how: Connection {
                psn: 0,
                mtu,
                timeout: 15,
                retry_cnt: 7,
                // For ever: the machine decides how fast receives are posted.
                rnr_retry: 7,
                min_rnr_timer: 12,
                rd_atomic: 8,
            },
            service: Service::Rc,
            qps: 1,
            shared: None,
            psns: [0x12_3456, 0x65_4321],
            access: ALL,
            credits: false,
        }
    }
}

/// A named sequence of steps with their expected results.
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Where it makes sense.
    pub(super) needs: Needs,
    /// Changes to the usual plan.
    pub(super) plan: fn(&mut Plan),
    pub(super) run: fn(&mut Session<'_>) -> Step,
}

/// Where a scenario makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    /// Everywhere.
    Nothing,
    /// Where the host can drop packets.
    Bridge,
    /// Everywhere, but each setting on one of the links only: the links take turns, as the result
    /// does not depend on them.
    Turns,
    /// As `Turns`, where Rocinante requests: the guest's library lacks the operation.
    OursAsks,
}

impl Scenario {
    pub(super) fn fits(&self, setting: &Setting) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::Bridge => setting.link == Link::Veth,
            Needs::Turns => setting.is_their_turn(),
            Needs::OursAsks => setting.is_their_turn() && setting.requester == Requester::Ours,
        }
    }

    /// Whether it needs no special network between the sides.
    #[must_use]
    pub fn fits_anywhere(&self) -> bool {
        matches!(self.needs, Needs::Nothing | Needs::Turns)
    }

    /// The plan of its connection.
    #[must_use]
    pub fn plan(&self, mtu: u32) -> Plan {
        let mut plan = Plan::usual(mtu);
        (self.plan)(&mut plan);
        plan
    }

    /// Runs the steps. Error: the first deviation from the expected result.
    pub fn run(&self, session: &mut Session<'_>) -> Step {
        (self.run)(session)
    }
}

const fn usual(name: &'static str, run: fn(&mut Session<'_>) -> Step) -> Scenario {
    Scenario { name, needs: Needs::Nothing, plan: |_| {}, run }
}

const fn needing(
    needs: Needs,
    name: &'static str,
    plan: fn(&mut Plan),
    run: fn(&mut Session<'_>) -> Step,
) -> Scenario {
    Scenario { name, needs, plan, run }
}

const fn planned(
    name: &'static str,
    plan: fn(&mut Plan),
    run: fn(&mut Session<'_>) -> Step,
) -> Scenario {
    Scenario { name, needs: Needs::Nothing, plan, run }
}

/// As `planned`, but on one link in each setting.
const fn turning(
    name: &'static str,
    plan: fn(&mut Plan),
    run: fn(&mut Session<'_>) -> Step,
) -> Scenario {
    Scenario { name, needs: Needs::Turns, plan, run }
}

/// Gives up soon.
fn impatient(plan: &mut Plan) {
    plan.how.timeout = 12;
    plan.how.retry_cnt = 2;
}

/// The passive side's queue pair permits FLUSH.
fn flushable(plan: &mut Plan) {
    plan.access = ALL | FLUSH_GLOBAL;
    impatient(plan);
}

/// An unreliable connection.
fn uc(plan: &mut Plan) {
    plan.service = Service::Uc;
}

fn wrapping_uc(plan: &mut Plan) {
    uc(plan);
    plan.psns = [0xff_fffd, 0xff_fffe];
}

/// Datagrams.
fn ud(plan: &mut Plan) {
    plan.service = Service::Ud { qkey: datagrams::QKEY };
}

fn members(plan: &mut Plan) {
    ud(plan);
    plan.qps = 3;
}

/// `qps` queue pairs of the passive side share their receives.
fn sharing(plan: &mut Plan, qps: usize) {
    plan.qps = qps;
    plan.shared = Some(16);
}

fn sharing_datagrams(plan: &mut Plan) {
    ud(plan);
    sharing(plan, 2);
}

/// All scenarios.
pub static SCENARIOS: &[Scenario] = &[
    usual("send_sizes", operations::send_sizes),
    usual("send_zero", operations::send_zero),
    usual("send_immediate", operations::send_immediate),
    usual("send_inline", operations::send_inline),
    usual("send_scattered", operations::send_scattered),
    usual("send_solicited", operations::send_solicited),
    usual("write_sizes", operations::write_sizes),
    usual("write_zero", operations::write_zero),
    usual("write_immediate", operations::write_immediate),
    usual("write_inline", operations::write_inline),
    usual("write_gathered", operations::write_gathered),
    usual("read_sizes", operations::read_sizes),
    usual("read_zero", operations::read_zero),
    usual("read_scattered", operations::read_scattered),
    usual("read_many", operations::read_many),
    usual("compare_swap", operations::compare_swap),
    usual("fetch_add", operations::fetch_add),
    usual("mixed", operations::mixed),
    usual("fence", operations::fence),
    usual("both_ask", operations::both_ask),
    planned("psn_wraps", |plan| plan.psns = [0xff_fffd, 0xff_fffe], operations::psn_wraps),
    planned("credits_granted", |plan| plan.credits = true, operations::credits_granted),
    usual("receiver_not_ready", faults::receiver_not_ready),
    planned("receiver_never_ready", |plan| plan.how.rnr_retry = 2, faults::receiver_never_ready),
    needing(Needs::Bridge, "requests_lost", |_| {}, faults::requests_lost),
    needing(Needs::Bridge, "responses_lost", |_| {}, faults::responses_lost),
    needing(Needs::Bridge, "nobody_answers", impatient, faults::nobody_answers),
    usual("wrong_key", errors::wrong_key),
    usual("out_of_range", errors::out_of_range),
    usual("region_forbids", errors::region_forbids),
    planned("queue_pair_forbids", |plan| plan.access = 0, errors::queue_pair_forbids),
    usual("message_too_long", errors::message_too_long),
    planned("peer_in_error", impatient, errors::peer_in_error),
    planned("peer_destroyed", impatient, errors::peer_destroyed),
    usual("flushed", errors::flushed),
    usual("connected_again", errors::connected_again),
    usual("drained", errors::drained),
    turning("uc_send", uc, unreliable::send),
    turning("uc_write", uc, unreliable::write),
    turning("uc_psn_wraps", wrapping_uc, unreliable::psn_wraps),
    needing(Needs::Bridge, "uc_lost", uc, unreliable::lost),
    turning("uc_refused", uc, unreliable::refused),
    turning("uc_too_long", uc, unreliable::too_long),
    turning("uc_stops_sending", uc, unreliable::stops_sending),
    turning("ud_send", ud, datagrams::send),
    turning("ud_scattered", ud, datagrams::scattered),
    turning("ud_answered", ud, datagrams::answered),
    turning("ud_wrong_key", ud, datagrams::wrong_key),
    turning("ud_controlled_key", ud, datagrams::controlled_key),
    turning("ud_no_receive", ud, datagrams::no_receive),
    turning("ud_too_long", ud, datagrams::too_long),
    turning("ud_stops_sending", ud, datagrams::stops_sending),
    turning("srq_shares", |plan| sharing(plan, 3), shared::shares),
    turning("srq_datagrams", sharing_datagrams, shared::datagrams),
    turning("srq_not_ready", |plan| sharing(plan, 2), shared::not_ready),
    turning("srq_limit", |plan| sharing(plan, 2), shared::limit),
    turning("srq_last", |plan| sharing(plan, 2), shared::last),
    turning("atomic_write", |_| {}, flush::atomic_write),
    needing(Needs::Bridge, "atomic_writes_lost", |_| {}, flush::atomic_writes_lost),
    turning("atomic_write_forbidden", |_| {}, flush::atomic_write_forbidden),
    turning("atomic_write_out_of_range", |_| {}, flush::atomic_write_out_of_range),
    needing(Needs::OursAsks, "flush", flushable, flush::flushes),
    turning("mw_type_1", |plan| plan.qps = 3, windows::type_1),
    turning("mw_type_2", |plan| plan.qps = 3, windows::type_2),
    turning("mw_range", |plan| plan.qps = 5, windows::range),
    turning("mw_zero_based", |_| {}, windows::zero_based),
    turning("mw_forbids", |plan| plan.qps = 3, windows::forbids),
    turning("mw_of_another", |plan| plan.qps = 3, windows::of_another),
    turning("mw_unbindable", |plan| plan.qps = 9, windows::unbindable),
    turning("send_invalidates", |_| {}, windows::send_invalidates),
    turning("send_invalidates_nothing", |plan| plan.qps = 4, windows::send_invalidates_nothing),
    needing(Needs::Bridge, "invalidations_lost", |_| {}, windows::lost),
    turning("reregistered", |plan| plan.qps = 3, windows::reregistered),
    turning("mcast_members", members, multicast::reaches_members),
    turning("mcast_others", ud, multicast::others_are_not_heard),
];

impl<'a> Session<'a> {
    /// Connects two sides for `scenario`, with `wire` between them. Error: the error of one of
    /// them.
    pub fn connect(
        active: Node,
        passive: Node,
        wire: impl Wire + 'a,
        mut plan: Plan,
    ) -> Step<Self> {
        for node in [&active, &passive] {
            plan.how.rd_atomic = plan.how.rd_atomic.min(node.about().max_rd_atomic).max(1);
            if node.kind() == Kind::SoftRoce {
                // With 7 it retries for ever: see the table of its departures.
                plan.how.retry_cnt = plan.how.retry_cnt.min(6);
            }
            if plan.how.mtu > node.about().active_mtu {
                let (name, mtu, max) = (node.name(), plan.how.mtu, node.about().active_mtu);
                return Err(cannot(format!(
                    "the link of {name} is too small for a path MTU of {mtu}: {max} fits; `ip link set DEVICE mtu {}` on both sides",
                    mtu + 104
                )));
            }
        }
        let (wire, noticed) = (Box::new(wire), vec![]);
        let mut session = Self { active, passive, plan, wire, noticed };
        session.make_qps()?;
        session.join(plan.psns)?;
        Ok(session)
    }

    fn make_qps(&mut self) -> Step {
        let Plan { service, qps, shared, access, .. } = self.plan;
        // Without acknowledgements there is no READ.
        let most = match service {
            Service::Rc => ALL | FLUSH_GLOBAL,
            _ => LOCAL_WRITE | REMOTE_WRITE,
        };
        if let Some(depth) = shared {
            self.passive.make_srq(depth)?;
        }
        for _ in 0..qps {
            let full = self.passive.full() & most;
            self.passive.make_qp(service, access & full, shared.map(|_| 0))?;
            self.active.make_qp(service, self.active.full() & most, None)?;
        }
        if matches!(service, Service::Ud { .. }) {
            let (active, passive) = (self.active.address(), self.passive.address());
            self.active.handle(passive)?;
            self.passive.handle(active)?;
        }
        Ok(())
    }

    /// Resets both queue pairs and connects them again; the active side begins with `psn`.
    pub(super) fn reconnect(&mut self, psn: u32) -> Step {
        for node in [&mut self.active, &mut self.passive] {
            let access = node.full();
            node.modify(QpState::Reset)?;
            node.prepare(0, access)?;
        }
        self.join([psn, psn + 0x1000])
    }

    fn join(&mut self, [active, passive]: [u32; 2]) -> Step {
        let how = self.plan.how;
        for qp in 0..self.plan.qps {
            let to_active = self.active.endpoint(qp, active);
            let to_passive = self.passive.endpoint(qp, passive);
            self.passive.connect(qp, to_active, Connection { psn: passive, ..how })?;
            self.active.connect(qp, to_passive, Connection { psn: active, ..how })?;
        }
        Ok(())
    }

    /// Fails unless both sides' queue pairs 0 are in this state.
    pub(super) fn both_in(&mut self, state: QpState) -> Step {
        for node in [&mut self.active, &mut self.passive] {
            let is = node.state()?;
            node.expect(&is, &state, "the state")?;
        }
        Ok(())
    }

    /// The state of both sides, to explain a failed step: it shows which side waits, and which has
    /// given up.
    pub fn standing(&mut self) -> String {
        [&mut self.active, &mut self.passive].map(Node::standing).join("; ")
    }

    /// The path MTU.
    #[must_use]
    pub fn mtu(&self) -> usize {
        self.plan.how.mtu as usize
    }

    /// Lengths around multiples of the path MTU.
    #[must_use]
    pub fn sizes(&self) -> [usize; 7] {
        let mtu = self.mtu();
        [1, 3, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 7]
    }

    /// Loses some packets of the active side (`true`), or of the passive side.
    pub(super) fn lose(&self, from_active: bool, percent: f64) -> Step<Box<dyn Losing>> {
        let (from, to) = match from_active {
            true => (&self.active, &self.passive),
            false => (&self.passive, &self.active),
        };
        self.wire.lose(from, to, percent)
    }

    /// Fails if a side has no atomics.
    pub(super) fn needs_atomics(&self) -> Step {
        self.needs("atomics", |node| node.about().atomics)
    }

    /// Fails if a side does not respond to ATOMIC WRITE, or cannot send inline data.
    pub(super) fn needs_atomic_write(&self) -> Step {
        self.needs_inline()?;
        self.needs("ATOMIC WRITE", |node| node.about().atomic_write)
    }

    /// Fails if a side cannot send inline data.
    pub(super) fn needs_inline(&self) -> Step {
        self.needs("inline data", |node| node.about().inline)
    }

    pub(super) fn needs(&self, what: &str, has: fn(&Node) -> bool) -> Step {
        match [&self.active, &self.passive].into_iter().find(|node| !has(node)) {
            None => Ok(()),
            Some(node) => Err(cannot(format!("{} has no {what}", node.name()))),
        }
    }

    /// Records a departure of a device from the specification that the scenario tolerates.
    pub(super) fn notice(&mut self, what: impl Into<String>) {
        self.noticed.push(what.into());
    }

    /// As [`notice`](Self::notice), for departures that do not always happen: they are also
    /// printed.
    pub(super) fn say(&mut self, what: impl Into<String>) {
        let what = what.into();
        println!("    {what}");
        self.notice(what);
    }

    /// The recorded departures.
    #[must_use]
    pub fn noticed(&self) -> &[String] {
        &self.noticed
    }
}
