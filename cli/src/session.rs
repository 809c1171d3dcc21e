//! Two processes of one command: how they find each other, agree on the work, and report failures
//! to each other.
//!
//! The server listens on TCP, or with `--cm` on a port of the connection manager. The client sends
//! its request in one line. The server accepts it, or says why not. Both connect their queue pairs
//! ([`Session::join`]), and wait for each other before and after the work. A side that fails sends
//! the reason ([`Exchange::give_up`]), so that both users see it.

pub mod address;
pub mod agreement;
pub mod diagnosis;
mod door;
pub mod join;
pub mod listeners;
mod opening;
pub mod own;
pub mod patience;
pub mod progress;
mod server;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{ModifyAttr, Mtu, QpState};
use rocinante::{ConnectOptions, Context, Endpoint, PreparedQp, Qp, VerbsError};
use serde::Serialize;

use self::door::Door;
use crate::ending;
use crate::output::{Failure, Kind, Output, Result};
use crate::quiet::Quiet;
pub use opening::{NOTHING_TO_LOG, Netdev, OpenArgs, fault, faults_of, no_device};
pub use own::Own;
pub use patience::Patience;
pub use server::Server;

/// The peer's location and how to reach it: options of every command with two sides.
#[derive(Debug, Clone, clap::Args)]
pub struct NetArgs {
    /// Name or address of the server; without it, this is the server
    pub host: Option<String>,
    /// The choice of the device.
    #[command(flatten)]
    pub device: OpenArgs,
    /// Use the device with this address, or with that of this interface. The default is, at the
    /// client, the address from which HOST is reached; at the server, the one by which the client
    /// comes
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<Own>,
    /// Connect by the connection manager, as programs of librdmacm do, and not over TCP: all goes
    /// over UDP port 4791
    #[arg(long)]
    pub cm: bool,
    /// How long the client waits.
    #[command(flatten)]
    pub patience: Patience,
    /// At the server, serve one client after the other until a signal comes
    #[arg(short = 'P', long, conflicts_with = "host")]
    pub persistent: bool,
    /// Port on which the two sides find each other: TCP's, or with --cm one of RDMA_PS_TCP
    #[arg(short, long, default_value_t = 18515)]
    pub port: u16,
}

/// Parses a path MTU of the command line. Error: the text is none of the five.
pub fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = text.parse().ok();
    bytes
        .and_then(Mtu::from_bytes)
        .ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".to_owned())
}

impl NetArgs {
    /// Opens the device with the local address `route`, or the one that the user named. Error: the
    /// device cannot be opened.
    fn open(&self, route: IpAddr, out: Output) -> Result<Context> {
        let address = match &self.bind {
            Some(own) => own.towards(route).unwrap_or_else(|| own.first()),
            None => self.device.address(route)?,
        };
        self.device.open(address, out)
    }

    /// Opens the device from which `server` is reached. Error: there is no route, or the device
    /// cannot be opened.
    fn open_towards(&self, server: SocketAddr, out: Output) -> Result<Context> {
        let route = address::local(server, self.bind.as_ref())?;
        self.open(route, out)
    }
}

/// Time limit for the first message on a connection to the server.
const REQUEST_PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for the next line of a peer that only has to answer.
const LINE_PATIENCE: Duration = Duration::from_secs(20);
/// Time limit for the reason of a peer whose requests or memory failed first.
const REASON: Duration = Duration::from_millis(300);

/// Names the phase that both sides enter, for errors.
pub fn enter(exchange: &mut Exchange, phase: &str) {
    exchange.enter(phase);
    ending::enter(phase);
}

/// The failure of a server that did not answer the request. Other programs close the connection
/// without a word.
fn of_no_answer(error: VerbsError, managed: bool) -> Failure {
    Failure::from(error).told(|why| {
        if managed || !why.contains("it closed the connection") {
            return why.to_owned();
        }
        format!(
            "{why}: is it a program of perftest or rdma-core? Then run the same program here: `rocinante run -- PROGRAM`"
        )
    })
}

fn refuse(exchange: &mut Exchange, why: &str) -> Failure {
    exchange.give_up(why);
    exchange.error(why).into()
}

/// The index of the device's address `local`.
#[must_use]
pub fn gid_index(ctx: &Context, local: IpAddr) -> usize {
    ctx.gids().iter().position(|gid| *gid == local).unwrap_or(0)
}

/// Breaks a connection, so that a thread that waits for a completion gets one. For
/// [`Session::watched`].
pub fn abandon(qp: &Qp) {
    // This fails only for a queue pair that does not exist any more.
    let _ = qp.modify(&ModifyAttr::state(QpState::Err));
}

/// Checks that the path MTU of the options fits both links.
fn check_mtu(ctx: &Context, there: Mtu, options: &ConnectOptions) -> Result {
    let own = ctx.query_device();
    if let Some(wanted) = options.mtu {
        let here = own.active_mtu;
        if wanted > here {
            let (name, bytes) = (ctx.name(), wanted.bytes() + 80);
            return Err(Failure::Failed(match own.port {
                Some(port) => format!(
                    "path MTU {wanted} does not fit {name}, whose link MTU is {}: give -m {here}, or raise the link's with `ip link \
                     set {name} mtu {bytes}`",
                    port.link_mtu
                ),
                None => format!(
                    "path MTU {wanted} does not fit {name}: give -m {here}, or raise the MTU of its interface (`rdma link` names \
                     it) to {bytes}"
                ),
            }));
        }
        if wanted > there {
            return Err(Failure::Failed(format!(
                "path MTU {wanted} does not fit the peer's link: give -m {there}, or raise the MTU of its link"
            )));
        }
    }
    Ok(())
}

/// A connection between two processes of one command, and the device of this one.
#[derive(Debug)]
pub struct Session {
    /// The device.
    pub ctx: Context,
    /// The messages between the two processes, over TCP or a queue pair.
    pub exchange: Exchange,
    /// The listener for the peer's queue pairs, at a server with connections by the connection
    /// manager.
    door: Option<Door>,
    /// The address that the peer says it has.
    claimed: Option<IpAddr>,
}

impl Session {
    /// Connects to the server at `host` and sends it the plan. Error: the host is unknown, no
    /// server answers, there is no device, or the server refuses. The text says what to do.
    pub fn connect(
        net: &NetArgs,
        host: &str,
        command: &str,
        plan: &impl Serialize,
        out: Output,
    ) -> Result<Self> {
        let server = net.patience.resolve(host, net.port, net.bind.as_ref(), out)?;
        let ctx = net.open_towards(server, out)?;
        ending::enter("connecting");
        let exchange = if net.cm {
            Exchange::connect_cm(&ctx, server, net.patience.time())
        } else {
            net.patience.reach(server, out)
        };
        let unreached = |error| {
            let mut what = Failure::from(error).to_string();
            if !net.cm {
                what.push_str("; a server with --cm is reached with --cm alone");
            }
            Failure::Of(Kind::Connect, what)
        };
        let mut exchange = exchange.map_err(unreached)?;
        exchange.set_patience(Some(LINE_PATIENCE));
        enter(&mut exchange, "first words");
        exchange.say(&agreement::request(command, plan))?;
        let answer = exchange.hear().map_err(|error| of_no_answer(error, net.cm))?;
        agreement::accepted(&answer).map_err(|why| exchange.error(why))?;
        enter(&mut exchange, "making queue pairs");
        Ok(Self { ctx, exchange, door: None, claimed: None })
    }

    /// Does `work`. If it fails, sends the reason to the peer. Error: the error of `work`.
    pub fn run<T>(mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let done = work(&mut self).map_err(|failure| self.with_translation(failure));
        done.inspect_err(|failure| {
            // Any failure is a consequence of the signal, if one has arrived.
            let stopped = ending::check_signal().err();
            let why = stopped.as_ref().unwrap_or(failure).to_string();
            // The peer does not need its own address.
            let own = format!("peer {}, ", self.peer());
            self.exchange.give_up(why.strip_prefix(&own).unwrap_or(&why));
        })
    }

    /// Adds that addresses are translated between the two sides, if nothing has come of the peer.
    fn with_translation(&self, failure: Failure) -> Failure {
        let between = self.claimed.and_then(|it| diagnosis::translated(it, self.peer().ip()));
        match between.filter(|_| self.ctx.counters().transport.rcvd_pkts == 0) {
            Some(between) => failure.told(|why| format!("{why}: {between}")),
            None => failure,
        }
    }

    /// Swaps endpoints and regions with the peer. The peer must have the same number of each, and
    /// regions of the same lengths. Error: the peer is gone, says something else, or its addresses
    /// are of another family.
    fn swap(&mut self, hello: &Hello) -> Result<Hello> {
        self.enter("exchange of endpoints");
        let peer = self.exchange.swap(hello)?;
        self.claimed = peer.endpoints.first().map(|endpoint| endpoint.address);
        for (what, ours, theirs) in [
            ("queue pairs", hello.endpoints.len(), peer.endpoints.len()),
            ("regions", hello.regions.len(), peer.regions.len()),
        ] {
            if ours != theirs {
                return Err(self.failed(format_args!(
                    "it has {theirs} {what} where this side has {ours}: use the same version on both sides"
                )));
            }
        }
        if hello.regions.iter().zip(&peer.regions).any(|(ours, theirs)| ours.len != theirs.len) {
            return Err(self.failed(
                "its region has another length than this side's: use the same version on both sides",
            ));
        }
        self.enter("connecting the queue pairs");
        Ok(peer)
    }

    /// Names the phase that both sides enter, for errors.
    pub fn enter(&mut self, phase: &str) {
        enter(&mut self.exchange, phase);
    }

    /// An error that names the peer and the phase.
    pub fn failed(&self, what: impl std::fmt::Display) -> Failure {
        self.exchange.error(what).into()
    }

    /// Connects a queue pair. If the options name a path MTU, it uses exactly that one. Error: a
    /// link does not take the path MTU, or there is no route to the peer. The text names the peer.
    fn connect_qp(&self, qp: PreparedQp, peer: &Endpoint, options: &ConnectOptions) -> Result<Qp> {
        check_mtu(&self.ctx, peer.mtu, options).map_err(|why| self.failed(why))?;
        qp.connect(peer, options).map_err(|refused| self.failed(refused.error))
    }

    /// Does `work` while another thread watches the peer. If the peer goes or gives up, that thread
    /// calls `abandon`, which must make `work` fail. The error then has the peer's reason. The same
    /// happens if a signal comes. Error: the error of `work`, or the reason why the peer is gone.
    pub fn watched<T>(
        &mut self,
        work: impl FnOnce(&mut Exchange) -> Result<T>,
        abandon: impl FnOnce() + Send,
    ) -> Result<T> {
        let watch = self.exchange.watch()?;
        let stops = || watch.is_gone() || ending::signal().is_some();
        let result = ending::breakable(stops, abandon, || work(&mut self.exchange));
        result.map_err(|failure| {
            if let Err(stopped) = ending::check_signal() {
                return stopped;
            }
            // A peer that gives up frees its memory, and this side's requests fail, before the
            // reason has come.
            let until = Instant::now() + REASON;
            while !watch.is_gone() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            // The peer may have reached the end of the work before it gave up.
            loop {
                match self.exchange.try_hear() {
                    Ok(Some(_)) => {}
                    Ok(None) => break failure.told(|text| self.failed(text).to_string()),
                    Err(why) => break Failure::from(why),
                }
            }
        })
    }

    /// Waits until the peer reaches the same point. Waits on while packets arrive, even if the peer
    /// sends no message. Error: the peer is gone, has given up, or is silent.
    pub fn barrier(&mut self, name: &str) -> Result {
        ending::enter(name);
        let mut quiet = Quiet::new(&self.ctx, LINE_PATIENCE);
        Ok(self.exchange.barrier_while(name, || quiet.goes_on())?)
    }

    /// Whether the connection manager connects the queue pairs.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.exchange.path_mtu().is_some()
    }

    /// The index of the device's address that the peer knows. A server that listens on all
    /// addresses has several.
    #[must_use]
    pub fn gid_index(&self) -> usize {
        let local = self.exchange.local().map(|local| local.ip().to_canonical());
        local.map_or(0, |local| gid_index(&self.ctx, local))
    }

    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.exchange.peer()
    }
}
