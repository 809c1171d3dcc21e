//! Packets as short lines of text.

use rocinante_stack::wire::ext::credits;
use rocinante_stack::wire::{AckKind, NakCode, Operation, Packet};

/// `OPCODE #psn bytes flags`; requests count from `first[0]`, responses from `first[1]`. Panics if
/// the bytes are not a packet.
#[must_use]
pub fn describe(bytes: &[u8], first: [u32; 2]) -> String {
    let packet = Packet::parse(bytes).expect("a packet");
    let mut line = essence(&packet, first);
    if packet.bth().ack_req && packet.info.has_payload() {
        line += " ack";
    }
    if packet.bth().solicited {
        line += " se";
    }
    line
}

/// As [`describe`], with all that a script compares: addresses, operands, immediate data and the
/// MSN. AckReq is left out, because it is the requester's choice.
pub(crate) fn describe_all(packet: &Packet<'_>, first: [u32; 2]) -> String {
    let mut line = essence(packet, first);
    if packet.info.operation != Operation::ReadRequest
        && let Some(reth) = packet.reth()
    {
        line += &format!(" @{:x}+{}", reth.va, reth.len);
    }
    if let Some(eth) = packet.atomic_eth() {
        line += &format!(" @{:x} {} {}", eth.va, eth.swap_add, eth.compare);
    }
    if let Some(imm) = packet.immediate() {
        line += &format!(" imm {:08x}", u32::from_be_bytes(imm));
    }
    if let Some(aeth) = packet.aeth() {
        line += &format!(" msn {}", aeth.msn);
    }
    line
}

fn essence(packet: &Packet<'_>, first: [u32; 2]) -> String {
    let first = first[usize::from(!packet.info.is_request())];
    let psn = packet.bth().psn.value().wrapping_sub(first) & 0xff_ffff;
    // A PSN before the first is negative.
    let psn = if psn >= 0x80_0000 { i64::from(psn) - 0x100_0000 } else { i64::from(psn) };
    let mut line = match (packet.info.operation, packet.aeth()) {
        (Operation::Acknowledge, Some(aeth)) => match aeth.syndrome.kind() {
            AckKind::Ack { credit } => match credits(credit) {
                None => format!("ACK #{psn}"),
                Some(count) => format!("ACK #{psn} of {} credits {count}", aeth.msn),
            },
            AckKind::RnrNak { timer } => format!("RNR #{psn} timer {timer}"),
            AckKind::Nak(code) => format!("NAK #{psn} {}", nak(code)),
            AckKind::Reserved => format!("? #{psn}"),
        },
        _ => format!("{} #{psn}", short(packet.info.name)),
    };
    if packet.info.has_payload() {
        line += &format!(" {}B", packet.payload().len());
    }
    if packet.info.operation == Operation::Acknowledge && !packet.payload().is_empty() {
        let bits = packet.payload().iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1));
        let held = (psn..).zip(bits).filter(|(_, bit)| *bit == 1).map(|(psn, _)| psn);
        line += &format!(" holds {:?}", held.collect::<Vec<_>>());
    }
    if packet.info.operation == Operation::ReadRequest
        && let Some(reth) = packet.reth()
    {
        line += &format!(" @{:x}+{}", reth.va, reth.len);
    }
    if let Some(found) = packet.atomic_ack() {
        line += &format!(" ={found}");
    }
    line
}

fn short(name: &str) -> String {
    let name = name
        .trim_start_matches("RC_")
        .trim_start_matches("UC_")
        .replace("RDMA_", "")
        .replace("_WITH", "");
    name.replace("IMMEDIATE", "IMM").replace("RESPONSE_", "").replace("_REQUEST", "")
}

fn nak(code: NakCode) -> &'static str {
    match code {
        NakCode::PsnSequenceError => "sequence",
        NakCode::InvalidRequest => "invalid",
        NakCode::RemoteAccessError => "access",
        NakCode::RemoteOperationalError => "operational",
        NakCode::InvalidRdRequest => "rd",
    }
}
