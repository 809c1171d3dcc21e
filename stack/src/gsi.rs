//! QP1, the general services interface: checks incoming packets and hands them to the connection
//! manager.

use crate::cm::{CmConfig, ConnId, ConnectionManager};
use crate::engine::{Engine, TxSink};
use crate::ingress::{Datagram, Integrity, Strangers};
use crate::stats::{Counters, Drops};
use crate::types::{Pkey, Psn, Qpn, Time};
use crate::wire::icrc::Solver;
use crate::wire::mad::{self, GSI_PACKET_LEN, GSI_QKEY, MadBytes};
use crate::wire::{Opcode, Packet};

/// QP1 of a shard. It exists only with a connection manager.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    pub(crate) cm: Option<Box<ConnectionManager>>,
    psn: u32,
    /// Connections of another shard's connection manager that got their first message here.
    arrived: Vec<ConnId>,
}

impl Gsi {
    /// Takes a packet that is for no other queue pair.
    #[cold]
    pub(crate) fn handle(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        (strangers, solver): (&mut Strangers, &mut Solver),
        (counters, drops): (&mut Counters, &mut Drops),
    ) {
        let Some(cm) = self.cm.as_mut().filter(|_| packet.bth().dest_qpn == Qpn::GSI) else {
            return drops.unknown_qpn += 1;
        };
        if datagram.dst.is_multicast() {
            return drops.wrong_source += 1;
        }
        if !Pkey::DEFAULT.admits(packet.bth().pkey) {
            return drops.pkey += 1;
        }
        match strangers.integrity(now, datagram, solver) {
            Integrity::Right => {}
            Integrity::Solved => counters.icrc_id_solved += 1,
            Integrity::Wrong => return drops.icrc += 1,
        }
        let Some(deth) = packet.deth().filter(|_| packet.bth().opcode == Opcode::UD_SEND_ONLY)
        else {
            return drops.wrong_service += 1;
        };
        if deth.qkey != GSI_QKEY {
            return drops.qkey += 1;
        }
        counters.rcvd_pkts += 1;
        cm.handle_mad(now, datagram.src, datagram.dst, packet.payload());
    }

    /// The first message of a connection arrived.
    pub(crate) fn message_arrived(&mut self, conn: ConnId) {
        match &mut self.cm {
            Some(cm) => cm.message_arrived(conn),
            None => self.arrived.push(conn),
        }
    }

    /// Writes the packet that carries a datagram.
    pub(crate) fn write(&mut self, mad: &MadBytes, out: &mut [u8]) {
        self.psn = self.psn.wrapping_add(1);
        mad::write_gsi(out, Psn::new(self.psn), mad);
    }
}

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
