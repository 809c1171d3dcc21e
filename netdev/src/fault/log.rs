//! A line for each decision that did something: to which datagram, and what.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::link::Loss;
use super::{Decision, Plan, Seen};
use crate::kernel::descriptors::apart;

/// Bytes after which lines are written in the middle of a burst.
const LINES: usize = 64 * 1024;

/// The log of a port. Several ports and processes may append to one file: each write is of whole
/// lines.
#[derive(Debug)]
pub(crate) struct FaultLog {
    file: File,
    lines: Vec<u8>,
    port: usize,
}

impl FaultLog {
    /// Appends to a file, first what the faults are. Error: the file cannot be made or written.
    pub(crate) fn open(path: &Path, plan: &Plan, seed: u64, port: usize) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let mut log = Self { file: File::from(apart(file.into())), lines: Vec::new(), port };
        let pid = std::process::id();
        log.line(&json!({ "pid": pid, "port": port, "faults": plan.to_string(), "seed": seed }));
        log.file.write_all(&log.lines)?;
        log.lines.clear();
        Ok(log)
    }

    /// Adds the line of a decision about the `nth` datagram of its side.
    pub(crate) fn add(&mut self, now: Duration, nth: u64, seen: &Seen<'_>, decision: &Decision) {
        let mut delay = Duration::ZERO;
        let mut did: Vec<&str> = decision.loss.into_iter().map(word).collect();
        if decision.copies().count() > 1 {
            did.push("duplicated");
        }
        for fate in decision.copies() {
            delay = delay.max(fate.due.saturating_sub(now));
            for (is_so, word) in [
                (fate.flip.is_some(), "corrupted"),
                (fate.is_marked, "marked"),
                (fate.is_late, "reordered"),
                (fate.due > now, "delayed"),
            ] {
                if is_so && !did.contains(&word) {
                    did.push(word);
                }
            }
        }
        self.line(&json!({
            "us": now.as_micros() as u64,
            "port": self.port,
            "side": seen.side.name(),
            "datagram": nth,
            "peer": seen.peer,
            "opcode": seen.opcode(),
            "qp": seen.qp(),
            "psn": seen.psn(),
            "bytes": seen.payload.len(),
            "rule": decision.rule,
            "did": did,
            "delay_ns": delay.as_nanos() as u64,
        }));
        if self.lines.len() >= LINES {
            self.write();
        }
    }

    /// Writes the lines of a burst. What the file does not take is lost: the program goes on.
    pub(crate) fn write(&mut self) {
        if !self.lines.is_empty() {
            let _ = self.file.write_all(&self.lines);
            self.lines.clear();
        }
    }

    fn line(&mut self, value: &serde_json::Value) {
        // A vector takes all.
        let _ = writeln!(self.lines, "{value}");
    }
}

const fn word(loss: Loss) -> &'static str {
    match loss {
        Loss::Chance => "lost",
        Loss::Burst => "lost in a burst",
        Loss::Every => "lost as every n-th",
        Loss::Rate => "lost at the rate",
        Loss::Cut => "lost in a partition",
        Loss::Mtu => "longer than the MTU",
        Loss::Full => "too many held back",
    }
}
