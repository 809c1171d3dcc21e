//! `rocinante demo`: shows all features between two containers with a host between them.
//!
//! The containers are network namespaces with a veth each. The host is a third namespace, with a
//! bridge between them. A process in each container opens its device and connects a queue pair to
//! the other's. This process gives them orders, and changes the host's rules meanwhile.

mod order;
mod pair;
mod plan;
mod policy;
mod report;
mod verify;
mod worker;

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use order::{Answer, BulkOrder, Order};
use pair::{Fault, Pair};
use report::{BackendReport, Figures, Policy, Report, Skipped, rounded};

use rocinante_lab::{
    Availability, Lab, LabConfig, LabError, Privilege, enter_user_namespace,
    kill_children_on_signal,
};

use crate::output;

pub use worker::{WorkerArgs, run as run_worker};

/// Show RDMA between two containers, and the host's rules and shaping binding it
///
/// Makes two network namespaces with a veth each and a third one, "the host", with a bridge between
/// them. It does not touch the machine's own network, and leaves nothing behind. In each namespace
/// a process opens its device and connects an RC queue pair. SEND, WRITE, WRITE with immediate,
/// READ, compare-and-swap and fetch-and-add run with every byte compared. Then latency and
/// bandwidth are measured. Then nftables and tc on the host's side show that they bind the traffic.
///
/// Needs root, or unprivileged user namespaces (then without afxdp, which loads a BPF program).
///
/// Exit status: 0 if every backend that the machine allows moved all data right and obeyed the
/// host.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which backend to show
    #[arg(long, value_enum, default_value_t = Netdevs::All)]
    netdev: Netdevs,
    /// End standard output with the result as one JSON object on one line; all else goes to
    /// standard error
    #[arg(long)]
    json: bool,
    /// Measure for a short time only; verify and check as ever
    #[arg(long, hide = true)]
    quick: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Netdevs {
    /// Every one that the machine allows
    All,
    /// AF_XDP
    Afxdp,
    /// AF_PACKET
    Packet,
    /// UDP sockets
    Udp,
}

impl Netdevs {
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::All => &["afxdp", "packet", "udp"],
            Self::Afxdp => &["afxdp"],
            Self::Packet => &["packet"],
            Self::Udp => &["udp"],
        }
    }
}

/// Time limit of the whole demo.
const WHOLE: Duration = Duration::from_secs(115);
/// Bytes that are compared for each of SEND, WRITE, WRITE with immediate and READ, at each path
/// MTU: 64 MiB together.
const VERIFY_BYTES: u64 = 8 << 20;
const MTUS: [u32; 2] = [1024, 4096];
/// The default connection: an ACK timeout of 0.54 s, and seven retries. No packet is lost here. But
/// on a busy machine a container's process may not run for half a second, and after that time the
/// default of 67 ms would give up the peer.
const CONNECT: Order = Order::Connect { mtu: 0, timeout: 17, retry_cnt: 7 };

/// Runs the command. Call it before the process has a second thread.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let console = Console { to_stderr: args.json };
    let report = show(args, &console).unwrap_or_else(|error| {
        eprintln!("rocinante demo: {error}");
        let why = error.to_string();
        let skipped = |name: &&str| Skipped { netdev: (*name).to_owned(), why: why.clone() };
        Report { skipped: args.netdev.names().iter().map(skipped).collect(), ..Report::default() }
    });
    if args.json {
        let json = output::object("rocinante demo", &report);
        // The reader of our output may be gone; the exit status has the result, too.
        let _ = writeln!(io::stdout(), "{json}");
    }
    if report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The destination of text for people.
struct Console {
    to_stderr: bool,
}

impl Console {
    fn line(&self, text: Arguments<'_>) {
        // As for the JSON: the exit status has the result, too.
        let _ = if self.to_stderr {
            writeln!(io::stderr(), "{text}")
        } else {
            writeln!(io::stdout(), "{text}")
        };
    }
}

fn show(args: &Args, console: &Console) -> Result<Report, LabError> {
    let deadline = Instant::now() + WHOLE;
    let privilege = enter_user_namespace()?;
    if kill_children_on_signal().is_err() {
        console
            .line(format_args!("no signal handler: on Ctrl-C the containers end a little later"));
    }
    let available = Availability::probe();
    let lab = Lab::new(&LabConfig::default())?;
    console.line(format_args!(
        "Containers a ({}) and b ({}), their veths on the host's bridge, MTU 9000{}",
        lab.container(0).ipv4(),
        lab.container(1).ipv4(),
        if privilege == Privilege::UserNamespace {
            "; in a user namespace, without root"
        } else {
            ""
        }
    ));
    let mut report = Report::default();
    for name in args.netdev.names() {
        let demo = Demo { lab: &lab, available: &available, quick: args.quick, deadline, console };
        match demo.backend(name) {
            Ok(backend) => report.backends.push(backend),
            Err(why) => {
                console.line(format_args!("\n{name}: skipped: {why}"));
                report.skipped.push(Skipped { netdev: (*name).to_owned(), why });
            }
        }
    }
    Ok(report)
}

/// The common parts of all backends' runs.
struct Demo<'a> {
    lab: &'a Lab,
    available: &'a Availability,
    quick: bool,
    deadline: Instant,
    console: &'a Console,
}

impl Demo<'_> {
    /// Shows one backend.
    ///
    /// # Errors
    /// The reason why the backend is not available here.
    fn backend(&self, name: &str) -> Result<BackendReport, String> {
        let mut report = BackendReport { netdev: name.to_owned(), ..BackendReport::default() };
        let mut broken = Vec::new();
        match self.run(name, &mut report, &mut broken) {
            Ok(Some(why)) => return Err(why),
            Ok(None) => {}
            Err(fault) => broken.push(fault.to_string()),
        }
        report.ok = broken.is_empty();
        if report.ok {
            self.console.line(format_args!("  {name}: ok"));
        } else {
            let error = broken.join("; ");
            self.console.line(format_args!("  {name}: FAILED: {error}"));
            report.error = Some(error);
        }
        Ok(report)
    }

    /// Runs all phases of one backend. Returns the reason if it is not available.
    fn run(
        &self,
        name: &str,
        report: &mut BackendReport,
        broken: &mut Vec<String>,
    ) -> Result<Option<String>, Fault> {
        const OPEN: &str = "opening the devices";
        let start = Pair::start(self.lab, self.deadline);
        let mut pair = start.map_err(|error| Fault::new(OPEN, error))?;
        let open = Order::Open { netdev: name.to_owned() };
        for answer in pair.both(OPEN, Duration::from_secs(10), &open)? {
            if let Answer::Unavailable { why } = answer {
                return Ok(Some(why));
            }
        }
        self.console.line(format_args!("\n{name}"));
        self.verify(&mut pair, report)?;
        self.measure(&mut pair, report)?;
        let cannot = [("nft", &self.available.nft), ("tc", &self.available.tc)]
            .into_iter()
            .find_map(|(tool, have)| Some(format!("{tool}: {}", have.as_ref().err()?)));
        if let Some(why) = cannot {
            self.console.line(format_args!("  the host's policy: skipped: {why}"));
            report.policy_why = Some(why);
        } else {
            self.console.line(format_args!("  the host's policy"));
            let policy = report.policy.insert(Policy::default());
            policy::check(self.lab, &mut pair, policy, broken, self.console)?;
        }
        Ok(None)
    }

    fn verify(&self, pair: &mut Pair, report: &mut BackendReport) -> Result<(), Fault> {
        for mtu in MTUS {
            let phase = format!("verifying at path MTU {mtu}");
            connect(pair, &phase, mtu, &CONNECT)?;
            let order =
                Order::Verify { bytes_per_op: VERIFY_BYTES, seed: 0x0c1a_0000 + u64::from(mtu) };
            for answer in pair.both(&phase, Duration::from_secs(30), &order)? {
                if let Answer::Verified(by_op) = answer {
                    report.verified_by_op.add(&by_op);
                }
            }
            report.verified_bytes = report.verified_by_op.total();
        }
        self.console.line(format_args!("  compared byte for byte: {}", report.verified_by_op));
        Ok(())
    }

    fn measure(&self, pair: &mut Pair, report: &mut BackendReport) -> Result<(), Fault> {
        self.console.line(format_args!("  {}", Figures::HEADING));
        for mtu in MTUS {
            let phase = format!("measuring at path MTU {mtu}");
            connect(pair, &phase, mtu, &CONNECT)?;
            let figures = self.figures(pair, &phase)?;
            self.console.line(format_args!("  {}", figures.line(&mtu.to_string())));
            report.mtu.insert(mtu.to_string(), figures);
        }
        Ok(())
    }

    fn figures(&self, pair: &mut Pair, phase: &str) -> Result<Figures, Fault> {
        const LIMIT: Duration = Duration::from_secs(20);
        let (warm_millis, millis) = if self.quick { (50, 100) } else { (200, 1000) };
        let latency = Order::Latency { size: 64, millis };
        let mut figures = Figures::default();
        for answer in pair.both(&format!("{phase}: latency"), LIMIT, &latency)? {
            if let Answer::Latency { p50_nanos: nanos @ 1.. } = answer {
                figures.latency_us_p50 = rounded(nanos as f64 / 1000.0);
            }
        }
        let mut bulk = |size, depth, list| {
            let order = BulkOrder { size, depth, list, warm_millis, millis };
            let phase = format!("{phase}: WRITEs of {size} bytes");
            match pair.served(&phase, LIMIT, &Order::Bulk(order))? {
                Answer::Bulk { messages, bytes, seconds, .. } if seconds > 0.0 => {
                    Ok((messages as f64 / seconds / 1e6, bytes as f64 * 8.0 / seconds / 1e9))
                }
                other => Err(Fault::new(&phase, format!("nothing was measured: {other:?}"))),
            }
        };
        figures.rate_mops = rounded(bulk(64, 512, 32)?.0);
        figures.gbps_65536 = rounded(bulk(65_536, 32, 1)?.1);
        figures.gbps_1048576 = rounded(bulk(1 << 20, 16, 1)?.1);
        Ok(figures)
    }
}

/// Connects a new queue pair as in `how`, at path MTU `mtu`.
fn connect(pair: &mut Pair, phase: &str, mtu: u32, how: &Order) -> Result<(), Fault> {
    let order = match *how {
        Order::Connect { timeout, retry_cnt, .. } => Order::Connect { mtu, timeout, retry_cnt },
        ref other => other.clone(),
    };
    pair.both(&format!("{phase}: connecting"), Duration::from_secs(15), &order).map(drop)
}
