//! Commands run as users run them, and watched from outside.

use std::fmt::Display;
use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use nix::sys::signal::Signal;
use rocinante_cli::ending;
use rocinante_lab::ChildGuard;
use tempfile::TempDir;

use crate::harness::wait_until;

/// How long any command here may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What `attempt` returns when it first succeeds. Panics with its last error if it does not within
/// [`PATIENCE`].
#[track_caller]
pub fn retried<T, E: Display>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A running command.
#[derive(Debug)]
pub struct Running {
    /// The process.
    pub child: ChildGuard,
    stdout: JoinHandle<String>,
    /// Lines of its standard error.
    lines: Receiver<String>,
    heard: String,
}

/// The result of a command.
#[derive(Debug)]
pub struct Done {
    /// Its exit status, -1 if a signal ended it.
    pub status: i32,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Done {
    /// The last line of standard output, parsed as JSON. Panics if it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let line = self.out.lines().last().unwrap_or_else(|| panic!("no output: {}", self.err));
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Asserts that the command succeeded. Panics if it did not.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.status, 0, "{}{}", self.out, self.err);
        self
    }

    /// Asserts that the command failed with `status`, and that its standard error contains all of
    /// `words`. Panics if it did not.
    #[track_caller]
    pub fn failed(self, status: i32, words: &[&str]) -> Self {
        assert_eq!(self.status, status, "{}{}", self.out, self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
        self
    }
}

/// Has programs that are started from now on begin with the usual reaction to signals.
///
/// A shell that is not interactive starts background jobs with SIGINT ignored, and each process
/// hands that on to its children. A signal that it handles it hands on with the default action
/// (execve(2)). Panics if the kernel refuses a handler.
pub fn hand_on_no_ignored_signal() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|at| ending::is_ignored(*at)) {
            // The handler does nothing that matters: this process goes on to ignore the signal.
            signal_hook::flag::register(signal, Arc::default()).expect("a handler");
        }
    });
}

/// A folder that every user can read. It is removed when it is dropped. Panics if there is no room.
#[must_use]
pub fn open_to_all() -> TempDir {
    let all = Permissions::from_mode(0o755);
    tempfile::Builder::new().permissions(all).tempdir().expect("a folder")
}

/// Copies a program. Another process does so: a child that another test starts meanwhile would hold
/// this one's descriptor, and a file that can be written to does not start (`ETXTBSY`). Panics if
/// there is no such file, or no room.
#[track_caller]
pub fn install(from: &Path, to: &Path, mode: u32) {
    let mut install = Command::new("install");
    let status = install.args(["-m", &format!("{mode:o}")]).args([from, to]).status();
    assert!(status.unwrap().success(), "{} to {}", from.display(), to.display());
}

/// Writes a script, as [`install`] copies a program. Panics if there is no room.
#[track_caller]
pub fn install_script(text: impl AsRef<[u8]>, to: &Path, mode: u32) {
    let draft = to.with_extension("draft");
    std::fs::write(&draft, text).unwrap();
    install(&draft, to, mode);
    std::fs::remove_file(draft).unwrap();
}

impl Running {
    /// Starts a command. Panics if it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        hand_on_no_ignored_signal();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::of(ChildGuard::spawn(command).unwrap())
    }

    /// A child with pipes as its outputs. Panics if its outputs are not pipes.
    #[must_use]
    pub fn of(mut child: ChildGuard) -> Self {
        let mut stdout = child.child_mut().stdout.take().unwrap();
        let lines = rocinante_lab::lines(child.child_mut().stderr.take().unwrap());
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stdout.read_to_string(&mut text);
            text
        });
        Self { child, stdout, lines, heard: String::new() }
    }

    /// Waits for a line of its standard error that contains `what`. Panics if it does not come in
    /// [`PATIENCE`].
    #[track_caller]
    pub fn says(&mut self, what: &str) {
        self.hears(what, |line| line.contains(what));
    }

    /// The command, once it [`says`](Self::says) this.
    #[must_use]
    #[track_caller]
    pub fn that_says(mut self, what: &str) -> Self {
        self.says(what);
        self
    }

    /// The command, once it waits for a client.
    #[must_use]
    #[track_caller]
    pub fn that_waits(self) -> Self {
        self.that_says("waiting for a client")
    }

    /// Waits for a line of its standard error that `suits`. `what` names it. Panics as
    /// [`says`](Self::says).
    #[track_caller]
    pub fn hears(&mut self, what: &str, mut suits: impl FnMut(&str) -> bool) {
        if let Err(heard) = self.heard_within(PATIENCE, &mut suits) {
            panic!("it never said {what:?}: {heard}");
        }
    }

    /// Waits for a line of its standard error that `suits`. Error: none comes in this time: what
    /// it said instead.
    pub fn heard_within(
        &mut self,
        limit: Duration,
        mut suits: impl FnMut(&str) -> bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).map_err(|_| self.heard.clone())?;
            self.heard += &format!("{line}\n");
            if suits(&line) {
                return Ok(());
            }
        }
    }

    /// Waits until the command handles this signal (`SigCgt` of proc_pid_status(5)). Panics if it
    /// never does.
    #[track_caller]
    pub fn handles(&self, signal: Signal) {
        let path = format!("/proc/{}/status", self.child.id());
        wait_until(&format!("a handler of {signal}"), || {
            let status = std::fs::read_to_string(&path).unwrap_or_default();
            let field = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let handled = field.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
            handled.unwrap_or(0) >> (signal as i32 - 1) & 1 == 1
        });
    }

    /// Waits for the command to end. Panics if it does not end within [`PATIENCE`].
    #[track_caller]
    #[must_use]
    pub fn finish(self) -> Done {
        self.finish_within(PATIENCE)
    }

    /// Waits for the command to end. Panics if it does not end in this time.
    #[track_caller]
    #[must_use]
    pub fn finish_within(mut self, limit: Duration) -> Done {
        let status = self.child.wait(limit).unwrap().code().unwrap_or(-1);
        self.outcome(status)
    }

    /// Kills the command, if it has not ended with `status`, and returns all its output.
    #[must_use]
    pub fn outcome(self, status: i32) -> Done {
        let Self { child, stdout, lines, mut heard } = self;
        drop(child);
        let out = stdout.join().unwrap_or_default();
        lines.into_iter().for_each(|line| heard += &format!("{line}\n"));
        Done { status, out, err: heard }
    }
}
