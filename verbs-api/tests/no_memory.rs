//! Memory that is registered and that is none when it is used: a request that names it gets an
//! error, its queue pair ends, and all else lives.
#![allow(unsafe_code, reason = "it takes memory away that is registered")]

mod sim;

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use rocinante::verbs::{BindMw, Key, MwPart, MwType, QpState, Rereg, SendData, SendOp, Sge};
use rocinante::{Access, Mr, Qp, RecvWr, SendWr, WcStatus};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};
use sim::{Side, connect, request, undriven, until};

/// Exponent of the ACK timeout: about four seconds.
const TIMEOUT: u8 = 20;
/// Pages of a mapping; those in the middle are taken away.
const PAGES: usize = 6;
const TAKEN: std::ops::Range<usize> = 2..4;

/// How memory goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gone {
    /// Its pages are unmapped.
    Unmapped,
    /// They give no access.
    Protected,
    /// They can be read.
    ReadOnly,
    /// They are behind the end of their file.
    Truncated,
}

const WAYS: [Gone; 4] = [Gone::Unmapped, Gone::Protected, Gone::ReadOnly, Gone::Truncated];

/// A mapping of a file in memory.
struct Pages {
    start: *mut c_void,
    page: usize,
    file: File,
}

impl Pages {
    fn new() -> Self {
        // Far from other mappings: another test would get the range that this one unmaps.
        static NEXT: AtomicUsize = AtomicUsize::new(0x30_0000_0000);
        let page = rustix::param::page_size();
        let file: OwnedFd = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len((PAGES * page) as u64).unwrap();
        let wish = NEXT.fetch_add(1 << 24, Ordering::Relaxed) as *mut c_void;
        let all = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory, which nothing else uses.
        let start = unsafe { mm::mmap(wish, PAGES * page, all, MapFlags::SHARED, file.as_fd(), 0) };
        Self { start: start.unwrap(), page, file }
    }

    fn at(&self, page: usize) -> *mut u8 {
        self.start.cast::<u8>().wrapping_add(page * self.page)
    }

    /// Takes the pages in the middle away, or all from there on.
    fn go(&self, how: Gone) {
        let (at, len) = (self.at(TAKEN.start).cast(), TAKEN.len() * self.page);
        // SAFETY: Rust refers to nothing there.
        unsafe {
            match how {
                Gone::Unmapped => mm::munmap(at, len).unwrap(),
                Gone::Protected => mm::mprotect(at, len, MprotectFlags::empty()).unwrap(),
                Gone::ReadOnly => mm::mprotect(at, len, MprotectFlags::READ).unwrap(),
                Gone::Truncated => self.file.set_len((TAKEN.start * self.page) as u64).unwrap(),
            }
        }
    }

    fn register(&self, side: &Side, access: Access) -> Mr {
        // SAFETY: the test looks at the memory only where it is. It does take some away, and the
        // device has to bear that.
        unsafe { side.pd.register(self.at(0), PAGES * self.page, access) }.unwrap()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: Rust refers to nothing there; pages that are gone do no harm.
        unsafe { mm::munmap(self.start, PAGES * self.page).unwrap() };
    }
}

/// The completions of both sides, in order, up to `count` in all.
fn completions(sides: &[Side; 2], count: usize) -> [Vec<WcStatus>; 2] {
    let mut seen = [const { Vec::new() }; 2];
    until("the completions", || {
        for (side, seen) in sides.iter().zip(&mut seen) {
            seen.extend(side.cq.poll_one().unwrap().map(|wc| wc.status));
        }
        seen[0].len() + seen[1].len() == count
    });
    seen
}

/// The side that touches the memory that is gone, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Touch {
    PeerWrites,
    PeerReads,
    PeerAdds,
    PeerWritesAtomically,
    /// A SEND into a posted receive.
    Receive,
    /// The source of a SEND and of a WRITE.
    Send,
    Write,
    /// The target of a READ and of an atomic.
    ReadInto,
    AddInto,
}

const TOUCHES: [Touch; 9] = [
    Touch::PeerWrites,
    Touch::PeerReads,
    Touch::PeerAdds,
    Touch::PeerWritesAtomically,
    Touch::Receive,
    Touch::Send,
    Touch::Write,
    Touch::ReadInto,
    Touch::AddInto,
];

impl Touch {
    fn stores(self) -> bool {
        !matches!(self, Self::PeerReads | Self::Send | Self::Write)
    }

    fn is_of_a_word(self) -> bool {
        matches!(self, Self::PeerAdds | Self::PeerWritesAtomically | Self::AddInto)
    }

    /// Does it from `qp[0]` to `qp[1]`; the memory belongs to the side that the touch is of. The
    /// statuses of both sides.
    fn run(self, sides: &[Side; 2], qp: &[Qp; 2], bad: Sge, key: Key) -> [Vec<WcStatus>; 2] {
        let good = [sides[0].mr.sge(0, bad.len as usize)];
        let (own, to) = ([bad], (sides[1].mr.address(), sides[1].mr.rkey()));
        let (remote, rkey) = (bad.addr, key);
        let (op, list) = match self {
            Self::PeerWrites => (SendOp::Write { remote, rkey, imm: None }, &good),
            Self::PeerReads => (SendOp::Read { remote, rkey }, &good),
            Self::PeerAdds => (SendOp::FetchAdd { remote, rkey, add: 1 }, &good),
            Self::PeerWritesAtomically => (SendOp::AtomicWrite { remote, rkey }, &good),
            Self::Receive => (SendOp::Send { imm: None }, &good),
            Self::Send => (SendOp::Send { imm: None }, &own),
            Self::Write => (SendOp::Write { remote: to.0, rkey: to.1, imm: None }, &own),
            Self::ReadInto => (SendOp::Read { remote: to.0, rkey: to.1 }, &own),
            Self::AddInto => (SendOp::FetchAdd { remote: to.0, rkey: to.1, add: 1 }, &own),
        };
        let receives = usize::from(self == Self::Receive);
        if receives == 1 {
            qp[1].post_recv(&[RecvWr { wr_id: 2, sges: &own }]).unwrap();
        }
        qp[0].post_send(&[request(1, op, SendData::Sges(list))]).unwrap();
        completions(sides, 1 + receives)
    }

    /// Its completions if the memory is gone.
    fn ends(self) -> [Vec<WcStatus>; 2] {
        match self {
            Self::PeerWrites | Self::PeerReads | Self::PeerAdds | Self::PeerWritesAtomically => {
                [vec![WcStatus::RemAccessErr], vec![]]
            }
            Self::Receive => [vec![WcStatus::RemOpErr], vec![WcStatus::LocProtErr]],
            _ => [vec![WcStatus::LocProtErr], vec![]],
        }
    }

    /// Which side has the memory.
    fn side(self) -> usize {
        match self {
            Self::Send | Self::Write | Self::ReadInto | Self::AddInto => 0,
            _ => 1,
        }
    }
}

/// Each way to go, each touch, in one packet and in several, from its first byte on and in the
/// middle of the message.
#[test]
fn only_the_queue_pair_ends_that_touches_memory_that_is_gone() {
    let sides = undriven();
    let beside = connect(&sides, TIMEOUT);
    for how in WAYS {
        for touch in TOUCHES {
            let lens: &[usize] = if touch.is_of_a_word() { &[8] } else { &[8, 64, 100, 4096] };
            for (len, before) in lens.iter().flat_map(|len| [(*len, 0), (*len, *len / 2)]) {
                let before = if touch.is_of_a_word() { 0 } else { before };
                let what = format!("{touch:?} of {len} bytes, {before} before it, {how:?}");
                let (pages, side) = (Pages::new(), touch.side());
                let region = pages.register(&sides[side], Access::ALL);
                let bad = region.sge(TAKEN.start * pages.page - before, len);
                let qp = connect(&sides, TIMEOUT);
                pages.go(how);
                // A SEND that can be read waits for a receive.
                if (how, touch) == (Gone::ReadOnly, Touch::Send) {
                    continue;
                }
                let seen = touch.run(&sides, &qp, bad, region.rkey());
                if how == Gone::ReadOnly && !touch.stores() {
                    assert_eq!(seen, [vec![WcStatus::Success], vec![]], "{what}");
                    continue;
                }
                assert_eq!(seen, touch.ends(), "{what}");
                assert_eq!(qp[side].state(), QpState::Err, "{what}");
                // The memory beside it in the region, and another queue pair, are as before.
                let good = region.sge((TAKEN.start - 1) * pages.page, 8);
                if touch != Touch::Send {
                    let seen = touch.run(&sides, &beside, good, region.rkey());
                    assert!(seen.iter().flatten().all(|at| *at == WcStatus::Success), "{what}");
                }
            }
        }
    }
}

/// Through a window, and after a change of the region.
#[test]
fn what_else_leads_to_memory_that_is_gone_is_refused_too() {
    let sides = undriven();
    for how in WAYS {
        let pages = Pages::new();
        let region = pages.register(&sides[1], Access::ALL | Access::MW_BIND);
        let [window_pair, changed] = [(); 2].map(|()| connect(&sides, TIMEOUT));
        let window = sides[1].pd.alloc_mw(MwType::Type1).unwrap();
        let at = TAKEN.start * pages.page;
        let access = Access::REMOTE_WRITE;
        let part = MwPart { mr: &region, offset: at, len: pages.page, access };
        let bind = BindMw { wr_id: 9, part, signaled: true, fence: false };
        window_pair[1].bind_mw(&window, &bind).unwrap();
        assert_eq!(completions(&sides, 1), [vec![], vec![WcStatus::Success]]);
        let (bad, rkey) = (region.sge(at, 8), window.rkey());
        pages.go(how);
        let refused = Touch::PeerWrites.ends();
        let seen = Touch::PeerWrites.run(&sides, &window_pair, bad, rkey);
        assert_eq!(seen, refused, "{how:?}");
        drop(window);
        let mut region = region;
        region.rereg(&Rereg { access: Some(Access::ALL), ..Rereg::default() }).unwrap();
        assert_eq!(Touch::PeerWrites.run(&sides, &changed, bad, region.rkey()), refused, "{how:?}");
    }
}

/// Everything behind a request that cannot be read is flushed, and requests before it are done.
#[test]
fn requests_before_one_that_cannot_be_read_are_done_and_those_behind_it_flushed() {
    let sides = undriven();
    let pages = Pages::new();
    let region = pages.register(&sides[0], Access::ALL);
    let qp = connect(&sides, TIMEOUT);
    let good = [region.sge(0, 8)];
    let bad = [region.sge(TAKEN.start * pages.page, 8)];
    let (remote, rkey) = (sides[1].mr.address(), sides[1].mr.rkey());
    let op = SendOp::Write { remote, rkey, imm: None };
    let list: Vec<SendWr<'_>> = [&good, &good, &bad, &good, &bad]
        .iter()
        .enumerate()
        .map(|(number, list)| request(number as u64, op, SendData::Sges(&list[..])))
        .collect();
    pages.go(Gone::Protected);
    qp[0].post_send(&list).unwrap();
    let (done, flushed) = (WcStatus::Success, WcStatus::WrFlushErr);
    let expected = vec![done, done, WcStatus::LocProtErr, flushed, flushed];
    assert_eq!(completions(&sides, 5), [expected, vec![]]);
}

/// The device's own threads touch it.
#[test]
fn memory_that_is_gone_ends_no_device_that_drives_itself() {
    let sides = sim::sides(&rocinante_netdev::sim::SimNet::new(), [true, true]);
    for how in WAYS {
        let pages = Pages::new();
        let region = pages.register(&sides[1], Access::ALL);
        let bad = region.sge(TAKEN.start * pages.page, 64);
        let qp = connect(&sides, TIMEOUT);
        pages.go(how);
        let good = [sides[0].mr.sge(0, 64)];
        let op = SendOp::Write { remote: bad.addr, rkey: region.rkey(), imm: None };
        qp[0].post_send(&[request(1, op, SendData::Sges(&good))]).unwrap();
        let wc = sides[0].cq.wait_one(sim::PATIENCE).unwrap();
        assert_eq!(wc.status, WcStatus::RemAccessErr, "{how:?}");
        until("it breaks", || qp[1].state() == QpState::Err);
    }
}

/// The program's own look at memory that it took away is its own mistake: it panics.
#[test]
#[should_panic(expected = "the memory of the region is there")]
fn a_region_whose_memory_is_gone_is_not_read() {
    let sides = undriven();
    let pages = Pages::new();
    let region = pages.register(&sides[0], Access::ALL);
    pages.go(Gone::Protected);
    let _ = region.to_vec(TAKEN.start * pages.page, 8);
}
