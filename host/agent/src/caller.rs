//! A program that asks, and what the log says about its answer.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_netdev::Given;
use rocinante_netdev::handed::{Answer, Granted, Refused, send_answer};
use tokio::io::unix::AsyncFd;
use tracing::Level;

use crate::asker::Asker;
use crate::closers::Foreign;
use crate::journal::Journal;
use crate::limits::Share;
use crate::tally::End;

/// A program, from its connection to its answer.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) share: Share,
    journal: Arc<Journal>,
    pid: Option<i32>,
    since: Instant,
}

impl Caller {
    /// The program at the other end of a connection that was accepted just now.
    pub(crate) fn new(journal: &Arc<Journal>, share: Share, asker: Option<&Asker>) -> Self {
        let (journal, pid) = (Arc::clone(journal), asker.map(Asker::pid));
        Self { share, journal, pid, since: Instant::now() }
    }

    /// Sends a refusal.
    pub(crate) fn refuse(&self, connection: &AsyncFd<Foreign<OwnedFd>>, refused: Refused) {
        let answer = Answer::refusal(refused);
        self.said(send_answer(connection.get_ref(), &answer, &[]).is_ok(), &answer);
    }

    /// Sends the answer to a request that was worked. Returns whether it has arrived.
    pub(crate) fn answer(&self, connection: &AsyncFd<Foreign<OwnedFd>>, given: &Given) -> bool {
        // One packet into an empty queue: it does not wait.
        let sent = send_answer(connection.get_ref(), &given.answer, &given.descriptors());
        let is_sent = sent.is_ok();
        match &given.answer.outcome {
            Ok(granted) if is_sent => self.granted(granted, given.sockets().count() as u32),
            _ => self.said(is_sent, &given.answer),
        }
        is_sent
    }

    fn said(&self, is_sent: bool, answer: &Answer) {
        match &answer.outcome {
            Err(refused) if is_sent => {
                self.journal.refused(self.share, self.pid, refused, Instant::now());
            }
            _ => self.lost(),
        }
    }

    /// The program hung up before its answer.
    pub(crate) fn lost(&self) {
        let now = Instant::now();
        self.journal.count(self.share, End::Lost(now.duration_since(self.since)));
        if self.journal.permits(self.share, Level::WARN, now) {
            let (container, pid) = (self.journal.name(self.share), self.pid);
            let waited_ms = milliseconds(now.duration_since(self.since));
            tracing::warn!(container, pid, waited_ms, "hung up before its answer");
        }
    }

    fn granted(&self, granted: &Granted, ports: u32) {
        let now = Instant::now();
        self.journal.count(self.share, End::Granted(now.duration_since(self.since)));
        if self.journal.permits(self.share, Level::INFO, now) {
            let (container, pid) = (self.journal.name(self.share), self.pid);
            let (backend, slots) = match granted {
                Granted::Packet { ring } => ("packet", ring.frames),
                Granted::Xdp { chunks } => ("afxdp", *chunks),
                _ => ("another backend", 0),
            };
            let (slots, waited_ms) = (slots * ports, milliseconds(now.duration_since(self.since)));
            tracing::info!(container, pid, backend, ports, slots, waited_ms, "granted");
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10_000.0).round() / 10.0
}
