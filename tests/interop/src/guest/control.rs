//! The control channel from the host to the guest: lines of JSON over a virtio serial port. Its end
//! on the host is the virtual machine's standard input and output. [`serve`] is the guest's side.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// The name of the serial port.
pub(super) const PORT: &str = "control";

/// The exit code of a command that was killed because its time was over, as in `timeout(1)`.
pub const TIMED_OUT: i32 = 124;

/// How long the host may be silent. After that it counts as gone, and the guest ends.
const SILENCE_MAX: Duration = Duration::from_secs(90);

/// The last bytes of each output that are kept.
const OUTPUT_MAX: usize = 1 << 20;

/// A request of the host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ControlRequest {
    /// Run `sh -c command`, and answer [`ControlReply::Ended`] with the same number.
    Run { id: u64, command: String, timeout_ms: u64 },
    /// Kill the command with this number; it is answered like any end.
    Kill { id: u64 },
    /// The host is alive.
    Alive,
}

/// An answer of the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ControlReply {
    /// The guest is up.
    Ready {
        /// `uname -r`.
        kernel: String,
    },
    /// A command has ended.
    Ended { id: u64, outcome: Outcome },
}

/// The outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Its exit code; 128 plus the signal's number if a signal killed it; or [`TIMED_OUT`].
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Commands that run, or are about to.
type Jobs = Arc<Mutex<BTreeMap<u64, JobState>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JobState {
    /// Not started yet.
    Soon,
    /// To be killed as soon as it is started.
    Doomed,
    /// Running in this process group.
    Group(Pid),
}

/// Serves the host until the host falls silent. Error: there is no serial port.
pub fn serve() -> io::Result<()> {
    let heard = Arc::new(Mutex::new(Instant::now()));
    let last = heard.clone();
    std::thread::spawn(move || {
        while lock(&last).elapsed() < SILENCE_MAX {
            std::thread::sleep(Duration::from_secs(1));
        }
        eprintln!("the host is silent: the guest ends");
        std::process::exit(1);
    });
    let port = OpenOptions::new().read(true).write(true).open(find_port()?)?;
    let out = Arc::new(Mutex::new(port.try_clone()?));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    say(&out, &ControlReply::Ready { kernel })?;
    let jobs = Jobs::default();
    for line in BufReader::new(port).lines() {
        let line = line?;
        *lock(&heard) = Instant::now();
        match serde_json::from_str(&line) {
            Ok(ControlRequest::Run { id, command, timeout_ms }) => {
                let (out, jobs) = (out.clone(), jobs.clone());
                lock(&jobs).insert(id, JobState::Soon);
                let limit = Duration::from_millis(timeout_ms);
                std::thread::spawn(move || {
                    let outcome = run(id, &command, limit, &jobs);
                    let _ = say(&out, &ControlReply::Ended { id, outcome });
                });
            }
            Ok(ControlRequest::Kill { id }) => kill(id, &jobs),
            Ok(ControlRequest::Alive) => {}
            Err(error) => eprintln!("not understood: {line}: {error}"),
        }
    }
    Ok(())
}

/// The device file of the serial port, as soon as the kernel has made it.
fn find_port() -> io::Result<PathBuf> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let device = Path::new("/dev").join(entry.file_name());
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT && device.exists() {
                return Ok(device);
            }
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("there is no virtio serial port {PORT}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn say(out: &Mutex<File>, reply: &ControlReply) -> io::Result<()> {
    let line = serde_json::to_string(reply)? + "\n";
    lock(out).write_all(line.as_bytes())
}

fn kill(id: u64, jobs: &Jobs) {
    match lock(jobs).get_mut(&id) {
        Some(JobState::Group(group)) => {
            // It may have ended by itself.
            let _ = killpg(*group, Signal::SIGKILL);
        }
        Some(soon) => *soon = JobState::Doomed,
        None => {}
    }
}

fn run(id: u64, command: &str, limit: Duration, jobs: &Jobs) -> Outcome {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own, so that all its processes can be killed.
    let child = shell.process_group(0).current_dir("/root").spawn();
    match child {
        Ok(child) => {
            let group = Pid::from_raw(child.id().cast_signed());
            if lock(jobs).insert(id, JobState::Group(group)) == Some(JobState::Doomed) {
                kill(id, jobs);
            }
            let outcome = attend(child, group, limit);
            lock(jobs).remove(&id);
            outcome
        }
        Err(error) => {
            let stderr = format!("cannot start a shell: {error}");
            Outcome { code: 127, stdout: String::new(), stderr }
        }
    }
}

fn attend(mut child: Child, group: Pid, limit: Duration) -> Outcome {
    let stdout = child.stdout.take().map(|pipe| std::thread::spawn(|| drain(pipe)));
    let stderr = child.stderr.take().map(|pipe| std::thread::spawn(|| drain(pipe)));
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    let code = loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                break status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            }
            Ok(None) if Instant::now() < deadline => std::thread::sleep(pause),
            _ => {
                let _ = killpg(group, Signal::SIGKILL);
                let _ = child.wait();
                break TIMED_OUT;
            }
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    // Processes left in the background would keep the pipes open.
    let _ = killpg(group, Signal::SIGKILL);
    let text = |reader: Option<std::thread::JoinHandle<Vec<u8>>>| {
        let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Outcome { code, stdout: text(stdout), stderr: text(stderr) }
}

/// Reads to the end and keeps the last [`OUTPUT_MAX`] bytes.
fn drain(mut pipe: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    let mut part = [0; 4096];
    while let Ok(count @ 1..) = pipe.read(&mut part) {
        all.extend_from_slice(&part[..count]);
        if all.len() > 2 * OUTPUT_MAX {
            all.drain(..all.len() - OUTPUT_MAX);
        }
    }
    all
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quickly(command: &str, limit: Duration) -> Outcome {
        run(1, command, limit, &Jobs::default())
    }

    #[test]
    fn a_command_ends_with_its_code_and_outputs() {
        let outcome = quickly("echo out; echo err >&2; exit 3", Duration::from_secs(20));
        assert_eq!(outcome, Outcome { code: 3, stdout: "out\n".into(), stderr: "err\n".into() });
    }

    #[test]
    fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let start = Instant::now();
        let outcome = quickly("echo begun; sleep 60 & sleep 60", Duration::from_millis(300));
        assert_eq!((outcome.code, outcome.stdout.as_str()), (TIMED_OUT, "begun\n"));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_command_that_is_killed_says_so() {
        let jobs = Jobs::default();
        let outcome = std::thread::scope(|scope| {
            let running = scope.spawn(|| run(7, "sleep 60", Duration::from_secs(60), &jobs));
            while !matches!(lock(&jobs).get(&7), Some(JobState::Group(_))) {
                std::thread::yield_now();
            }
            kill(7, &jobs);
            running.join().unwrap()
        });
        assert_eq!(outcome.code, 128 + 9);
    }

    #[test]
    fn a_command_may_be_killed_before_it_is_started() {
        let jobs = Jobs::default();
        lock(&jobs).insert(7, JobState::Soon);
        kill(7, &jobs);
        assert_eq!(run(7, "sleep 60", Duration::from_secs(60), &jobs).code, 128 + 9);
    }
}
