use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::testing::sides::ip;

fn pair() -> [OwnedFd; 2] {
    let flags = SocketFlags::CLOEXEC;
    let (one, other) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
    [one, other]
}

/// A page as a program and the agent have it.
fn page() -> (Page, File) {
    let made = make().expect("a page");
    (Page::of_fd(made.try_clone().expect("a copy"), BYTES).expect("it is one"), made.into())
}

fn head(shards: usize) -> Head {
    let backend = "packet".into();
    Head { device: "eth0".into(), backend, why: "eth0 is a veth".into(), shards }
}

fn queue_pair(number: u32) -> QueuePair {
    let many = u64::from(number) << 40;
    QueuePair {
        numbers: [number, 0xFF_FFFF - number],
        state: (number % 7) as u8,
        service: (number % 3) as u8,
        peer: [None, Some(ip("10.9.0.1")), Some(ip("fd09::1"))][(number % 3) as usize],
        sent: [many + 1, many + 2],
        received: [many + 3, many + 4],
        repeated: number + 5,
        not_ready: u32::MAX - number,
        requests: [number + 6, u32::MAX - 1 - number],
        held: [number + 7, u32::MAX - 2 - number],
    }
}

#[test]
fn what_each_shard_publishes_is_read() {
    for shards in [1, 2, SHARDS_MAX] {
        let ((page, file), head) = (page(), head(shards));
        assert_eq!((read(&file), queue_pairs(&file)), (None, vec![]), "nothing is published");
        assert!(!is_begun(&file));
        let mut published = Vec::new();
        for shard in 0..shards {
            page.publish(&head, shard, |section| {
                assert_eq!(section.rows(), ROWS_MAX / shards);
                section.objects([1, 2, 3, 4, shard]);
                section.counters((0..COUNTERS.len() as u64).map(|nth| nth * 1000 + shard as u64));
                for (row, number) in [0, section.rows() - 1].into_iter().zip(0..) {
                    published.push(queue_pair(shard as u32 * 100 + number));
                    section.row(row, published.last());
                }
                section.rows_end(section.rows());
            });
        }
        let read = read(&file).expect("all is published");
        assert_eq!(read.head, head);
        let sum = (0..shards as u64).sum::<u64>();
        let all = shards as u64;
        assert_eq!(read.objects, [all, 2 * all, 3 * all, 4 * all, sum]);
        let counted = |(nth, count): (u64, &u64)| *count == nth * 1000 * all + sum;
        assert!((0..).zip(&read.counters.0).all(counted), "{:?}", read.counters);
        assert_eq!(queue_pairs(&file), published);
        // A queue pair goes, and another one comes in the place of the last.
        page.publish(&head, shards - 1, |section| {
            section.row(0, None);
            section.row(section.rows() - 1, Some(&queue_pair(7)));
        });
        published.truncate(published.len() - 2);
        published.push(queue_pair(7));
        assert_eq!(queue_pairs(&file), published);
    }
}

#[test]
fn a_page_is_asked_for_and_handed_over() {
    let [program, agent] = pair();
    ask(&program, 77).expect("sent");
    let asked = asked(&agent).expect("asked");
    assert_eq!((asked.key, asked.ledger), (77, true));
    assert_eq!(receive(&program).expect_err("no answer").kind(), io::ErrorKind::WouldBlock);
    let made = make().expect("a page");
    hand_over(&agent, made.as_fd(), None).expect("sent");
    let (page, seat) = receive(&program).expect("a page");
    assert!(seat.is_none());
    let file = File::from(made);
    page.publish(&head(1), 0, |section| section.objects([9; 5]));
    assert_eq!(read(&file).expect("published").objects, [9; 5]);
    file.set_len(0).expect_err("its size is sealed");
    file.set_len(BYTES as u64 + 1).expect_err("its size is sealed");
    drop(agent);
    assert_eq!(receive(&program).expect_err("the end").kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_ledger_comes_with_a_page_for_a_program_that_asks_for_it() {
    let made = make().expect("a page");
    let (file, ledger) = Ledger::make(&Usage::default()).expect("a ledger");
    let handed = |slot| {
        let [program, agent] = pair();
        hand_over(&agent, made.as_fd(), Some((file.as_fd(), slot))).expect("sent");
        receive(&program)
    };
    let account = Account::default();
    account.charge(&[1, 2, 3]).expect("no limit");
    account.sit(handed(PAGES_MAX - 1).expect("both").1.expect("a seat"));
    assert_eq!(ledger.usage().current, [1, 2, 3]);
    assert_eq!(handed(PAGES_MAX).expect_err("no slot").kind(), io::ErrorKind::InvalidData);
    file.try_clone().map(File::from).expect("a copy").set_len(0).expect_err("it is sealed");
    // A program of before says nothing of a ledger, and has room for one descriptor.
    let [program, agent] = pair();
    rights::send::<SPACE>(&program, b"{\"version\":1,\"key\":7}", &[]).expect("sent");
    assert!(!asked(&agent).expect("a request").ledger);
    // An answer that has the one or the other alone, or anything else in its place.
    let small = memory_file(c"test", 4096).expect("a file");
    let said = format!("{{\"version\":1,\"bytes\":{BYTES},\"ledger\":{{\"bytes\":");
    for (end, fds) in [
        (format!("{},\"slot\":0}}}}", ledger::BYTES), vec![made.as_fd()]),
        (format!("{},\"slot\":0}}}}", ledger::BYTES), vec![made.as_fd(), small.as_fd()]),
        (format!("{},\"slot\":0}}}}", usize::MAX), vec![made.as_fd(), file.as_fd()]),
        ("0,\"slot\":0}}".into(), vec![made.as_fd(), file.as_fd()]),
    ] {
        let [program, agent] = pair();
        rights::send::<SPACE>(&agent, format!("{said}{end}").as_bytes(), &fds).expect("sent");
        assert_eq!(receive(&program).expect_err("none").kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn what_is_no_request_and_what_is_no_page_is_refused() {
    let [program, agent] = pair();
    let file = File::open("/proc/self/exe").expect("a file");
    let small = memory_file(c"test", 4096).expect("a file");
    let none: &[&[u8]] = &[b"", b"{", b"{\"version\":2,\"key\":1}", b"{\"version\":1}"];
    for message in none.iter().chain([&[b' '; MESSAGE_BYTES_MAX + 1][..]].iter()) {
        for fds in [vec![], vec![small.as_fd()]] {
            let [program, agent] = pair();
            rights::send::<SPACE>(&program, message, &fds).expect("sent");
            asked(&agent).expect_err("no request");
        }
    }
    // A message with a descriptor stays where it is.
    rights::send::<SPACE>(&program, b"{\"version\":1,\"key\":1}", &[small.as_fd()]).expect("sent");
    for _ in 0..2 {
        assert_eq!(asked(&agent).expect_err("with one").kind(), io::ErrorKind::InvalidData);
    }
    let answer = |bytes: usize| format!("{{\"version\":1,\"bytes\":{bytes}}}");
    for (bytes, fds) in [
        (BYTES, vec![]),
        (BYTES, vec![file.as_fd()]),
        (BYTES, vec![small.as_fd()]),
        (4096, vec![small.as_fd()]),
        (0, vec![small.as_fd()]),
        (usize::MAX, vec![small.as_fd()]),
    ] {
        rights::send::<SPACE>(&agent, answer(bytes).as_bytes(), &fds).expect("sent");
        receive(&program).expect_err("no page");
    }
    // One of a later release may be longer.
    let longer = memory_file(c"test", 2 * BYTES).expect("a file");
    rights::send::<SPACE>(&agent, answer(2 * BYTES).as_bytes(), &[longer.as_fd()]).expect("sent");
    receive(&program).expect("a page");
}

/// Each word of the head and of a section with values that no program of ours writes.
#[test]
fn a_hostile_page_is_read_within_bounds_or_not_at_all() {
    let ((page, file), head) = (page(), head(2));
    for shard in [0, 1] {
        page.publish(&head, shard, |section| {
            section.row(0, Some(&queue_pair(1)));
            section.rows_end(1);
        });
    }
    let words = (0..head::END).chain(SECTIONS_AT / 8..(SECTIONS_AT + 2 * SECTION_BYTES) / 8);
    for word in words.chain(ROWS_AT / 8..(ROWS_AT + ROW_BYTES) / 8) {
        let (at, mut old) = (word as u64 * 8, [0; 8]);
        file.read_exact_at(&mut old, at).expect("read");
        for value in [0, 1, 2, 3, 63, 64, 65, u64::MAX - 1, u64::MAX, 0xA5A5_A5A5_A5A5_A5A5, 10] {
            file.write_all_at(&value.to_ne_bytes(), at).expect("written");
            if let Some(read) = read(&file) {
                assert!((1..=SHARDS_MAX).contains(&read.head.shards));
                for text in [&read.head.device, &read.head.backend, &read.head.why] {
                    assert!(!text.chars().any(char::is_control), "{text:?}");
                    assert!(text.chars().count() <= 512);
                }
            }
            let all = queue_pairs(&file);
            assert!(all.len() <= ROWS_MAX);
            assert!(all.iter().all(|qp| usize::from(qp.state) < STATES.len()));
        }
        file.write_all_at(&old, at).expect("written");
    }
    assert_eq!(queue_pairs(&file).len(), 2, "all is as it was");
    // For ever odd.
    let sequence = SECTIONS_AT as u64;
    file.write_all_at(&7_u64.to_ne_bytes(), sequence).expect("written");
    assert_eq!((read(&file), queue_pairs(&file).len()), (None, 1));
    assert!(is_begun(&file));
    // The program's next turn repairs it, whatever it finds.
    for found in [7, u64::MAX, 0] {
        file.write_all_at(&u64::to_ne_bytes(found), sequence).expect("written");
        page.publish(&head, 0, |_| ());
        assert_eq!(queue_pairs(&file).len(), 2, "{found}");
    }
    // A page of another version is not read.
    file.write_all_at(&2_u64.to_ne_bytes(), 0).expect("written");
    assert_eq!((read(&file), queue_pairs(&file)), (None, vec![]));
}

#[test]
fn a_reader_gets_what_was_written_at_one_time() {
    if cfg!(miri) {
        return;
    }
    let (page, file) = page();
    let (head, done) = (head(1), AtomicBool::new(false));
    page.publish(&head, 0, |section| section.rows_end(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                round += 1;
                page.publish(&head, 0, |section| {
                    section.counters([round; COUNTERS.len()]);
                    let qp = QueuePair { sent: [round; 2], ..queue_pair(round as u32 % 1000) };
                    [0, 1].into_iter().for_each(|row| section.row(row, Some(&qp)));
                });
                std::thread::yield_now();
            }
        });
        let mut last = 0;
        for _ in 0..20_000 {
            let Some(read) = read(&file) else { continue };
            assert!(read.counters.0.iter().all(|count| *count == read.counters.0[0]), "{read:?}");
            assert!(read.counters.0[0] >= last);
            last = read.counters.0[0];
            if let [one, other] = queue_pairs(&file)[..] {
                assert_eq!(one, other);
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_child_of_fork_writes_nothing() {
    let (mut page, file) = page();
    page.publish(&head(1), 0, |section| section.objects([1; 5]));
    page.process ^= 1;
    page.publish(&head(1), 0, |_| panic!("it is another process's"));
    assert_eq!(read(&file).expect("published").objects, [1; 5]);
}

/// An agent of before makes a shorter page, and a program of before has fewer counters.
#[test]
fn a_page_of_another_release_is_read() {
    if cfg!(miri) {
        return;
    }
    let made = memory_file(c"test", BYTES_MIN).expect("a file");
    let page = Page::of_fd(made.try_clone().expect("a copy"), BYTES_MIN).expect("it is one");
    page.publish(&head(1), 0, |section| {
        section.counters([7; 30]);
        section.row(0, Some(&queue_pair(5)));
        section.rows_end(1);
    });
    let file = File::from(made);
    file.write_all_at(&30_u64.to_ne_bytes(), 8 * head::COUNTERS as u64).expect("written");
    let counters = read(&file).expect("published").counters.0;
    assert!(counters[..30].iter().all(|it| *it == 7) && counters[30..].iter().all(|it| *it == 0));
    assert_eq!(queue_pairs(&file), [QueuePair { requests: [0; 2], held: [0; 2], ..queue_pair(5) }]);
    let longer = memory_file(c"test", BYTES + 4096).expect("a file");
    Page::of_fd(longer, BYTES + 4096).expect("a later agent's");
    let shorter = memory_file(c"test", BYTES_MIN - 8).expect("a file");
    Page::of_fd(shorter, BYTES_MIN - 8).expect_err("no page");
}
