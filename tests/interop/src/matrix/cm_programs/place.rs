//! The places of both sides, and how to run programs there.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;
use rocinante_dropin::row::is_good_end;
use rocinante_lab::Netns;

use super::{CmProgram, RPING};
use crate::agent::host::is_listening;
use crate::guest::{Job, Outcome};
use crate::matrix::Bench;
use crate::matrix::node::Step;
use crate::matrix::ours::{Ours, PATIENCE, unprivileged};

/// The longest that a guardian has the address after its program.
const RELEASED: Duration = Duration::from_secs(5);

/// The places of both sides.
pub(super) struct CmPlace<'a> {
    pub(super) bench: &'a Bench,
    pub(super) netns: &'a Netns,
    /// The guest's RDMA device.
    pub(super) device: &'a str,
    pub(super) installed: &'a Installation,
    pub(super) backend: Backend,
    pub(super) here: IpAddr,
    pub(super) there: IpAddr,
    pub(super) port: u16,
}

impl CmPlace<'_> {
    /// Starts a command of ours.
    fn own(&self, line: &str) -> Step<Ours> {
        let line = self.filled(line, self.here, self.there);
        let line = format!("{line} --netdev {} --json", self.backend);
        Ours::start(Some(self.netns), &mut self.installed.command(line.split_whitespace()))
    }

    /// Starts a program of others at our end.
    pub(super) fn run(&self, line: &str) -> Step<Ours> {
        let line = self.filled(line, self.here, self.there);
        let words = line.split_whitespace();
        let mut command = unprivileged(self.installed, self.backend, "eth0", words);
        Ours::start(Some(self.netns), &mut command)
    }

    fn filled(&self, line: &str, here: IpAddr, there: IpAddr) -> String {
        line.replace("{here}", &here.to_string())
            .replace("{there}", &there.to_string())
            .replace("{port}", &self.port.to_string())
    }

    /// Starts a command in the guest.
    pub(super) fn start(&self, line: &str) -> Step<Job> {
        self.bench.guest.start(line, PATIENCE).map_err(|error| error.to_string())
    }

    /// Runs a command in the guest.
    pub(super) fn guest(&self, line: &str) -> Step<Outcome> {
        self.bench.guest.run(line, PATIENCE).map_err(|error| error.to_string())
    }

    pub(super) fn nobody_listens(&self) -> Step {
        let ours = self.own(RPING[1])?.finish()?;
        let said = ours.code == 1 && ours.stderr.contains("rejects the connection");
        if said { Ok(()) } else { Err(format!("not refused: {ours:?}")) }
    }

    pub(super) fn nobody_serves(&self) -> Step {
        let ours = self.run("udaddy -s {there} -b {here}")?.finish()?;
        // The status of SIDR: there is no such service.
        let said = ours.code != 0 && ours.stdout.contains("RDMA_CM_EVENT_UNREACHABLE, error: 1");
        if said { Ok(()) } else { Err(format!("not refused: {ours:?}")) }
    }

    /// The guest runs the server, and we the client: the same program, or our own `command`.
    pub(super) fn we_ask(&self, program: &CmProgram, command: Option<[&str; 2]>) -> Step {
        let server = self.start(&self.filled(program.words[0], self.there, self.here))?;
        self.until("theirs listens", || self.guest_listens(program))?;
        let ours = match command {
            Some([_, client]) => self.own(client)?,
            None => self.run(program.words[1])?,
        };
        let ours = ours.finish()?;
        let theirs = server.wait().map_err(|error| error.to_string())?;
        Self::verdict(program, command.is_some(), 0, &ours, &theirs)
    }

    /// The guest runs the client.
    pub(super) fn they_ask(&self, program: &CmProgram, command: Option<[&str; 2]>) -> Step {
        let server = match command {
            Some([server, _]) => {
                let mut server = self.own(server)?;
                server.says("waiting for ")?;
                server
            }
            None => self.serving(program.words[0])?,
        };
        let theirs = self.guest(&self.filled(program.words[1], self.there, self.here))?;
        let ours = server.finish()?;
        Self::verdict(program, command.is_some(), 1, &ours, &theirs)
    }

    /// Our server, once it serves. On `udp` it is of another user than the programs before, of
    /// which a guardian may have the address still: users share none (`EADDRINUSE`).
    fn serving(&self, words: &str) -> Step<Ours> {
        let deadline = Instant::now() + RELEASED;
        loop {
            let mut server = self.run(words)?;
            match server.opens() {
                Ok(()) => return Ok(server),
                Err(why) if why.contains("Address already in use") && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(200));
                }
                Err(why) => return Err(why),
            }
        }
    }

    /// Checks that both ended well and printed their result. `role` is the guest's program: 0 is
    /// the server.
    fn verdict(
        program: &CmProgram,
        own: bool,
        role: usize,
        ours: &Outcome,
        theirs: &Outcome,
    ) -> Step {
        // rping's server ends with an error of its own when the client goes.
        let ends = is_good_end(Some(ours.code), &ours.stderr)
            || program.name == "rping" && role == 1 && !own;
        let word = if own { "\"rounds\":5" } else { program.say[1 - role] };
        let fine = ends && ours.stdout.contains(word) && theirs.stdout.contains(program.say[role]);
        if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
    }

    /// Whether the guest's kernel has a listener at the program's port.
    fn guest_listens(&self, program: &CmProgram) -> Step<bool> {
        let port = if program.words[0].contains("{port}") { self.port } else { UDADDY_PORT };
        let ids = self.guest("rdma resource show cm_id")?;
        Ok(is_listening(&ids.stdout, port))
    }

    pub(super) fn until(&self, what: &str, mut done: impl FnMut() -> Step<bool>) -> Step {
        let deadline = Instant::now() + PATIENCE;
        while !done()? {
            if Instant::now() > deadline {
                return Err(format!("{what}: not in time"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// udaddy's fixed port: no option changes it.
const UDADDY_PORT: u16 = 7174;
