//! A cache of the kernel's answers for a moment: a program that makes thousands of connections per
//! second asks once.

use std::time::Instant;

use crate::tuning::routes::{FRESH, KEPT};

/// The latest answers.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    answers: Vec<(K, V, Instant)>,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { answers: Vec::new() }
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    /// The answer to a question, if it was asked a moment ago.
    pub(crate) fn get(&self, now: Instant, question: &K) -> Option<&V> {
        let fits = |(asked, _, at): &&(K, V, Instant)| {
            asked == question && now.saturating_duration_since(*at) < FRESH
        };
        self.answers.iter().find(fits).map(|(_, answer, _)| answer)
    }

    /// Stores an answer; if the cache is full it replaces the oldest.
    pub(crate) fn put(&mut self, now: Instant, question: K, answer: V) {
        self.answers.retain(|(asked, _, at)| {
            *asked != question && now.saturating_duration_since(*at) < FRESH
        });
        if self.answers.len() >= KEPT {
            self.answers.remove(0);
        }
        self.answers.push((question, answer, now));
    }

    /// Keeps the answers from expiring, in tests of any duration.
    #[cfg(test)]
    pub(crate) fn keep(&mut self) {
        self.answers.iter_mut().for_each(|(.., at)| *at += 36_000 * FRESH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_hold_for_a_moment_and_few_are_kept() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        recent.put(start, 1, "one");
        assert_eq!(recent.get(start + FRESH / 2, &1), Some(&"one"));
        assert_eq!(recent.get(start + FRESH, &1), None);
        recent.put(start, 1, "again");
        assert_eq!((recent.get(start, &1), recent.answers.len()), (Some(&"again"), 1));
        for question in 2..100 {
            recent.put(start, question, "another");
        }
        assert_eq!((recent.answers.len(), recent.get(start, &1)), (KEPT, None));
    }
}
