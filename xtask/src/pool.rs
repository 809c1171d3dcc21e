//! Several programs in parallel, each with its output in a file of its own.
//!
//! Most tests wait for timers and peers, so more of them than processors run at once.

use crate::command;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The interval at which the pool checks whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// A program to run.
#[derive(Debug)]
pub(crate) struct Job {
    /// Its name, which is unique in a pool.
    pub(crate) name: String,
    /// What to run.
    pub(crate) command: Command,
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its name.
    pub(crate) name: String,
    /// Whether it succeeded.
    pub(crate) ok: bool,
    /// How it ended, if it did not succeed.
    pub(crate) how: String,
    /// All that it wrote.
    pub(crate) output: String,
    /// How long it ran.
    pub(crate) took: Duration,
}

/// Programs, `slots` at a time, in the order of their addition.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: usize,
    /// A program is killed after this time.
    limit: Duration,
    /// The folder of the output files.
    logs: PathBuf,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    name: String,
    child: Child,
    log: PathBuf,
    start: Instant,
}

impl Pool {
    /// A pool that writes its programs' output into files in `logs`. The folder is created when the
    /// first program starts.
    pub(crate) fn new(logs: &Path, slots: usize, limit: Duration) -> Self {
        let (waiting, running) = (VecDeque::new(), Vec::new());
        Self { slots, limit, logs: logs.to_owned(), waiting, running }
    }

    /// Adds a program behind the others.
    pub(crate) fn add(&mut self, name: impl Into<String>, command: Command) {
        self.waiting.push_back(Job { name: name.into(), command });
    }

    /// Waits for the next program to end; `None` if all have.
    pub(crate) fn next(&mut self) -> Option<Ended> {
        loop {
            while self.running.len() < self.slots
                && let Some(job) = self.waiting.pop_front()
            {
                if let Err(ended) = self.start(job) {
                    return Some(*ended);
                }
            }
            if self.running.is_empty() {
                return None;
            }
            for at in 0..self.running.len() {
                if let Some(how) = self.running[at].ended(self.limit) {
                    return Some(self.running.swap_remove(at).report(how));
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn start(&mut self, mut job: Job) -> Result<(), Box<Ended>> {
        let log = self.logs.join(job.name.replace("::", "-").replace(' ', "-") + ".txt");
        let file = fs::create_dir_all(&self.logs).and_then(|()| File::create(&log));
        let spawned = file.and_then(|file| {
            let again = file.try_clone()?;
            job.command.stdin(Stdio::null()).stdout(file).stderr(again).spawn()
        });
        let start = Instant::now();
        match spawned {
            Ok(child) => self.running.push(Running { name: job.name, child, log, start }),
            Err(error) => {
                let how = format!("cannot run {}: {error}", command::describe(&job.command));
                let (output, took) = (String::new(), Duration::ZERO);
                return Err(Box::new(Ended { name: job.name, ok: false, how, output, took }));
            }
        }
        Ok(())
    }
}

impl Running {
    /// How the program ended, if it has; kills it if it ran for longer than `limit`.
    fn ended(&mut self, limit: Duration) -> Option<Result<(), String>> {
        let of = |status: ExitStatus| match status.success() {
            true => Ok(()),
            false => Err(status.to_string()),
        };
        match self.child.try_wait() {
            Ok(Some(status)) => Some(of(status)),
            Ok(None) if self.start.elapsed() < limit => None,
            Ok(None) => {
                let _ = self.child.kill();
                let _ = self.child.wait();
                Some(Err(format!("killed: it ran for more than {} s", limit.as_secs())))
            }
            Err(error) => Some(Err(error.to_string())),
        }
    }

    fn report(self, how: Result<(), String>) -> Ended {
        let output = fs::read(&self.log).unwrap_or_default();
        Ended {
            name: self.name,
            ok: how.is_ok(),
            how: how.err().unwrap_or_default(),
            output: String::from_utf8_lossy(&output).into_owned(),
            took: self.start.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn pool(name: &str, slots: usize, limit: Duration) -> (Pool, PathBuf) {
        let logs = std::env::temp_dir().join(format!("pool-{name}-{}", std::process::id()));
        (Pool::new(&logs, slots, limit), logs)
    }

    #[test]
    fn each_program_has_its_own_output_and_end() {
        let (mut pool, logs) = pool("ends", 2, Duration::from_secs(60));
        pool.add("good", sh("echo one; echo two >&2"));
        pool.add("a::bad", sh("echo three; exit 4"));
        pool.add("none", Command::new("/not/there"));
        let mut ended: Vec<_> = std::iter::from_fn(|| pool.next()).collect();
        ended.sort_by(|a, b| a.name.cmp(&b.name));
        let said: Vec<_> =
            ended.iter().map(|e| (e.name.as_str(), e.ok, e.output.as_str())).collect();
        assert_eq!(
            said,
            [("a::bad", false, "three\n"), ("good", true, "one\ntwo\n"), ("none", false, "")]
        );
        assert!(ended[0].how.ends_with('4'), "{}", ended[0].how);
        assert!(ended[2].how.contains("there"), "{}", ended[2].how);
        assert_eq!(fs::read_to_string(logs.join("a-bad.txt")).unwrap(), "three\n");
        fs::remove_dir_all(logs).unwrap();
    }

    #[test]
    fn so_many_run_at_once_and_no_more() {
        let (mut pool, logs) = pool("slots", 2, Duration::from_secs(60));
        fs::create_dir_all(&logs).unwrap();
        let dir = logs.display();
        // The first two wait for each other; the third must not find either of them alive.
        let meet = |me: u8, other: u8| {
            sh(&format!("touch {dir}/{me}; until [ -e {dir}/{other} ]; do sleep 0.01; done"))
        };
        pool.add("1", meet(1, 2));
        pool.add("2", meet(2, 1));
        assert!(pool.next().unwrap().ok);
        assert!(pool.next().unwrap().ok);
        pool.slots = 1;
        pool.add("3", sh(&format!("touch {dir}/on; sleep 0.05; rm {dir}/on")));
        pool.add("4", sh(&format!("! [ -e {dir}/on ]")));
        assert!(std::iter::from_fn(|| pool.next()).all(|ended| ended.ok));
        fs::remove_dir_all(logs).unwrap();
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let (mut pool, logs) = pool("late", 1, Duration::from_millis(50));
        pool.add("late", sh("exec sleep 60"));
        let ended = pool.next().unwrap();
        assert!(!ended.ok && ended.how.starts_with("killed"), "{}", ended.how);
        assert!(ended.took < Duration::from_secs(30));
        assert!(pool.next().is_none());
        fs::remove_dir_all(logs).unwrap();
    }
}
