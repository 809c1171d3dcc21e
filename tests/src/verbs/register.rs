//! Registration of the program's own memory.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use rocinante::verbs::SendOp;
use rocinante::{Access, Mr, Pd, VerbsError, WcStatus};

use crate::harness::{Harness, On, Setup, assert_same, pattern, wr};

/// Words that other threads and the peer may change at any time.
fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Registers a part of `memory`. The callers keep `memory` alive longer than the region.
fn register(pd: &Pd, memory: &[AtomicU64], from: usize, len: usize, access: Access) -> Mr {
    assert!(from + len <= size_of_val(memory));
    let start = memory.as_ptr().cast::<u8>().cast_mut().wrapping_add(from);
    // SAFETY: the bytes are inside `memory`, which the callers drop after the region and use as
    // atomics only.
    unsafe { pd.register(start, len, access) }.expect("registered")
}

fn bytes(memory: &[AtomicU64]) -> Vec<u8> {
    memory.iter().flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes()).collect()
}

fn fill(memory: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in memory.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(chunk.try_into().unwrap()), Ordering::Release);
    }
}

/// Peers and the program see each other's changes of the same memory. The bytes around the region
/// never change, and no peer reaches the memory once the region is gone.
pub fn the_programs_own_memory_is_reached(on: On) {
    const WORDS: usize = 5000;
    /// Not at the start of a page or word, and not whole pages.
    const FROM: usize = 4096 + 3;
    const LEN: usize = 20_000;
    let memory = words(WORDS);
    let mine = words(WORDS);
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let target = register(&b.pd, &memory, FROM, LEN, Access::ALL);
    let source = register(&a.pd, &mine, 0, 8 * WORDS, Access::LOCAL_WRITE);
    assert_eq!((target.len(), target.address()), (LEN, memory.as_ptr() as u64 + FROM as u64));
    let (remote, rkey) = (target.address(), target.rkey());

    let before = pattern(8 * WORDS, 1);
    fill(&memory, &before);
    fill(&mine, &pattern(8 * WORDS, 2));
    let write = SendOp::Write { remote, rkey, imm: None };
    qp.post_send(&[wr(1, write, &[source.sge(7, LEN)])]).unwrap();
    a.succeed(1);
    let mut expected = before;
    expected[FROM..FROM + LEN].copy_from_slice(&pattern(8 * WORDS, 2)[7..7 + LEN]);
    assert_same(&bytes(&memory), &expected, "the program's memory after a WRITE");

    // A READ finds the program's store.
    let changed = pattern(8 * WORDS, 3);
    fill(&memory, &changed);
    qp.post_send(&[wr(2, SendOp::Read { remote, rkey }, &[source.sge(0, LEN)])]).unwrap();
    a.succeed(2);
    assert_same(&bytes(&mine)[..LEN], &changed[FROM..FROM + LEN], "a READ");

    // A second region over the same memory, with other rights, and an atomic on one of its words.
    let word = 1000;
    let counted =
        register(&b.pd, &memory, 8 * word, 8, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
    memory[word].store(41, Ordering::SeqCst);
    let (remote, rkey) = (counted.address(), counted.rkey());
    qp.post_send(&[wr(3, SendOp::FetchAdd { remote, rkey, add: 1 }, &[source.sge(0, 8)])]).unwrap();
    a.succeed(3);
    assert_eq!((mine[0].load(Ordering::SeqCst), memory[word].load(Ordering::SeqCst)), (41, 42));

    // The region is gone, though the memory is still there.
    drop(target);
    let left = bytes(&memory);
    qp.post_send(&[wr(4, write, &[source.sge(0, 64)])]).unwrap();
    a.complete(4, WcStatus::RemAccessErr);
    assert_same(&bytes(&memory), &left, "the program's memory");
    drop((counted, source));
}

/// Flags that contradict each other are refused.
pub fn what_contradicts_itself_is_not_registered(on: On) {
    let memory = words(8);
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let start = memory.as_ptr().cast::<u8>().cast_mut();
        // SAFETY: `memory` has these bytes, outlives each region made of them, and is not used
        // otherwise.
        let error = unsafe { a.pd.register(start, 64, access) }.unwrap_err();
        assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    }
}
