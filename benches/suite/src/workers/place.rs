//! Chooses the addresses between which two processes measure, and starts the processes.

use std::net::IpAddr;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use super::job::{Job, Outcome, Work};
use super::measure::{Figure, Step};
use super::peers::iperf3_figures;
use rocinante_cli::devices::is_soft_roce;
use rocinante_cli::measure::Side;
use rocinante_cli::output::Failure;
use rocinante_node::{ChildGuard, LabConfig, Pair, kill_children_on_signal};

/// The place of a measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct PlaceArgs {
    /// Address of the side that sends
    #[arg(long, requires = "remote")]
    local: Option<IpAddr>,
    /// Address of the side that receives
    #[arg(long, requires = "local")]
    remote: Option<IpAddr>,
    /// RDMA devices of the two addresses, for the kernel provider (hw)
    #[arg(long, value_delimiter = ',', requires = "local")]
    pub(crate) devices: Vec<String>,
    /// Take turns with the other processes of the machine, instead of going first; always so with
    /// devices of Soft-RoCE
    #[arg(long)]
    patient: bool,
}

impl PlaceArgs {
    /// Whether one of the RDMA devices is Soft-RoCE. The kernel's threads then do the work of a
    /// card. They have no more right to a core than any other process, so they would never get a
    /// core with a spinning process that goes first.
    pub(crate) fn is_soft_roce(&self) -> bool {
        self.devices.iter().any(|device| is_soft_roce(device))
    }

    /// The RDMA devices of both sides.
    pub(crate) fn devices(&self) -> Result<[String; 2], Failure> {
        self.devices.clone().try_into().map_err(|_| {
            let why = "the provider hw needs --devices with the RDMA devices of --local and --remote: \
                       `rocinante devices` lists them";
            Failure::Usage(why.into())
        })
    }
}

/// The addresses of a measurement, and their namespaces.
enum Place {
    /// Two namespaces of our own.
    Made(Pair),
    /// This namespace.
    Here { local: IpAddr, remote: IpAddr },
}

impl Place {
    fn addresses(&self) -> [IpAddr; 2] {
        match self {
            Self::Made(pair) => pair.containers().each_ref().map(|one| one.ipv4().into()),
            Self::Here { local, remote } => [*local, *remote],
        }
    }

    fn spawn(&self, side: usize, command: &mut Command) -> Result<ChildGuard, Failure> {
        let child = match self {
            Self::Made(pair) => pair.containers()[side].spawn(command),
            Self::Here { .. } => ChildGuard::spawn(command),
        };
        child.map_err(|error| Failure::Failed(error.to_string()))
    }
}

/// The places where pairs of processes start.
pub(crate) struct Places {
    software: Place,
    /// The place for the kernel's devices, if it differs.
    hardware: Option<Place>,
    urgent: bool,
    swapped: bool,
    /// How many times longer processes take to start than on an ordinary machine.
    slowness: f64,
}

/// Time that two processes may take in addition to measuring.
const STARTS_WITHIN: Duration = Duration::from_secs(20);
/// Limit of the factor by which that time is extended.
const SLOWNESS_MAX: f64 = 3.0;
/// Time in which the answering process has to end after the leading one.
const ENDS_AFTER: Duration = Duration::from_secs(5);
/// iperf3's message if its server does not listen yet.
const REFUSED: &str = "Connection refused";
/// Attempts to start iperf3: they last one second.
const ATTEMPTS_MAX: u32 = 20;

impl Places {
    /// Creates namespaces if no addresses are given. From now on, signals end this process and all
    /// its children.
    pub(crate) fn new(args: &PlaceArgs) -> Result<Self, Failure> {
        kill_children_on_signal().map_err(|error| Failure::Failed(error.to_string()))?;
        let urgent = !args.patient && !args.is_soft_roce();
        let here = match (args.local, args.remote) {
            (Some(local), Some(remote)) => Some(Place::Here { local, remote }),
            _ => None,
        };
        if args.devices.is_empty()
            && let Some(software) = here
        {
            return Ok(Self { software, hardware: None, urgent, swapped: false, slowness: 1.0 });
        }
        let config = LabConfig { ipv6: false, ..LabConfig::default() };
        let pair = Pair::new(&config).map_err(|error| Failure::Failed(error.to_string()))?;
        let software = Place::Made(pair);
        Ok(Self { software, hardware: here, urgent, swapped: false, slowness: 1.0 })
    }

    /// Adapts to a machine that is `slowness` times slower than an ordinary one.
    pub(crate) fn slower(self, slowness: f64) -> Self {
        Self { slowness, ..self }
    }

    /// Chooses which side has which core: from now on the two are `swapped`, or not.
    pub(crate) fn swap(&mut self, swapped: bool) {
        self.swapped = swapped;
    }

    /// Runs both processes of `work` to their end. Returns the results of the first one.
    pub(crate) fn run(&self, work: &Work) -> Result<Outcome, Failure> {
        if let Work::Iperf3(_, step) = work {
            return self.iperf3(work, step).map(Outcome::Figures);
        }
        let receiver = self.start(work, Side::Second)?;
        let sent = self.finish(work, self.start(work, Side::First)?)?;
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
        serde_json::from_slice(&sent.stdout).map_err(|error| Failure::Failed(error.to_string()))
    }

    /// Runs one stream of iperf3. Its client does not wait for the server, and may still exit with
    /// success.
    fn iperf3(&self, work: &Work, step: &Step) -> Result<Vec<Figure>, Failure> {
        let _server = self.start(work, Side::Second)?;
        let mut attempts = 0;
        loop {
            let output = self.finish(work, self.start(work, Side::First)?)?;
            let report = String::from_utf8_lossy(&output.stdout).into_owned();
            if report.contains(REFUSED) && attempts < ATTEMPTS_MAX {
                attempts += 1;
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            if !output.status.success() && report.is_empty() {
                return Err(Failure::Failed(error_text(&output)));
            }
            return iperf3_figures(&report, step);
        }
    }

    fn finish(&self, work: &Work, child: ChildGuard) -> Result<Output, Failure> {
        let output = child.wait_with_output(self.limit(work));
        output.map_err(|error| Failure::Failed(error.to_string()))
    }

    fn limit(&self, work: &Work) -> Duration {
        STARTS_WITHIN.mul_f64(self.slowness.min(SLOWNESS_MAX))
            + Duration::from_secs_f64(3.0 * work.seconds())
    }

    fn start(&self, work: &Work, side: Side) -> Result<ChildGuard, Failure> {
        let place = match (&self.hardware, work.is_hardware()) {
            (Some(hardware), true) => hardware,
            _ => &self.software,
        };
        let [first, second] = place.addresses();
        let (local, remote) = if side == Side::First { (first, second) } else { (second, first) };
        let (swapped, urgent, limit) = (self.swapped, self.urgent, self.limit(work).as_secs_f64());
        let job = Job { side, local, remote, swapped, urgent, limit, work: work.clone() };
        let job = serde_json::to_string(&job).expect("a job is JSON");
        let mut command = Command::new("/proc/self/exe");
        command.args(["measure-worker", "--job", &job]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        place.spawn(usize::from(side == Side::Second), &mut command)
    }
}

/// The error output of a process.
fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")
}
