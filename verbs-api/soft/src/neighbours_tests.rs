//! Management datagrams for a neighbour that lives and does not read.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::{Interface, PortConfig, RxDatagram, RxIpId, Shards, Slots};
use rocinante_stack::types::Psn;
use rocinante_stack::wire::cm::CommId;
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{AliveMad, Pairs};

use super::neighbours::Neighbours;

/// Another answer than the neighbour's would be that the connection is not there: the peer would
/// end it.
#[test]
fn what_a_full_mailbox_does_not_take_stays_unanswered() {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let here = IpAddr::from([127, 192 | (high & 0x3F), low, 1]);
    let lo = Interface::by_name("lo").unwrap();
    let lease = || {
        let slots = Slots::lease(&lo, &[here], &PortConfig::default(), Shards::ONE).unwrap();
        Arc::new(slots)
    };
    let (first, second) = (lease(), lease());
    let mut neighbours = Neighbours::new(&first);
    let id = |slot: u8| CommId(u32::from(slot) << 24 | 5);
    let mut question = |slot: u8| {
        let mad = AliveMad::Question(Pairs::new([(CommId(7), id(slot))])).emit(1);
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), &mad);
        let datagram = RxDatagram {
            payload: &packet,
            src: [10, 0, 0, 9].into(),
            dst: here,
            src_port: 0xc000,
            ip_id: RxIpId::None,
            tos: None,
        };
        let goes = neighbours.hand_over(&datagram);
        (goes, neighbours.handed_over, neighbours.lost)
    };
    let (neighbour, nobody) = (second.first(), second.first() + 1);
    let mut sent = 0;
    let (goes, handed_over, lost) = loop {
        sent += 1;
        let now = question(neighbour);
        if !now.0 || now.2 > 0 || sent > 100_000 {
            break now;
        }
    };
    assert_eq!((goes, handed_over, lost), (true, sent - 1, 1), "of {sent}");
    assert_eq!(question(neighbour), (true, sent - 1, 2));
    assert!(!question(nobody).0 && !question(first.first()).0, "the answer is this process's");
    // A process that has gone does not answer any more.
    drop(second);
    assert_eq!(question(neighbour), (false, sent - 1, 2));
}
