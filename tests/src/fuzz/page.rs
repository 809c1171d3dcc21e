//! Pages of counters, in which a program writes any word at any time.
//!
//! A reading is within its bounds. In a fresh page all is read that the program publishes in the
//! proper way.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rocinante_netdev::handed::page::{
    BYTES, COUNTERS, Head, OBJECTS, Page, QueuePair, ROWS_MAX, SERVICES, SHARDS_MAX, STATES,
    hand_over, make, queue_pairs, read, receive,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::Input;

/// Values that something might take for a size, an index, or a sequence number.
const VALUES: [u64; 8] = [0, 1, 2, 3, 64, 65, 4096, u64::MAX];
/// The head, two sections and eight rows, where most words have a meaning.
const NEAR: [(u64, u64); 3] = [(0, 1024), (1024, 2048), (33_792, 34_304)];

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let shards = [1, 2, SHARDS_MAX][usize::from(input.u8()) % 3];
    let (page, file) = pair();
    let (device, backend) = ("eth0".to_owned(), "packet".to_owned());
    let head = Head { device, backend, why: "eth0 is a veth".into(), shards };
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => {
                let (from, to) = input.of(&NEAR);
                let at = from + u64::from(input.u16()) % (to - from);
                write(&file, at, input.of(&VALUES));
            }
            1 => write(&file, u64::from(input.u32()) % (BYTES as u64 - 8), input.u64()),
            2 => publish(&page, &head, usize::from(input.u8()) % shards, input.u64()),
            _ => check(&file),
        }
    }
    check(&file);
    // The program begins anew in a fresh page.
    let (page, file) = pair();
    (0..shards).for_each(|shard| publish(&page, &head, shard, shard as u64));
    let all = read(&file).expect("published");
    assert_eq!((all.head, queue_pairs(&file).len()), (head, shards));
    assert_eq!(all.counters.0[0], (0..shards as u64).sum::<u64>());
}

fn write(file: &File, at: u64, value: u64) {
    file.write_all_at(&value.to_ne_bytes(), at).expect("it is there");
}

fn publish(page: &Page, head: &Head, shard: usize, count: u64) {
    page.publish(head, shard, |section| {
        section.objects([shard; OBJECTS.len()]);
        section.counters([count; COUNTERS.len()]);
        let qp = QueuePair {
            numbers: [shard as u32, 5],
            state: 3,
            service: 0,
            peer: Some(IpAddr::from([10, 9, 0, 1])),
            sent: [count; 2],
            received: [count; 2],
            repeated: 1,
            not_ready: 2,
            requests: [3, 4],
            held: [5, 6],
        };
        section.row(0, Some(&qp));
        section.rows_end(1);
    });
}

fn check(file: &File) {
    if let Some(reading) = read(file) {
        let Head { device, backend, why, shards } = reading.head;
        assert!((1..=SHARDS_MAX).contains(&shards));
        for (text, most) in [(device, 64), (backend, 16), (why, 512)] {
            assert!(text.chars().count() <= most && !text.contains(char::is_control), "{text:?}");
        }
    }
    let all = queue_pairs(file);
    assert!(all.len() <= ROWS_MAX);
    for qp in all {
        assert!(usize::from(qp.state) < STATES.len() && usize::from(qp.service) < SERVICES.len());
        assert!(qp.numbers.into_iter().all(|number| number < 1 << 24));
    }
}

/// A page as a program has it and as an agent has it.
fn pair() -> (Page, File) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let ends: (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, kind, flags, None).expect("a pair");
    let made = make().expect("a page");
    hand_over(&ends.0, made.as_fd(), None).expect("sent");
    (receive(&ends.1).expect("a page").0, made.into())
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let write = |region: u8, at: u16, value: u8| {
        [[0, region].as_slice(), &at.to_le_bytes(), &[value]].concat()
    };
    let published = |shard: u8| [[2, shard].as_slice(), &9_u64.to_le_bytes()].concat();
    let far = [[1].as_slice(), &200_000_u32.to_le_bytes(), &7_u64.to_le_bytes()].concat();
    let (look, two) = (vec![3], vec![1]);
    vec![
        [two.clone(), published(0), published(1), look.clone()].concat(),
        // Odd for ever, a wrong version, too many shards, rows and counters.
        [vec![0], published(0), write(1, 0, 1), look.clone(), published(0), look.clone()].concat(),
        [vec![0], published(0), write(0, 0, 2), look.clone()].concat(),
        [two.clone(), published(1), write(0, 16, 7), look.clone(), write(0, 16, 5)].concat(),
        [vec![2], published(63), write(1, 8, 7), write(0, 24, 0), look.clone()].concat(),
        [two, published(0), write(2, 0, 7), far, look].concat(),
    ]
}
