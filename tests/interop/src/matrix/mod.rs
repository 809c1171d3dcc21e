//! The matrix: each scenario with each side as the requester, on each backend, link, address family
//! and path MTU.

mod cell;
pub mod cm_programs;
mod datagrams;
mod errors;
mod faults;
mod flush;
mod losses;
mod multicast;
mod node;
mod operations;
pub mod ours;
pub mod programs;
mod scenario;
pub mod scripts;
mod shared;
pub mod subset;
mod table;
mod unreliable;
mod verdict;
mod windows;
mod wire;
mod witness;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rocinante_lab::{Container, Lab};

pub use self::cell::{Cell, MTUS, Requester, Setting, all};
pub use self::node::{Node, Step};
pub use self::scenario::{Plan, SCENARIOS, Scenario, Session};
pub use self::table::Table;
pub use self::verdict::{Verdict, cannot};
use self::wire::Bridge;
pub use self::wire::{Losing, Wire};
use crate::agent::{Agent, PORT, RemoteAgent, Verbs};
use crate::error::Result;
use crate::guest::{Guest, Job, Link};

/// A lab with a guest in which the verbs agent runs.
pub struct Bench {
    _agent: Job,
    /// The guest.
    pub guest: Guest,
    /// The lab.
    pub lab: Lab,
}

impl Bench {
    /// Starts the agent in a guest. Error: the guest is gone.
    pub fn new(lab: Lab, guest: Guest) -> Result<Self> {
        let command = format!("exec /host/rocinante-interop agent [::]:{PORT}");
        let agent = guest.start(&command, Duration::from_secs(24 * 3600))?;
        Ok(Self { _agent: agent, guest, lab })
    }

    /// Runs one cell. Error: the first deviation from the expected result.
    pub fn run(&self, cell: &Cell) -> Step {
        let mut session = self.session(cell)?;
        let done = cell.scenario.run(&mut session);
        done.map_err(|why| format!("{why}; {}", session.standing()))
    }

    /// The two sides of a cell, connected. Error: the error of one of them.
    pub fn session(&self, cell: &Cell) -> Step<Session<'_>> {
        let setting = cell.setting;
        let network = self.guest.network();
        let container = network.container(&self.lab, setting.link);
        let theirs = self.kernel_node(container, setting.link, setting.ipv6)?;
        let plan = cell.scenario.plan(setting.mtu);
        let soft = Verbs::soft(Some(container.netns()), setting.backend, plan.credits);
        let own = if setting.ipv6 {
            container.ipv6().ok_or("the container has no IPv6")?.into()
        } else {
            container.ipv4().into()
        };
        let ours = Node::open(Box::new(soft), "rocinante", "", own)?;
        let (active, passive) = match setting.requester {
            Requester::Ours => (ours, theirs),
            Requester::Rxe => (theirs, ours),
        };
        Session::connect(active, passive, self.bridge(), plan)
    }

    fn bridge(&self) -> Bridge<'_> {
        Bridge { lab: &self.lab, tap: self.guest.network().tap() }
    }

    /// Runs a scenario between two queue pairs of the kernel's device on the bridge, each with a
    /// connection of its own to the agent. Error: the first deviation from the expected result.
    pub fn run_between_kernels(&self, scenario: &Scenario, ipv6: bool, mtu: u32) -> Step {
        let link = Link::Veth;
        let container = self.guest.network().container(&self.lab, link);
        let active = self.kernel_node(container, link, ipv6)?;
        let passive = self.kernel_node(container, link, ipv6)?;
        let mut session = Session::connect(active, passive, self.bridge(), scenario.plan(mtu))?;
        let done = scenario.run(&mut session);
        done.map_err(|why| format!("{why}; {}", session.standing()))
    }

    /// The kernel's device on `link`, through a new connection to the agent.
    fn kernel_node(&self, container: &Container, link: Link, ipv6: bool) -> Step<Node> {
        let network = self.guest.network();
        let address = network.address(link, ipv6);
        let agent = agent(container, address)?;
        Node::open(agent, "rxe", network.device(link), address)
    }
}

/// A new connection to the agent in the guest.
fn agent(container: &Container, address: IpAddr) -> Step<Box<dyn Agent>> {
    let patience = Duration::from_secs(10);
    let agent = container
        .run(|| RemoteAgent::connect(SocketAddr::new(address, PORT), patience))
        .map_err(|error| error.to_string())?
        .map_err(|error| error.to_string())?;
    Ok(Box::new(agent))
}
