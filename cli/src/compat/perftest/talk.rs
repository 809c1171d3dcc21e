//! The conversation of two perftest programs. Both sides send each message, the client first. So
//! each message is also a barrier, and the sides send their queue pairs' keys again where they need
//! only a barrier ("meet").

use std::time::{Duration, Instant};

use rocinante::Context;
use rocinante::verbs::Mtu;

use super::message::{self, Keys, Report};
use crate::compat::wire::Wire;
use crate::output::Failure;
use crate::quiet::Quiet;

/// Longest time without traffic on the network while this side waits for the peer.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// The same where messages may be lost. perftest's programs notice missing messages only after one
/// to two minutes.
const PATIENCE_WITH_LOSSES: Duration = Duration::from_secs(130);

/// Upper limits of message sizes and of their numbers. A report with larger ones is invalid.
const SIZE_MAX: u64 = 1 << 31;
const ITERS_MAX: u64 = 1 << 48;

/// A connection to a perftest program, over TCP or a queue pair.
#[derive(Debug)]
pub struct Talk {
    wire: Wire,
    client: bool,
    /// Whether the peer may wait for messages that were lost.
    loses: bool,
}

/// What both sides agree on before they create queue pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// The peer's version.
    pub version: String,
    /// The messages of a queue pair cycle through this many bytes.
    pub cycle_buffer: u32,
    /// Smallest distance between two messages, in bytes.
    pub cache_line: u32,
    /// The path MTU.
    pub mtu: Mtu,
}

impl Talk {
    /// A conversation over a new connection.
    #[must_use]
    pub fn new(wire: Wire, client: bool) -> Self {
        Self { wire, client, loses: false }
    }

    /// Tells that messages may be lost from now on.
    pub fn expect_losses(&mut self) {
        self.loses = true;
    }

    /// Longest time without traffic on the network while this side waits for the peer.
    fn patience(&self) -> Duration {
        if self.loses { PATIENCE_WITH_LOSSES } else { PATIENCE }
    }

    /// Adds to a failure that messages may have been lost.
    fn doubt(&self, failure: Failure) -> Failure {
        if !self.loses {
            return failure;
        }
        Failure::Failed(format!(
            "{failure}; if messages were lost on their way there, perftest's program has waited for them for two minutes, and then given up"
        ))
    }

    /// The connection.
    #[must_use]
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Names the phase that both sides enter, for errors.
    pub fn enter(&mut self, phase: &'static str) {
        self.wire.enter(phase);
    }

    /// An error that names the peer and the phase.
    pub fn failed(&self, what: impl std::fmt::Display) -> Failure {
        self.wire.failed(what)
    }

    /// Exchanges a message with the peer: sends one and receives one of the same length.
    ///
    /// # Errors
    /// The peer goes, or stays silent.
    pub fn swap<const N: usize>(&mut self, own: &[u8; N]) -> Result<[u8; N], Failure> {
        if self.client {
            self.wire.send(own)?;
            return self.wire.receive();
        }
        let theirs = self.wire.receive()?;
        self.wire.send(own)?;
        Ok(theirs)
    }

    /// Exchanges versions, pages, cache lines and path MTUs. `mtu` is the largest that this side
    /// takes.
    ///
    /// # Errors
    /// As [`swap`](Self::swap); the peer says something else, or is too old.
    pub fn agree(
        &mut self,
        cycle_buffer: u32,
        cache_line: u32,
        mtu: Mtu,
    ) -> Result<Terms, Failure> {
        self.enter("telling versions");
        let version = self.swap(message::VERSION)?;
        let version = message::version(&version).map_err(|why| self.failed(why))?;
        self.enter("agreeing on memory and path MTU");
        let theirs = self.swap(&cycle_buffer.to_be_bytes())?;
        let their_buffer = message::cycle_buffer(theirs).map_err(|why| self.failed(why))?;
        let theirs = self.swap(&cache_line.to_be_bytes())?;
        let their_line = message::cache_line(theirs).map_err(|why| self.failed(why))?;
        let theirs = self.swap(&message::mtu_message(mtu))?;
        let their_mtu = message::mtu(theirs).map_err(|why| self.failed(why))?;
        Ok(Terms {
            version,
            cycle_buffer: cycle_buffer.max(their_buffer),
            cache_line: cache_line.max(their_line),
            mtu: mtu.min(their_mtu),
        })
    }

    /// Exchanges the keys of a queue pair with the peer.
    ///
    /// # Errors
    /// As [`swap`](Self::swap); the peer says something else.
    pub fn keys(&mut self, own: &Keys) -> Result<Keys, Failure> {
        const ADVICE: &str = "were both sides given the same test and the same -q?";
        if self.client {
            self.send_keys(own)?;
            return self.receive_keys(ADVICE);
        }
        let theirs = self.receive_keys(ADVICE)?;
        self.send_keys(own)?;
        Ok(theirs)
    }

    fn send_keys(&mut self, own: &Keys) -> Result<(), Failure> {
        if self.wire.is_managed() {
            return self.wire.send(&own.binary());
        }
        self.wire.send(&own.message())
    }

    fn receive_keys(&mut self, advice: &str) -> Result<Keys, Failure> {
        let theirs = if self.wire.is_managed() {
            Keys::parse_binary(&self.wire.receive()?)
        } else {
            Keys::parse(&self.wire.receive()?)
        };
        theirs.map_err(|why| self.failed(format_args!("{why}: {advice}")))
    }

    /// Whether a message of the peer is unread.
    #[must_use]
    pub fn has_message(&mut self) -> bool {
        self.wire.is_ready()
    }

    /// Waits for a message of the peer, and drives the device meanwhile. Waits as long as there is
    /// traffic on the network, where that can be seen.
    ///
    /// # Errors
    /// There was no traffic for too long.
    pub fn serve(&mut self, ctx: &Context) -> Result<(), Failure> {
        const LOOKS: u32 = 256;
        const PAUSE: Duration = Duration::from_millis(200);
        let patience = self.patience();
        let mut quiet = Quiet::new(ctx, patience);
        let mut looked = Instant::now();
        while !self.wire.is_ready() {
            for _ in 0..LOOKS {
                ctx.progress();
                std::hint::spin_loop();
            }
            std::thread::yield_now();
            let now = Instant::now();
            if now - looked < PAUSE {
                continue;
            }
            looked = now;
            if !quiet.goes_on() {
                return Err(self.failed(format_args!(
                    "nothing came from it within {} s, neither packets nor words: has its program stopped?",
                    patience.as_secs()
                )));
            }
        }
        Ok(())
    }

    /// Meets the peer, which may still be busy with the network.
    ///
    /// # Errors
    /// As [`serve`](Self::serve) and [`keys`](Self::keys).
    pub fn meet(&mut self, ctx: &Context, own: &Keys) -> Result<(), Failure> {
        if self.client {
            self.send_keys(own)?;
            self.serve(ctx)?;
            return self.await_keys().map_err(|failure| self.doubt(failure));
        }
        self.serve(ctx)?;
        self.await_keys()?;
        self.send_keys(own)
    }

    fn await_keys(&mut self) -> Result<(), Failure> {
        self.receive_keys("were both sides given the same test and options?").map(drop)
    }

    /// Exchanges results with the peer, which may still be busy with the network.
    ///
    /// # Errors
    /// As [`serve`](Self::serve) and [`swap`](Self::swap).
    pub fn report(&mut self, ctx: &Context, own: &Report) -> Result<Report, Failure> {
        let mut parts = own.parts();
        if !self.client {
            self.serve(ctx)?;
        }
        for (index, part) in parts.iter_mut().enumerate() {
            if self.client && index == 0 {
                self.wire.send(part)?;
                self.serve(ctx)?;
                *part = self.wire.receive()?;
            } else {
                *part = self.swap(part)?;
            }
        }
        Ok(Report::of(parts))
    }

    /// Checks the result of a peer that has measured. A peer that has not measured sends the
    /// contents of uninitialised memory.
    ///
    /// # Errors
    /// The result is invalid.
    pub fn check(&self, theirs: &Report) -> Result<(), Failure> {
        if theirs.size <= SIZE_MAX && theirs.iters <= ITERS_MAX {
            return Ok(());
        }
        Err(self.failed(
            "its result is out of range: were both sides given the same test and the same -q, -a and -b?",
        ))
    }

    /// Ends the conversation.
    ///
    /// # Errors
    /// As [`meet`](Self::meet).
    pub fn close(mut self, ctx: &Context, own: &Keys) -> Result<(), Failure> {
        const SOON: Duration = Duration::from_secs(1);
        self.enter("closing");
        if self.wire.is_managed() {
            if self.client {
                return self.meet(ctx, own);
            }
            self.serve(ctx)?;
            self.await_keys()?;
            // The peer may leave after it received this message, before its acknowledgement
            // arrives.
            self.wire.set_patience(SOON);
            let _ = self.send_keys(own);
            return Ok(());
        }
        self.meet(ctx, own)?;
        // The peer needs no more messages if it has closed the connection already.
        let _ = self.wire.send(message::DONE);
        self.wire.set_patience(SOON);
        let _ = self.wire.receive::<{ message::DONE.len() }>();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rocinante::OpenOptions;
    use rocinante::device::Backend;

    use super::*;
    use crate::compat::wire::pair::connected;
    use std::io::{Read, Write};

    /// The server's answer to a client that sends `words`. The server's own messages are thrown
    /// away.
    fn agreed(words: &[u8]) -> Result<Terms, String> {
        let (mut wire, mut other) = connected();
        wire.set_patience(Duration::from_millis(100));
        other.write_all(words).unwrap();
        let terms = Talk::new(wire, false).agree(4096, 64, Mtu::Mtu4096);
        let mut own = Vec::new();
        let _ = other.read_to_end(&mut own);
        terms.map_err(|failure| failure.to_string())
    }

    #[test]
    fn the_larger_memory_and_the_smaller_path_mtu_hold() {
        let words = [&message::VERSION[..], &[0, 1, 0, 0], &[0, 0, 0, 64], b"3\0"].concat();
        let terms = agreed(&words).unwrap();
        assert_eq!((terms.cycle_buffer, terms.cache_line), (65_536, 64));
        assert_eq!((terms.mtu, terms.version.as_str()), (Mtu::Mtu1024, "6.06"));
    }

    #[test]
    fn bad_peers_are_named_with_the_phase() {
        let version = &message::VERSION[..];
        for (words, phase, word) in [
            (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], "telling versions", "SSH-2.0-OpenSSH"),
            (&version[..5], "telling versions", "5 bytes of a message of 16"),
            (&[version, &[255; 8]].concat(), "agreeing on memory", "pages of 4294967295"),
            (&[version, &[0, 0, 16, 0, 1, 0, 0, 0]].concat(), "agreeing on memory", "cache lines"),
            (&[version, &[0, 0, 16, 0, 0, 0, 0, 64, b'9', 0]].concat(), "path MTU", "\"9?\""),
            (&[version, &[0, 0, 16]].concat(), "agreeing on memory", "3 bytes of a message of 4"),
        ] {
            let why = agreed(words).unwrap_err();
            assert!(why.starts_with("peer 127.0.0.1:"), "{why}");
            assert!(why.contains(phase) && why.contains(word), "{why}");
        }
    }

    #[test]
    fn both_sides_tell_each_other_what_they_measured() {
        let (wire, other) = connected();
        let server = std::thread::spawn(move || {
            let mut other = other;
            let report = Report { size: 8, iters: 9, peak: 3.0, average: 2.0, rate: 1.0 };
            for own in report.parts() {
                let mut theirs = [0; 8];
                other.read_exact(&mut theirs).unwrap();
                other.write_all(&own).unwrap();
            }
            report
        });
        let (here, _) = rocinante::doc::addresses();
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(here).unwrap();
        let received = Talk::new(wire, true).report(&ctx, &Report::default()).unwrap();
        assert_eq!(received, server.join().unwrap());
    }
}
