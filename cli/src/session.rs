//! Two processes of one command: how they find each other, agree on what to do, and tell each other when it goes wrong.
//!
//! The server listens on TCP. The client says in one line what it wants, the server accepts or says why not, both swap the
//! endpoints of their queue pairs ([`Exchange::swap`]), and wait for each other before and after the work. A side that cannot go on says
//! why ([`Exchange::give_up`]), so that both users see the reason.

pub mod address;
pub mod agreement;
pub mod diagnosis;
pub mod progress;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rocinante::{
    Backend, ConnectOptions, Context, Endpoint, Exchange, Hello, ModifyAttr, Mtu, OpenOptions,
    PreparedQp, Provider, Qp, QpState,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::output::{Failure, Output};
use crate::quiet::Quiet;
use agreement::Request;

/// Where the peer is and by what to reach it: options of every command with two sides.
#[derive(Debug, Clone, clap::Args)]
pub struct NetArgs {
    /// Name or address of the server; without it, this is the server
    pub host: Option<String>,
    /// Carry the packets by afxdp, packet, udp, or auto: the best of them that bypasses no rule [default: the variable
    /// ROCINANTE_NETDEV, else auto]
    #[arg(long, value_name = "NETDEV", value_parser = netdev)]
    pub netdev: Option<Netdev>,
    /// Use this device: an RDMA device of the kernel (mlx5_0, rxe0; "hw" for whichever has the address), or a network interface, for the device
    /// in software on it [default: the variable ROCINANTE_DEVICE, else the device in software]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Use the device with this address. The default is, at the client, the address from which HOST is reached; at the
    /// server, the one by which the client comes
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<IpAddr>,
    /// TCP port on which the two sides find each other
    #[arg(short, long, default_value_t = 18515)]
    pub port: u16,
}

/// A wish for a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netdev {
    /// Choose.
    Auto,
    /// This one.
    Only(Backend),
}

pub(crate) fn netdev(name: &str) -> Result<Netdev, String> {
    match name {
        "auto" => Ok(Netdev::Auto),
        "sim" => Err("the simulator connects nothing: choose auto, afxdp, packet or udp".into()),
        name => name.parse().map(Netdev::Only).map_err(|why: String| format!("{why}, or auto")),
    }
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
    /// Opens the device that has `address`, and says which that is and what carries it.
    ///
    /// # Errors
    /// There is none, or the backend cannot be had; the text says what to do.
    pub fn open(&self, address: IpAddr, out: Output) -> Result<Context, Failure> {
        let mut options = OpenOptions::new();
        options = match self.netdev {
            Some(Netdev::Only(backend)) => options.netdev(backend),
            Some(Netdev::Auto) => options.netdev_auto(),
            None => options,
        };
        if let Some(name) = &self.device {
            options = options.device(name);
        }
        let ctx = options.open(address)?;
        out.note(format_args!(
            "device {} at {address}, {}",
            ctx.name(),
            ctx.query_device().chosen_because
        ));
        Ok(ctx)
    }
}

/// How long a client tries to reach a server that is not there yet.
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);
/// How long a connection to the server may say nothing.
const REQUEST_PATIENCE: Duration = Duration::from_secs(5);
/// How long each side waits for the next line of a peer that has only to answer.
const LINE_PATIENCE: Duration = Duration::from_secs(20);

/// A server that waits for its client.
pub struct Server {
    listener: TcpListener,
    /// Open already where the address was given.
    ctx: Option<Context>,
    net: NetArgs,
    out: Output,
}

impl Server {
    /// Opens the device, if its address is given, and listens.
    ///
    /// # Errors
    /// No device, or the TCP port is taken: the text says by whom.
    pub fn start(net: &NetArgs, out: Output) -> Result<Self, Failure> {
        let ctx = net.bind.map(|address| net.open(address, out)).transpose()?;
        let listener = address::listen(net.bind, net.port)?;
        match net.bind {
            Some(address) => out.note(format_args!("waiting for a client on TCP {address} port {}", net.port)),
            None => out.note(format_args!(
                "waiting for a client on TCP port {}; the device will be the one with the address by which it comes (--bind \
                 says another)",
                net.port
            )),
        }
        Ok(Self { listener, ctx, net: net.clone(), out })
    }

    /// Waits for a client of `command` and takes what it wants, unless that contradicts `given`: the options that were
    /// given here, by their names on the command line. Whoever does not speak our language is sent away.
    ///
    /// # Errors
    /// The client wants something else: it is told so, too.
    pub fn accept<Plan: DeserializeOwned>(
        self,
        command: &str,
        given: &impl Serialize,
    ) -> Result<(Session, Plan), Failure> {
        let (mut exchange, request) = self.next_request()?;
        let peer = exchange.peer();
        let plan = agreement::check(command, given, &request).and_then(|()| {
            serde_json::from_value(request.options).map_err(|error| {
                format!(
                    "the client's options are not understood here ({error}): use the same version on both sides"
                )
            })
        });
        let plan = plan.map_err(|why| refuse(&mut exchange, &why))?;
        let local = exchange.local()?.ip().to_canonical();
        let ctx = match self.ctx {
            Some(ctx) => ctx,
            None => self.net.open(local, self.out).inspect_err(|failure| {
                exchange.give_up(&format!("the server cannot serve at {local}: {failure}"));
            })?,
        };
        exchange.say(agreement::ACCEPTED)?;
        exchange.enter("making queue pairs");
        self.out.note(format_args!("client {peer}"));
        Ok((Session { ctx, exchange }, plan))
    }

    /// Waits for somebody who asks for something.
    fn next_request(&self) -> Result<(Exchange, Request), Failure> {
        loop {
            let mut exchange = Exchange::accept_from(&self.listener)?;
            exchange.enter("first words");
            exchange.set_patience(Some(REQUEST_PATIENCE));
            match exchange
                .hear()
                .map_err(|e| e.to_string())
                .and_then(|line| agreement::parse(&line))
            {
                Ok(request) => {
                    exchange.set_patience(Some(LINE_PATIENCE));
                    return Ok((exchange, request));
                }
                Err(why) => {
                    self.out
                        .note(format_args!("{} is no client of rocinante: {why}", exchange.peer()));
                    exchange.give_up("this is a rocinante server, and it does not understand that");
                }
            }
        }
    }
}

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
    let own = ctx.query_device();
    if let Some(wanted) = options.mtu {
        let (here, there) = (own.active_mtu, peer.mtu);
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
    qp.connect(peer, options).map_err(|(_, error)| error.into())
}

/// A connection between two processes of one command, and the device of this one.
#[derive(Debug)]
pub struct Session {
    /// The device.
    pub ctx: Context,
    /// The connection over TCP.
    pub exchange: Exchange,
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
        let opened = net.open(address, out);
        // Hardware has room for both.
        let shared = opened.as_ref().is_ok_and(|ctx| ctx.provider() == Provider::Hardware);
        if address == server.ip() && !shared {
            out.note(format_args!(
                "{address} is an address of this machine: the server must use another one (--bind at either side), \
                 or both will want UDP/4791 of the same"
            ));
        }
        let ctx = opened?;
        let mut exchange = Exchange::connect(server, CONNECT_PATIENCE)?;
        exchange.set_patience(Some(LINE_PATIENCE));
        exchange.enter("first words");
        exchange.say(&agreement::request(command, plan))?;
        agreement::accepted(&exchange.hear()?).map_err(|why| exchange.error(why))?;
        exchange.enter("making queue pairs");
        Ok(Self { ctx, exchange })
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
    pub fn swap(&mut self, hello: &Hello) -> Result<Hello, Failure> {
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
    pub fn connect_qp(
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

    /// The peer's address and TCP port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.exchange.peer()
    }
}
