//! Calls of an engine for QP1 and its connection manager.

use super::Engine;
use crate::cm::{CmConfig, ConnId, ConnectionManager};
use crate::sink::TxSink;
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

    /// Where the connection manager runs in another shard: a connection that got its first message
    /// here, after [`await_message`](Self::await_message). Pass it to
    /// [`ConnectionManager::message_arrived`].
    #[inline]
    pub fn poll_arrived(&mut self) -> Option<ConnId> {
        self.gsi.poll_arrived()
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
