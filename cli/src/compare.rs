//! `rocinante compare`: the same measurements on several providers, one right after the other, and how they relate.
//!
//! Providers are the backends of the software device and, where there is one, the hardware's (or Soft-RoCE's) device. Each
//! measurement has two processes of its own, bound to two cores. All providers take turns within a run, and runs follow each other, so
//! that a machine that changes its speed changes it for all.

mod figure;
mod measurement;
mod table;

use std::net::IpAddr;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rocinante::{Backend, Mtu};

use self::figure::{Key, plan};
use self::measurement::{Job, Role};
use self::table::Comparison;
use crate::lab::{ChildGuard, LabConfig, Pair, kill_children_on_signal};
use crate::output::{Failure, Output};
use crate::session::mtu;

pub use self::measurement::{WorkerArgs, run_worker};

/// Measure several providers side by side: latency, message rate, bandwidth, processor time
///
/// Without addresses it joins two network namespaces by a veth and compares the backends of the software device there. With
/// --local and --remote it works between two addresses of this namespace that reach each other over a wire. With --devices, the
/// RDMA devices of these two addresses are measured between them, and the software device between two namespaces as without
/// addresses: Soft-RoCE holds UDP/4791 of all addresses of its namespace.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Providers, the first of which is the baseline: hw, udp, packet, afxdp; all that can be had unless said otherwise
    #[arg(long, value_delimiter = ',')]
    providers: Vec<Provider>,
    /// Address of the side that sends
    #[arg(long, requires = "remote")]
    local: Option<IpAddr>,
    /// Address of the side that receives
    #[arg(long, requires = "local")]
    remote: Option<IpAddr>,
    /// RDMA devices of the two addresses, for the provider hw
    #[arg(long, value_delimiter = ',', requires = "local")]
    devices: Vec<String>,
    /// How often everything is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// How long each figure is measured, in seconds
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Path MTUs in bytes
    #[arg(long, value_delimiter = ',', default_value = "1024,4096", value_parser = mtu)]
    mtu: Vec<Mtu>,
    /// Only figures whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Print one JSON object on the last line of standard output, and everything else to standard error
    #[arg(long)]
    json: bool,
}

/// What is compared.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    /// The RDMA device of the kernel: hardware, or Soft-RoCE.
    Hw,
    /// The software device over UDP sockets.
    Udp,
    /// The software device over AF_PACKET.
    Packet,
    /// The software device over AF_XDP.
    Afxdp,
}

impl Provider {
    const ALL: [Self; 4] = [Self::Hw, Self::Udp, Self::Packet, Self::Afxdp];

    /// As on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hw => "hw",
            Self::Udp => "udp",
            Self::Packet => "packet",
            Self::Afxdp => "afxdp",
        }
    }

    const fn backend(self) -> Option<Backend> {
        match self {
            Self::Hw => None,
            Self::Udp => Some(Backend::Udp),
            Self::Packet => Some(Backend::Packet),
            Self::Afxdp => Some(Backend::Xdp),
        }
    }
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let output = Output { json: args.json };
    let result = compare(args, output);
    if let Ok(comparison) = &result {
        output.line(comparison);
    }
    output.end("compare", &result)
}

/// Between whom, and where.
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

/// Where the providers are measured.
struct Places {
    software: Place,
    /// Of the kernel's devices, if not the same.
    hardware: Option<Place>,
}

impl Places {
    fn new(args: &Args) -> Result<Self, Failure> {
        let here = match (args.local, args.remote) {
            (Some(local), Some(remote)) => Some(Place::Here { local, remote }),
            _ => None,
        };
        if args.devices.is_empty()
            && let Some(software) = here
        {
            return Ok(Self { software, hardware: None });
        }
        let config = LabConfig { ipv6: false, ..LabConfig::default() };
        let pair = Pair::new(&config).map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(Self { software: Place::Made(pair), hardware: here })
    }

    fn of(&self, provider: Provider) -> &Place {
        match (&self.hardware, provider) {
            (Some(hardware), Provider::Hw) => hardware,
            _ => &self.software,
        }
    }
}

fn compare(args: &Args, output: Output) -> Result<Comparison, Failure> {
    if args.seconds.is_nan() || !(0.01..=60.0).contains(&args.seconds) {
        return Err(Failure::Usage("--seconds must be from 0.01 to 60".into()));
    }
    kill_children_on_signal().map_err(|error| Failure::Failed(error.to_string()))?;
    let providers = providers(args)?;
    let places = Places::new(args)?;
    let mut comparison = Comparison::new(providers.clone());
    for run in 1..=args.runs {
        for &mtu in &args.mtu {
            for &provider in &providers {
                if comparison.is_skipped(provider) {
                    continue;
                }
                output.note(format_args!(
                    "run {run}: {} at path MTU {}",
                    provider.name(),
                    mtu.bytes()
                ));
                match measure(args, places.of(provider), provider, mtu) {
                    Ok(figures) => comparison.add(provider, figures),
                    // What cannot be had is said once; what broke in a later run is an error.
                    Err(Failure::Failed(why)) if run == 1 && args.providers.is_empty() => {
                        comparison.skip(provider, why);
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
    }
    comparison.check()?;
    Ok(comparison)
}

fn providers(args: &Args) -> Result<Vec<Provider>, Failure> {
    let wanted = if args.providers.is_empty() {
        let all = Provider::ALL.into_iter();
        all.filter(|one| *one != Provider::Hw || !args.devices.is_empty()).collect()
    } else {
        args.providers.clone()
    };
    if wanted.contains(&Provider::Hw) && args.devices.len() != 2 {
        let why = "the provider hw needs --devices with the RDMA devices of --local and --remote: \
                   `rocinante devices` lists them";
        return Err(Failure::Usage(why.into()));
    }
    Ok(wanted)
}

/// All figures of one provider at one path MTU, once.
fn measure(
    args: &Args,
    place: &Place,
    provider: Provider,
    mtu: Mtu,
) -> Result<Vec<(Key, f64)>, Failure> {
    let mtu = mtu.bytes();
    let steps = plan(mtu, args.only.as_deref());
    let failed = |error: &dyn std::fmt::Display| {
        Failure::Failed(format!("{} at path MTU {mtu}: {error}", provider.name()))
    };
    let limit = Duration::from_secs_f64(20.0 + 3.0 * args.seconds * steps.len() as f64);
    let [local, remote] = place.addresses();
    let device = |side: usize| args.devices.get(side).cloned().filter(|_| provider == Provider::Hw);
    let job = |side: usize, role, own, peer| Job {
        role,
        backend: provider.backend().map(|backend| backend.to_string()),
        device: device(side),
        local: own,
        remote: peer,
        mtu,
        seconds: args.seconds,
        steps: steps.clone(),
        limit: limit.as_secs_f64(),
    };
    let jobs = [job(0, Role::Sender, local, remote), job(1, Role::Receiver, remote, local)];
    let start = |side: usize| {
        let mut command = Command::new("/proc/self/exe");
        let text = serde_json::to_string(&jobs[side]).map_err(|error| failed(&error))?;
        command.args(["compare-worker", "--job", &text]).stdin(Stdio::null());
        place.spawn(side, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let receiver = start(1)?;
    let sender = start(0)?;
    let sent = sender.wait_with_output(limit).map_err(|error| failed(&error))?;
    let received =
        receiver.wait_with_output(Duration::from_secs(5)).map_err(|error| failed(&error));
    if !sent.status.success() {
        // Who could not even begin says why; the other only knows that nobody came.
        let texts = [Some(&sent), received.as_ref().ok()].map(|output| {
            let text = output.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
            text.unwrap_or_default().trim().replace('\n', "; ")
        });
        let [first, second] = texts;
        let both = if first == second { first } else { format!("{first}; the receiver: {second}") };
        return Err(failed(&both));
    }
    let received = received?;
    if !received.status.success() {
        return Err(failed(&String::from_utf8_lossy(&received.stderr).trim()));
    }
    serde_json::from_slice(&sent.stdout).map_err(|error| failed(&error))
}
