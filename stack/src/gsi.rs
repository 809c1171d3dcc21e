//! QP1, the general services interface: checks what comes to it and hands it to the connection manager.

use crate::cm::ConnectionManager;
use crate::ingress::{Datagram, Integrity, SourceCheck};
use crate::stats::{Counters, Drops};
use crate::types::{Pkey, Psn, Qpn, Time};
use crate::wire::icrc::Solver;
use crate::wire::mad::{self, GSI_QKEY, MadBytes};
use crate::wire::{Opcode, Packet};

/// QP1 of a shard; without a connection manager there is none.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    pub(crate) cm: Option<Box<ConnectionManager>>,
    psn: u32,
}

impl Gsi {
    /// Takes a packet that no queue pair wants.
    #[cold]
    pub(crate) fn handle(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        solver: &mut Solver,
        (counters, drops): (&mut Counters, &mut Drops),
    ) {
        let Some(cm) = self.cm.as_mut().filter(|_| packet.bth.dest_qpn == Qpn::GSI) else {
            return drops.unknown_qpn += 1;
        };
        if !Pkey::DEFAULT.admits(packet.bth.pkey) {
            return drops.pkey += 1;
        }
        // Anybody may write, and few do often: nothing is remembered of them.
        match SourceCheck::default().integrity(now, datagram, solver) {
            Integrity::Right => {}
            Integrity::Solved => counters.icrc_id_solved += 1,
            Integrity::Wrong => return drops.icrc += 1,
        }
        let Some(deth) = packet.deth().filter(|_| packet.bth.opcode == Opcode::UD_SEND_ONLY) else {
            return drops.wrong_service += 1;
        };
        if deth.qkey != GSI_QKEY {
            return drops.gsi_qkey += 1;
        }
        counters.rcvd_pkts += 1;
        cm.handle_mad(now, datagram.src, datagram.dst, packet.payload());
    }

    /// Writes the packet that carries a datagram.
    pub(crate) fn write(&mut self, mad: &MadBytes, out: &mut [u8]) {
        self.psn = self.psn.wrapping_add(1);
        mad::write_gsi(out, Psn::new(self.psn), mad);
    }
}
