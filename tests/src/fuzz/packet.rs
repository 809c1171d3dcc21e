//! The packet parser and the parsers behind it: arbitrary bytes as a UDP payload, as a management
//! datagram, and as a frame.

use rocinante_netdev::fuzzing;
use rocinante_stack::wire::Solver;
use rocinante_stack::wire::cm::{CmMessage, IpHeader};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{ICRC_LEN, Packet};

pub(super) fn run(data: &[u8]) {
    frame(data);
    management(data);
    let ip =
        IpFields::V4 { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), id: 0, flags: DF };
    let template = Template::new(&ip, 0xc001);
    let _ = template.of(data);
    if let Ok(packet) = Packet::parse(data) {
        whole(data, &packet);
        let (computed, found) = (template.of(data), packet.icrc());
        let _ = Solver::default().solve(&template, data.len(), computed, found);
        management(packet.payload());
    }
}

/// A parsed packet has no part outside of the bytes, and no accessor panics.
fn whole(data: &[u8], packet: &Packet<'_>) {
    let (payload, padding) = (packet.payload(), packet.padding());
    assert_eq!(packet.info.header_len + payload.len() + padding.len() + ICRC_LEN, data.len());
    assert_eq!(packet.bytes(), data);
    assert_eq!(padding.len(), usize::from(packet.bth().pad));
    assert_eq!(packet.bth().bytes()[..], data[..12], "the BTH is unchanged");
    let _ = (packet.reth(), packet.aeth(), packet.atomic_eth(), packet.atomic_ack());
    let _ = (packet.deth(), packet.immediate(), packet.invalidate(), packet.feth());
}

/// A valid message is the same after it is written and read again.
fn management(data: &[u8]) {
    let _ = IpHeader::parse(data);
    let Ok((header, message)) = CmMessage::parse(data) else { return };
    let emitted = message.emit(header.tid);
    let again = CmMessage::parse(&emitted).expect("a written message can be read");
    assert_eq!((again.0.tid, again.1), (header.tid, message));
}

fn frame(data: &[u8]) {
    let Some(payload) = fuzzing::frame(data) else { return };
    assert!(payload.len() <= data.len());
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    super::captured()
}
