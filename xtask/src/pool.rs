//! Several programs in parallel, each with its output in a file of its own.
//!
//! Most tests wait for timers and peers, so more of them than processors run at once.

use crate::command;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
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

/// Programs that run in their order, by unique names, and how many of them at a time.
pub(crate) type Queue = (VecDeque<(String, Command)>, usize);

/// Runs the programs of all queues beside each other, and calls `ended` for each. A program that
/// runs for longer than `limit` is killed. The output of each is in a file in `logs`, by its name.
pub(crate) fn run<const QUEUES: usize>(
    queues: [Queue; QUEUES],
    logs: &Path,
    limit: Duration,
    mut ended: impl FnMut(Ended),
) {
    let queues = queues.map(|(jobs, slots)| (Mutex::new(jobs), slots));
    let (report, reports) = mpsc::channel();
    std::thread::scope(|scope| {
        for jobs in queues.iter().flat_map(|(jobs, slots)| std::iter::repeat_n(jobs, *slots)) {
            let report = report.clone();
            scope.spawn(move || {
                while let Some((name, command)) = jobs.lock().ok().and_then(|mut it| it.pop_front())
                {
                    let _ = report.send(one(name, command, logs, limit));
                }
            });
        }
        drop(report);
        reports.into_iter().for_each(&mut ended);
    });
}

fn one(name: String, mut command: Command, logs: &Path, limit: Duration) -> Ended {
    let log = logs.join(name.replace("::", "-").replace(' ', "-") + ".txt");
    let start = Instant::now();
    let status = fs::create_dir_all(logs).and_then(|()| {
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        wait(&mut command, limit)
    });
    let how = match status {
        Ok(Some(status)) if status.success() => None,
        Ok(Some(status)) => Some(status.to_string()),
        Ok(None) => Some(format!("killed: it ran for more than {} s", limit.as_secs())),
        Err(error) => Some(format!("cannot run {}: {error}", command::describe(&command))),
    };
    let output = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    Ended { name, ok: how.is_none(), how: how.unwrap_or_default(), output, took: start.elapsed() }
}

/// Runs a program to its end; `None` if it had to be killed.
fn wait(command: &mut Command, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let (start, mut child) = (Instant::now(), command.spawn()?);
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait().map(|_| None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(name: &str, slots: usize, limit: Duration, scripts: &[(&str, String)]) -> Vec<Ended> {
        let logs = crate::files::scratch(&format!("pool-{name}")).expect("a folder");
        let job = |(name, script): &(&str, String)| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(&logs);
            ((*name).to_owned(), command)
        };
        let mut jobs: VecDeque<_> = scripts.iter().map(job).collect();
        jobs.push_back(("none".into(), Command::new("/not/there")));
        let mut ended = Vec::new();
        run([(jobs, slots)], &logs, limit, |it| ended.push(it));
        for it in ended.iter().filter(|it| it.name != "none") {
            let log = logs.join(it.name.replace("::", "-") + ".txt");
            assert_eq!(fs::read_to_string(log).expect("a log"), it.output);
        }
        fs::remove_dir_all(logs).expect("it is ours");
        ended.sort_by(|a, b| a.name.cmp(&b.name));
        ended
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn each_program_has_its_own_output_and_end() {
        let scripts = [("good", "echo one; echo two >&2"), ("a::bad", "echo three; exit 4")];
        let ended = all("ends", 2, LONG, &scripts.map(|(name, script)| (name, script.into())));
        let said: Vec<_> =
            ended.iter().map(|e| (e.name.as_str(), e.ok, e.output.as_str())).collect();
        let wanted =
            [("a::bad", false, "three\n"), ("good", true, "one\ntwo\n"), ("none", false, "")];
        assert_eq!(said, wanted);
        assert!(ended[0].how.ends_with('4'), "{}", ended[0].how);
        assert!(ended[2].how.contains("there"), "{}", ended[2].how);
    }

    #[test]
    fn as_many_run_at_once_as_there_are_slots_and_no_more() {
        // The first two wait for each other; alone, no two meet.
        let meets =
            |me: u8, other: u8| format!("touch {me}; until [ -e {other} ]; do sleep 0.01; done");
        let two = all("two", 2, LONG, &[("1", meets(1, 2)), ("2", meets(2, 1))]);
        assert!(two[..2].iter().all(|ended| ended.ok));
        let alone = "mkdir on && sleep 0.05 && rmdir on".to_owned();
        let one = all("one", 1, LONG, &[("1", alone.clone()), ("2", alone)]);
        assert!(one[..2].iter().all(|ended| ended.ok));
    }

    #[test]
    fn a_queue_does_not_wait_for_another() {
        let logs = crate::files::scratch("pool-queues").expect("a folder");
        let queue = |name: &str, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(&logs);
            (VecDeque::from([(name.to_owned(), command)]), 1)
        };
        let waits = queue("waits", "until [ -e there ]; do sleep 0.01; done");
        let mut ended = Vec::new();
        run([waits, queue("comes", "touch there")], &logs, LONG, |it| ended.push(it));
        assert!(ended.len() == 2 && ended.iter().all(|it| it.ok), "{ended:?}");
        fs::remove_dir_all(logs).expect("it is ours");
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let ended = all("late", 1, Duration::from_millis(50), &[("late", "exec sleep 60".into())]);
        assert!(!ended[0].ok && ended[0].how.starts_with("killed"), "{}", ended[0].how);
        assert!(ended[0].took < Duration::from_secs(30));
    }
}
