//! The costs of a measurement: processor time, memory, wake-ups.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::resource::{UsageWho, getrusage};

use rocinante_cli::output::Failure;

/// Processor time of this process in seconds, in user and kernel mode.
pub(super) fn own() -> Result<f64, Failure> {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    let usage = usage.map_err(|error| Failure::Failed(format!("getrusage: {error}")))?;
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// Number of the machine's processors.
pub(super) fn online() -> Result<usize, Failure> {
    let lines = read("/proc/stat")?;
    let count = lines.lines().filter(|line| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    Ok(count.count().max(1))
}

/// Seconds since the machine started that all processors were idle or waiting for a disk, in sum
/// (`proc_stat(5)`).
pub(super) fn idle() -> Result<f64, Failure> {
    let text = read("/proc/stat")?;
    let mut fields = text.lines().next().unwrap_or_default().split_whitespace().skip(4);
    let mut next = || fields.next().and_then(|field| field.parse::<f64>().ok());
    let (Some(idle), Some(waiting)) = (next(), next()) else {
        return Err(Failure::Failed(
            "/proc/stat does not say how long processors were idle".into(),
        ));
    };
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok((idle + waiting) / per_second)
}

/// Resident bytes of this process.
pub(crate) fn resident() -> Result<u64, Failure> {
    let statm = read("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let pages = pages
        .ok_or_else(|| Failure::Failed("/proc/self/statm does not say what is resident".into()))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// The first part of the names of software devices' threads.
const OF_DEVICES: &str = "roce-";

/// How often the threads of this process's devices went to sleep, which is how often they were
/// woken (`proc_pid_status(5)`).
pub(super) fn naps() -> Result<u64, Failure> {
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

fn read(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::Failed(format!("{path}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

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
