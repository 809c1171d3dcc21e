//! WRITEs of several packets that leave as messages of one packet each.
//!
//! Ports send packets of one size as one super-packet, of which only the last may be shorter, and
//! the cost is that of super-packets. The first packet of a WRITE is longer than the others by a
//! RETH, so it ends a run with the packet behind it: two packets in the place of fifteen, of each
//! WRITE. Of WRITEs of 8 KiB that is all. As an `RDMA WRITE Only` each packet has a RETH, so they
//! are of one size, and WRITEs that follow each other share super-packets, as those of one packet
//! do.
//!
//! For the responder they are the WRITEs of a program that writes the same bytes by several
//! requests: the same number of packets with the same PSNs and payloads, placed in the same order.
//! The differences: the responder counts more messages, which
//! [`Wqe::messages`](crate::qp::sq::Wqe::messages) follows; each packet is 16 bytes longer; and if
//! the range is not all admitted, the packets before the first that is not are placed, where a
//! responder looks at the length of the whole message first. The request fails alike.
//!
//! A WRITE with immediate stays one message: its completion tells the receiver the message's length
//! (`byte_len`; `send_data_in` and `do_complete` of Linux' `rxe_resp.c`).
//!
//! The decision is made when the request is posted, and kept in it, so that retransmissions are the
//! same packets. A WRITE that is posted while nothing is in flight to that peer, from any queue
//! pair, is split only within a range that the peer has admitted before
//! ([`Peers::admits`](crate::peer::Peers::admits)): then none of it is refused.

use crate::peer::Peers;
use crate::rc::Qp;
use crate::rc::requester::permit::read_window::request_packets;
use crate::tuning::split::{ENABLED, SAVES};
use crate::types::Mtu;
use crate::verbs::SendOp;
use crate::wire::{ICRC_LEN, Reth, bth};

impl Qp {
    /// Packets of each message that a request of more than one packet is split into; 0 if it is
    /// not.
    #[inline(never)]
    pub(in crate::rc) fn split(&self, op: &SendOp, len: u32, peers: &Peers) -> u16 {
        match op {
            SendOp::Read { .. } => {
                request_packets(self.params.mtu, peers, &self.requester.control.read_window)
            }
            SendOp::Write { imm: None, .. } => {
                let may = || {
                    !self.core.sq.is_empty()
                        || peers.is_used(self.params.peer)
                        || peers.admits(self.params.peer, op, len)
                };
                let mtu = self.params.mtu;
                let run = peers.runs().packets_of(mtu.bytes() + HEADERS);
                u16::from(ENABLED && self.params.splits_writes && may() && saves(len, mtu, run))
            }
            _ => 0,
        }
    }
}

/// Bytes around the payload of a message of one packet.
const HEADERS: u32 = (bth::LEN + Reth::LEN + ICRC_LEN) as u32;

/// Whether a WRITE of `len` bytes, of more than one packet, takes at most nine super-packets of
/// `run` packets in the place of ten if it is split.
fn saves(len: u32, mtu: Mtu, run: u32) -> bool {
    let run = u64::from(run);
    let packets = u64::from(len.div_ceil(mtu.bytes()));
    // The first two as one, and the others.
    let as_one = 1 + (packets - 2).div_ceil(run);
    // In packets; a last one that is shorter ends a run.
    let whole = len.is_multiple_of(mtu.bytes());
    let cut = if whole { packets } else { packets.next_multiple_of(run) };
    SAVES.1 * cut <= SAVES.0 * as_one * run
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saves(len: u32, mtu: Mtu) -> bool {
        super::saves(len, mtu, crate::RunLimits::default().packets_of(mtu.bytes() + HEADERS))
    }

    #[test]
    fn what_fills_no_more_super_packets_is_left_as_it_is() {
        const KIB: u32 = 1024;
        for (kib, cut) in [(8, true), (12, true), (64, true), (512, true), (1024, false)] {
            assert_eq!(saves(kib * KIB, Mtu::Mtu4096), cut, "{kib} KiB");
        }
        // One super-packet of two packets either way; one in the place of two; two either way.
        for (len, cut) in [(8 * KIB - 1, false), (8 * KIB + 1, true), (60 * KIB + 1, false)] {
            assert_eq!(saves(len, Mtu::Mtu4096), cut, "{len} bytes");
        }
        assert!(saves(64 * KIB, Mtu::Mtu1024) && !saves(2048 * KIB, Mtu::Mtu1024));
        assert!(!saves(1 << 31, Mtu::Mtu256));
    }
}
