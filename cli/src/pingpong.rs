//! `rocinante pingpong`: one SEND at a time, back and forth, like `ibv_rc_pingpong(1)`.

pub mod game;
pub mod pattern;

use std::fmt;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use rocinante::verbs::Mtu;
use rocinante::{Access, ConnectOptions, Context, Endpoint};
use serde::{Deserialize, Serialize};

use crate::counters;
use crate::ending;
use crate::output::{Output, Result};
use crate::session::{self, NetArgs, Server, Session};
use crate::size::size;
use crate::turns::{Processor, Watch};
use game::{PingPong, Played};

/// Send a message back and forth over a reliable connection, like ibv_rc_pingpong
///
/// The server is started without HOST, the client with the server's name or address. The client's
/// options hold for both; an option that the server is given as well must be the same.
///
/// Two terminals on one machine, without privileges: `rocinante pingpong`, and `rocinante pingpong
/// localhost`. With --cm at both, the connection manager connects them, and nothing goes over TCP.
///
/// rdma-core's ibv_rc_pingpong and its kin run by `rocinante run`.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    net: NetArgs,
    /// Number of exchanges [default: 1000]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Bytes of each message [default: 4096]
    #[arg(short, long, value_parser = size::<0, SIZE_MAX>)]
    size: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: 1024]
    #[arg(short, long, value_parser = session::mtu)]
    mtu: Option<Mtu>,
    /// Receives posted at a time
    #[arg(short, long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    rx_depth: u32,
    /// Sleep on completion events instead of polling
    #[arg(short, long)]
    events: bool,
    /// Validate: both sides check every byte of every message
    #[arg(short = 'c', long)]
    chk: bool,
    /// Print this process's counters at the end, also if it fails or a signal ends it
    #[arg(long)]
    counters: bool,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// Bytes of the longest message.
const SIZE_MAX: u32 = 1 << 30;

/// The parameters of both sides. The client chooses them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PingPongPlan {
    iters: u64,
    size: u32,
    mtu: u32,
    chk: bool,
}

/// The parameters on one side's command line.
#[derive(Debug, Serialize)]
struct GivenOptions {
    iters: Option<u64>,
    size: Option<u32>,
    mtu: Option<u32>,
    chk: bool,
}

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    netdev: &'static str,
    local: Place,
    remote: Place,
    size: u32,
    mtu: u32,
    iters: u64,
    /// Bytes of both directions together.
    bytes: u64,
    seconds: f64,
    mbit_per_s: f64,
    us_per_iter: f64,
    validated: bool,
    /// How this side's thread got its processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    processor: Option<Processor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<serde_json::Value>,
}

/// One end of the connection, for output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Place {
    address: IpAddr,
    qpn: u32,
    psn: u32,
}

impl From<&Endpoint> for Place {
    fn from(endpoint: &Endpoint) -> Self {
        let Endpoint { address, qpn, psn, .. } = endpoint;
        Self { address: *address, qpn: qpn.value(), psn: psn.value() }
    }
}

impl fmt::Display for Place {
    /// The format of `ibv_rc_pingpong`. Its LID is 0, because Ethernet has no LIDs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let Self { qpn, psn, .. } = self;
        write!(f, "LID 0x0000, QPN 0x{qpn:06x}, PSN 0x{psn:06x}, GID {gid}")
    }
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::begin("rocinante pingpong", out, args.counters);
    out.end("rocinante pingpong", &run_side(args, out))
}

fn run_side(args: &Args, out: Output) -> Result<Report> {
    let Some(host) = &args.net.host else {
        let server = Server::start(&args.net, out)?;
        return server.serve(|| {
            let (session, plan) = server.accept("pingpong", &args.given())?;
            session.run(|session| play(session, args, &plan, out))
        });
    };
    let plan = args.plan();
    let session = Session::connect(&args.net, host, "pingpong", &plan, out)?;
    session.run(|session| play(session, args, &plan, out))
}

impl Args {
    fn given(&self) -> GivenOptions {
        let Self { iters, size, mtu, chk, .. } = *self;
        GivenOptions { iters, size, mtu: mtu.map(Mtu::bytes), chk }
    }

    fn plan(&self) -> PingPongPlan {
        PingPongPlan {
            iters: self.iters.unwrap_or(1000),
            size: self.size.unwrap_or(4096),
            mtu: self.mtu.unwrap_or(Mtu::Mtu1024).bytes(),
            chk: self.chk,
        }
    }
}

impl PingPongPlan {
    /// Checks the plan, which may come from a client. Returns its path MTU.
    fn check(&self) -> Result<Mtu, String> {
        if self.size > SIZE_MAX || self.iters == 0 {
            return Err(format!(
                "there are no messages of {} bytes, {} of them: give both sides -n 1 or more, and -s \
                 {SIZE_MAX} or less",
                self.size, self.iters
            ));
        }
        Mtu::from_bytes(self.mtu)
            .ok_or_else(|| format!("there is no path MTU of {} bytes", self.mtu))
    }
}

fn play(session: &mut Session, args: &Args, plan: &PingPongPlan, out: Output) -> Result<Report> {
    let mtu = plan.check().map_err(|why| session.failed(why))?;
    let ctx = session.ctx.clone();
    let channel = args.events.then(|| ctx.create_comp_channel()).transpose()?;
    let cq = match &channel {
        Some(channel) => ctx.create_cq_with(args.rx_depth + 1, channel)?,
        None => ctx.create_cq(args.rx_depth + 1)?,
    };
    let pd = ctx.alloc_pd();
    let size = plan.size as usize;
    let memory = pd.allocate(2 * size.max(1), Access::LOCAL_WRITE)?;
    let qp = pd.qp(&cq, &cq).sgid_index(session.gid_index());
    let qp = qp.max_send_wr(1).max_recv_wr(args.rx_depth).build()?;
    let options = ConnectOptions::default().mtu(Some(mtu));
    let theirs = session.join(vec![qp], None, &options)?;
    let [local, remote] = theirs.first;
    out.line(format_args!("  local address:  {}", Place::from(&local)));
    out.line(format_args!("  remote address: {}", Place::from(&remote)));
    let qp = &theirs.qps[0];
    let begins = args.net.host.is_some();
    let chk = plan.chk.then_some(begins);
    let peer = remote.address;
    let game = PingPong { ctx: &ctx, qp, cq, channel, memory, size, peer, chk };
    game.post_receives(args.rx_depth)?;
    session.barrier("ready")?;
    session.enter("first message");
    let mut played = Played::default();
    let watch = Watch::start();
    let ends = [Place::from(&local), Place::from(&remote)];
    let result = session.watched(
        |exchange| {
            let begun = || session::enter(exchange, "ping-pong");
            game.play(begins, plan.iters, args.rx_depth, begun, &mut played)
        },
        || session::abandon(qp),
    );
    result.inspect_err(|_| tell(&ctx, plan, ends, played, out))?;
    let processor = watch.end(out);
    session.barrier("done")?;
    let mut report = Report { processor, ..report(&ctx, plan, ends, played.time) };
    report.finish(&ctx, args, out);
    Ok(report)
}

/// Prints the figures of a game that ended too early.
fn tell(ctx: &Context, plan: &PingPongPlan, ends: [Place; 2], played: Played, out: Output) {
    if played.iters > 0 {
        let plan = PingPongPlan { iters: played.iters, ..plan.clone() };
        let so_far = report(ctx, &plan, ends, played.time);
        so_far.print(out);
        ending::add(&so_far);
    }
}

fn report(ctx: &Context, plan: &PingPongPlan, ends: [Place; 2], time: Duration) -> Report {
    let bytes = (2 * u64::from(plan.size)).saturating_mul(plan.iters);
    let seconds = time.as_secs_f64();
    let [local, remote] = ends;
    Report {
        netdev: ctx.provider().name(),
        local,
        remote,
        size: plan.size,
        mtu: plan.mtu,
        iters: plan.iters,
        bytes,
        seconds,
        mbit_per_s: bytes as f64 * 8.0 / seconds / 1e6,
        us_per_iter: seconds * 1e6 / plan.iters as f64,
        validated: plan.chk,
        processor: None,
        counters: None,
    }
}

impl Report {
    fn finish(&mut self, ctx: &Context, args: &Args, out: Output) {
        self.print(out);
        if args.counters {
            let counters = ctx.counters();
            out.note(counters::text(&counters));
            self.counters = Some(counters::json(&counters));
        }
    }

    fn print(&self, out: Output) {
        let Self { bytes, seconds, mbit_per_s, iters, us_per_iter, .. } = self;
        out.line(format_args!("{bytes} bytes in {seconds:.2} seconds = {mbit_per_s:.2} Mbit/sec"));
        out.line(format_args!(
            "{iters} iters in {seconds:.2} seconds = {us_per_iter:.2} usec/iter"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_printed_as_ibv_rc_pingpong_does() {
        let place = Place { address: [10, 0, 0, 1].into(), qpn: 0x11, psn: 0x5b_2c1f };
        let text = "LID 0x0000, QPN 0x000011, PSN 0x5b2c1f, GID ::ffff:10.0.0.1";
        assert_eq!(place.to_string(), text);
    }
}
