//! The demo's two processes in the containers, and the requests that they get in each phase.

use std::fmt::Display;
use std::time::{Duration, Instant};

use rocinante_lab::{Lab, LabError};

use crate::messages::{Answer, Bulk, BulkRequest, ConnectRequest, Request};
use crate::workers::{SENDER, Workers};

/// The default ACK timeout and retries of a connection: 0.54 s, and seven. No packet is lost here.
/// But on a busy machine a container's process may not run for half a second, and after that time
/// the default of 67 ms would give up the peer.
const PATIENT: (u8, u8) = (17, 7);

/// The two processes. They end when this is dropped.
pub(super) struct Pair {
    workers: Workers,
    phase: String,
    /// The time at which the whole demo must be over.
    deadline: Instant,
}

impl Pair {
    /// Starts a process in each of the first two containers.
    pub(super) fn start(lab: &Lab, deadline: Instant) -> Result<Self, LabError> {
        let side = |index, name| (lab.container(index), lab.container(index).ipv4().into(), name);
        let workers = Workers::start(&[side(0, "container a"), side(1, "container b")], true)?;
        Ok(Self { workers, phase: String::new(), deadline })
    }

    /// Begins a phase, which errors name from now on.
    pub(super) fn phase(&mut self, name: &str) {
        name.clone_into(&mut self.phase);
    }

    /// An error in this phase.
    pub(super) fn fault(&self, what: impl Display) -> String {
        format!("{}: {what}", self.phase)
    }

    /// Opens the devices. The inner error says why the backend is not to be had here.
    pub(super) fn open(&mut self, netdev: &str) -> Result<Result<(), String>, String> {
        let limit = self.limit(Duration::from_secs(10));
        let opened = self.workers.open(netdev, limit);
        opened.map_err(|what| self.late_or(what))
    }

    /// Connects a new queue pair with regions of twice `half` bytes, which waits long for its peer.
    pub(super) fn connect(&mut self, mtu: u32, half: usize) -> Result<(), String> {
        self.connect_with(mtu, half, PATIENT)
    }

    /// The same with another ACK timeout and other retries.
    pub(super) fn connect_with(
        &mut self,
        mtu: u32,
        half: usize,
        (timeout, retry_cnt): (u8, u8),
    ) -> Result<(), String> {
        let how = ConnectRequest { slot: 0, mtu, half, timeout, retry_cnt, traffic_class: 0 };
        self.both(Duration::from_secs(15), &Request::Connect(how)).map(drop)
    }

    /// Sends both containers the same request.
    pub(super) fn both(
        &mut self,
        limit: Duration,
        request: &Request,
    ) -> Result<Vec<Answer>, String> {
        self.each(limit, [Some(request), Some(request)])
    }

    /// Container a sends WRITEs to b for this many milliseconds of warm-up and of measurement.
    pub(super) fn bulk(
        &mut self,
        size: usize,
        depth: usize,
        list: usize,
        (warm_millis, millis): (u64, u64),
    ) -> Result<Bulk, String> {
        let request = BulkRequest { size, depth, list, warm_millis, millis, served: true };
        let limit = Duration::from_millis(warm_millis + millis) + Duration::from_secs(15);
        match self
            .each(limit, [Some(&Request::Bulk(request)), Some(&Request::Serve)])?
            .swap_remove(0)
        {
            Answer::Bulk(bulk) => Ok(bulk),
            other => Err(self.fault(format!("unexpected answer {other:?}"))),
        }
    }

    /// One WRITE from container a: its status and seconds.
    pub(super) fn write(&mut self, limit: Duration) -> Result<(String, f64), String> {
        match self.each(limit, [Some(&Request::Write { fill: 1 }), None])?.swap_remove(SENDER) {
            Answer::Wrote { status, seconds } => Ok((status, seconds)),
            other => Err(self.fault(format!("unexpected answer {other:?}"))),
        }
    }

    fn each(
        &mut self,
        limit: Duration,
        wanted: [Option<&Request>; 2],
    ) -> Result<Vec<Answer>, String> {
        let answers = self.workers.each(&wanted.map(Option::<&Request>::cloned), self.limit(limit));
        answers.map_err(|what| self.late_or(what))
    }

    fn limit(&self, limit: Duration) -> Duration {
        limit.min(self.deadline.saturating_duration_since(Instant::now()))
    }

    fn late_or(&self, what: String) -> String {
        let late = Instant::now() >= self.deadline;
        self.fault(if late { "the time for the whole demo is over".to_owned() } else { what })
    }
}
