//! File formats: all flavours of pcap and pcapng, damaged files, and files of other formats.

use std::process::Stdio;

use super::made::{
    Style, block, enhanced, ethernet, good_frame, interface, ip_packet, ipv6, obsolete, pcap,
    pcap_header, pcap_record, pcapng_of, section, simple, write_packet,
};
use super::{Done, command, decode, decode_bytes, temporary};

const STYLES: [Style; 4] = [
    Style { big_endian: false, nanoseconds: false },
    Style { big_endian: true, nanoseconds: false },
    Style { big_endian: false, nanoseconds: true },
    Style { big_endian: true, nanoseconds: true },
];

fn times(done: &Done) -> Vec<String> {
    let second = |line: &&str| line.split_whitespace().nth(1).unwrap().to_owned();
    done.lines().iter().map(second).collect()
}

#[test]
fn pcap_in_either_byte_order_and_resolution() {
    for style in STYLES {
        let mut file = pcap_header(style, 1);
        for (ms, psn) in [(0, 1), (1, 2), (2500, 3)] {
            let frame = good_frame(psn, 64);
            file.extend(pcap_record(style, ms, &frame, frame.len()));
        }
        let done = decode_bytes(&file, &[]);
        assert_eq!(done.status, 0, "{style:?}: {}", done.err);
        assert_eq!(times(&done), ["0.000000", "0.001000", "2.500000"], "{style:?}");
    }
}

/// Three kinds of packet blocks, two interfaces, and blocks that the decoder must skip.
pub(crate) fn pcapng(style: Style) -> Vec<u8> {
    let v6 = ip_packet(&ipv6(), &write_packet(&ipv6(), 4, 32));
    let us = 1_700_000_000_000_000;
    [
        section(style),
        interface(style, 1, 0, None),
        interface(style, 101, 0, Some(9)),
        interface(style, 1, 0, Some(0x80 | 10)),
        enhanced(style, 0, us, &good_frame(1, 61)),
        block(style, 5, &[0; 12]),
        enhanced(style, 1, us * 1000 + 250_000, &v6),
        block(style, 0xbad, b"who knows"),
        obsolete(style, 0, us - 1, &good_frame(2, 1)),
        enhanced(style, 2, 1_700_000_001 << 10, &ethernet(&v6)),
        simple(style, 14 + 20 + 8 + 32 + 64, &good_frame(3, 64)),
    ]
    .concat()
}

#[test]
fn pcapng_with_every_kind_of_packet_block() {
    for style in [STYLES[0], STYLES[1]] {
        let done = decode_bytes(&pcapng(style), &[]);
        assert_eq!(done.status, 0, "{style:?}: {}{}", done.out, done.err);
        assert_eq!(
            times(&done),
            ["0.000000", "0.000250", "-0.000001", "1.000000", "-.------"],
            "{style:?}"
        );
        assert_eq!(done.lines().iter().filter(|line| line.ends_with("icrc ok")).count(), 5);
    }
}

#[test]
fn a_second_section_may_have_another_byte_order() {
    let done = decode_bytes(&[pcapng(STYLES[1]), pcapng(STYLES[0])].concat(), &["--json", "-q"]);
    assert_eq!(done.status, 0, "{}", done.err);
    assert_eq!(done.json()["icrc_ok"], 10);
}

#[test]
fn simple_blocks_are_cut_by_the_interface() {
    let frame = good_frame(3, 64);
    let file = [
        section(Style::USUAL),
        interface(Style::USUAL, 1, 90, None),
        simple(Style::USUAL, frame.len(), &frame[..90]),
    ]
    .concat();
    let done = decode_bytes(&file, &[]);
    assert!(done.lines()[0].contains("len 64 icrc unknown (cut off"), "{}", done.out);
}

#[test]
fn interfaces_of_other_kinds_are_counted() {
    let other = [0; 80];
    let packets = [(0, 0, &good_frame(1, 64)[..]), (1, 0, &other), (1, 0, &other)];
    let file = pcapng_of(&[(1, None), (127, None)], &packets);
    let done = decode_bytes(&file, &[]);
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.out.contains("2  not read: link type 127"), "{}", done.out);
}

#[test]
fn a_file_that_is_cut_off_is_read_as_far_as_it_goes() {
    let frames = [good_frame(1, 16), good_frame(2, 16), good_frame(3, 16)];
    for (whole, starts) in [
        (pcap(Style::USUAL, 1, &frames), boundaries(24, 16 + frames[0].len())),
        (of_frames(&frames), boundaries(28 + 20, of_frames(&frames[..1]).len() - 48)),
    ] {
        assert_eq!(starts[3], whole.len());
        // Each third length only: each needs a process.
        for len in (1..=whole.len()).step_by(3).chain(starts) {
            let done = decode_bytes(&whole[..len], &["--json"]);
            let read = starts.iter().filter(|start| **start <= len).count().saturating_sub(1);
            assert_eq!(done.json()["icrc_ok"], read, "{len} of {} bytes", whole.len());
            // A pcapng file is whole at the end of any block.
            let whole = starts.contains(&len) || (whole[0] == 0x0a && len == 28);
            assert_eq!(done.status, if whole { 0 } else { 2 }, "{len} bytes: {}", done.err);
            if !whole {
                let told = ["is cut off or damaged after packet", "is neither pcap nor pcapng"];
                assert!(told.iter().any(|text| done.err.contains(text)), "{}", done.err);
                assert!(done.json()["error"]["message"].is_string());
            }
        }
    }
}

fn boundaries(first: usize, step: usize) -> [usize; 4] {
    [0, 1, 2, 3].map(|records| first + records * step)
}

fn of_frames(frames: &[Vec<u8>]) -> Vec<u8> {
    pcapng_of(&[(1, None)], &frames.iter().map(|frame| (0, 0, &frame[..])).collect::<Vec<_>>())
}

#[test]
fn damage_is_told_with_its_place() {
    let frame = good_frame(1, 16);
    let style = Style::USUAL;
    let no_interface =
        [of_frames(std::slice::from_ref(&frame)), enhanced(style, 7, 0, &frame)].concat();
    let mut long = enhanced(style, 0, 0, &frame);
    long[20..24].copy_from_slice(&1000u32.to_le_bytes());
    let lying = [of_frames(std::slice::from_ref(&frame)), long].concat();
    let mut trailer = of_frames(&[frame.clone(), frame.clone()]);
    let last = trailer.len() - 4;
    trailer[last] ^= 4;
    let huge = [
        pcap(style, 1, std::slice::from_ref(&frame)),
        [0u32, 0, 0xffff_fff0, 0xffff_fff0].iter().flat_map(|field| field.to_le_bytes()).collect(),
        vec![0; 1000],
    ]
    .concat();
    for (file, what) in [
        (no_interface, "after packet 1: it names interface 7, which the file lacks"),
        (lying, "after packet 1: a packet block is shorter than it says"),
        (trailer, "after packet 1: "),
        (huge, "after packet 1: it ends in the middle of a record"),
    ] {
        let done = decode_bytes(&file, &[]);
        assert_eq!(done.status, 2);
        assert_eq!(done.lines().len(), 1, "{}", done.out);
        assert!(done.err.contains(what), "{}", done.err);
        assert!(done.out.contains("1 packets, 1 of them RoCEv2") || done.out.contains("2 packets"));
    }
}

#[test]
fn what_is_no_capture_is_refused_with_advice() {
    for (bytes, advice) in [
        (
            &b"#!/bin/sh\n"[..],
            "is neither pcap nor pcapng (it begins with 23 21 2f 62); captures are made",
        ),
        (&[0x1f, 0x8b, 8, 0, 0], "gunzip it first"),
        (&[0x28, 0xb5, 0x2f, 0xfd, 0], "unzstd it first"),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], "unxz it first"),
        (&[0x34, 0xcd, 0xb2, 0xa1, 2, 0], "editcap -F pcapng"),
        (&[0xd4, 0xc3], "is neither pcap nor pcapng"),
        (&[], "is empty"),
    ] {
        let file = temporary(bytes);
        let done = decode([file.as_os_str()]);
        assert_eq!((done.status, done.out.as_str()), (2, ""));
        assert!(done.err.contains(advice), "{}", done.err);
        assert!(done.err.contains(file.to_str().unwrap()), "{}", done.err);
    }
    let done = decode(["/no/such/file"]);
    assert_eq!(done.status, 2);
    assert!(done.err.contains("/no/such/file cannot be read: No such file"), "{}", done.err);
    let done = decode(["/"]);
    assert_eq!(done.status, 2);
    assert!(done.err.contains("/ cannot be read: Is a directory"), "{}", done.err);
    assert_eq!(decode([""; 0]).status, 2);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let frames: Vec<_> = (0..5000).map(|psn| good_frame(psn, 0)).collect();
    let file = temporary(&pcap(Style::USUAL, 1, &frames));
    let mut command = command();
    command.arg(&file).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
