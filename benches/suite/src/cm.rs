//! `rocinante-bench cm`: the rates at which connections are made and ended, the number held at
//! once, and the cost of an idle one.

mod asks;
mod serves;

use std::net::{IpAddr, SocketAddr};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rocinante::device::Backend;
use rocinante::{Context, Cq, Pd, PreparedQp};
use serde::{Deserialize, Serialize};

use crate::workers::resident;
use rocinante_cli::output::{Failure, Output, Result};
use rocinante_cli::session::{Netdev, OpenArgs, address};
use rocinante_lab::{LabConfig, Pair, kill_children_on_signal};

/// The port by default.
const PORT: u16 = 18515;

/// Measure the connection manager: connections made and ended per second, held at once, and their
/// memory
///
/// First it makes and holds --connections of them, to measure their memory. Then it makes and ends
/// connections for --seconds.
///
/// Without HOST and --server it joins two network namespaces by a veth and runs both sides there.
/// Each connection has its own queue pair, which is created, brought up and destroyed with it.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Address of the server: be the client
    host: Option<IpAddr>,
    /// Be the server, for one client
    #[arg(long, conflicts_with = "host")]
    server: bool,
    /// Use the device with this address [default: at the client the one from which HOST is reached,
    /// at the server the only one]
    #[arg(long, value_name = "ADDR")]
    bind: Option<IpAddr>,
    #[command(flatten)]
    device: OpenArgs,
    /// Port of the connection manager
    #[arg(short, long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// How long connections are made and ended, in seconds
    #[arg(short = 'D', long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Connections that are being made or ended at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    at_a_time: u32,
    /// Connections held at once
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    connections: u32,
    /// Sends, and receives, that fit into each queue pair
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// The parameters of both sides. The client chooses them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Plan {
    at_a_time: u32,
    connections: u32,
    depth: u32,
}

impl Plan {
    /// Checks a plan that a client sent.
    fn check(self) -> Result<Self> {
        let fits = (1..=4096).contains(&self.at_a_time)
            && (1..=20_000).contains(&self.connections)
            && (1..=1024).contains(&self.depth);
        if fits {
            Ok(self)
        } else {
            Err(Failure::Failed(format!(
                "the client's plan is out of range: {self:?}: use the same version on both sides"
            )))
        }
    }
}

/// Memory of one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Memory {
    /// Resident bytes per connection: the growth of the process since before its first connection,
    /// divided by their number.
    bytes_per_connection: f64,
    /// Growth of the number of descriptors.
    descriptors: i64,
}

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    netdev: String,
    seconds: f64,
    /// Connections made and ended in that time, each from creating the queue pair to destroying it.
    connections: u64,
    pub(crate) connections_per_s: f64,
    /// Time from before the request is sent until the connection is established, with `at_a_time`
    /// in progress; microseconds.
    pub(crate) connect_us_p50: f64,
    connect_us_p99: f64,
    /// Number of connections held at once.
    held: u32,
    /// Time until all of them were established, in seconds.
    pub(crate) held_after_s: f64,
    client: Memory,
    server: Memory,
    /// Messages that either side retransmitted.
    repeated: u64,
}

impl Report {
    fn print(&self, out: Output) {
        let Self {
            connections, seconds, connections_per_s, connect_us_p50, connect_us_p99, ..
        } = self;
        out.line(format_args!(
            "{connections} connections made and ended in {seconds:.2} s: {connections_per_s:.0} per second, on {}",
            self.netdev
        ));
        out.line(format_args!(
            "established after {connect_us_p50:.0} us (p50), {connect_us_p99:.0} us (p99)"
        ));
        let (
            Memory { bytes_per_connection: client, .. },
            Memory { bytes_per_connection: server, .. },
        ) = (self.client, self.server);
        out.line(format_args!(
            "{} held at once after {:.3} s: {client:.0} bytes each at the client, {server:.0} at the server; {} messages sent again",
            self.held, self.held_after_s, self.repeated
        ));
    }
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    if args.seconds.is_nan() || !(0.01..=3600.0).contains(&args.seconds) {
        let wrong = Failure::Usage("--seconds must be from 0.01 to 3600".into());
        return out.end("rocinante-bench cm", &Err::<(), _>(wrong));
    }
    if args.server {
        return out.end("rocinante-bench cm", &serves::serve(args, out));
    }
    let result = match args.host {
        Some(host) => asks::ask(args, host, out),
        None => in_a_lab(args).map(|(report, notes)| {
            out.note(notes);
            report
        }),
    };
    if let Ok(report) = &result {
        report.print(out);
    }
    out.end("rocinante-bench cm", &result)
}

impl Args {
    fn at(&self, address: IpAddr) -> SocketAddr {
        SocketAddr::new(address, self.port)
    }

    fn plan(&self) -> Plan {
        Plan { at_a_time: self.at_a_time, connections: self.connections, depth: self.depth }
    }
}

/// Time in which the server has to end after the client. It may still wait for a message of a
/// client that is gone.
const ENDS_AFTER: Duration = Duration::from_secs(30);

/// Connections of the device in software over this backend, in a lab: made and ended for this many
/// seconds, and this many held at once.
pub(crate) fn of_backend(backend: Backend, seconds: f64, connections: u32) -> Result<Report> {
    let device = OpenArgs { netdev: Some(Netdev::Only(backend)), ..OpenArgs::default() };
    let (host, bind) = (None, None);
    let (port, at_a_time, depth, json, server) = (PORT, 32, 16, true, false);
    let args =
        Args { host, server, bind, device, port, seconds, at_a_time, connections, depth, json };
    in_a_lab(&args).map(|(report, _)| report)
}

/// Runs both sides, each in a process and a namespace of its own. Returns also the notes of the
/// client.
fn in_a_lab(args: &Args) -> Result<(Report, String)> {
    let failed = |error: &dyn std::fmt::Display| Failure::Failed(error.to_string());
    kill_children_on_signal().map_err(|error| failed(&error))?;
    let config = LabConfig { ipv6: false, ..LabConfig::default() };
    let pair = Pair::new(&config).map_err(|error| failed(&error))?;
    let [client, server] = pair.containers().each_ref().map(|one| one.ipv4());
    let start = |side: usize, line: String| {
        let mut command = Command::new("/proc/self/exe");
        command.arg("cm").args(line.split(' ')).args(["--json", "--port", &args.port.to_string()]);
        command.args(args.device.to_words());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        pair.containers()[side].spawn(&mut command).map_err(|error| failed(&error))
    };
    let limit = Duration::from_secs_f64(60.0 + args.seconds);
    let Args { seconds, at_a_time, connections, depth, .. } = args;
    let serving = start(1, format!("--server --bind {server}"))?;
    let asking = start(
        0,
        format!(
            "--bind {client} --seconds {seconds} --at-a-time {at_a_time} --connections {connections} --depth {depth} {server}"
        ),
    )?;
    let asked = asking.wait_with_output(limit).map_err(|error| failed(&error))?;
    let served = serving.wait_with_output(ENDS_AFTER);
    let one_line = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().replace('\n', "; ");
    let server = match served {
        Ok(served) if served.status.success() => None,
        Ok(served) => Some(format!("{}: {}", served.status, one_line(&served.stderr))),
        Err(error) => Some(error.to_string()),
    };
    match (asked.status.success(), server) {
        (true, None) => {}
        (true, Some(other)) => return Err(Failure::Failed(format!("the server: {other}"))),
        (false, other) => {
            let other = other.unwrap_or_else(|| "has ended well".into());
            let why = format!("{}; the server: {other}", one_line(&asked.stderr));
            return Err(Failure::Failed(why));
        }
    }
    let report = serde_json::from_slice(&asked.stdout).map_err(|error| failed(&error))?;
    Ok((report, one_line(&asked.stderr)))
}

/// Creates queue pairs.
struct Maker {
    ctx: Context,
    pd: Pd,
    cq: Cq,
    depth: u32,
}

impl Maker {
    fn new(ctx: &Context, depth: u32) -> Result<Self> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(2 * depth)?);
        Ok(Self { ctx: ctx.clone(), pd, cq, depth })
    }

    fn make(&self) -> Result<PreparedQp> {
        let qp = self.pd.qp(&self.cq, &self.cq);
        Ok(qp
            .max_send_wr(self.depth)
            .max_recv_wr(self.depth)
            .max_sge(1)
            .max_inline_data(0)
            .build()?)
    }
}

/// The process's holdings: resident bytes and descriptors.
fn holdings() -> Result<(u64, i64)> {
    let failed = |what: &str| Failure::Failed(format!("cannot read {what}"));
    let descriptors =
        std::fs::read_dir("/proc/self/fd").map_err(|_| failed("/proc/self/fd"))?.count();
    let descriptors = i64::try_from(descriptors).unwrap_or(i64::MAX);
    Ok((resident()?, descriptors))
}

/// The growth of the process since `before`, per connection of `connections`.
fn grown(before: (u64, i64), connections: u32) -> Result<Memory> {
    let now = holdings()?;
    Ok(Memory {
        bytes_per_connection: now.0.saturating_sub(before.0) as f64 / f64::from(connections),
        descriptors: now.1 - before.1,
    })
}
