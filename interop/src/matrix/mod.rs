//! The matrix: every scenario with each side as the requester, on every backend, link, address family and path MTU.

mod cell;
mod errors;
mod faults;
mod node;
mod operations;
pub mod programs;
mod scenario;
pub mod subset;
mod table;
mod witness;

use std::net::SocketAddr;
use std::time::Duration;

use rocinante::Backend;
use rocinante_cli::lab::{Container, Lab};

pub use self::cell::{Cell, MTUS, Requester, Setting, all};
pub use self::node::{Node, Step};
pub use self::scenario::{Plan, SCENARIOS, Scenario, Session};
pub use self::table::Table;
use crate::agent::proto::{ALL, Connection, Request, State};
use crate::agent::{Agent, Remote, Verbs};
use crate::error::Result;
use crate::guest::{Guest, Job, Link};

/// Where the verbs agent listens inside the guest.
const AGENT_PORT: u16 = 18_515;

/// A lab with a guest in which the verbs agent runs.
pub struct Bench {
    _agent: Job,
    /// The guest.
    pub guest: Guest,
    /// The lab.
    pub lab: Lab,
}

impl Bench {
    /// Starts the agent in a guest.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn new(lab: Lab, guest: Guest) -> Result<Self> {
        let command = format!("exec /host/rocinante-guest agent [::]:{AGENT_PORT}");
        let agent = guest.start(&command, Duration::from_secs(24 * 3600))?;
        Ok(Self { _agent: agent, guest, lab })
    }

    /// Runs one cell.
    ///
    /// # Errors
    /// What was otherwise than it should be.
    pub fn run(&self, cell: &Cell) -> Step {
        let mut session = self.session(cell)?;
        let done = cell.scenario.run(&mut session);
        done.map_err(|why| format!("{why}; {}", session.standing()))
    }

    /// The two sides of a cell, connected.
    ///
    /// # Errors
    /// What one of them says.
    pub fn session(&self, cell: &Cell) -> Step<Session<'_>> {
        let setting = cell.setting;
        let network = self.guest.network();
        let container = network.container(&self.lab, setting.link);
        let theirs = self.kernel_node(container, setting.link, setting.ipv6)?;
        let plan = cell.scenario.plan(setting.mtu);
        let soft = Verbs::soft(container.netns(), setting.backend, plan.credits);
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
        let (lab, guest) = (&self.lab, &self.guest);
        let mut session = Session { active, passive, setting, plan, lab, guest };
        session.connect()?;
        Ok(session)
    }

    /// Runs a scenario between two queue pairs of the kernel's device on the bridge, each in a connection of its own to the agent.
    ///
    /// # Errors
    /// What was otherwise than it should be.
    pub fn run_between_kernels(&self, scenario: &Scenario, ipv6: bool, mtu: u32) -> Step {
        let link = Link::Veth;
        let container = self.guest.network().container(&self.lab, link);
        let active = self.kernel_node(container, link, ipv6)?;
        let passive = self.kernel_node(container, link, ipv6)?;
        // Soft-RoCE answers, as if one of ours asked.
        let (requester, backend) = (Requester::Ours, Backend::Udp);
        let setting = Setting { requester, backend, link, ipv6, mtu };
        let (plan, lab, guest) = (scenario.plan(mtu), &self.lab, &self.guest);
        let mut session = Session { active, passive, setting, plan, lab, guest };
        session.connect()?;
        let done = scenario.run(&mut session);
        done.map_err(|why| format!("{why}; {}", session.standing()))
    }

    /// The kernel's device on `link`, through a new connection to the agent.
    fn kernel_node(&self, container: &Container, link: Link, ipv6: bool) -> Step<Node> {
        let network = self.guest.network();
        let address = network.address(link, ipv6);
        let patience = Duration::from_secs(10);
        let agent = container
            .run(|| Remote::connect(SocketAddr::new(address, AGENT_PORT), patience))
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?;
        let agent: Box<dyn Agent> = Box::new(agent);
        Node::open(agent, "rxe", network.device(link), address)
    }
}

impl Session<'_> {
    fn connect(&mut self) -> Step {
        self.passive.make_qp(self.plan.access)?;
        self.active.make_qp(ALL)?;
        self.join(self.plan.psns)
    }

    /// Resets both queue pairs and connects them again; who asks begins with `psn`.
    fn reconnect(&mut self, psn: u32) -> Step {
        for node in [&mut self.active, &mut self.passive] {
            node.modify(State::Reset)?;
            node.do_(&Request::Prepare { qp: 0, access: ALL })?;
        }
        self.join([psn, psn + 0x1000])
    }

    /// How both sides stand, for whoever wants to know why a step failed: which of them waits, and which has given up.
    fn standing(&mut self) -> String {
        [&mut self.active, &mut self.passive].map(Node::standing).join("; ")
    }

    fn join(&mut self, [active, passive]: [u32; 2]) -> Step {
        let how = self.plan.how;
        let (to_active, to_passive) =
            (self.active.endpoint(active), self.passive.endpoint(passive));
        self.passive.connect(to_active, Connection { psn: passive, ..how })?;
        self.active.connect(to_passive, Connection { psn: active, ..how })
    }
}
