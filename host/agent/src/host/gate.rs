//! The program at the tcx ingress of a host's end by which each frame of a container passes, behind
//! those that judge it: it sends the frame to an ifb, or drops it if it is beyond a rate.

use std::io;

use rocinante_netdev::for_agent::bpf::asm::{Asm, Cond, Helper, Insn, Reg, Size};
use rocinante_netdev::for_agent::bpf::{Described, Map, Program, TCX_DROP, TCX_NEXT};

use crate::rate::Rate;

/// Names of the program and its maps, by which an agent knows its own.
const PROGRAM: &str = "roce_rate";
/// The number of the ifb.
const IFB: &str = "roce_ifb";
/// The virtual time of the policer: when the frames that passed are paid for at their rate.
const WORTH: &str = "roce_worth";
const DROPPED: &str = "roce_beyond";

/// Bits of a time behind the nanosecond.
const FRACTION: i32 = 10;
/// Bits of such a time that is 17 s: a difference of more is none ahead of the clock.
const AHEAD_BITS: i32 = 44;

/// The program of one host's end.
#[derive(Debug)]
pub(super) struct Gate {
    program: Program,
    described: Described,
}

impl Gate {
    /// Has each frame sent to the ifb with this index. Error: those of
    /// [`SourceFilter::attach`](super::SourceFilter::attach).
    pub(super) fn redirecting(end: u32, ifb: u32) -> io::Result<()> {
        let map = Map::numbers(IFB, 1)?;
        map.set(&[0; 4], ifb)?;
        let fresh = Program::load_classifier(PROGRAM, &redirection(&map))?;
        match Self::put(end, &fresh)?.and_then(|old| old.map(IFB)) {
            Some(map) => map.set(&[0; 4], ifb),
            None => Ok(()),
        }
    }

    /// Has frames dropped that are beyond the rate by more than the burst, in bytes. Error: as
    /// [`redirecting`](Self::redirecting).
    pub(super) fn policing(end: u32, rate: Rate, burst: u64) -> io::Result<()> {
        let (worth, dropped) = (Map::counters(WORTH, 1)?, Map::counters(DROPPED, 1)?);
        let code = policer(&worth, &dropped, rate, burst);
        Self::put(end, &Program::load_classifier(PROGRAM, &code)?).map(drop)
    }

    /// Puts a program there, unless one of the same instructions is there already: that is
    /// returned.
    fn put(end: u32, fresh: &Program) -> io::Result<Option<Self>> {
        match Self::find(end)? {
            Some(old) if old.described.tag == fresh.described()?.tag => Ok(Some(old)),
            old => {
                fresh.attach_last(end, old.as_ref().map(|old| &old.program))?;
                Ok(None)
            }
        }
    }

    /// The program of ours at a host's end; none where the kernel has no tcx, or of a link that has
    /// gone. Error: the error of bpf(2).
    pub(super) fn find(end: u32) -> io::Result<Option<Self>> {
        let all = described(Program::at_ingress(end))?.into_iter();
        let mut ours = all.filter(|(_, described)| Self::is_one(described));
        Ok(ours.next().map(|(program, described)| Self { program, described }))
    }

    /// Whether a program is one of ours.
    pub(super) fn is_one(described: &Described) -> bool {
        let is_ours = |(name, _): &(String, Map)| name == IFB || name == WORTH;
        described.name == PROGRAM && described.maps.iter().any(is_ours)
    }

    /// Takes it off, if it is there. Error: the error of bpf(2).
    pub(super) fn remove(end: u32) -> io::Result<()> {
        let Some(gate) = Self::find(end)? else { return Ok(()) };
        or_gone(gate.program.detach(end))
    }

    /// The frames that it dropped, if it drops. Error: the error of bpf(2).
    pub(super) fn policed(self) -> io::Result<Option<u64>> {
        self.map(DROPPED).map(|map| map.count(0)).transpose()
    }

    fn map(self, name: &str) -> Option<Map> {
        self.described.maps.into_iter().find(|(of, _)| of == name).map(|(_, map)| map)
    }
}

/// These programs with their descriptions; none where the kernel has no tcx, or of a link that has
/// gone.
pub(super) fn described(
    programs: io::Result<Vec<Program>>,
) -> io::Result<Vec<(Program, Described)>> {
    let programs = match programs {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ENODEV)) => {
            Vec::new()
        }
        programs => programs?,
    };
    let describe = |program: Program| program.described().map(|it| (program, it));
    programs.into_iter().map(describe).collect()
}

/// Without the error that there is none to take away, or that its link has gone.
pub(super) fn or_gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
        removed => removed,
    }
}

/// Sends each frame to the link whose number is in the map.
fn redirection(ifb: &Map) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R10};
    const KEY: i16 = -4;
    let mut asm = Asm::default();
    let none = asm.label();
    asm.store_imm(Size::W, R10, KEY, 0);
    asm.load_map(R1, ifb.raw_fd());
    asm.mov(R2, R10);
    asm.add_imm(R2, KEY.into());
    asm.call(Helper::MapLookupElem);
    asm.jump_if_imm(Cond::Eq, R0, 0, none);
    asm.load(Size::W, R1, R0, 0);
    asm.mov_imm(R2, 0);
    asm.call(Helper::Redirect);
    asm.exit();
    asm.bind(none);
    asm.mov_imm(R0, TCX_DROP);
    asm.exit();
    asm.assemble()
}

/// Drops frames beyond a rate. The map has the time at which the frames that passed so far are
/// worth the rate: a frame that would have it be more than a burst ahead of the clock is dropped.
/// Each processor adds to it atomically, so that what passes on several at once is counted.
fn policer(worth: &Map, dropped: &Map, rate: Rate, burst: u64) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R3, R4, R6, R7, R8, R9};
    /// Offset of `len` in `struct __sk_buff`.
    const CTX_LEN: i16 = 0;
    let bytes = rate.bytes();
    let number = |it: u64| i32::try_from(it).unwrap_or(i32::MAX);
    // The least rate has a byte of 8 ms: that is in 31 bits.
    let of_a_byte = number((1_000_000_000_u64 << FRACTION).div_ceil(bytes));
    let ahead_us = number(burst * 1_000_000 / bytes);
    let mut asm = Asm::default();
    let [is_ahead, drops] = [(); 2].map(|()| asm.label());
    asm.load(Size::W, R7, R1, CTX_LEN);
    asm.multiply_imm(R7, of_a_byte);
    asm.call(Helper::KtimeGetNs);
    asm.mov(R8, R0);
    asm.shift_left_imm(R8, FRACTION);
    asm.load_map_value(R9, worth.raw_fd());
    // How far it is ahead of the clock. Behind, a burst may pass from now on.
    asm.load(Size::Dw, R2, R9, 0);
    asm.mov(R6, R8);
    asm.multiply_imm(R6, -1);
    asm.add(R2, R6);
    asm.mov(R3, R2);
    asm.shift_right_imm(R3, AHEAD_BITS);
    asm.jump_if_imm(Cond::Eq, R3, 0, is_ahead);
    asm.store(Size::Dw, R9, 0, R8);
    asm.mov_imm(R2, 0);
    asm.bind(is_ahead);
    asm.add(R2, R7);
    asm.mov_imm(R4, ahead_us);
    asm.multiply_imm(R4, 1000 << FRACTION);
    asm.jump_if(Cond::Gt, R2, R4, drops);
    asm.atomic_add(R9, 0, R7);
    asm.mov_imm(R0, TCX_NEXT);
    asm.exit();
    asm.bind(drops);
    asm.load_map_value(R9, dropped.raw_fd());
    asm.mov_imm(R1, 1);
    asm.atomic_add(R9, 0, R1);
    asm.mov_imm(R0, TCX_DROP);
    asm.exit();
    asm.assemble()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock of the kernel decides: at the least rate a burst takes a second.
    #[test]
    fn a_burst_passes_and_no_more() {
        let rate: Rate = "1mbit".parse().expect("a rate");
        let maps = [WORTH, DROPPED].map(|name| Map::counters(name, 1));
        let [Ok(worth), Ok(dropped)] = maps else {
            return eprintln!("SKIPPED gate::a_burst_passes_and_no_more: bpf(2) is not permitted");
        };
        let code = policer(&worth, &dropped, rate, 128 << 10);
        let program = Program::load_classifier(PROGRAM, &code).expect("it is verified");
        let frame = vec![0; 1024];
        let verdicts: Vec<u32> =
            (0..1000).map(|_| program.test_run(&frame).expect("it runs")).collect();
        let passed = verdicts.iter().filter(|it| **it == TCX_NEXT.cast_unsigned()).count();
        // As much as the time that all took is worth passes beside the burst.
        assert!((128..900).contains(&passed), "{passed}");
        assert!(verdicts[..128].iter().all(|it| *it == TCX_NEXT.cast_unsigned()), "the burst");
        assert_eq!(dropped.count(0).expect("a counter"), 1000 - passed as u64);
    }
}
