//! The places of both sides, and how to run programs there.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_node::Netns;

use super::{CM_PROGRAMS, CmProgram};
use crate::guest::{Job, Outcome};
use crate::matrix::Bench;
use crate::matrix::node::Step;
use crate::matrix::ours::{Ours, PATIENCE};

/// The places of both sides.
pub(super) struct CmPlace<'a> {
    pub(super) bench: &'a Bench,
    pub(super) netns: &'a Netns,
    /// The guest's RDMA device.
    pub(super) device: &'a str,
    pub(super) program: &'a Path,
    pub(super) backend: Backend,
    pub(super) here: IpAddr,
    pub(super) there: IpAddr,
    pub(super) port: u16,
}

impl CmPlace<'_> {
    pub(super) fn run(&self, line: &str) -> Step<Ours> {
        let mut command = Command::new(self.program);
        command.args(self.filled(line, self.here, self.there).split_whitespace());
        command.args(["--netdev", &self.backend.to_string(), "--json"]);
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
        let ours = self.run(program.ours[1])?.finish()?;
        let theirs = server.wait().map_err(|error| error.to_string())?;
        verdict(program, 0, &ours, &theirs)
    }

    pub(super) fn they_ask(&self, program: &CmProgram) -> Step {
        let mut server = self.run(program.ours[0])?;
        server.says("waiting for ")?;
        let theirs = self.guest(&self.filled(program.theirs[1], self.there, self.here))?;
        let ours = server.finish()?;
        verdict(program, 1, &ours, &theirs)
    }

    /// Whether the guest's kernel has a listener at the program's port.
    fn guest_listens(&self, program: &CmProgram) -> Step<bool> {
        let port = if program.theirs[0].contains("{port}") { self.port } else { UDADDY_PORT };
        let ids = self.guest("rdma resource show cm_id")?;
        let listener = |line: &str| {
            let at_port =
                |word: &str| word.rsplit_once(':').is_some_and(|(_, at)| at == port.to_string());
            line.contains("state LISTEN") && line.split_whitespace().any(at_port)
        };
        Ok(ids.stdout.lines().any(listener))
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

/// Checks that both ended well and printed what they did. `role` is the guest's program: 0 is the
/// server.
fn verdict(program: &CmProgram, role: usize, ours: &Outcome, theirs: &Outcome) -> Step {
    // rping's server ends with an error of its own when the client goes.
    let fine = ours.code == 0
        && ours.stdout.contains(program.done)
        && theirs.stdout.contains(program.say[role]);
    if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
}
