//! Processes of this program in containers: sends them requests, and receives their answers within
//! a time limit.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, Container, LabError};

use crate::messages::{Answer, Request};

/// The container that sends requests, the one that accepts connections and receives requests, and a
/// second one that sends.
pub(crate) const SENDER: usize = 0;
pub(crate) const RECEIVER: usize = 1;
pub(crate) const SECOND: usize = 2;

/// Time to wait for another side's account of a failure.
const OTHER: Duration = Duration::from_millis(500);

/// A process in each container. They end when this is dropped.
pub(crate) struct Workers {
    workers: Vec<Worker>,
    lines: Receiver<(usize, Option<String>)>,
}

struct Worker {
    name: &'static str,
    requests: ChildStdin,
    child: ChildGuard,
}

impl Workers {
    /// Starts a process in each container, which has this address and this name in messages. If
    /// they are `bound`, each of the first two has a core of its own.
    pub(crate) fn start(
        containers: &[(&Container, IpAddr, &'static str)],
        bound: bool,
    ) -> Result<Self, LabError> {
        let (sender, lines) = channel();
        let receiver = containers[RECEIVER].1.to_string();
        let start = |index: usize| {
            let (container, address, name) = containers[index];
            let mut command = Command::new(own_path());
            command.args(["lab-worker", "--address", &address.to_string()]);
            if index != RECEIVER {
                command.args(["--peer", &receiver]);
            }
            if bound {
                command.args(["--core", &index.to_string()]);
            }
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = container.spawn(&mut command)?;
            let stdout = child.child_mut().stdout.take().expect("a pipe was asked for");
            let requests = child.child_mut().stdin.take().expect("a pipe was asked for");
            let sender = sender.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                lines.map(Some).chain([None]).all(|line| sender.send((index, line)).is_ok())
            });
            Ok(Worker { name, requests, child })
        };
        let workers = (0..containers.len()).map(start).collect::<Result<_, LabError>>()?;
        Ok(Self { workers, lines })
    }

    /// Has each process open its device. The inner error says why the backend is not to be had
    /// here.
    pub(crate) fn open(
        &mut self,
        netdev: &str,
        limit: Duration,
    ) -> Result<Result<(), String>, String> {
        let open = Request::Open { netdev: netdev.to_owned() };
        let answers = self.each(&vec![Some(open); self.workers.len()], limit)?;
        let unavailable = answers.into_iter().find_map(|answer| match answer {
            Answer::Unavailable { why } => Some(why),
            _ => None,
        });
        Ok(unavailable.map_or(Ok(()), Err))
    }

    /// Sends each process its request, and waits for the answers: `Done` of those without one.
    pub(crate) fn each(
        &mut self,
        wanted: &[Option<Request>],
        limit: Duration,
    ) -> Result<Vec<Answer>, String> {
        let mut missing = Vec::new();
        for (index, (worker, request)) in self.workers.iter_mut().zip(wanted).enumerate() {
            let Some(request) = request else { continue };
            let line = serde_json::to_string(request).map_err(|error| error.to_string())?;
            // If the process has ended, its missing answer shows that.
            let _ = writeln!(worker.requests, "{line}");
            missing.push(index);
        }
        let deadline = Instant::now() + limit;
        let mut answers = vec![Answer::Done; self.workers.len()];
        while !missing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let (index, line) = self.lines.recv_timeout(left).map_err(|_| {
                let names: Vec<_> = missing.iter().map(|index| self.workers[*index].name).collect();
                format!("no answer within {} s from {}", limit.as_secs(), names.join(" and "))
            })?;
            answers[index] = self.understood(index, line).map_err(|what| {
                // Another side's answer may have the cause.
                let other = self.lines.recv_timeout(OTHER);
                match other.map(|(index, line)| self.understood(index, line)) {
                    Ok(Err(other)) => format!("{what}; {other}"),
                    _ => what,
                }
            })?;
            missing.retain(|other| *other != index);
        }
        Ok(answers)
    }

    /// Sends one process a request.
    pub(crate) fn one(
        &mut self,
        index: usize,
        request: Request,
        limit: Duration,
    ) -> Result<Answer, String> {
        let mut requests = vec![None; self.workers.len()];
        requests[index] = Some(request);
        Ok(self.each(&requests, limit)?.swap_remove(index))
    }

    /// Reads the answer in a line. Error: the failure in that container, as text.
    fn understood(&mut self, index: usize, line: Option<String>) -> Result<Answer, String> {
        let Worker { name, child, .. } = &mut self.workers[index];
        let Some(line) = line else {
            let how = match child.wait(Duration::from_secs(1)) {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            return Err(format!("the process of {name} ended ({how})"));
        };
        match serde_json::from_str(&line) {
            Ok(Answer::Failed { why }) => Err(format!("{name}: {why}")),
            Ok(answer) => Ok(answer),
            Err(error) => Err(format!("{name}: {error}: {line}")),
        }
    }
}

/// The path of this program, even if its file was replaced meanwhile. `ROCINANTE_PROGRAM` names it
/// to a program that only uses this library.
fn own_path() -> PathBuf {
    if let Some(path) = std::env::var_os("ROCINANTE_PROGRAM") {
        return path.into();
    }
    match std::env::current_exe() {
        Ok(path) if path.exists() => path,
        _ => "/proc/self/exe".into(),
    }
}
