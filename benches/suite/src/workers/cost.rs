//! The costs of a measurement: processor time, memory, wake-ups.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::resource::{UsageWho, getrusage};

use rocinante_cli::output::{Failure, Result};

/// Processor time of this process in seconds, in user and kernel mode.
pub(super) fn own() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    let usage = usage.map_err(|error| Failure::Failed(format!("getrusage: {error}")))?;
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// Number of the machine's processors.
pub(super) fn online() -> Result<usize> {
    let lines = read("/proc/stat")?;
    let count = lines.lines().filter(|line| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    Ok(count.count().max(1))
}

/// Seconds since the machine started that all processors were idle or waiting for a disk, in sum.
pub(super) fn idle() -> Result<f64> {
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok(Ticks::now()?.idle as f64 / per_second)
}

/// Seconds since the machine started that all processors spent in softirqs, in sum. The kernel
/// books them apart from the processes that they interrupt if it has `CONFIG_IRQ_TIME_ACCOUNTING`.
pub(super) fn softirq() -> Result<f64> {
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok(Ticks::now()?.softirq as f64 / per_second)
}

/// Time of all processors since the machine started, in clock ticks (`proc_stat(5)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticks {
    all: u64,
    /// Nothing to do, or waiting for a disk.
    idle: u64,
    softirq: u64,
    /// The hypervisor ran something else.
    stolen: u64,
}

impl Ticks {
    pub(crate) fn now() -> Result<Self> {
        Self::parse(&read("/proc/stat")?)
            .ok_or_else(|| Failure::Failed("/proc/stat has no times of the processors".into()))
    }

    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let fields: Vec<u64> = fields.map(str::parse).collect::<Result<_, _>>().ok()?;
        // Time of guests, which follows, is part of the user's.
        let [user, nice, system, idle, waiting, irq, softirq, stolen, ..] = fields[..] else {
            return None;
        };
        let idle = idle + waiting;
        Some(Self {
            all: user + nice + system + idle + irq + softirq + stolen,
            idle,
            softirq,
            stolen,
        })
    }

    /// The part of the time since `earlier` that was stolen, from 0 to 1.
    pub(crate) fn stolen_since(&self, earlier: &Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all);
        self.stolen.saturating_sub(earlier.stolen) as f64 / all.max(1) as f64
    }
}

/// Resident bytes of this process.
pub(crate) fn resident() -> Result<u64> {
    let statm = read("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let pages =
        pages.ok_or_else(|| Failure::Failed("/proc/self/statm has no resident size".into()))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// The first part of the names of software devices' threads.
const OF_DEVICES: &str = "roce-";

/// How often the threads of this process's devices went to sleep, which is how often they were
/// woken (`proc_pid_status(5)`).
pub(super) fn naps() -> Result<u64> {
    let failed = |error: io::Error| Failure::Failed(format!("/proc/self/task: {error}"));
    let mut naps = 0;
    for task in fs::read_dir("/proc/self/task").map_err(failed)? {
        naps += naps_of(&task.map_err(failed)?.path()).unwrap_or(0);
    }
    Ok(naps)
}

/// The same of one thread. `None` if it is not a device's thread, or has ended.
fn naps_of(task: &Path) -> Option<u64> {
    let status = fs::read_to_string(task.join("status")).ok()?;
    let field = |name| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
    let is_of_device = field("Name:")?.starts_with(OF_DEVICES);
    is_of_device.then(|| field("voluntary_ctxt_switches:")?.parse().ok())?
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Failure::Failed(format!("{path}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn stolen_time_is_a_part_of_all_time() {
        let of = |idle: u64, stolen: u64| {
            let stat = format!("cpu  10 20 30 {idle} 5 1 4 {stolen} 7 0\ncpu0 1 2 3 4 5 6 7 8\n");
            Ticks::parse(&stat).unwrap()
        };
        let (before, after) = (of(100, 2), of(190, 12));
        assert_eq!((before.all, before.idle, before.softirq, before.stolen), (172, 105, 4, 2));
        assert!((after.stolen_since(&before) - 0.1).abs() < 1e-9);
        assert_eq!(before.stolen_since(&before), 0.0);
        for stat in ["", "cpu  1 2 3\n", "cpu  1 2 3 4 5 6 7 eight\n", "intr 1 2 3 4 5 6 7 8\n"] {
            assert_eq!(Ticks::parse(stat), None, "{stat}");
        }
    }

    #[test]
    fn naps_are_those_of_threads_of_devices() {
        // Threads of other tests come and go, so each thread counts its own.
        let own = || naps_of(Path::new("/proc/thread-self"));
        let look = move || {
            let before = own();
            (0..5).for_each(|_| thread::sleep(Duration::from_millis(1)));
            (before, own(), naps().unwrap())
        };
        let run =
            |name: String| thread::Builder::new().name(name).spawn(look).unwrap().join().unwrap();
        let (before, after, all) = run(format!("{OF_DEVICES}test"));
        assert!(after >= before.map(|before| before + 5), "{before:?} before, {after:?} after");
        assert!(Some(all) >= after, "{all} of all, {after:?} of one");
        let (before, after, _) = run("worker".to_owned());
        assert_eq!((before, after), (None, None));
    }
}
