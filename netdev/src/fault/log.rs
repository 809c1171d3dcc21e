//! A line for each fault that struck a datagram, a call or a completion, and for each event.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::link::Loss;
use super::{Decision, Plan, Seen};
use crate::kernel::descriptors::apart;
use crate::kernel::silent;

/// Bytes after which lines are written in the middle of a burst.
const LINES: usize = 64 * 1024;

/// The log of a port, or of a device itself. Several ports and processes may append to one file:
/// each write is of whole lines. It never waits: lines that a full pipe or disk does not take are
/// lost, and counted.
#[derive(Debug)]
pub(crate) struct FaultLog {
    file: File,
    lines: Vec<u8>,
    /// How long the line about lost ones is, with which `lines` may begin.
    notice: usize,
    /// The address of its device, and the number of its port; without one, the device itself.
    of: (IpAddr, Option<usize>),
    pid: u32,
    /// Lost lines that no line in the file names.
    lost: u64,
    /// Whether the file has only the beginning of the last line.
    is_torn: bool,
}

/// A line on stderr has named the loss of a log.
static HAS_SAID: AtomicBool = AtomicBool::new(false);

impl FaultLog {
    /// Appends to a file, first what the faults are. Error: the file cannot be made or written, or
    /// it is a pipe without a reader.
    pub(crate) fn open(
        path: &Path,
        plan: &Plan,
        seed: u64,
        of: (IpAddr, Option<usize>),
    ) -> io::Result<Self> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path)?;
        let file = File::from(apart(file.into()));
        let pid = std::process::id();
        let (lines, lost) = (Vec::new(), 0);
        let mut log = Self { file, lines, notice: 0, of, pid, lost, is_torn: false };
        log.line(json!({ "faults": plan.to_string(), "seed": seed }));
        log.write_lines().map(|()| log)
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
        self.line(json!({
            "us": now.as_micros() as u64,
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

    /// Writes the lines of a burst. The program goes on without those that the file does not take.
    pub(crate) fn write(&mut self) {
        if !self.lines.is_empty() {
            let _ = self.write_lines();
        }
    }

    fn write_lines(&mut self) -> io::Result<()> {
        let (mut written, mut result) = (0, Ok(()));
        while written < self.lines.len() && result.is_ok() {
            match silent::write(self.file.as_fd(), &self.lines[written..]) {
                Ok(0) => result = Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    Self::say(&error);
                    result = Err(error);
                }
            }
        }
        if let Some(last) = written.checked_sub(1) {
            self.is_torn = self.lines[last] != b'\n';
        }
        if written >= self.notice && self.notice > 0 {
            self.lost = 0;
        }
        let rest = &self.lines[written.max(self.notice)..];
        self.lost += rest.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.lines.clear();
        self.notice = 0;
        result
    }

    /// Prints once in a process that the file takes no more lines. A file that is full for a moment
    /// gets a line about the lost ones later.
    fn say(error: &io::Error) {
        if error.kind() != io::ErrorKind::WouldBlock && !HAS_SAID.swap(true, Ordering::Relaxed) {
            let text = format!("rocinante: the log of faults is lost: {error}\n");
            // A process without stderr gets no line.
            let _ = silent::write(io::stderr().as_fd(), text.as_bytes());
        }
    }

    /// Adds a line, after one about those that are lost, if there are any.
    pub(super) fn line(&mut self, value: Value) {
        if self.lines.is_empty() && self.lost > 0 {
            if self.is_torn {
                self.lines.push(b'\n');
            }
            self.push(json!({ "lost_lines": self.lost }));
            self.notice = self.lines.len();
        }
        self.push(value);
    }

    /// Adds a line that also says of which port it is.
    fn push(&mut self, mut value: Value) {
        let Self { of: (device, nth), pid, lines, .. } = self;
        value["pid"] = json!(pid);
        value["address"] = json!(device);
        value["port"] = json!(nth);
        // A vector takes all.
        let _ = writeln!(lines, "{value}");
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
