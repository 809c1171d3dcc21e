//! How devices recognise each other: a shard sends the probes and replies of its engine, and passes
//! the engine's reports on to the other shards. The first one has QP1, and probes.

use rocinante_stack::HandOff;
use rocinante_stack::types::Time;

use super::mail::Order;
use super::shard::Shard;
use crate::model::error::VerbsError;
use crate::provider::random::random;

impl Shard {
    /// Sends probes and replies that wait, and leaves mail for the other shards.
    #[inline]
    pub(super) fn introduce(&mut self, now: Time) {
        if self.engine.has_probes() {
            self.introduce_all(now);
        }
    }

    #[cold]
    fn introduce_all(&mut self, now: Time) {
        while let Some(transmit) = self.engine.poll_probe() {
            // Without a path it is lost, as on any network.
            let Ok(path) = self.cm_path(now, (transmit.local, transmit.remote)) else { continue };
            if !self.send_mad(&transmit.mad, path) {
                self.flush();
                if !self.send_mad(&transmit.mad, path) {
                    self.engine.put_back_probe(transmit);
                    break;
                }
            }
        }
        self.flush();
        let Some(others) = &mut self.others else { return };
        while let Some(report) = self.engine.poll_hand_off() {
            match report {
                HandOff::FirstPacket { .. } => others.order(0, Order::HandOff(report)),
                HandOff::Learn(..) => others.order_all(Order::HandOff(report)),
            }
        }
        others.ring();
    }
}

/// A random key for the transaction ids of probes, which no peer can guess.
pub(super) fn key() -> Result<[u64; 2], VerbsError> {
    let word = || Ok::<_, VerbsError>(u64::from(random()?) << 32 | u64::from(random()?));
    Ok([word()?, word()?])
}
