//! `rocinante rping`: connects through the connection manager and plays like librdmacm's
//! `rping(1)`. The other side is that program or `rocinante rping`.
//!
//! In each round the client first advertises a buffer, with a SEND of address, key and length. The
//! server READs it, and answers with a SEND. The client then advertises another buffer. The server
//! WRITEs the same bytes into it, and answers again.

mod game;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::cm::{self, Params, Request};
use rocinante::verbs::Mtu;
use rocinante::{ConnectOptions, Context};
use serde::Serialize;

use self::game::{RpingGame, SIZE_MAX, SIZE_MIN};
use crate::ending;
use crate::output::{Failure, Kind, Output, Result};
use crate::session::listeners::Listeners;
use crate::session::{self, OpenArgs, Own, Patience, gid_index, patience};
use crate::size::size;

/// Connect by the connection manager and pass a text back and forth by READ and WRITE, like rping
///
/// The other side is `rocinante rping` or rping of librdmacm, over any network that RoCE v2 passes.
///
/// Two terminals on one machine, without privileges: `rocinante rping -s`, and `rocinante
/// rping -c -a localhost -C 10 -v`.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("role").required(true).args(["server", "client"]))]
pub struct Args {
    /// Be the server: wait for a client
    #[arg(short, long)]
    server: bool,
    /// Be the client
    #[arg(short, long)]
    client: bool,
    /// The server's name or address: at the server, the address or interface of the device to use
    /// [default at the server: all]
    #[arg(short, long, value_name = "ADDR", required_unless_present = "server")]
    address: Option<String>,
    /// The address or interface of the device to use, as --bind of other commands [default: at the
    /// client the one from which the server is reached, at the server that of -a]
    #[arg(short = 'I', long, alias = "bind", value_name = "ADDR")]
    source: Option<Own>,
    /// The server's port, one of RDMA_PS_TCP
    #[arg(short, long, default_value_t = 7174, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// At the client, number of rounds; 0 is for ever
    #[arg(short = 'C', long, value_name = "N", default_value_t = 0)]
    count: u64,
    /// At the client, bytes of the text
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 64, value_parser = size::<SIZE_MIN, SIZE_MAX>)]
    size: u32,
    /// At the client, path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that the link
    /// carries]
    #[arg(short, long, requires = "client", value_parser = session::mtu)]
    mtu: Option<Mtu>,
    /// Print each text
    #[arg(short, long)]
    verbose: bool,
    /// At the client, compare each text with its echo
    #[arg(short = 'V', long)]
    validate: bool,
    /// At the server, serve any number of clients, also at the same time, until it is killed
    #[arg(short = 'P', long, requires = "server")]
    persistent: bool,
    /// rping's option for debug messages: taken without effect
    #[arg(short, hide = true)]
    debug: bool,
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
    rounds: u64,
    size: u32,
    connect_us: f64,
    seconds: f64,
    validated: bool,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::begin("rocinante rping", out, args.counters);
    let result = if args.server { serve(args, out) } else { ask(args, out) };
    if let Ok(report) = &result {
        out.note(format_args!(
            "{} rounds with {} in {:.2} seconds, connected in {:.0} us",
            report.rounds, report.peer, report.seconds, report.connect_us
        ));
    }
    out.end("rocinante rping", &result)
}

impl Args {
    fn report(&self, role: &'static str, game: &RpingGame, connect: Duration) -> Report {
        Report {
            role,
            netdev: game.netdev,
            local: game.local,
            peer: game.connection.peer(),
            rounds: game.rounds,
            size: game.size,
            connect_us: connect.as_secs_f64() * 1e6,
            seconds: game.time.as_secs_f64(),
            validated: self.validate && self.client,
        }
    }
}

fn ask(args: &Args, out: Output) -> Result<Report> {
    let (host, own) = (args.address.as_deref().unwrap_or_default(), args.source.as_ref());
    let server = args.patience.resolve(host, args.port, own, out)?;
    let ctx = args.device.open_towards(server, own, out)?;
    // rping asks for the same values.
    let options = ConnectOptions::default().max_rd_atomic(1).max_dest_rd_atomic(1).mtu(args.mtu);
    let params = Params::default().options(options);
    ending::enter("connecting");
    let mut start = Instant::now();
    let game = args.patience.ask(out, |left| {
        let prepared = game::prepare(&ctx, 0, args.size)?;
        start = Instant::now();
        prepared.connect(|qp| cm::connect(qp, server, &params, left))
    });
    let mut game = game.map_err(|error| failed(server, &error))?;
    let connect = start.elapsed();
    ending::enter("playing");
    let _attentive = ending::attentive();
    let asked = game.ask(args.count, args.verbose, args.validate, out);
    asked.inspect_err(|_| ending::add(&args.report("client", &game, connect)))?;
    game.connection.disconnect()?;
    // The server gets this request repeatedly until it answers. Without the wait, a lost request
    // would leave the server waiting.
    let _ = game.connection.wait_disconnected(Duration::from_secs(2));
    Ok(args.report("client", &game, connect))
}

fn failed(server: SocketAddr, error: &rocinante::VerbsError) -> Failure {
    let advice = patience::advice(error);
    Failure::Of(Kind::Connect, format!("cannot connect to {server}: {error}{advice}"))
}

fn serve(args: &Args, out: Output) -> Result<Report> {
    let own: Option<Own> = args.address.as_deref().map(str::parse).transpose().map_err(|why| {
        Failure::Usage(format!("-a {}: {why}", args.address.as_deref().unwrap_or_default()))
    })?;
    if own.is_some() && args.source.is_some() {
        return Err(Failure::Usage("-a of a server is its own address, too: leave out -I".into()));
    }
    let own = own.as_ref().or(args.source.as_ref());
    let listeners = Listeners::open(&args.device, own, args.port, out)?;
    ending::enter("waiting for a client");
    out.note(format_args!("waiting for a client on {}", listeners.place()));
    if !args.persistent {
        let (ctx, request) = listeners.wait()?;
        ending::opened(ctx);
        ending::enter("playing");
        let _attentive = ending::attentive();
        return serve_one(ctx, request, args, out);
    }
    std::thread::scope(|scope| {
        loop {
            let (ctx, request) = listeners.wait()?;
            ending::opened(ctx);
            let peer = request.peer();
            scope.spawn(move || match serve_one(ctx, request, args, out) {
                Ok(report) => out.note(format_args!("{} rounds with {peer}", report.rounds)),
                Err(failure) => out.note(format_args!("client {peer}: {failure}")),
            });
        }
    })
}

fn serve_one(ctx: &Context, request: Request, args: &Args, out: Output) -> Result<Report> {
    let start = Instant::now();
    let prepared = game::prepare(ctx, gid_index(ctx, request.local()), SIZE_MAX)?;
    let patience = args.patience.time();
    let mut game = prepared.connect(|qp| request.accept(qp, &Params::default())?.wait(patience))?;
    let connect = start.elapsed();
    let served = game.serve(args.verbose, out);
    served.inspect_err(|_| ending::add(&args.report("server", &game, connect)))?;
    Ok(args.report("server", &game, connect))
}
