//! The server of two processes.

use std::net::{SocketAddr, TcpListener};

use rocinante::{Context, Exchange, VerbsError, cm};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agreement::{self, Request};
use super::door::Door;
use super::{LINE_PATIENCE, NetArgs, REQUEST_PATIENCE, Session, address, enter, refuse};
use crate::ending;
use crate::output::{Failure, Output};

/// The listener for clients.
enum Waits {
    Tcp(TcpListener),
    Cm(cm::Listener),
}

/// Requests that may wait at the connection manager's listener.
const BACKLOG: usize = 128;

/// A server that waits for its client.
pub struct Server {
    listener: Waits,
    /// The device, open already if its address was given.
    ctx: Option<Context>,
    net: NetArgs,
    out: Output,
}

impl Server {
    /// Listens, and opens the device first if its address is given.
    ///
    /// # Errors
    /// There is no device, or the TCP port is taken. The text names the process that has the port.
    pub fn start(net: &NetArgs, out: Output) -> Result<Self, Failure> {
        if net.cm {
            return Self::start_cm(net, out);
        }
        let ctx = net.bind.map(|address| net.device.open(address, out)).transpose()?;
        let listener = Waits::Tcp(address::listen(net.bind, net.port)?);
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

    /// Starts a server of the connection manager. Clients connect to a device there, so the device
    /// must be open.
    fn start_cm(net: &NetArgs, out: Output) -> Result<Self, Failure> {
        let address = net.bind.map_or_else(address::only, Ok)?;
        let ctx = net.device.open(address, out)?;
        let listener = cm::Listener::bind(&ctx, SocketAddr::new(address, net.port), BACKLOG)?;
        out.note(format_args!(
            "waiting for a client on {address} port {} of the connection manager",
            net.port
        ));
        Ok(Self { listener: Waits::Cm(listener), ctx: Some(ctx), net: net.clone(), out })
    }

    /// Waits for a client of `command` and takes its plan. The plan must not contradict `given`:
    /// the options of this side, by their names on the command line. Closes connections of other
    /// programs.
    ///
    /// # Errors
    /// The client wants something else. It gets the reason, too.
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
            None => self.net.device.open(local, self.out).inspect_err(|failure| {
                exchange.give_up(&format!("the server cannot serve at {local}: {failure}"));
            })?,
        };
        exchange.say(agreement::ACCEPTED)?;
        enter(&mut exchange, "making queue pairs");
        self.out.note(format_args!("client {peer}"));
        let door = match self.listener {
            Waits::Tcp(_) => None,
            Waits::Cm(listener) => Some(Door::new(listener).map_err(VerbsError::Io)?),
        };
        Ok((Session { ctx, exchange, door }, plan))
    }

    /// Waits for a client with a valid request.
    fn next_request(&self) -> Result<(Exchange, Request), Failure> {
        loop {
            ending::enter("waiting for a client");
            let mut exchange = match self.next_exchange()? {
                Ok(exchange) => exchange,
                Err(why) => {
                    self.out.note(why);
                    continue;
                }
            };
            enter(&mut exchange, "first words");
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

    /// Waits for a connection, which may be of another program.
    fn next_exchange(&self) -> Result<Result<Exchange, VerbsError>, Failure> {
        Ok(match (&self.listener, &self.ctx) {
            (Waits::Cm(listener), Some(ctx)) => Exchange::accept_cm(ctx, listener.request(None)?),
            (Waits::Cm(_), None) => return Err(Failure::Failed("no device is open".into())),
            (Waits::Tcp(listener), _) => Ok(Exchange::accept_from(listener)?),
        })
    }
}
