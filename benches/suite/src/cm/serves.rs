//! The server.

use std::time::{Duration, Instant};

use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante::exchange::Exchange;

use super::{Args, Maker, Plan, address, grown, holdings};
use rocinante_cli::output::{Failure, Output, Result};

/// Longest time without progress.
const SILENCE: Duration = Duration::from_secs(20);
/// Rounds between two looks at the client's messages.
const ROUNDS: u32 = 256;

/// Serves one client.
pub(super) fn serve(args: &Args, out: Output) -> Result {
    let local = args.bind.map_or_else(address::only, Ok)?;
    let ctx = args.device.open(local, out)?;
    let listener = Listener::bind(&ctx, args.at(local), 4096)?;
    out.note(format_args!("waiting for a client on {}", listener.address()));
    let mut exchange = loop {
        match Exchange::accept_cm(&ctx, listener.request(None)?) {
            Ok(exchange) => break exchange,
            Err(why) => out.note(why),
        }
    };
    exchange.set_patience(Some(SILENCE));
    let plan = exchange.hear()?;
    let plan: Plan = serde_json::from_str(&plan).map_err(|error| {
        exchange.error(format_args!("its plan is none: {error}: use the same version"))
    })?;
    let plan = plan.check()?;
    let mut server = Server {
        listener,
        maker: Maker::new(&ctx, plan.depth)?,
        making: Vec::new(),
        made: Vec::new(),
    };
    server.until(&mut exchange, "ready")?;
    let before = holdings()?;
    exchange.say("ready")?;
    server.until(&mut exchange, "held")?;
    server.until_there_are(plan.connections as usize)?;
    let memory = grown(before, plan.connections)?;
    exchange.say("held")?;
    exchange.say(&serde_json::to_string(&memory).expect("figures are JSON"))?;
    server.until(&mut exchange, "released")?;
    server.until_there_are(0)?;
    exchange.say("released")?;
    server.until(&mut exchange, "made and ended")?;
    server.until_there_are(0)?;
    exchange.say("made and ended")?;
    let repeated = ctx.cm_counters().map_or(0, |counters| counters.repeated);
    Ok(exchange.say(&repeated.to_string())?)
}

struct Server {
    listener: Listener,
    maker: Maker,
    making: Vec<Connecting>,
    made: Vec<Connection>,
}

impl Server {
    /// Accepts every connection until the client says `words`.
    fn until(&mut self, exchange: &mut Exchange, words: &str) -> Result {
        let mut rounds = 0u32;
        let mut active = Instant::now();
        loop {
            if self.round()? {
                active = Instant::now();
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(ROUNDS) {
                continue;
            }
            match exchange.try_hear()? {
                Some(line) if line == words => return Ok(()),
                Some(line) => {
                    return Err(exchange
                        .error(format_args!("it says {line:?}, not {words:?}"))
                        .into());
                }
                None if active.elapsed() > SILENCE => {
                    return Err(exchange.error("it makes no connections, and says nothing").into());
                }
                None => {}
            }
        }
    }

    /// Continues until there are `count` connections and none is being made.
    fn until_there_are(&mut self, count: usize) -> Result {
        let begin = Instant::now();
        while !self.making.is_empty() || self.made.len() != count {
            self.round()?;
            if begin.elapsed() > SILENCE {
                return Err(Failure::Failed(format!(
                    "there are {} connections and {} that are being made, and there should be {count}",
                    self.made.len(),
                    self.making.len()
                )));
            }
        }
        Ok(())
    }

    /// Drives everything once. Returns whether something changed.
    fn round(&mut self) -> Result<bool> {
        self.maker.ctx.progress();
        let before = (self.making.len(), self.made.len());
        while let Some(request) = self.listener.try_request()? {
            self.making.push(request.accept(self.maker.make()?, &Params::default())?);
        }
        let mut at = 0;
        while let Some(connecting) = self.making.get_mut(at) {
            if let Some(connection) = connecting.try_finish()? {
                self.made.push(connection);
                self.making.swap_remove(at);
            } else {
                at += 1;
            }
        }
        self.made.retain(|connection| !connection.is_disconnected());
        Ok((self.making.len(), self.made.len()) != before)
    }
}
