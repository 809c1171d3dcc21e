//! The counters of the devices that this process has opened: printed at its exit if
//! `ROCINANTE_COUNTERS` asks for it, and shown to readers of the files below /sys/class/infiniband.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rocinante_soft::environment;
use rocinante_soft::model::device::DeviceCounters;

use crate::devices::{self, Found};
use crate::ffi::without_signals;
use crate::log;
use crate::plain::sysfs::{Counts, PortKey, Published};
use crate::plain::{OfProcess, Watched};

/// How long the exit waits for a thread that holds a lock.
const PATIENCE: Duration = Duration::from_millis(20);

/// A device, by its name and port.
type Named = (String, Option<PortKey>);

/// A device that was opened.
struct Opened {
    name: Named,
    device: Watched,
    /// Its counters when a context of it was last closed.
    last: DeviceCounters,
}

/// The devices of this process; those that are closed are summed up by their names.
#[derive(Default)]
struct Report {
    opened: Vec<Opened>,
    closed: BTreeMap<Named, DeviceCounters>,
}

/// A child of fork(2) reports nothing of its parent's.
static REPORT: OfProcess<Mutex<Report>> = OfProcess::none();

/// Whether counters may be asked for.
pub(crate) fn is_wanted() -> bool {
    is_printed() || devices::directory().is_some()
}

/// Whether counters are to be printed.
fn is_printed() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    let read = || {
        let wanted = environment::wants_counters();
        wanted.inspect_err(|error| log::print(format_args!("{error}"))).unwrap_or(false)
    };
    *WANTED.get_or_init(read)
}

/// A context of the device was opened.
pub(crate) fn opened(found: &Found, device: Watched) {
    publish();
    let mut report = REPORT.get().lock();
    if report.opened.iter().any(|opened| opened.device.is(&device)) {
        return;
    }
    let last = DeviceCounters::default();
    let name = (found.name.clone(), PortKey::of(found.interface.index).ok());
    report.opened.push(Opened { name, device, last });
}

/// A context of the device is about to be closed: the last, perhaps.
pub(crate) fn closing(device: &Watched) {
    let mut report = REPORT.get().lock();
    for opened in report.opened.iter_mut().filter(|opened| opened.device.is(device)) {
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
    let report = &mut *REPORT.get().lock();
    if let Some(at) = report.opened.iter().position(|opened| opened.device.is(device)) {
        let opened = report.opened.swap_remove(at);
        report.closed.entry(opened.name).or_default().add(&opened.last);
    }
}

/// The counters of each device. `None` if a thread that another one's exit(3) stopped has them.
fn sums() -> Option<BTreeMap<Named, DeviceCounters>> {
    let report = REPORT.own()?.try_lock_for(PATIENCE)?;
    let mut sums = report.closed.clone();
    for opened in &report.opened {
        let counters = opened.device.counters(PATIENCE).unwrap_or(opened.last);
        sums.entry(opened.name.clone()).or_default().add(&counters);
    }
    Some(sums)
}

/// The place at which the counters are published.
static PUBLISHED: OfProcess<Mutex<Option<Arc<Published>>>> = OfProcess::none();

/// Has a thread tell the counters whenever a process asks. Without a place for it, none does.
fn publish() {
    let mut published = PUBLISHED.get().lock();
    if published.is_some() {
        return;
    }
    let Some(begun) = devices::directory().and_then(|root| Published::begin(&root).ok()) else {
        return;
    };
    let begun = Arc::new(begun);
    let answering = begun.clone();
    let builder = std::thread::Builder::new().name("roce-counts".to_owned()).stack_size(256 << 10);
    let thread = without_signals(|| {
        builder.spawn(move || {
            while let Ok(question) = answering.asked() {
                answer(&answering);
                drop(question);
            }
        })
    });
    if thread.is_ok() {
        *published = Some(begun);
    }
}

/// The counters by their paths in the kernel's files.
fn of_kernel(sum: &DeviceCounters) -> Counts {
    sum.of_kernel().map(|(folder, name, count)| (format!("{folder}/{name}"), count)).into()
}

fn answer(published: &Published) {
    let Some(sums) = sums() else { return };
    let ports = sums.iter().filter_map(|((_, port), sum)| Some((*port.as_ref()?, sum)));
    let ports: BTreeMap<PortKey, Counts> =
        ports.map(|(port, sum)| (port, of_kernel(sum))).collect();
    let _ = published.answer(ports.iter().map(|(port, counts)| (*port, counts)));
}

/// The process ends: its counters stay, and are printed, those that are not 0.
pub(crate) fn end() {
    let published = PUBLISHED.own().and_then(|it| it.try_lock_for(PATIENCE)?.take());
    if let Some(published) = published {
        answer(&published);
        published.end();
    }
    if !is_printed() {
        return;
    }
    let sums = sums().unwrap_or_default();
    // Once.
    drop(
        REPORT
            .own()
            .and_then(|it| it.try_lock_for(PATIENCE))
            .map(|mut it| std::mem::take(&mut *it)),
    );
    for ((name, _), counters) in sums {
        let mut text = format!("counters of {name} (those that are not 0):");
        for (group, name, count) in counters.iter().filter(|(_, _, count)| *count > 0) {
            let name = format!("{group}.{name}");
            let _ = write!(text, "\n  {name:<40} {count}");
        }
        log::print(format_args!("{text}"));
    }
}
