//! Regions: at an address of the program's choice, changed, taken away, and over memory that is not
//! there or goes away.
#![allow(unsafe_code, reason = "it unmaps memory that is registered")]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sim::{Side, connect, done, request, send, undriven, until, write};
use rocinante::verbs::{AccessError, Advice, Key, QpState, Rereg, SendData, SendOp};
use rocinante::{Access, Mr, Qp, RecvWr, VerbsError, WcStatus};
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

/// Exponent of the ACK timeout: about four seconds.
const TIMEOUT: u8 = 20;
const EFAULT: i32 = 14;

/// Pages that the test maps, and unmaps as it likes.
struct Pages {
    start: *mut c_void,
    page: usize,
    count: usize,
}

impl Pages {
    fn new(count: usize) -> Self {
        // Far from other mappings: another test would get the range that this one unmaps.
        static NEXT: AtomicUsize = AtomicUsize::new(0x20_0000_0000);
        let page = rustix::param::page_size();
        let wish = NEXT.fetch_add(1 << 24, Ordering::Relaxed) as *mut c_void;
        let all = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory, which nothing else uses.
        let start = unsafe { mm::mmap_anonymous(wish, count * page, all, MapFlags::PRIVATE) };
        Self { start: start.unwrap(), page, count }
    }

    fn at(&self, page: usize) -> *mut u8 {
        self.start.cast::<u8>().wrapping_add(page * self.page)
    }

    fn register(&self, side: &Side, access: Access) -> Result<Mr, VerbsError> {
        // SAFETY: the test looks at the memory only by the region. It does unmap it, and the device
        // has to bear that.
        unsafe { side.pd.register(self.at(0), self.count * self.page, access) }
    }

    fn unmap(&self, page: usize) {
        // SAFETY: Rust refers to nothing there.
        unsafe { mm::munmap(self.at(page).cast(), self.page).unwrap() };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: Rust refers to nothing there; pages that are gone do no harm.
        unsafe { mm::munmap(self.start, self.count * self.page).unwrap() };
    }
}

fn pair(sides: &[Side; 2]) -> [Qp; 2] {
    connect(sides, TIMEOUT)
}

#[test]
fn a_region_is_named_by_the_address_that_the_program_chose() {
    let sides = undriven();
    let memory = [Pages::new(1), Pages::new(1)];
    // The addresses overlap, and are not those of the memory.
    let iovas = [0x1234_5678_9abc, 0x1234_5678_9abc + 100];
    let regions: Vec<Mr> = (memory.iter().zip(iovas))
        // SAFETY: the test looks at the memory only by the regions.
        .map(|(at, iova)| unsafe {
            sides[1].pd.register_iova(at.at(0), 200, iova, Access::ALL).unwrap()
        })
        .collect();
    let pairs = [(); 3].map(|()| pair(&sides));
    for (region, iova) in regions.iter().zip(iovas) {
        assert_eq!(region.address(), iova);
        let to = (iova + 192, region.rkey());
        assert_eq!(done(&sides, &pairs[0][0], write(1, to)), WcStatus::Success);
        assert_eq!((region.to_vec(192, 8), region.to_vec(184, 8)), (vec![7; 8], vec![0; 8]));
        assert_eq!(region.sge(5, 1).addr, iova + 5);
    }
    // Beside it, and by its real address.
    let real = memory[0].at(0) as u64;
    for (address, [qp, _]) in [iovas[0] + 193, real].into_iter().zip(&pairs[1..]) {
        let to = (address, regions[0].rkey());
        assert_eq!(done(&sides, qp, write(2, to)), WcStatus::RemAccessErr);
    }
    // A local request names it in the same way.
    let [_peer, qp] = pair(&sides);
    let [from, to] = [&regions[0], &sides[0].mr].map(|mr| mr.sge(0, 8));
    let op = SendOp::Write { remote: to.addr, rkey: sides[0].mr.rkey(), imm: None };
    qp.post_send(&[request(3, op, SendData::Sges(&[from]))]).unwrap();
    until("the WRITE", || {
        sides[0].ctx.progress();
        sides[1].cq.poll_one().unwrap().is_some_and(|wc| wc.status == WcStatus::Success)
    });
    for (iova, access) in [(u64::MAX - 3, Access::NONE), (8, Access::ZERO_BASED)] {
        // SAFETY: it is refused.
        let refused = unsafe { sides[1].pd.register_iova(memory[0].at(0), 200, iova, access) };
        assert!(refused.is_err(), "{iova:x} {access:?}");
    }
}

#[test]
fn a_region_keeps_its_key_while_its_memory_stays() {
    let sides = undriven();
    let mut region = sides[1].pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let other = sides[1].pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let old = region.rkey();
    let [first, second, third, fourth] = [(); 4].map(|()| pair(&sides));
    // A receive is posted, and stays as good as it was.
    first[1].post_recv(&[RecvWr { wr_id: 9, sges: &[region.sge(0, 64)] }]).unwrap();
    let change = |access| Rereg { access: Some(access), ..Rereg::default() };
    region.rereg(&change(Access::ALL)).unwrap();
    assert_eq!((region.rkey(), region.access()), (old, Access::ALL));
    let to = |mr: &Mr| (mr.address(), mr.rkey());
    assert_eq!(done(&sides, &first[0], write(1, to(&region))), WcStatus::Success);
    assert_eq!(done(&sides, &second[0], write(1, to(&other))), WcStatus::RemAccessErr);
    assert_eq!(done(&sides, &first[0], send(2, &[5; 16])), WcStatus::Success);
    until("the receive", || sides[1].cq.poll_one().unwrap().is_some_and(|wc| wc.wr_id == 9));
    assert_eq!(region.to_vec(0, 16), [5; 16]);
    // Other memory, another key: a receive that names the old one fails.
    third[1].post_recv(&[RecvWr { wr_id: 10, sges: &[region.sge(0, 64)] }]).unwrap();
    region.rereg(&Rereg { len: Some(128), ..Rereg::default() }).unwrap();
    assert_ne!(region.rkey(), old);
    assert_eq!(done(&sides, &third[0], send(3, &[5; 16])), WcStatus::RemOpErr);
    let mut wc = None;
    until("the failed receive", || {
        wc = sides[1].cq.poll_one().unwrap();
        wc.is_some()
    });
    assert_eq!(wc.map(|wc| (wc.wr_id, wc.status)), Some((10, WcStatus::LocProtErr)));
    assert_eq!(done(&sides, &fourth[0], write(4, (region.address(), old))), WcStatus::RemAccessErr);
}

#[test]
fn a_region_is_taken_away_from_posted_requests() {
    let sides = undriven();
    let [first, second] = [(); 2].map(|()| sides[1].pd.allocate(64, Access::ALL).unwrap());
    let [one, two] = [(); 2].map(|()| pair(&sides));
    one[1].post_recv(&[RecvWr { wr_id: 1, sges: &[first.sge(0, 64)] }]).unwrap();
    two[1].post_recv(&[RecvWr { wr_id: 2, sges: &[second.sge(0, 64)] }]).unwrap();
    let first = first.deregister().unwrap_err();
    assert!(matches!(first.error, VerbsError::Busy(_)), "{first}");
    first.value.revoke().unwrap();
    assert_eq!(done(&sides, &one[0], send(3, &[5; 16])), WcStatus::RemOpErr);
    assert_eq!(done(&sides, &two[0], send(4, &[5; 16])), WcStatus::Success);
    assert_eq!(second.to_vec(0, 16), [5; 16]);
    until("both", || sides[1].ctx.resources().unwrap().mrs == 2);
}

#[test]
fn memory_that_is_not_there_is_not_registered() {
    let sides = undriven();
    let [whole, holed, readable] = [(); 3].map(|()| Pages::new(3));
    holed.unmap(1);
    // SAFETY: Rust refers to nothing there.
    unsafe {
        mm::mprotect(readable.at(2).cast(), readable.page, MprotectFlags::READ).unwrap();
    }
    let held = sides[0].ctx.resources().unwrap().mrs;
    for (pages, access, there) in [
        (&whole, Access::ALL, true),
        (&holed, Access::NONE, false),
        (&readable, Access::REMOTE_READ, true),
        (&readable, Access::LOCAL_WRITE, false),
    ] {
        match pages.register(&sides[0], access) {
            Ok(region) => assert!(there && region.address() == pages.at(0) as u64),
            Err(error) => assert!(!there && error.errno() == EFAULT, "{error}"),
        }
    }
    // SAFETY: it is refused.
    let null = unsafe { sides[0].pd.register(ptr::null_mut(), 8, Access::NONE) };
    assert_eq!(null.unwrap_err().errno(), EFAULT);
    // SAFETY: it is refused, or has no bytes.
    unsafe {
        let pd = &sides[0].pd;
        assert!(pd.register(usize::MAX as *mut u8, 8, Access::NONE).is_err());
        assert!(pd.register(ptr::null_mut(), 0, Access::NONE).unwrap().is_empty());
    }
    assert_eq!(sides[0].ctx.resources().unwrap().mrs, held);
    // A change is refused in the same way, and changes nothing.
    let mut region = whole.register(&sides[0], Access::ALL).unwrap();
    let before = (region.rkey(), region.address(), region.len());
    // SAFETY: it is refused.
    let refused = unsafe { region.rereg_at(holed.at(0), 3 * holed.page, &Rereg::default()) };
    assert_eq!(refused.unwrap_err().errno(), EFAULT);
    assert_eq!((region.rkey(), region.address(), region.len()), before);
}

/// A peer's access to a page. Returns its status.
fn touch(sides: &[Side; 2], qp: &Qp, op: SendOp) -> WcStatus {
    let own = [sides[0].mr.sge(0, 8)];
    done(sides, qp, request(1, op, SendData::Sges(&own)))
}

#[test]
fn memory_that_was_unmapped_refuses_a_peer_and_the_program_lives() {
    let sides = undriven();
    let pages = Pages::new(3);
    let region = pages.register(&sides[1], Access::ALL).unwrap();
    let ops = |remote: u64, rkey: Key| {
        [
            SendOp::Write { remote, rkey, imm: None },
            SendOp::Read { remote, rkey },
            SendOp::FetchAdd { remote, rkey, add: 1 },
        ]
    };
    let qp = pair(&sides);
    for page in 0..3 {
        for op in ops(pages.at(page) as u64, region.rkey()) {
            assert_eq!(touch(&sides, &qp[0], op), WcStatus::Success);
        }
    }
    let receiver = pair(&sides);
    let sge = [region.sge(pages.page, 64)];
    receiver[1].post_recv(&[RecvWr { wr_id: 8, sges: &sge }]).unwrap();
    pages.unmap(1);
    // The other pages are as they were; an access into the hole is refused.
    for op in ops(pages.at(1) as u64, region.rkey()) {
        assert_eq!(touch(&sides, &pair(&sides)[0], op), WcStatus::RemAccessErr, "{op:?}");
    }
    let across = SendOp::Write { remote: pages.at(1) as u64 - 4, rkey: region.rkey(), imm: None };
    assert_eq!(touch(&sides, &pair(&sides)[0], across), WcStatus::RemAccessErr);
    for page in [0, 2] {
        for op in ops(pages.at(page) as u64, region.rkey()) {
            assert_eq!(touch(&sides, &qp[0], op), WcStatus::Success);
        }
    }
    // A posted receive, and a request of the program's own.
    assert_eq!(done(&sides, &receiver[0], send(2, &[1; 8])), WcStatus::RemOpErr);
    let [_, own] = pair(&sides);
    own.post_send(&[request(3, SendOp::Send { imm: None }, SendData::Sges(&sge))]).unwrap();
    let mut seen = Vec::new();
    until("both", || {
        sides[0].ctx.progress();
        seen.extend(sides[1].cq.poll_one().unwrap().map(|wc| (wc.wr_id, wc.status)));
        seen.len() == 2
    });
    assert_eq!(seen, [(8, WcStatus::LocProtErr), (3, WcStatus::LocProtErr)]);
    assert_eq!(own.state(), QpState::Err);
    assert_eq!(region.check(pages.at(1) as u64, 8, Access::REMOTE_WRITE), Err(AccessError::Memory));
}

#[test]
fn advice_brings_pages_in_and_notices_what_is_gone() {
    let sides = undriven();
    let pages = Pages::new(4);
    let region = pages.register(&sides[0], Access::LOCAL_WRITE).unwrap();
    let readable = sides[0].pd.allocate(64, Access::REMOTE_READ).unwrap();
    let all = [Advice::Prefetch, Advice::PrefetchWrite, Advice::PrefetchNoFault];
    for advice in all {
        region.advise(advice, 0, region.len()).unwrap();
        region.advise(advice, 5, 0).unwrap();
        for (offset, len) in [(0, region.len() + 1), (usize::MAX, 1), (region.len() + 1, 0)] {
            assert_eq!(region.advise(advice, offset, len).unwrap_err().errno(), 22);
        }
        assert_eq!(readable.advise(advice, 0, 64).is_err(), advice == Advice::PrefetchWrite);
    }
    pages.unmap(2);
    for advice in all {
        assert_eq!(region.advise(advice, 0, region.len()).unwrap_err().errno(), EFAULT);
        region.advise(advice, 0, 2 * pages.page).unwrap();
    }
}
