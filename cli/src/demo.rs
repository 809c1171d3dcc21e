//! `rocinante demo`: shows all features between two containers with a host between them.
//!
//! The containers are network namespaces with a veth each. The host is a third namespace, with a
//! bridge between them. A process in each container opens its device and connects a queue pair to
//! the other's. This process sends them requests, and changes the host's rules meanwhile.

mod pair;
mod policy;
mod report;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pair::Pair;
use report::{BackendReport, Figures, Policy, Report, Skipped};
use rocinante_lab::{
    Availability, Lab, LabConfig, LabError, Privilege, enter_user_namespace,
    kill_children_on_signal,
};

use crate::messages::{Answer, Request};
use crate::output::{self, Output, rounded};

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
/// Bytes of half the region for verification.
const VERIFY_HALF: usize = 10 << 20;
/// Bytes of half the region for measurements. A larger region would measure the caches, too.
const MEASURE_HALF: usize = 4 << 20;

/// Runs the command. Call it before the process has a second thread.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    let report = show(args, out).unwrap_or_else(|error| {
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

fn show(args: &Args, out: Output) -> Result<Report, LabError> {
    let deadline = Instant::now() + WHOLE;
    let privilege = enter_user_namespace()?;
    if kill_children_on_signal().is_err() {
        out.line("no signal handler: on Ctrl-C the containers end a little later");
    }
    let available = Availability::probe();
    let lab = Lab::new(&LabConfig::default())?;
    out.line(format_args!(
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
        let demo = Demo { lab: &lab, available: &available, quick: args.quick, deadline, out };
        match demo.backend(name) {
            Ok(backend) => report.backends.push(backend),
            Err(why) => {
                out.line(format_args!("\n{name}: skipped: {why}"));
                report.skipped.push(Skipped { netdev: (*name).to_owned(), why });
            }
        }
    }
    out.line("\nThe whole study of this machine: rocinante-bench evaluate --quick --report DIR");
    Ok(report)
}

/// The common parts of all backends' runs.
struct Demo<'a> {
    lab: &'a Lab,
    available: &'a Availability,
    quick: bool,
    deadline: Instant,
    out: Output,
}

impl Demo<'_> {
    /// Shows one backend. Error: the reason why the backend is not available here.
    fn backend(&self, name: &str) -> Result<BackendReport, String> {
        let mut report = BackendReport { netdev: name.to_owned(), ..BackendReport::default() };
        let mut broken = Vec::new();
        match self.run(name, &mut report, &mut broken) {
            Ok(Some(why)) => return Err(why),
            Ok(None) => {}
            Err(fault) => broken.push(fault),
        }
        report.ok = broken.is_empty();
        if report.ok {
            self.out.line(format_args!("  {name}: ok"));
        } else {
            let error = broken.join("; ");
            self.out.line(format_args!("  {name}: FAILED: {error}"));
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
    ) -> Result<Option<String>, String> {
        const OPEN: &str = "opening the devices";
        let start = Pair::start(self.lab, self.deadline);
        let mut pair = start.map_err(|error| format!("{OPEN}: {error}"))?;
        pair.phase(OPEN);
        if let Err(why) = pair.open(name)? {
            return Ok(Some(why));
        }
        self.out.line(format_args!("\n{name}"));
        self.verify(&mut pair, report)?;
        self.measure(&mut pair, report)?;
        let cannot = [("nft", &self.available.nft), ("tc", &self.available.tc)]
            .into_iter()
            .find_map(|(tool, have)| Some(format!("{tool}: {}", have.as_ref().err()?)));
        if let Some(why) = cannot {
            self.out.line(format_args!("  the host's policy: skipped: {why}"));
            report.policy_why = Some(why);
        } else {
            self.out.line(format_args!("  the host's policy"));
            let policy = report.policy.insert(Policy::default());
            let (lab, pair, out) = (self.lab, &mut pair, self.out);
            policy::Checks { lab, pair, policy, broken, out }.all()?;
        }
        Ok(None)
    }

    fn verify(&self, pair: &mut Pair, report: &mut BackendReport) -> Result<(), String> {
        for mtu in MTUS {
            pair.phase(&format!("verifying at path MTU {mtu}"));
            pair.connect(mtu, VERIFY_HALF)?;
            let request =
                Request::Verify { bytes_per_op: VERIFY_BYTES, seed: 0x0c1a_0000 + u64::from(mtu) };
            for answer in pair.both(Duration::from_secs(30), &request)? {
                if let Answer::Verified(by_op) = answer {
                    report.verified_by_op.add(&by_op);
                }
            }
            report.verified_bytes = report.verified_by_op.total();
        }
        self.out.line(format_args!("  compared byte for byte: {}", report.verified_by_op));
        Ok(())
    }

    fn measure(&self, pair: &mut Pair, report: &mut BackendReport) -> Result<(), String> {
        self.out.line(format_args!("  {}", Figures::HEADING));
        for mtu in MTUS {
            pair.phase(&format!("measuring at path MTU {mtu}"));
            pair.connect(mtu, MEASURE_HALF)?;
            let figures = self.figures(pair)?;
            self.out.line(format_args!("  {}", figures.line(&mtu.to_string())));
            report.mtu.insert(mtu.to_string(), figures);
        }
        Ok(())
    }

    fn figures(&self, pair: &mut Pair) -> Result<Figures, String> {
        let (warm, millis) = if self.quick { (50, 100) } else { (200, 1000) };
        let latency = Request::Latency { size: 64, millis };
        let mut figures = Figures::default();
        for answer in pair.both(Duration::from_secs(20), &latency)? {
            if let Answer::Latency { p50_nanos: nanos @ 1.. } = answer {
                figures.latency_us_p50 = rounded(nanos as f64 / 1000.0);
            }
        }
        let mut bulk = |size, depth, list| {
            let bulk = pair.bulk(size, depth, list, (warm, millis))?;
            if bulk.seconds > 0.0 {
                let per_second = |count: u64| count as f64 / bulk.seconds;
                Ok((per_second(bulk.messages) / 1e6, per_second(bulk.bytes) * 8.0 / 1e9))
            } else {
                Err(pair.fault(format!("nothing was measured of WRITEs of {size} bytes")))
            }
        };
        figures.rate_mops = rounded(bulk(64, 512, 32)?.0);
        figures.gbps_65536 = rounded(bulk(65_536, 32, 1)?.1);
        figures.gbps_1048576 = rounded(bulk(1 << 20, 16, 1)?.1);
        Ok(figures)
    }
}
