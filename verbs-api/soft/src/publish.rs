//! Publishes what a device has counted in the page that an agent hands over: its shards each when
//! they are driven, and at the end.

use std::ops::Range;
use std::sync::Arc;

use rocinante_netdev::Slots;
use rocinante_netdev::handed::page::{DROP, Head, OBJECTS, QueuePair};
use rocinante_stack::stats::{Counters, Limit};
use rocinante_stack::types::{Qpn, Time};

use super::device::counted;
use super::events::Events;
use super::shard::Shard;
use crate::model::device::DeviceCounters;
use crate::tuning::pages::{EVERY_NS, ROWS_EACH};

/// The shards' way to the page of their device.
pub(super) struct Publisher {
    slots: Arc<Slots>,
    head: Head,
    events: Arc<Events>,
}

/// The turns of a shard.
pub(super) struct Turns {
    publisher: Option<Arc<Publisher>>,
    shard: usize,
    /// When it publishes again, if it is driven then.
    due: Time,
    /// The queue pair to begin with.
    row: usize,
    /// Protection domains, when it published last.
    pds: usize,
}

impl Publisher {
    /// For the device `name` of `shards` shards, with a backend for this reason. `None` if it has
    /// no address that it could share: then it has no connection to an agent.
    pub(super) fn new(
        slots: Option<&Arc<Slots>>,
        (name, backend, why): (&str, &str, &str),
        shards: usize,
        events: &Arc<Events>,
    ) -> Option<Arc<Self>> {
        let (device, backend, why) = (name.into(), backend.into(), why.into());
        let head = Head { device, backend, why, shards };
        Some(Arc::new(Self { slots: slots?.clone(), head, events: events.clone() }))
    }
}

impl Default for Turns {
    /// None.
    fn default() -> Self {
        Self::new(None, 0)
    }
}

impl Turns {
    pub(super) fn new(publisher: Option<Arc<Publisher>>, shard: usize) -> Self {
        let due = if publisher.is_some() { Time(0) } else { Time::NEVER };
        Self { publisher, shard, due, row: 0, pds: 0 }
    }

    #[inline]
    pub(super) fn is_due(&self, now: Time) -> bool {
        now >= self.due
    }

    /// The next rows of those up to `end`, this number at most: all in turn.
    fn rows(&mut self, end: usize, count: usize) -> Range<usize> {
        if self.row >= end {
            self.row = 0;
        }
        let rows = self.row..end.min(self.row.saturating_add(count));
        self.row = rows.end;
        rows
    }
}

impl Shard {
    /// Publishes the counters, and some of the queue pairs in turn.
    #[cold]
    pub(super) fn publish(&mut self, now: Time) {
        self.turns.due = now.after(EVERY_NS);
        if let (Some(publisher), 0) = (&self.turns.publisher, self.turns.shard) {
            self.turns.pds = publisher.events.pds();
        }
        self.publish_rows(ROWS_EACH);
    }

    /// The objects that it publishes; the first shard's are those, too, of which all have the same.
    #[must_use]
    pub fn objects(&self) -> [usize; OBJECTS.len()] {
        let Self { engine, host, turns, .. } = self;
        let shared = |count: usize| if turns.shard == 0 { count } else { 0 };
        [
            turns.pds,
            shared(host.cqs.len()),
            engine.srq_count(),
            engine.qp_count(),
            shared(host.regions.len()),
        ]
    }

    /// Publishes all, for the last time. A signal handler may be there: it takes no lock.
    pub(super) fn publish_all(&mut self) {
        self.turns.row = 0;
        self.publish_rows(usize::MAX);
    }

    fn publish_rows(&mut self, count: usize) {
        let Some(publisher) = self.turns.publisher.clone() else { return };
        let Some(page) = publisher.slots.page() else { return };
        let (all, objects) = (counted(self), self.objects());
        let Self { engine, host, turns, .. } = self;
        page.publish(&publisher.head, turns.shard, |section| {
            section.objects(objects);
            section.counters(of_page(&all).map(|(_, _, count)| count));
            let end = host.qps.end().min(section.rows());
            section.rows_end(end);
            for row in turns.rows(end, count) {
                let qp = host.qps.get(row as u32).and_then(|qp| row_of(engine, qp.qpn()));
                section.row(row, qp.as_ref());
            }
        });
    }
}

/// The counters of a page: beginning and end of the name of each, and its value. A signal handler
/// may ask: nothing is allocated.
fn of_page(all: &DeviceCounters) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
    let kernel = all.of_kernel().into_iter().map(|(_, name, count)| ("", name, count));
    let Counters { sent_requests, rcvd_requests, undriven_us, .. } = all.transport;
    let own = [
        ("", "sent_requests", sent_requests),
        ("", "rcvd_requests", rcvd_requests),
        ("", "undriven_us", undriven_us),
    ];
    // The kernel has a name for a wrong ICRC.
    let drops = all.drops.iter().filter(|(reason, _)| *reason != "icrc");
    kernel.chain(own).chain(drops.map(|(reason, count)| (DROP, reason, count)))
}

/// The limits of a row: those of the peer's room, and those of congestion and losses.
const HELD: [[Limit; 3]; 2] = [
    [Limit::Rnr, Limit::Credits, Limit::PeerRoom],
    [Limit::CongestionWindow, Limit::Recovering, Limit::Pacing],
];

fn row_of(engine: &rocinante_stack::Engine, qpn: Qpn) -> Option<QueuePair> {
    let (state, attr, init) = engine.query_qp(qpn)?;
    let counters = engine.qp_counters(qpn)?;
    let limits = engine.qp_limits_hit(qpn)?;
    let held = HELD.map(|all| all.map(|limit| limits.of(limit)).into_iter().sum::<u64>() as u32);
    Some(QueuePair {
        numbers: [qpn.value(), attr.dest_qpn.map_or(0, Qpn::value)],
        state: state as u8,
        service: init.qp_type as u8,
        peer: attr.peer.map(|peer| peer.remote),
        sent: [counters.sent_pkts, counters.sent_bytes],
        received: [counters.rcvd_pkts, counters.rcvd_bytes],
        repeated: counters.retransmitted_pkts as u32,
        not_ready: counters.rcvd_rnr_err as u32,
        requests: [counters.sent_requests as u32, counters.rcvd_requests as u32],
        held,
    })
}

#[cfg(test)]
mod tests {
    use rocinante_netdev::handed::page::{COUNTERS, SERVICES, STATES};
    use rocinante_stack::verbs::{QpState, QpType};

    use super::Turns;
    use crate::model::device::DeviceCounters;
    use crate::tuning::pages::ROWS_EACH;

    /// More queue pairs than are published at a time; their number changes in between.
    #[test]
    fn each_row_has_its_turn() {
        const MANY: usize = 3 * ROWS_EACH + 1;
        for (first, then) in [(1, 1), (ROWS_EACH, 1), (MANY, MANY), (MANY, 70), (5, MANY), (0, 7)] {
            let mut turns = Turns::default();
            assert_eq!(turns.rows(first, ROWS_EACH).len(), first.min(ROWS_EACH));
            // All of them at the end of a program, from the first on.
            let mut all = Turns::default();
            assert_eq!(all.rows(then, usize::MAX), 0..then);
            let mut times = vec![0; then];
            for _ in 0..2 * then.div_ceil(ROWS_EACH) {
                let rows = turns.rows(then, ROWS_EACH);
                assert!(rows.len() <= ROWS_EACH);
                rows.for_each(|row| times[row] += 1);
            }
            let is_fair = times.iter().all(|times| (1..=3).contains(times));
            assert!(is_fair, "{first}, {then}: {times:?}");
        }
    }

    /// A page has numbers in the place of names.
    #[test]
    fn the_numbers_of_a_page_are_those_of_its_names() {
        let all = DeviceCounters::default();
        let names = super::of_page(&all).map(|(first, rest, _)| format!("{first}{rest}"));
        let names: Vec<String> = names.collect();
        assert_eq!(names, COUNTERS.map(|(name, _)| name));
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        for state in [Reset, Init, Rtr, Rts, Sqd, Sqe, Err] {
            assert_eq!(state.to_string(), STATES[state as usize]);
        }
        for service in [QpType::Rc, QpType::Uc, QpType::Ud] {
            assert_eq!(format!("{service:?}").to_uppercase(), SERVICES[service as usize]);
        }
    }
}
