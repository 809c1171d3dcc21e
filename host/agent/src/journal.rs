//! The log about containers: a few lines of each in a minute, and the sum of the rest.
//!
//! A container decides how often something happens to it, never how much is written about it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocinante_netdev::handed::{Code, Refused};
use tracing::Level;
use tracing::level_filters::LevelFilter;

use crate::called::Called;
use crate::control::Requests;
use crate::host::Reason;
use crate::limits::Share;
use crate::log::short;
use crate::tally::{End, Named, Tally};
use crate::waits::Waits;

/// Between two sums.
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
/// Lines about a container in a minute, beside its two sums: of frames and of the rest.
const LINES_MAX: usize = 8;
/// Containers of which something is remembered.
const REMEMBERED_MAX: usize = 4096;

/// Frames of a container that were dropped, by reason.
pub(crate) type Drops = [u64; Reason::ALL.len()];

/// The lines written about each container, and counts of those that were not.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    records: HashMap<Share, Record>,
    /// Of all containers since the agent started.
    requests: Tally,
}

#[derive(Debug, Default)]
struct Record {
    /// The host's end, once it is known; of several that by which it asked last.
    name: Option<String>,
    /// When the last lines were written.
    lines: VecDeque<Instant>,
    /// When each kind of refusal was last written.
    refused: HashMap<Code, Instant>,
    held: Held,
    /// Frames since the last sum.
    forged: Drops,
    requests: Tally,
}

/// Lines that were not written.
#[derive(Debug, Default)]
struct Held {
    refusals: HashMap<Code, u64>,
    others: u64,
}

impl Journal {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request.
    pub(crate) fn count(&self, share: Share, end: End) {
        let mut inner = self.lock();
        inner.requests.add(end);
        if let Some(record) = inner.record(share) {
            record.requests.add(end);
        }
    }

    /// The requests of a container, or of all.
    pub(crate) fn requests(&self, of: Option<Share>) -> Requests {
        let inner = self.lock();
        match of {
            Some(share) => inner.records.get(&key(share)).map(|record| record.requests.requests()),
            None => Some(inner.requests.requests()),
        }
        .unwrap_or_default()
    }

    /// How long requests waited.
    pub(crate) fn waits(&self) -> Waits {
        self.lock().requests.waits().clone()
    }

    /// Forgets a container.
    pub(crate) fn forget(&self, share: Share) {
        self.lock().records.remove(&key(share));
    }

    /// The name by which the log knows a container: that of its host's end, else that of its
    /// network namespace in `/proc`.
    pub(crate) fn name(&self, share: Share) -> String {
        let known = self.lock().records.get(&key(share)).and_then(|record| record.name.clone());
        known.unwrap_or_else(|| unnamed(share))
    }

    /// Notes the host's end by which a container asked last.
    pub(crate) fn names(&self, share: Share, name: &str) {
        if let Some(record) = self.lock().record(share) {
            record.name = Some(name.to_owned());
        }
    }

    /// Notes an engine's name for a container whose host's end is not known.
    pub(crate) fn calls(&self, share: Share, called: &Called) {
        let name = format!("{} ({called})", unnamed(share));
        if let Some(record) = self.lock().record(share) {
            record.name.get_or_insert(name);
        }
    }

    /// Whether a line about a container may be written now. If not it counts for the sum.
    pub(crate) fn permits(&self, share: Share, level: Level, now: Instant) -> bool {
        if level > LevelFilter::current() {
            return false;
        }
        let mut inner = self.lock();
        let Some(record) = inner.record(share) else { return false };
        let permits = record.permits(now);
        record.held.others += u64::from(!permits);
        permits
    }

    /// Counts a refusal, and writes it unless the last one like it was a minute ago or less.
    pub(crate) fn refused(&self, share: Share, pid: Option<i32>, refused: &Refused, now: Instant) {
        let Refused { code, reason, .. } = refused;
        self.count(share, End::Refused(*code));
        {
            let mut inner = self.lock();
            let Some(record) = inner.record(share) else { return };
            let is_new = record.refused.get(code).is_none_or(|last| is_over(*last, now));
            if !is_new || Level::WARN > LevelFilter::current() || !record.permits(now) {
                *record.held.refusals.entry(*code).or_default() += 1;
                return;
            }
            record.refused.insert(*code, now);
        }
        let (container, reason) = (self.name(share), short(reason));
        tracing::warn!(container, pid, code = %Named(*code), reason, "refused");
    }

    /// Writes that something cannot be done for the container with this network namespace.
    pub(crate) fn failed(&self, namespace: u64, container: &str, what: &str, why: &io::Error) {
        if self.permits(Share::Container(namespace), Level::ERROR, Instant::now()) {
            tracing::error!(container, "{what}: {why}");
        }
    }

    /// Counts frames of a container that were dropped.
    pub(crate) fn forged(&self, share: Share, drops: &Drops) {
        if let Some(record) = self.lock().record(share) {
            record.forged.iter_mut().zip(drops).for_each(|(sum, more)| *sum += more);
        }
    }

    /// Writes the sums of all containers, and forgets those that are not `known` and silent. May be
    /// called once in a [`MINUTE`].
    pub(crate) fn sum(&self, known: &BTreeSet<u64>, now: Instant) {
        let mut sums = Vec::new();
        self.lock().records.retain(|share, record| {
            record.lines.retain(|line| !is_over(*line, now));
            let is_known =
                matches!(share, Share::Container(namespace) if known.contains(namespace));
            let sum = (std::mem::take(&mut record.held), std::mem::take(&mut record.forged));
            let is_silent = sum.0.is_empty() && sum.1 == Drops::default();
            if !is_silent {
                sums.push((*share, record.name.clone(), sum));
            }
            is_known || !is_silent || !record.lines.is_empty()
        });
        for (share, name, (held, drops)) in sums {
            let container = name.unwrap_or_else(|| self.name(share));
            if drops != Drops::default() {
                let drops = Counts(Reason::ALL.iter().zip(&drops));
                tracing::warn!(container, "dropped frames in the last minute: {drops}");
            }
            let Held { refusals, others } = held;
            if refusals.is_empty() && others > 0 {
                tracing::info!(container, "left out {others} lines of the last minute");
            } else if !refusals.is_empty() {
                let mut refusals: Vec<_> =
                    refusals.into_iter().map(|(code, count)| (Named(code), count)).collect();
                refusals.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
                let all: u64 = refusals.iter().map(|(_, count)| count).sum();
                let by = Counts(refusals.iter().map(|(code, count)| (code, count)));
                tracing::warn!(
                    container,
                    others,
                    "refused {all} requests more in the last minute: {by}"
                );
            }
        }
    }
}

impl Inner {
    fn record(&mut self, share: Share) -> Option<&mut Record> {
        let (share, records) = (key(share), &mut self.records);
        if records.len() >= REMEMBERED_MAX && !records.contains_key(&share) {
            return None;
        }
        Some(records.entry(share).or_default())
    }
}

impl Record {
    fn permits(&mut self, now: Instant) -> bool {
        self.lines.retain(|line| !is_over(*line, now));
        let permits = self.lines.len() < LINES_MAX;
        if permits {
            self.lines.push_back(now);
        }
        permits
    }
}

impl Held {
    fn is_empty(&self) -> bool {
        self.refusals.is_empty() && self.others == 0
    }
}

fn unnamed(share: Share) -> String {
    match share {
        Share::Stranger => "unknown".into(),
        Share::Container(namespace) => format!("net:[{namespace}]"),
        Share::User(_) => "host".into(),
    }
}

/// Programs outside of containers are one: a program can have many users.
fn key(share: Share) -> Share {
    if let Share::User(_) = share { Share::User(0) } else { share }
}

fn is_over(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= MINUTE
}

/// Those of some counts that are not zero.
struct Counts<I>(I);

impl<'a, I, K> fmt::Display for Counts<I>
where
    I: Iterator<Item = (K, &'a u64)> + Clone,
    K: fmt::Display,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.0.clone().filter(|(_, count)| **count > 0);
        for (place, (kind, count)) in counts.enumerate() {
            write!(f, "{}{kind} {count}", if place == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Something of the agent's own that may happen again and again is written once a minute.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Option<Instant>);

impl Seldom {
    /// Whether to write it now.
    pub(crate) fn permits(&mut self, now: Instant) -> bool {
        let permits = self.0.is_none_or(|last| is_over(last, now));
        if permits {
            self.0 = Some(now);
        }
        permits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::written;

    const ONE: Share = Share::Container(1);

    fn refused(code: Code) -> Refused {
        Refused::new(code, "a reason", "")
    }

    /// The most lines of any sixty seconds, of ten minutes in which something happens at each step.
    #[test]
    fn no_minute_has_more_than_ten_lines_of_a_container() {
        let (journal, start) = (Journal::default(), Instant::now());
        let mut at = Vec::new();
        let known = BTreeSet::from([1]);
        for step in 0..6_000_u32 {
            let now = start + Duration::from_millis(100) * step;
            let said = written(true, || {
                let code = [Code::Busy, Code::Forbidden, Code::Failed][step as usize % 3];
                journal.refused(ONE, Some(1), &refused(code), now);
                if journal.permits(ONE, Level::INFO, now) {
                    tracing::info!("something else");
                }
                if step % 600 == 599 {
                    journal.forged(ONE, &[1; Reason::ALL.len()]);
                    journal.sum(&known, now);
                }
            });
            at.extend(said.lines().map(|_| now));
        }
        let in_minute =
            |from: &Instant| at.iter().filter(|it| *it >= from && !is_over(*from, **it)).count();
        let most = at.iter().map(in_minute).max();
        assert_eq!(most, Some(LINES_MAX + 2));
        assert!(at.len() > 80, "it is heard in each minute: {}", at.len());
    }

    #[test]
    fn a_sum_says_what_no_line_said() {
        let (journal, now) = (Journal::default(), Instant::now());
        let known = BTreeSet::from([1]);
        let said = written(true, || {
            journal.names(ONE, "veth3");
            (0..5).for_each(|_| journal.refused(ONE, Some(7), &refused(Code::InUse), now));
            journal.refused(ONE, None, &refused(Code::Busy), now);
            let written = (0..20).filter(|_| journal.permits(ONE, Level::INFO, now)).count();
            assert_eq!(written, LINES_MAX - 2);
            journal.forged(ONE, &[0, 0, 5, 1, 0, 0, 0, 0]);
            journal.forged(ONE, &[0, 0, 5, 0, 0, 0, 0, 0]);
            journal.sum(&known, now);
            journal.sum(&known, now);
        });
        let lines: Vec<&str> = said.lines().collect();
        let refused = "container=\"veth3\" pid=7 code=in_use reason=\"a reason\"";
        assert_eq!(lines[0], format!("<4>refused {refused}"));
        assert!(lines[1].contains("code=busy"), "{said}");
        let forged = "<4>dropped frames in the last minute: ipv4 10, ipv6 1";
        assert_eq!(lines[2], format!("{forged} container=\"veth3\""));
        let more = "<4>refused 4 requests more in the last minute: in_use 4";
        assert_eq!(lines[3], format!("{more} container=\"veth3\" others=14"));
        assert_eq!(lines.len(), 4, "{said}");
        // Without refusals there is nothing to warn of.
        let (journal, known) = (Journal::default(), BTreeSet::from([1]));
        let said = written(true, || {
            assert!((0..LINES_MAX).all(|_| journal.permits(ONE, Level::INFO, now)));
            (0..2).for_each(|_| assert!(!journal.permits(ONE, Level::INFO, now)));
            journal.sum(&known, now);
        });
        assert_eq!(said, "<6>left out 2 lines of the last minute container=\"net:[1]\"\n");
    }

    #[test]
    fn what_is_remembered_is_bounded_and_forgotten() {
        let (journal, now) = (Journal::default(), Instant::now());
        let known = BTreeSet::from([1]);
        written(true, || {
            for of in 0..10_000 {
                assert_eq!(
                    journal.permits(Share::Container(of), Level::INFO, now),
                    of < REMEMBERED_MAX as u64 - 1
                );
                // Users of the host are one.
                journal.permits(Share::User(of as u32), Level::INFO, now);
            }
            journal.sum(&known, now);
            assert_eq!(journal.lock().records.len(), REMEMBERED_MAX, "they have just been heard");
            journal.sum(&known, now + MINUTE);
            assert_eq!(journal.lock().records.keys().collect::<Vec<_>>(), [&ONE]);
        });
        assert_eq!(journal.name(Share::Container(9)), "net:[9]");
    }

    /// Those between count for the sum.
    #[test]
    fn a_refusal_that_goes_on_is_written_once_a_minute() {
        let (journal, start) = (Journal::default(), Instant::now());
        let is_said = |second: &u64| {
            let now = start + Duration::from_secs(*second);
            !written(true, || journal.refused(ONE, None, &refused(Code::Busy), now)).is_empty()
        };
        assert_eq!((0..200).filter(is_said).collect::<Vec<u64>>(), [0, 60, 120, 180]);
    }

    /// The lines of its container are used up: it is written as soon as there is room again.
    #[test]
    fn a_refusal_for_which_there_was_no_line_is_written_with_the_next() {
        let (journal, start) = (Journal::default(), Instant::now());
        written(true, || {
            assert!((0..LINES_MAX).all(|_| journal.permits(ONE, Level::INFO, start)));
        });
        let is_said = |code, second| {
            let now = start + Duration::from_secs(second);
            !written(true, || journal.refused(ONE, None, &refused(code), now)).is_empty()
        };
        for second in [1, 30, 59] {
            assert!(!is_said(Code::Busy, second), "{second}");
        }
        assert!(is_said(Code::Busy, 60) && is_said(Code::InUse, 60));
        assert!(!is_said(Code::Busy, 119) && is_said(Code::Busy, 120));
    }

    #[test]
    fn the_own_trouble_is_written_once_a_minute() {
        let (mut seldom, now) = (Seldom::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        let said: Vec<u64> = (0..200).filter(|it| seldom.permits(at(*it))).collect();
        assert_eq!(said, [0, 60, 120, 180]);
    }
}
