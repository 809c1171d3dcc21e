//! The slots as a process sees them before it takes some.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::kernel::descriptors::SEARCHES;
use crate::sharing::layout::{FILE_BYTES, NOTES_AT};
use crate::sharing::locks::Locks;

/// The number of reads of this thread so far (proc_pid_io(5)), where the kernel counts them.
fn reads() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/io")?;
    let count = text.lines().find_map(|line| line.strip_prefix("syscr: "));
    Ok(count.and_then(|count| count.parse().ok()).expect("a number"))
}

/// One read gives the state of all slots, and one search each row of locks that a process has.
#[test]
fn slots_are_taken_with_few_reads_and_a_search_for_each_other_process() {
    let here = loopback();
    let first = lease(&[here], 1).expect("slots");
    first.note(here, 1, (&[1; NOTE_BYTES], 0));
    let mut others = Vec::new();
    for processes in [1, 5, 25] {
        others.resize_with(processes - 1, || lease(&[here], 2).expect("slots"));
        let before = (SEARCHES.get(), or_skip!(reads()));
        let last = lease(&[here], 1).expect("slots");
        let (searches, reads) = (SEARCHES.get() - before.0, or_skip!(reads()) - before.1);
        // Another for the slots behind all of them, and for each that the last ones left.
        let few = processes + 1..=processes + 3;
        assert!(few.contains(&searches), "{searches} searches beside {processes} processes");
        assert!(reads < 40, "{reads} reads beside {processes} processes");
        drop(last);
    }
}

/// Each row of locks is found; the slots between are free.
#[test]
fn what_others_have_is_seen_in_rows() {
    let file = memfd_create("rows", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, FILE_BYTES).expect("long enough");
    let [mine, one, other] = [(); 3].map(|()| Locks::open(&file).expect("opened"));
    let rows = [(&one, 0..3), (&other, 3..5), (&one, 6..7), (&mine, 8..9), (&other, 254..256)];
    for (locks, row) in rows.clone() {
        row.for_each(|slot| locks.take(slot).expect("free"));
    }
    let of_others: Vec<usize> =
        rows.into_iter().filter(|(of, _)| !std::ptr::eq(*of, &mine)).flat_map(|(_, r)| r).collect();
    let taken = || -> Vec<usize> {
        let all = mine.look().expect("the table").into_iter().enumerate();
        all.filter(|(_, seen)| seen.is_taken).map(|(slot, _)| slot).collect()
    };
    assert_eq!(taken(), of_others);
    drop((one, other));
    assert_eq!(taken(), [0; 0]);
    let short = memfd_create("short", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&short, NOTES_AT - 1).expect("no longer");
    assert!(Locks::open(&short).expect("opened").look().is_err(), "a record is missing");
}

/// The kernel walks its list of the locks at each call. With an eighth of the requests that the
/// connection manager keeps by default, each lock is found, and none is left behind.
#[test]
fn each_of_many_requests_is_found() {
    const ALL: u64 = 2048;
    let here = loopback();
    let [one, other] = [(); 2].map(|()| lease(&[here], 1).expect("a slot"));
    let way = (here, IpAddr::from([10, 0, 0, 9]));
    let hold = |is_held| (0..ALL).for_each(|key| one.hold_request(way, key, is_held));
    let found = || {
        let some = (0..=ALL).step_by(64).map(|key| other.request_holder(way, key));
        some.collect::<Vec<_>>()
    };
    let all = [vec![Some(one.first()); ALL as usize / 64], vec![None]].concat();
    hold(true);
    assert_eq!(found(), all);
    hold(false);
    assert_eq!(found(), vec![None; all.len()]);
}
