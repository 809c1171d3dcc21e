//! The beginning of each datagram alone, taken by an eBPF program in the place of a filter.
//!
//! The program runs where a filter does, on the processor that sends. It copies the wanted bytes of
//! each datagram of a super-packet into a ring, and has the socket take nothing. A packet socket's
//! own ring has a super-packet whole, or its first bytes alone.
//!
//! A record has the time (CLOCK_MONOTONIC, in nanoseconds), the length of the frame, that of the
//! payload of each datagram but the last (0: it is alone), and the bytes: those of the first
//! datagram from the Ethernet header on, and then the payload's of each other one, at equal
//! distances.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::time::Duration;

use libc::sock_filter;
use rustix::time::{ClockId, clock_gettime};

use super::records::Records;
use super::{Captured, Run};
use crate::frames::packet::filter::{
    AND, JEQ, JSET, JUMP, LD_BYTE, LD_HALF, LD_WORD, NOTHING, RET,
};
use crate::frames::packet::sys::PacketSocket;
use crate::kernel::bpf::asm::{Asm, Cond, Helper, Insn, Label, Reg, Size};
use crate::kernel::bpf::{Map, Program};
use crate::tuning::packet::CAPTURE_BYTES;

/// The most bytes of a datagram: more cost as much as the whole.
pub(super) const SNAP_MAX: u32 = 256;
/// The fewest: no less than the headers.
const SNAP_MIN: u32 = HEADERS_MAX;

/// Datagrams for which a record has room. The kernel makes no super-packet of more
/// (`UDP_MAX_SEGMENTS`), and later ones take none from packet sockets. One of more counts as lost.
const COUNTS: [i32; 5] = [1, 4, 16, 64, 128];
/// Bytes before the frame's.
const HEADER: i32 = 16;
/// Lengths of Ethernet, IP and UDP headers.
const V4: i32 = 14 + 20 + 8;
const V6: i32 = 14 + 40 + 8;
pub(super) const HEADERS_MAX: u32 = V6 as u32;
const ETHER_V6: u16 = 0x86dd;

/// Offsets of `len` and `gso_size` in `struct __sk_buff` of `linux/bpf.h`.
const SKB_LEN: i16 = 0;
const SKB_GSO_SIZE: i16 = 176;
/// Where the program keeps the record: below the frame pointer.
const RECORD: i16 = -8;

/// The beginnings of datagrams.
pub(super) struct Heads {
    records: Records,
    map: Map,
    lost: Map,
    snap: usize,
    /// The time of the clock of records at its 0, since 1970.
    clock: Duration,
}

impl Heads {
    /// Has the socket's program take the first `snap` bytes of what the classic program `wanted`
    /// takes. Error: more bytes are wanted than pay; `EPERM` without `CAP_BPF` over the machine;
    /// the kernel has no such programs, maps or memory.
    pub(super) fn of(socket: &PacketSocket, wanted: &[sock_filter], snap: u32) -> io::Result<Self> {
        if !(SNAP_MIN..=SNAP_MAX).contains(&snap) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let map = Map::records("roce_heads", CAPTURE_BYTES)?;
        let lost = Map::counters("roce_lost", 1)?;
        let records = Records::of_map(&map, CAPTURE_BYTES)?;
        let program = program(wanted, snap as i32, &map, &lost);
        let program = Program::load_filter("roce_heads", &program)?;
        // It stays with the socket.
        let fd = program.as_fd().as_raw_fd();
        socket.set(libc::SOL_SOCKET, libc::SO_ATTACH_BPF, fd)?;
        let now = |clock| {
            let now = clock_gettime(clock);
            Duration::try_from(now).unwrap_or_default()
        };
        let clock = now(ClockId::Realtime).saturating_sub(now(ClockId::Monotonic));
        Ok(Self { records, map, lost, snap: snap as usize, clock })
    }

    /// Hands the next frame to `take`. `None` if there is none yet.
    pub(super) fn next<R>(&mut self, take: impl FnOnce(Captured<'_>) -> R) -> Option<R> {
        let (snap, clock) = (self.snap, self.clock);
        let taken = self.records.take(|record| captured(record, snap, clock).map(take));
        // The program writes no record that is too short.
        taken.flatten()
    }

    /// Frames that found no room.
    pub(super) fn lost(&self) -> u64 {
        self.lost.count(0).unwrap_or(0)
    }

    /// The descriptor that becomes readable when there are records.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// Reads a record.
fn captured(record: &[u8], snap: usize, clock: Duration) -> Option<Captured<'_>> {
    let (time, rest) = record.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let (datagram, bytes) = rest.split_first_chunk()?;
    let [len, datagram] = [len, datagram].map(|word| u32::from_ne_bytes(*word) as usize);
    let is_v6 = bytes.get(12..14)? == ETHER_V6.to_be_bytes();
    let headers = if is_v6 { V6 } else { V4 } as usize;
    let (payload, apart) = (len.saturating_sub(headers), snap - headers);
    // Those before the last.
    let before = payload.saturating_sub(1).checked_div(datagram).unwrap_or(0);
    let end = match before {
        0 => len.min(snap),
        _ => headers + before * apart + apart.min(payload - before * datagram),
    };
    let time = clock + Duration::from_nanos(u64::from_ne_bytes(*time));
    let run = (before > 0).then_some(Run { datagram, apart });
    Some(Captured { time, bytes: bytes.get(..end)?, run })
}

/// The program: of what `wanted` takes, `snap` bytes of each datagram go to `records`, and a frame
/// without room there is counted in `lost`.
fn program(wanted: &[sock_filter], snap: i32, records: &Map, lost: &Map) -> Vec<Insn> {
    let mut asm = Asm::default();
    let [take, v6, full, done] = [(); 4].map(|()| asm.label());
    asm.mov(Reg::R6, Reg::R1);
    select(&mut asm, wanted, take, done);

    asm.bind(take);
    asm.load_packet(Size::H, 12);
    asm.jump32_if_imm(Cond::Eq, Reg::R0, ETHER_V6.into(), v6);
    take_heads(&mut asm, V4, snap, records, (full, done));
    asm.bind(v6);
    take_heads(&mut asm, V6, snap, records, (full, done));

    asm.bind(full);
    asm.load_map_value(Reg::R1, lost.raw_fd());
    asm.mov_imm(Reg::R2, 1);
    asm.atomic_add(Reg::R1, 0, Reg::R2);
    asm.bind(done);
    asm.mov_imm(Reg::R0, 0);
    asm.exit();
    asm.assemble()
}

/// Translates a classic program: jumps to `take` or `nothing` where that returns. The context is in
/// R6, its accumulator becomes R0.
fn select(asm: &mut Asm, wanted: &[sock_filter], take: Label, nothing: Label) {
    let places: Vec<Label> = wanted.iter().map(|_| asm.label()).collect();
    for (at, it) in wanted.iter().enumerate() {
        asm.bind(places[at]);
        let behind = |count: usize| places[at + 1 + count];
        match it.code {
            LD_WORD => asm.load_packet(Size::W, it.k.cast_signed()),
            LD_HALF => asm.load_packet(Size::H, it.k.cast_signed()),
            LD_BYTE => asm.load_packet(Size::B, it.k.cast_signed()),
            AND => asm.and_imm(Reg::R0, it.k.cast_signed()),
            JEQ | JSET => {
                let cond = if it.code == JEQ { Cond::Eq } else { Cond::Set };
                asm.jump32_if_imm(cond, Reg::R0, it.k, behind(it.jt.into()));
                asm.jump(behind(it.jf.into()));
            }
            JUMP => asm.jump(behind(it.k as usize)),
            RET => asm.jump(if it.k == NOTHING { nothing } else { take }),
            other => unreachable!("the filters of captures have no instruction {other:#x}"),
        }
    }
}

/// Makes a record of a frame with headers of this length, and goes to `done`, or to `full`.
fn take_heads(asm: &mut Asm, headers: i32, snap: i32, records: &Map, (full, done): (Label, Label)) {
    use Reg::{R0, R1, R2, R3, R6, R7, R8, R9, R10};
    let (sized, apart) = (asm.label(), snap - headers);
    // The payload of the frame, and that of each datagram.
    asm.load(Size::W, R9, R6, SKB_LEN);
    asm.add_imm(R9, -headers);
    asm.load(Size::W, R8, R6, SKB_GSO_SIZE);
    asm.jump_if_imm(Cond::Ne, R8, 0, sized);
    asm.mov_imm(R8, 1 << 16);
    asm.bind(sized);
    for count in COUNTS {
        let [more, next, submit] = [(); 3].map(|()| asm.label());
        asm.mov(R1, R8);
        asm.multiply_imm(R1, count);
        asm.jump_if(Cond::SGt, R9, R1, more);

        asm.load_map(R1, records.raw_fd());
        asm.mov_imm(R2, HEADER + snap + (count - 1) * apart);
        asm.mov_imm(R3, 0);
        asm.call(Helper::RingbufReserve);
        asm.jump_if_imm(Cond::Eq, R0, 0, full);
        asm.mov(R8, R0);
        asm.store(Size::Dw, R10, RECORD, R8);
        asm.call(Helper::KtimeGetNs);
        asm.store(Size::Dw, R8, 0, R0);
        for (field, to) in [(SKB_LEN, 8), (SKB_GSO_SIZE, 12)] {
            asm.load(Size::W, R1, R6, field);
            asm.store(Size::W, R8, to, R1);
        }
        asm.add_imm(R8, HEADER);
        asm.mov_imm(R7, 0);
        copy(asm, snap, submit);
        if count > 1 {
            asm.add_imm(R8, snap);
            asm.mov_imm(R7, headers);
            asm.mov_imm(R9, 1);
            asm.bind(next);
            asm.load(Size::W, R1, R6, SKB_GSO_SIZE);
            asm.add(R7, R1);
            copy(asm, apart, submit);
            asm.add_imm(R8, apart);
            asm.add_imm(R9, 1);
            asm.jump_if_imm(Cond::Ne, R9, count, next);
        }
        asm.bind(submit);
        asm.load(Size::Dw, R1, R10, RECORD);
        asm.mov_imm(R2, 0);
        asm.call(Helper::RingbufSubmit);
        asm.jump(done);
        asm.bind(more);
    }
    asm.jump(full);
}

/// Copies at most `limit` bytes of the frame, from the offset in R7 on, to where R8 points. Jumps
/// to `end` if there are none.
fn copy(asm: &mut Asm, limit: i32, end: Label) {
    use Reg::{R1, R2, R3, R4, R6, R7, R8};
    let [some, cut, bounded] = [(); 3].map(|()| asm.label());
    asm.load(Size::W, R4, R6, SKB_LEN);
    asm.subtract(R4, R7);
    asm.jump_if_imm(Cond::SGt, R4, 0, some);
    asm.jump(end);
    asm.bind(some);
    asm.jump_if_imm(Cond::Gt, R4, limit, cut);
    asm.jump(bounded);
    asm.bind(cut);
    asm.mov_imm(R4, limit);
    asm.bind(bounded);
    asm.mov(R1, R6);
    asm.mov(R2, R7);
    asm.mov(R3, R8);
    asm.call(Helper::SkbLoadBytes);
}
