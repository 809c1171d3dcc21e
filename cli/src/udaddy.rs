//! `rocinante udaddy`: finds a queue pair for datagrams through the connection manager and plays
//! like librdmacm's `udaddy(1)`. The other side is that program or `rocinante udaddy`.
//!
//! The client sends a number of datagrams, each with the number of its queue pair. The server
//! answers the sender of the first one with as many.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Instant;

use rocinante::{Context, VerbsError, cm};
use serde::Serialize;

use crate::compat::queue::gid_index;
use crate::datagrams::{DatagramPlan, Node};
use crate::ending;
use crate::output::{Failure, Kind, Output};
use crate::session::listeners::{BACKLOG, Listeners};
use crate::session::{OpenArgs, Own, Patience, patience};
use crate::size::size;

/// Find a queue pair by the connection manager and exchange datagrams with it, like udaddy
///
/// The other side is `rocinante udaddy` or udaddy of librdmacm, over any network that RoCE v2
/// passes.
///
/// Two terminals on one machine, without privileges: `rocinante udaddy`, and `rocinante
/// udaddy -s localhost`.
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
    /// The server's port, one of RDMA_PS_UDP
    #[arg(long, default_value_t = 7174, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Number of pairs of queue pairs; the same at both sides
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
    /// Number of messages, of each queue pair and in each direction; the same at both sides
    #[arg(short = 'C', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    count: u32,
    /// Bytes of a message; the server's must not be less than the client's
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100, value_parser = size::<0, { u32::MAX }>)]
    size: u32,
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

/// The result of one side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    role: &'static str,
    netdev: &'static str,
    local: IpAddr,
    peer: SocketAddr,
    connections: u32,
    size: u32,
    sent: u32,
    received: u32,
    seconds: f64,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::begin("rocinante udaddy", out, args.counters);
    let result = match &args.server {
        Some(server) => ask(args, server, out),
        None => serve(args, out),
    };
    if let Ok(report) = &result {
        out.line(format_args!("{} datagrams sent, {} received", report.sent, report.received));
    }
    out.end("rocinante udaddy", &result)
}

impl Args {
    fn plan(&self) -> DatagramPlan {
        let patience = self.patience.time();
        // As in udaddy: empty messages are not sent.
        let count = if self.size == 0 { 0 } else { self.count };
        DatagramPlan { count, size: self.size, patience }
    }

    /// The report, or the failure with the report so far.
    fn reported(
        &self,
        exchanged: Result<(), Failure>,
        role: &'static str,
        ctx: &Context,
        nodes: &[Node],
        peer: SocketAddr,
        start: Instant,
    ) -> Result<Report, Failure> {
        let report = self.report(role, ctx, nodes, peer, start);
        exchanged.inspect_err(|_| ending::add(&report))?;
        Ok(report)
    }

    fn report(
        &self,
        role: &'static str,
        ctx: &Context,
        nodes: &[Node],
        peer: SocketAddr,
        start: Instant,
    ) -> Report {
        let sum = |of: fn((u32, u32)) -> u32| nodes.iter().map(|node| of(node.counts())).sum();
        Report {
            role,
            netdev: ctx.provider().name(),
            local: nodes.first().map_or_else(|| ctx.gids()[0], Node::local),
            peer,
            connections: self.connections,
            size: self.size,
            sent: sum(|(sent, _)| sent),
            received: sum(|(_, received)| received),
            seconds: start.elapsed().as_secs_f64(),
        }
    }
}

fn ask(args: &Args, host: &str, out: Output) -> Result<Report, Failure> {
    let own = args.bind.as_ref();
    let server = args.patience.resolve(host, args.port, own, out)?;
    let ctx = args.device.open_towards(server, own, out)?;
    let plan = args.plan();
    let mut nodes = (0..args.connections)
        .map(|_| Node::new(&ctx, 0, plan))
        .collect::<Result<Vec<Node>, Failure>>()?;
    for node in &nodes {
        node.post_receives()?;
    }
    let start = Instant::now();
    ending::enter("connecting");
    let services = nodes
        .iter()
        .map(|_| args.patience.ask(out, |left| cm::resolve(&ctx, 0, server, b"", left)))
        .collect::<Result<Vec<_>, VerbsError>>()
        .map_err(|error| failed(server, &error))?;
    ending::enter("datagrams");
    let _attentive = ending::attentive();
    let mut exchange = || {
        let mut handles = Vec::new();
        for (node, service) in nodes.iter_mut().zip(&services) {
            let ah = service.address_handle(&node.pd)?;
            node.send(service.destination(&ah))?;
            handles.push(ah);
        }
        out.note(format_args!("receiving data transfers"));
        nodes.iter_mut().try_for_each(Node::receive)
    };
    let exchanged = exchange();
    args.reported(exchanged, "client", &ctx, &nodes, server, start)
}

fn failed(server: SocketAddr, error: &VerbsError) -> Failure {
    let advice = patience::advice(error);
    Failure::Of(Kind::Connect, format!("cannot find the queue pair of {server}: {error}{advice}"))
}

fn serve(args: &Args, out: Output) -> Result<Report, Failure> {
    let (plan, own, bind) = (args.plan(), args.bind.as_ref(), cm::DatagramListener::bind);
    let listeners = Listeners::open(&args.device, own, args.port, bind, BACKLOG, out)?;
    ending::enter("waiting for a client");
    out.note(format_args!("waiting for a client on {}", listeners.place()));
    let mut nodes = Vec::new();
    let mut found = None;
    for _ in 0..args.connections {
        // All requests come from one program, which sends them all at once.
        let take = cm::DatagramListener::try_request;
        let come = match nodes.is_empty() {
            true => Some(listeners.wait(take)?),
            false => listeners.next(Some(plan.patience), take)?,
        };
        let (ctx, request) = come.ok_or_else(|| {
            Failure::Of(
                Kind::Silence,
                format!(
                    "{} of {} queue pairs were asked for: were both sides given the same -c?",
                    nodes.len(),
                    args.connections
                ),
            )
        })?;
        let (ctx, _) = found.insert((ctx, request.peer()));
        ending::opened(ctx);
        let node = Node::new(ctx, gid_index(ctx, request.local()), plan)?;
        node.post_receives()?;
        request.accept(&node.qp, b"")?;
        nodes.push(node);
    }
    let (ctx, peer) = found.ok_or_else(|| Failure::Usage("no queue pair is wanted".into()))?;
    let start = Instant::now();
    ending::enter("datagrams");
    let _attentive = ending::attentive();
    let mut exchange = || {
        out.note(format_args!("receiving data transfers"));
        nodes.iter_mut().try_for_each(Node::receive)?;
        out.note(format_args!("sending replies"));
        let mut handles = Vec::new();
        for node in nodes.iter_mut().filter(|_| plan.count > 0) {
            let (ah, to) = node.answer()?;
            node.send(to)?;
            handles.push(ah);
        }
        Ok(())
    };
    let exchanged = exchange();
    args.reported(exchanged, "server", ctx, &nodes, peer, start)
}
