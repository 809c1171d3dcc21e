//! Two processes of one command: how they find each other, agree on what to do, and tell each other when it goes wrong.
//!
//! The server listens on TCP, or with `--cm` on a port of the connection manager. The client says in one line what it wants, the server accepts or says why
//! not, both connect their queue pairs ([`Session::join`]), and wait for each other before and after the work. A side that cannot go on says
//! why ([`Exchange::give_up`]), so that both users see the reason.

pub mod address;
pub mod agreement;
pub mod diagnosis;
mod door;
pub mod join;
mod opening;
pub mod progress;
mod server;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rocinante::{
    ConnectOptions, Context, Endpoint, Exchange, Hello, ModifyAttr, Mtu, PreparedQp, Provider, Qp,
    QpState,
};
use serde::Serialize;

use self::door::Door;
use crate::output::{Failure, Output};
use crate::quiet::Quiet;
pub use opening::{Netdev, OpenArgs};
pub use server::Server;

/// Where the peer is and by what to reach it: options of every command with two sides.
#[derive(Debug, Clone, clap::Args)]
pub struct NetArgs {
    /// Name or address of the server; without it, this is the server
    pub host: Option<String>,
    /// Which device.
    #[command(flatten)]
    pub device: OpenArgs,
    /// Use the device with this address. The default is, at the client, the address from which HOST is reached; at the
    /// server, the one by which the client comes
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<IpAddr>,
    /// Connect by the connection manager, as programs of librdmacm do, and not over TCP: all goes over UDP port 4791
    #[arg(long)]
    pub cm: bool,
    /// Port on which the two sides find each other: TCP's, or with --cm one of RDMA_PS_TCP
    #[arg(short, long, default_value_t = 18515)]
    pub port: u16,
}

/// A path MTU on the command line.
///
/// # Errors
/// It is none of the five.
pub fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = text.parse().ok();
    bytes
        .and_then(Mtu::from_bytes)
        .ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".to_owned())
}

impl NetArgs {
    /// Programs of others find each other in their own ways.
    ///
    /// # Errors
    /// `--cm` is given.
    pub fn check_compat(&self) -> Result<(), Failure> {
        if self.cm {
            let why = "--cm is for two sides of rocinante: leave out --compat, or --cm";
            return Err(Failure::Usage(why.into()));
        }
        Ok(())
    }
}

/// How long a client tries to reach a server that is not there yet.
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);
/// How long a connection to the server may say nothing.
const REQUEST_PATIENCE: Duration = Duration::from_secs(5);
/// How long each side waits for the next line of a peer that has only to answer.
const LINE_PATIENCE: Duration = Duration::from_secs(20);

fn refuse(exchange: &mut Exchange, why: &str) -> Failure {
    exchange.give_up(why);
    exchange.error(why).into()
}

/// Breaks a connection, so that whoever waits for a completion gets one: for [`Session::watched`].
pub fn abandon(qp: &Qp) {
    // Only a queue pair that does not exist any more cannot go to the error state.
    let _ = qp.modify(&ModifyAttr::state(QpState::Err));
}

/// Connects a queue pair at exactly the path MTU that is wanted, if one is.
///
/// # Errors
/// A link that does not take the path MTU, no way to the peer.
pub fn connect_qp(
    ctx: &Context,
    qp: PreparedQp,
    peer: &Endpoint,
    options: &ConnectOptions,
) -> Result<Qp, Failure> {
    check_mtu(ctx, peer.mtu, options)?;
    qp.connect(peer, options).map_err(|(_, error)| error.into())
}

/// Whether the path MTU that is wanted fits both links.
fn check_mtu(ctx: &Context, there: Mtu, options: &ConnectOptions) -> Result<(), Failure> {
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
    /// What the two processes say to each other, over TCP or a queue pair.
    pub exchange: Exchange,
    /// Where the peer's queue pairs come, at a server that the connection manager connects.
    door: Option<Door>,
}

impl Session {
    /// Reaches the server at `host` and tells it what to do.
    ///
    /// # Errors
    /// No such host, nobody there, no device, or the server refuses: the text says what to do.
    pub fn connect(
        net: &NetArgs,
        host: &str,
        command: &str,
        plan: &impl Serialize,
        out: Output,
    ) -> Result<Self, Failure> {
        let server = address::resolve(host, net.port, net.bind)?;
        let address = match net.bind {
            Some(address) => address,
            None => address::towards(server.ip())?,
        };
        let opened = net.device.open(address, out);
        // Hardware has room for both.
        let shared = opened.as_ref().is_ok_and(|ctx| ctx.provider() == Provider::Hardware);
        if address == server.ip() && !shared {
            out.note(format_args!(
                "{address} is an address of this machine: the server must use another one (--bind at either side), \
                 or both will want UDP/4791 of the same"
            ));
        }
        let ctx = opened?;
        let mut exchange = if net.cm {
            Exchange::connect_cm(&ctx, server, CONNECT_PATIENCE)?
        } else {
            Exchange::connect(server, CONNECT_PATIENCE)?
        };
        exchange.set_patience(Some(LINE_PATIENCE));
        exchange.enter("first words");
        exchange.say(&agreement::request(command, plan))?;
        agreement::accepted(&exchange.hear()?).map_err(|why| exchange.error(why))?;
        exchange.enter("making queue pairs");
        Ok(Self { ctx, exchange, door: None })
    }

    /// Does `work`; if it fails, the peer is told why.
    ///
    /// # Errors
    /// What `work` says.
    pub fn run<T>(
        mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        work(&mut self).inspect_err(|failure| {
            let why = failure.to_string();
            // It knows who it is.
            let own = format!("peer {}, ", self.peer());
            self.exchange.give_up(why.strip_prefix(&own).unwrap_or(&why));
        })
    }

    /// Swaps endpoints and regions with the peer, which must have as many of each, and of the same lengths.
    ///
    /// # Errors
    /// The peer is gone, says something else, or its addresses are of another family.
    fn swap(&mut self, hello: &Hello) -> Result<Hello, Failure> {
        self.enter("exchange of endpoints");
        let peer = self.exchange.swap(hello)?;
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

    /// Says what both sides do from now on, for errors.
    pub fn enter(&mut self, phase: &str) {
        self.exchange.enter(phase);
    }

    /// What went wrong, with whom, and in which phase.
    pub fn failed(&self, what: impl std::fmt::Display) -> Failure {
        self.exchange.error(what).into()
    }

    /// As [`connect_qp`], with the session's device.
    ///
    /// # Errors
    /// As there; the text names the peer.
    fn connect_qp(
        &self,
        qp: PreparedQp,
        peer: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<Qp, Failure> {
        connect_qp(&self.ctx, qp, peer, options).map_err(|why| self.failed(why))
    }

    /// Does `work` while another thread watches the peer. If the peer goes or gives up, that thread calls `abandon`, which is to make `work`
    /// fail; and the error is then the peer's reason.
    ///
    /// # Errors
    /// What `work` says, or why the peer has gone.
    pub fn watched<T>(
        &mut self,
        work: impl FnOnce(&mut Exchange) -> Result<T, Failure>,
        abandon: impl FnOnce() + Send,
    ) -> Result<T, Failure> {
        const PAUSE: Duration = Duration::from_millis(100);
        let watch = self.exchange.watch()?;
        let (done, is_done) = channel::<()>();
        let gone = AtomicBool::new(false);
        let gone_is_known = &gone;
        let result = std::thread::scope(|scope| {
            scope.spawn(move || {
                while is_done.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                    if watch.is_gone() {
                        gone_is_known.store(true, Ordering::Relaxed);
                        return abandon();
                    }
                }
            });
            let result = work(&mut self.exchange);
            drop(done);
            result
        });
        result.map_err(|failure| match self.exchange.try_hear() {
            Err(why) => Failure::from(why),
            // It said something before it went.
            Ok(_) if gone.load(Ordering::Relaxed) => self.failed("it closed the connection"),
            Ok(_) => self.failed(failure),
        })
    }

    /// Waits for the peer to come to the same point, for as long as it says nothing but packets come.
    ///
    /// # Errors
    /// The peer has gone, given up, or fallen silent.
    pub fn barrier(&mut self, name: &str) -> Result<(), Failure> {
        let mut quiet = Quiet::new(&self.ctx, LINE_PATIENCE);
        Ok(self.exchange.barrier_while(name, || quiet.goes_on())?)
    }

    /// Whether the connection manager connects.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.exchange.path_mtu().is_some()
    }

    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.exchange.peer()
    }
}
