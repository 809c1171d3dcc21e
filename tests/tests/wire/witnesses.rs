//! Packets of every opcode, written by our emitters and read by other programs: scapy, which
//! computes the ICRC, and tshark, which knows the extension headers. A stack that is wrong on both
//! of its sides agrees with itself, but not with these.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use etherparse::{IpNumber, Ipv4Header, Ipv6Header, PacketBuilder};
use pcap_file::pcap::{PcapPacket, PcapWriter};
use rocinante_stack::types::{Key, Pkey, Psn, Qpn};
use rocinante_stack::wire::icrc::{DF, Template};
use rocinante_stack::wire::{
    Aeth, AtomicEth, Bth, Deth, Ext, ICRC_LEN, IpFields, Opcode, OpcodeInfo, Operation, Packet,
    Reth, Service, Syndrome,
};
use rocinante_tests::tshark::number;
use rocinante_tests::{need, require};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempPath};

/// A packet of ours, and the frame it travels in.
struct Sample {
    packet: Vec<u8>,
    frame: Vec<u8>,
}

impl Sample {
    fn parse(&self) -> Packet<'_> {
        Packet::parse(&self.packet).expect("a packet of ours")
    }
}

/// Each opcode with each payload length that it may have, each time with other header fields.
fn samples() -> Vec<Sample> {
    let mut samples = Vec::new();
    for info in Opcode::all() {
        let lengths: &[usize] = match info.operation {
            Operation::AtomicWrite => &[8],
            Operation::Notification => &[16],
            _ if info.has_payload() => &[0, 1, 2, 3, 4, 61, 64, 256, 1021, 1024, 4096],
            _ => &[0],
        };
        for &payload in lengths {
            for v6 in [false, true] {
                samples.push(sample(info, payload, v6, samples.len()));
            }
        }
    }
    samples
}

fn sample(info: &OpcodeInfo, payload: usize, v6: bool, seed: usize) -> Sample {
    let seed32 = u32::try_from(seed).expect("few samples");
    let mut packet = headers(info, payload, seed32);
    packet.extend((0..payload).map(|i| {
        let zero = info.operation == Operation::Notification;
        if zero { 0 } else { (i * 7 + seed) as u8 }
    }));
    packet.resize(packet.len().next_multiple_of(4) + ICRC_LEN, 0);
    let src_port = 0xc000 | (seed as u16).wrapping_mul(977) & 0x3fff;
    let (ip, frame) = frame(&mut packet, v6, src_port, seed);
    debug_assert_eq!(
        Template::new(&ip, src_port).of(&packet).to_le_bytes(),
        frame[frame.len() - 4..]
    );
    Sample { packet, frame }
}

/// BTH and extension headers, by our emitters.
fn headers(info: &OpcodeInfo, payload: usize, seed: u32) -> Vec<u8> {
    let scrambled = seed.wrapping_mul(0x9e37_79b9);
    let flag = |bit: u32| scrambled >> bit & 1 == 1;
    let bth = Bth {
        solicited: flag(20),
        mig_req: flag(21),
        pad: (payload.wrapping_neg() & 3) as u8,
        fecn: flag(22),
        becn: flag(23) || info.service == Service::Cnp,
        ack_req: flag(24),
        ..Bth::new(info.opcode, Pkey::DEFAULT, Qpn::new(scrambled | 2), Psn::new(!scrambled))
    };
    let pkey = if flag(25) { Pkey(0x7fff) } else { bth.pkey };
    let mut out = Bth { pkey, ..bth }.bytes().to_vec();
    let wide = u64::from(scrambled) << 32 | u64::from(!seed);
    let (va, rkey) = (wide.rotate_left(9), Key(scrambled.rotate_left(5)));
    for ext in info.extensions {
        let at = out.len();
        out.resize(at + ext.size(), 0);
        let out = &mut out[at..];
        match ext {
            Ext::Deth => {
                let src_qpn = Qpn::new(scrambled.rotate_left(11));
                Deth { qkey: scrambled ^ 0x1111_1111, reserved: 0, src_qpn }.write(out);
            }
            Ext::Reth => Reth { va, rkey, len: payload as u32 + seed }.write(out),
            Ext::AtomicEth => AtomicEth { va, rkey, swap_add: wide, compare: !wide }.write(out),
            Ext::Aeth => {
                let syndromes = [0x1f, 0x05, 0x2c, 0x60, 0x61, 0x62, 0x63, 0x00];
                let syndrome = Syndrome(syndromes[seed as usize % syndromes.len()]);
                Aeth { syndrome, msn: scrambled & 0xff_ffff }.write(out);
            }
            Ext::AtomicAckEth => out.copy_from_slice(&wide.to_be_bytes()),
            Ext::ImmDt | Ext::Ieth => out.copy_from_slice(&scrambled.to_be_bytes()),
            Ext::Feth => out.copy_from_slice(&0x13u32.to_be_bytes()),
        }
    }
    out
}

/// Seals the packet for its IP header and puts it into a frame.
fn frame(packet: &mut [u8], v6: bool, src_port: u16, seed: usize) -> (IpFields, Vec<u8>) {
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let tos = [0x00, 0xa0, 0x02, 0xff, 0x01][seed % 5];
    let ttl = [64, 1, 255][seed % 3];
    let (ip, builder) = if v6 {
        let (src, dst) = ("fd77::2", "2001:db8:1:2:3:4:5:6");
        let (src, dst): (Ipv6Addr, Ipv6Addr) = (src.parse().unwrap(), dst.parse().unwrap());
        let header = Ipv6Header {
            traffic_class: tos,
            flow_label: ((seed as u32).wrapping_mul(0x0107_3b1f) & 0xf_ffff).try_into().unwrap(),
            next_header: IpNumber::UDP,
            hop_limit: ttl,
            source: src.octets(),
            destination: dst.octets(),
            ..Ipv6Header::default()
        };
        (
            IpFields::V6 { src, dst },
            builder.ip(etherparse::IpHeaders::Ipv6(header, Default::default())),
        )
    } else {
        let (src, dst) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(192, 168, 1, 254));
        let id = [0, 1, 63, 127, 0x1234, 0xffff, 0x8000][seed % 7];
        let df = seed % 4 != 3;
        let mut header =
            Ipv4Header::new(0, ttl, IpNumber::UDP, src.octets(), dst.octets()).unwrap();
        header.identification = id;
        header.dont_fragment = df;
        header.dscp = (tos >> 2).try_into().unwrap();
        header.ecn = (tos & 3).try_into().unwrap();
        let flags = if df { DF } else { 0 };
        let headers = etherparse::IpHeaders::Ipv4(header, Default::default());
        (IpFields::V4 { src, dst, id, flags }, builder.ip(headers))
    };
    Template::new(&ip, src_port).seal(packet);
    let mut frame = Vec::new();
    builder.udp(src_port, 4791).write(&mut frame, packet).unwrap();
    (ip, frame)
}

/// A capture file that is removed when it is dropped.
pub(crate) fn capture<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> TempPath {
    let file = NamedTempFile::new().unwrap();
    let mut writer = PcapWriter::new(file.as_file()).unwrap();
    for frame in frames {
        let len = u32::try_from(frame.len()).unwrap();
        writer.write_packet(&PcapPacket::new(Duration::ZERO, len, frame)).unwrap();
    }
    file.into_temp_path()
}

/// A Python that has scapy. Debian's scapy belongs to Debian's Python, which need not be the first
/// one.
fn python() -> Result<&'static str, String> {
    ["python3", "/usr/bin/python3"]
        .into_iter()
        .find(|python| {
            let test = Command::new(python).args(["-c", "import scapy.contrib.roce"]).output();
            test.is_ok_and(|output| output.status.success())
        })
        .ok_or_else(|| "python3-scapy is not installed".into())
}

/// scapy's report of itself, and of each frame.
fn ask_scapy(python: &str, capture: &Path) -> (Value, Vec<Value>) {
    let script = rocinante_tests::captures::data_dir().join("scapy_roce.py");
    let output = Command::new(python).arg(script).arg(capture).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "scapy: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    (lines.next().expect("a first line"), lines.collect())
}

/// The fields by the names that scapy gives them.
fn expected(sample: &Sample) -> Value {
    let packet = sample.parse();
    let bth = packet.bth();
    let mut fields = json!({
        "opcode": bth.opcode.0,
        "solicited": u8::from(bth.solicited),
        "migreq": u8::from(bth.mig_req),
        "padcount": bth.pad,
        "version": bth.version,
        "pkey": bth.pkey.0,
        "fecn": u8::from(bth.fecn),
        "becn": u8::from(bth.becn),
        "resv6": bth.reserved_a,
        "dqpn": bth.dest_qpn.value(),
        "ackreq": u8::from(bth.ack_req),
        "resv7": bth.reserved_b,
        "psn": bth.psn.value(),
        "icrc": hex(&packet.icrc().to_le_bytes()),
    });
    // scapy knows only this extension header, and expects it only with this opcode.
    if bth.opcode == Opcode::RC_ACKNOWLEDGE {
        let aeth = packet.aeth().unwrap();
        fields["syndrome"] = json!(aeth.syndrome.0);
        fields["msn"] = json!(aeth.msn);
    }
    fields
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn scapy_sees_what_we_wrote_and_computes_the_same_icrc() {
    require!(python());
    let samples = samples();
    let capture = capture(samples.iter().map(|sample| &sample.frame[..]));
    let (scapy, seen) = ask_scapy(python().unwrap(), &capture);
    assert_eq!(seen.len(), samples.len(), "scapy {}", scapy["version"]);
    for (sample, seen) in samples.iter().zip(&seen) {
        assert_eq!(
            *seen,
            expected(sample),
            "scapy {}: {:?}",
            scapy["version"],
            sample.parse().bth()
        );
    }
}

#[test]
fn scapy_notices_a_changed_bit() {
    require!(python());
    let mut samples = samples();
    // Somewhere in the UDP payload, but not in the masked byte and not in the ICRC, which is not
    // computed.
    for (i, sample) in samples.iter_mut().enumerate() {
        let start = sample.frame.len() - sample.packet.len();
        let at = (i * 13) % (sample.packet.len() - 5);
        let at = start + if at < 4 { at } else { at + 1 };
        sample.frame[at.min(start + sample.packet.len() - 5)] ^= 1 << (i % 8);
    }
    let capture = capture(samples.iter().map(|sample| &sample.frame[..]));
    let (_, seen) = ask_scapy(python().unwrap(), &capture);
    for (sample, seen) in samples.iter().zip(&seen) {
        assert_ne!(seen["icrc"], expected(sample)["icrc"], "{:?}", sample.parse().bth());
    }
}

/// scapy's table has no opcode of RC, UC, UD or CNP that ours lacks, and has the same names.
#[test]
fn scapy_has_the_same_opcodes() {
    require!(python());
    let capture = capture([]);
    let (scapy, _) = ask_scapy(python().unwrap(), &capture);
    let theirs = scapy["opcodes"].as_object().unwrap();
    assert!(theirs.len() > 35, "{theirs:?}");
    let mut compared = 0;
    for (value, name) in theirs {
        let opcode = Opcode(value.parse().unwrap());
        if opcode.0 >> 5 != 2 {
            assert_eq!(opcode.info().map(|info| info.name), name.as_str(), "{value}");
            compared += 1;
        }
    }
    assert_eq!(compared, 36);
}

/// Bytes that tshark prints as hexadecimal digits.
fn bytes_as_number(text: &str) -> Option<u64> {
    u64::from_str_radix(&text.replace(':', ""), 16).ok()
}

const TSHARK_FIELDS: [&str; 20] = [
    "bth.opcode",
    "bth.se",
    "bth.m",
    "bth.padcnt",
    "bth.tver",
    "bth.p_key",
    "bth.destqp",
    "bth.a",
    "bth.psn",
    "deth.q_key",
    "deth.srcqp",
    "reth.va",
    "reth.r_key",
    "reth.dmalen",
    "atomiceth.swapdt",
    "atomiceth.cmpdt",
    "aeth.syndrome",
    "aeth.msn",
    "atomicacketh.origremdt",
    "invariant.crc",
];

/// The values of [`TSHARK_FIELDS`] by our parser.
fn fields(packet: &Packet<'_>) -> Vec<Option<u64>> {
    let bth = packet.bth();
    let (reth, atomic) = (packet.reth(), packet.atomic_eth());
    let (deth, aeth) = (packet.deth(), packet.aeth());
    vec![
        Some(bth.opcode.0.into()),
        Some(bth.solicited.into()),
        Some(bth.mig_req.into()),
        Some(bth.pad.into()),
        Some(bth.version.into()),
        Some(bth.pkey.0.into()),
        Some(bth.dest_qpn.value().into()),
        Some(bth.ack_req.into()),
        Some(bth.psn.value().into()),
        deth.map(|deth| deth.qkey.into()),
        deth.map(|deth| deth.src_qpn.value().into()),
        // tshark shows the address and key of an atomic under the names of the RETH.
        reth.map(|reth| reth.va).or(atomic.map(|atomic| atomic.va)),
        reth.map(|reth| reth.rkey.0.into()).or(atomic.map(|atomic| atomic.rkey.0.into())),
        reth.map(|reth| reth.len.into()),
        atomic.map(|atomic| atomic.swap_add),
        atomic.map(|atomic| atomic.compare),
        aeth.map(|aeth| aeth.syndrome.0.into()),
        aeth.map(|aeth| aeth.msn.into()),
        packet.atomic_ack(),
        // tshark prints the four bytes as they stand.
        Some(packet.icrc().swap_bytes().into()),
    ]
}

#[test]
fn tshark_sees_every_field_that_we_wrote() {
    require!(need::program("tshark"));
    // tshark's table of opcodes lacks FLUSH, ATOMIC WRITE and the CNP.
    let known = |sample: &Sample| !matches!(sample.packet[0], 0x1c | 0x1d | 0x81);
    let samples: Vec<_> = samples().into_iter().filter(known).collect();
    let capture = capture(samples.iter().map(|sample| &sample.frame[..]));
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&capture);
    // These dissectors guess from the payloads of SENDs, and fail on short ones.
    for guess in ["rpcordma", "infiniband.eoib"] {
        command.args(["--disable-protocol", guess]);
    }
    command.args(["-n", "-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]);
    for field in TSHARK_FIELDS {
        command.args(["-e", &format!("infiniband.{field}")]);
    }
    command.args(["-e", "infiniband.immdt", "-e", "infiniband.ieth"]);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), samples.len(), "{}", String::from_utf8_lossy(&output.stderr));
    for (sample, line) in samples.iter().zip(text.lines()) {
        let packet = sample.parse();
        let columns: Vec<_> = line.split('|').collect();
        let (numbers, bytes) = columns.split_at(TSHARK_FIELDS.len());
        for ((name, ours), theirs) in TSHARK_FIELDS.iter().zip(fields(&packet)).zip(numbers) {
            assert_eq!(number(theirs), ours, "{name} of {:?}: {theirs}", packet.bth());
        }
        let immediate = packet.immediate().map(|bytes| u32::from_be_bytes(bytes).into());
        assert_eq!(bytes_as_number(bytes[0]), immediate, "{:?}", packet.bth());
        assert_eq!(bytes_as_number(bytes[1]), packet.invalidate().map(|key| key.0.into()));
    }
}
