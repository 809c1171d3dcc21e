//! Where both sides are, and how their programs are run there.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::Backend;
use rocinante_cli::lab::{ChildGuard, Netns};

use super::{CM_PROGRAMS, CmProgram, PATIENCE};
use crate::guest::{Job, Outcome};
use crate::matrix::Bench;
use crate::matrix::node::Step;

/// Where both sides are.
pub(super) struct Place<'a> {
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

/// A command of ours that runs.
pub(super) struct Running(ChildGuard);

impl Running {
    /// What became of it.
    pub(super) fn finish(self) -> Step<Outcome> {
        let output = self.0.wait_with_output(PATIENCE).map_err(|error| format!("ours: {error}"))?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let code = output.status.code().unwrap_or(-1);
        Ok(Outcome { code, stdout: text(output.stdout), stderr: text(output.stderr) })
    }
}

impl Place<'_> {
    pub(super) fn run(&self, line: &str) -> Step<Running> {
        let mut command = Command::new(self.program);
        command.args(self.filled(line, self.here, self.there).split_whitespace());
        command.args(["--netdev", &self.backend.to_string(), "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.netns.spawn(&mut command).map(Running).map_err(|error| error.to_string())
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

    /// A command of ours fails, and says why.
    fn refused(&self, line: &str, why: &str) -> Step {
        let ours = self.run(line)?.finish()?;
        let said = ours.code == 1 && ours.stderr.contains(why);
        if said { Ok(()) } else { Err(format!("not refused: {ours:?}")) }
    }

    pub(super) fn we_ask(&self, program: &CmProgram) -> Step {
        let server = self.start(&self.filled(program.theirs[0], self.there, self.here))?;
        // Before it listens it rejects.
        let ours = again(&["rejects the connection", "nobody serves that"], || {
            self.run(program.ours[1])?.finish()
        })?;
        if ours.code != 0 {
            return Err(format!("ours: {ours:?}"));
        }
        let theirs = server.wait().map_err(|error| error.to_string())?;
        verdict(program, 0, &ours, &theirs)
    }

    pub(super) fn they_ask(&self, program: &CmProgram) -> Step {
        let server = self.run(program.ours[0])?;
        let line = self.filled(program.theirs[1], self.there, self.here);
        // Before ours listens it rejects.
        let theirs = again(&["reject", "refused", "unreachable"], || self.guest(&line))?;
        if !theirs.stdout.contains(program.say[1]) {
            return Err(format!("theirs: {theirs:?}"));
        }
        let ours = server.finish()?;
        verdict(program, 1, &ours, &theirs)
    }
}

/// Runs a client again as long as it says one of `early`, because the server does not listen yet.
fn again(early: &[&str], mut client: impl FnMut() -> Step<Outcome>) -> Step<Outcome> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let outcome = client()?;
        let said = (outcome.stdout.clone() + &outcome.stderr).to_lowercase();
        if !early.iter().any(|words| said.contains(words)) || Instant::now() > deadline {
            return Ok(outcome);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Both ended well, and both say what they did. `role` is the other program's: 0 is the server.
fn verdict(program: &CmProgram, role: usize, ours: &Outcome, theirs: &Outcome) -> Step {
    // rping's server ends with an error of its own when the client goes.
    let fine = ours.code == 0
        && ours.stdout.contains(program.done)
        && theirs.stdout.contains(program.say[role]);
    if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
}
