//! Stores, loads and refusals.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use super::*;

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn memory_is_there_until_it_is_unmapped() {
    let page = rustix::param::page_size();
    let flags = mm::MapFlags::PRIVATE;
    let all = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
    // SAFETY: new memory, which nothing else uses.
    let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), 4 * page, all, flags) }.unwrap();
    let (at, len) = (start as u64, page as u64);
    let at = |page: u64| at + page * len;
    assert!(is_usable(at(0), 4 * len, true) && is_usable(at(0), 0, true));
    // SAFETY: it is ours.
    unsafe {
        mm::munmap(start.byte_add(page), page).unwrap();
        mm::mprotect(start.byte_add(2 * page), page, mm::MprotectFlags::READ).unwrap();
        mm::mprotect(start.byte_add(3 * page), page, mm::MprotectFlags::empty()).unwrap();
    }
    for (from, to, mapped) in [(0, len, true), (0, len + 1, false), (len, len + 1, false)] {
        assert_eq!(is_mapped(at(0) + from, to - from), mapped, "{from} to {to}");
    }
    assert!(is_mapped(at(2), 2 * len) && !is_mapped(at(0), 4 * len));
    if mappings::are_known() {
        let covered = |from, pages| mappings::cover(at(from), pages * len);
        assert_eq!((covered(2, 2), covered(0, 4)), (Some(true), Some(false)));
    }
    for (page, readable, writable) in
        [(0, true, true), (1, false, false), (2, true, false), (3, false, false)]
    {
        assert_eq!(is_usable(at(page) + 5, 1, false), readable, "{page}");
        assert_eq!(is_usable(at(page) + 5, 1, true), writable, "{page}");
    }
    assert!(!is_usable(at(2), len + 1, false), "its last page");
    assert!(!is_mapped(u64::MAX - 1, 4) && !is_mapped(0, 1));
    // SAFETY: as above.
    unsafe { mm::munmap(start, 4 * page).unwrap() };
}

/// The first and the last page are good; Linux before 6.11 does not report holes between them.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_mapping_of_a_range_has_to_permit_it() {
    let page = rustix::param::page_size();
    let all = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
    for (permission, readable) in
        [(mm::MprotectFlags::empty(), false), (mm::MprotectFlags::READ, true)]
    {
        // SAFETY: new memory, which nothing else uses.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), 4 * page, all, mm::MapFlags::PRIVATE) };
        let start = start.unwrap();
        // SAFETY: it is ours.
        unsafe { mm::mprotect(start.byte_add(2 * page), page, permission).unwrap() };
        let usable = |len, writable| is_usable(start as u64 + 5, len, writable);
        assert!(usable(2 * page as u64 - 5, true), "before the page");
        let says = mappings::are_known();
        assert_eq!(usable(4 * page as u64 - 5, false), readable || !says);
        assert_eq!(usable(4 * page as u64 - 5, true), !says);
        // SAFETY: as above.
        unsafe { mm::munmap(start, 4 * page).unwrap() };
    }
}

#[test]
fn every_alignment_and_length_is_copied_exactly() {
    let room = if cfg!(miri) { 128 } else { 5000 };
    let buffer = Buffer::zeroed(8192).unwrap();
    let src: Vec<u8> = (0..4200u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
    let most = if cfg!(miri) { 40 } else { 300 };
    let whole = Range { address: buffer.address(), len: room };
    let check = |offset: u64, len: usize| {
        let (offset, end) = (offset as usize, offset as usize + len);
        let range = Range { address: buffer.address() + offset as u64, len };
        // SAFETY: all ranges are inside the buffer.
        unsafe {
            whole.store(&vec![0xee; room]).unwrap();
            // The source has each alignment, too.
            range.store(&src[offset % 9..][..len]).unwrap();
            let (mut seen, mut part) = (vec![0; room], vec![0; len + 2]);
            whole.load(&mut seen).unwrap();
            assert_eq!(seen[offset..end], src[offset % 9..][..len], "{len} at {offset}");
            assert!(seen[..offset].iter().chain(&seen[end..]).all(|byte| *byte == 0xee));
            range.load(&mut part[1..=len]).unwrap();
            assert_eq!(part[1..=len], seen[offset..end], "{len} at {offset}");
            assert_eq!((part[0], part[len + 1]), (0, 0), "{len} at {offset}");
        }
    };
    for offset in 0..40 {
        (0..=most).step_by(1 + offset as usize % 3).for_each(|len| check(offset, len));
        if !cfg!(miri) {
            [1000, 1024, 1500, 4095, 4096].iter().for_each(|len| check(offset, *len));
        }
    }
}

/// Two pages, of which the second gives no access.
struct Edge(*mut c_void);

impl Edge {
    fn new() -> Self {
        let page = rustix::param::page_size();
        let all = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
        // SAFETY: new memory, which nothing else uses.
        unsafe {
            let flags = mm::MapFlags::PRIVATE;
            let start = mm::mmap_anonymous(ptr::null_mut(), 2 * page, all, flags).unwrap();
            mm::mprotect(start.byte_add(page), page, mm::MprotectFlags::empty()).unwrap();
            Self(start)
        }
    }

    /// `len` bytes, of which the last `beyond` are behind the edge.
    fn range(&self, len: usize, beyond: usize) -> Range {
        let end = self.0 as u64 + rustix::param::page_size() as u64;
        Range { address: end + beyond as u64 - len as u64, len }
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // SAFETY: it is ours.
        unsafe { mm::munmap(self.0, 2 * rustix::param::page_size()) }.unwrap();
    }
}

#[test]
#[cfg_attr(miri, ignore = "has no signals")]
fn an_access_behind_the_edge_fails_and_one_before_it_does_not() {
    faults::watch();
    let (edge, detected) = (Edge::new(), Summing::detect());
    let lens = (1..=160).chain([1000, 1024, 2048, 4096]);
    for len in lens {
        let mut bytes = vec![7; len];
        for beyond in [0, 1, 8, len / 2, len - 1, len] {
            if beyond > len {
                continue;
            }
            let (range, there) = (edge.range(len, beyond), beyond == 0);
            // SAFETY: nothing else uses the pages.
            unsafe {
                assert_eq!(range.store(&bytes).is_ok(), there, "{len}, {beyond} beyond");
                assert_eq!(range.load(&mut bytes).is_ok(), there, "{len}, {beyond} beyond");
                let summed = range.load_summed(&mut bytes, detected);
                assert_eq!(summed.is_ok(), there, "{len}, {beyond} beyond");
                assert_eq!(range.load_byte(len - 1).is_ok(), there, "{len}, {beyond} beyond");
                if len == 8 && beyond % 8 == 0 {
                    for op in [
                        AtomicOp::FetchAdd { add: 1 },
                        AtomicOp::CompareSwap { compare: 0, swap: 1 },
                    ] {
                        assert_eq!(range.atomic(op).is_ok(), there, "{op:?}, {beyond} beyond");
                    }
                }
            }
            bytes.fill(7);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_buffer_takes_its_pages_when_they_are_used() {
    let len = 1 << 30;
    let buffer = Buffer::zeroed(len).unwrap();
    let resident = |from: usize| {
        let (mut pages, page) = (vec![0u8; 1024], rustix::param::page_size());
        let at = (buffer.address() as usize + from) as *mut c_void;
        // SAFETY: the kernel writes a byte for each page.
        let done = unsafe { libc::mincore(at, pages.len() * page, pages.as_mut_ptr()) };
        assert_eq!(done, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    };
    assert_eq!(resident(0) + resident(len / 2), 0);
    // SAFETY: the byte is in the buffer.
    unsafe { Range { address: buffer.address() + len as u64 / 2, len: 1 }.store(&[1]) }.unwrap();
    assert!(resident(len / 2) > 0);
    assert!(Buffer::zeroed(usize::MAX).is_none() && Buffer::zeroed(1 << 60).is_none());
    assert!(Buffer::zeroed(0).is_some());
}

#[test]
fn each_byte_is_loaded_from_its_place() {
    let buffer = Buffer::zeroed(64).unwrap();
    let src: Vec<u8> = (1..=64).collect();
    for (start, len) in [(0, 64), (1, 63), (3, 20), (7, 9), (8, 8), (15, 1)] {
        let range = Range { address: buffer.address() + start, len };
        // SAFETY: the range is inside the buffer, and the byte inside the range.
        unsafe {
            range.store(&src[..len]).unwrap();
            assert!((0..len).all(|at| range.load_byte(at) == Ok(src[at])), "{len} at {start}");
        }
    }
}

/// # Safety
/// A word must be there.
unsafe fn word_at<'a>(range: &Range, offset: u64) -> &'a AtomicU64 {
    // SAFETY: the caller vouches for it, and atomics may be shared.
    unsafe { AtomicU64::from_ptr((range.address + offset) as *mut u64) }
}

/// One thread counts in eight words, each of which has the same bytes, while another looks.
fn race(write: impl Fn(&Range, u64) + Sync, check: impl Fn(&Range)) {
    let buffer = Buffer::zeroed(WORDS_MAX).unwrap();
    let range = Range { address: buffer.address(), len: WORDS_MAX };
    let rounds = if cfg!(miri) { 8 } else { 200_000 };
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (1..=rounds).for_each(|round| write(&range, round)));
        while !writer.is_finished() {
            check(&range);
        }
    });
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

#[test]
fn a_line_is_stored_word_by_word_ascending() {
    let write = |range: &Range, round: u64| {
        // SAFETY: the range is the buffer.
        unsafe { range.store(&round.to_ne_bytes().repeat(8)) }.unwrap();
    };
    let check = |range: &Range| {
        // SAFETY: as above. Descending: words stored before one that is seen are there with it.
        let seen = [56, 48, 40, 32, 24, 16, 8, 0]
            .map(|at| unsafe { word_at(range, at) }.load(Ordering::Acquire));
        assert!(seen.is_sorted(), "{seen:?}");
    };
    race(write, check);
}

#[test]
fn a_line_is_loaded_word_by_word_ascending() {
    let write = |range: &Range, round: u64| {
        for at in [56, 48, 40, 32, 24, 16, 8, 0] {
            // SAFETY: the range is the buffer.
            unsafe { word_at(range, at) }.store(round, Ordering::Release);
        }
    };
    let check = |range: &Range| {
        let mut seen = [0; WORDS_MAX];
        // SAFETY: as above. The word that is stored last is loaded first.
        unsafe { range.load(&mut seen) }.unwrap();
        assert!(words(&seen).is_sorted(), "{:?}", words(&seen));
    };
    race(write, check);
}

#[test]
fn atomics_return_what_they_found() {
    let buffer = Buffer::zeroed(8).unwrap();
    let range = Range { address: buffer.address(), len: 8 };
    // SAFETY: the buffer is page-aligned and has 8 bytes.
    unsafe {
        assert_eq!(range.atomic(AtomicOp::FetchAdd { add: 5 }), Ok(0));
        assert_eq!(range.atomic(AtomicOp::CompareSwap { compare: 4, swap: 9 }), Ok(5));
        assert_eq!(range.atomic(AtomicOp::CompareSwap { compare: 5, swap: 9 }), Ok(5));
        assert_eq!(range.word().load(Ordering::SeqCst), 9);
    }
}
