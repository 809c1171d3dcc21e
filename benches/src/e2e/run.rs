//! The runs: namespaces, and two processes for each measurement.

use std::error::Error;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rocinante_cli::lab::{Container, Lab, LabConfig, Pair};
use serde_json::Value;

use super::Options;
use super::machine::Machine;
use super::report::{Report, Row, Run};
use super::worker::{Job, Role, Sample, Subject};
use crate::ceiling::Tally;
use crate::figure::Plan;

/// The two containers and what joins them.
enum Network {
    Direct(Pair),
    Bridged(Lab),
}

impl Network {
    fn new(bridge: bool) -> Result<Self, Box<dyn Error>> {
        let config = LabConfig { ipv6: false, ..LabConfig::default() };
        Ok(if bridge {
            Self::Bridged(Lab::new(&config)?)
        } else {
            Self::Direct(Pair::new(&config)?)
        })
    }

    fn containers(&self) -> &[Container] {
        match self {
            Self::Direct(pair) => pair.containers(),
            Self::Bridged(lab) => lab.containers(),
        }
    }
}

/// Measures everything, as often as the options say.
///
/// # Errors
/// The namespaces cannot be made. What cannot be measured is in the report.
pub(super) fn everything(options: &Options) -> Result<Report, Box<dyn Error>> {
    let network = Network::new(options.bridge)?;
    let mut report = Report {
        machine: Machine::here(),
        command: command_line(),
        path: if options.bridge { "through a bridge" } else { "over one veth, MTU 9000" },
        runs: Vec::new(),
        rows: Vec::new(),
    };
    for number in 1..=options.runs() {
        let run = streams(options, &network);
        report.runs.push(run);
        for netdev in options.netdevs() {
            for &mtu in &options.mtu {
                eprintln!("run {number}: {netdev} at {mtu}");
                let mut row = Row { run: number, netdev, mtu, ..Row::default() };
                for subject in [Subject::Ceiling, Subject::Port, Subject::Ours] {
                    if !options.subjects.contains(&subject) {
                        continue;
                    }
                    match measure(options, &network, subject, netdev, mtu) {
                        Ok(sample) => drop(row.samples.insert(subject, sample)),
                        Err(error) => row.errors.push(format!("{}: {error}", subject.name())),
                    }
                }
                report.rows.push(row);
            }
        }
    }
    report.judge();
    Ok(report)
}

fn command_line() -> String {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dashes = if arguments.is_empty() { "" } else { " -- " };
    format!("cargo run --release -p rocinante-benches --bin e2e{dashes}{}", arguments.join(" "))
}

/// One TCP stream of each kind.
fn streams(options: &Options, network: &Network) -> Run {
    let mut run = Run::default();
    let stream = |subject: Subject, value: fn(&Value) -> Option<f64>| {
        if !options.subjects.contains(&subject) {
            return None;
        }
        let output = pair(options, network, &job(options, network, subject, "udp", 4096));
        let found = output.and_then(|text| {
            let json: Value = serde_json::from_str(&text)?;
            value(&json).ok_or_else(|| format!("no figure in {text}").into())
        });
        found.inspect_err(|error| eprintln!("{}: {error}", subject.name())).ok()
    };
    run.iperf3 = stream(Subject::Iperf3, |json| {
        Some(json["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9)
    });
    run.tcp = stream(Subject::Tcp, |json| json["notes"].as_f64());
    run
}

fn measure(
    options: &Options,
    network: &Network,
    subject: Subject,
    netdev: &str,
    mtu: usize,
) -> Result<Sample, Box<dyn Error>> {
    let output = pair(options, network, &job(options, network, subject, netdev, mtu))?;
    Ok(serde_json::from_str(&output)?)
}

/// The sender's job.
fn job(options: &Options, network: &Network, subject: Subject, netdev: &str, mtu: usize) -> Job {
    let [first, second, ..] = network.containers() else {
        unreachable!("there are two containers")
    };
    Job {
        role: Role::Sender,
        subject,
        netdev: netdev.to_owned(),
        local: first.ipv4(),
        remote: second.ipv4(),
        core: 0,
        peer_core: usize::from(Machine::here().cpus > 1),
        tally: PathBuf::new(),
        urgent: !options.patient,
        plan: Plan { figures: options.figures(), mtu, seconds: options.seconds() },
    }
}

/// What iperf3 says if its server does not listen yet.
const REFUSED: &[u8] = b"Connection refused";
/// A second's worth.
const ATTEMPTS_MAX: u32 = 20;

/// Runs both processes; what the sender wrote.
fn pair(options: &Options, network: &Network, sender: &Job) -> Result<String, Box<dyn Error>> {
    let tally = Tally::file()?;
    // The workers are of this user and in this mount namespace.
    let path = format!("/proc/{}/fd/{}", std::process::id(), tally.as_raw_fd());
    let sender = &Job { tally: path.into(), ..sender.clone() };
    let receiver = Job {
        role: Role::Receiver,
        local: sender.remote,
        remote: sender.local,
        core: sender.peer_core,
        peer_core: sender.core,
        ..sender.clone()
    };
    // A figure may take several tries.
    let seconds = 5.0 * options.seconds() * sender.plan.figures.len() as f64 + 40.0;
    let limit = Duration::from_secs_f64(seconds);
    let [first, second, ..] = network.containers() else {
        unreachable!("there are two containers")
    };
    let mut receiver = second.spawn(command(&receiver)?.stdout(Stdio::null()))?;
    let mut attempts = 0;
    let output = loop {
        let output =
            first.spawn(command(sender)?.stdout(Stdio::piped()))?.wait_with_output(limit)?;
        // iperf3 does not wait for its server, and may report that with success.
        let refused = output.stdout.windows(REFUSED.len()).any(|text| text == REFUSED);
        if sender.subject != Subject::Iperf3 || !refused || attempts == ATTEMPTS_MAX {
            break output;
        }
        attempts += 1;
        std::thread::sleep(Duration::from_millis(50));
    };
    if !output.status.success() {
        return Err(format!("the sender failed ({})", output.status).into());
    }
    if sender.subject == Subject::Iperf3 {
        // It may wait for an earlier attempt's end.
        return Ok(String::from_utf8(output.stdout)?);
    }
    let status = receiver.wait(Duration::from_secs(10))?;
    if !status.success() {
        return Err(format!("the receiver failed ({status})").into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn command(job: &Job) -> Result<Command, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--job").arg(serde_json::to_string(job)?).stdin(Stdio::null());
    Ok(command)
}
