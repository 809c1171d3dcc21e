//! What is measured, in which order, and what is better.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the receiving process does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum Target {
    /// It polls.
    Active,
    /// It sleeps.
    Passive,
}

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum Step {
    /// Ping-pong of WRITEs of 64 bytes between two sides that poll memory: half the round trip, in microseconds.
    WriteLatency,
    /// READs of 64 bytes, one at a time: the round trip, in microseconds.
    ReadLatency(Target),
    /// WRITEs of 64 bytes on one queue pair, in 10⁶ per second.
    Rate(Target),
    /// WRITEs of so many bytes, in 10⁹ payload bits per second.
    Bandwidth(usize, Target),
}

/// A figure of a step; a bandwidth has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) mtu: u32,
    pub(super) step: Step,
    /// Processor time of the whole machine for 10⁹ bytes of payload, in seconds, instead of the bandwidth.
    pub(super) cpu: bool,
}

impl Key {
    /// Whether more is better.
    pub(super) const fn rises(self) -> bool {
        matches!(self.step, Step::Rate(_) | Step::Bandwidth(..)) && !self.cpu
    }

    /// What the figure is in.
    pub(super) const fn unit(self) -> &'static str {
        match self.step {
            _ if self.cpu => "s/GB",
            Step::WriteLatency | Step::ReadLatency(_) => "µs",
            Step::Rate(_) => "M/s",
            Step::Bandwidth(..) => "Gb/s",
        }
    }
}

impl Step {
    /// What it measures at a path MTU.
    fn figures(self, mtu: u32) -> impl Iterator<Item = Key> {
        let one = std::iter::once(Key { mtu, step: self, cpu: false });
        one.chain(matches!(self, Self::Bandwidth(..)).then_some(Key { mtu, step: self, cpu: true }))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = if self.cpu { ", processor time" } else { "" };
        write!(f, "{}{cpu}, path MTU {}", self.step, self.mtu)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = |target: &Target| match target {
            Target::Active => "active target",
            Target::Passive => "passive target",
        };
        match self {
            Self::WriteLatency => f.write_str("64 B WRITE, half round trip"),
            Self::ReadLatency(to) => write!(f, "64 B READ, round trip, {}", target(to)),
            Self::Rate(to) => write!(f, "64 B WRITEs, {}", target(to)),
            Self::Bandwidth(size, to) if *size >= 1 << 20 => {
                write!(f, "{} MiB WRITE, {}", size >> 20, target(to))
            }
            Self::Bandwidth(size, to) => write!(f, "{} KiB WRITE, {}", size >> 10, target(to)),
        }
    }
}

/// All steps at a path MTU, or those whose name contains `only`.
pub(super) fn plan(mtu: u32, only: Option<&str>) -> Vec<Step> {
    let mut steps = vec![Step::WriteLatency];
    for target in [Target::Active, Target::Passive] {
        steps.extend([Step::ReadLatency(target), Step::Rate(target)]);
        steps.extend([4 << 10, 64 << 10, 1 << 20].map(|size| Step::Bandwidth(size, target)));
    }
    let named = |step: &Step| {
        let mut figures = step.figures(mtu);
        only.is_none_or(|only| figures.any(|key| key.to_string().contains(only)))
    };
    steps.retain(named);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_name_of_its_own() {
        let mut names: Vec<_> = [1024, 4096]
            .into_iter()
            .flat_map(|mtu| plan(mtu, None).into_iter().map(move |step| (mtu, step)))
            .flat_map(|(mtu, step)| step.figures(mtu).map(|key| key.to_string()))
            .collect();
        let count = names.len();
        assert_eq!(count, 2 * (11 + 6));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(plan(1024, Some("READ")).len(), 2);
        assert_eq!(plan(1024, Some("processor time")).len(), 6);
    }
}
