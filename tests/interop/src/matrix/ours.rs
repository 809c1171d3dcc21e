//! A running program at our end.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante_dropin::install::Installation;
use rocinante_dropin::{NOBODY, row};
use rocinante_lab::{ChildGuard, Netns};

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

/// A running program at our end. Its output is read as it comes. It is killed when this is dropped.
pub(super) struct Ours {
    child: ChildGuard,
    stdout: JoinHandle<String>,
    lines: Receiver<String>,
    heard: String,
}

impl Ours {
    /// Starts the command, in a network namespace or in the present one.
    pub(super) fn start(netns: Option<&Netns>, command: &mut Command) -> Step<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = match netns {
            Some(netns) => netns.spawn(command),
            None => ChildGuard::spawn(command),
        };
        let mut child = child.map_err(|error| error.to_string())?;
        let stdout = child.child_mut().stdout.take().ok_or("no standard output")?;
        let stderr = child.child_mut().stderr.take().ok_or("no standard error")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(stdout).read_to_string(&mut text);
            text
        });
        Ok(Self { child, stdout, lines, heard: String::new() })
    }

    /// Waits for a line of its standard error.
    pub(super) fn says(&mut self, what: &str) -> Step {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    let found = line.contains(what);
                    self.heard += &(line + "\n");
                    if found {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(format!("ours: it never said {what:?}: {}", self.heard));
                }
            }
        }
    }

    /// Waits until it serves, if it is a program on `rocinante run`.
    pub(super) fn opens(&mut self) -> Step {
        row::opens(&mut self.child).map_err(|why| {
            self.lines.try_iter().for_each(|line| self.heard += &(line + "\n"));
            format!("{why}: {}", self.heard)
        })
    }

    /// Its exit code, if it has ended.
    pub(super) fn ended(&mut self) -> Step<Option<i32>> {
        let status = self.child.try_wait().map_err(|error| error.to_string())?;
        Ok(status.map(|status| status.code().unwrap_or(-1)))
    }

    /// Kills it, if it has not ended with `code`, and returns all its output.
    pub(super) fn outcome(self, code: i32) -> Outcome {
        let Self { child, stdout, lines, mut heard } = self;
        drop(child);
        let stdout = stdout.join().unwrap_or_default();
        lines.into_iter().for_each(|line| heard += &(line + "\n"));
        Outcome { code, stdout, stderr: heard }
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
