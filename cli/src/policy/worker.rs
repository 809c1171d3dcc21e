//! The process in a container. It carries out the orders of `policy-check`, one per line.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{
    Access, ConnectOptions, Context, Cq, Mr, Qp, RemoteSlice, SendWr, VerbsError, WcStatus,
};

use super::order::{Answer, Bulk, Order};
use super::{MESSAGE, PROBE};
use crate::orders;

/// TCP port of the exchange, in the container that receives requests.
const PORT: u16 = 18_516;
/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(10);
/// WRITEs outstanding in a bulk transfer.
const DEPTH: usize = 8;

/// One of the processes of policy-check (started by itself)
#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    /// The address of this container
    #[arg(long)]
    address: IpAddr,
    /// The address of the container that receives; without it, this one receives
    #[arg(long)]
    peer: Option<IpAddr>,
}

/// Carries out orders until standard input ends.
#[must_use]
pub fn run(args: &WorkerArgs) -> ExitCode {
    orders::run("policy-worker", || obey_all(args))
}

fn obey_all(args: &WorkerArgs) -> io::Result<()> {
    let listener = match args.peer {
        Some(_) => None,
        None => Some(TcpListener::bind((args.address, PORT))?),
    };
    let mut worker = Worker { args, listener, links: BTreeMap::new(), ctx: None };
    orders::obey_all(|order| worker.obey(order), |why| Answer::Failed { why })
}

struct Worker<'a> {
    args: &'a WorkerArgs,
    listener: Option<TcpListener>,
    links: BTreeMap<usize, Link>,
    ctx: Option<Context>,
}

/// A connection to another container. Fields drop from top to bottom.
struct Link {
    qp: Qp,
    cq: Cq,
    /// The first half receives, the second half is sent.
    data: Mr,
    remote: RemoteSlice,
}

impl Worker<'_> {
    fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        let in_words = |error: VerbsError| error.to_string();
        match *order {
            Order::Open { ref netdev } => {
                self.links.clear();
                self.ctx = None;
                match orders::open(netdev, self.args.address)? {
                    Ok(ctx) => self.ctx = Some(ctx),
                    Err(why) => return Ok(Answer::Unavailable { why }),
                }
                Ok(Answer::Done)
            }
            Order::Connect { slot, mtu, timeout, retry_cnt, traffic_class } => {
                self.links.remove(&slot);
                let mtu = Mtu::from_bytes(mtu).ok_or_else(|| format!("no path MTU of {mtu}"))?;
                let options = ConnectOptions::default()
                    .mtu(Some(mtu))
                    .timeout(timeout)
                    .retry_cnt(retry_cnt)
                    .traffic_class(traffic_class);
                let link = self.connect(&options).map_err(in_words)?;
                self.links.insert(slot, link);
                Ok(Answer::Done)
            }
            Order::Write { fill } => self.link()?.write(fill).map_err(in_words),
            Order::Look { fill } => {
                let bytes = self.link()?.data.to_vec(0, MESSAGE);
                let bytes = bytes.iter().filter(|byte| **byte == fill).count() as u64;
                Ok(Answer::Found { bytes })
            }
            Order::Bulk { warm_millis, millis } => {
                let (warm, millis) =
                    (Duration::from_millis(warm_millis), Duration::from_millis(millis));
                self.link()?.bulk(warm, millis).map(Answer::Bulk).map_err(in_words)
            }
            Order::Probe => self.probe(),
            Order::Count => {
                let transport = self.ctx.as_ref().ok_or("no device")?.counters().transport;
                let (rcvd_cnp, sent_cnp) = (transport.rcvd_cnp, transport.sent_cnp);
                Ok(Answer::Counted { rcvd_cnp, sent_cnp })
            }
        }
    }

    /// The first connection.
    fn link(&self) -> Result<&Link, String> {
        self.links.get(&0).ok_or_else(|| "not connected".to_owned())
    }

    fn connect(&self, options: &ConnectOptions) -> Result<Link, VerbsError> {
        let closed = || VerbsError::Invalid("the device is not open".into());
        let ctx = self.ctx.as_ref().ok_or_else(closed)?;
        let mut exchange = match (&self.listener, self.args.peer) {
            (Some(listener), _) => Exchange::accept_from(listener)?,
            (None, Some(peer)) => Exchange::connect(SocketAddr::new(peer, PORT), PATIENCE)?,
            (None, None) => return Err(closed()),
        };
        exchange.set_patience(Some(PATIENCE));
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64)?);
        let prepared = pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(32).build()?;
        let data = pd.allocate(2 * MESSAGE, Access::ALL)?;
        let theirs = exchange.swap(&Hello {
            endpoints: vec![prepared.endpoint()],
            regions: vec![data.remote()],
            note: String::new(),
        })?;
        let ([endpoint], [remote]) = (&theirs.endpoints[..], &theirs.regions[..]) else {
            return Err(VerbsError::Exchange("the peer is another version".into()));
        };
        let (qp, remote) = (prepared.connect(endpoint, options)?, *remote);
        exchange.barrier("connected")?;
        Ok(Link { qp, cq, data, remote })
    }

    /// Sends a datagram that no backend of ours sends.
    fn probe(&self) -> Result<Answer, String> {
        let peer = self.args.peer.ok_or("the receiver sends no probe")?;
        let sent = UdpSocket::bind((self.args.address, 0))
            .and_then(|socket| socket.send_to(b"probe", (peer, PROBE)));
        match sent {
            Ok(_) => Ok(Answer::Done),
            // A rule of the own namespace dropped it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Answer::Done),
            Err(error) => Err(format!("the probe: {error}")),
        }
    }
}

impl Link {
    fn post(&self) -> Result<(), VerbsError> {
        let to = SendOp::Write { remote: self.remote.address, rkey: self.remote.rkey, imm: None };
        Ok(self.qp.post_send(&[SendWr::new(to, &[self.data.sge(MESSAGE, MESSAGE)]).wr_id(1)])?)
    }

    fn write(&self, fill: u8) -> Result<Answer, VerbsError> {
        self.data.write(MESSAGE, &vec![fill; MESSAGE]);
        let start = Instant::now();
        self.post()?;
        let wc = self.cq.wait_one(PATIENCE)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Answer::Wrote { status: wc.status.to_string(), seconds })
    }

    fn bulk(&self, warm: Duration, measured: Duration) -> Result<Bulk, VerbsError> {
        let (from, start) = (monotonic(), Instant::now());
        let (mut posted, mut done, mut first, mut last) = (0usize, 0usize, None, (start, 0));
        let end = start + warm + measured;
        let mut status = WcStatus::Success;
        while status == WcStatus::Success && (Instant::now() < end || done < posted) {
            while posted - done < DEPTH && Instant::now() < end {
                self.post()?;
                posted += 1;
            }
            if done == posted {
                break;
            }
            status = self.cq.wait_one(PATIENCE)?.status;
            done += usize::from(status == WcStatus::Success);
            let now = Instant::now();
            if now >= start + warm && now < end {
                first.get_or_insert((now, done));
                last = (now, done);
            }
        }
        let (first_at, first_done) = first.unwrap_or(last);
        Ok(Bulk {
            status: status.to_string(),
            bytes: ((last.1.saturating_sub(first_done)) * MESSAGE) as u64,
            seconds: last.0.saturating_duration_since(first_at).as_secs_f64(),
            all_bytes: (done * MESSAGE) as u64,
            from_to: (from, monotonic()),
        })
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
