//! Input from the network is hostile: no bytes make the wire layer panic, and each change is
//! noticed.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use rocinante_stack::types::{Psn, Seq};
use rocinante_stack::wire::Solver;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Bth, ICRC_LEN, Opcode, Packet, bth};
use rocinante_tests::captures;
use rocinante_tests::fuzz::target;

fn config(cases: u32) -> ProptestConfig {
    // A failure prints its smallest input; a file beside the sources is not needed.
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Calls all accessors, and checks the invariants.
fn exercise(bytes: &[u8]) {
    (target("packet").run)(bytes);
}

fn flow(id: u16, flags: u16) -> Template {
    let (src, dst) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(10, 77, 0, 3));
    Template::new(&IpFields::V4 { src, dst, id, flags }, 0xc123)
}

proptest! {
    #![proptest_config(config(8000))]

    #[test]
    fn arbitrary_bytes_are_a_packet_or_an_error(
        index in prop::option::of(0..Opcode::all().count()),
        mut bytes in prop::collection::vec(any::<u8>(), 1..300),
    ) {
        // Behind a known opcode, or not.
        if let Some(index) = index {
            bytes[0] = Opcode::all().nth(index).expect("an opcode").opcode.0;
        }
        exercise(&bytes);
    }

    #[test]
    fn psn_expansion_finds_what_was_truncated(
        reference in (1u64 << 24)..(1 << 40),
        distance in -(1i64 << 23)..(1 << 23),
    ) {
        let expanded = Seq(reference.wrapping_add_signed(distance));
        prop_assert_eq!(Psn::truncate(expanded).expand(Seq(reference)), expanded);
    }
}

#[test]
fn every_truncation_of_every_captured_packet() {
    for captured in captures::all() {
        let header_len = Packet::parse(&captured.bytes).unwrap().info.header_len;
        for len in 0..captured.bytes.len() {
            let cut = &captured.bytes[..len];
            exercise(cut);
            assert_eq!(Packet::parse(cut).is_err(), too_short(cut, header_len));
        }
    }
}

fn too_short(bytes: &[u8], header_len: usize) -> bool {
    let pad = bytes.get(1).map_or(0, |flags| usize::from(flags >> 4 & 3));
    bytes.len() < header_len + pad + ICRC_LEN
}

/// Flips each bit of some captured packets. They parse or not, and the ICRC notices each flip
/// except in the masked byte.
#[test]
fn every_flipped_bit_is_noticed() {
    // The sample includes all kinds of files and all lengths, but not the packet with the wrong
    // ICRC.
    let sample = captures::all().into_iter().step_by(37);
    for captured in sample {
        let template = captured.template();
        let mut bytes = captured.bytes.clone();
        assert_eq!(template.of(&bytes), captured.found_icrc());
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            exercise(&bytes);
            let found = u32::from_le_bytes(*bytes.last_chunk().unwrap());
            let right = template.of(&bytes) == found;
            assert_eq!(right, bit / 8 == 4, "{} #{}, bit {bit}", captured.file, captured.number);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// Whether a receiver accepts these as the identification of a segmented run.
fn plausible((id, flags): (u16, u16)) -> bool {
    id < 128 && (flags == DF || flags == 0)
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn the_solver_finds_the_identification(
        mut packet in prop::collection::vec(any::<u8>(), 16..4200),
        (id, flags, hint) in any::<(u16, u16, u16)>(),
    ) {
        flow(id, flags).seal(&mut packet);
        let found = u32::from_le_bytes(*packet.last_chunk().unwrap());
        let guess = flow(hint, DF);
        let solved = Solver::default().solve(&guess, packet.len(), guess.of(&packet), found);
        prop_assert_eq!(solved, Some((id, flags)));
    }

    #[test]
    fn the_solver_never_panics(
        calls in prop::collection::vec(any::<(usize, u32, u32, bool)>(), 1..20),
    ) {
        let v6 = IpFields::V6 { src: Ipv6Addr::LOCALHOST, dst: Ipv6Addr::UNSPECIFIED };
        let v6 = Template::new(&v6, 1);
        let mut solver = Solver::default();
        for (len, computed, found, wide) in calls {
            let len = if wide { len } else { len % 70_000 };
            let solved = solver.solve(&flow(1, DF), len, computed, found);
            prop_assert_eq!(solved.is_some(), (ICRC_LEN..65_536).contains(&len));
            prop_assert_eq!(solver.solve(&v6, len, computed, found), None);
        }
    }
}

/// The effect of a single wrong bit depends only on its distance behind the identification, so the
/// longest packet covers all shorter ones. All 33,000 places are tried.
#[test]
fn no_single_wrong_bit_passes_for_another_identification() {
    let mut packet = vec![0x5a; 4136];
    packet[..bth::LEN].copy_from_slice(&Bth::read(&[4; bth::LEN]).bytes());
    let (truth, guess) = (flow(9, DF), flow(0, DF));
    truth.seal(&mut packet);
    let mut solver = Solver::default();
    for bit in 0..packet.len() * 8 {
        if bit / 8 == 4 {
            continue;
        }
        packet[bit / 8] ^= 1 << (bit % 8);
        let found = u32::from_le_bytes(*packet.last_chunk().unwrap());
        let solved = solver.solve(&guess, packet.len(), guess.of(&packet), found).unwrap();
        assert!(!plausible(solved), "bit {bit} looks like {solved:?}");
        packet[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Any other damage is accepted with the probability of chance: 256 of 2^32 solutions are
/// plausible.
#[test]
fn damage_passes_for_an_identification_as_rarely_as_chance_has_it() {
    const TRIALS: u32 = 200_000;
    let mut random = fastrand::Rng::with_seed(0);
    let mut next = || random.u64(..);
    let (truth, guess) = (flow(3, DF), flow(0, DF));
    let mut solver = Solver::default();
    let (mut low_id, mut known_flags, mut accepted) = (0, 0, 0);
    let mut packet = vec![0x33; 312];
    truth.seal(&mut packet);
    for _ in 0..TRIALS {
        let mut damaged = packet.clone();
        for _ in 0..2 + next() % 6 {
            let at = 5 + (next() % (damaged.len() as u64 - 5)) as usize;
            damaged[at] ^= (next() % 255 + 1) as u8;
        }
        let found = u32::from_le_bytes(*damaged.last_chunk().unwrap());
        let (id, flags) = solver.solve(&guess, damaged.len(), guess.of(&damaged), found).unwrap();
        low_id += u32::from(id < 128);
        known_flags += u32::from(flags == DF || flags == 0);
        accepted += u32::from(plausible((id, flags)) && damaged != packet);
    }
    // 390.6 and 6.1 are expected.
    assert!((290..490).contains(&low_id), "{low_id} of {TRIALS} look like a segment's number");
    assert!(known_flags < 25, "{known_flags} of {TRIALS} have flags that occur");
    assert_eq!(accepted, 0);
}
