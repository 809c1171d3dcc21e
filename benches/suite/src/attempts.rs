//! Remembers which subjects never work, so that the benchmark stops trying them.

use std::collections::BTreeMap;

/// One thing that a benchmark tries to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// A peer, or one of our backends, under its name in the rows.
    Netdev(&'static str),
    /// The baseline of a backend.
    Baseline(&'static str),
    /// The port of a backend, with no engine behind it.
    Port(&'static str),
}

/// For each subject: whether it ever worked, and how often it failed.
#[derive(Debug, Default)]
pub(crate) struct Attempts(BTreeMap<Subject, Tried>);

#[derive(Debug, Clone, Copy, Default)]
struct Tried {
    worked: bool,
    failures: u32,
}

/// After this number of failures, a subject that never worked is not tried again. One failure may
/// be an accident.
const FAILURES_MAX: u32 = 2;

impl Attempts {
    /// Remembers one attempt and its result.
    pub(crate) fn add(&mut self, subject: Subject, worked: bool) {
        let tried = self.0.entry(subject).or_default();
        tried.worked |= worked;
        tried.failures += u32::from(!worked);
    }

    /// Whether another attempt is pointless.
    pub(crate) fn in_vain(&self, subject: Subject) -> bool {
        self.0.get(&subject).is_some_and(|tried| !tried.worked && tried.failures >= FAILURES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_worked_is_given_up_and_what_worked_once_is_not() {
        let mut attempts = Attempts::default();
        let (iperf3, packet) = (Subject::Netdev("iperf3"), Subject::Baseline("packet"));
        assert!(!attempts.in_vain(iperf3));
        attempts.add(iperf3, false);
        assert!(!attempts.in_vain(iperf3), "once");
        attempts.add(iperf3, true);
        for _ in 0..10 {
            attempts.add(iperf3, false);
            attempts.add(packet, false);
        }
        assert!(!attempts.in_vain(iperf3), "it has worked");
        assert!(attempts.in_vain(packet));
        assert!(!attempts.in_vain(Subject::Netdev("packet")), "only its baseline fails");
        assert!(!attempts.in_vain(Subject::Port("packet")));
    }
}
