//! Chooses the addresses between which two processes measure, and starts the processes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::agent::Agent;
use super::job::{Job, Outcome, Work};
use super::measure::Figure;
use super::peers::{iperf3_figures, sockperf_figures};
use nix::sys::signal::Signal;
use rocinante::device::AGENT_VARIABLE;
use rocinante_cli::devices::is_soft_roce;
use rocinante_cli::measure::Side;
use rocinante_cli::output::{Failure, Result};
use rocinante_lab::{
    Between, ChildGuard, Container, Hosts, Lab, LabConfig, LabError, Netns, Pair,
    kill_children_on_signal,
};

/// The place of a measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct PlaceArgs {
    /// Address of the side that sends
    #[arg(long, requires = "remote")]
    pub(crate) local: Option<IpAddr>,
    /// Address of the side that receives
    #[arg(long, requires = "local")]
    pub(crate) remote: Option<IpAddr>,
    /// RDMA devices of the two addresses, for the kernel provider (hw)
    #[arg(long, value_delimiter = ',', requires = "local")]
    pub(crate) devices: Vec<String>,
    /// Take turns with the other processes of the machine, instead of going first; always so with
    /// devices of Soft-RoCE
    #[arg(long)]
    pub(crate) patient: bool,
    /// Also ports of packet that rocinante-agent, which is beside this program, opens for processes
    /// without capabilities: rows of handed. A bridge is between the two sides then, in all rows
    #[arg(long, conflicts_with_all = ["local", "devices"])]
    pub(crate) agent: bool,
}

impl PlaceArgs {
    /// Whether one of the RDMA devices is Soft-RoCE. The kernel's threads then do the work of a
    /// card. They have no more right to a core than any other process, so they would never get a
    /// core with a spinning process that goes first.
    pub(crate) fn is_soft_roce(&self) -> bool {
        self.devices.iter().any(|device| is_soft_roce(device))
    }

    /// The RDMA devices of both sides.
    pub(crate) fn devices(&self) -> Result<[String; 2]> {
        self.devices.clone().try_into().map_err(|_| {
            let why = "the provider hw needs --devices with the RDMA devices of --local and --remote: \
                       `rocinante devices` lists them";
            Failure::Usage(why.into())
        })
    }
}

/// The link between the two sides of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Link {
    /// A veth of MTU 9000, or the wire between two given addresses.
    Plain,
    /// A veth of MTU 1500.
    Mtu1500,
    /// A bridge, with a veth of MTU 9000 to each side.
    Bridge,
    /// A veth of MTU 9000 whose ends neither segment nor merge.
    NoOffload,
    /// Two hosts with VXLAN between them, of MTU 9000 inside.
    Vxlan,
    /// None: both sides are in one namespace, with two addresses of `lo`.
    Loopback,
}

impl Link {
    /// All of one host but the plain one.
    pub(crate) const OTHERS: [Self; 3] = [Self::Mtu1500, Self::Bridge, Self::NoOffload];

    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Plain)
    }

    /// Its name in the rows.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Mtu1500 => "mtu1500",
            Self::Bridge => "bridge",
            Self::NoOffload => "no_offload",
            Self::Vxlan => "vxlan",
            Self::Loopback => "loopback",
        }
    }

    /// Its MTU in bytes.
    pub(crate) const fn mtu(self) -> u32 {
        match self {
            Self::Mtu1500 => 1500,
            _ => 9000,
        }
    }
}

/// The addresses of a measurement, and their namespaces.
enum Place {
    /// Two namespaces of our own, joined by a veth.
    Pair(Pair),
    /// Namespaces of our own behind a bridge.
    Lab(Lab),
    /// One namespace: this one, or one of our own.
    Here { netns: Option<Netns>, local: IpAddr, remote: IpAddr },
}

impl Place {
    /// Creates `count` namespaces and `link` between them.
    fn new(link: Link, count: u8) -> Result<Self, LabError> {
        let mtu = link.mtu();
        let config = LabConfig { containers: count, mtu, ipv6: false, ..LabConfig::default() };
        match link {
            Link::Bridge => return Lab::new(&config).map(Self::Lab),
            Link::Vxlan => {
                let between = Between::Vxlan { ipv6: false };
                let shape = Hosts { hosts: 2, containers_each: count.div_ceil(2), between };
                return Lab::of_hosts(&shape, &config).map(Self::Lab);
            }
            Link::Loopback => {
                let [local, remote] = [1, 2].map(|end| Ipv4Addr::new(127, 0, 0, end).into());
                return Ok(Self::Here { netns: Some(Netns::new()?), local, remote });
            }
            _ => {}
        }
        let pair = Pair::new(&config)?;
        if link == Link::NoOffload {
            pair.containers().iter().try_for_each(Container::disable_offloads)?;
        }
        Ok(Self::Pair(pair))
    }

    /// The namespaces, if they are our own. The leading process is in the first.
    fn containers(&self) -> &[Container] {
        match self {
            Self::Pair(pair) => pair.containers(),
            Self::Lab(lab) => lab.containers(),
            Self::Here { .. } => &[],
        }
    }

    fn address(&self, index: usize) -> IpAddr {
        match self {
            Self::Here { local, remote, .. } => [*local, *remote][index],
            _ => self.containers()[index].ipv4().into(),
        }
    }

    fn spawn(&self, index: usize, command: &mut Command) -> Result<ChildGuard> {
        let child = match (self, self.containers().get(index)) {
            (_, Some(container)) => container.spawn(command),
            (Self::Here { netns: Some(netns), .. }, _) => netns.spawn(command),
            _ => ChildGuard::spawn(command),
        };
        child.map_err(|error| Failure::Failed(error.to_string()))
    }
}

/// The places where the processes of a measurement start.
pub(crate) struct Places {
    /// Ended before the namespaces go.
    agent: Option<Agent>,
    software: Place,
    /// The place for the kernel's devices, if it differs.
    hardware: Option<Place>,
    /// Places that are made when they are first needed, by their link and number of namespaces.
    others: BTreeMap<(Link, u8), Place>,
    urgent: bool,
    swapped: bool,
    /// The time that processes take to start, divided by that on an ordinary machine.
    slowness: f64,
    /// The program of the workers: this one.
    program: PathBuf,
    /// Time that two processes may take in addition to measuring.
    starts_within: Duration,
}

/// Time that two processes may take in addition to measuring.
const STARTS_WITHIN: Duration = Duration::from_secs(20);
/// The same for each process more.
const STARTS_EACH: Duration = Duration::from_millis(500);
/// Limit of the factor by which that time is extended.
const SLOWNESS_MAX: f64 = 3.0;
/// Time in which the answering process has to end after the leading one.
const ENDS_AFTER: Duration = Duration::from_secs(5);
/// The messages of iperf3 and UCX, sockperf, and perftest if their server does not listen yet.
const REFUSED: [&str; 3] =
    ["Connection refused", "No messages were received", "Couldn't connect to"];

impl Places {
    /// Creates namespaces if no addresses are given. From now on, signals end this process and all
    /// its children.
    pub(crate) fn new(args: &PlaceArgs) -> Result<Self> {
        // An agent is on a host, which is no end of the link.
        let mut places = Self::of(args, if args.agent { Link::Bridge } else { Link::Plain }, 2)?;
        if args.agent {
            places.start_agent()?;
        }
        Ok(places)
    }

    /// The same with this many namespaces, joined by `link`.
    pub(crate) fn of(args: &PlaceArgs, link: Link, count: u8) -> Result<Self> {
        kill_children_on_signal().map_err(|error| Failure::Failed(error.to_string()))?;
        let urgent = !args.patient && !args.is_soft_roce();
        let here = match (args.local, args.remote) {
            (Some(local), Some(remote)) => Some(Place::Here { netns: None, local, remote }),
            _ => None,
        };
        if args.devices.is_empty()
            && let Some(software) = here
        {
            return Ok(Self::with(software, None, urgent));
        }
        let software = Place::new(link, count);
        let software = software.map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(Self::with(software, here, urgent))
    }

    /// Three hosts with a container each, joined by VXLAN: the second can move to the place of the
    /// third.
    pub(crate) fn of_a_move(args: &PlaceArgs) -> Result<Self> {
        let shape = Hosts { hosts: 3, containers_each: 1, between: Between::Vxlan { ipv6: false } };
        let config = LabConfig { ipv6: false, ..LabConfig::default() };
        let lab = Lab::of_hosts(&shape, &config);
        let lab = lab.map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(Self::with(Place::Lab(lab), None, !args.patient))
    }

    /// Starts an agent on the host of the containers. Error: there is no such host, or the agent
    /// does not start.
    pub(crate) fn start_agent(&mut self) -> Result {
        self.agent = Some(Agent::start(self.lab()?)?);
        Ok(())
    }

    /// Kills the agent (SIGKILL) and starts it again, with its state. Error: there is none, or it
    /// does not start.
    pub(crate) fn restart_agent(&mut self) -> Result {
        let Some(mut agent) = self.agent.take() else {
            return Err(Failure::Failed("there is no agent".into()));
        };
        agent.restart(self.lab()?)?;
        self.agent = Some(agent);
        Ok(())
    }

    /// The containers and their host. Error: the places are of another kind.
    pub(crate) fn lab(&self) -> Result<&Lab> {
        match &self.software {
            Place::Lab(lab) => Ok(lab),
            _ => Err(Failure::Failed("there is no host with containers of our own".into())),
        }
    }

    /// The container at `index` that is joined with others by a link that is
    /// [`prepare`](Self::prepare)d. Error: the places are of another kind.
    pub(crate) fn container(&self, link: Link, index: usize) -> Result<&Container> {
        let place =
            if link.is_plain() { Some(&self.software) } else { self.others.get(&(link, 2)) };
        let container = place.and_then(|place| place.containers().get(index));
        container.ok_or_else(|| Failure::Failed("there are no containers of our own".into()))
    }

    /// Whether the two sides are in namespaces of our own.
    pub(crate) const fn are_own(&self) -> bool {
        !matches!(self.software, Place::Here { .. })
    }

    fn with(software: Place, hardware: Option<Place>, urgent: bool) -> Self {
        let others = BTreeMap::new();
        let (program, starts_within) = (PathBuf::from("/proc/self/exe"), STARTS_WITHIN);
        let (agent, swapped, slowness) = (None, false, 1.0);
        Self {
            agent,
            software,
            hardware,
            others,
            urgent,
            swapped,
            slowness,
            program,
            starts_within,
        }
    }

    /// Makes sure that there is a place with `link` and this many namespaces.
    pub(crate) fn prepare(&mut self, link: Link, namespaces: u8) -> Result {
        if link.is_plain() {
            return Ok(());
        }
        if matches!(self.software, Place::Here { .. }) {
            let what = "between given addresses there is no link but theirs";
            return Err(Failure::Failed(what.into()));
        }
        if let Entry::Vacant(entry) = self.others.entry((link, namespaces)) {
            let place = Place::new(link, namespaces);
            entry.insert(place.map_err(|error| Failure::Failed(error.to_string()))?);
        }
        Ok(())
    }

    /// Has another program do the work, which must begin within this time.
    #[cfg(test)]
    pub(crate) fn with_program(self, program: &str, starts_within: Duration) -> Self {
        Self { program: program.into(), starts_within, ..self }
    }

    /// Adapts to a machine that is `slowness` times slower than an ordinary one.
    pub(crate) fn slower(self, slowness: f64) -> Self {
        Self { slowness, ..self }
    }

    /// Chooses which side has which core: from now on the two are `swapped`, or not.
    pub(crate) fn swap(&mut self, swapped: bool) {
        self.swapped = swapped;
    }

    /// Runs all processes of `work` to their end, over a link that is [`prepare`](Self::prepare)d.
    /// Returns the results.
    pub(crate) fn run(&self, link: Link, work: &Work) -> Result<Outcome> {
        match work {
            Work::Iperf3(_, step) => {
                let report = self.program(link, work)?;
                return iperf3_figures(&report, step).map(Outcome::Figures);
            }
            Work::Sockperf { step, .. } => {
                let report = self.program(link, work)?;
                return sockperf_figures(&report, step).map(Outcome::Figures);
            }
            Work::Foreign(foreign) => {
                let report = self.program(link, work)?;
                return foreign.figures(&report).map(Outcome::Figures);
            }
            Work::FanIn { .. } => return self.fan_in(link, work),
            _ => {}
        }
        let receiver = self.start(link, work, Side::Second, 0)?;
        let sent = self.finish(work, self.start(link, work, Side::First, 0)?)?;
        let grace = if sent.status.success() { ENDS_AFTER } else { Duration::from_secs(1) };
        let received =
            receiver.wait_with_output(grace).map_err(|error| Failure::Failed(error.to_string()));
        if !sent.status.success() {
            // A process that could not even begin gives the reason. The other one only knows that
            // it had no peer.
            let texts = [Some(&sent), received.as_ref().ok()].map(|output| output.map(error_text));
            let [first, second] = texts.map(Option::unwrap_or_default);
            let same = second.is_empty() || first == second;
            let both = if same { first } else { format!("{first}; the receiver: {second}") };
            return Err(Failure::Failed(both));
        }
        let received = received?;
        if !received.status.success() {
            return Err(Failure::Failed(error_text(&received)));
        }
        outcome(&sent)
    }

    /// The same of work that has figures.
    pub(crate) fn figures(&self, link: Link, work: &Work) -> Result<Vec<Figure>> {
        match self.run(link, work)? {
            Outcome::Figures(figures) => Ok(figures),
            _ => Err(Failure::Failed("it measured something else".into())),
        }
    }

    /// Runs one receiver and its senders. The receiver has the results.
    fn fan_in(&self, link: Link, work: &Work) -> Result<Outcome> {
        let receiver = self.start(link, work, Side::Second, 0)?;
        let sender = |number| self.start(link, work, Side::First, number as usize);
        let senders = (0..work.leaders()).map(sender).collect::<Result<Vec<_>, _>>()?;
        let received = self.finish(work, receiver)?;
        let grace = if received.status.success() { ENDS_AFTER } else { Duration::from_secs(1) };
        let ends = |sender: ChildGuard| sender.wait_with_output(grace);
        let sent = senders.into_iter().map(ends).collect::<Result<Vec<_>, _>>();
        let sent = sent.map_err(|error| Failure::Failed(error.to_string()))?;
        if let Some(sender) = sent.iter().find(|sender| !sender.status.success()) {
            return Err(Failure::Failed(format!("a sender: {}", error_text(sender))));
        }
        if !received.status.success() {
            return Err(Failure::Failed(error_text(&received)));
        }
        outcome(&received)
    }

    /// Runs the client of another program, whose server does not end by itself. The client does not
    /// wait for the server: it is started again while it is refused. Returns its report.
    fn program(&self, link: Link, work: &Work) -> Result<String> {
        let mut server = self.start(link, work, Side::Second, 0)?;
        let deadline = Instant::now() + self.slow(self.starts_within / 4);
        let output = loop {
            let output = self.finish(work, self.start(link, work, Side::First, 0)?)?;
            let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
            let refused = REFUSED.iter().any(|why| said.iter().any(|said| said.contains(why)));
            let has_server = matches!(server.try_wait(), Ok(None));
            if !refused || !has_server || Instant::now() > deadline {
                break output;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let report = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            if let Work::Foreign(_) = work {
                // It ends by itself, and tells its peers nothing of a death.
                let _ = server.wait(Duration::from_secs(1));
            }
            return Ok(report);
        }
        if let Work::Foreign(foreign) = work {
            server.signal(Signal::SIGKILL);
            let server = server.wait_with_output(ENDS_AFTER);
            let server = server.map(|output| output.stderr).unwrap_or_default();
            let [own, its] = [&output.stderr, &server].map(|text| String::from_utf8_lossy(text));
            let both = if its.trim().is_empty() || its == own {
                own.into_owned()
            } else {
                format!("{own}; the server: {its}")
            };
            return Err(foreign.failed(&output.status.to_string(), &both));
        }
        if report.is_empty() { Err(Failure::Failed(error_text(&output))) } else { Ok(report) }
    }

    fn finish(&self, work: &Work, child: ChildGuard) -> Result<Output> {
        let output = child.wait_with_output(self.limit(work));
        output.map_err(|error| match error {
            LabError::Timeout { seconds, .. } => {
                Failure::Failed(format!("a worker did not end within {seconds:.0} s"))
            }
            error => Failure::Failed(error.to_string()),
        })
    }

    fn limit(&self, work: &Work) -> Duration {
        let starts = self.starts_within + STARTS_EACH * (work.leaders() - 1);
        self.slow(starts) + Duration::from_secs_f64(3.0 * work.seconds())
    }

    /// A time of processes that start.
    fn slow(&self, time: Duration) -> Duration {
        time.mul_f64(self.slowness.min(SLOWNESS_MAX))
    }

    /// Starts one process. Of several that lead, it is that of this `number`.
    pub(super) fn start(
        &self,
        link: Link,
        work: &Work,
        side: Side,
        number: usize,
    ) -> Result<ChildGuard> {
        let (leads, answers) = match work {
            Work::Paired { .. } | Work::OnDemand { .. } => (2 * number, 2 * number + 1),
            _ => (number, work.leaders() as usize),
        };
        let ends = if side == Side::First { [leads, answers] } else { [answers, leads] };
        self.start_at(link, work, side, ends, ends[0])
    }

    /// Starts one process in the container `at`. `own` and `peer` are the containers that have its
    /// address and its peer's.
    pub(super) fn start_at(
        &self,
        link: Link,
        work: &Work,
        side: Side,
        [own, peer]: [usize; 2],
        at: usize,
    ) -> Result<ChildGuard> {
        let place = match (&self.hardware, work.is_hardware()) {
            (Some(hardware), true) => hardware,
            _ if link.is_plain() => &self.software,
            _ => self
                .others
                .get(&(link, work.namespaces()))
                .ok_or_else(|| Failure::Failed(format!("the link {} is not there", link.name())))?,
        };
        let (local, remote) = (place.address(own), place.address(peer));
        let (core, urgent) = (work.core(side, self.swapped), self.urgent);
        let limit = self.limit(work).as_secs_f64();
        let job = Job { side, local, remote, core, urgent, limit, work: work.clone() };
        let job = serde_json::to_string(&job).expect("a job is JSON");
        let mut command = Command::new(&self.program);
        command.args(["measure-worker", "--job", &job]).stdin(match work {
            // Its other end says when to count, or how much to send.
            Work::Paired { .. } | Work::OnDemand { .. } => Stdio::piped(),
            _ => Stdio::null(),
        });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let agent = self.agent.as_ref().filter(|_| work.is_handed());
        command.envs(agent.map(|agent| (AGENT_VARIABLE, agent.socket())));
        place.spawn(at, &mut command)
    }
}

/// The results that a process printed.
fn outcome(output: &Output) -> Result<Outcome> {
    parsed(&String::from_utf8_lossy(&output.stdout))
}

pub(super) fn parsed(text: &str) -> Result<Outcome> {
    let outcome = serde_json::from_str(text);
    outcome.map_err(|_| Failure::Failed(format!("a worker printed no figures: {:?}", text.trim())))
}

/// The error output of a process.
fn error_text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    if text.is_empty() && !output.status.success() {
        return format!("a worker ended without a word: {}", output.status);
    }
    text
}
