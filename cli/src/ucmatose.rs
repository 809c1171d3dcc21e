//! `rocinante ucmatose`, `rocinante rdma-server` and `rocinante rdma-client`: connect through the
//! connection manager and exchange messages, like librdmacm's programs of these names. The other
//! side is such a program or one of these commands.
//!
//! With `ucmatose` the server waits for all connections, sends its messages on each, receives as
//! many, and ends the connections. The client receives first. With the other two there is one
//! connection and one message of 16 bytes each way. The client sends first, and ends the
//! connection.

mod lane;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::cm::{Connecting, Listener, Params};
use rocinante::{ConnectOptions, Context, VerbsError};
use serde::Serialize;

use self::lane::{MessageLane, Unconnected};
use crate::compat::queue::gid_index;
use crate::ending;
use crate::output::{Failure, Kind, Output};
use crate::session::listeners::{BACKLOG, Listeners};
use crate::session::{OpenArgs, Own, Patience, patience};
use crate::size::size;

/// Largest numbers of connections, and of messages on each.
const CONNECTIONS_MAX: i64 = 10_000;
const MESSAGES_MAX: i64 = 10_000;
/// Bytes of a message of `rdma_client`.
const SIMPLE_SIZE: u32 = 16;

/// Options of all three commands.
#[derive(Debug, clap::Args)]
struct Common {
    /// The server's port, one of RDMA_PS_TCP
    #[arg(short, long, default_value_t = 7471, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    #[command(flatten)]
    patience: Patience,
    #[command(flatten)]
    device: OpenArgs,
    /// Print this process's counters at the end, also if it fails or a signal ends it
    #[arg(long)]
    counters: bool,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// Make connections by the connection manager and exchange messages on all of them, like ucmatose
///
/// The other side is `rocinante ucmatose` or ucmatose of librdmacm. Both sides need the same -c, -C
/// and -S.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Be the client of the server of this name or address
    #[arg(short, long, value_name = "ADDR")]
    server: Option<String>,
    /// The address or interface of the device to use [default: at the client the one from which the
    /// server is reached, at the server all]
    #[arg(short, long, value_name = "ADDR")]
    bind: Option<Own>,
    /// Connections
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=CONNECTIONS_MAX))]
    connections: u32,
    /// Messages each way on each connection
    #[arg(short = 'C', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=MESSAGES_MAX))]
    count: u32,
    /// Bytes of a message; with 0 there are none
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100, value_parser = size::<0, { 1 << 20 }>)]
    size: u32,
    #[command(flatten)]
    common: Common,
}

/// Take one connection by the connection manager and answer its message, like rdma_server
///
/// The other side is `rocinante rdma-client` or rdma_client of librdmacm.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct ServerArgs {
    /// The address or interface of the device to use, as --bind of other commands [default: all]
    #[arg(short, long, alias = "bind", value_name = "ADDR")]
    server: Option<Own>,
    #[command(flatten)]
    common: Common,
}

/// Connect by the connection manager, send a message and receive the answer, like rdma_client
///
/// The other side is `rocinante rdma-server` or rdma_server of librdmacm.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct ClientArgs {
    /// The server's name or address
    #[arg(short, long, value_name = "ADDR")]
    server: String,
    /// The address or interface of the device to use [default: the one from which the server is
    /// reached]
    #[arg(short, long, value_name = "ADDR")]
    bind: Option<Own>,
    #[command(flatten)]
    common: Common,
}

/// The parameters of a run.
#[derive(Debug, Clone, Copy)]
struct ConnectionPlan {
    connections: u32,
    count: u32,
    size: u32,
    patience: Patience,
    port: u16,
    /// Whether the client sends first, and then receives the answer.
    client_begins: bool,
}

/// The result of one side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    role: &'static str,
    netdev: &'static str,
    local: IpAddr,
    peer: SocketAddr,
    connections: u32,
    /// Messages sent and received, on all connections together.
    messages: u64,
    size: u32,
    connect_seconds: f64,
    seconds: f64,
}

/// Runs `ucmatose`.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let common = &args.common;
    // As in ucmatose: no message is empty.
    let count = if args.size == 0 { 0 } else { args.count };
    let plan = ConnectionPlan {
        connections: args.connections,
        count,
        size: args.size,
        client_begins: false,
        ..common.plan()
    };
    end("ucmatose", common, |out| match &args.server {
        Some(server) => ask(common, &plan, server, args.bind.as_ref(), out),
        None => serve(common, &plan, args.bind.as_ref(), out),
    })
}

/// Runs `rdma-server`.
#[must_use]
pub fn run_server(args: &ServerArgs) -> ExitCode {
    let common = &args.common;
    end("rdma-server", common, |out| serve(common, &common.plan(), args.server.as_ref(), out))
}

/// Runs `rdma-client`.
#[must_use]
pub fn run_client(args: &ClientArgs) -> ExitCode {
    let common = &args.common;
    end("rdma-client", common, |out| {
        ask(common, &common.plan(), &args.server, args.bind.as_ref(), out)
    })
}

fn end(
    name: &str,
    common: &Common,
    work: impl FnOnce(Output) -> Result<Report, Failure>,
) -> ExitCode {
    let out = Output { json: common.json };
    ending::begin(&format!("rocinante {name}"), out, common.counters);
    let result = work(out);
    if let Ok(report) = &result {
        out.note(format_args!(
            "{} messages on {} connections in {:.3} s, connected in {:.3} s",
            report.messages, report.connections, report.seconds, report.connect_seconds
        ));
    }
    out.end(&format!("rocinante {name}"), &result)
}

impl Common {
    /// The plan of `rdma-server` and `rdma-client`: one message of 16 bytes each way, the client's
    /// first.
    fn plan(&self) -> ConnectionPlan {
        ConnectionPlan {
            connections: 1,
            count: 1,
            size: SIMPLE_SIZE,
            patience: self.patience,
            port: self.port,
            client_begins: true,
        }
    }
}

/// The programs of librdmacm ask for the same values.
fn params() -> Params {
    let options = ConnectOptions::default().max_rd_atomic(1).max_dest_rd_atomic(1);
    Params::default().options(options)
}

fn ask(
    common: &Common,
    plan: &ConnectionPlan,
    server: &str,
    bind: Option<&Own>,
    out: Output,
) -> Result<Report, Failure> {
    let server = plan.patience.resolve(server, plan.port, bind, out)?;
    let ctx = common.device.open_towards(server, bind, out)?;
    let local = ctx.gids()[0];
    let start = Instant::now();
    let failed = |error: VerbsError| {
        let advice = patience::advice(&error);
        Failure::Of(Kind::Connect, format!("cannot connect to {server}: {error}{advice}"))
    };
    ending::enter("connecting");
    let mut connecting = Vec::with_capacity(plan.connections as usize);
    for _ in 0..plan.connections {
        connecting.push(ask_one(&ctx, plan, server).map_err(failed)?);
    }
    let mut lanes = Vec::with_capacity(connecting.len());
    let wanted = connecting.len();
    for first in connecting {
        let mut first = Some(first);
        let lane = plan.patience.ask(out, |left| {
            let (parts, asked) = match first.take() {
                Some(first) => first,
                None => ask_one(&ctx, plan, server)?,
            };
            Ok(parts.connected(asked.wait(left)?))
        });
        lanes.push(lane.map_err(|error| {
            let (failure, made) = (failed(error), lanes.len());
            if made == 0 {
                return failure;
            }
            failure.told(|what| {
                format!("{what}; {made} of {wanted} connections were made: were both sides given the same -c?")
            })
        })?);
    }
    let connected = start.elapsed();
    let exchanged = exchange(plan, &mut lanes, plan.client_begins);
    let report = report("client", &ctx, local, plan, &lanes, start, connected);
    exchanged.inspect_err(|_| ending::add(&report))?;
    // The side that sent first ends the connections.
    finish(plan, &lanes, plan.client_begins)?;
    Ok(report)
}

/// Asks the server for one connection.
fn ask_one(
    ctx: &Context,
    plan: &ConnectionPlan,
    server: SocketAddr,
) -> Result<(Unconnected, Connecting), VerbsError> {
    let (parts, qp) = Unconnected::make(ctx, 0, plan.count, plan.size)?;
    Ok((parts, Connecting::start(qp, server, &params())?))
}

fn serve(
    common: &Common,
    plan: &ConnectionPlan,
    bind: Option<&Own>,
    out: Output,
) -> Result<Report, Failure> {
    // The client asks for all at once.
    let (port, all) = (plan.port, BACKLOG.max(plan.connections as usize));
    let listeners = Listeners::open(&common.device, bind, port, Listener::bind, all, out)?;
    ending::enter("waiting for a client");
    let place = listeners.place();
    out.note(format_args!("waiting for {} connections on {place}", plan.connections));
    // Waits for the first connection without a limit, for the others with one.
    let mut patience = None;
    let mut start = Instant::now();
    let mut first = None;
    let mut accepted = Vec::with_capacity(plan.connections as usize);
    while accepted.len() < plan.connections as usize {
        let Some((ctx, request)) = listeners.next(patience, Listener::try_request)? else {
            if patience.is_none() {
                continue;
            }
            return Err(Failure::Failed(format!(
                "{} of {} connections came: were both sides given the same -c?",
                accepted.len(),
                plan.connections
            )));
        };
        ending::opened(ctx);
        first.get_or_insert_with(|| (ctx.clone(), request.local()));
        if patience.is_none() {
            start = Instant::now();
        }
        patience = Some(plan.patience.time());
        let gid = gid_index(ctx, request.local());
        let (parts, qp) = Unconnected::make(ctx, gid, plan.count, plan.size)?;
        accepted.push((parts, request.accept(qp, &params())?));
    }
    let (ctx, local) = first.ok_or_else(|| Failure::Usage("no connection is wanted".into()))?;
    let mut lanes = Vec::with_capacity(accepted.len());
    for (parts, asked) in accepted {
        lanes.push(parts.connected(asked.wait(plan.patience.time())?));
    }
    let connected = start.elapsed();
    let exchanged = exchange(plan, &mut lanes, !plan.client_begins);
    let report = report("server", &ctx, local, plan, &lanes, start, connected);
    exchanged.inspect_err(|_| ending::add(&report))?;
    finish(plan, &lanes, !plan.client_begins)?;
    Ok(report)
}

/// Exchanges all messages, on all connections at once.
fn exchange(plan: &ConnectionPlan, lanes: &mut [MessageLane], begins: bool) -> Result<(), Failure> {
    ending::enter("messages");
    let _attentive = ending::attentive();
    for speaks in [begins, !begins] {
        if speaks {
            lanes.iter().try_for_each(MessageLane::speak)?;
        }
        let deadline = Instant::now() + plan.patience.time();
        for lane in &mut *lanes {
            if speaks { lane.wait_sent(deadline)? } else { lane.wait_received(deadline)? }
        }
    }
    Ok(())
}

/// Ends the connections, or waits until the peer has ended them.
fn finish(plan: &ConnectionPlan, lanes: &[MessageLane], ends: bool) -> Result<(), Failure> {
    if ends {
        lanes.iter().try_for_each(MessageLane::disconnect)?;
    }
    lanes.iter().try_for_each(|lane| lane.wait_disconnected(plan.patience.time()))
}

fn report(
    role: &'static str,
    ctx: &Context,
    local: IpAddr,
    plan: &ConnectionPlan,
    lanes: &[MessageLane],
    start: Instant,
    connected: Duration,
) -> Report {
    Report {
        role,
        netdev: ctx.provider().name(),
        local,
        // There is at least one connection.
        peer: lanes[0].peer(),
        connections: plan.connections,
        messages: lanes.iter().map(MessageLane::messages).sum(),
        size: plan.size,
        connect_seconds: connected.as_secs_f64(),
        seconds: (start.elapsed() - connected).as_secs_f64(),
    }
}
