//! From a send request to its packets: opcode, headers and part of the data. The requester of the
//! service decides which packet leaves when.

use super::Core;
use super::opcode::data_opcode;
use super::sq::{Wqe, WqeIndex};
use crate::mem::{AccessError, Memory};
use crate::sink::TxSink;
use crate::stats::Counters;
use crate::types::{Mtu, Pkey, Psn, Qpn, Seq};
use crate::verbs::SendOp;
use crate::wire::icrc::Summed;
use crate::wire::{AtomicEth, Bth, Deth, Ext, Feth, ICRC_LEN, Opcode, OpcodeInfo, Reth, bth};

#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestPacket {
    /// Index of the request in the send queue.
    pub(crate) index: WqeIndex,
    pub(crate) psn: Seq,
    pub(crate) opcode: Opcode,
    /// Offset of its data in the message.
    pub(crate) offset: u32,
    /// Payload bytes, or the length of the READ.
    pub(crate) len: u32,
    /// If the packet begins a message: the bytes of that message.
    pub(crate) message: u32,
    pub(crate) ack_req: bool,
    pub(crate) solicited: bool,
}

impl RequestPacket {
    /// The packet of `psn` of the SEND or WRITE `wqe`, the request `index`.
    #[inline]
    pub(crate) fn of(index: WqeIndex, wqe: &Wqe, psn: Seq, mtu: Mtu, ack_req: bool) -> Self {
        let len = wqe.payload(psn, mtu);
        Self {
            index,
            psn,
            opcode: wqe.data_opcode(psn),
            offset: wqe.offset(psn, mtu),
            len,
            message: wqe.message(len),
            ack_req,
            solicited: wqe.is_solicited() && psn == wqe.last(),
        }
    }

    /// The only packet of `wqe`.
    #[inline]
    pub(crate) fn of_plain(index: WqeIndex, wqe: &Wqe, ack_req: bool) -> Self {
        Self {
            index,
            psn: wqe.first,
            opcode: data_opcode(&wqe.op, true, true),
            offset: 0,
            len: wqe.len,
            message: wqe.len,
            ack_req,
            solicited: wqe.is_solicited(),
        }
    }
}

/// Where a packet goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) path: u32,
    pub(crate) qpn: Qpn,
    /// The header of a datagram that names its sender.
    pub(crate) deth: Option<Deth>,
}

/// Whether a packet left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The sink has no room.
    Full,
    /// The memory is no longer registered.
    Refused,
}

impl Core {
    /// Where a connected queue pair sends to.
    #[inline]
    pub(crate) fn target(&self) -> Option<Target> {
        let path = self.peer()?.path;
        Some(Target { path, qpn: self.attr.dest_qpn.unwrap_or(Qpn::MULTICAST), deth: None })
    }

    /// Sends a packet of a request, and counts it.
    #[inline(never)]
    pub(crate) fn send_packet<H: Memory>(
        &self,
        piece: &RequestPacket,
        to: &Target,
        counters: &mut Counters,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let carries = piece.opcode.info().is_some_and(OpcodeInfo::has_payload);
        let (wqe, payload) = (self.sq.get(piece.index), if carries { piece.len } else { 0 });
        let sent = self.send_packet_of::<0, H>(wqe, piece, payload, to, host, sink);
        if sent == Sent::Yes {
            self.tally.sent(counters, 1, payload.into());
        }
        sent
    }

    /// Sends a packet of the request `wqe`, which the caller has at hand, with `payload` bytes of
    /// payload. Inlined into its caller, which is a loop over many packets and counts them. Callers
    /// differ in `CALLER`, so that the sink's part is inlined into each.
    #[inline(always)]
    pub(crate) fn send_packet_of<const CALLER: u8, H: Memory>(
        &self,
        wqe: &Wqe,
        piece: &RequestPacket,
        payload: u32,
        to: &Target,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let Some(info) = piece.opcode.info() else { return Sent::Refused };
        let payload = payload as usize;
        // As a byte: sums of such lengths do not overflow, so they need no check.
        let header_len = usize::from(info.header_len as u8);
        let mut bth = header(piece.opcode, to.qpn, piece.psn, payload);
        bth.ack_req = piece.ack_req;
        bth.solicited = piece.solicited;
        frame(to, header_len, payload, sink, |out| {
            let (headers, rest) = out.split_at_mut(header_len);
            let (data, pad) = rest.split_at_mut(payload);
            let (base, extensions) = headers.split_at_mut(bth::LEN);
            base.copy_from_slice(&bth.bytes());
            write_extensions(piece, info, wqe, to, extensions);
            if bth.pad > 0 {
                pad[..usize::from(bth.pad)].fill(0);
            }
            let sum = self.sq.gather(piece.index, wqe, piece.offset, data, self.init.pd, host)?;
            Ok(sum.map(|crc| Summed { at: header_len, len: payload, crc }))
        })
    }
}

/// Lets the sink write a packet.
#[inline]
pub(crate) fn frame(
    to: &Target,
    header: usize,
    payload: usize,
    sink: &mut impl TxSink,
    fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, AccessError>,
) -> Sent {
    match sink.send(to.path, header + payload + usize::from(pad(payload)) + ICRC_LEN, fill) {
        Ok(true) => Sent::Yes,
        Ok(false) => Sent::Full,
        Err(_) => Sent::Refused,
    }
}

/// Bytes of padding after `payload` bytes.
#[inline]
fn pad(payload: usize) -> u8 {
    (payload.wrapping_neg() & 3) as u8
}

/// The BTH of a packet with `payload` bytes.
#[inline]
pub(crate) fn header(opcode: Opcode, dest: Qpn, psn: Seq, payload: usize) -> Bth {
    let mut bth = Bth::new(opcode, Pkey::DEFAULT, dest, Psn::truncate(psn));
    bth.pad = pad(payload);
    bth
}

/// Writes the extension headers of a request after its BTH.
#[inline]
fn write_extensions(
    piece: &RequestPacket,
    info: &OpcodeInfo,
    wqe: &Wqe,
    to: &Target,
    out: &mut [u8],
) {
    match wqe.op {
        SendOp::Write { remote, rkey, .. } => {
            if info.has(Ext::Reth) {
                let va = remote.wrapping_add(u64::from(piece.offset));
                Reth { va, rkey, len: piece.message }.write(&mut out[..Reth::LEN]);
            }
        }
        SendOp::Send { .. } | SendOp::SendTo { .. } => {}
        _ => write_rarer(piece.offset, piece.len, info, wqe, out),
    }
    if let Some(deth) = to.deth {
        deth.write(&mut out[..Deth::LEN]);
    }
    // The immediate is the last of the extension headers.
    if let Some(imm) = wqe.op.immediate()
        && info.has(Ext::ImmDt)
        && let Some(last) = out.last_chunk_mut()
    {
        *last = imm;
    }
}

/// As [`write_extensions`], for all but SEND and WRITE.
#[inline(never)]
fn write_rarer(offset: u32, len: u32, info: &OpcodeInfo, wqe: &Wqe, out: &mut [u8]) {
    match wqe.op {
        SendOp::Read { remote, rkey } => {
            let va = remote.wrapping_add(u64::from(offset));
            Reth { va, rkey, len }.write(&mut out[..Reth::LEN]);
        }
        SendOp::CompareSwap { remote, rkey, compare, swap } => {
            AtomicEth { va: remote, rkey, swap_add: swap, compare }
                .write(&mut out[..AtomicEth::LEN]);
        }
        SendOp::FetchAdd { remote, rkey, add } => {
            AtomicEth { va: remote, rkey, swap_add: add, compare: 0 }
                .write(&mut out[..AtomicEth::LEN]);
        }
        SendOp::AtomicWrite { remote, rkey } => {
            Reth { va: remote, rkey, len: wqe.len }.write(&mut out[..Reth::LEN]);
        }
        SendOp::Flush { remote, rkey, len, placement, level } => {
            Feth::new(placement.bits(), level as u8).write(&mut out[..Feth::LEN]);
            Reth { va: remote, rkey, len }.write(&mut out[Feth::LEN..Feth::LEN + Reth::LEN]);
        }
        SendOp::SendInv { rkey } if info.has(Ext::Ieth) => {
            out[..4].copy_from_slice(&rkey.0.to_be_bytes());
        }
        _ => {}
    }
}
