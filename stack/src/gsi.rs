//! QP1, the general services interface: checks incoming packets and hands them to the connection
//! manager, or to the recognition of peers.

use core::net::IpAddr;

use crate::cm::{ConnId, ConnectionManager, Requested};
use crate::ids::slot_of;
use crate::ingress::{Datagram, Integrity, Sources};
use crate::recognition::Recognition;
use crate::shared::Shared;
use crate::types::{Pkey, Psn, Qpn, Time};
use crate::wire::cm::{CmMessage, CommId, ServiceId};
use crate::wire::mad::{self, GSI_QKEY, MadBytes};
use crate::wire::{AliveMad, Opcode, Packet, PeerInfo, RecognitionMad, Service};

/// The addressee of a datagram to QP1, where several devices share an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addressee {
    /// The device with this slot: it drew an id that the datagram names.
    Slot(u8),
    /// The device that has taken the peer's request before. Otherwise the device with a connection
    /// to the queue pair for which the peer asks, and then a device that listens for the service,
    /// where the datagram names them.
    Request(Requested, Option<ServiceId>, Option<Qpn>),
    /// The device with a connection to the queue pair that answers a request. If none has: the one
    /// with this slot, which asked.
    Reply(u8, Qpn),
    /// Any of them can answer it, or none.
    Any,
}

/// The addressee of a datagram that has not been checked, if it is to QP1.
#[must_use]
pub fn addressee(bytes: &[u8]) -> Option<Addressee> {
    let packet = Packet::parse(bytes).ok()?;
    let is_mad = packet.bth().opcode == Opcode::UD_SEND_ONLY;
    if packet.bth().dest_qpn != Qpn::GSI {
        return None;
    }
    let payload = packet.payload();
    if let Some((tid, mad)) = AliveMad::parse(payload).filter(|_| is_mad) {
        #[allow(clippy::cast_possible_truncation, reason = "ids are the lower half")]
        return Some(match mad {
            // All of them name one device.
            AliveMad::Question(pairs) => {
                let (_, id) = pairs.iter().next().unwrap_or_default();
                Addressee::Slot(slot_of(id.0))
            }
            AliveMad::Answer(..) => Addressee::Slot(slot_of(tid as u32)),
            AliveMad::Notice(_) | AliveMad::Unknown => Addressee::Any,
        });
    }
    let message = match RecognitionMad::parse(payload).filter(|_| is_mad) {
        #[allow(clippy::cast_possible_truncation, reason = "ids are the lower half")]
        Some((tid, RecognitionMad::Reply(_))) => {
            return Some(Addressee::Slot(slot_of(tid as u32)));
        }
        Some(_) => return Some(Addressee::Any),
        None => CmMessage::parse(payload).ok().filter(|_| is_mad).map(|(_, message)| message),
    };
    let id = match message {
        Some(CmMessage::Req(req)) => {
            let requested = Requested::Connection(req.local);
            return Some(Addressee::Request(requested, Some(req.service), Some(req.qpn)));
        }
        Some(CmMessage::SidrReq(ask)) => {
            let requested = Requested::Service(ask.request);
            return Some(Addressee::Request(requested, Some(ask.service), None));
        }
        // The peer gives its request up before it knows our id.
        Some(CmMessage::Rej(rej)) if rej.remote == CommId(0) => {
            return Some(Addressee::Request(Requested::Connection(rej.local), None, None));
        }
        Some(CmMessage::Rep(rep)) if rep.remote != CommId(0) => {
            return Some(Addressee::Reply(slot_of(rep.remote.0), rep.qpn));
        }
        Some(CmMessage::SidrRep(rep)) => CommId(rep.request),
        Some(CmMessage::Mra(mra)) => mra.remote,
        Some(CmMessage::Rej(rej)) => rej.remote,
        Some(CmMessage::Rep(rep)) => rep.remote,
        Some(CmMessage::Rtu(rtu)) => rtu.remote,
        Some(CmMessage::Dreq(dreq)) => dreq.remote,
        Some(CmMessage::Drep(drep)) => drep.remote,
        Some(CmMessage::Lap(lap)) => lap.remote,
        Some(CmMessage::Apr(apr)) => apr.remote,
        None => CommId(0),
    };
    // No device draws 0: the sender does not know the id yet.
    Some(if id == CommId(0) { Addressee::Any } else { Addressee::Slot(slot_of(id.0)) })
}

/// QP1 of a shard. It exists only with a connection manager.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    pub(crate) cm: Option<Box<ConnectionManager>>,
    pub(crate) recognition: Recognition,
    psn: u32,
    /// Connections of another shard's connection manager that got their first message here.
    pub(crate) arrived: Vec<ConnId>,
    /// Connections to look at whose queue pairs are another shard's.
    pub(crate) looks: Vec<(ConnId, Qpn)>,
}

impl Gsi {
    /// Takes a packet that is for no other queue pair; returns the peer that it makes known.
    #[cold]
    pub(crate) fn handle(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        sources: &mut Sources,
        shared: &mut Shared,
    ) -> Option<(IpAddr, PeerInfo)> {
        if packet.bth().dest_qpn != Qpn::GSI {
            self.notify(now, packet, datagram, sources, shared);
        }
        let Shared { counters, drops, .. } = shared;
        let recognition = &mut self.recognition;
        let Some(cm) = self.cm.as_mut().filter(|_| packet.bth().dest_qpn == Qpn::GSI) else {
            drops.unknown_qpn += 1;
            return None;
        };
        if datagram.dst.is_multicast() {
            drops.wrong_source += 1;
            return None;
        }
        if !Pkey::DEFAULT.admits(packet.bth().pkey) {
            drops.pkey += 1;
            return None;
        }
        match sources.integrity(now, datagram) {
            Integrity::Right => {}
            Integrity::Solved => counters.icrc_id_solved += 1,
            Integrity::Wrong => {
                drops.icrc += 1;
                return None;
            }
        }
        let Some(deth) = packet.deth().filter(|_| packet.bth().opcode == Opcode::UD_SEND_ONLY)
        else {
            drops.wrong_service += 1;
            return None;
        };
        if deth.qkey != GSI_QKEY {
            drops.qkey += 1;
            return None;
        }
        counters.rcvd_pkts += 1;
        if recognition.is_open()
            && AliveMad::parse(packet.payload()).is_none()
            && let Some(mad) = RecognitionMad::parse(packet.payload())
        {
            return recognition.handle(now, mad, (datagram.src, datagram.dst), (counters, drops));
        }
        cm.handle_mad(now, datagram.src, datagram.dst, packet.payload());
        None
    }

    /// A packet came for a queue pair that does not exist. The device that was at this address
    /// before may have had it. A Rocinante gets a notice, and asks about its connection then. An
    /// unknown peer is probed, once. A standard peer never gets more than that.
    fn notify(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        sources: &mut Sources,
        shared: &mut Shared,
    ) {
        let is_connected = matches!(packet.info.service, Service::Rc | Service::Uc);
        let Some(cm) = self.cm.as_mut().filter(|_| is_connected && !datagram.dst.is_multicast())
        else {
            return;
        };
        let recognition = &mut self.recognition;
        if !recognition.is_open() || !cm.may_notify(now) {
            return;
        }
        let is_whole = sources.integrity(now, datagram) != Integrity::Wrong;
        cm.checked(is_whole);
        if !is_whole {
            return;
        }
        let (local, remote) = (datagram.dst, datagram.src);
        if recognition.table.last(remote).is_some() {
            cm.notify((local, remote), packet.bth().dest_qpn);
        } else if recognition.has_room() {
            recognition.first_packet_to(now, (local, remote), shared);
        }
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
