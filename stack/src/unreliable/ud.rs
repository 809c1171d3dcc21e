//! The receiver of datagrams.
//!
//! Any sender that knows the Q_Key may send one. A datagram that does not fit is dropped and
//! counted, and touches no receive: no sender can break anything.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Qp;
use crate::ingress::{Datagram, IpId};
use crate::mem::Memory;
use crate::qp::rq::Received;
use crate::shared::Shared;
use crate::verbs::{Completions, Sender, WcOpcode, WcStatus};
use crate::wire::Packet;
use crate::wire::icrc::DF;

/// Bytes before the payload in the receive of a datagram.
const GRH_LEN: usize = 40;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const UDP_PROTOCOL: u8 = 17;
/// The hop limit where the port does not see it.
const HOP_LIMIT: u8 = 64;

impl Qp {
    /// A datagram for this queue pair.
    pub(super) fn handle_datagram<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let Some(deth) = packet.deth() else { return shared.drops.wrong_service += 1 };
        if self.core.attr.qkey != Some(deth.qkey) {
            return shared.drops.qkey += 1;
        }
        self.core.on_packet(&mut shared.events);
        let payload = packet.payload();
        let pd = self.core.recv_pd;
        let mut receives = self.core.receives(&mut shared.srqs);
        let Some(wr_id) = receives.front() else { return shared.drops.no_receive += 1 };
        let len = GRH_LEN + payload.len();
        if len > receives.room() as usize {
            return shared.drops.too_long += 1;
        }
        let grh = ip_header(datagram);
        let placed = receives
            .scatter(0, &grh, pd, host)
            .and_then(|()| receives.scatter(GRH_LEN as u32, payload, pd, host));
        if placed.is_err() {
            return self.fail_receive(WcStatus::LocProtErr, shared, host);
        }
        let received = Received {
            wr_id,
            status: WcStatus::Success,
            opcode: WcOpcode::Recv,
            byte_len: len as u32,
            imm: packet.immediate(),
            invalidated: None,
            sender: Some(Sender { qpn: deth.src_qpn, ipv4: datagram.src.is_ipv4() }),
            solicited: packet.bth().solicited,
        };
        receives.complete(received);
        self.core.tally.accepted(&mut shared.counters, payload.len());
        self.core.tally.executed(&mut shared.counters);
        self.core.complete_recv(&received, host);
    }
}

/// The IP header with which a datagram came, as far as the port reported it: over IPv4 in the last
/// 20 bytes, after zeros (IBTA annex A17, RoCEv2 \[M\]; `ibv_init_ah_from_wc(3)` looks for it
/// there).
fn ip_header(datagram: &Datagram<'_>) -> [u8; GRH_LEN] {
    let mut grh = [0; GRH_LEN];
    let udp_len = (UDP_LEN + datagram.bytes.len()) as u16;
    let hop_limit = datagram.hop_limit.unwrap_or(HOP_LIMIT);
    match (datagram.src, datagram.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let (id, flags) = match datagram.ip_id {
                IpId::Exact { id, flags } => (id, flags),
                IpId::Hint(id) => (id, DF),
                IpId::None => (0, DF),
            };
            let header = &mut grh[GRH_LEN - IPV4_LEN..];
            header[0] = 0x45;
            header[1] = datagram.tos;
            header[2..4].copy_from_slice(&(udp_len + IPV4_LEN as u16).to_be_bytes());
            header[4..6].copy_from_slice(&id.to_be_bytes());
            header[6..8].copy_from_slice(&flags.to_be_bytes());
            header[8..10].copy_from_slice(&[hop_limit, UDP_PROTOCOL]);
            header[12..16].copy_from_slice(&src.octets());
            header[16..20].copy_from_slice(&dst.octets());
            let checksum = checksum(header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            grh[0] = 0x60 | datagram.tos >> 4;
            grh[1] = datagram.tos << 4;
            grh[4..6].copy_from_slice(&udp_len.to_be_bytes());
            grh[6..8].copy_from_slice(&[UDP_PROTOCOL, hop_limit]);
            grh[8..24].copy_from_slice(&src.octets());
            grh[24..40].copy_from_slice(&dst.octets());
        }
        _ => {}
    }
    grh
}

fn checksum(header: &[u8]) -> u16 {
    let words =
        header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded + (folded >> 16)) as u16;
    !folded
}

/// Whence and whereto the datagram came whose receive begins with these 40 bytes; `None` if they
/// are no IP header.
#[must_use]
pub fn grh_addresses(grh: &[u8; GRH_LEN]) -> Option<(IpAddr, IpAddr)> {
    let header = &grh[GRH_LEN - IPV4_LEN..];
    // Before IPv4 there may be anything, such as the remains of an earlier datagram; a right
    // checksum is no accident. Soft-RoCE writes none for datagrams that do not leave the machine.
    let is_ipv6 = grh[0] >> 4 == 6;
    let unsummed = header[10..12] == [0, 0] && header[9] == 17 && !is_ipv6;
    if header[0] == 0x45 && (checksum(header) == 0 || unsummed) {
        let address = |at: usize| Some(Ipv4Addr::from(*header[at..].first_chunk::<4>()?).into());
        return Some((address(12)?, address(16)?));
    }
    if !is_ipv6 {
        return None;
    }
    let address = |at: usize| Some(Ipv6Addr::from(*grh[at..].first_chunk::<16>()?).into());
    Some((address(8)?, address(24)?))
}
