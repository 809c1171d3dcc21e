//! The server of two processes.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use rocinante::exchange::Exchange;
use rocinante::{Context, VerbsError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agreement::{self, Request};
use super::door::Door;
use super::listeners::Listeners;
use super::own::Own;
use super::{LINE_PATIENCE, NetArgs, REQUEST_PATIENCE, Session, address, enter, refuse};
use crate::ending;
use crate::output::{Output, Result};

/// The listener for clients.
enum Waits {
    Tcp(TcpListener),
    Cm(Arc<Listeners>),
}

/// Pause of a server that could not serve its client.
const PAUSE: Duration = Duration::from_millis(100);

/// A server that waits for its client.
pub struct Server {
    listener: Waits,
    /// The device, open already if its address was given and clients come over TCP.
    ctx: Option<Context>,
    net: NetArgs,
    out: Output,
}

impl Server {
    /// Listens, and opens the device first if its address is given. Error: there is no device, or
    /// the TCP port is taken. The text names the process that has the port.
    pub fn start(net: &NetArgs, out: Output) -> Result<Self> {
        if net.cm {
            return Self::start_cm(net, out);
        }
        let bind = net.bind.as_ref().and_then(Own::only);
        let ctx = bind.map(|address| net.open(address, out)).transpose()?;
        let listener = Waits::Tcp(address::listen(bind, net.port)?);
        match bind {
            Some(address) => out.note(format_args!("waiting for a client on TCP {address} port {}", net.port)),
            None if net.bind.is_some() => out.note(format_args!(
                "waiting for a client on TCP port {}, by the addresses of {}",
                net.port,
                net.bind.as_ref().map_or("", Own::name)
            )),
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
    fn start_cm(net: &NetArgs, out: Output) -> Result<Self> {
        let listeners = Listeners::open(&net.device, net.bind.as_ref(), net.port, out)?;
        let place = listeners.place();
        out.note(format_args!("waiting for a client on {place} of the connection manager"));
        Ok(Self { listener: Waits::Cm(Arc::new(listeners)), ctx: None, net: net.clone(), out })
    }

    /// Calls `one`, which accepts and serves a client; with `--persistent` again and again, until a
    /// signal comes. The report of each client is then a result of its own. Error: the error of
    /// `one`, but with `--persistent` only that of a signal.
    pub fn serve<T: Serialize>(&self, one: impl Fn() -> Result<T>) -> Result<T> {
        loop {
            let served = one();
            if !self.net.persistent {
                return served;
            }
            match served {
                Ok(report) if self.out.json => {
                    self.out.result(ending::object(&report));
                }
                Ok(_) => {}
                Err(failure) if ending::signal().is_some() => return Err(failure),
                Err(failure) => {
                    self.out.note(format_args!("not served: {failure}"));
                    // Limits the rate of these notes where each client fails.
                    std::thread::sleep(PAUSE);
                }
            }
            ending::check_signal()?;
            ending::forget();
            self.out.note("waiting for the next client");
        }
    }

    /// Waits for a client of `command` and takes its plan. The plan must not contradict `given`:
    /// the options of this side, by their names on the command line. Closes connections of other
    /// programs. Error: the client wants something else. It gets the reason, too.
    pub fn accept<Plan: DeserializeOwned>(
        &self,
        command: &str,
        given: &impl Serialize,
    ) -> Result<(Session, Plan)> {
        let (mut exchange, came_to, request) = self.next_request()?;
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
        if let Some(own) = self.net.bind.as_ref().filter(|own| !own.has(local)) {
            let why =
                format!("the server was given --bind {}, which does not have {local}", own.name());
            return Err(refuse(&mut exchange, &why));
        }
        let ctx = match came_to.or_else(|| self.ctx.clone()) {
            Some(ctx) => ctx,
            None => self.net.open(local, self.out).inspect_err(|failure| {
                exchange.give_up(&format!("the server cannot serve at {local}: {failure}"));
            })?,
        };
        ending::opened(&ctx);
        exchange.say(agreement::ACCEPTED)?;
        enter(&mut exchange, "making queue pairs");
        self.out.note(format_args!("client {peer}"));
        let door = match &self.listener {
            Waits::Tcp(_) => None,
            Waits::Cm(all) => Some(Door::new(Arc::clone(all)).map_err(VerbsError::Io)?),
        };
        Ok((Session { ctx, exchange, door, claimed: None }, plan))
    }

    /// Waits for a client with a valid request. Returns also the device that it came to.
    fn next_request(&self) -> Result<(Exchange, Option<Context>, Request)> {
        // A client that gets no answer asks again and again.
        let mut noted = String::new();
        loop {
            ending::enter("waiting for a client");
            let (mut exchange, came_to) = match self.next_exchange()? {
                Ok(come) => come,
                Err(why) => {
                    let why = why.to_string();
                    if why != noted {
                        self.out.note(&why);
                        noted = why;
                    }
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
                    return Ok((exchange, came_to, request));
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
    fn next_exchange(&self) -> Result<Result<(Exchange, Option<Context>), VerbsError>> {
        let listeners = match &self.listener {
            Waits::Tcp(listener) => return Ok(Ok((Exchange::accept_from(listener)?, None))),
            Waits::Cm(listeners) => listeners,
        };
        let (ctx, request) = listeners.wait()?;
        let exchange = Exchange::accept_cm(ctx, request);
        Ok(exchange.map(|exchange| (exchange, Some(ctx.clone()))))
    }
}
