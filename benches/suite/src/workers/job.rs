//! One of the two processes of a measurement.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use nix::unistd::{Pid, setpgid, setsid};
use rocinante::device::{Backend, PortConfig};
use rocinante::exchange::Exchange;
use rocinante::{Context, OpenOptions};
use rocinante_baselines::{Raw, Task};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use serde::{Deserialize, Serialize};

use super::load::{self, Loaded};
use super::measure::{Figure, Measure, Step};
use super::pairs::{self, Paired, Pairing};
use super::peers::{Congestion, TcpMode};
use super::programs::{self, Foreign};
use super::raw::Carrier;
use super::{fan_in, idle, on_demand, ours, peers, podman, rate, raw};
use rocinante_cli::cores;
use rocinante_cli::measure::Side;
use rocinante_cli::output::{Failure, Result};
use rocinante_lab::exit_with_parent;

/// TCP port of the exchange between the two processes. It must differ from those of `perf`,
/// perftest and an agent, which may use the same address.
pub(super) const PORT: u16 = 18_517;
/// Port of sockperf's server, which cannot bind one that another server had just before.
const SOCKPERF_PORT: u16 = 18_518;
/// Least time limit for the start of the other process.
const PATIENCE: Duration = Duration::from_secs(15);
/// The defaults of `net.core.rmem_max` and `wmem_max`.
const SMALL_BUFFER: u32 = 212_992;

/// The device that carries the requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Device {
    /// The device in software, over a backend.
    Software {
        backend: String,
        /// Limits socket buffers to the size that every process may have.
        small_buffers: bool,
        /// An agent opens its port, because the process drops all capabilities before.
        handed: bool,
        /// The process is in a container of podman.
        contained: bool,
    },
    /// RDMA devices of the kernel: the first side's, and the second side's.
    Hardware([String; 2]),
}

/// The work of two processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// RDMA measurements.
    Verbs { device: Device, mtu: u32, qps: u32, steps: Vec<Step> },
    /// WRITEs of this many senders to one receiver.
    FanIn { traffic: Traffic, mtu: u32, senders: u32, step: Step },
    /// Packets without a protocol.
    Raw { carrier: Carrier, tasks: Vec<Task>, tally: PathBuf },
    /// One of many pairs of processes that work at the same time.
    Paired { traffic: Traffic, mtu: u32, pairing: Pairing },
    /// Messages when they are asked for, one after the other.
    OnDemand { traffic: Traffic, mtu: u32, size: usize },
    /// Small messages of several threads, each with connections of its own.
    Rate { traffic: Traffic, mtu: u32, threads: u32, each: u32, step: Step },
    /// Requests at planned times, for each percentage of the highest rate.
    Load { traffic: Traffic, mtu: u32, size: usize, seconds: f64, percents: Vec<u64> },
    /// A TCP stream.
    Tcp(TcpMode, Vec<Step>),
    /// UDP sockets.
    Udp(Vec<Step>),
    /// A TCP stream of iperf3.
    Iperf3(Congestion, Step),
    /// A ping-pong of sockperf, of TCP or else of UDP. Both ends spin if the measure's do.
    Sockperf { tcp: bool, step: Step },
    /// An unmodified RDMA program.
    Foreign(Foreign),
}

/// The results of two processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Figures(Vec<Figure>),
    Raw(Vec<Raw>),
    Paired(Paired),
    Load(Vec<Loaded>),
}

/// The carrier of the requests of work that TCP can do as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Traffic {
    Verbs(Device),
    /// A TCP stream with the kernel's default congestion control.
    Tcp,
}

impl Work {
    /// Its RDMA device.
    const fn device(&self) -> Option<&Device> {
        match self {
            Self::Verbs { device, .. }
            | Self::FanIn { traffic: Traffic::Verbs(device), .. }
            | Self::Paired { traffic: Traffic::Verbs(device), .. }
            | Self::OnDemand { traffic: Traffic::Verbs(device), .. }
            | Self::Rate { traffic: Traffic::Verbs(device), .. }
            | Self::Load { traffic: Traffic::Verbs(device), .. } => Some(device),
            _ => None,
        }
    }
}

/// All parameters of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) side: Side,
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    /// The one of the two cores that the process keeps to, if any.
    pub(super) core: Option<usize>,
    /// Whether to run before all other processes of the machine.
    pub(super) urgent: bool,
    /// Time limit of the whole work, in seconds.
    pub(super) limit: f64,
    pub(super) work: Work,
}

/// One process of a measurement
#[derive(Debug, Clone, clap::Args)]
pub struct WorkerArgs {
    /// What to do, in JSON
    #[arg(long)]
    job: String,
}

/// Runs one process of a measurement. Prints its results to standard output.
#[must_use]
pub fn run_worker(args: &WorkerArgs) -> ExitCode {
    exit_with_parent();
    let result = serde_json::from_str::<Job>(&args.job)
        .map_err(|error| Failure::Usage(format!("--job: {error}")))
        .and_then(|job| job.run());
    match result {
        Ok(outcome) => {
            println!("{}", serde_json::json!(outcome));
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.code())
        }
    }
}

impl Work {
    /// Whether an agent opens its ports.
    pub(super) const fn is_handed(&self) -> bool {
        matches!(self.device(), Some(Device::Software { handed: true, .. }))
    }

    /// Whether its processes are in containers of podman.
    const fn is_contained(&self) -> bool {
        matches!(self.device(), Some(Device::Software { contained: true, .. }))
    }

    /// The same, of a process that is in its container.
    pub(super) fn inside(&self) -> Self {
        let mut work = self.clone();
        if let Self::Verbs { device, .. } | Self::OnDemand { traffic: Traffic::Verbs(device), .. } =
            &mut work
            && let Device::Software { contained, .. } = device
        {
            *contained = false;
        }
        work
    }

    /// Whether it uses devices of the kernel.
    pub(super) const fn is_hardware(&self) -> bool {
        matches!(self.device(), Some(Device::Hardware(_)))
    }

    /// Time of measuring, in seconds.
    pub(super) fn seconds(&self) -> f64 {
        match self {
            Self::Verbs { steps, .. } | Self::Tcp(_, steps) | Self::Udp(steps) => {
                steps.iter().map(|step| step.seconds).sum()
            }
            Self::Raw { tasks, .. } => tasks.iter().map(|task| task.seconds).sum(),
            Self::FanIn { step, .. } | Self::Rate { step, .. } => step.seconds,
            Self::OnDemand { .. } => on_demand::SECONDS_MAX,
            Self::Paired { pairing, .. } => pairing.seconds,
            Self::Load { seconds, percents, .. } => load::seconds(*seconds, percents.len()),
            Self::Iperf3(_, step) => step.seconds.ceil() + peers::IPERF3_WARM_UP,
            Self::Sockperf { step, .. } => step.seconds.ceil() + peers::SOCKPERF_WARM_UP,
            Self::Foreign(_) => programs::SECONDS_MAX,
        }
    }

    /// Number of processes that lead. One more answers.
    pub(super) const fn leaders(&self) -> u32 {
        match self {
            Self::FanIn { senders, .. } => *senders,
            _ => 1,
        }
    }

    /// Number of network namespaces where it is not between given addresses.
    pub(crate) const fn namespaces(&self) -> u8 {
        match self {
            Self::FanIn { .. } => fan_in::NAMESPACES,
            _ => 2,
        }
    }

    /// The core of one side: each has its own, or both have one. Which one, `swapped` decides.
    pub(super) fn core(&self, side: Side, swapped: bool) -> Option<usize> {
        match self {
            // More processes than cores: the scheduler decides, as it does for containers.
            Self::FanIn { .. }
            | Self::Paired { .. }
            | Self::OnDemand { .. }
            | Self::Rate { .. } => None,
            Self::Verbs { steps, .. } if steps.iter().any(|step| step.measure.is_on_one_cpu()) => {
                Some(usize::from(swapped))
            }
            _ => Some(usize::from((side == Side::Second) != swapped)),
        }
    }
}

impl Job {
    fn run(&self) -> Result<Outcome> {
        self.settle();
        if let Some(program) = self.program()? {
            return Err(run_to_its_end(program));
        }
        // Opens the device first, so that a failure shows at once.
        let began = Instant::now();
        let ctx = self.open()?;
        let opened = began.elapsed();
        let patience = Duration::from_secs_f64(self.limit);
        if let (Work::FanIn { mtu, senders, step, .. }, Side::Second) = (&self.work, self.side) {
            let size = (*mtu, *senders);
            return fan_in::receive(ctx.as_ref(), self.local, size, step, patience)
                .map(Outcome::Figures);
        }
        let mut exchange = match self.side {
            Side::Second => Exchange::accept(SocketAddr::from((self.local, PORT)))?,
            Side::First => {
                let patience = PATIENCE.max(Duration::from_secs_f64(self.limit / 2.0));
                Exchange::connect(SocketAddr::from((self.remote, PORT)), patience)?
            }
        };
        exchange.set_patience(Some(patience));
        if let Work::OnDemand { mtu, size, .. } = self.work {
            let ends = (self.local, self.remote);
            on_demand::run(ctx, opened, self.side, ends, (mtu, size), &mut exchange)?;
            return Ok(Outcome::Figures(Vec::new()));
        }
        let outcome = self.outcome(ctx, &mut exchange)?;
        exchange.barrier("bye")?;
        Ok(outcome)
    }

    fn outcome(&self, ctx: Option<Context>, exchange: &mut Exchange) -> Result<Outcome> {
        let (side, ends) = (self.side, (self.local, self.remote));
        let mut figures = Vec::new();
        match (&self.work, ctx) {
            (Work::Raw { carrier, tasks, tally }, _) => {
                return raw::run(side, carrier, ends, tally, tasks, exchange).map(Outcome::Raw);
            }
            (Work::Paired { mtu, pairing, .. }, ctx) => {
                let paired = pairs::run(ctx, side, ends, *mtu, pairing, exchange)?;
                return Ok(Outcome::Paired(paired));
            }
            (Work::Load { mtu, size, seconds, percents, .. }, ctx) => {
                let plan = load::Plan { size: *size, seconds: *seconds, percents };
                return load::run(ctx, side, ends, *mtu, &plan, exchange).map(Outcome::Load);
            }
            (Work::Verbs { mtu, qps, steps, .. }, Some(ctx)) => {
                let size = (*mtu, *qps);
                if let [step] = &steps[..]
                    && step.measure == Measure::IdleWakeups
                {
                    let figures = idle::measure(ctx, side, size, step, exchange)?;
                    return Ok(Outcome::Figures(figures));
                }
                let device = ours::OpenDevice::connect(ctx, side, size, steps, exchange)?;
                for step in steps {
                    figures.extend(device.step(exchange, step)?);
                }
                // The peer's last request may not be acknowledged yet.
                exchange.barrier("over")?;
            }
            (Work::Tcp(mode, steps), _) => {
                for step in steps {
                    figures.extend(peers::tcp(side, ends, exchange, *mode, step)?);
                }
            }
            (Work::Udp(steps), _) => {
                for step in steps {
                    figures.extend(peers::udp(side, ends, exchange, step)?);
                }
            }
            (Work::FanIn { mtu, step, .. }, ctx) => {
                fan_in::send(ctx, self.remote, *mtu, step, exchange)?;
            }
            (Work::Rate { mtu, threads, each, step, .. }, ctx) => {
                let size = (*mtu, *threads, *each);
                figures.extend(rate::run(ctx, side, ends, size, step, exchange)?);
            }
            (Work::Verbs { .. }, None)
            | (Work::OnDemand { .. }, _)
            | (Work::Iperf3(..) | Work::Sockperf { .. } | Work::Foreign(_), _) => {}
        }
        Ok(Outcome::Figures(figures))
    }

    /// Binds this process to its core. If urgent, it also gets priority on that core: as its own
    /// session it is scheduled as one group, which has a weight of its own.
    fn settle(&self) {
        if self.urgent && setsid().is_ok() {
            let _ = std::fs::write("/proc/self/autogroup", "-20");
        }
        if let Some(core) = self.core {
            cores::bind(core);
        }
    }

    fn open(&self) -> Result<Option<Context>> {
        let Some(device) = self.work.device() else { return Ok(None) };
        let options = OpenOptions::new();
        let options = match device {
            Device::Hardware(names) => {
                options.device(&names[usize::from(self.side == Side::Second)])
            }
            Device::Software { backend, small_buffers, handed, .. } => {
                if *handed {
                    drop_capabilities()?;
                }
                let mut config = PortConfig::default();
                if *small_buffers {
                    config.udp.rx_buffer_bytes = SMALL_BUFFER;
                    config.tx_buffer_bytes = SMALL_BUFFER;
                    config.force_buffers = false;
                }
                options.netdev(self::backend(backend)?).port(config)
            }
        };
        let ctx = options.open(self.local)?;
        // A figure never goes by the name of a backend that the device does not use, and this work
        // reports which one it does.
        let reports = matches!(self.work, Work::OnDemand { .. });
        if !reports
            && let (Device::Software { backend, .. }, Some(has)) = (device, ctx.backend())
            && has.to_string() != *backend
        {
            let why = format!("the device fell back from {backend} to {has}");
            return Err(Failure::Failed(why));
        }
        Ok(Some(ctx))
    }

    /// The other program that does the work of this side, if one does. Error: it cannot be started.
    fn program(&self) -> Result<Option<Command>> {
        if self.work.is_contained() {
            return podman::command(self).map(Some);
        }
        let (local, remote) = (self.local.to_string(), self.remote.to_string());
        Ok(match &self.work {
            Work::Foreign(foreign) => Some(foreign.command(self.side, &remote)?),
            Work::Iperf3(cc, step) => {
                let mut command = Command::new("iperf3");
                match self.side {
                    Side::Second => command.args(["-s", "-1", "-B", &local]),
                    Side::First => {
                        let seconds = step.seconds.ceil().max(1.0).to_string();
                        let (size, warm_up) =
                            (step.size.to_string(), peers::IPERF3_WARM_UP.to_string());
                        command.args(["-c", &remote, "-J", "-t", &seconds, "-O", &warm_up]);
                        command.args(["-l", &size, "-C", cc.name()])
                    }
                };
                Some(command)
            }
            Work::Sockperf { tcp, step } => {
                let (mut command, port) = (Command::new("sockperf"), SOCKPERF_PORT.to_string());
                match self.side {
                    Side::Second => command.args(["server", "-i", &local]),
                    Side::First => {
                        let seconds = step.seconds.ceil().max(1.0).to_string();
                        let size = step.size.to_string();
                        command.args(["ping-pong", "-i", &remote, "-t", &seconds, "-m", &size])
                    }
                };
                command.args(["-p", &port]).args(tcp.then_some("--tcp"));
                command.args((step.measure == Measure::WriteLat).then_some("--nonblocked"));
                Some(command)
            }
            _ => None,
        })
    }
}

/// This thread and those that it starts have no rights any more.
fn drop_capabilities() -> Result {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets)
        .map_err(|error| Failure::Failed(format!("cannot drop capabilities: {error}")))
}

/// Runs another program, with this one's streams, and ends as it does. Both are of one process
/// group, which ends with this process. Returns only if the program cannot be started, or is
/// killed.
fn run_to_its_end(mut program: Command) -> Failure {
    // A process that is urgent leads a group already.
    // A session of its own would have its own share of the processors.
    let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let name = program.get_program().to_string_lossy().into_owned();
    let why = match program.status() {
        Ok(status) => match status.code() {
            Some(code) => std::process::exit(code),
            None => format!("{name}: {status}"),
        },
        Err(error) => format!("cannot start {name}: {error}: install it"),
    };
    Failure::Failed(why)
}

pub(super) fn backend(name: &str) -> Result<Backend> {
    name.parse().map_err(Failure::Failed)
}
