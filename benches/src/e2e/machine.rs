//! The machine, and how fast it is now.

use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// What the figures were measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// As `/proc/cpuinfo` names it.
    pub cpu: String,
    /// How many processors are online.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: String,
}

impl Machine {
    /// This one.
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

/// The speed of one core at one time: virtual machines change theirs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Mode {
    /// CRC-32 of 4 KiB in the first-level cache, in nanoseconds.
    pub crc_ns: f64,
    /// Copy of 4 KiB within the first-level cache, in nanoseconds.
    pub memcpy_ns: f64,
    /// A cache line from one of the two cores to the other, in nanoseconds.
    pub handoff_ns: f64,
}

/// What makes a copy between two cores that share no cache much slower than between two that do.
const NEAR_NS: f64 = 75.0;

impl Mode {
    /// Whether the two cores share a cache: virtual machines are moved, and most figures with them.
    #[must_use]
    pub(super) fn is_near(&self) -> bool {
        self.handoff_ns < NEAR_NS
    }

    /// That of the core that the calling thread runs on, and of its way to `other`; takes a few milliseconds.
    #[must_use]
    pub(super) fn now(other: usize) -> Self {
        let source = vec![0x5a_u8; 4096];
        let mut target = vec![0_u8; 4096];
        Self {
            crc_ns: fastest(|| {
                black_box(crc32fast::hash(black_box(&source)));
            }),
            memcpy_ns: fastest(|| black_box(&mut target[..]).copy_from_slice(black_box(&source))),
            handoff_ns: handoff(other),
        }
    }
}

/// Keeps the calling thread, and those that it starts, to one core.
pub(super) fn pin(core: usize) {
    let mut cores = CpuSet::new();
    let pinned = cores.set(core).and_then(|()| sched_setaffinity(Pid::from_raw(0), &cores));
    if let Err(error) = pinned {
        eprintln!("cannot keep to core {core}: {error}");
    }
}

/// Nanoseconds that a store takes to be seen by a thread that spins on core `other`: half the round trip, in the fastest
/// of some batches.
fn handoff(other: usize) -> f64 {
    const BATCH: u32 = 500;
    const BATCHES: u32 = 20;
    let line = AtomicU32::new(0);
    let wait_for = |value: u32| {
        while line.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(other);
            for round in 0..BATCHES * BATCH {
                wait_for(2 * round + 1);
                line.store(2 * round + 2, Ordering::Release);
            }
        });
        let mut best = Duration::MAX;
        for batch in 0..BATCHES {
            let start = Instant::now();
            for round in batch * BATCH..(batch + 1) * BATCH {
                line.store(2 * round + 1, Ordering::Release);
                wait_for(2 * round + 2);
            }
            best = best.min(start.elapsed());
        }
        best.as_nanos() as f64 / f64::from(2 * BATCH)
    })
}

/// Nanoseconds of the fastest of some batches.
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
