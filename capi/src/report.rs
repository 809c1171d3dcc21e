//! Counters at the program's exit, if `ROCINANTE_COUNTERS` asks for them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use rocinante::plain::{self, Watched};
use rocinante::stats::DeviceCounters;

use crate::log;

/// Names the environment variable: anything but nothing and `0` asks for counters.
const VARIABLE: &str = "ROCINANTE_COUNTERS";
/// How long the exit waits for a thread that holds a lock.
const PATIENCE: Duration = Duration::from_millis(20);

/// A device that was opened.
struct Opened {
    name: String,
    /// The process that opened it: a child of fork(2) does not report its parent's.
    process: u32,
    device: Watched,
    /// What it had counted when a context of it was last closed.
    last: DeviceCounters,
}

/// The devices of this process; those that are closed are summed up by their names.
#[derive(Default)]
struct Report {
    opened: Vec<Opened>,
    closed: BTreeMap<String, DeviceCounters>,
}

static REPORT: Mutex<Option<Report>> = Mutex::new(None);

/// Whether counters are to be printed.
pub(crate) fn is_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    let read = || std::env::var_os(VARIABLE).is_some_and(|word| !word.is_empty() && word != "0");
    *WANTED.get_or_init(read)
}

/// A context of the device was opened.
pub(crate) fn opened(name: &str, device: Watched) {
    let process = std::process::id();
    let mut report = REPORT.lock();
    let report = report.get_or_insert_default();
    report.opened.retain(|opened| opened.process == process);
    if report.opened.iter().any(|opened| opened.device.is(&device)) {
        return;
    }
    let (name, last) = (name.to_owned(), DeviceCounters::default());
    report.opened.push(Opened { name, process, device, last });
}

/// A context of the device is about to be closed: the last, perhaps.
pub(crate) fn closing(device: &Watched) {
    let mut report = REPORT.lock();
    let opened = report.iter_mut().flat_map(|report| &mut report.opened);
    for opened in opened.filter(|opened| opened.device.is(device)) {
        if let Some(counters) = device.counters(PATIENCE) {
            opened.last = counters;
        }
    }
}

/// A context of the device was closed.
pub(crate) fn closed(device: &Watched) {
    if device.counters(PATIENCE).is_some() {
        return;
    }
    let mut report = REPORT.lock();
    let Some(report) = &mut *report else { return };
    if let Some(at) = report.opened.iter().position(|opened| opened.device.is(device)) {
        let opened = report.opened.swap_remove(at);
        plain::add(report.closed.entry(opened.name).or_default(), &opened.last);
    }
}

/// Prints the counters that are not 0, once.
pub(crate) fn print() {
    // A thread that another one's exit(3) stopped may hold it.
    let Some(mut report) = REPORT.try_lock_for(PATIENCE) else { return };
    let Some(Report { opened, closed: mut sums }) = report.take() else { return };
    let process = std::process::id();
    for opened in opened.into_iter().filter(|opened| opened.process == process) {
        let counters = opened.device.counters(PATIENCE).unwrap_or(opened.last);
        plain::add(sums.entry(opened.name).or_default(), &counters);
    }
    for (name, counters) in sums {
        let mut text = format!("counters of {name} (those that are not 0):");
        for (group, name, count) in counters.iter().filter(|(_, _, count)| *count > 0) {
            let name = format!("{group}.{name}");
            let _ = write!(text, "\n  {name:<40} {count}");
        }
        log::print(format_args!("{text}"));
    }
}
