//! All runs with a device, each with a name.

use std::collections::BTreeMap;
use std::fmt;

use rocinante::device::Backend;
use rocinante_tests::verbs::TESTS;

use super::losses::{Inside, Rules};
use super::stage::Stage;
use crate::agent::proto::Request;
use crate::agent::{self, Verbs};
use crate::guest::Link;
use crate::hardware::checks::CHECKS;
use crate::matrix::programs::{self, ProgramCell, ProgramPlace};
use crate::matrix::{
    MTUS, Node, Requester, SCENARIOS, Scenario, Session, Setting, Step, Verdict, cannot,
};

/// A run.
#[derive(Clone, Copy)]
pub(super) enum CardCell {
    /// A check of the device by itself, or a test of the API with it at both ends.
    Check(&'static str),
    /// A scenario with the device at both ends.
    Itself { scenario: &'static Scenario, ipv6: bool, mtu: u32 },
    /// A scenario with Rocinante at one end; the setting's link is not used.
    Software { scenario: &'static Scenario, setting: Setting },
    /// A program of another project; the setting's link is not used.
    Program(ProgramCell),
}

/// The backends of the matrix.
pub(super) const BACKENDS: [Backend; 3] = [Backend::Udp, Backend::Packet, Backend::Xdp];

/// The whole matrix.
pub(super) fn all() -> Vec<CardCell> {
    let names = CHECKS.iter().map(|check| check.name).chain(TESTS.iter().map(|test| test.name));
    let mut cells: Vec<CardCell> = names.map(CardCell::Check).collect();
    let families = || [false, true].into_iter().flat_map(|ipv6| MTUS.map(|mtu| (ipv6, mtu)));
    for (ipv6, mtu) in families() {
        cells.extend(SCENARIOS.iter().map(|scenario| CardCell::Itself { scenario, ipv6, mtu }));
    }
    for backend in BACKENDS {
        for (ipv6, mtu) in families() {
            for requester in [Requester::Ours, Requester::Rxe] {
                let setting = Setting { requester, backend, link: Link::Veth, ipv6, mtu };
                cells.extend(
                    SCENARIOS.iter().map(|scenario| CardCell::Software { scenario, setting }),
                );
            }
        }
    }
    cells.extend(programs::all().into_iter().map(CardCell::Program));
    cells
}

fn family(ipv6: bool) -> &'static str {
    if ipv6 { "v6" } else { "v4" }
}

fn side(requester: Requester) -> &'static str {
    match requester {
        Requester::Ours => "ours",
        Requester::Rxe => "device",
    }
}

impl fmt::Display for CardCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, Setting { requester, backend, ipv6, mtu, .. }) = match self {
            Self::Check(name) => return write!(f, "check::{name}"),
            Self::Itself { scenario, ipv6, mtu } => {
                return write!(f, "itself::{}::{}::{mtu}", scenario.name, family(*ipv6));
            }
            Self::Software { scenario, setting } => (scenario.name, *setting),
            Self::Program(cell) => (cell.program.name, cell.setting),
        };
        write!(f, "{name}::{}::{backend}::{}::{mtu}", side(requester), family(ipv6))
    }
}

impl CardCell {
    /// The row of the report's table.
    pub(super) fn row(&self) -> String {
        let ip = |ipv6: bool| if ipv6 { "IPv6" } else { "IPv4" };
        match self {
            Self::Check(_) => "1. the device by itself".into(),
            Self::Itself { ipv6, .. } => format!("2. the device with itself, {}", ip(*ipv6)),
            Self::Software { setting: Setting { requester, backend, ipv6, .. }, .. } => {
                let who = match requester {
                    Requester::Ours => "Rocinante asks",
                    Requester::Rxe => "the device asks",
                };
                format!("3. `{backend}`, {}, {who}", ip(*ipv6))
            }
            Self::Program(ProgramCell { setting: Setting { requester, backend, .. }, .. }) => {
                let who = match requester {
                    Requester::Ours => "Rocinante is the client",
                    Requester::Rxe => "the program is the client",
                };
                format!("4. programs of others, `{backend}`, {who}")
            }
        }
    }

    /// Runs the cell. Departures of the device from the specification are added to `noticed`.
    pub(super) fn run(&self, stage: &Stage, noticed: &mut BTreeMap<String, String>) -> Step {
        match *self {
            Self::Check(check) => {
                let (check, name) = (check.to_owned(), stage.device_name());
                let address =
                    stage.device_address(false).or_else(|_| stage.device_address(true))?;
                agent::call(&mut *stage.agent()?, Request::check { check, name, address })
            }
            Self::Itself { scenario, ipv6, mtu } => {
                let (active, passive) = (stage.device(ipv6)?, stage.device(ipv6)?);
                let plan = scenario.plan(mtu);
                self.play(scenario, Session::connect(active, passive, Inside, plan)?, noticed)
            }
            Self::Software { scenario, setting } => {
                let ours = stage.ours(setting.backend, setting.ipv6)?;
                let plan = scenario.plan(setting.mtu);
                let soft = Verbs::soft(ours.netns, setting.backend, plan.credits);
                let theirs = stage.device(setting.ipv6)?;
                let ours = Node::open(Box::new(soft), "rocinante", "", ours.address)?;
                let wire = Rules { place: stage.losses()?, backend: setting.backend };
                let (active, passive) = match setting.requester {
                    Requester::Ours => (ours, theirs),
                    Requester::Rxe => (theirs, ours),
                };
                self.play(scenario, Session::connect(active, passive, wire, plan)?, noticed)
            }
            Self::Program(cell) => program(&cell, stage),
        }
    }

    fn play(
        &self,
        scenario: &Scenario,
        mut session: Session<'_>,
        noticed: &mut BTreeMap<String, String>,
    ) -> Step {
        let result = scenario.run(&mut session);
        for what in session.noticed() {
            noticed.entry(what.clone()).or_insert_with(|| self.to_string());
        }
        match Verdict::from(result) {
            Verdict::Failed(why) => Err(format!("{why}; {}", session.standing())),
            Verdict::NotRun(why) => Err(cannot(why)),
            Verdict::Passed => Ok(()),
        }
    }
}

fn program(cell: &ProgramCell, stage: &Stage) -> Step {
    let Setting { backend, ipv6, mtu, .. } = cell.setting;
    let ours = stage.ours(backend, ipv6)?;
    let max = ours.active_mtu.min(stage.active_mtu());
    if mtu > max {
        return Err(cannot(format!("the link is too small for a path MTU of {mtu}: {max} fits")));
    }
    let meet = [stage.ours(backend, false)?.address, stage.device_address(false)?];
    let gid = ours.interface.addresses.iter().position(|(own, _)| *own == ours.address);
    let gid = gid.and_then(|index| u8::try_from(index).ok()).ok_or("our address has no GID")?;
    let device = stage.device_name();
    let place = ProgramPlace {
        netns: ours.netns,
        installed: stage.installed()?,
        own: (&ours.interface.name, gid),
        device: &device,
        address: stage.device_address(ipv6)?,
        meet,
    };
    cell.run(&place, stage.agent()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A change of these numbers needs a reason: cells do not vanish.
    #[test]
    fn no_cell_is_missing() {
        let cells = all();
        let scenarios = SCENARIOS.len();
        let itself = CHECKS.len() + TESTS.len();
        // The checks and tests of the API; the scenarios with 2 families and 5 path MTUs, with the
        // device at both ends, and with either side as the requester on 3 backends; and the
        // programs of other projects.
        assert_eq!(
            cells.len(),
            itself + scenarios * 10 + scenarios * 10 * 2 * 3 + programs::all().len()
        );
        let names: BTreeSet<String> = cells.iter().map(CardCell::to_string).collect();
        assert_eq!(names.len(), cells.len());
        let rows: BTreeSet<String> = cells.iter().map(CardCell::row).collect();
        assert_eq!(rows.len(), 1 + 2 + 3 * 2 * 2 + 3 * 2);
    }
}
