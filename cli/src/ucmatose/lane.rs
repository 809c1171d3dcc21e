//! One connection, and its messages.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rocinante::cm::Connection;
use rocinante::verbs::{SendData, SendOp, WcOpcode};
use rocinante::{Access, Context, Cq, Mr, PreparedQp, RecvWr, SendWr, VerbsError, WcStatus};

use crate::ending;
use crate::output::{Failure, Kind};

/// All objects of a lane except the connection.
pub(super) struct Unconnected {
    cq: Cq,
    /// Two messages, one out and one in.
    memory: Mr,
    count: u32,
    size: u32,
}

/// A connection and its objects.
pub(super) struct MessageLane {
    connection: Connection,
    parts: Unconnected,
    sent: u32,
    received: u32,
}

impl Unconnected {
    /// Creates a queue pair at the device's address of this index, and posts all receives.
    pub(super) fn make(
        ctx: &Context,
        gid_index: usize,
        count: u32,
        size: u32,
    ) -> Result<(Self, PreparedQp), VerbsError> {
        let pd = ctx.alloc_pd();
        let depth = count.max(1);
        let cq = ctx.create_cq(2 * depth)?;
        let memory = pd.allocate(2 * (size as usize).max(1), Access::LOCAL_WRITE)?;
        let qp = pd.qp(&cq, &cq).max_send_wr(depth).max_recv_wr(depth).sgid_index(gid_index);
        let qp = qp.build()?;
        let sges = [memory.sge(size as usize, size as usize)];
        for wr_id in 0..u64::from(count) {
            qp.post_recv(&[RecvWr { wr_id, sges: &sges }])?;
        }
        Ok((Self { cq, memory, count, size }, qp))
    }

    pub(super) fn connected(self, connection: Connection) -> MessageLane {
        MessageLane { connection, parts: self, sent: 0, received: 0 }
    }
}

impl MessageLane {
    /// Messages that came and went.
    pub(super) fn messages(&self) -> u64 {
        u64::from(self.sent) + u64::from(self.received)
    }

    /// The peer's address and port.
    pub(super) fn peer(&self) -> SocketAddr {
        self.connection.peer()
    }

    /// Sends all messages.
    pub(super) fn speak(&self) -> Result<(), Failure> {
        let Unconnected { memory, count, size, .. } = &self.parts;
        let sges = [memory.sge(0, *size as usize)];
        for wr_id in 0..u64::from(*count) {
            let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&sges));
            let wr = SendWr::new(op, data).wr_id(wr_id);
            self.connection.post_send(&[wr]).map_err(VerbsError::from)?;
        }
        Ok(())
    }

    /// Waits until all messages are acknowledged.
    pub(super) fn wait_sent(&mut self, deadline: Instant) -> Result<(), Failure> {
        while self.sent < self.parts.count {
            self.complete(deadline)?;
        }
        Ok(())
    }

    /// Waits for all messages of the peer.
    pub(super) fn wait_received(&mut self, deadline: Instant) -> Result<(), Failure> {
        while self.received < self.parts.count {
            self.complete(deadline)?;
        }
        Ok(())
    }

    fn complete(&mut self, deadline: Instant) -> Result<(), Failure> {
        let peer = self.connection.peer();
        let wc = loop {
            ending::check_signal()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.parts.cq.wait_one(left.min(ending::LOOK)) {
                Ok(wc) => break wc,
                Err(VerbsError::TimedOut) if left > ending::LOOK => {}
                Err(VerbsError::TimedOut) => {
                    let what = format!(
                        "{peer} is silent: {} messages came, {} went: were both sides given the \
                         same -C?",
                        self.received, self.sent
                    );
                    return Err(Failure::Of(Kind::Silence, what));
                }
                Err(error) => return Err(error.into()),
            }
        };
        match (wc.status, wc.opcode) {
            (WcStatus::Success, WcOpcode::Recv) if wc.byte_len != self.parts.size => {
                Err(Failure::Failed(format!(
                    "{peer} sent {} bytes instead of {}: were both sides given the same -S?",
                    wc.byte_len, self.parts.size
                )))
            }
            (WcStatus::Success, WcOpcode::Recv) => {
                self.received += 1;
                Ok(())
            }
            (WcStatus::Success, _) => {
                self.sent += 1;
                Ok(())
            }
            (status, _) => {
                let (came, went) = (self.received, self.sent);
                let why = match status {
                    WcStatus::WrFlushErr => {
                        "it ended the connection: were both sides given the same -c, -C and -S?"
                    }
                    _ => "a request failed",
                };
                let what =
                    format!("{peer}: {why} ({status}, after {came} messages came and {went} went)");
                Err(Failure::Of(Kind::Completion(status), what))
            }
        }
    }

    /// Ends the connection.
    pub(super) fn disconnect(&self) -> Result<(), Failure> {
        Ok(self.connection.disconnect()?)
    }

    /// Waits until the connection has ended.
    pub(super) fn wait_disconnected(&self, patience: Duration) -> Result<(), Failure> {
        let peer = self.connection.peer();
        self.connection.wait_disconnected(patience).map_err(|error| match error {
            VerbsError::TimedOut => Failure::Failed(format!("{peer} does not end the connection")),
            other => other.into(),
        })
    }
}
