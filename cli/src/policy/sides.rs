//! The processes in the containers: sends orders to them, and receives answers within a time limit.

use std::net::IpAddr;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rocinante_lab::{ChildGuard, LabError};

use super::lab::{Family, Network};
use super::order::{Answer, Order};
use crate::orders;

/// The container that sends requests, the one that receives them, and a second one that sends.
pub(super) const SENDER: usize = 0;
pub(super) const RECEIVER: usize = 1;
pub(super) const SECOND: usize = 2;

/// Names for messages.
const NAMES: [&str; 3] = ["the sender", "the receiver", "the second sender"];

/// Time limit of an answer.
const LIMIT: Duration = Duration::from_secs(30);

/// The processes. They end when this is dropped.
pub(super) struct Sides {
    processes: Vec<Process>,
}

struct Process {
    name: &'static str,
    orders: ChildStdin,
    lines: Receiver<String>,
    child: ChildGuard,
}

/// The reason why a backend cannot be tried, or an error.
pub(super) enum OpenFault {
    Unavailable(String),
    Failed(String),
}

impl Sides {
    /// Starts a process in each container and opens its device.
    pub(super) fn open(network: &Network, netdev: &str, family: Family) -> Result<Self, OpenFault> {
        let failed = |error: LabError| OpenFault::Failed(error.to_string());
        let receiver = network.address(RECEIVER, family);
        let processes = (0..network.containers().len())
            .map(|index| {
                let peer = (index != RECEIVER).then_some(receiver);
                Process::start(network, index, network.address(index, family), peer)
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed)?;
        let mut sides = Self { processes };
        let open = Order::Open { netdev: netdev.to_owned() };
        let orders = vec![Some(open); sides.processes.len()];
        for answer in sides.each(&orders).map_err(OpenFault::Failed)? {
            if let Answer::Unavailable { why } = answer {
                return Err(OpenFault::Unavailable(why));
            }
        }
        Ok(sides)
    }

    /// Gives each container its order, and waits for the answers: `Done` of those without one.
    pub(super) fn each(&mut self, wanted: &[Option<Order>]) -> Result<Vec<Answer>, String> {
        for (process, order) in self.processes.iter_mut().zip(wanted) {
            if let Some(order) = order {
                orders::give(&mut process.orders, order)?;
            }
        }
        let deadline = Instant::now() + LIMIT;
        let answers = self.processes.iter_mut().zip(wanted);
        answers
            .map(|(process, order)| match order {
                Some(_) => process.answer(deadline),
                None => Ok(Answer::Done),
            })
            .collect()
    }

    /// Gives one container an order.
    pub(super) fn one(&mut self, index: usize, order: Order) -> Result<Answer, String> {
        let mut orders = vec![None; self.processes.len()];
        orders[index] = Some(order);
        Ok(self.each(&orders)?.swap_remove(index))
    }
}

impl Process {
    fn start(
        network: &Network,
        index: usize,
        address: IpAddr,
        peer: Option<IpAddr>,
    ) -> Result<Self, LabError> {
        let address = address.to_string();
        let mut args = vec!["policy-worker", "--address", &address];
        let peer = peer.map(|peer| peer.to_string());
        args.extend(peer.iter().flat_map(|peer| ["--peer", peer]));
        let mut child = network.containers()[index].spawn(&mut orders::command(args))?;
        let (sender, lines) = channel();
        let orders = orders::listen(&mut child, move |line| {
            line.is_some_and(|line| sender.send(line).is_ok())
        });
        Ok(Self { name: NAMES[index], orders, lines, child })
    }

    fn answer(&mut self, deadline: Instant) -> Result<Answer, String> {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = self.lines.recv_timeout(left).map_err(|_| match self.child.try_wait() {
            Ok(Some(status)) => format!("the process of {} ended ({status})", self.name),
            _ => format!("no answer within {} s from {}", LIMIT.as_secs(), self.name),
        })?;
        match serde_json::from_str(&line) {
            Ok(Answer::Failed { why }) => Err(format!("{}: {why}", self.name)),
            Ok(answer) => Ok(answer),
            Err(error) => Err(format!("{}: {error}: {line}", self.name)),
        }
    }
}
