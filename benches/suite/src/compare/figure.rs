//! The figures: their steps, order and names.

use std::fmt;

use crate::workers::{Measure, Step};

/// Bytes of a small message.
const SMALL: usize = 64;

/// One figure of a step. A bandwidth step has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FigureKey {
    pub(super) mtu: u32,
    pub(super) measure: Measure,
    pub(super) size: usize,
}

impl fmt::Display for FigureKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mtu, measure, size } = self;
        let size = match size {
            size if *size >= 1 << 20 => format!("{} MiB", size >> 20),
            size if *size >= 1 << 10 => format!("{} KiB", size >> 10),
            size => format!("{size} B"),
        };
        let what = match measure {
            Measure::WriteLat => "WRITE, half round trip",
            Measure::ReadLat => "READ, round trip, active target",
            Measure::ReadLatPassive => "READ, round trip, passive target",
            Measure::WriteRate => "WRITEs, active target",
            Measure::WriteRatePassive => "WRITEs, passive target",
            Measure::WriteBw => "WRITE, active target",
            Measure::WriteBwPassive => "WRITE, passive target",
            Measure::MachineCpuPerGb => "WRITE, active target, processor time",
            Measure::MachineCpuPerGbPassive => "WRITE, passive target, processor time",
            other => return write!(f, "{size} {other}, path MTU {mtu}"),
        };
        write!(f, "{size} {what}, path MTU {mtu}")
    }
}

/// All steps at path MTU `mtu`, or those with `only` in the name of a figure.
pub(super) fn plan(mtu: u32, only: Option<&str>, seconds: f64) -> Vec<Step> {
    let step = |measure, size| Step { measure, size, seconds };
    let mut steps = vec![step(Measure::WriteLat, SMALL)];
    for [lat, rate, bw] in [
        [Measure::ReadLat, Measure::WriteRate, Measure::WriteBw],
        [Measure::ReadLatPassive, Measure::WriteRatePassive, Measure::WriteBwPassive],
    ] {
        steps.extend([step(lat, SMALL), step(rate, SMALL)]);
        steps.extend([4 << 10, 64 << 10, 1 << 20].map(|size| step(bw, size)));
    }
    let named = |step: &Step| {
        only.is_none_or(|only| figures(step, mtu).any(|key| key.to_string().contains(only)))
    };
    steps.retain(named);
    steps
}

/// The figures of a step that are compared.
pub(super) fn figures(step: &Step, mtu: u32) -> impl Iterator<Item = FigureKey> + use<> {
    let cost = match step.measure {
        Measure::WriteBw => Some(Measure::MachineCpuPerGb),
        Measure::WriteBwPassive => Some(Measure::MachineCpuPerGbPassive),
        _ => None,
    };
    let size = step.size;
    [Some(step.measure), cost].into_iter().flatten().map(move |measure| FigureKey {
        mtu,
        measure,
        size,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_name_of_its_own() {
        let mut names: Vec<_> = [1024, 4096]
            .into_iter()
            .flat_map(|mtu| plan(mtu, None, 0.1).into_iter().map(move |step| (mtu, step)))
            .flat_map(|(mtu, step)| figures(&step, mtu).map(|key| key.to_string()))
            .collect();
        let count = names.len();
        assert_eq!(count, 2 * (11 + 6));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(plan(1024, Some("READ"), 0.1).len(), 2);
        assert_eq!(plan(1024, Some("processor time"), 0.1).len(), 6);
    }
}
