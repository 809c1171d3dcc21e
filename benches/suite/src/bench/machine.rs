//! The machine, and its speed at the moment.

use std::fmt;
use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use rocinante_cli::cores;

/// The machine on which the figures were measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// Name, family and model from `/proc/cpuinfo`.
    pub cpu: String,
    /// How many processors are online.
    pub cpus: usize,
    /// The kernel's release.
    pub kernel: String,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} CPUs, Linux {}", self.cpu, self.cpus, self.kernel)
    }
}

impl Machine {
    /// This machine.
    #[must_use]
    pub(super) fn here() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let unknown = || "unknown".to_owned();
        // Hypervisors shorten the name; family and model say which generation it is.
        let cpu = format!(
            "{} (family {}, model {})",
            field("model name").unwrap_or_else(unknown),
            field("cpu family").unwrap_or_else(unknown),
            field("model\t").unwrap_or_else(unknown),
        );
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_else(|_| unknown());
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self { cpu, cpus, kernel: kernel.trim().to_owned() }
    }
}

/// The speed of one core at one time. Virtual machines change theirs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Mode {
    /// CRC-32 of 4 KiB in the first-level cache, in nanoseconds.
    pub crc_ns: f64,
    /// Copy of 4 KiB within the first-level cache, in nanoseconds.
    pub memcpy_ns: f64,
    /// Time of a cache line from one of the two cores to the other, in nanoseconds.
    pub handoff_ns: f64,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { crc_ns, memcpy_ns, handoff_ns } = self;
        write!(
            f,
            "4 KiB: CRC-32 {crc_ns:.0} ns, copy {memcpy_ns:.0} ns; from core to core {handoff_ns:.0} ns"
        )
    }
}

/// Time in which the slowest of ordinary processors copies 4 KiB, in nanoseconds: 16 bytes per
/// cycle at 2.5 GHz.
const ORDINARY_COPY_NS: f64 = 100.0;
/// The largest factor by which any measurement is made longer.
const SLOWNESS_MAX: f64 = 10.0;

impl Mode {
    /// How many times slower this processor is than an ordinary one; an emulated processor is. 1 if
    /// it is less than twice as slow.
    #[must_use]
    pub(super) fn slowness(&self) -> f64 {
        let times = self.memcpy_ns / ORDINARY_COPY_NS;
        if times < 2.0 { 1.0 } else { times.min(SLOWNESS_MAX) }
    }

    /// The speed of the two cores on which measurements run. Takes a few milliseconds.
    #[must_use]
    pub(super) fn now() -> Self {
        let line = AtomicU32::new(0);
        // Both run in new threads, because threads inherit the binding of the thread that starts
        // them.
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                cores::bind(0);
                Self::of_this(&line)
            });
            scope.spawn(|| {
                cores::bind(1);
                hand_back(&line);
            });
            first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn of_this(line: &AtomicU32) -> Self {
        let handoff_ns = hand_over(line);
        let source = vec![0x5a_u8; 4096];
        let mut target = vec![0_u8; 4096];
        Self {
            crc_ns: fastest(|| {
                black_box(crc32fast::hash(black_box(&source)));
            }),
            memcpy_ns: fastest(|| black_box(&mut target[..]).copy_from_slice(black_box(&source))),
            handoff_ns,
        }
    }
}

/// Round trips in one batch, and the number of batches.
const BATCH: u32 = 500;
const BATCHES: u32 = 20;

/// Nanoseconds until a thread that spins on the other core sees a store: half the round trip, in
/// the fastest of some batches.
fn hand_over(line: &AtomicU32) -> f64 {
    let mut best = Duration::MAX;
    for batch in 0..BATCHES {
        let start = Instant::now();
        for round in batch * BATCH..(batch + 1) * BATCH {
            line.store(2 * round + 1, Ordering::Release);
            wait_for(line, 2 * round + 2);
        }
        best = best.min(start.elapsed());
    }
    best.as_nanos() as f64 / f64::from(2 * BATCH)
}

/// The other side of [`hand_over`].
fn hand_back(line: &AtomicU32) {
    for round in 0..BATCHES * BATCH {
        wait_for(line, 2 * round + 1);
        line.store(2 * round + 2, Ordering::Release);
    }
}

fn wait_for(line: &AtomicU32, value: u32) {
    let mut looks = 0_u32;
    while line.load(Ordering::Acquire) != value {
        looks = looks.wrapping_add(1);
        // The machine may have one core only.
        if looks.is_multiple_of(4096) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Time of one call, in nanoseconds, in the fastest of some batches.
fn fastest(mut work: impl FnMut()) -> f64 {
    const BATCH: u32 = 256;
    let mut best = Duration::MAX;
    for _ in 0..40 {
        let start = Instant::now();
        for _ in 0..BATCH {
            work();
        }
        best = best.min(start.elapsed());
    }
    best.as_nanos() as f64 / f64::from(BATCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_much_slower_than_any_processor_is_slow() {
        let of = |memcpy_ns| Mode { crc_ns: 100.0, memcpy_ns, handoff_ns: 50.0 }.slowness();
        assert_eq!([of(30.0), of(199.0)], [1.0; 2]);
        assert_eq!([of(850.0), of(9000.0)], [8.5, SLOWNESS_MAX]);
    }
}
