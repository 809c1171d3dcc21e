//! Every order of the steps of a process that writes a page of counters, and of one that reads it.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use rocinante_models::sequence::{consistent, under};

/// A reader finds words of one moment, or none, and never those of an earlier moment.
#[test]
fn words_under_a_sequence_number_are_of_one_moment() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.check(|| {
        let page: Arc<[AtomicU64; 3]> = Arc::default();
        let written = page.clone();
        let writing = thread::spawn(move || {
            let [sequence, words @ ..] = &*written;
            for moment in 1..=2 {
                let write = || words.iter().for_each(|word| word.store(moment, Ordering::Relaxed));
                under(sequence, write);
            }
        });
        let [sequence, words @ ..] = &*page;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let read =
            || consistent(|| Some(load(sequence)), || Some([load(&words[0]), load(&words[1])]));
        let mut before = 0;
        for [first, second] in [read(), read()].into_iter().flatten() {
            assert!(first == second && before <= first, "{before}, {first}, {second}");
            before = first;
        }
        writing.join().unwrap();
        assert_eq!(read(), Some([2, 2]));
    });
}
