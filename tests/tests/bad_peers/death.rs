//! Peers that are killed: both are real programs.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{Addresses, PORT, SLACK, Trial, Victim, call, left_nothing, serve};

/// A command that would run for a long time.
struct DeathCase {
    command: &'static str,
    victim: Victim,
    /// The victim's error has one of these.
    words: &'static [&'static str],
    within: Duration,
}

/// A dead peer is noticed this soon if requests to it are outstanding, or if the connection to it
/// is watched and closes.
const SOON: Duration = Duration::from_secs(5);
/// A victim that only waits for packets waits this long.
const QUIET: Duration = Duration::from_secs(15);

/// On a busy machine the peer may die while the two still connect. Over the connection manager no
/// close is sent for a dead process, so the victim waits this long.
const CONNECTING: Duration = Duration::from_secs(20);

const DEAD: &[&str] = &["closed the connection", "RETRY_EXC_ERR", "within 15 s"];
/// The victim's error if the peer died while the two still connected.
const EARLY: [&str; 2] = ["within 20 s", "the time given is over"];

impl DeathCase {
    fn run(&self) -> Result<(), String> {
        let addresses = Addresses::new();
        let [own, there] = addresses.0;
        let (victim, mut other);
        match self.victim {
            Victim::Client => {
                other = serve(self.command, there);
                victim = call(self.command, own, there);
                other.says("client ");
            }
            Victim::Server => {
                let mut server = serve(self.command, own);
                other = call(self.command, there, own);
                server.says("client ");
                victim = server;
            }
        }
        std::thread::sleep(Duration::from_millis(700));
        other.child.kill();
        let begin = Instant::now();
        let done = victim.finish();
        let time = begin.elapsed();
        let by_cm = self.command.contains("--cm");
        let name = match self.victim {
            Victim::Client => SocketAddr::from((there, PORT)).to_string(),
            // The peer's port is not known here. Over TCP the peer has any local address.
            Victim::Server if by_cm => format!("{there}:"),
            Victim::Server => "127.0.0.1:".to_owned(),
        };
        if done.status != 1 || !done.err.contains(&format!("peer {name}")) {
            return Err(format!("status {}, after {time:?}: {}", done.status, done.err));
        }
        let early = by_cm && EARLY.iter().any(|words| done.err.contains(words));
        if !early && !self.words.iter().any(|word| done.err.contains(word)) {
            return Err(format!("none of {:?} in: {}", self.words, done.err));
        }
        if time > SLACK + if early { CONNECTING } else { self.within } {
            return Err(format!("it took {time:?}: {}", done.err));
        }
        left_nothing(own)
    }
}

pub(super) fn trials() -> Vec<Trial> {
    let commands = [
        ("pingpong -n 1000000000 -s 100", SOON),
        ("pingpong -e -n 1000000000 -s 100", SOON),
        ("perf write-bw -D 100", SOON),
        ("perf send-bw -D 100", SOON),
        ("perf send-bw -b -D 100", SOON),
        ("perf write-lat -D 100", SOON),
        ("perf read-lat -e -n 1000000000", SOON),
        ("perf atomic-lat -D 100", SOON),
        ("pingpong --cm -n 1000000000 -s 100", SOON),
        ("perf send-bw --cm -b -D 100 -q 2", SOON),
        ("perf write-bw --cm -D 100", QUIET),
        ("perf send-lat --cm -c UD -n 1000000000", QUIET),
        ("perf read-lat --cm -D 100", QUIET),
    ];
    let mut trials = Vec::new();
    for (command, within) in commands {
        for victim in [Victim::Client, Victim::Server] {
            let case = DeathCase { command, victim, words: DEAD, within };
            let name = format!("death of the peer of the {victim:?} of {command:?}");
            trials.push(Trial::new(name, move || case.run()));
        }
    }
    trials
}
