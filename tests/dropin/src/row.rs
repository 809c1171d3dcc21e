//! Runs a row.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, Container, LabConfig, LabError, Pair};

use crate::install::Installation;
use crate::table::{self, Row, Says, Shape};
use crate::{NOBODY, Outcome, in_words, programs};

/// How long a program may take.
const LIMIT: Duration = Duration::from_secs(400);
/// How often a program is tried whose messages may be lost, and how long it may take then.
const TRIES: u32 = 3;
const LIMIT_LOSING: Duration = Duration::from_secs(30);
/// How long a server may take until it listens, or ends after its client.
const PATIENCE: Duration = Duration::from_secs(20);
/// The TCP port at which ping-pongs and perftest meet.
const PORT: u16 = 18515;
/// How long the client of a pair may take.
const LIMIT_PAIR: Duration = Duration::from_secs(60);
/// UDP port 4791 in /proc/net/udp.
const ROCE: &str = ":12B7 ";
/// An address and the state of a socket that listens to all, there.
const LISTENS_TO_ALL: &str = " 00000000:0000 0A ";
const LISTENS_TO_ALL_IPV6: &str = " 00000000000000000000000000000000:0000 0A ";
/// Debian's library that makes sockets of TCP those of rsockets.
const RSOCKET: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so.1";
/// The state of a socket that listens, in /proc/net/tcp (`TCP_LISTEN` of Linux).
const LISTENS: &str = "0A";

/// The output of ibv_asyncwatch after each change of the network: the numbers of
/// `enum ibv_event_type`, `IBV_EVENT_PORT_ERR`, `_PORT_ACTIVE` and `_GID_CHANGE`.
const EVENTS: [(&str, &str); 3] = [
    ("link set eth0 down", "(10)"),
    ("link set eth0 up", "(9)"),
    ("address add 10.77.1.9/24 dev eth0", "(18)"),
];

/// Runs a row in namespaces of its own, as root.
#[must_use]
pub fn run(row: Row, installed: &Installation) -> Outcome {
    run_foreign(row, installed, [false; 2])
}

/// As [`run`]. A side, the client's or the server's, has its program from
/// [`add_foreign`](Installation::add_foreign) where `foreign` says so.
#[must_use]
pub fn run_foreign(row: Row, installed: &Installation, foreign: [bool; 2]) -> Outcome {
    let pair = Pair::new(&LabConfig::default()).map_err(in_words);
    let result = pair.and_then(|pair| {
        let place = Place { row, installed, pair, foreign };
        match row.shape {
            Shape::Alone(words) => place.alone(words),
            Shape::Alike(script, words) => place.alike(script, words),
            Shape::Script(script, says) => place.here(script, says),
            Shape::Events => place.events(),
            Shape::Pair { server, ends, client, says } => place.pair((server, ends), client, says),
            Shape::Between { always, times, says } => (1..=times).try_for_each(|time| {
                let why = |why| if times > 1 { format!("round {time}: {why}") } else { why };
                let first = place.between(always, says);
                // A lost message is for ever, and no fault. Nor is it one if perftest cannot
                // measure the clock of an emulator that has no processor for itself.
                let guesses = says == Says::Figures && foreign.contains(&true);
                let more = if row.may_lose() || guesses { TRIES - 1 } else { 0 };
                (0..more)
                    .fold(first, |result, _| result.or_else(|_| place.between(always, says)))
                    .map_err(why)
            }),
        }
    });
    Outcome { row, result }
}

/// A row and the namespaces in which it runs.
struct Place<'a> {
    row: Row,
    installed: &'a Installation,
    pair: Pair,
    foreign: [bool; 2],
}

impl Place<'_> {
    fn alone(&self, words: &[&str]) -> Result<(), String> {
        let found = programs::find(&self.row, self.installed)?;
        let output = ended("it", self.start(0, self.command(&[&found]))?, LIMIT)?;
        succeeded("it", &output)?;
        let said = String::from_utf8_lossy(&output.stdout);
        match words.iter().find(|word| !said.contains(**word)) {
            Some(word) => Err(format!("it does not print {word:?}")),
            None => Ok(()),
        }
    }

    fn alike(&self, script: &str, words: &[&str]) -> Result<(), String> {
        let shell = ["sh", "-c", script];
        let verdicts = self.installed.script("verdicts.py", programs::VERDICTS)?;
        let [plain, ours] =
            [self.installed.plain(shell), self.installed.run(self.row.netdev, shell)].map(
                |mut command| {
                    command.env("MODE", self.row.mode).env("VERDICTS", &verdicts);
                    let program = self.start(0, self.as_user(command))?;
                    ended("it", program, LIMIT)
                },
            );
        let (plain, ours) = (plain?, ours?);
        let said = String::from_utf8_lossy(&plain.stdout).into_owned();
        if let Some(word) = words.iter().find(|word| !said.contains(**word)) {
            return Err(format!("without `rocinante run` it does not print {word:?}"));
        }
        alike(&plain, &ours)
    }

    fn events(&self) -> Result<(), String> {
        // Else it buffers its output until its end, which never comes.
        let command = self.command(&["stdbuf -oL", self.row.program, self.row.mode]);
        let mut program = self.start(0, command)?;
        let stdout = program.child_mut().stdout.take().ok_or("no standard output")?;
        let lines = rocinante_lab::lines(stdout);
        says(&lines, "async event FD")?;
        for (change, event) in EVENTS {
            let mut ip = Command::new("ip");
            let output = self.container(0).output(ip.args(change.split(' '))).map_err(in_words)?;
            succeeded("ip", &output)?;
            says(&lines, event).map_err(|why| format!("after `ip {change}`: {why}"))?;
        }
        Ok(())
    }

    fn between(&self, always: &str, says: Says) -> Result<(), String> {
        let found = programs::find(&self.row, self.installed)?;
        let words = [&*found, always];
        let mut server = self.start(1, self.command(&words))?;
        if let Err(why) = listens(&mut server) {
            let output = server.wait_with_output(Duration::from_secs(1));
            return output.map_err(|_| why).and_then(|output| {
                succeeded("the server", &output)
                    .and(Err("the server ended without a client".to_owned()))
            });
        }
        let there = self.container(1).ipv4().to_string();
        let client = self.start(0, self.command(&[&words[..], &[&there]].concat()))?;
        let limit = if self.row.may_lose() { LIMIT_LOSING } else { LIMIT };
        let client = ended("the client", client, limit)?;
        let server = ended("the server", server, PATIENCE);
        succeeded("the client", &client)?;
        succeeded("the server", &server?)?;
        let said = String::from_utf8_lossy(&client.stdout);
        if said.lines().any(|line| says.is(line)) {
            Ok(())
        } else {
            Err("the client prints no result".to_owned())
        }
    }

    fn here(&self, script: &str, says: Says) -> Result<(), String> {
        let output = ended("it", self.start(0, self.script(script)?)?, LIMIT_PAIR)?;
        succeeded("it", &output)?;
        is_said("it", &output, says)
    }

    fn pair(&self, (server, ends): (&str, bool), client: &str, says: Says) -> Result<(), String> {
        let mut server = self.start(1, self.script(server)?)?;
        opens(&mut server)?;
        let client = self.start(0, self.script(client)?)?;
        let client = ended("the client", client, LIMIT_PAIR)?;
        succeeded("the client", &client)?;
        if ends {
            succeeded("the server", &ended("the server", server, PATIENCE)?)?;
        } else {
            server.kill();
        }
        is_said("the client", &client, says)
    }

    /// A script of one of the sides of a pair.
    fn script(&self, script: &str) -> Result<Command, String> {
        let mut command = self.installed.run(self.row.netdev, ["sh", "-c", script]);
        let [here, there] = [0, 1].map(|side| self.container(side).ipv4().to_string());
        let [server, client] = table::ECHO;
        let [selecting_server, selecting_client] = table::SELECT;
        let [serve, ask] = table::REMOTE;
        if self.row.program == "mpi.c" {
            command.env("MPI", programs::mpi(self.installed)?);
        }
        command
            .env("MPI_SERVE", serve)
            .env("MPI_ASK", ask)
            .env("HPCC", programs::HPCC)
            .env("HERE", here)
            .env("THERE", there)
            .env("PROGRAM", self.row.program)
            .env("MODE", self.row.mode)
            .env("RSOCKET", RSOCKET)
            .env("ECHO_SERVER", server)
            .env("ECHO_CLIENT", client)
            .env("SELECT_SERVER", selecting_server)
            .env("SELECT_CLIENT", selecting_client);
        Ok(self.as_user(command))
    }

    /// The command line of these words, as the user that the backend needs.
    fn command(&self, words: &[&str]) -> Command {
        let words = words.iter().flat_map(|words| words.split_whitespace());
        self.as_user(self.installed.run(self.row.netdev, words))
    }

    fn as_user(&self, mut command: Command) -> Command {
        if self.row.netdev == "udp" {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn container(&self, index: usize) -> &Container {
        &self.pair.containers()[index]
    }

    fn start(&self, index: usize, mut command: Command) -> Result<ChildGuard, String> {
        if self.foreign[index] {
            let own = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{own}", self.installed.foreign().display()));
        }
        self.container(index).spawn(&mut command).map_err(in_words)
    }
}

impl Says {
    fn is(self, line: &str) -> bool {
        match self {
            Self::Iterations => line.contains(" iters in "),
            // Size, number of messages and results are numbers.
            Self::Figures => {
                let words: Vec<&str> = line.split_whitespace().collect();
                words.len() > 3
                    && words.iter().all(|word| word.parse::<f64>().is_ok_and(f64::is_finite))
            }
            Self::Word(word) => line.contains(word),
            Self::Nothing => true,
        }
    }
}

fn is_said(who: &str, output: &Output, says: Says) -> Result<(), String> {
    let said = String::from_utf8_lossy(&output.stdout);
    let is_said = says == Says::Nothing || said.lines().any(|line| says.is(line));
    if is_said { Ok(()) } else { Err(format!("{who} prints no result")) }
}

/// Waits until a program has opened the device, and perhaps a moment more: a client asks again, and
/// one that it refuses waits for its listener. Error: it ends, or does not in time.
pub fn opens(program: &mut ChildGuard) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if !matches!(program.try_wait(), Ok(None)) {
            return Err("the server ended".to_owned());
        }
        let has = |table, word| {
            let table = std::fs::read_to_string(format!("/proc/{}/net/{table}", program.id()));
            table.is_ok_and(|table| table.contains(word))
        };
        // Some meet over TCP before they open it.
        if has("udp", ROCE) || has("tcp", LISTENS_TO_ALL) || has("tcp6", LISTENS_TO_ALL_IPV6) {
            std::thread::sleep(Duration::from_millis(200));
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    program.kill();
    Err("the server opens no device".to_owned())
}

/// Waits until the program listens on [`PORT`].
pub(crate) fn listens(program: &mut ChildGuard) -> Result<(), String> {
    listens_on(program, PORT)
}

/// Waits until the program listens on a TCP port. Error: it ends, or does not in time, and is
/// killed then.
pub fn listens_on(program: &mut ChildGuard, number: u16) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let port = format!(":{number:04X}");
    while Instant::now() < deadline {
        if !matches!(program.try_wait(), Ok(None)) {
            return Err("the server ended".to_owned());
        }
        // A process's own view is that of its network namespace.
        let tables = ["tcp", "tcp6"].map(|table| {
            std::fs::read_to_string(format!("/proc/{}/net/{table}", program.id()))
                .unwrap_or_default()
        });
        let listening = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&port))
                && words.nth(1) == Some(LISTENS)
        };
        if tables.iter().any(|table| table.lines().any(listening)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    program.kill();
    Err(format!("the server does not listen on TCP port {number}"))
}

fn says(lines: &Receiver<String>, word: &str) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = String::from("nothing");
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        let Ok(line) = lines.recv_timeout(rest) else {
            return Err(format!("it does not print {word:?}; the last line is {last}"));
        };
        if line.contains(word) {
            return Ok(());
        }
        last = line;
    }
}

/// The exit status and output of a program.
pub(crate) fn ended(who: &str, program: ChildGuard, limit: Duration) -> Result<Output, String> {
    program.wait_with_output(limit).map_err(|error| match error {
        LabError::Timeout { seconds, .. } => format!("{who} does not end within {seconds} s"),
        error => error.to_string(),
    })
}

/// An error that says where two runs of a program differ.
fn alike(plain: &Output, ours: &Output) -> Result<(), String> {
    for (before, after) in [(&plain.stdout, &ours.stdout), (&plain.stderr, &ours.stderr)] {
        let [before, after] = [before, after].map(|said| String::from_utf8_lossy(said));
        let (mut before, mut after) = (before.lines(), after.lines());
        let mut pairs = std::iter::from_fn(|| match (before.next(), after.next()) {
            (None, None) => None,
            pair => Some(pair),
        });
        if let Some((before, after)) = pairs.find(|(before, after)| before != after) {
            let [before, after] = [before, after].map(|line| line.unwrap_or("nothing"));
            return Err(format!("it prints {after:?}, and else {before:?}"));
        }
    }
    if plain.status == ours.status {
        Ok(())
    } else {
        Err(format!("it ends with {}, and else with {}", ours.status, plain.status))
    }
}

/// How rping of rdma-core before July 2025 may end after a run in which all went well: it closes
/// its event channel while its other thread is about to ask for the next event (rdma-core #1622).
const RPING_CLOSED_ITS_CHANNEL: (i32, &str) = (255, "rdma_get_cm_event: Bad file descriptor");

/// Whether a program ended well by its status and its standard error.
#[must_use]
pub fn is_good_end(code: Option<i32>, stderr: &str) -> bool {
    let (status, line) = RPING_CLOSED_ITS_CHANNEL;
    code == Some(0) || code == Some(status) && stderr.lines().last() == Some(line)
}

/// An error that carries the program's last output. Error: the program did not end well.
pub fn succeeded(who: &str, output: &Output) -> Result<(), String> {
    if is_good_end(output.status.code(), &String::from_utf8_lossy(&output.stderr)) {
        return Ok(());
    }
    let said =
        [&output.stderr, &output.stdout].map(|said| String::from_utf8_lossy(said).into_owned());
    let last = said.iter().find_map(|said| said.lines().rev().find(|line| !line.trim().is_empty()));
    Err(format!("{who}: {}: {}", output.status, last.unwrap_or("it says nothing").trim()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn rping_that_closed_its_channel_too_early_ended_well() {
        let (code, line) = RPING_CLOSED_ITS_CHANNEL;
        assert!(is_good_end(Some(code), &format!("server DISCONNECT EVENT...\n{line}\n")));
        assert!(is_good_end(Some(0), "wait for RDMA_READ_ADV state 10\n"));
        for (code, said) in [(code, "bind error"), (1, line), (code, "")] {
            assert!(!is_good_end(Some(code), said), "{code} {said}");
        }
        assert!(!is_good_end(None, line), "killed");
    }

    #[test]
    fn two_runs_differ_in_a_line_or_in_the_status() {
        let run = |status, stdout: &str, stderr: &str| Output {
            status: ExitStatus::from_raw(status),
            stdout: stdout.into(),
            stderr: stderr.into(),
        };
        let plain = run(0, "a\nb\n", "c\n");
        assert_eq!(alike(&plain, &plain), Ok(()));
        for (other, why) in [
            (run(0, "a\nx\n", "c\n"), "it prints \"x\", and else \"b\""),
            (run(0, "a\nb\n", ""), "it prints \"nothing\", and else \"c\""),
            (
                run(256, "a\nb\n", "c\n"),
                "it ends with exit status: 1, and else with exit status: 0",
            ),
        ] {
            assert_eq!(alike(&plain, &other), Err(why.to_owned()));
        }
    }

    #[test]
    fn a_headline_is_no_result() {
        let row = " 65536      5000             7190.63            7190.41              0.115047";
        assert!(Says::Figures.is(row));
        for line in [
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]",
            "---------------------------------------------------------------------------------------",
            "",
            " 65536      5000             -nan               -nan                 0.115047",
        ] {
            assert!(!Says::Figures.is(line), "{line}");
        }
        assert!(Says::Iterations.is("1000 iters in 0.01 seconds = 5.43 usec/iter"));
    }
}
