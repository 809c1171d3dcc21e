//! The incoming message of a connection: its packets are checked and placed, one after the other.
//! The responder of the service decides which packet is next, and how it answers a refusal.
//!
//! The order of the checks is the protocol's: opcode sequence, opcode validity, resources, length,
//! key, then execution (`rxe_resp.c` has the same pipeline).

use super::post::MESSAGE_MAX;
use super::rq::Received;
use crate::mem::{Access, Accessor, Memory, PdId, RegionTable, Sge};
use crate::srq::Receives;
use crate::types::{Key, Mtu, Qpn};
use crate::verbs::{WcOpcode, WcStatus};
use crate::wire::{NakCode, Packet, Place};

/// Permissions of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights {
    /// The identity with which it accesses memory.
    pub(crate) by: Accessor,
    /// The domain of its receives.
    pub(crate) recv_pd: PdId,
    pub(crate) mtu: Mtu,
    pub(crate) access: Access,
}

impl Rights {
    /// The rights of a queue pair that is not connected.
    pub(crate) const NONE: Self = Self {
        by: Accessor { pd: PdId(0), qpn: Qpn::new(0) },
        recv_pd: PdId(0),
        mtu: Mtu::Mtu256,
        access: Access::NONE,
    };
}

/// Why a request is not executed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Refusal {
    Invalid,
    Access,
    NotReady,
    /// The receive it would consume fails too.
    Receive(NakCode, WcStatus),
}

/// Progress of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Message {
    /// No message is in progress.
    #[default]
    None,
    Send {
        placed: u32,
    },
    Write {
        va: u64,
        rkey: Key,
        left: u32,
        len: u32,
    },
}

impl Message {
    /// Whether a SEND is partly placed in the oldest receive.
    pub(crate) fn in_receive(self) -> bool {
        matches!(self, Self::Send { .. })
    }

    /// Takes the next packet of a SEND; returns whether the message is complete.
    #[inline]
    pub(crate) fn send(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        receives: &mut Receives<'_>,
        memory: &mut impl Memory,
    ) -> Result<bool, Refusal> {
        let place = packet.info.place;
        let placed = match *self {
            Self::None if place.begins() => 0,
            Self::Send { placed } if !place.begins() => placed,
            _ => return Err(Refusal::Invalid),
        };
        let payload = packet.payload();
        if !has_its_length(payload.len(), place, rights.mtu) {
            return Err(Refusal::Invalid);
        }
        let Some(wr_id) = receives.front() else { return Err(Refusal::NotReady) };
        if payload.len() as u64 + u64::from(placed) > u64::from(receives.room()) {
            return Err(Refusal::Receive(NakCode::InvalidRequest, WcStatus::LocLenErr));
        }
        receives
            .scatter(placed, payload, rights.recv_pd, memory)
            .map_err(|_| Refusal::Receive(NakCode::RemoteOperationalError, WcStatus::LocProtErr))?;
        let placed = placed + payload.len() as u32;
        if !place.ends() {
            *self = Self::Send { placed };
            return Ok(false);
        }
        *self = Self::None;
        let mut received = received(packet, wr_id, WcOpcode::Recv, placed);
        if let Some(key) = packet.invalidate() {
            match memory.regions_mut().invalidate(rights.by, key) {
                Ok(()) => received.invalidated = Some(key),
                // The SEND itself is done: only the receiver's completion reports the failure
                // (class J, as `rxe_resp.c` cites the specification).
                Err(_) => {
                    (received.status, received.solicited) = (WcStatus::RemInvReqErr, true);
                }
            }
        }
        receives.complete(received);
        Ok(true)
    }

    /// Takes the next packet of a WRITE; returns whether the message is complete.
    #[inline]
    pub(crate) fn write(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        receives: &mut Receives<'_>,
        memory: &mut impl Memory,
    ) -> Result<bool, Refusal> {
        let place = packet.info.place;
        let payload = packet.payload();
        let now = payload.len() as u32;
        let (va, rkey, left, len) = match *self {
            Self::None if place.begins() => {
                let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
                (reth.va, reth.rkey, reth.len, reth.len)
            }
            Self::Write { va, rkey, left, len } if !place.begins() => (va, rkey, left, len),
            _ => return Err(Refusal::Invalid),
        };
        if !rights.access.admits(Access::REMOTE_WRITE) {
            return Err(Refusal::Invalid);
        }
        let consumes = packet.info.consumes_receive();
        if consumes && receives.front().is_none() {
            return Err(Refusal::NotReady);
        }
        let fits = if place.ends() { now == left } else { now < left };
        if !fits || !has_its_length(payload.len(), place, rights.mtu) {
            return Err(Refusal::Invalid);
        }
        if place == Place::First {
            admit(va, rkey, len, rights, memory.regions())?;
        }
        if len > 0 {
            let regions = memory.regions();
            let target = Sge { addr: va, len: now, lkey: rkey };
            let target = regions.remote_write(rights.by, &target).map_err(|_| Refusal::Access)?;
            memory.place(target, payload).map_err(|_| Refusal::Access)?;
        }
        if !place.ends() {
            let va = va.wrapping_add(u64::from(now));
            *self = Self::Write { va, rkey, left: left - now, len };
            return Ok(false);
        }
        *self = Self::None;
        if consumes && let Some(wr_id) = receives.front() {
            receives.complete(received(packet, wr_id, WcOpcode::RecvRdmaWithImm, len));
        }
        Ok(true)
    }
}

/// Checks the whole range of a WRITE of several packets before the first byte is placed.
#[inline(never)]
fn admit(
    va: u64,
    rkey: Key,
    len: u32,
    rights: &Rights,
    regions: &RegionTable,
) -> Result<(), Refusal> {
    if u64::from(len) > MESSAGE_MAX {
        return Err(Refusal::Invalid);
    }
    let whole = Sge { addr: va, len, lkey: rkey };
    regions.remote_write(rights.by, &whole).map(drop).map_err(|_| Refusal::Access)
}

/// The completion of the oldest receive by the message that ends with `packet`.
fn received(packet: &Packet<'_>, wr_id: u64, opcode: WcOpcode, byte_len: u32) -> Received {
    Received {
        wr_id,
        status: WcStatus::Success,
        opcode,
        byte_len,
        imm: packet.immediate(),
        invalidated: None,
        sender: None,
        solicited: packet.bth().solicited,
    }
}

/// Fails the oldest receive.
pub(crate) fn fail(receives: &mut Receives<'_>, status: WcStatus) {
    let Some(wr_id) = receives.front() else { return };
    receives.complete(Received {
        wr_id,
        status,
        opcode: WcOpcode::Recv,
        byte_len: 0,
        imm: None,
        invalidated: None,
        sender: None,
        solicited: true,
    });
}

/// Whether a packet at this place of a message may have a payload of this length.
#[inline]
fn has_its_length(payload: usize, place: Place, mtu: Mtu) -> bool {
    let mtu = mtu.bytes() as usize;
    match place {
        Place::Only => payload <= mtu,
        Place::Last => payload > 0 && payload <= mtu,
        Place::First | Place::Middle => payload == mtu,
    }
}
