//! What the port says of how densely datagrams come and go, for the engine.

use rocinante_netdev::{Port, Runs};
use rocinante_stack::Engine;

/// What the port said last.
#[derive(Default)]
pub(super) struct Density {
    /// [`Port::rx_places`].
    places: (u64, u64),
    /// [`Port::arrived`].
    arrived: Runs,
    /// [`Port::departed`].
    departed: Runs,
}

impl Density {
    /// Tells the engine how what was read had arrived.
    #[inline]
    pub(super) fn arrived(&mut self, port: &impl Port, engine: &mut Engine) {
        if let Some(now) = port.arrived() {
            let (runs, datagrams, bytes) = grown_runs(now, &mut self.arrived);
            engine.arrived_in_runs(runs, datagrams, bytes);
        }
        let Some(now) = port.rx_places().filter(|now| *now != self.places) else { return };
        let before = std::mem::replace(&mut self.places, now);
        engine.arrived(grown(now.1, before.1), grown(now.0, before.0));
    }

    /// Tells the engine how what was sent left.
    #[inline]
    pub(super) fn departed(&mut self, port: &impl Port, engine: &mut Engine) {
        let Some(now) = port.departed() else { return };
        let (runs, datagrams, bytes) = grown_runs(now, &mut self.departed);
        engine.departed(runs, datagrams, bytes);
    }
}

/// By how much they grew since they were `before`.
#[inline]
fn grown_runs(now: Runs, before: &mut Runs) -> (u32, u32, u64) {
    let before = std::mem::replace(before, now);
    let runs = grown(now.runs, before.runs);
    (runs, grown(now.datagrams, before.datagrams), now.bytes - before.bytes)
}

/// By how much a counter grew since it was `before`.
#[inline]
fn grown(now: u64, before: u64) -> u32 {
    u32::try_from(now - before).unwrap_or(u32::MAX)
}
