//! Peers that say wrong things, or the right things at the wrong time, or nothing. Their victim
//! ends in time, with an error that names the peer and the phase, and leaves nothing behind.
//!
//! Each message of the exchange is left out, cut, dripped, garbled or contradicted, at the client
//! and at the server. After a good exchange, the packets are wrong, or end.

mod death;
mod packets;
mod proxy;
mod words;

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use proxy::Fault;
use rocinante_tests::running::{Done, Running};
use rocinante_tests::unique;

/// The TCP port of all servers here.
const PORT: u16 = 18_515;
/// Time for a busy machine, added to a program's own limit.
const SLACK: Duration = Duration::from_secs(60);
/// Number of trials at a time: those that wait for something that never comes, and all others.
const WAITERS: usize = 90;
const WORKERS: usize = 12;

/// The program under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Client,
    Server,
}

/// Two programs with a proxy between them.
#[derive(Debug, Clone)]
struct Case {
    victim: Victim,
    /// The victim's command, and that of the other program.
    commands: [&'static str; 2],
    /// Number of the message to the victim that the fault replaces.
    at: usize,
    fault: Fault,
    /// Words of the victim's error, besides the peer's address.
    words: Vec<&'static str>,
    /// How long the victim may take.
    within: Duration,
}

/// Addresses on loopback that are used by nothing else as long as this lives.
struct Addresses<const N: usize>([Ipv4Addr; N]);

/// Addresses that were given back. The oldest is taken first, and only when there is no new one: a
/// process that is being started holds the sockets of this one for a moment.
static FREE: Mutex<(u32, VecDeque<Ipv4Addr>)> = Mutex::new((0, VecDeque::new()));
/// The number of addresses of a process.
const ADDRESSES: u32 = 190;

impl<const N: usize> Addresses<N> {
    fn new() -> Self {
        loop {
            let mut free = FREE.lock().unwrap();
            while free.0 < ADDRESSES && free.1.len() < N {
                free.0 += 1;
                free.1.push_back(unique::loopback());
            }
            if free.1.len() >= N {
                return Self([(); N].map(|()| free.1.pop_front().expect("the pool has them")));
            }
            drop(free);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl<const N: usize> Drop for Addresses<N> {
    fn drop(&mut self) {
        FREE.lock().unwrap().1.extend(self.0);
    }
}

fn rocinante(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-under-test"));
    command.args(line.split_whitespace()).env_remove("ROCINANTE_NETDEV").stdin(Stdio::null());
    command
}

/// A server that waits on `address`.
fn serve(command: &str, address: Ipv4Addr) -> Running {
    let line = format!("{command} --netdev udp --bind {address}");
    Running::start(&mut rocinante(&line)).that_waits()
}

fn call(command: &str, address: Ipv4Addr, server: Ipv4Addr) -> Running {
    Running::start(&mut rocinante(&format!("{command} --netdev udp --bind {address} {server}")))
}

impl Case {
    fn run(&self) -> Result<(), String> {
        let addresses = Addresses::new();
        let [own, there] = addresses.0;
        // The proxy listens at the address of the program that is not the victim.
        let listener = TcpListener::bind((there, 0)).unwrap();
        let middle = listener.local_addr().unwrap();
        let to_middle = |command| format!("{command} -p {}", middle.port());
        let (victim, other, at_victim, at_other, peer);
        match self.victim {
            Victim::Client => {
                other = serve(self.commands[1], there);
                victim = call(&to_middle(self.commands[0]), own, there);
                at_victim = proxy::accept(&listener);
                at_other = proxy::reach((there, PORT).into());
                peer = middle;
            }
            Victim::Server => {
                victim = serve(self.commands[0], own);
                other = call(&to_middle(self.commands[1]), there, there);
                at_other = proxy::accept(&listener);
                at_victim = proxy::reach((own, PORT).into());
                peer = at_victim.local_addr().unwrap();
            }
        }
        let begin = Instant::now();
        let (at, fault) = (self.at, self.fault.clone());
        std::thread::spawn(move || proxy::between(at_victim, at_other, at, &fault));
        let done = victim.finish();
        let time = begin.elapsed();
        // The other program's result does not count.
        drop(other);
        self.verdict(&done, peer, own, time)
    }

    fn verdict(
        &self,
        done: &Done,
        peer: SocketAddr,
        own: Ipv4Addr,
        time: Duration,
    ) -> Result<(), String> {
        failed(done, peer, &self.words)?;
        if time > self.within + SLACK {
            return Err(format!("it took {time:?}: {}", done.err));
        }
        left_nothing(own)
    }
}

/// Checks that the command failed and named the peer and all of `words`.
fn failed(done: &Done, peer: SocketAddr, words: &[&str]) -> Result<(), String> {
    let text = format!("status {}: {}{}", done.status, done.out, done.err);
    if done.status != 1 {
        return Err(text);
    }
    let peer = format!("peer {peer}, ");
    for word in [peer.as_str()].iter().chain(words) {
        if !done.err.contains(word) {
            return Err(format!("no {word:?} in {text}"));
        }
    }
    Ok(())
}

/// Checks that the command's port and address are free again.
fn left_nothing(own: Ipv4Addr) -> Result<(), String> {
    UdpSocket::bind((own, 4791)).map_err(|error| format!("UDP/4791: {error}"))?;
    match TcpStream::connect((own, PORT)) {
        Ok(_) => Err("a server still listens".into()),
        Err(_) => Ok(()),
    }
}

/// A run that must end in an error.
struct Trial {
    name: String,
    run: Box<dyn Fn() -> Result<(), String> + Send>,
}

impl Trial {
    fn new(name: String, run: impl Fn() -> Result<(), String> + Send + 'static) -> Self {
        Self { name, run: Box::new(run) }
    }
}

/// Runs all trials, many at a time, and names those that did not end as they should.
#[track_caller]
fn run_all(workers: usize, mut trials: Vec<Trial>) {
    let total = trials.len();
    trials.reverse();
    let (trials, wrong) = (Mutex::new(trials), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..workers.min(total) {
            scope.spawn(|| {
                loop {
                    let Some(trial) = trials.lock().unwrap().pop() else { return };
                    let guarded = std::panic::AssertUnwindSafe(|| (trial.run)());
                    let result = std::panic::catch_unwind(guarded)
                        .unwrap_or_else(|_| Err("it panicked, as it says above".into()));
                    if let Err(why) = result {
                        wrong.lock().unwrap().push(format!("{}: {why}", trial.name));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {total}:\n{}", wrong.len(), wrong.join("\n\n"));
}

/// Nothing useful comes from these peers: the victim gives them up in time. All run at once, as
/// they only wait.
#[test]
fn a_silent_peer_is_given_up() {
    let mut trials = packets::trials();
    trials.extend(death::trials());
    trials.extend(words::silences());
    assert!(trials.len() > 90, "{} trials are not all", trials.len());
    run_all(WAITERS, trials);
}

#[test]
fn a_peer_that_closes_or_sends_nonsense_is_named_at_once() {
    let mut trials = words::nonsense();
    trials.extend(words::requests());
    trials.extend(words::contradictions());
    assert!(trials.len() > 110, "{} trials are not all", trials.len());
    run_all(WORKERS, trials);
}
