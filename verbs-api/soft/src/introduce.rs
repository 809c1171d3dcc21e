//! How devices recognise each other: a shard sends the questions and answers of its engine, and has
//! the first shard ask, which has QP1.

use rocinante_stack::types::Time;

use super::mail::Order;
use super::shard::Shard;
use crate::model::error::VerbsError;
use crate::provider::random::random;

impl Shard {
    /// Sends questions and answers that wait, and leaves mail for the other shards.
    #[inline]
    pub(super) fn introduce(&mut self, now: Time) {
        if self.engine.has_introductions() {
            self.introduce_all(now);
        }
    }

    #[cold]
    fn introduce_all(&mut self, now: Time) {
        while let Some(transmit) = self.engine.poll_introduction() {
            // Without a path it is lost, as on any network.
            let Ok(path) = self.cm_path(now, (transmit.local, transmit.remote)) else { continue };
            if !self.send_mad(&transmit.mad, path) {
                self.flush();
                if !self.send_mad(&transmit.mad, path) {
                    self.engine.put_back_introduction(transmit);
                    break;
                }
            }
        }
        self.flush();
        let Some(others) = &mut self.others else { return };
        while let Some(peer) = self.engine.poll_stranger() {
            others.order(0, Order::Ask(peer));
        }
        while let Some(peer) = self.engine.poll_recognised() {
            others.order_all(Order::Learn(peer));
        }
        others.ring();
    }
}

/// A random key for the transaction ids of questions, which no peer can guess.
pub(super) fn key() -> Result<[u64; 2], VerbsError> {
    let word = || Ok::<_, VerbsError>(u64::from(random()?) << 32 | u64::from(random()?));
    Ok([word()?, word()?])
}
