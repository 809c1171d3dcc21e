//! The port's counts of the runs in which datagrams arrive and leave, for the engine.

use rocinante_netdev::{Port, Runs};
use rocinante_stack::Engine;

/// The port's last counts.
#[derive(Default)]
pub(super) struct RunStats {
    arrived: Runs,
    departed: Runs,
}

impl RunStats {
    /// Gives the engine the runs of received datagrams.
    #[inline]
    pub(super) fn arrived(&mut self, port: &impl Port, engine: &mut Engine) {
        let Some(now) = port.runs().arrived else { return };
        let (runs, datagrams, bytes) = grown(now, &mut self.arrived);
        engine.arrived(runs, datagrams, bytes);
    }

    /// Gives the engine the runs of sent datagrams.
    #[inline]
    pub(super) fn departed(&mut self, port: &impl Port, engine: &mut Engine) {
        let Some(now) = port.runs().departed else { return };
        let (runs, datagrams, bytes) = grown(now, &mut self.departed);
        engine.departed(runs, datagrams, bytes);
    }
}

/// The growth of the counters since they were `before`.
#[inline]
fn grown(now: Runs, before: &mut Runs) -> (u32, u32, u64) {
    let before = std::mem::replace(before, now);
    let grown = |now, before| u32::try_from(now - before).unwrap_or(u32::MAX);
    let (runs, datagrams) = (grown(now.runs, before.runs), grown(now.datagrams, before.datagrams));
    (runs, datagrams, now.bytes - before.bytes)
}
