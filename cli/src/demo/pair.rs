//! The demo's connection to the two processes in the containers: sends orders, and receives answers
//! within a time limit.

use std::fmt;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::order::{Answer, Order};
use super::worker::ContainerSide;
use crate::orders;
use rocinante_lab::{ChildGuard, Lab, LabError};

/// A failure while a backend was shown.
#[derive(Debug)]
pub(super) struct Fault {
    /// The phase in which it happened.
    phase: String,
    what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.phase, self.what)
    }
}

impl Fault {
    pub(super) fn new(phase: &str, what: impl fmt::Display) -> Self {
        Self { phase: phase.to_owned(), what: what.to_string() }
    }
}

/// Time to wait for the other side's account of a failure.
const OTHER: Duration = Duration::from_millis(500);

/// The two processes. They end when this is dropped.
pub(super) struct Pair {
    workers: [WorkerProcess; 2],
    lines: Receiver<(ContainerSide, Option<String>)>,
    /// The time at which the whole demo must be over.
    deadline: Instant,
}

struct WorkerProcess {
    side: ContainerSide,
    orders: ChildStdin,
    child: ChildGuard,
}

impl Pair {
    /// Starts a process in each of the first two containers.
    pub(super) fn start(lab: &Lab, deadline: Instant) -> Result<Self, LabError> {
        let (sender, lines) = channel();
        let start = |side, here: usize, there: usize| {
            let [address, peer] = [here, there].map(|i| lab.container(i).ipv4().to_string());
            let name = if side == ContainerSide::A { "a" } else { "b" };
            let args = ["demo-worker", "--side", name, "--address", &address, "--peer", &peer];
            let mut child = lab.container(here).spawn(&mut orders::command(args))?;
            let sender = sender.clone();
            let orders = orders::listen(&mut child, move |line| sender.send((side, line)).is_ok());
            Ok(WorkerProcess { side, orders, child })
        };
        let workers = [start(ContainerSide::A, 0, 1)?, start(ContainerSide::B, 1, 0)?];
        Ok(Self { workers, lines, deadline })
    }

    /// Gives both containers the same order.
    pub(super) fn both(
        &mut self,
        phase: &str,
        limit: Duration,
        order: &Order,
    ) -> Result<[Answer; 2], Fault> {
        self.each(phase, limit, [Some(order), Some(order)])
    }

    /// Container a gets an order, and b serves it.
    pub(super) fn served(
        &mut self,
        phase: &str,
        limit: Duration,
        order: &Order,
    ) -> Result<Answer, Fault> {
        let [answer, _] = self.each(phase, limit, [Some(order), Some(&Order::Serve)])?;
        Ok(answer)
    }

    /// Container a gets an order, and b gets none.
    pub(super) fn first(
        &mut self,
        phase: &str,
        limit: Duration,
        order: &Order,
    ) -> Result<Answer, Fault> {
        let [answer, _] = self.each(phase, limit, [Some(order), None])?;
        Ok(answer)
    }

    /// Gives the orders and waits for the answers.
    fn each(
        &mut self,
        phase: &str,
        limit: Duration,
        wanted: [Option<&Order>; 2],
    ) -> Result<[Answer; 2], Fault> {
        let fault = |what: String| Fault::new(phase, what);
        let mut missing = Vec::new();
        for (worker, order) in self.workers.iter_mut().zip(wanted) {
            let Some(order) = order else { continue };
            orders::give(&mut worker.orders, order).map_err(fault)?;
            missing.push(worker.side);
        }
        let deadline = (Instant::now() + limit).min(self.deadline);
        let mut answers = [Answer::Done, Answer::Done];
        while !missing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let (side, line) = self.lines.recv_timeout(left).map_err(|error| {
                fault(match error {
                    RecvTimeoutError::Timeout if deadline == self.deadline => {
                        "the time for the whole demo is over".to_owned()
                    }
                    _ => format!("no answer within {} s from {}", limit.as_secs(), names(&missing)),
                })
            })?;
            let answer = self.understood(side, line).map_err(|what| {
                // The other side's answer may have the cause.
                let other = self.lines.recv_timeout(OTHER);
                let other = other.map(|(side, line)| self.understood(side, line));
                fault(match other {
                    Ok(Err(other)) => format!("{what}; {other}"),
                    _ => what,
                })
            })?;
            answers[side as usize] = answer;
            missing.retain(|other| *other != side);
        }
        Ok(answers)
    }

    /// Reads the answer in a line.
    ///
    /// # Errors
    /// The failure in that container, as text.
    fn understood(&mut self, side: ContainerSide, line: Option<String>) -> Result<Answer, String> {
        let line = line.ok_or_else(|| self.ended(side))?;
        match serde_json::from_str(&line) {
            Ok(Answer::Failed { why }) => Err(format!("container {}: {why}", name(side))),
            Ok(answer) => Ok(answer),
            Err(error) => Err(format!("container {}: {error}: {line}", name(side))),
        }
    }

    /// Describes how a process ended unexpectedly.
    fn ended(&mut self, side: ContainerSide) -> String {
        let worker = &mut self.workers[side as usize];
        let how = match worker.child.wait(Duration::from_secs(1)) {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        format!("the process in container {} ended ({how})", name(side))
    }
}

fn name(side: ContainerSide) -> &'static str {
    match side {
        ContainerSide::A => "a",
        ContainerSide::B => "b",
    }
}

fn names(sides: &[ContainerSide]) -> String {
    let names: Vec<_> = sides.iter().map(|side| format!("container {}", name(*side))).collect();
    names.join(" and ")
}
