//! The commands of `rocinante` and the examples on the kernel's device: at both ends inside the
//! guest; or at one end, with the software device in a container at the other.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, Container};

use crate::guest::{Guest, Job, Outcome};
use crate::matrix::Step;

/// The TCP port of each pair of sides.
const PORT: u16 = 18_600;

/// The command and the examples, by their names in both sides' directories of programs.
const ROCINANTE: &str = "rocinante-interop rocinante";
const RC_PINGPONG: &str = "rc_pingpong-under-interop";
const KV_STORE: &str = "kv_store-under-interop";

/// A program with two sides, or with one.
pub struct HardwareProgram {
    pub(super) name: &'static str,
    /// The command of both sides, before their options.
    program: &'static str,
    /// The server's words between program and options.
    server: &'static str,
    /// The client's words there, and its words at the end; `None` if the program has only one side.
    client: Option<[&'static str; 2]>,
    /// The option for the port: TCP's, or the connection manager's.
    port: &'static str,
    /// How addresses are given.
    names: Names,
    /// Whether the server ends with its client.
    ends: bool,
    /// Words that the only side, or the client, must print.
    says: &'static [&'static str],
}

/// How a program gets addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// Its own by `--bind`, the server's as a bare argument.
    Bind,
    /// As rping: the server's by `-a`, a client's own by `-I`.
    Rping,
}

const fn two(name: &'static str, command: &'static str, options: &'static str) -> HardwareProgram {
    HardwareProgram {
        name,
        program: ROCINANTE,
        server: command,
        client: Some([command, options]),
        port: "-p",
        names: Names::Bind,
        ends: true,
        says: &[],
    }
}

pub(super) static PROGRAMS: [HardwareProgram; 15] = [
    HardwareProgram {
        name: "devices",
        client: None,
        says: &["hca_id: rxe0", "PORT_ACTIVE, Ethernet", "GID[", "active_mtu:       4096 (5)"],
        ..two("", "devices -v", "")
    },
    two("pingpong", "pingpong -c", "-n 100"),
    two("pingpong_events", "pingpong -c -e", "-n 100"),
    two("pingpong_cm", "pingpong --cm -c", "-n 100"),
    two("write_bw_cm", "perf write-bw --cm", "-n 200 -s 8192 -q 2"),
    two("send_lat_cm", "perf send-lat --cm", "-n 50"),
    HardwareProgram {
        server: "rping -s",
        client: Some(["rping -c -V -C 5", "-S 3000 --json"]),
        names: Names::Rping,
        says: &["\"rounds\":5", "\"validated\":true"],
        ..two("rping", "", "")
    },
    two("write_bw", "perf write-bw", "-n 200 -s 8192 -q 2"),
    two("read_bw", "perf read-bw", "-n 200 -s 8192 -q 2"),
    two("send_bw", "perf send-bw", "-n 200 -s 64 -l 8 -Q 8"),
    two("write_lat", "perf write-lat", "-n 50"),
    two("send_lat", "perf send-lat", "-n 50"),
    two("atomic_lat", "perf atomic-lat", "-n 50"),
    HardwareProgram {
        program: RC_PINGPONG,
        port: "--iters 100 --size 5000 --port",
        says: &["100 messages of 5000 bytes there and back, all verified"],
        ..two("rc_pingpong", "", "")
    },
    HardwareProgram {
        program: KV_STORE,
        server: "serve",
        client: Some(["demo", "--iters 25"]),
        port: "--port",
        ends: false,
        says: &["25 puts and", "all verified"],
        ..two("kv_store", "", "")
    },
];

/// Which sides have the kernel's device; the others have the software device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Both.
    Both,
    /// The client.
    Client,
    /// The server.
    Server,
}

impl Kernel {
    pub(super) const ALL: [Self; 3] = [Self::Both, Self::Client, Self::Server];
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Client => "client",
            Self::Server => "server",
        })
    }
}

/// A machine, its device, and the place of its programs.
pub(super) enum Side<'a> {
    /// The guest, with the kernel's device of this name.
    Guest(&'a Guest, &'a str, IpAddr),
    /// A container, with the software device.
    Container(&'a Container, &'a Path),
}

/// A running program.
enum Running {
    Guest(Job),
    Container(Box<ChildGuard>),
}

impl Side<'_> {
    fn address(&self) -> IpAddr {
        match self {
            Self::Guest(_, _, address) => *address,
            Self::Container(container, _) => container.ipv4().into(),
        }
    }

    fn start(&self, program: &str, line: &str) -> Step<Running> {
        match self {
            Self::Guest(guest, _, _) => guest
                .start(&format!("exec /host/{program} {line}"), super::PATIENCE)
                .map(Running::Guest)
                .map_err(|error| error.to_string()),
            Self::Container(container, programs) => {
                let mut words = program.split(' ').chain(line.split_whitespace());
                let mut command = Command::new(programs.join(words.next().unwrap_or_default()));
                command.args(words).stdin(Stdio::null());
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                let child = container.spawn(&mut command).map_err(|error| error.to_string())?;
                Ok(Running::Container(Box::new(child)))
            }
        }
    }

    /// The options for device, address and port; a client also gets the server's address.
    fn options(&self, program: &HardwareProgram, server: Option<IpAddr>) -> String {
        let device = match self {
            Self::Guest(_, device, _) => format!("--device {device}"),
            Self::Container(..) => String::new(),
        };
        let (own, port) = (self.address(), program.port);
        let addresses = match (program.names, server) {
            (Names::Bind, None) => format!("--bind {own} {port} {PORT}"),
            (Names::Bind, Some(server)) => format!("--bind {own} {port} {PORT} {server}"),
            (Names::Rping, None) => format!("-a {own} {port} {PORT}"),
            (Names::Rping, Some(server)) => format!("-a {server} -I {own} {port} {PORT}"),
        };
        format!("{device} {addresses}")
    }
}

impl Running {
    fn wait(self) -> Step<Outcome> {
        match self {
            Self::Guest(job) => job.wait().map_err(|error| error.to_string()),
            Self::Container(child) => {
                let output = child.wait_with_output(super::PATIENCE);
                let output = output.map_err(|error| error.to_string())?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let code = output.status.code().unwrap_or(-1);
                Ok(Outcome { code, stdout: text(&output.stdout), stderr: text(&output.stderr) })
            }
        }
    }

    /// Kills it, and returns its output.
    fn kill(self) -> Step<Outcome> {
        match self {
            Self::Guest(job) => job.kill().map_err(|error| error.to_string()),
            Self::Container(mut child) => {
                child.signal(nix::sys::signal::Signal::SIGKILL);
                Self::Container(child).wait()
            }
        }
    }
}

impl HardwareProgram {
    /// Whether it has two sides.
    pub(super) fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Runs the program; if it has only one side, that side runs at the client.
    pub(super) fn run(&self, server: &Side<'_>, client: &Side<'_>) -> Step {
        let Some([command, options]) = self.client else {
            return self.check(&client.start(self.program, self.server)?.wait()?, "");
        };
        let line = format!("{} {}", self.server, server.options(self, None));
        let serving = server.start(self.program, &line)?;
        let own = client.options(self, Some(server.address()));
        let line = format!("{command} {own} {options}");
        let deadline = Instant::now() + super::PATIENCE;
        let asked = loop {
            let asked = client.start(self.program, &line)?.wait();
            // A server that does not listen yet rejects the client, which may have asked again.
            let early = |outcome: &Outcome| {
                outcome.code != 0 && outcome.stderr.contains("nobody listens there")
            };
            if !asked.as_ref().is_ok_and(early) || Instant::now() > deadline {
                break asked;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let well = asked.as_ref().is_ok_and(|outcome| outcome.code == 0);
        let served = if self.ends && well { serving.wait() } else { serving.kill() }?;
        let said = format!("{} {}", served.stdout.trim(), served.stderr.trim());
        self.check(&asked?, &said)?;
        if self.ends && served.code != 0 {
            return Err(format!("the server ended with {}: {said}", served.code));
        }
        Ok(())
    }

    fn check(&self, outcome: &Outcome, server: &str) -> Step {
        let Outcome { code, stdout, stderr } = outcome;
        let otherwise = |what: String| Err(format!("{what}: {stdout}{stderr}; server: {server}"));
        match self.says.iter().find(|part| !stdout.contains(*part)) {
            _ if *code != 0 => otherwise(format!("it ended with {code}")),
            None if stdout.is_empty() => otherwise("it said nothing".into()),
            None => Ok(()),
            Some(part) => otherwise(format!("it did not say {part:?}")),
        }
    }
}
