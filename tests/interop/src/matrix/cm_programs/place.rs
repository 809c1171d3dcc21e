//! The places of both sides, and how to run programs there.

use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_node::Netns;

use super::{CM_PROGRAMS, CmProgram};
use crate::agent::host::is_listening;
use crate::guest::{Job, Outcome};
use crate::matrix::Bench;
use crate::matrix::node::Step;
use crate::matrix::ours::{Ours, PATIENCE, Programs, unprivileged};

/// The places of both sides.
pub(super) struct CmPlace<'a> {
    pub(super) bench: &'a Bench,
    pub(super) netns: &'a Netns,
    /// The guest's RDMA device.
    pub(super) device: &'a str,
    pub(super) ours: Programs<'a>,
    pub(super) backend: Backend,
    pub(super) here: IpAddr,
    pub(super) there: IpAddr,
    pub(super) port: u16,
}

impl CmPlace<'_> {
    /// Starts a command of ours.
    pub(super) fn run(&self, line: &str) -> Step<Ours> {
        let Programs::Own(program, _) = self.ours else {
            return Err(format!("{line} is no command of others"));
        };
        let mut command = Command::new(program);
        command.args(self.filled(line, self.here, self.there).split_whitespace());
        command.args(["--netdev", &self.backend.to_string(), "--json"]);
        Ours::start(Some(self.netns), &mut command)
    }

    /// Starts a program at our end: 0 is the server, 1 the client.
    fn we_run(&self, program: &CmProgram, role: usize) -> Step<Ours> {
        match self.ours {
            Programs::Own(..) => self.run(program.ours[role]),
            Programs::Unmodified(installed) => {
                let line = self.filled(program.theirs[role], self.here, self.there);
                let words = line.split_whitespace();
                Ours::start(Some(self.netns), &mut unprivileged(installed, self.backend, words))
            }
        }
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
        self.refused(CM_PROGRAMS[0].ours[1], "rejects the connection")
    }

    pub(super) fn nobody_serves(&self) -> Step {
        self.refused("udaddy -s {there} -b {here} --port {port}", "nobody serves that")
    }

    /// Runs a command of ours, which must fail with this reason.
    fn refused(&self, line: &str, why: &str) -> Step {
        let ours = self.run(line)?.finish()?;
        let said = ours.code == 1 && ours.stderr.contains(why);
        if said { Ok(()) } else { Err(format!("not refused: {ours:?}")) }
    }

    pub(super) fn we_ask(&self, program: &CmProgram) -> Step {
        let server = self.start(&self.filled(program.theirs[0], self.there, self.here))?;
        self.until("theirs listens", || self.guest_listens(program))?;
        let ours = self.we_run(program, 1)?.finish()?;
        let theirs = server.wait().map_err(|error| error.to_string())?;
        self.verdict(program, 0, &ours, &theirs)
    }

    pub(super) fn they_ask(&self, program: &CmProgram) -> Step {
        let mut server = self.we_run(program, 0)?;
        server.serves(self.ours, "waiting for ")?;
        let theirs = self.guest(&self.filled(program.theirs[1], self.there, self.here))?;
        let ours = server.finish()?;
        self.verdict(program, 1, &ours, &theirs)
    }

    /// Checks that both ended well and printed what they did. `role` is the guest's program: 0 is
    /// the server.
    fn verdict(&self, program: &CmProgram, role: usize, ours: &Outcome, theirs: &Outcome) -> Step {
        // rping's server ends with an error of its own when the client goes.
        let fine = match self.ours {
            Programs::Own(..) => ours.code == 0 && ours.stdout.contains(program.done),
            Programs::Unmodified(_) => {
                let ends = ours.code == 0 || program.name == "rping" && role == 1;
                ends && ours.stdout.contains(program.say[1 - role])
            }
        };
        let fine = fine && theirs.stdout.contains(program.say[role]);
        if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
    }

    /// Whether the guest's kernel has a listener at the program's port.
    fn guest_listens(&self, program: &CmProgram) -> Step<bool> {
        let port = if program.theirs[0].contains("{port}") { self.port } else { UDADDY_PORT };
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
