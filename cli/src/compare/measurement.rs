//! One of the two processes of a measurement.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::{Backend, Context, Exchange, Mtu, OpenOptions};
use serde::{Deserialize, Serialize};

use super::figure::{Key, Step, Target};
use crate::cores;
use crate::measure::{
    Bulk, BulkOp, BulkResult, Connected, End, MeasureError, RoundTrip, Side, Until, bulk,
    round_trips, serve, write_latency,
};
use crate::output::Failure;

/// TCP port of the exchange between the two.
const PORT: u16 = 18_515;
/// How long nothing may happen.
const PATIENCE: Duration = Duration::from_secs(15);
/// What comes before a figure.
const WARM_UP: Duration = Duration::from_millis(20);
/// Half of each region: what is sent from, or written to.
const HALF: usize = 4 << 20;
/// Depth of the send queue.
const DEPTH: u32 = 512;
const MESSAGE: usize = 64;

/// Which of the two processes this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    /// Measures.
    Sender,
    /// Answers.
    Receiver,
}

/// Everything that a process is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) role: Role,
    /// The software device's backend.
    pub(super) backend: Option<String>,
    /// The RDMA device, if not the software device.
    pub(super) device: Option<String>,
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    pub(super) mtu: u32,
    /// How long each figure is measured.
    pub(super) seconds: f64,
    pub(super) steps: Vec<Step>,
    /// How long all may take, in seconds.
    pub(super) limit: f64,
}

/// One process of a comparison
#[derive(Debug, Clone, clap::Args)]
pub struct WorkerArgs {
    /// What to do, in JSON
    #[arg(long)]
    job: String,
}

/// Runs one process of a comparison: its figures go to standard output.
#[must_use]
pub fn run_worker(args: &WorkerArgs) -> ExitCode {
    let result = serde_json::from_str::<Job>(&args.job)
        .map_err(|error| Failure::Usage(format!("--job: {error}")))
        .and_then(|job| job.run());
    match result {
        Ok(figures) => {
            println!("{}", serde_json::json!(figures));
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.code())
        }
    }
}

impl Job {
    fn run(&self) -> Result<Vec<(Key, f64)>, Failure> {
        cores::bind(usize::from(self.role == Role::Receiver));
        // Opened first: who cannot says so at once.
        let ctx = self.open()?;
        let mut exchange = match self.role {
            Role::Receiver => Exchange::accept(SocketAddr::from((self.local, PORT)))?,
            Role::Sender => Exchange::connect(SocketAddr::from((self.remote, PORT)), PATIENCE)?,
        };
        exchange.set_patience(Some(Duration::from_secs_f64(self.limit)));
        let mtu = Mtu::from_bytes(self.mtu);
        let device = Device(Connected::new(ctx, mtu, DEPTH, HALF, &mut exchange)?);
        let mut figures = Vec::new();
        for &step in &self.steps {
            exchange.barrier("ready")?;
            if self.role == Role::Sender {
                figures.extend(self.measure(&device, &mut exchange, step)?);
            } else {
                device.answer(&mut exchange, step)?;
            }
        }
        exchange.barrier("bye")?;
        Ok(figures)
    }

    fn open(&self) -> Result<Context, Failure> {
        let options = OpenOptions::new();
        if let Some(device) = &self.device {
            return Ok(options.device(device).open(self.local)?);
        }
        let backend: Backend = match &self.backend {
            Some(name) => name.parse().map_err(Failure::Failed)?,
            None => return Err(Failure::Usage("neither a backend nor a device".into())),
        };
        Ok(options.netdev(backend).open(self.local)?)
    }

    /// The figures of one step.
    fn measure(
        &self,
        device: &Device,
        exchange: &mut Exchange,
        step: Step,
    ) -> Result<Vec<(Key, f64)>, Failure> {
        let time = Duration::from_secs_f64(self.seconds);
        let until = Until::Time(time);
        let key = |cpu| Key { mtu: self.mtu, step, cpu };
        let median = |histogram: &hdrhistogram::Histogram<u64>| {
            histogram.value_at_quantile(0.5) as f64 / 1e3
        };
        let figures = match step {
            Step::WriteLatency => {
                let times = write_latency(&device.end(), exchange, Side::First, MESSAGE, until)?;
                return Ok(vec![(key(false), median(&times))]);
            }
            Step::ReadLatency(_) => {
                let times = round_trips(&device.end(), RoundTrip::Read(MESSAGE), until)?;
                vec![(key(false), median(&times))]
            }
            Step::Rate(_) => {
                let what = Bulk::small(BulkOp::Write, MESSAGE, until);
                vec![(key(false), device.bulk(&what)?.0.mops())]
            }
            Step::Bandwidth(size, _) => {
                let depth = (HALF / size).clamp(2, 64);
                let (result, busy) =
                    device.bulk(&Bulk::large(BulkOp::Write, size, depth, until))?;
                let cpu = busy / (result.bytes as f64 / 1e9);
                vec![(key(false), result.gbps()), (key(true), cpu)]
            }
        };
        exchange.barrier("done")?;
        Ok(figures)
    }
}

/// A connected queue pair.
struct Device(Connected);

impl Device {
    fn end(&self) -> End<'_> {
        self.0.end(PATIENCE)
    }

    /// The result, and the seconds that all processors were busy meanwhile.
    fn bulk(&self, what: &Bulk) -> Result<(BulkResult, f64), Failure> {
        let run = |what: &Bulk| bulk(&[self.end()], what, |_| ());
        run(&Bulk { until: Until::Time(WARM_UP), ..*what })?;
        let (before, start) = (idle()?, Instant::now());
        let result = run(what)?;
        let (elapsed, idle) = (start.elapsed().as_secs_f64(), idle()? - before);
        Ok((result, (elapsed * online()? as f64 - idle).max(0.0)))
    }

    /// The other side of [`Job::measure`].
    fn answer(&self, exchange: &mut Exchange, step: Step) -> Result<(), Failure> {
        let (Step::ReadLatency(target) | Step::Rate(target) | Step::Bandwidth(_, target)) = step
        else {
            let until = Until::Time(Duration::ZERO);
            write_latency(&self.end(), exchange, Side::Second, MESSAGE, until)?;
            return Ok(());
        };
        match target {
            Target::Active => serve(self.0.ctx(), exchange, "done")?,
            Target::Passive => exchange.barrier("done")?,
        }
        Ok(())
    }
}

/// Processors of the machine.
fn online() -> Result<usize, Failure> {
    let lines = stat()?;
    let count = lines.lines().filter(|line| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    Ok(count.count().max(1))
}

/// Seconds that all processors were idle or waiting for a disk, in sum, since the machine started (`proc_stat(5)`).
fn idle() -> Result<f64, Failure> {
    let text = stat()?;
    let mut fields = text.lines().next().unwrap_or_default().split_whitespace().skip(4);
    let mut next = || fields.next().and_then(|field| field.parse::<f64>().ok());
    let (Some(idle), Some(waiting)) = (next(), next()) else {
        return Err(Failure::Failed(
            "/proc/stat does not say how long processors were idle".into(),
        ));
    };
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok((idle + waiting) / per_second)
}

fn stat() -> Result<String, Failure> {
    let why = |error: io::Error| Failure::Failed(format!("/proc/stat: {error}"));
    fs::read_to_string("/proc/stat").map_err(why)
}

impl From<MeasureError> for Failure {
    fn from(error: MeasureError) -> Self {
        match error {
            MeasureError::Verbs(error) => error.into(),
            error => Self::Failed(error.to_string()),
        }
    }
}
