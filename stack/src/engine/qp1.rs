//! Calls of an engine for QP1 and its connection manager.

use super::Engine;
use crate::cm::{CmConfig, ConnId, ConnectionManager};
use crate::sink::TxSink;
use crate::types::{Qpn, Time};
use crate::wire::mad::{GSI_PACKET_LEN, MadBytes};

impl Engine {
    /// Opens QP1: from now on management datagrams go to a connection manager.
    pub fn start_cm(&mut self, config: CmConfig) {
        self.gsi.cm = Some(Box::new(ConnectionManager::new(config)));
    }

    /// The connection manager, if it was started. After each call of it, send its datagrams with
    /// [`send_mad`](Self::send_mad).
    #[inline]
    pub fn cm(&mut self) -> Option<&mut ConnectionManager> {
        self.gsi.cm.as_deref_mut()
    }

    /// Handles the due timers of the connection manager. It looks at connections by their queue
    /// pairs.
    pub fn handle_cm_timeout(&mut self, now: Time) {
        let Some(cm) = &mut self.gsi.cm else { return };
        cm.handle_timeout(now);
        while let Some((conn, qpn)) = self.gsi.cm.as_mut().and_then(|cm| cm.poll_look()) {
            let config = &self.shared.config;
            if config.sharers > 1 && qpn.slot() != config.qpn_slot {
                self.gsi.looks.push((conn, qpn));
                continue;
            }
            let packets = self.packets_of(qpn);
            if let Some(cm) = self.cm() {
                cm.looked(now, conn, packets);
            }
        }
    }

    /// A connection to look at whose queue pair is in another engine: pass that engine's
    /// [`packets_of`](Self::packets_of) to [`ConnectionManager::looked`].
    pub fn poll_look(&mut self) -> Option<(ConnId, Qpn)> {
        self.gsi.looks.pop()
    }

    /// Number of packets that a queue pair has received; `None` if there is no such queue pair.
    #[must_use]
    pub fn packets_of(&self, qpn: Qpn) -> Option<u64> {
        Some(self.qp_counters(qpn)?.rcvd_pkts)
    }

    /// The path of a queue pair to its peer, if it has one.
    #[must_use]
    pub fn path_of(&self, qpn: Qpn) -> Option<u32> {
        let (_, attr, _) = self.query_qp(qpn)?;
        Some(attr.peer?.path)
    }

    /// Where the connection manager runs in another shard: a connection that got its first message
    /// here, after [`await_message`](Self::await_message). Pass it to
    /// [`ConnectionManager::message_arrived`].
    #[inline]
    pub fn poll_arrived(&mut self) -> Option<ConnId> {
        self.gsi.arrived.pop()
    }

    /// Sends a management datagram from QP1 on `path`. Returns whether there was room.
    pub fn send_mad(&mut self, mad: &MadBytes, path: u32, sink: &mut impl TxSink) -> bool {
        let sent = sink.send(path, GSI_PACKET_LEN, |out| {
            self.gsi.write(mad, out);
            Ok::<_, core::convert::Infallible>(None)
        });
        let sent = sent.unwrap_or(false);
        self.shared.counters.sent_pkts += u64::from(sent);
        sent
    }
}
