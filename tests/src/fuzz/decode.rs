//! The decoder of captures: a row of frames with packets of any content, whole and as
//! super-packets, with right ICRCs and wrong ones.
//!
//! With any contents, the state kept of the packets has a limit, and a frame of the copy has a
//! right ICRC where its packet has.

use etherparse::PacketBuilder;
use rocinante_cli::decode::check::{Verdict, pieces};
use rocinante_cli::decode::flows::{FLOWS_MAX, Flows};
use rocinante_cli::decode::frame::{LinkType, roce_datagram};
use rocinante_cli::decode::line::{Decoded, Place};
use rocinante_cli::decode::rewrite::wire_frame;
use rocinante_stack::wire::IpFields;
use rocinante_stack::wire::icrc::{ICRC_LEN, Template};

use super::Input;

/// Raw IP.
const LINK: LinkType = LinkType(101);
const SRC_PORT: u16 = 0xc123;

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut flows = Flows::default();
    for number in 1..=64 {
        if input.is_empty() {
            break;
        }
        let (how, len) = (input.u8(), usize::from(input.u16()));
        each(&mut flows, &frame(how, input.slice(len)), number);
    }
    assert!(flows.json().as_array().is_some_and(|flows| flows.len() <= FLOWS_MAX));
    assert!(!flows.to_string().is_empty());
}

/// A frame with the packet once or twice. Of `how`, bit 0 turns it round, bit 1 leaves the ICRC as
/// it is, bit 2 makes it a super-packet, bit 3 takes IPv6.
fn frame(how: u8, packet: &[u8]) -> Vec<u8> {
    let (mut src, mut dst) = (2, 3);
    if how & 1 != 0 {
        (src, dst) = (dst, src);
    }
    let count = if how & 4 != 0 { 2 } else { 1 };
    let v6 = |last: u8| {
        let mut address = [0; 16];
        (address[0], address[15]) = (0xfd, last);
        address
    };
    let mut payload = Vec::new();
    let builder = if how & 8 != 0 {
        PacketBuilder::ipv6(v6(src), v6(dst), 64)
    } else {
        PacketBuilder::ipv4([10, 0, 0, src], [10, 0, 0, dst], 64)
    };
    for id in 0..count {
        let ip = if how & 8 != 0 {
            IpFields::V6 { src: v6(src).into(), dst: v6(dst).into() }
        } else {
            let (src, dst) = ([10, 0, 0, src].into(), [10, 0, 0, dst].into());
            IpFields::V4 { src, dst, id, flags: rocinante_stack::wire::icrc::DF }
        };
        let mut bytes = packet.to_vec();
        if how & 2 == 0 && bytes.len() >= 12 + ICRC_LEN {
            Template::new(&ip, SRC_PORT).seal(&mut bytes);
        }
        payload.extend(bytes);
    }
    let mut out = Vec::new();
    builder.udp(SRC_PORT, 4791).write(&mut out, &payload).expect("a vector takes it");
    out
}

fn each(flows: &mut Flows, frame: &[u8], number: u64) {
    let Ok(Some(datagram)) = roce_datagram(LINK, frame) else { return };
    let (ends, time_ns) = (datagram.ip.addresses(), Some(i128::from(number) * 1000));
    for piece in pieces(&datagram) {
        let packet = Decoded::new(piece);
        let known = flows.note(ends, time_ns, &packet);
        let place = Place {
            frame: number,
            time_ns,
            since_start_ns: time_ns,
            ends,
            src_port: datagram.src_port,
            src_qpn: known.src_qpn,
        };
        assert!(packet.json(&place).is_object() && packet.to_string().contains("icrc "));
        let copy = wire_frame(frame, &datagram, &piece);
        if piece.verdict == Verdict::Ok {
            let copied = roce_datagram(LINK, &copy).expect("raw IP").expect("the same packet");
            assert_eq!(pieces(&copied)[0].verdict, Verdict::Ok);
            assert_eq!(copied.captured, piece.captured);
        }
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let packets = super::captured();
    // A few that follow each other, as a conversation: alone, turned round, as super-packets.
    let rows = packets.chunks(8).enumerate().map(|(n, packets)| {
        let one = |packet: &Vec<u8>| {
            let how = (n as u8).wrapping_mul(4) | u8::from(packet.len() < 32);
            let len = u16::try_from(packet.len()).unwrap_or(u16::MAX).to_le_bytes();
            [&[how & 0x0d][..], &len, packet].concat()
        };
        packets.iter().flat_map(one).collect()
    });
    rows.collect()
}
