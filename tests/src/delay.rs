//! How long the threads of this process were runnable but did not run. A delay of that length is
//! the machine's fault, not theirs.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// The delays up to some time.
#[derive(Debug)]
pub(crate) struct Delay {
    /// The delay of each thread.
    threads: BTreeMap<String, Duration>,
    stolen: Duration,
}

/// `USER_HZ` (time(7)).
const TICK: Duration = Duration::from_millis(10);

impl Delay {
    pub(crate) fn now() -> Self {
        Self { threads: threads(), stolen: stolen() }
    }

    /// The delay since. Threads that have ended do not count.
    pub(crate) fn passed(&self) -> Duration {
        let now = Self::now();
        let before = |id| self.threads.get(id).copied().unwrap_or_default();
        let threads = now.threads.iter().map(|(id, delay)| delay.saturating_sub(before(id)));
        threads.sum::<Duration>() + now.stolen.saturating_sub(self.stolen)
    }
}

/// How long each thread has waited for a processor: the second number of `schedstat`
/// (proc_pid_schedstat(5), sched-stats.rst of Linux).
fn threads() -> BTreeMap<String, Duration> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks
        .filter_map(|task| {
            let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
            let waited = stat.split_whitespace().nth(1)?.parse().ok()?;
            Some((task.file_name().to_string_lossy().into_owned(), Duration::from_nanos(waited)))
        })
        .collect()
}

/// How long other guests of the machine have had our processors: the eighth number of the first
/// line (proc_stat(5)).
fn stolen() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stat.split_whitespace().nth(8).and_then(|ticks| ticks.parse().ok());
    TICK * ticks.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// More threads than processors, all of them busy.
    #[test]
    fn waiting_for_a_processor_is_counted() {
        let before = Delay::now();
        let until = Instant::now() + Duration::from_millis(100);
        let count = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        let passed = std::thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| while Instant::now() < until + Duration::from_millis(50) {});
            }
            while Instant::now() < until {}
            before.passed()
        });
        assert!(passed >= Duration::from_millis(20), "{passed:?}");
    }
}
