//! The commands with two sides, and `devices`, as their users run them.

mod agreement;
mod compare;
mod compat;
mod devices;
mod errors;
mod lab;
mod perf;
mod pingpong;

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocinante_tests::lab::ChildGuard;
use rocinante_tests::unique;
use serde_json::Value;

/// How long any command here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command that runs.
struct Running {
    child: ChildGuard,
    stdout: JoinHandle<String>,
    /// Lines of its standard error.
    lines: Receiver<String>,
    heard: String,
}

/// What a command did.
struct Done {
    status: i32,
    out: String,
    err: String,
}

impl Done {
    /// The last line of standard output.
    fn json(&self) -> Value {
        let line = self.out.lines().last().unwrap_or_else(|| panic!("no output: {}", self.err));
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// It went well.
    #[track_caller]
    fn succeeded(self) -> Self {
        assert_eq!(self.status, 0, "{}{}", self.out, self.err);
        self
    }

    /// It failed with `status`, and said all of `words`.
    #[track_caller]
    fn failed(self, status: i32, words: &[&str]) -> Self {
        assert_eq!(self.status, status, "{}{}", self.out, self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
        self
    }
}

fn rocinante<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-under-test"));
    command.args(args).env_remove("ROCINANTE_NETDEV").stdin(Stdio::null());
    command
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Runs a command line to its end.
fn run(line: &str) -> Done {
    Running::start(&mut rocinante(words(line))).finish()
}

impl Running {
    fn start(command: &mut Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::of(ChildGuard::spawn(command).unwrap())
    }

    /// A child whose outputs are pipes.
    fn of(mut child: ChildGuard) -> Self {
        let mut stdout = child.child_mut().stdout.take().unwrap();
        let stderr = BufReader::new(child.child_mut().stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stdout.read_to_string(&mut text);
            text
        });
        Self { child, stdout, lines, heard: String::new() }
    }

    /// Waits for a line of its standard error.
    #[track_caller]
    fn says(&mut self, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("it never said {what:?}: {}", self.heard)
            };
            self.heard.push_str(&line);
            self.heard.push('\n');
            if line.contains(what) {
                return;
            }
        }
    }

    fn finish(mut self) -> Done {
        let status = self.child.wait(PATIENCE).unwrap().code().unwrap_or(-1);
        let out = self.stdout.join().unwrap();
        for line in self.lines {
            self.heard.push_str(&line);
            self.heard.push('\n');
        }
        Done { status, out, err: self.heard }
    }
}

/// Two addresses on loopback on which nobody else has anything open.
struct Addresses {
    server: Ipv4Addr,
    client: Ipv4Addr,
}

impl Addresses {
    fn new() -> Self {
        Self { server: unique::loopback(), client: unique::loopback() }
    }

    /// Starts the server of a command and waits until it waits.
    #[track_caller]
    fn serve(&self, command: &str) -> Running {
        let line = format!("{command} --netdev udp --bind {}", self.server);
        let mut server = Running::start(&mut rocinante(words(&line)));
        server.says("waiting for a client");
        server
    }

    fn client_line(&self, command: &str) -> String {
        format!("{command} --netdev udp --bind {} {}", self.client, self.server)
    }

    /// Runs the client of a command to its end.
    fn call(&self, command: &str) -> Done {
        run(&self.client_line(command))
    }
}

/// Runs both sides to their ends.
#[track_caller]
fn both(server: &str, client: &str) -> (Done, Done) {
    let addresses = Addresses::new();
    let server = addresses.serve(server);
    let client = addresses.call(client);
    (server.finish(), client)
}
