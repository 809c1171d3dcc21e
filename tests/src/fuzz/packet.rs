//! The packet parser and the parsers behind it: arbitrary bytes as a UDP payload, as a management
//! datagram, and as a frame.

use rocinante_netdev::fuzzing;
use rocinante_stack::wire::Solver;
use rocinante_stack::wire::cm::{CmMessage, IpHeader};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{ICRC_LEN, Opcode, Packet, WireError, bth};

pub(super) fn run(data: &[u8]) {
    if let Some(payload) = fuzzing::frame(data) {
        assert!(payload.len() <= data.len());
    }
    management(data);
    let ip =
        IpFields::V4 { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), id: 0, flags: DF };
    let template = Template::new(&ip, 0xc001);
    let _ = template.of(data);
    match Packet::parse(data) {
        Ok(packet) => {
            whole(data, &packet, &template);
            let (computed, found) = (template.of(data), packet.icrc());
            let _ = Solver::default().solve(&template, data.len(), computed, found);
            management(packet.payload());
        }
        Err(WireError::Truncated) => assert!(data.len() < bth::LEN + 28 + ICRC_LEN),
        Err(WireError::UnknownOpcode(opcode)) => {
            assert!(opcode == data[0] && Opcode(opcode).info().is_none());
        }
        Err(WireError::Padding) => assert!(data[1] & 0x30 != 0),
    }
}

/// A parsed packet has no part outside of the bytes, no accessor panics or misses its header, and
/// it is the same after it is written.
fn whole(data: &[u8], packet: &Packet<'_>, template: &Template) {
    let (payload, padding) = (packet.payload(), packet.padding());
    assert_eq!(packet.info.header_len + payload.len() + padding.len() + ICRC_LEN, data.len());
    assert_eq!(packet.bytes(), data);
    assert_eq!(padding.len(), usize::from(packet.bth().pad));
    assert_eq!(packet.bth().bytes()[..], data[..bth::LEN], "the BTH is unchanged");
    let extensions = [
        packet.reth().map(|_| 16),
        packet.aeth().map(|_| 4),
        packet.atomic_eth().map(|_| 28),
        packet.atomic_ack().map(|_| 8),
        packet.deth().map(|_| 8),
        packet.immediate().map(|_| 4),
        packet.invalidate().map(|_| 4),
        packet.feth().map(|_| 4),
    ];
    let extensions: usize = extensions.into_iter().flatten().sum();
    assert_eq!(bth::LEN + extensions, packet.info.header_len, "an accessor missed its header");
    if let Some(aeth) = packet.aeth() {
        let _ = aeth.syndrome.kind();
    }
    let mut out = vec![0; data.len()];
    assert_eq!(packet.emit(&mut out), data.len());
    assert_eq!(out, data);
    assert_eq!(packet.icrc().to_le_bytes(), data[data.len() - ICRC_LEN..]);
    template.seal(&mut out);
    assert_eq!(u32::from_le_bytes(*out.last_chunk().expect("a packet")), template.of(&out));
}

/// A valid message is the same after it is written and read again.
fn management(data: &[u8]) {
    let _ = IpHeader::parse(data);
    let Ok((header, message)) = CmMessage::parse(data) else { return };
    let emitted = message.emit(header.tid);
    let again = CmMessage::parse(&emitted).expect("a written message can be read");
    assert_eq!((again.0.tid, again.1), (header.tid, message));
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    super::captured()
}
