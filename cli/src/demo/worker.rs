//! The process in a container. It carries out the demo's orders, one per line.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{Access, ConnectOptions, Context, Cq, Mr, Qp, RemoteSlice, SendWr, VerbsError};

use super::order::{Answer, BulkOrder, Order};
use super::verify;
use crate::measure::{self, Bulk, BulkOp, BulkResult, End, Pinging, Until};
use crate::{cores, orders};

/// TCP port of the exchange, in container b.
const PORT: u16 = 18_515;
/// Longest time without progress.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of the region for verification: half of it for each direction.
const DATA: usize = 20 << 20;
/// Bytes of the region for measurements. A larger region would measure the caches, too.
const BENCH: usize = 8 << 20;
/// Bytes of the single WRITE.
const ONE_WRITE: usize = 65_536;

/// One of the two containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ContainerSide {
    /// The container that begins.
    A,
    /// The other container.
    B,
}

/// One of the demo's processes (started by the demo itself)
#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    /// Which of the two
    #[arg(long)]
    pub(super) side: ContainerSide,
    /// The address of this container
    #[arg(long)]
    pub(super) address: IpAddr,
    /// The address of the other container
    #[arg(long)]
    pub(super) peer: IpAddr,
}

/// Carries out orders until standard input ends.
pub fn run(args: &WorkerArgs) -> ExitCode {
    cores::bind(args.side as usize);
    orders::run("demo-worker", || obey_all(args))
}

fn obey_all(args: &WorkerArgs) -> io::Result<()> {
    let listener = match args.side {
        ContainerSide::A => None,
        ContainerSide::B => Some(TcpListener::bind((args.address, PORT))?),
    };
    let mut worker = Worker { args, listener, ctx: None, session: None };
    orders::obey_all(|order| worker.obey(order), |why| Answer::Failed { why })
}

struct Worker<'a> {
    args: &'a WorkerArgs,
    listener: Option<TcpListener>,
    ctx: Option<Context>,
    session: Option<DemoLink>,
}

/// A connection to the other container. Fields drop from top to bottom.
pub(super) struct DemoLink {
    pub(super) side: ContainerSide,
    pub(super) qp: Qp,
    pub(super) cq: Cq,
    pub(super) data: Mr,
    pub(super) remote_data: RemoteSlice,
    bench: Mr,
    remote_bench: RemoteSlice,
    pub(super) mtu: u32,
    pub(super) exchange: Exchange,
    ctx: Context,
}

impl Worker<'_> {
    fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        let in_words = |error: VerbsError| error.to_string();
        match *order {
            Order::Open { ref netdev } => {
                self.session = None;
                self.ctx = None;
                match orders::open(netdev, self.args.address)? {
                    Ok(ctx) => self.ctx = Some(ctx),
                    Err(why) => return Ok(Answer::Unavailable { why }),
                }
                Ok(Answer::Done)
            }
            Order::Connect { mtu, timeout, retry_cnt } => {
                self.session = None;
                let mtu = Mtu::from_bytes(mtu).ok_or_else(|| format!("no path MTU of {mtu}"))?;
                let options =
                    ConnectOptions::default().mtu(Some(mtu)).timeout(timeout).retry_cnt(retry_cnt);
                self.session = Some(self.connect(&options).map_err(in_words)?);
                Ok(Answer::Done)
            }
            _ => self.session.as_mut().ok_or("not connected")?.obey(order),
        }
    }

    fn connect(&self, options: &ConnectOptions) -> Result<DemoLink, VerbsError> {
        let closed = || VerbsError::Invalid("the device is not open".into());
        let ctx = self.ctx.as_ref().ok_or_else(closed)?.clone();
        let mut exchange = match &self.listener {
            Some(listener) => Exchange::accept_from(listener)?,
            None => Exchange::connect(SocketAddr::new(self.args.peer, PORT), PATIENCE)?,
        };
        exchange.set_patience(Some(2 * PATIENCE));
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(4096)?);
        let prepared = pd
            .qp(&cq, &cq)
            .access(Access::ALL)
            .max_send_wr(1024)
            .max_recv_wr(512)
            .max_sge(2)
            .max_inline_data(256)
            .build()?;
        let data = pd.allocate(DATA, Access::ALL)?;
        let bench = pd.allocate(BENCH, Access::ALL)?;
        let theirs = exchange.swap(&Hello {
            endpoints: vec![prepared.endpoint()],
            regions: vec![data.remote(), bench.remote()],
            note: String::new(),
        })?;
        let ([endpoint], [remote_data, remote_bench]) =
            (&theirs.endpoints[..], &theirs.regions[..])
        else {
            return Err(VerbsError::Exchange("the peer is another version".into()));
        };
        let qp = prepared.connect(endpoint, options)?;
        let mtu = qp.query().1.path_mtu.map_or(0, Mtu::bytes);
        if options.mtu.is_some_and(|wanted| wanted.bytes() != mtu) {
            return Err(VerbsError::Invalid(format!("the links take a path MTU of {mtu} only")));
        }
        let (remote_data, remote_bench) = (*remote_data, *remote_bench);
        exchange.barrier("connected")?;
        let side = self.args.side;
        Ok(DemoLink { side, qp, cq, data, remote_data, bench, remote_bench, mtu, exchange, ctx })
    }
}

impl DemoLink {
    fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        match *order {
            Order::Open { .. } | Order::Connect { .. } => Err("no order for a session".into()),
            Order::Verify { bytes_per_op, seed } => {
                verify::verify(self, bytes_per_op, seed).map(Answer::Verified)
            }
            Order::Latency { size, millis } => self.latency(size, millis),
            Order::Bulk(ref order) => self.bulk(order),
            Order::Serve => {
                let served = measure::serve(&self.ctx, &mut self.exchange, "done");
                served.map(|()| Answer::Done).map_err(|error| error.to_string())
            }
            Order::Write => self.write_once().map_err(|error| error.to_string()),
        }
    }

    fn end(&self) -> End<'_> {
        let Self { ctx, qp, cq, bench: mr, remote_bench: remote, .. } = self;
        End::new(ctx, qp, cq, mr, *remote, PATIENCE)
    }

    fn latency(&mut self, size: usize, millis: u64) -> Result<Answer, String> {
        let side = match self.side {
            ContainerSide::A => measure::Side::First,
            ContainerSide::B => measure::Side::Second,
        };
        let Self { ctx, qp, cq, bench: mr, remote_bench: remote, exchange, .. } = self;
        let end = End::new(ctx, qp, cq, mr, *remote, PATIENCE);
        let mut run = |until| {
            let mut times = measure::histogram();
            let how = Pinging::Usual;
            measure::write_latency(&end, exchange, how, side, size, until, &mut times)
                .map(|()| times)
                .map_err(|error| error.to_string())
        };
        run(Until::Messages(200))?;
        let histogram = run(Until::Time(Duration::from_millis(millis)))?;
        Ok(Answer::Latency { p50_nanos: histogram.value_at_quantile(0.5) })
    }

    fn bulk(&mut self, order: &BulkOrder) -> Result<Answer, String> {
        let warm = Duration::from_millis(order.warm_millis);
        let until = Until::Time(warm + Duration::from_millis(order.millis));
        let BulkOrder { size, depth, list, .. } = *order;
        let what =
            Bulk { op: BulkOp::Write, size, depth, list, signal_every: list, inline: false, until };
        let mut window = Window { warm, first: None, last: BulkResult::default() };
        let all = measure::bulk(&[self.end()], &what, |so_far| window.observe(so_far));
        let all = all.map_err(|error| error.to_string())?;
        self.exchange.barrier("done").map_err(|error| error.to_string())?;
        let measured = window.measured();
        Ok(Answer::Bulk {
            messages: measured.messages,
            bytes: measured.bytes,
            seconds: measured.elapsed.as_secs_f64(),
            all_bytes: all.bytes,
        })
    }

    fn write_once(&mut self) -> Result<Answer, VerbsError> {
        let remote = &self.remote_bench;
        let start = Instant::now();
        self.qp.post_send(&[SendWr::new(
            SendOp::Write { remote: remote.address, rkey: remote.rkey, imm: None },
            &[self.bench.sge(0, ONE_WRITE)],
        )
        .wr_id(1)])?;
        let wc = self.cq.wait_one(PATIENCE)?;
        Ok(Answer::Wrote {
            status: wc.status.to_string(),
            seconds: start.elapsed().as_secs_f64(),
            bytes: ONE_WRITE as u64,
        })
    }
}

/// The messages between the end of the warm-up and now.
struct Window {
    warm: Duration,
    first: Option<BulkResult>,
    last: BulkResult,
}

impl Window {
    fn observe(&mut self, so_far: &BulkResult) {
        if so_far.elapsed >= self.warm {
            self.first.get_or_insert(*so_far);
        }
        self.last = *so_far;
    }

    fn measured(&self) -> BulkResult {
        let first = self.first.unwrap_or_default();
        BulkResult {
            messages: self.last.messages - first.messages,
            bytes: self.last.bytes - first.bytes,
            elapsed: self.last.elapsed - first.elapsed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warm_up_does_not_count() {
        let at = |millis, messages| BulkResult {
            messages,
            bytes: 10 * messages,
            elapsed: Duration::from_millis(millis),
        };
        let mut window =
            Window { warm: Duration::from_millis(50), first: None, last: BulkResult::default() };
        for so_far in [at(10, 1), at(60, 5), at(100, 9), at(160, 15)] {
            window.observe(&so_far);
        }
        assert_eq!(window.measured(), at(100, 10));
    }
}
