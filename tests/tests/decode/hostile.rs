//! Captures are input from the network, too.

use std::io;

use proptest::prelude::*;
use rocinante_cli::decode::check::{Verdict, pieces};
use rocinante_cli::decode::file::read;
use rocinante_cli::decode::frame::{LinkType, roce_datagram};
use rocinante_cli::decode::line::Decoded;

use super::made::{Style, ethernet, good_frame, ip_packet, ipv4, ipv6, pcap, write_packet};
use super::temporary;

const LINKS: [u32; 11] = [0, 1, 12, 14, 101, 108, 113, 228, 229, 276, 147];

/// Decodes a frame as the command does; returns the number of right packets.
fn exercise(link: u32, frame: &[u8]) -> usize {
    let Ok(Some(datagram)) = roce_datagram(LinkType(link), frame) else { return 0 };
    assert!(datagram.captured.len() <= datagram.len);
    let mut right = 0;
    for piece in pieces(&datagram) {
        assert!(piece.captured.len() <= piece.len);
        let line = Decoded::new(piece).to_string();
        assert!(line.contains("icrc "), "{line}");
        right += usize::from(piece.verdict == Verdict::Ok);
    }
    right
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn arbitrary_frames(
        link in prop::sample::select(&LINKS[..]),
        frame in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        exercise(link, &frame);
    }

    #[test]
    fn frames_with_arbitrary_changes(
        v6 in any::<bool>(),
        payload in 0usize..100,
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let ip = if v6 { ipv6() } else { ipv4(9) };
        let mut frame = ethernet(&ip_packet(&ip, &write_packet(&ip, 77, payload)));
        prop_assert_eq!(exercise(1, &frame), 1);
        for (at, value) in changes {
            *at.get_mut(&mut frame) = value;
        }
        exercise(1, &frame);
        exercise(1, &frame[..cut.index(frame.len())]);
    }
}

/// Reads a file with any content as the command does.
fn read_all(bytes: &[u8]) {
    let file = temporary(bytes);
    let mut frames = 0;
    let end = read(&file, |frame| {
        frames += 1;
        assert_eq!(frame.number, frames);
        exercise(frame.link.0, frame.data);
        io::Result::Ok(())
    });
    if let Err(error) = end {
        assert!(!error.to_string().is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..config() })]

    #[test]
    fn arbitrary_files(
        magic in prop::sample::select(vec![
            [0x0a, 0x0d, 0x0d, 0x0a],
            [0xa1, 0xb2, 0xc3, 0xd4],
            [0x4d, 0x3c, 0xb2, 0xa1],
        ]),
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        read_all(&[&magic[..], &rest].concat());
    }

    #[test]
    fn files_with_arbitrary_changes(
        ng in any::<bool>(),
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..5),
    ) {
        let frames = [good_frame(1, 4), good_frame(2, 4)];
        let mut file = match ng {
            true => super::files::pcapng(Style::USUAL),
            false => pcap(Style::USUAL, 1, &frames),
        };
        for (at, value) in changes {
            *at.get_mut(&mut file) = value;
        }
        read_all(&file);
    }
}
