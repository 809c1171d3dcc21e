//! Packets as a peer writes them, correct or not.

use rocinante_stack::types::{Key, Pkey, Psn, Qpn};
use rocinante_stack::wire::{Aeth, AtomicEth, Bth, ICRC_LEN, Opcode, Reth, Syndrome, bth};

/// A packet for `dest`, complete but for its ICRC. Behind the BTH stands `rest`: all headers of the
/// opcode, then payload, padded. Panics if the opcode is not in the table, or `rest` is shorter
/// than its headers.
#[must_use]
pub fn packet(opcode: Opcode, dest: Qpn, psn: Psn, ack_req: bool, rest: &[&[u8]]) -> Vec<u8> {
    let mut header = Bth::new(opcode, Pkey::DEFAULT, dest, psn);
    header.ack_req = ack_req;
    let info = opcode.info().expect("an opcode of the table");
    let body: usize = rest.iter().map(|part| part.len()).sum();
    let payload = (bth::LEN + body).checked_sub(info.header_len).expect("all headers");
    header.pad = (payload.next_multiple_of(4) - payload) as u8;
    let mut packet = header.bytes().to_vec();
    rest.iter().for_each(|part| packet.extend_from_slice(part));
    packet.resize(packet.len() + usize::from(header.pad) + ICRC_LEN, 0);
    packet
}

/// The bytes of a RETH.
#[must_use]
pub fn reth(va: u64, rkey: Key, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; Reth::LEN];
    Reth { va, rkey, len }.write(&mut bytes);
    bytes
}

/// The bytes of an AtomicETH.
#[must_use]
pub fn atomic_eth(va: u64, rkey: Key, swap_add: u64, compare: u64) -> Vec<u8> {
    let mut bytes = vec![0; AtomicEth::LEN];
    AtomicEth { va, rkey, swap_add, compare }.write(&mut bytes);
    bytes
}

/// The bytes of an AETH.
#[must_use]
pub fn aeth(syndrome: Syndrome, msn: u32) -> Vec<u8> {
    let mut bytes = vec![0; Aeth::LEN];
    Aeth { syndrome, msn }.write(&mut bytes);
    bytes
}

/// Bytes that show their position and seed.
#[must_use]
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

/// A SEND and a WRITE of 600 bytes, each with immediate data and of three packets at path MTU 256.
/// Returns each packet's opcode and the bytes behind its BTH. `header` is the RETH.
#[must_use]
pub(crate) fn two_messages(header: &[u8], imm: [u8; 4]) -> [(Opcode, Vec<u8>); 6] {
    [
        (Opcode::RC_SEND_FIRST, vec![1; 256]),
        (Opcode::RC_SEND_MIDDLE, vec![2; 256]),
        (Opcode::RC_SEND_LAST_WITH_IMMEDIATE, [&imm[..], &[3; 88]].concat()),
        (Opcode::RC_RDMA_WRITE_FIRST, [header, &[4; 256]].concat()),
        (Opcode::RC_RDMA_WRITE_MIDDLE, vec![5; 256]),
        (Opcode::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE, [&imm[..], &[6; 88]].concat()),
    ]
}
