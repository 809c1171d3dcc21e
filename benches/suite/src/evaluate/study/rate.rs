//! Small messages of several threads.

use rocinante_cli::output::{Failure, Result};

use super::super::plan::threads;
use super::{Figures, SMALL};
use crate::workers::{Link, Measure, Places, Step, Traffic, Work};

/// How messages are sent.
pub(super) struct How {
    pub(super) link: Link,
    pub(super) traffic: Traffic,
    pub(super) mtu: u32,
    pub(super) seconds: f64,
    pub(super) quick: bool,
}

/// The rates over this many queue pairs, for each number of threads.
pub(super) fn measure(places: &Places, how: &How, qps: u64) -> Result<Figures> {
    let How { link, mtu, seconds, quick, .. } = *how;
    let step = Step { measure: Measure::WriteRate, size: SMALL, seconds };
    let rate = |threads: u64| {
        let (traffic, each) = (how.traffic.clone(), (qps / threads) as u32);
        let work = Work::Rate { traffic, mtu, threads: threads as u32, each, step };
        let figures = places.figures(link, &work)?;
        let [figure] = figures[..] else {
            return Err(Failure::Failed("it measured something else".into()));
        };
        let name = if threads == 1 { "thread" } else { "threads" };
        Ok((format!("{threads}_{name}_mops"), figure.value))
    };
    threads(qps, quick).map(rate).collect()
}
