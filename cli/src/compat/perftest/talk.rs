//! The conversation of two perftest programs: each message is told by both, the client first. So each is a meeting point, too, and they
//! tell their queue pairs' keys again wherever they only want to meet.

use std::time::{Duration, Instant};

use rocinante::{Context, Mtu};

use super::message::{self, Keys, Report};
use crate::compat::wire::Wire;
use crate::output::Failure;
use crate::quiet::Quiet;

/// How long nothing may happen on the network while the peer is waited for.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// The same where messages may be lost: perftest's programs notice that nothing comes any more after one minute to two.
const PATIENCE_WITH_LOSSES: Duration = Duration::from_secs(130);

/// Larger than any message, and than any number of them: a report with more is none.
const SIZE_MAX: u64 = 1 << 31;
const ITERS_MAX: u64 = 1 << 48;

/// A connection to a perftest program, over TCP or a queue pair.
#[derive(Debug)]
pub struct Talk {
    wire: Wire,
    client: bool,
    /// The peer may be waiting for messages that were lost.
    loses: bool,
}

/// What both sides know of each other before they make queue pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// The peer's version.
    pub version: String,
    /// How many bytes the messages of a queue pair take in turn.
    pub cycle_buffer: u32,
    /// How far apart they are, at least.
    pub cache_line: u32,
    /// The path MTU.
    pub mtu: Mtu,
}

impl Talk {
    /// Over a connection on which nothing has been said.
    #[must_use]
    pub fn new(wire: Wire, client: bool) -> Self {
        Self { wire, client, loses: false }
    }

    /// From now on messages may be lost.
    pub fn expect_losses(&mut self) {
        self.loses = true;
    }

    /// How long nothing may happen on the network while the peer is waited for.
    fn patience(&self) -> Duration {
        if self.loses { PATIENCE_WITH_LOSSES } else { PATIENCE }
    }

    /// Why nothing more is heard, if messages may have been lost.
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

    /// Says what both sides do from now on, for errors.
    pub fn enter(&mut self, phase: &'static str) {
        self.wire.enter(phase);
    }

    /// What went wrong, with whom, and in which phase.
    pub fn failed(&self, what: impl std::fmt::Display) -> Failure {
        self.wire.failed(what)
    }

    /// Tells something and hears as much.
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

    /// Versions, pages, cache lines and path MTUs. `mtu` is the largest that this side takes.
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

    /// Tells of a queue pair and hears of the peer's.
    ///
    /// # Errors
    /// As [`swap`](Self::swap); the peer says something else.
    pub fn keys(&mut self, own: &Keys) -> Result<Keys, Failure> {
        const ADVICE: &str = "were both sides given the same test and the same -q?";
        if self.client {
            self.tell(own)?;
            return self.hear(ADVICE);
        }
        let theirs = self.hear(ADVICE)?;
        self.tell(own)?;
        Ok(theirs)
    }

    fn tell(&mut self, own: &Keys) -> Result<(), Failure> {
        if self.wire.is_managed() {
            return self.wire.send(&own.binary());
        }
        self.wire.send(&own.message())
    }

    fn hear(&mut self, advice: &str) -> Result<Keys, Failure> {
        let theirs = if self.wire.is_managed() {
            Keys::parse_binary(&self.wire.receive()?)
        } else {
            Keys::parse(&self.wire.receive()?)
        };
        theirs.map_err(|why| self.failed(format_args!("{why}: {advice}")))
    }

    /// Whether the peer has said something that was not read.
    #[must_use]
    pub fn has_heard(&mut self) -> bool {
        self.wire.is_ready()
    }

    /// Waits until the peer says something, and serves it meanwhile, as long as anything happens on the network, where that can be seen.
    ///
    /// # Errors
    /// Nothing happens.
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

    /// Meets the peer, who may be busy with the network still.
    ///
    /// # Errors
    /// As [`serve`](Self::serve) and [`keys`](Self::keys).
    pub fn meet(&mut self, ctx: &Context, own: &Keys) -> Result<(), Failure> {
        if self.client {
            self.tell(own)?;
            self.serve(ctx)?;
            return self.heard().map_err(|failure| self.doubt(failure));
        }
        self.serve(ctx)?;
        self.heard()?;
        self.tell(own)
    }

    fn heard(&mut self) -> Result<(), Failure> {
        self.hear("were both sides given the same test and options?").map(drop)
    }

    /// Tells what this side measured and hears what the peer did, who may be busy with the network still.
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

    /// Whether a peer that has measured told a result. One that has not tells whatever was in its memory.
    ///
    /// # Errors
    /// It is none.
    pub fn check(&self, theirs: &Report) -> Result<(), Failure> {
        if theirs.size <= SIZE_MAX && theirs.iters <= ITERS_MAX {
            return Ok(());
        }
        Err(self.failed(
            "what it told is no result: were both sides given the same test and the same -q, -a and -b?",
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
            self.heard()?;
            // Whoever has heard it may be gone before its acknowledgement is here.
            self.wire.set_patience(SOON);
            let _ = self.tell(own);
            return Ok(());
        }
        self.meet(ctx, own)?;
        // Whoever has closed already has heard enough.
        let _ = self.wire.send(message::DONE);
        self.wire.set_patience(SOON);
        let _ = self.wire.receive::<{ message::DONE.len() }>();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compat::wire::pair::connected;
    use std::io::{Read, Write};

    /// What a server says of a client with these words; each of its own messages is read and thrown away.
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
        let ctx = rocinante::OpenOptions::new().netdev(rocinante::Backend::Udp).open(here).unwrap();
        let heard = Talk::new(wire, true).report(&ctx, &Report::default()).unwrap();
        assert_eq!(heard, server.join().unwrap());
    }
}
