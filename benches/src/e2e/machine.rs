//! The machine, and how fast it is now.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

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
}

impl Mode {
    /// That of the core that the calling thread runs on; takes about two milliseconds.
    #[must_use]
    pub(super) fn now() -> Self {
        let source = vec![0x5a_u8; 4096];
        let mut target = vec![0_u8; 4096];
        Self {
            crc_ns: fastest(|| {
                black_box(crc32fast::hash(black_box(&source)));
            }),
            memcpy_ns: fastest(|| black_box(&mut target[..]).copy_from_slice(black_box(&source))),
        }
    }
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
