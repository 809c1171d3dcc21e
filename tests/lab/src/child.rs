//! Child processes that do not outlive the lab.

use crate::error::{LabError, Result};
use crate::tool;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpgrp, getpid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Names the environment variable that tells a child which process started it.
const PARENT_VARIABLE: &str = "ROCINANTE_PARENT_PID";

/// Bytes of each output of a child that are kept.
const OUTPUT_MAX: u64 = 16 << 20;

/// Children that are not reaped yet. Their process ids are still valid.
static CHILDREN: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// A child process that is killed when this is dropped, with the process group that it leads, if
/// any.
#[derive(Debug)]
pub struct ChildGuard {
    child: Child,
    command: String,
    status: Option<ExitStatus>,
}

impl ChildGuard {
    /// Starts `command` in the calling thread's namespace. Error: the program does not exist or
    /// cannot be started.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        command.env(PARENT_VARIABLE, std::process::id().to_string());
        // The lock is held across the start, so that a signal handler finds either no child or a
        // registered one.
        let mut children = registry();
        let child = command.spawn().map_err(|error| tool::cannot_start(command, error))?;
        children.push(child.id());
        Ok(Self { child, command: tool::describe(command), status: None })
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process, to take its pipes. Wait for it only through this guard.
    pub fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status if the child has ended. Error: the error of `waitpid`.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            let mut children = registry();
            self.status = self.child.try_wait()?;
            if self.status.is_some() {
                children.retain(|&pid| pid != self.child.id());
            }
        }
        Ok(self.status)
    }

    /// Waits until the child ends. Error: the child did not end within `limit`. It is killed then.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.wait_until(Instant::now() + limit, limit)
    }

    fn wait_until(&mut self, deadline: Instant, limit: Duration) -> Result<ExitStatus> {
        let mut pause = Duration::from_micros(200);
        loop {
            match self.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(pause),
                Ok(None) => return Err(self.too_long(limit)),
                Err(source) => {
                    return Err(LabError::Spawn { program: self.command.clone(), source });
                }
            }
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    fn too_long(&mut self, limit: Duration) -> LabError {
        self.kill();
        LabError::Timeout { command: self.command.clone(), seconds: limit.as_secs_f64() }
    }

    /// Waits until the child ends. Collects the output that it wrote to pipes, up to 16 MiB of
    /// each. Error: the child did not end within `limit`, and is killed; or another process has its
    /// pipes.
    pub fn wait_with_output(mut self, limit: Duration) -> Result<Output> {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        let [stdout, stderr] = [
            self.child.stdout.take().map(|pipe| on_its_own(|| drain(pipe))),
            self.child.stderr.take().map(|pipe| on_its_own(|| drain(pipe))),
        ];
        // The ends of the pipes come at once, where `wait` looks now and then.
        let [stdout, stderr] = [stdout, stderr].map(|all| match all {
            None => Ok(Vec::new()),
            Some(all) => all.recv_timeout(left()),
        });
        let (Ok(stdout), Ok(stderr)) = (stdout, stderr) else {
            return Err(self.too_long(limit));
        };
        let status = self.wait_until(deadline, limit)?;
        Ok(Output { status, stdout, stderr })
    }

    /// Sends a signal, if the child has not ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.status.is_none() {
            send(self.child.id(), signal);
        }
    }

    /// Kills the child (SIGKILL) and waits for its end, and for that of its process group, which
    /// may have its addresses, for up to a second.
    pub fn kill(&mut self) {
        if self.status.is_some() {
            return;
        }
        self.signal(Signal::SIGKILL);
        let pause = || std::thread::sleep(Duration::from_micros(200));
        while let Ok(None) = self.try_wait() {
            pause();
        }
        let (group, since) = (Pid::from_raw(-self.child.id().cast_signed()), Instant::now());
        while kill(group, None).is_ok() && since.elapsed() < Duration::from_secs(1) {
            pause();
        }
    }
}

/// The lines of a child's output, as they come. They are read to the end, so that the child never
/// waits for a reader that has heard enough.
pub fn lines(output: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(io::Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Kills (SIGKILL) every child that has a [`ChildGuard`] in this process.
pub fn kill_children() {
    for &pid in registry().iter() {
        send(pid, Signal::SIGKILL);
    }
}

/// Handles SIGINT (Ctrl-C), SIGTERM and SIGHUP from now on: each kills all children and ends this
/// process with the exit code that a shell reports for the signal, 128 plus its number: 130, 143
/// or 129. The namespaces vanish with the process. Error: the kernel refuses the handler or its
/// pipe.
pub fn kill_children_on_signal() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let end = move || {
        if let Some(signal) = signals.forever().next() {
            end_with_children(128 + signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(end)?;
    Ok(())
}

fn end_with_children(code: i32) {
    // The lock is kept to the end, so that no thread starts another child.
    let children = registry();
    for &pid in children.iter() {
        send(pid, Signal::SIGKILL);
    }
    // Reaps them, so that they and their resources are gone when the shell's prompt appears.
    for &pid in children.iter() {
        let _ = waitpid(Pid::from_raw(pid.cast_signed()), None);
    }
    std::process::exit(code);
}

/// In a process that a [`ChildGuard`] started: ends this process, and the process group that it
/// leads, if any, soon after its parent has ended, even by `kill -9`. Does nothing in other
/// processes.
pub fn exit_with_parent() {
    let Some(parent) = std::env::var(PARENT_VARIABLE).ok().and_then(|pid| pid.parse::<u32>().ok())
    else {
        return;
    };
    std::thread::spawn(move || {
        while std::os::unix::process::parent_id() == parent {
            std::thread::sleep(Duration::from_millis(200));
        }
        if getpgrp() == getpid() {
            let _ = killpg(getpgrp(), Signal::SIGKILL);
        }
        std::process::exit(131);
    });
}

fn registry() -> MutexGuard<'static, Vec<u32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a signal to a child that is not reaped. SIGKILL also ends the group that it leads, if any.
fn send(pid: u32, signal: Signal) {
    let pid = pid.cast_signed();
    // The child may have ended already: then there is nothing to do.
    let _ = kill(Pid::from_raw(pid), signal);
    if signal == Signal::SIGKILL {
        let _ = kill(Pid::from_raw(-pid), signal);
    }
}

/// The result of `work` on a thread of its own.
fn on_its_own<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(work()));
    receiver
}

/// All that comes, of which the first [`OUTPUT_MAX`] bytes are kept.
fn drain(mut pipe: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let _ = pipe.by_ref().take(OUTPUT_MAX).read_to_end(&mut kept);
    let _ = io::copy(&mut pipe, &mut io::sink());
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;
    use std::process::Stdio;

    #[test]
    fn of_output_without_end_the_beginning_is_kept() {
        let mut command = Command::new("head");
        let bytes = (OUTPUT_MAX + 1).to_string();
        let child = command.args(["-c", &bytes, "/dev/zero"]).stdout(Stdio::piped());
        let output = ChildGuard::spawn(child).unwrap().wait_with_output(Duration::from_secs(60));
        let output = output.unwrap();
        assert!(output.status.success());
        assert_eq!(output.stdout.len() as u64, OUTPUT_MAX);
    }

    fn sleeper() -> ChildGuard {
        ChildGuard::spawn(Command::new("sleep").arg("60").stdin(Stdio::null())).unwrap()
    }

    fn is_alive(pid: u32) -> bool {
        kill(Pid::from_raw(pid.cast_signed()), None).is_ok()
    }

    #[test]
    fn dropping_the_guard_kills_and_reaps() {
        let child = sleeper();
        let pid = child.id();
        assert!(is_alive(pid));
        drop(child);
        assert!(!is_alive(pid));
        assert!(!registry().contains(&pid));
    }

    #[test]
    fn a_child_that_takes_too_long_is_killed() {
        let mut child = sleeper();
        let error = child.wait(Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, LabError::Timeout { .. }), "{error}");
        assert!(!is_alive(child.id()));
    }

    #[test]
    fn the_group_that_a_child_leads_ends_with_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]).process_group(0).stdout(Stdio::piped());
        let mut child = ChildGuard::spawn(&mut command).unwrap();
        let mut line = String::new();
        let pipe = child.child_mut().stdout.take().unwrap();
        let mut pipe = io::BufReader::new(pipe);
        io::BufRead::read_line(&mut pipe, &mut line).unwrap();
        assert!(is_alive(line.trim().parse().unwrap()));
        drop(child);
        // The pipe ends with the last process that has it.
        let rest = on_its_own(move || drain(pipe)).recv_timeout(Duration::from_secs(60));
        assert_eq!(rest.as_deref(), Ok(&[][..]));
    }

    #[test]
    fn output_larger_than_a_pipe_is_collected() {
        let mut command = Command::new("sh");
        command.args(["-c", "head -c 300000 /dev/zero; echo oops >&2; exit 7"]);
        let child =
            ChildGuard::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
        let output = child.wait_with_output(Duration::from_secs(20)).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(7), 300_000));
        assert_eq!(output.stderr, b"oops\n");
    }
}
