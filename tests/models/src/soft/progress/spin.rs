//! How long the background thread spins.

use std::time::Duration;

use crate::provider::sync::Instant;
use crate::provider::wake::clock;

/// A spin that sleeps at once, unless the clock [says](clock::spin) otherwise.
#[derive(Debug)]
pub(super) struct Spin;

impl Spin {
    pub(super) fn new() -> Self {
        Self
    }

    pub(super) fn span(&self) -> Duration {
        clock::spins()
    }

    pub(super) fn looked(&mut self, _found: bool, _at: Instant) {}

    pub(super) fn slept(&mut self, _: Duration, _: bool) {}
}
