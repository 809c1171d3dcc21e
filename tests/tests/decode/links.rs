//! Each link type, and each obstacle to checking an ICRC.

use super::decode_bytes;
use super::made::{
    Style, ethernet, ethertype, good_frame, ip_packet, ip_packet_to, ipv4, ipv6, pcap, pcap_header,
    pcap_record, write_packet,
};

/// An IP packet of each version, with a right ICRC.
fn packets() -> [Vec<u8>; 2] {
    [ipv4(7), ipv6()].map(|ip| ip_packet(&ip, &write_packet(&ip, 1, 61)))
}

fn with_header(header: &[u8], packet: &[u8]) -> Vec<u8> {
    [header, packet].concat()
}

/// Decodes two frames, one of IPv4 and one of IPv6, and expects both to be right.
fn expect_both_right(what: &str, link: u32, frame: impl Fn(&[u8]) -> Vec<u8>) {
    let frames = packets().map(|packet| frame(&packet));
    let done = decode_bytes(&pcap(Style::USUAL, link, &frames), &[]);
    let lines = done.lines();
    assert_eq!(lines.len(), 2, "{what}: {}{}", done.out, done.err);
    for (line, addresses) in lines.iter().zip(["10.77.0.2 → 10.77.0.3", "fd77::2 → fd77::3"]) {
        let expected = format!(
            "{addresses} RC_RDMA_WRITE_ONLY qp 0x000012 psn 0x000001 [A] pad 3 \
             reth(va 0xabc00000 rkey 0x00000077 len 61) len 61 icrc ok"
        );
        assert!(line.ends_with(&expected), "{what}: {line}");
    }
    assert_eq!(done.status, 0, "{what}");
}

#[test]
fn ethernet_with_and_without_tags() {
    expect_both_right("Ethernet", 1, ethernet);
    // The bits above the link type give the length of the frame check sequence; here there is one.
    expect_both_right("Ethernet with FCS", 1 | 0x2400_0000, |packet| {
        [ethernet(packet), vec![0xde, 0xad, 0xbe, 0xef]].concat()
    });
    let macs = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let tags: [&[u8]; 3] = [
        &[0x81, 0x00, 0x00, 0x05],
        &[0x88, 0xa8, 0x00, 0x06, 0x81, 0x00, 0xe0, 0x05],
        &[0x88, 0xa8, 0x00, 0x06, 0x88, 0xa8, 0x00, 0x07, 0x81, 0x00, 0x00, 0x05],
    ];
    for tags in tags {
        expect_both_right(&format!("tags {tags:02x?}"), 1, |packet| {
            [&macs[..], tags, &ethertype(packet), packet].concat()
        });
    }
}

#[test]
fn linux_cooked() {
    expect_both_right("cooked v1", 113, |packet| {
        let mut header = vec![0, 0, 0, 1, 0, 6, 2, 0, 0, 0, 0, 2, 0, 0];
        header.extend(ethertype(packet));
        with_header(&header, packet)
    });
    expect_both_right("cooked v1 with a tag", 113, |packet| {
        let mut header = vec![0, 4, 0, 1, 0, 6, 2, 0, 0, 0, 0, 2, 0, 0, 0x81, 0x00, 0x00, 0x05];
        header.extend(ethertype(packet));
        with_header(&header, packet)
    });
    expect_both_right("cooked v2", 276, |packet| {
        let mut header = ethertype(packet).to_vec();
        header.extend([0, 0, 0, 0, 0, 3, 0, 1, 0, 6, 2, 0, 0, 0, 0, 2, 0, 0]);
        with_header(&header, packet)
    });
}

#[test]
fn raw_ip_and_loopback() {
    for link in [101, 12, 14] {
        expect_both_right("raw", link, <[u8]>::to_vec);
    }
    let [v4, v6] = packets();
    for (link, packet) in [(228, v4), (229, v6)] {
        let done = decode_bytes(&pcap(Style::USUAL, link, &[packet]), &[]);
        assert_eq!((done.lines().len(), done.status), (1, 0), "{}", done.out);
    }
    expect_both_right("null", 0, |packet| with_header(&[2, 0, 0, 0], packet));
    expect_both_right("loop", 108, |packet| with_header(&[0, 0, 0, 30], packet));
}

#[test]
fn a_link_type_that_is_not_read_is_an_error() {
    let done = decode_bytes(&pcap(Style::USUAL, 127, &[vec![0; 100]]), &["--json"]);
    assert_eq!(done.status, 2);
    assert!(done.err.contains("link type 127 is not supported"), "{}", done.err);
    assert!(done.err.contains("tcpdump -i any"), "{}", done.err);
    assert_eq!(done.json()["packets"], 1);
    assert_eq!(done.json()["roce"], 0);
}

#[test]
fn other_traffic_is_counted_and_not_shown() {
    let ip = ipv4(1);
    let mut tcp = ethernet(&ip_packet(&ip, &[0; 40]));
    tcp[23] = 6;
    let arp = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x08, 0x06], &[0; 46]].concat();
    let frames = [
        ethernet(&ip_packet_to(&ip, 53, &[0; 40])),
        tcp,
        arp,
        vec![],
        vec![1, 2, 3],
        good_frame(1, 64),
    ];
    let done = decode_bytes(&pcap(Style::USUAL, 1, &frames), &["--json"]);
    assert_eq!((done.status, done.lines().len()), (0, 1));
    assert_eq!(done.json()["packets"], 6);
    assert_eq!(done.json()["roce"], 1);
}

/// Decodes one frame; returns its only line and the exit status.
fn only_line(frame: &[u8], len: usize) -> (String, i32) {
    let file = [pcap_header(Style::USUAL, 1), pcap_record(Style::USUAL, 0, frame, len)].concat();
    let done = decode_bytes(&file, &["--json"]);
    let json = done.json();
    let lines = done.lines();
    assert_eq!(json["roce"], lines.len(), "{json}");
    if let [line] = lines[..] {
        let verdict =
            ["icrc_ok", "icrc_bad", "icrc_unknown"].map(|key| json[key].as_u64().unwrap());
        let told =
            ["icrc ok", "icrc BAD", "icrc unknown"].map(|text| u64::from(line.contains(text)));
        assert_eq!(verdict, told, "{line}");
    }
    (lines.join("\n"), done.status)
}

#[test]
fn an_icrc_that_cannot_be_computed_is_unknown_and_no_failure() {
    let ip = ipv4(3);
    let packet = write_packet(&ip, 9, 64);
    let good = ip_packet(&ip, &packet);
    let ends = |packet: &[u8], end: &str| {
        let frame = ethernet(packet);
        let (line, status) = only_line(&frame, frame.len());
        assert!(line.ends_with(end), "{line}");
        assert_eq!(status, 0);
    };
    ends(&good, "len 64 icrc ok");

    let mut first_fragment = good.clone();
    first_fragment[6] = 0x20;
    ends(&first_fragment, "icrc unknown (IP fragment)");
    // The first fragment alone: shorter than its UDP header says. Its extension header is decoded.
    first_fragment.truncate(20 + 8 + 40);
    first_fragment[2..4].copy_from_slice(&68u16.to_be_bytes());
    ends(
        &first_fragment,
        "reth(va 0xabc00000 rkey 0x00000077 len 64) len 64 icrc unknown (IP fragment)",
    );

    let mut options = good.clone();
    options[0] = 0x46;
    options.splice(20..20, [1, 1, 1, 1]);
    let total = (options.len() as u16).to_be_bytes();
    options[2..4].copy_from_slice(&total);
    ends(&options, "len 64 icrc unknown (IP options)");

    let mut longer = good.clone();
    longer.extend([0; 8]);
    let total = (longer.len() as u16).to_be_bytes();
    longer[2..4].copy_from_slice(&total);
    ends(&longer, "len 64 icrc unknown (IP and UDP lengths differ)");

    let ip = ipv6();
    let mut hop_by_hop = ip_packet(&ip, &write_packet(&ip, 9, 64));
    hop_by_hop[6] = 0;
    hop_by_hop.splice(40..40, [17, 0, 1, 4, 0, 0, 0, 0]);
    let len = (hop_by_hop.len() as u16 - 40).to_be_bytes();
    hop_by_hop[4..6].copy_from_slice(&len);
    ends(&hop_by_hop, "len 64 icrc unknown (IP extension headers)");

    let mut fragment6 = ip_packet(&ip, &write_packet(&ip, 9, 64));
    fragment6[6] = 44;
    fragment6.splice(40..40, [17, 0, 0, 1, 1, 2, 3, 4]);
    let len = (fragment6.len() as u16 - 40).to_be_bytes();
    fragment6[4..6].copy_from_slice(&len);
    ends(&fragment6, "len 64 icrc unknown (IP fragment)");

    // Later fragments have no UDP header, so they are not recognised.
    let mut later = good;
    later[6..8].copy_from_slice(&0x0010u16.to_be_bytes());
    assert_eq!(only_line(&ethernet(&later), 200).0, "");
    fragment6[42] = 0x01;
    assert_eq!(only_line(&ethernet(&fragment6), 200).0, "");
}

#[test]
fn what_the_snapshot_length_cut_off_is_unknown() {
    let frame = good_frame(5, 300);
    for kept in 0..frame.len() {
        let (line, status) = only_line(&frame[..kept], frame.len());
        assert_eq!(status, 0);
        let start = 14 + 20 + 8;
        match kept {
            ..42 => assert_eq!(line, ""),
            42..54 => assert!(line.contains(" NO_BTH bytes 332 icrc unknown (cut off"), "{line}"),
            _ => {
                assert!(line.contains("RC_RDMA_WRITE_ONLY qp 0x000012 psn 0x000005"), "{line}");
                assert_eq!(line.contains("reth("), kept >= start + 28, "{line}");
                assert!(line.contains("len 300 icrc unknown (cut off"), "{line}");
            }
        }
    }
}

#[test]
fn what_is_no_packet_is_said_to_be_none() {
    let ip = ipv4(3);
    for len in 0..16 {
        let frame = ethernet(&ip_packet(&ip, &vec![0x04; len]));
        let (line, status) = only_line(&frame, frame.len());
        let opcode = if len < 12 { "NO_BTH" } else { "RC_SEND_ONLY" };
        assert!(line.contains(&format!(" {opcode} ")), "{line}");
        let end = format!("bytes {len} (shorter than its headers) icrc unknown (too short)");
        assert!(line.ends_with(&end), "{line}");
        assert_eq!(status, 0);
    }
    // An XRC packet: the opcode table lacks it, but its ICRC is like any other.
    let mut packet = write_packet(&ip, 1, 32);
    packet[0] = 0xaa;
    super::runs::seal(&ip, &mut packet);
    let frame = ethernet(&ip_packet(&ip, &packet));
    let (line, status) = only_line(&frame, frame.len());
    let expected = "unknown opcode 0xaa qp 0x000012 psn 0x000001 [A] bytes 64 icrc ok";
    assert!(line.ends_with(expected), "{line}");
    assert_eq!(status, 0);
    let done = decode_bytes(&pcap(Style::USUAL, 1, &[frame]), &["--json"]);
    assert_eq!(done.json()["by_opcode"]["0xaa"], 1);
    // More padding than payload.
    let mut packet = write_packet(&ip, 1, 0);
    packet[1] |= 0x30;
    super::runs::seal(&ip, &mut packet);
    let frame = ethernet(&ip_packet(&ip, &packet));
    let (line, _) = only_line(&frame, frame.len());
    assert!(line.ends_with("bytes 32 (more padding than payload) icrc ok"), "{line}");
}
