//! Packets that another implementation really sent. Each one decodes, re-emits byte for byte, and
//! carries the ICRC that we compute. Decoding is not acceptance: a queue pair would drop some of
//! these.

use std::collections::BTreeMap;
use std::fmt::Write;

use rocinante_stack::types::{Key, Psn, Qpn};
use rocinante_stack::wire::{
    Aeth, AtomicEth, Bth, Deth, Ext, IpFields, Opcode, Packet, Reth, Service,
};
use rocinante_tests::captures::{self, Captured};
use rocinante_tests::snapshot::assert_snapshot;

const PACKETS: usize = 1568;

fn parse(captured: &Captured) -> Packet<'_> {
    Packet::parse(&captured.bytes)
        .unwrap_or_else(|error| panic!("{} #{}: {error}", captured.file, captured.number))
}

#[test]
fn every_packet_is_emitted_byte_for_byte() {
    let all = captures::all();
    assert_eq!(all.len(), PACKETS);
    for captured in &all {
        let mut out = vec![0xa5; captured.bytes.len() + 8];
        let len = parse(captured).emit(&mut out);
        assert_eq!(out[..len], captured.bytes, "{} #{}", captured.file, captured.number);
        assert_eq!(out[len..], [0xa5; 8], "emit wrote behind its end");
    }
}

/// A packet as values that borrow none of its bytes. Only the headers' emitters write it.
struct Repr {
    bth: Bth,
    deth: Option<Deth>,
    reth: Option<Reth>,
    atomic_eth: Option<AtomicEth>,
    aeth: Option<Aeth>,
    atomic_ack: Option<u64>,
    immediate: Option<[u8; 4]>,
    invalidate: Option<Key>,
    payload: Vec<u8>,
    padding: Vec<u8>,
}

impl Repr {
    fn parse(packet: &Packet<'_>) -> Self {
        Self {
            bth: packet.bth(),
            deth: packet.deth(),
            reth: packet.reth(),
            atomic_eth: packet.atomic_eth(),
            aeth: packet.aeth(),
            atomic_ack: packet.atomic_ack(),
            immediate: packet.immediate(),
            invalidate: packet.invalidate(),
            payload: packet.payload().to_vec(),
            padding: packet.padding().to_vec(),
        }
    }

    /// Everything but the ICRC, in the order of IBTA volume 1, 9.2 [M]. No opcode has more than two
    /// of these.
    fn emit(&self) -> Vec<u8> {
        let mut out = self.bth.bytes().to_vec();
        let mut header = [0; 28];
        if let Some(deth) = &self.deth {
            deth.write(&mut header);
            out.extend_from_slice(&header[..8]);
        }
        if let Some(reth) = &self.reth {
            reth.write(&mut header);
            out.extend_from_slice(&header[..16]);
        }
        if let Some(atomic_eth) = &self.atomic_eth {
            atomic_eth.write(&mut header);
            out.extend_from_slice(&header[..28]);
        }
        if let Some(aeth) = &self.aeth {
            aeth.write(&mut header);
            out.extend_from_slice(&header[..4]);
        }
        out.extend(self.atomic_ack.iter().flat_map(|value| value.to_be_bytes()));
        out.extend(self.immediate.iter().flatten());
        out.extend(self.invalidate.iter().flat_map(|key| key.0.to_be_bytes()));
        out.extend_from_slice(&self.payload);
        out.extend_from_slice(&self.padding);
        out
    }
}

#[test]
fn every_packet_is_its_values_and_its_icrc() {
    for captured in captures::all() {
        let packet = parse(&captured);
        let mut bytes = Repr::parse(&packet).emit();
        bytes.extend_from_slice(&packet.icrc().to_le_bytes());
        assert_eq!(bytes, captured.bytes, "{} #{}", captured.file, captured.number);
    }
}

#[test]
fn one_icrc_is_wrong_and_it_is_the_one_that_was_broken() {
    let mut wrong = Vec::new();
    let mut right = 0;
    for captured in captures::all() {
        let computed = captured.template().of(&captured.bytes);
        if computed == captured.found_icrc() {
            right += 1;
        } else {
            wrong.push((captured.file.clone(), captured.number));
        }
        let mut sealed = captured.bytes.clone();
        captured.template().seal(&mut sealed);
        assert_eq!(*sealed.last_chunk().unwrap(), computed.to_le_bytes());
    }
    assert_eq!(wrong, [("raw_peer_experiments".to_owned(), 3)]);
    assert_eq!(right, PACKETS - 1);
}

#[test]
fn an_icrc_in_pieces_is_the_icrc_of_the_whole() {
    for captured in captures::all().iter().step_by(7) {
        let (bth, rest) = captured.bytes.split_first_chunk().unwrap();
        let rest = &rest[..rest.len() - 4];
        let whole = captured.template().of(&captured.bytes);
        for piece in [1, 3, 16, 64, 1000] {
            let mut icrc = captured.template().start(captured.bytes.len(), bth);
            for part in rest.chunks(piece) {
                icrc.update(part);
            }
            assert_eq!(icrc.finish(), whole, "{} #{}", captured.file, captured.number);
        }
    }
}

#[test]
fn counts_per_file_and_opcode_are_what_they_were() {
    let mut files: BTreeMap<String, usize> = BTreeMap::new();
    let mut opcodes: BTreeMap<Opcode, (&str, usize, usize)> = BTreeMap::new();
    for captured in captures::all() {
        let packet = parse(&captured);
        *files.entry(captured.file.clone()).or_default() += 1;
        let count = opcodes.entry(packet.bth().opcode).or_insert((packet.info.name, 0, 0));
        count.1 += 1;
        count.2 += packet.payload().len();
    }
    for opcode in 0..=20 {
        assert!(opcodes.contains_key(&Opcode(opcode)), "no RC opcode {opcode} in the captures");
    }
    let mut text = String::from("packets  file\n");
    for (file, count) in &files {
        writeln!(text, "{count:7}  {file}").unwrap();
    }
    text.push_str("\npackets  payload bytes  opcode\n");
    for (opcode, (name, count, bytes)) in &opcodes {
        writeln!(text, "{count:7}  {bytes:13}  0x{:02x} {name}", opcode.0).unwrap();
    }
    assert_snapshot("captures.txt", &text);
}

/// A few packets that the README of the captures describes.
#[test]
fn known_packets_say_what_they_are_known_to_say() {
    let dir = captures::data_dir().join("captures");
    let rc = captures::packets(&dir.join("rc_ipv4_mtu1024.pcap"));
    let first = parse(&rc[0]);
    assert_eq!(first.bth().opcode, Opcode::RC_SEND_ONLY);
    assert_eq!(first.bth().psn, Psn::new(0xff_fffa));
    assert_eq!(first.payload().len(), 64);
    assert!(first.bth().ack_req && !first.bth().mig_req && first.bth().version == 0);
    let IpFields::V4 { src, dst, .. } = rc[0].ip else { panic!("IPv4 was captured") };
    assert_eq!([src.to_string(), dst.to_string()], ["10.77.0.2", "10.77.0.3"]);

    // The fourth SEND: 101 bytes with immediate, so three of padding.
    let with_immediate = rc
        .iter()
        .map(parse)
        .find(|packet| packet.bth().opcode == Opcode::RC_SEND_ONLY_WITH_IMMEDIATE)
        .unwrap();
    assert_eq!((with_immediate.payload().len(), with_immediate.bth().pad), (101, 3));
    assert_eq!(with_immediate.padding().len(), 3);
    assert!(with_immediate.immediate().is_some());

    // A wrong key, range or permission can cause only these two syndromes.
    let naks = captures::packets(&dir.join("nak_ipv4.pcap"));
    let syndromes: Vec<u8> = naks
        .iter()
        .filter_map(|captured| parse(captured).aeth())
        .map(|aeth| aeth.syndrome.0)
        .filter(|syndrome| syndrome >> 5 != 0)
        .collect();
    assert_eq!(syndromes, [0x2c, 0x2c, 0x2c, 0x2c, 0x62, 0x62, 0x62, 0x61, 0x63]);

    let datagrams = captures::packets(&dir.join("ud_pingpong_grh.pcap"));
    for captured in &datagrams {
        let packet = parse(captured);
        assert_eq!(packet.info.service, Service::Ud);
        assert!(packet.info.has(Ext::Deth));
        let deth = packet.deth().unwrap();
        assert_ne!(deth.src_qpn, Qpn::default());
        assert_eq!(deth.qkey, 0x1111_1111);
        assert_eq!(packet.payload().len(), 256);
    }
}
