//! A running program, at our end or at the agent's.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;
use rocinante_dropin::{NOBODY, row};
use rocinante_lab::{ChildGuard, Netns};
use rocinante_tests::running::{Done, Running};

use super::node::Step;
use crate::guest::Outcome;

/// How long it may take until it prints something, or ends.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// A program on `rocinante run`, as a user without privileges where the backend and our own rights
/// permit that. Its device is that of `interface`, and its name [`DEVICE`].
pub(super) fn unprivileged<S: AsRef<OsStr>>(
    installed: &Installation,
    backend: Backend,
    interface: &str,
    words: impl IntoIterator<Item = S>,
) -> Command {
    let (backend_name, device) = (backend.to_string(), format!("{interface}={DEVICE}"));
    let run = ["run", "--netdev", &backend_name, "--device", &device, "--"].map(OsString::from);
    let words = words.into_iter().map(|word| word.as_ref().to_owned());
    let mut command = installed.command(run.into_iter().chain(words));
    if backend == Backend::Udp && rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// The name of our device on `rocinante run`.
pub(super) const DEVICE: &str = "roce0";

/// A running program. Its output is read as it comes. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Ours(Running);

impl Ours {
    /// Starts the command, in a network namespace or in the present one.
    pub(super) fn start(netns: Option<&Netns>, command: &mut Command) -> Step<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = match netns {
            Some(netns) => netns.spawn(command),
            None => ChildGuard::spawn(command),
        };
        child.map(Self::of).map_err(|error| error.to_string())
    }

    /// A child whose outputs are pipes.
    pub(crate) fn of(child: ChildGuard) -> Self {
        Self(Running::of(child))
    }

    /// Waits for a line of its standard error.
    pub(super) fn says(&mut self, what: &str) -> Step {
        let heard = self.0.heard_within(PATIENCE, |line| line.contains(what));
        heard.map_err(|heard| format!("ours: it never said {what:?}: {heard}"))
    }

    /// Waits until it serves, if it is a program on `rocinante run`.
    pub(super) fn opens(&mut self) -> Step {
        row::opens(&mut self.0.child).map_err(|why| {
            let heard = self.0.heard_within(Duration::ZERO, |_| false).unwrap_err();
            format!("{why}: {heard}")
        })
    }

    /// Its exit code, if it has ended.
    pub(crate) fn ended(&mut self) -> Step<Option<i32>> {
        let status = self.0.child.try_wait().map_err(|error| error.to_string())?;
        Ok(status.map(|status| status.code().unwrap_or(-1)))
    }

    /// Kills it, if it has not ended with `code`, and returns all its output.
    pub(crate) fn outcome(self, code: i32) -> Outcome {
        let Done { status, out, err } = self.0.outcome(code);
        Outcome { code: status, stdout: out, stderr: err }
    }

    /// Waits until it ends, and kills it if that takes too long.
    pub(super) fn finish(mut self) -> Step<Outcome> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(code) = self.ended()? {
                return Ok(self.outcome(code));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Outcome { stdout, stderr, .. } = self.outcome(-1);
        Err(format!("ours: not within {} s: {stdout}{stderr}", PATIENCE.as_secs()))
    }
}
