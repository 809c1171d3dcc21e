//! A guardian's work for processes that have gone.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use super::*;
use crate::sharing::guardian::{Errand, Guardian, Left};
use crate::sharing::lifeline::{Registration, register_with_guardian_at};
use crate::sharing::rendezvous::SPACE;
use crate::testing::testns::limit_descriptors;
use crate::tuning::shared::{PLACES_MAX, WARDS_MAX};

const PATIENCE: Duration = Duration::from_secs(20);

/// A guardian of this process, which does not end meanwhile, and its name.
fn guardian() -> (Guardian, String) {
    let (socket, name) = Guardian::socket().expect("a socket");
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    (Guardian::new(socket, own), name)
}

/// A process that has sent its slots to the guardian, and its connection.
pub(super) fn ward(name: &str, addresses: &[IpAddr], count: usize) -> (Process, OwnedFd) {
    let ward = process(addresses, count);
    let Slots { shared, first, count, .. } = &*ward.slots;
    let registration = Registration::of(shared, *first, *count);
    let connection = register_with_guardian_at(name, &registration).expect("a guardian");
    (ward, connection)
}

pub(super) fn left(guardian: &mut Guardian) -> Vec<Left> {
    match guardian.errand().expect("no error") {
        Some(Errand::Settle(left)) => left,
        other => panic!("{other:?}"),
    }
}

/// The next errand. `kept` goes then, or when there is none in time: that makes one.
fn errand_or(guardian: &mut Guardian, kept: impl Sized) -> Option<Errand> {
    std::thread::scope(|scope| {
        let errand = scope.spawn(|| guardian.errand().expect("no error"));
        let end = Instant::now() + PATIENCE;
        while !errand.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(kept);
        errand.join().expect("no panic")
    })
}

/// The next process: it takes the notes left, and is the only one.
fn take_all(here: &[IpAddr]) -> usize {
    let mut next = process(here, 1);
    follow(&mut [&mut next], here);
    let end = Instant::now() + PATIENCE;
    let mut found = Vec::new();
    while found.is_empty() && Instant::now() < end {
        found = next.slots.left();
        std::thread::sleep(Duration::from_millis(1));
    }
    left_notes::forget(&next);
    found.len()
}

fn note(ward: &Process, here: IpAddr, key: u32) {
    ward.slots.note(here, key, (&[key as u8; NOTE_BYTES], 0));
}

#[test]
fn the_last_processes_of_an_address_leave_it_to_their_guardians() {
    let here = [loopback(), loopback()];
    let (mut one, one_name) = guardian();
    let (mut two, two_name) = guardian();
    // A process with two shards, and one of another program.
    let (first, first_told) = ward(&one_name, &here, 2);
    let (second, second_told) = ward(&two_name, &here, 1);
    note(&first, here[0], 1);
    note(&first, here[1], 2);
    note(&second, here[0], 3);
    drop((first, first_told));
    let of_first = left(&mut one);
    assert_eq!(of_first.iter().map(|left| left.address).collect::<Vec<_>>(), here);
    assert!(of_first.iter().all(Left::is_owed));
    // While a neighbour lives it is that one's to do.
    let never = || panic!("a neighbour lives");
    of_first[0].settle(Instant::now() + Duration::from_millis(50), never);
    assert!(of_first[0].is_owed());
    drop((second, second_told));
    let of_second = left(&mut two);
    let (times, found) = (AtomicU32::new(0), Mutex::new(Vec::new()));
    let end = Instant::now() + PATIENCE;
    // Both at once: one of them opens each address, as any process does.
    std::thread::scope(|scope| {
        for left in of_first.iter().chain(&of_second) {
            scope.spawn(|| {
                left.settle(end, || {
                    times.fetch_add(1, Ordering::Relaxed);
                    found.lock().expect("whole").push((left.address, take_all(&[left.address])));
                });
            });
        }
    });
    let mut found = found.into_inner().expect("whole");
    found.sort_unstable();
    assert_eq!((found, times.into_inner()), (vec![(here[0], 2), (here[1], 1)], 2));
    assert!(!of_first.iter().chain(&of_second).any(Left::is_owed));
    // The address is free once they have let go of it.
    drop((of_first, of_second));
    assert_eq!(process(&here, 1).slots.first(), 0, "a new group");
}

#[test]
fn what_a_process_has_ended_itself_is_not_owed() {
    let here = loopback();
    let (mut one, name) = guardian();
    let (first, told) = ward(&name, &[here], 1);
    note(&first, here, 1);
    first.slots.drop_note(here, 1);
    drop((first, told));
    let left = left(&mut one);
    assert!(!left[0].is_owed());
    left[0].settle(Instant::now() + PATIENCE, || panic!("nothing is owed"));
}

/// Any process of the user can connect, and say anything.
#[test]
fn a_guardian_takes_no_nonsense_and_goes_on() {
    let here = loopback();
    let (mut one, name) = guardian();
    let (first, told) = ward(&name, &[here], 1);
    let [shared] = &first.slots.shared[..] else { panic!("one address") };
    let descriptors = shared.objects.descriptors();
    let connect =
        || register_with_guardian_at(&name, &Registration::of(&[], 0, 1)).expect("a guardian");
    let say = |message: &[u8], whole: bool| {
        let stranger = connect();
        let descriptors = if whole { &descriptors[..] } else { &descriptors[1..] };
        crate::kernel::rights::send::<SPACE>(&stranger, message, descriptors).expect("sent");
    };
    say(b"", true);
    say(&[0], true);
    say(b"\0\0not an address", true);
    say(b"\0\x00127.0.0.1", false);
    say(&[&[255, 1], &b"127.0.0.1"[..]].concat(), true);
    drop(connect());
    for _ in 0..6 {
        assert_eq!(left(&mut one).len(), 0);
    }
    note(&first, here, 1);
    drop((first, told));
    assert!(left(&mut one)[0].is_owed());
}

#[test]
fn a_guardian_says_what_it_has_no_room_for() {
    let here = loopback();
    let (mut one, name) = guardian();
    let (first, told) = ward(&name, &[here], 1);
    let [shared] = &first.slots.shared[..] else { panic!("one address") };
    let message = [&[0, 0], shared.name.as_bytes()].concat();
    for _ in 0..PLACES_MAX {
        let descriptors = shared.objects.descriptors();
        crate::kernel::rights::send::<SPACE>(&told, &message, &descriptors).expect("sent");
    }
    let heard = errand_or(&mut one, (first, told));
    assert!(matches!(heard, Some(Errand::TooMany)), "{heard:?}");
    assert_eq!(left(&mut one).len(), PLACES_MAX);
    // The connections say nothing.
    let connect =
        || register_with_guardian_at(&name, &Registration::of(&[], 0, 1)).expect("a guardian");
    let (kept, others) = (connect(), [(); WARDS_MAX].map(|()| connect()));
    let heard = errand_or(&mut one, kept);
    assert!(matches!(heard, Some(Errand::TooMany)), "{heard:?}");
    // Those that it has kept, and no other.
    drop(others);
    (0..WARDS_MAX).for_each(|_| assert_eq!(left(&mut one).len(), 0));
    drop(connect());
    assert_eq!(left(&mut one).len(), 0);
}

#[test]
fn a_guardian_ends_with_the_program_and_its_last_process() {
    let here = loopback();
    let mut program = std::process::Command::new("cat");
    let mut program = program.stdin(std::process::Stdio::piped()).spawn().expect("a program");
    let pid = rustix::process::Pid::from_child(&program);
    let (socket, name) = Guardian::socket().expect("a socket");
    let mut one = Guardian::new(socket, pidfd_open(pid, PidfdFlags::empty()).expect("a process"));
    let (first, told) = ward(&name, &[here], 1);
    drop(program.stdin.take());
    program.wait().expect("it ends");
    let (second, second_told) = ward(&name, &[here], 1);
    drop((first, told));
    assert_eq!(left(&mut one).len(), 1, "a process that outlives the program");
    drop((second, second_told));
    assert_eq!(left(&mut one).len(), 1);
    assert!(one.errand().expect("no error").is_none());
}

/// A separate process: it counts its own descriptors.
#[test]
fn a_guardian_without_descriptors_waits_and_loses_nothing() {
    let output = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "sharing::tests::guardians::without_descriptors", "--nocapture"])
        .env(WITHOUT, "1")
        .output()
        .expect("it starts");
    let text = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
    assert!(output.status.success() && text[0].contains("nothing was lost"), "{}", text.concat());
}

const WITHOUT: &str = "ROCINANTE_TEST_WITHOUT_DESCRIPTORS";

/// The separate process.
#[test]
fn without_descriptors() {
    if std::env::var_os(WITHOUT).is_none() {
        return;
    }
    let here = [loopback(), loopback()];
    let few = limit_descriptors(100);
    let (mut one, name) = guardian();
    let limit = getrlimit(Resource::Nofile);
    assert_eq!(limit.current, limit.maximum, "it takes all that it may have");
    // One that says nothing yet, and one whose messages wait with their descriptors.
    let silent =
        register_with_guardian_at(&name, &Registration::of(&[], 0, 1)).expect("a guardian");
    let (first, told) = ward(&name, &here, 1);
    note(&first, here[0], 1);
    let used = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        1_000_000_000 * time.tv_sec + time.tv_nsec
    };
    std::thread::scope(|scope| {
        // None for a connection; two for the connections and none for what comes with them.
        let mut limit = limit_descriptors(0);
        let before = used();
        let lefts = scope.spawn(|| [left(&mut one), left(&mut one)]);
        for room in [2, 0] {
            std::thread::sleep(Duration::from_millis(300));
            drop(limit);
            limit = limit_descriptors(room);
        }
        assert!((0..100_000_000).contains(&(used() - before)), "it spins");
        // The end of one that has said nothing is noticed meanwhile, and the rest in the end.
        drop(silent);
        drop((first, told));
        std::thread::sleep(Duration::from_millis(100));
        drop(limit);
        let [none, all] = lefts.join().expect("no panic");
        assert_eq!((none.len(), all.len()), (0, 2));
        assert!(all[0].is_owed());
    });
    drop(few);
    println!("nothing was lost");
}
