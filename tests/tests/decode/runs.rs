//! Super-packets: several packets in one frame, as captured where segmentation is offloaded.

use rocinante_stack::wire::IpFields;
use rocinante_stack::wire::icrc::Template;

use super::decode_bytes;
use super::made::{SRC_PORT, Style, ethernet, ip_packet, ipv4, ipv6, pcap, write_packet};

pub(crate) fn seal(ip: &IpFields, packet: &mut [u8]) {
    Template::new(ip, SRC_PORT).seal(packet);
}

/// The frame of a run, each packet sealed for the header that it will have.
fn run(head: &IpFields, of: impl Fn(u16) -> IpFields, payloads: &[usize]) -> Vec<u8> {
    let packets =
        payloads.iter().zip(0..).map(|(payload, i)| write_packet(&of(i), i.into(), *payload));
    ethernet(&ip_packet(head, &packets.collect::<Vec<_>>().concat()))
}

fn expect(frame: Vec<u8>, packets: usize, bad: usize) -> Vec<String> {
    let done = decode_bytes(&pcap(Style::USUAL, 1, &[vec![0; 60], frame]), &["--json"]);
    let json = done.json();
    assert_eq!(json["packets"], 2);
    assert_eq!(json["roce"], packets, "{}", done.err);
    assert_eq!(json["icrc_bad"], bad, "{}", done.err);
    assert_eq!(json["icrc_ok"], packets - bad, "{}", done.err);
    assert_eq!(done.status, i32::from(bad > 0));
    done.lines().into_iter().map(str::to_owned).collect()
}

#[test]
fn runs_are_taken_apart_at_every_size() {
    for payload in [0usize, 1, 64, 256, 1024, 4096] {
        let most = (65_507 / (32 + payload.next_multiple_of(4))).min(64);
        for count in [2, 3, most] {
            let payloads = vec![payload; count];
            // Increasing identifications, as segmentation makes them.
            expect(run(&ipv4(0), ipv4, &payloads), count, 0);
            expect(run(&ipv4(65_530), |i| ipv4(65_530u16.wrapping_add(i)), &payloads), count, 0);
            // Equal identifications, as some hardware makes them.
            expect(run(&ipv4(77), |_| ipv4(77), &payloads), count, 0);
            expect(run(&ipv6(), |_| ipv6(), &payloads), count, 0);
        }
    }
}

#[test]
fn the_last_of_a_run_may_be_shorter() {
    let lines = expect(run(&ipv4(5), |i| ipv4(5 + i), &[1024, 1024, 1024, 3]), 4, 0);
    let places: Vec<_> = lines.iter().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(places, ["2.1", "2.2", "2.3", "2.4"]);
    for (line, end) in lines.iter().zip(["len 1024", "len 1024", "len 1024", "len 3"]) {
        assert!(line.ends_with(&format!("{end} icrc ok")), "{line}");
    }
}

#[test]
fn one_wrong_packet_of_a_run_is_one_wrong_packet() {
    let mut frame = run(&ipv4(0), ipv4, &[256; 10]);
    let fourth = 14 + 20 + 8 + 3 * 288 + 100;
    frame[fourth] ^= 1;
    let lines = expect(frame, 10, 1);
    assert!(lines[3].contains("2.4") && lines[3].contains("icrc BAD"), "{}", lines[3]);
    // Without a right first packet, its end cannot be found.
    let mut frame = run(&ipv4(0), ipv4, &[256; 10]);
    frame[100] ^= 1;
    expect(frame, 1, 1);
}
