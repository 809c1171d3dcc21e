//! Many processes on one address, a third of which are killed in the middle: the others go on.
//! `cargo xtask dropin --kills`.

use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use rocinante_lab::{ChildGuard, Container, LabConfig, Pair};

use crate::install::Installation;
use crate::row::{ended, listens_on, succeeded};
use crate::{NOBODY, in_words};

/// Pairs of processes at once.
const PAIRS: u16 = 32;
/// The TCP ports at which they meet begin here.
const PORT: u16 = 20_000;
/// Messages of those that end, and of those that are killed: these would go on for minutes.
const MESSAGES: &str = "4000";
const WITHOUT_END: &str = "10000000";
/// How long they run before a third of them is killed.
const BEFORE: Duration = Duration::from_secs(1);
/// How long the others may take.
const LIMIT: Duration = Duration::from_secs(120);

/// The result of a round.
#[derive(Debug, Default)]
pub struct Round {
    /// Processes that were killed while they ran.
    pub killed: usize,
    /// Others that ended with 0, each byte compared.
    pub ended: usize,
    /// Errors of the others, and processes that had ended before they could be killed.
    pub failed: Vec<String>,
}

/// One round between two namespaces: ping-pongs of rdma-core that compare the received data, all on
/// one pair of addresses. The first pair, whose processes have the duties, and every third one are
/// killed. Error: the namespaces cannot be made, or a program does not start.
pub fn round(netdev: &str, installed: &Installation) -> Result<Round, String> {
    let lab = Pair::new(&LabConfig::default()).map_err(in_words)?;
    let [here, there] = lab.containers();
    let start = |place: &Container, nth: u16, more: &[&str]| -> Result<ChildGuard, String> {
        let messages = if is_to_die(nth) { WITHOUT_END } else { MESSAGES };
        let port = (PORT + nth).to_string();
        let words = ["ibv_rc_pingpong", "-c", "-e", "-g", "0", "-n", messages, "-p", &port];
        let mut command = installed.run(netdev, [&words[..], more].concat());
        if netdev == "udp" {
            command.uid(NOBODY).gid(NOBODY);
        }
        place.spawn(&mut command).map_err(in_words)
    };
    let servers = (0..PAIRS).map(|nth| start(there, nth, &[]));
    let mut servers = servers.collect::<Result<Vec<_>, _>>()?;
    for (nth, server) in (0..).zip(&mut servers) {
        listens_on(server, PORT + nth)?;
    }
    let address = there.ipv4().to_string();
    let clients = (0..PAIRS).map(|nth| start(here, nth, &[&address]));
    let clients = clients.collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(BEFORE);
    let (mut round, mut others) = (Round::default(), Vec::new());
    for (nth, (server, client)) in (0..).zip(servers.into_iter().zip(clients)) {
        for (side, mut process) in [("server", server), ("client", client)] {
            let name = format!("the {side} of pair {nth}");
            if !is_to_die(nth) {
                others.push((name, process));
            } else if matches!(process.try_wait(), Ok(None)) {
                process.kill();
                round.killed += 1;
            } else {
                round.failed.push(format!("{name} ended before it was killed"));
            }
        }
    }
    for (name, process) in others {
        match ended(&name, process, LIMIT).and_then(|output| succeeded(&name, &output)) {
            Ok(()) => round.ended += 1,
            Err(why) => round.failed.push(why),
        }
    }
    Ok(round)
}

const fn is_to_die(nth: u16) -> bool {
    nth.is_multiple_of(3)
}
