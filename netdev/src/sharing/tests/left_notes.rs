//! The notes of a process, and their fate.

use std::collections::BTreeSet;

use super::*;
use crate::sharing::last_will::LastWill;
use crate::sharing::locks::Locks;
use crate::tuning::shared::SEARCH_PAUSES;

type Note = (IpAddr, [u8; NOTE_BYTES]);

const PATIENCE: Duration = Duration::from_secs(20);

/// The notes of processes that have gone, as `of` finds them, until they are enough or for so long.
fn left_within(of: &Process, time: Duration, enough: impl Fn(&[Note]) -> bool) -> Vec<Note> {
    let mut all = Vec::new();
    let end = Instant::now() + time;
    while !enough(&all) && Instant::now() < end {
        all.extend(of.slots.left());
        forget(of);
        std::thread::sleep(Duration::from_millis(1));
    }
    all.sort_unstable();
    all
}

/// Forgets what has been returned: that fails while another process is joining or leaving.
pub(super) fn forget(of: &Process) {
    let is_done = |it: &Shared| it.returned.lock().expect("whole").is_empty();
    wait_until("they are forgotten", || {
        of.slots.forget_left();
        of.slots.shared.iter().all(is_done)
    });
}

/// This number of them.
fn left(of: &Process, count: usize) -> Vec<Note> {
    left_within(of, PATIENCE, |all| all.len() >= count)
}

/// Those that come soon, if any do.
fn soon_left(of: &Process) -> Vec<Note> {
    left_within(of, Duration::from_millis(300), |all| !all.is_empty())
}

fn note(mark: u8) -> [u8; NOTE_BYTES] {
    [mark; NOTE_BYTES]
}

#[test]
fn notes_of_a_process_that_has_gone_are_told_to_the_leader() {
    let here = [loopback(), loopback()];
    let [mut first, second, third] = [(); 3].map(|()| process(&here, 1));
    let other = process(&here, 2);
    // Two of each, and one that has been dropped; the same key on two addresses.
    for key in [7, 8, 9] {
        second.slots.note(here[0], key, (&note(key as u8), 0));
    }
    second.slots.note(here[1], 7, (&note(70), 0));
    second.slots.drop_note(here[0], 8);
    second.slots.drop_note(here[1], 99);
    third.slots.note(here[0], 7, (&note(30), 0));
    other.slots.note(here[0], 1, (&note(41), 0));
    first.slots.note(here[0], 1, (&note(1), 0));
    assert_eq!(soon_left(&first), [], "nobody has gone");
    drop(second);
    assert_eq!(left(&first, 3), [(here[0], note(7)), (here[0], note(9)), (here[1], note(70))]);
    assert_eq!((soon_left(&first), soon_left(&third)), (vec![], vec![]), "once, and to one");
    // A place is used again.
    other.slots.note(here[0], 2, (&note(42), 0));
    other.slots.drop_note(here[0], 1);
    other.slots.note(here[0], 3, (&note(43), 0));
    other.slots.note(here[0], 3, (&note(44), 0));
    drop(other);
    assert_eq!(left(&first, 2), [(here[0], note(42)), (here[0], note(44))]);
    // The one that follows hears of the one that led.
    assert_eq!(first.ports[0].maintain(), None);
    drop(first);
    let mut third = third;
    follow(&mut [&mut third], &here);
    assert_eq!(left(&third, 1), [(here[0], note(1))]);
}

/// Another process that is just joining or leaving keeps the leader from looking.
#[test]
fn a_leader_that_could_not_look_for_notes_is_woken_to_look_again() {
    let here = loopback();
    let [mut first, second, third] = [(); 3].map(|()| process(&[here], 1));
    second.slots.note(here, 7, (&note(7), 0));
    third.slots.note(here, 7, (&note(8), 0));
    let slots = first.slots.clone();
    let mut is_woken = |end: Instant| {
        let left = end.saturating_duration_since(Instant::now()).as_millis();
        let woken = wait_readable(first.ports[0].wait_fd(), left as i32).expect("poll");
        first.ports[0].maintain();
        woken
    };
    drop(second);
    let held = slots.shared[0].locks.hold().expect("no process has it");
    // For longer than the searches that follow every end.
    let end = Instant::now() + 2 * SEARCH_PAUSES[1];
    let mut looks = 0;
    while is_woken(end) {
        assert_eq!(slots.left(), []);
        looks += 1;
    }
    assert!(looks > 0);
    drop(held);
    assert!(is_woken(Instant::now() + Duration::from_secs(30)));
    assert_eq!(slots.left(), [(here, note(7))]);
}

/// Their reader may die before anything came of it.
#[test]
fn notes_stay_until_they_are_forgotten_and_no_process_takes_their_slot_before() {
    let here = loopback();
    let first = process(&[here], 1);
    let gone: Vec<Process> = (0..ROOM_MIN + 4).map(|_| process(&[here], 1)).collect();
    for (nth, it) in gone.iter().enumerate() {
        it.slots.note(here, 7, (&note(nth as u8 + 1), 0));
    }
    let used: BTreeSet<u8> = gone.iter().map(|it| it.slots.first()).collect();
    drop(gone);
    // There is no room for another slot, but no neighbour's notes are lost for it.
    let next = process(&[here], 1);
    assert!(!used.contains(&next.slots.first()), "{next:?} of {used:?}", next = next.slots);
    let told = |of: &Process| {
        wait_until("all are told", || of.slots.left().len() == ROOM_MIN + 4);
    };
    told(&first);
    drop(first);
    let mut next = next;
    follow(&mut [&mut next], &[here]);
    // To the one that follows, too.
    told(&next);
    forget(&next);
    let mut third = process(&[here], 1);
    drop(next);
    follow(&mut [&mut third], &[here]);
    assert_eq!(soon_left(&third), []);
    assert!(used.contains(&process(&[here], 1).slots.first()), "their slots are used anew");
}

#[test]
fn a_slot_that_is_used_anew_has_no_notes_of_the_process_before() {
    let here = loopback();
    let first = process(&[here], 1);
    let second = process(&[here], 1);
    second.slots.note(here, 7, (&note(7), 0));
    let slot = second.slots.first();
    drop(second);
    // A process may be faster than the one that leads.
    first.shared_take(slot);
    assert_eq!(soon_left(&first), []);
}

impl Process {
    /// Has another process take a slot at once.
    fn shared_take(&self, slot: u8) {
        let shared = &self.slots.shared[0];
        let locks = Locks::open(&shared.objects.memory).expect("opened");
        let _held = locks.hold().expect("held");
        locks.take(usize::from(slot)).expect("free");
        locks.leave(usize::from(slot), REST);
    }
}

/// Any process of the user may write to the file.
#[test]
fn a_file_with_nonsense_tells_nonsense_and_harms_nobody() {
    let here = loopback();
    let first = process(&[here], 1);
    let second = process(&[here], 1);
    second.slots.note(here, 7, (&note(7), 0));
    first.slots.note(here, 7, (&note(1), 0));
    let locks = &first.slots.shared[0].locks;
    let counts = layout::NOTES_BYTES as usize;
    let mut nonsense = vec![0xff; 256 * 8 + 1024];
    for value in [0xff, 0x80, 1] {
        nonsense.fill(value);
        locks.write(&nonsense, layout::NOTES_AT).expect("written");
        drop(lease(&[here], 1).expect("a slot"));
        let told = soon_left(&first);
        // Those of slots without a process, as far as there are places. The rest is zero.
        assert!(told.len() <= counts / NOTE_BYTES && told.iter().all(|(at, _)| *at == here));
        assert!(told.iter().all(|(_, it)| *it != note(7) && *it != note(1)), "of the living");
    }
    // A process that lives goes on, and its notes from now on are found.
    second.slots.note(here, 8, (&note(8), 0));
    assert_eq!(second.slots.first(), 1);
    drop(second);
    let found = left_within(&first, PATIENCE, |all| all.contains(&(here, note(8))));
    assert!(found.contains(&(here, note(8))), "{found:?}");
    // The room is limited; it is had again.
    let third = process(&[here], 1);
    for key in 0..5000 {
        third.slots.note(here, key, (&note(3), 0));
    }
    (0..5000).for_each(|key| third.slots.drop_note(here, key));
    (0..10).for_each(|key| third.slots.note(here, key, (&note(4), 0)));
    drop(third);
    assert_eq!(left(&first, 10), [(here, note(4)); 10]);
}

/// Another version may have made the file, or a process that may write no longer ones.
#[test]
fn a_file_without_room_for_notes_has_none() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let memory = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("made");
    ftruncate(&memory, layout::NOTES_AT + 256 * 8).expect("long enough");
    fcntl_add_seals(&memory, SealFlags::GROW).expect("sealed");
    let locks = Locks::open(&memory).expect("opened");
    let notes = LastWill::default();
    let told = || {
        let mut told = Vec::new();
        last_will::left(&locks, 0..0, |_, notes| told.extend(notes)).map(|()| told)
    };
    notes.keep(&locks, 5, 7, (&note(7), 7));
    // The notes that the numbers announce are not there.
    locks.write(&[0xff; 256 * 8], layout::NOTES_AT).expect("written");
    assert_eq!(told().expect("numbers"), [[0; NOTE_BYTES]; 0]);
    ftruncate(&memory, layout::NOTES_AT).expect("shorter");
    notes.keep(&locks, 5, 8, (&note(8), 8));
    assert_eq!(told().expect("records alone"), [[0; NOTE_BYTES]; 0]);
    locks.take(5).expect("free");
}

/// A note of a process that lives is found by its mark, as long as it is there.
#[test]
fn a_mark_leads_to_the_last_note_that_has_it() {
    let here = loopback();
    let [one, two, three] = [(); 3].map(|()| lease(&[here], 1).expect("a slot"));
    let noted = |it: &Slots, mark, byte| it.noted(here, mark, |found| *found == note(byte));
    let keep = |it: &Slots, key, byte, mark| it.note(here, key, (&note(byte), mark));
    keep(&two, 1, 1, 5);
    keep(&two, 2, 2, 6);
    for it in [&one, &two, &three] {
        assert_eq!([5, 6].map(|mark| noted(it, mark, mark as u8 - 4)), [Some(two.first()); 2]);
        // Of no process, and without the note.
        assert_eq!((noted(it, 7, 1), noted(it, 5, 3)), (None, None));
    }
    // Another process's note has the same mark; its number may be any.
    keep(&three, 1, 3, 5 + (1 << 40));
    assert_eq!([1, 3].map(|byte| noted(&one, 5, byte)), [None, Some(three.first())]);
    three.drop_note(here, 1);
    assert_eq!(noted(&one, 5, 3), None);
    keep(&three, 1, 3, 5);
    drop(three);
    assert_eq!(noted(&one, 5, 3), None, "its neighbours end what it left");
    assert_eq!(noted(&one, 6, 2), Some(two.first()));
    one.unmark(here, 6);
    assert_eq!(noted(&one, 6, 2), Some(two.first()), "it is another's");
    two.unmark(here, 6);
    assert_eq!(noted(&one, 6, 2), None);
}
