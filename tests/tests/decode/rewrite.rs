//! `-w`: packets as a wire carries them.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use etherparse::{NetSlice, SlicedPacket, TransportSlice, UdpSlice};
use rocinante_stack::wire::IpFields;
use rocinante_tests::{need, require};
use tempfile::TempPath;

use super::made::{
    Style, ethernet, good_frame, ip_packet, ipv4, ipv6, pcap, pcapng_of, write_packet,
};
use super::{command, decode, decode_bytes, temporary};

/// A super-packet of `count` packets, each sealed for the header that it will have.
fn run(head: &IpFields, of: impl Fn(u16) -> IpFields, count: u16) -> Vec<u8> {
    let packets = (0..count).map(|i| write_packet(&of(i), u32::from(i), 100));
    ip_packet(head, &packets.collect::<Vec<_>>().concat())
}

fn written(file: &[u8], args: &[&str]) -> TempPath {
    let copy = temporary(b"");
    let done = decode_bytes(file, &[&["-q", "-w", copy.to_str().unwrap()], args].concat());
    assert_eq!(done.status, 0, "{}{}", done.out, done.err);
    copy
}

/// The frames of a pcapng file, by its interface's link type.
fn frames(copy: &Path) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    rocinante_cli::decode::file::read(copy, |frame| {
        frames.push(frame.data.to_vec());
        std::io::Result::Ok(())
    })
    .unwrap();
    frames
}

#[test]
fn a_super_packet_becomes_the_frames_of_a_wire() {
    let runs = [
        run(&ipv4(65_534), |i| ipv4(65_534u16.wrapping_add(i)), 5),
        run(&ipv4(77), |_| ipv4(77), 5),
        run(&ipv6(), |_| ipv6(), 5),
    ];
    for packet in runs {
        let copy = written(&pcap(Style::USUAL, 1, &[ethernet(&packet)]), &[]);
        let done = decode([copy.as_os_str(), "--json".as_ref()]);
        let json = done.json();
        assert_eq!((&json["packets"], &json["icrc_ok"]), (&5.into(), &5.into()), "{}", done.err);
        let places = done.lines();
        let places: Vec<_> = places.iter().map(|l| l.split_whitespace().next().unwrap()).collect();
        assert_eq!(places, ["1", "2", "3", "4", "5"], "no super-packet is left");
        for frame in frames(&copy) {
            // etherparse is strict about lengths.
            let sliced = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
            let header = udp.to_header();
            let right = match sliced.net.unwrap() {
                NetSlice::Ipv4(ip) => {
                    let ip = ip.header().to_header();
                    assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                    header.calc_checksum_ipv4(&ip, udp.payload())
                }
                NetSlice::Ipv6(ip) => {
                    header.calc_checksum_ipv6(&ip.header().to_header(), udp.payload())
                }
                NetSlice::Arp(_) => panic!("no IP"),
            };
            assert_eq!(header.checksum, right.unwrap());
        }
    }
}

/// The sum of 16-bit words of the pseudo-header (RFC 768, RFC 8200 8.1).
fn pseudo_sum(addresses: &[u8], udp_len: u16) -> u16 {
    let words = addresses.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum = words.sum::<u32>() + 17 + u32::from(udp_len);
    let sum = (sum & 0xffff) + (sum >> 16);
    u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap()
}

/// A captured frame has the sum of the pseudo-header where the device is to sum up the rest.
#[test]
fn a_checksum_that_was_left_to_the_device_is_filled_in() {
    for (head, udp, addresses) in [(ipv4(7), 34, 26..34), (ipv6(), 54, 22..54)] {
        let captured = ethernet(&ip_packet(&head, &write_packet(&head, 1, 100)));
        let with = |checksum: u16| {
            let mut frame = captured.clone();
            frame[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
            frame
        };
        let udp_len = u16::try_from(captured.len() - udp).unwrap();
        let left = pseudo_sum(&captured[addresses], udp_len);
        let sliced = UdpSlice::from_slice(&captured[udp..]).unwrap();
        let right = match head {
            IpFields::V4 { src, dst, .. } => sliced.to_header().calc_checksum_ipv4_raw(
                src.octets(),
                dst.octets(),
                sliced.payload(),
            ),
            IpFields::V6 { src, dst } => sliced.to_header().calc_checksum_ipv6_raw(
                src.octets(),
                dst.octets(),
                sliced.payload(),
            ),
        };
        let right = right.unwrap();
        // No checksum, the right one and a wrong one stay.
        let wrong = right ^ 0x0100;
        let copy = written(&pcap(Style::USUAL, 1, &[left, 0, right, wrong].map(with)), &[]);
        assert_eq!(frames(&copy), [right, 0, right, wrong].map(with), "{head:?}");
    }
}

#[test]
fn interfaces_and_times_are_kept() {
    let packets = [
        (0, 1_700_000_000_000_000, &good_frame(1, 64)[..]),
        (1, 1_700_000_000_000_000_123, &run(&ipv6(), |_| ipv6(), 3)),
    ];
    let file = pcapng_of(&[(1, None), (101, Some(9))], &packets);
    let copy = written(&file, &[]);
    let done = decode([copy.as_os_str(), "--json-packets".as_ref()]);
    assert_eq!((done.status, done.out.lines().count()), (0, 5), "{}{}", done.out, done.err);
    for (line, epoch) in done.out.lines().zip([
        "1700000000.000000000",
        "1700000000.000000123",
        "1700000000.000000123",
        "1700000000.000000123",
    ]) {
        assert!(line.contains(epoch), "{line}");
    }
}

#[test]
fn only_what_is_chosen_is_written_and_nothing_is_lost() {
    let frames = [good_frame(1, 64), ethernet(&run(&ipv4(0), ipv4, 4)), good_frame(9, 64)];
    let file = pcap(Style::USUAL, 1, &frames);
    let copy = written(&file, &["--psn", "2-9"]);
    let done = decode([copy.as_os_str(), "--json".as_ref()]);
    assert_eq!(done.json()["roce"], 3, "{}", done.err);
    // The file that is read is not overwritten.
    let source = temporary(&file);
    let link = temporary(b"");
    std::fs::remove_file(&link).unwrap();
    std::fs::hard_link(&source, &link).unwrap();
    for (from, to) in [(&*source, &*source), (&source, &link), (Path::new("-"), &source)] {
        let mut command = command();
        command.arg(from).arg("-w").arg(to).stdin(File::open(&source).unwrap());
        let done = super::done(command.output().unwrap());
        assert_eq!(done.status, 2);
        assert!(done.err.contains("it is the file that is read"), "{}", done.err);
        assert_eq!(std::fs::read(&source).unwrap(), file);
    }
    let done = decode([source.as_os_str(), "-w".as_ref(), "/no/such/file".as_ref()]);
    assert_eq!(done.status, 2);
    assert!(done.err.contains("/no/such/file cannot be written"), "{}", done.err);
}

#[test]
fn tshark_reads_it() {
    require!(need::program("tshark"));
    let copy = written(
        &pcap(Style::USUAL, 1, &[ethernet(&run(&ipv4(0), ipv4, 4)), good_frame(9, 64)]),
        &[],
    );
    let mut command = Command::new("tshark");
    command.args(["-n", "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE", "-r"]);
    command.arg(&copy).args(["-T", "fields", "-E", "separator=|"]);
    for field in ["infiniband.bth.psn", "ip.checksum.status", "ip.len", "_ws.malformed"] {
        command.args(["-e", field]);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let len = 20 + 8 + 28 + 100 + 4;
    let expected: Vec<String> = (0..4).map(|psn| format!("{psn}|1|{len}|")).collect();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..4], expected, "{}", String::from_utf8_lossy(&output.stderr));
    assert!(lines[4].starts_with("9|"), "{text}");
}
