//! What a connection manager holds: the amount of everything that grows and shrinks while it works.

use super::ConnectionManager;

/// What a connection manager holds now. Its configuration, its listeners and the program's calls
/// bound all of it, whatever peers send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CmFootprint {
    /// Connections, also those that only wait for their release.
    pub connections: usize,
    /// Entries that find a connection by the peer's communication id.
    pub by_request: usize,
    /// Entries that find a connection by the peer's queue pair.
    pub by_qpn: usize,
    /// Listeners and datagram services.
    pub listeners: usize,
    /// Requests and questions that count in a backlog.
    pub pending: usize,
    /// Questions of peers for a datagram service: undecided ones, and kept answers.
    pub asks: usize,
    /// Entries that find those questions.
    pub by_ask: usize,
    /// Our questions for a datagram service.
    pub queries: usize,
    /// Deadlines.
    pub timers: usize,
    /// Datagrams that wait to be sent.
    pub datagrams: usize,
    /// Events that the caller has not polled yet.
    pub events: usize,
}

impl ConnectionManager {
    /// What it holds now.
    #[must_use]
    pub fn footprint(&self) -> CmFootprint {
        let waiting = self.listeners.values().chain(self.resolvers.values());
        CmFootprint {
            connections: self.conns.len(),
            by_request: self.by_request.len(),
            by_qpn: self.by_qpn.len(),
            listeners: self.listeners.len() + self.resolvers.len() + self.services.len(),
            pending: waiting.map(|listener| listener.pending).sum(),
            asks: self.asks.len(),
            by_ask: self.by_ask.len(),
            queries: self.queries.len(),
            timers: self.timers.len(),
            datagrams: self.tx.len(),
            events: self.events.len(),
        }
    }
}
