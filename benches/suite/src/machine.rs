//! The machine, and its speed at the moment.

use std::fmt;
use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::workers::Ticks;
use rocinante_cli::cores;
use rocinante_cli::output::Result;

/// The machine on which the figures were measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Name, family and model from `/proc/cpuinfo`.
    pub cpu: String,
    /// Number of online processors.
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
    pub(crate) fn here() -> Self {
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
pub(crate) struct Mode {
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

/// The standing of a run. Better standings come first: the runs of the best one count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// The machine kept its speed, and its hypervisor took no time away.
    Valid,
    /// Unknown, and why.
    NotJudged(String),
    /// The machine failed that, and how.
    Invalid(String),
}

impl Standing {
    /// The `valid` column of the rows.
    pub(crate) const fn is_valid(&self) -> Option<bool> {
        match self {
            Self::Valid => Some(true),
            Self::NotJudged(_) => None,
            Self::Invalid(_) => Some(false),
        }
    }

    /// A remark for the report, unless the run is valid.
    pub(crate) fn remark(&self, run: usize) -> Option<String> {
        match self {
            Self::Valid => None,
            Self::NotJudged(why) => Some(format!("run {run} was not judged: {why}")),
            Self::Invalid(why) => Some(format!("run {run} is invalid: {why}")),
        }
    }
}

/// The machine's disturbances of one run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Calibration {
    /// Its speed before and after.
    modes: [Mode; 2],
    /// The part of the processors' time that the hypervisor gave to others; unknown where the
    /// kernel does not say.
    stolen: Option<f64>,
}

/// The beginning of a run.
pub(crate) struct Begun {
    mode: Mode,
    ticks: Result<Ticks>,
}

/// The speed of a run's end may differ by this factor from that of its beginning.
const CHANGE_MAX: f64 = 1.25;
/// The part of the processors' time that others may have.
const STOLEN_MAX: f64 = 0.02;

impl Begun {
    /// Looks at the machine.
    pub(crate) fn now() -> Self {
        Self { mode: Mode::now(), ticks: Ticks::now() }
    }

    /// Looks again.
    pub(crate) fn ended(self) -> Calibration {
        let ticks = self.ticks.and_then(|before| Ok((before, Ticks::now()?)));
        let stolen = ticks.map(|(before, after)| after.stolen_since(&before)).ok();
        Calibration { modes: [self.mode, Mode::now()], stolen }
    }
}

impl fmt::Display for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.mode.fmt(f)
    }
}

impl Calibration {
    /// Whether the run counts. No measured figure decides.
    pub(crate) fn standing(&self) -> Standing {
        let Some(stolen) = self.stolen else {
            return Standing::NotJudged("/proc/stat does not tell stolen time".into());
        };
        if stolen > STOLEN_MAX {
            let percent = 100.0 * stolen;
            return Standing::Invalid(format!(
                "the hypervisor gave {percent:.1} % of the processors' time to others"
            ));
        }
        let [before, after] = &self.modes;
        for (what, before, after) in [
            ("CRC-32 of 4 KiB", before.crc_ns, after.crc_ns),
            ("a copy of 4 KiB", before.memcpy_ns, after.memcpy_ns),
            ("a cache line from core to core", before.handoff_ns, after.handoff_ns),
        ] {
            if before.max(after) > CHANGE_MAX * before.min(after) {
                return Standing::Invalid(format!(
                    "the machine changed its speed: {what} took {before:.0} ns before and {after:.0} ns after"
                ));
            }
        }
        Standing::Valid
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = &self.modes;
        write!(f, "before: {before}; after: {after}; ")?;
        match self.stolen {
            Some(stolen) => write!(f, "stolen time {:.1} %", 100.0 * stolen),
            None => f.write_str("stolen time unknown"),
        }
    }
}

/// Time in which the slowest of ordinary processors copies 4 KiB, in nanoseconds: 16 bytes per
/// cycle at 2.5 GHz.
const ORDINARY_COPY_NS: f64 = 100.0;
/// The largest factor by which any measurement is made longer.
const SLOWNESS_MAX: f64 = 10.0;

impl Mode {
    /// The slowness of this processor: its time divided by an ordinary processor's. An emulated
    /// processor is slow. 1 if it is less than twice as slow.
    #[must_use]
    pub(crate) fn slowness(&self) -> f64 {
        let times = self.memcpy_ns / ORDINARY_COPY_NS;
        if times < 2.0 { 1.0 } else { times.min(SLOWNESS_MAX) }
    }

    /// The speed of the two cores on which measurements run. Takes a few milliseconds.
    #[must_use]
    pub(crate) fn now() -> Self {
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
    fn a_run_counts_if_the_machine_stayed_the_same() {
        let mode = |crc_ns, memcpy_ns, handoff_ns| Mode { crc_ns, memcpy_ns, handoff_ns };
        let before = mode(100.0, 50.0, 40.0);
        let standing = |after, stolen| Calibration { modes: [before, after], stolen }.standing();
        assert_eq!(standing(mode(124.0, 41.0, 49.0), Some(0.019)), Standing::Valid);
        for (after, stolen, why) in [
            (mode(126.0, 50.0, 40.0), 0.0, "CRC-32"),
            (mode(100.0, 39.0, 40.0), 0.0, "copy"),
            (mode(100.0, 50.0, 51.0), 0.0, "core to core"),
            (before, 0.021, "2.1 %"),
        ] {
            let Standing::Invalid(said) = standing(after, Some(stolen)) else {
                panic!("{after:?} counts")
            };
            assert!(said.contains(why), "{said}");
        }
        assert!(matches!(standing(before, None), Standing::NotJudged(_)));
    }

    #[test]
    fn only_what_is_much_slower_than_any_processor_is_slow() {
        let of = |memcpy_ns| Mode { crc_ns: 100.0, memcpy_ns, handoff_ns: 50.0 }.slowness();
        assert_eq!([of(30.0), of(199.0)], [1.0; 2]);
        assert_eq!([of(850.0), of(9000.0)], [8.5, SLOWNESS_MAX]);
    }
}
