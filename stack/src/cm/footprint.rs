//! The footprint of a connection manager: the amount of everything that grows and shrinks while it
//! works.

use super::{CmFootprint, ConnectionManager};

impl ConnectionManager {
    /// Its current footprint.
    #[must_use]
    pub fn footprint(&self) -> CmFootprint {
        let waiting = self.listeners.values().chain(self.resolvers.values());
        CmFootprint {
            connections: self.conns.len(),
            by_request: self.by_request.len(),
            by_qpn: self.by_qpn.len(),
            listeners: self.listeners.len() + self.resolvers.len(),
            pending: waiting.map(|listener| listener.pending).sum(),
            asks: self.asks.len(),
            by_ask: self.by_ask.len(),
            queries: self.queries.len(),
            early: self.early.len(),
            timers: self.timers.len(),
            datagrams: self.tx.len() + self.letters.len(),
            events: self.events.len() + self.notes.len() + self.looks.len(),
        }
    }
}
