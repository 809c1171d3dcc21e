//! A peer's process, and its role.

use std::fmt;
use std::io::Write;
use std::net::SocketAddr;
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use rocinante::ConnectOptions;
use rocinante::verbs::Mtu;
use rocinante_lab::{ChildGuard, Container};
use rocinante_tests::alone::myself;

use super::party::{PATIENCE, Party, RETRIES, TIMEOUT};

/// Makes a process of this program a peer: its [`Role`].
const ROLE: &str = "ROCINANTE_SOAK_PEER";

/// The role of a peer's process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Role {
    /// Its address, and the other side's.
    pub(super) own: SocketAddr,
    pub(super) survivor: SocketAddr,
    /// The number of its life.
    pub(super) life: u64,
    pub(super) options: Options,
}

/// The options of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Options {
    /// They outlast each trouble of the network.
    Patient,
    Default,
}

impl Options {
    pub(super) fn connect(self) -> ConnectOptions {
        match self {
            Self::Patient => {
                let options = ConnectOptions::default().mtu(Some(Mtu::Mtu1024));
                options.timeout(TIMEOUT).retry_cnt(RETRIES)
            }
            Self::Default => ConnectOptions::default(),
        }
    }
}

impl Role {
    pub(super) fn of_this_process() -> Option<Self> {
        let role = std::env::var(ROLE).ok()?;
        let [own, survivor, life, options] = role.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{role}")
        };
        let [own, survivor] = [own, survivor].map(|address| address.parse().unwrap());
        let options = if options == "Default" { Options::Default } else { Options::Patient };
        Some(Self { own, survivor, life: life.parse().unwrap(), options })
    }
}

/// As [`Role::of_this_process`] reads it.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { own, survivor, life, options } = self;
        write!(f, "{own} {survivor} {life} {options:?}")
    }
}

/// A peer's process.
pub(super) struct Process {
    pub(super) child: ChildGuard,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    /// Starts this program again in a container, with only the test `test`, as the peer `role`.
    pub(super) fn start(container: &Container, test: &str, role: &Role) -> Self {
        let mut command = myself(test);
        command.env(ROLE, role.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = container.spawn(&mut command).unwrap();
        let stdin = child.child_mut().stdin.take().unwrap();
        let lines = rocinante_lab::lines(child.child_mut().stdout.take().unwrap());
        Self { child, stdin, lines }
    }

    pub(super) fn is_alive(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "the peer ended by itself: {ended:?}");
    }

    /// The number of attempts for each lane, once the peer has all lanes.
    pub(super) fn is_ready(&mut self) -> Option<Vec<u64>> {
        self.is_alive();
        let line = self.lines.try_iter().find(|line| line.starts_with("ready "))?;
        Some(line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect())
    }

    pub(super) fn order(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").expect("it listens");
    }

    /// Both sides have sent all: now the connections may go.
    pub(super) fn end(mut self, party: &Party) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).expect("it never said that it was over");
            if line == "over" {
                break;
            }
        }
        party.disconnect();
        self.order("bye");
        let status = self.child.wait(PATIENCE).unwrap();
        assert!(status.success(), "the peer: {status}");
    }
}
