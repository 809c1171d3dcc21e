//! How long a client waits for a server that is not there yet.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use rocinante::VerbsError;
use rocinante::cm::{CmFailure, RejReason};
use rocinante::exchange::Exchange;

use super::address;
use super::own::Own;
use crate::output::{Output, Result};

/// Pause before the next attempt.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause before a name is looked up anew.
const RESOLVE_PAUSE: Duration = Duration::from_millis(500);
/// How long a client says nothing about its waiting.
const QUIET: Duration = Duration::from_secs(1);

/// The patience of a client: an option of every command with two sides.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Patience {
    /// How long the client waits for a server that is not there yet, in seconds; where the
    /// connection manager connects, both sides also wait so long for each later answer
    #[arg(long = "patience", value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
}

impl Patience {
    /// As a duration.
    #[must_use]
    pub const fn time(self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    /// Finds a server's address. A name that is not known yet, as that of a container that is about
    /// to start, may become known.
    pub fn resolve(
        self,
        host: &str,
        port: u16,
        bind: Option<&Own>,
        out: Output,
    ) -> Result<SocketAddr> {
        let (begin, mut said) = (Instant::now(), false);
        loop {
            let error = match (host, port).to_socket_addrs() {
                Ok(found) => return address::choose(host, &found.collect::<Vec<_>>(), bind),
                Err(error) => address::unknown(host, &error),
            };
            if begin.elapsed() + RESOLVE_PAUSE >= self.time() {
                return Err(error);
            }
            if !said {
                said = true;
                out.note(format_args!("{error}: trying for up to {} s (--patience)", self.seconds));
            }
            std::thread::sleep(RESOLVE_PAUSE);
        }
    }

    /// Connects to a server over TCP.
    pub fn reach(self, server: SocketAddr, out: Output) -> Result<Exchange, VerbsError> {
        let quiet = QUIET.min(self.time());
        let left = self.time() - quiet;
        match Exchange::connect(server, quiet) {
            Err(error) if !left.is_zero() => {
                self.tell(&error, out);
                Exchange::connect(server, left)
            }
            other => other,
        }
    }

    fn tell(self, error: &VerbsError, out: Output) {
        let why = match error {
            VerbsError::Exchange(why) => why.clone(),
            error => error.to_string(),
        };
        out.note(format_args!("{why}: trying for up to {} s (--patience)", self.seconds));
    }

    /// Calls `ask`, which asks a server once, with the time that is left, until the server answers
    /// or the time is over. The connection manager gives an attempt up after some 6.5 s, and
    /// rejects one that comes before the server listens. Error: the last rejection, if there was
    /// one; else the last error of `ask`.
    pub fn ask<T>(
        self,
        out: Output,
        mut ask: impl FnMut(Duration) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let (begin, time) = (Instant::now(), self.time());
        let (mut said, mut rejected) = (false, None);
        loop {
            let error = match ask(time.saturating_sub(begin.elapsed())) {
                Err(error) if is_of_absence(&error) => error,
                other => return other,
            };
            if !said && begin.elapsed() >= QUIET && begin.elapsed() < time {
                said = true;
                self.tell(&error, out);
            }
            // A rejection says more than the last attempt, which had little time.
            if !matches!(error, VerbsError::TimedOut) {
                rejected = Some(error);
            }
            if begin.elapsed() + PAUSE >= time {
                return Err(rejected.unwrap_or(VerbsError::TimedOut));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// What to look at after a client has waited in vain, to follow the error.
#[must_use]
pub const fn advice(error: &VerbsError) -> &'static str {
    match error {
        VerbsError::TimedOut => {
            ": no answer: is it the right address, and does the firewall between let UDP port 4791 \
             through? Packets do not survive a translation of addresses (NAT)"
        }
        _ => "",
    }
}

/// Whether the server may just not be there yet.
fn is_of_absence(error: &VerbsError) -> bool {
    let nobody = RejReason::INVALID_SERVICE_ID;
    match error {
        VerbsError::TimedOut => true,
        VerbsError::Cm(CmFailure::Rejected { reason, .. }) => *reason == nobody,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: Output = Output { json: true };

    #[test]
    fn an_attempt_that_times_out_is_made_anew_until_the_time_is_over() {
        let (patience, mut attempts) = (Patience { seconds: 3 }, 0);
        let begin = Instant::now();
        let result = patience.ask(OUT, |left| {
            attempts += 1;
            assert!(left <= Duration::from_secs(3));
            Err::<(), _>(VerbsError::TimedOut)
        });
        assert!(matches!(result, Err(VerbsError::TimedOut)) && attempts > 2);
        assert!((2..20).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
        // A rejection is remembered.
        let (reason, private_data) = (RejReason::INVALID_SERVICE_ID, Vec::new());
        let mut rejection = Some(VerbsError::Cm(CmFailure::Rejected { reason, private_data }));
        let result =
            patience.ask(OUT, |_| Err::<(), _>(rejection.take().unwrap_or(VerbsError::TimedOut)));
        assert!(matches!(result, Err(VerbsError::Cm(_))));
        // Another error is final.
        let mut attempts = 0;
        let result = patience.ask(OUT, |_| {
            attempts += 1;
            Err::<(), _>(VerbsError::Busy("it"))
        });
        assert!(matches!(result, Err(VerbsError::Busy(_))) && attempts == 1);
    }
}
