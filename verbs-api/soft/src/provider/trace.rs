//! The events of the feature `tracing`, and their limits: none for a packet, and no kind of event
//! more than `PER_SECOND` times a second. Without the feature these calls are
//! empty.
//!
//! Some are emitted while a shard is locked: a subscriber must not call this library.

#[cfg(not(feature = "tracing"))]
pub use self::off::*;
#[cfg(feature = "tracing")]
pub use self::on::*;

#[cfg(not(feature = "tracing"))]
mod off {
    use std::time::Duration;

    use rocinante_stack::cm::CmEvent;
    use rocinante_stack::stats::{Counters, Drops};
    use rocinante_stack::types::Qpn;
    use rocinante_stack::verbs::{Cqe, QpState};

    use crate::model::device::DeviceAttr;
    use crate::model::event::AsyncEvent;

    #[inline]
    pub fn opened(_: &str, _: &DeviceAttr) {}

    #[inline]
    pub fn state(_: Qpn, _: Option<QpState>) {}

    #[inline]
    pub fn completed(_: &Cqe) {}

    #[inline]
    pub fn event(_: &AsyncEvent) {}

    #[inline]
    pub fn connection(_: &CmEvent) {}

    #[derive(Debug, Default)]
    pub struct Watch(());

    impl Watch {
        #[inline]
        pub fn new(_: &str) -> Self {
            Self(())
        }

        #[inline]
        pub fn look(&mut self, _: &Counters, _: &Drops) -> Option<Duration> {
            None
        }
    }
}

#[cfg(feature = "tracing")]
mod on {
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;
    use rocinante_stack::cm::CmEvent;
    use rocinante_stack::stats::{Counters, Drops};
    use rocinante_stack::types::Qpn;
    use rocinante_stack::verbs::{Cqe, QpState, WcStatus};
    use tracing::{Level, debug, enabled, info, warn};

    use crate::model::device::DeviceAttr;
    use crate::model::event::AsyncEvent;

    /// The most events of a kind in a second.
    const PER_SECOND: u32 = 100;

    /// Permits [`PER_SECOND`] events.
    #[derive(Debug)]
    struct Limit(Mutex<Second>);

    #[derive(Debug)]
    struct Second {
        began: Option<Instant>,
        told: u32,
        left_out: u64,
    }

    impl Limit {
        const fn new() -> Self {
            Self(Mutex::new(Second { began: None, told: 0, left_out: 0 }))
        }

        /// The number of events left out before this one; `None` if this one must be left out, too.
        fn take(&self, now: Instant) -> Option<u64> {
            let mut second = self.0.lock();
            if second.began.is_none_or(|began| now.duration_since(began) >= Duration::from_secs(1))
            {
                (second.began, second.told) = (Some(now), 0);
            }
            if second.told == PER_SECOND {
                second.left_out += 1;
                return None;
            }
            second.told += 1;
            Some(std::mem::take(&mut second.left_out))
        }
    }

    /// Tells an event if there is a subscriber for it and it is not one too many.
    macro_rules! tell {
        ($target:literal, $($fields:tt)*) => {
            if enabled!(target: $target, Level::DEBUG) {
                static LIMIT: Limit = Limit::new();
                if let Some(left_out) = LIMIT.take(Instant::now()) {
                    if left_out > 0 {
                        debug!(target: $target, left_out, "too many events in a second");
                    }
                    debug!(target: $target, $($fields)*);
                }
            }
        };
    }

    pub fn opened(device: &str, attr: &DeviceAttr) {
        let (why, mtu) = (&attr.chosen_because, attr.active_mtu);
        match attr.instead_of {
            None => info!(target: "rocinante::device", device, %mtu, why, "opened"),
            Some(_) => warn!(target: "rocinante::device", device, %mtu, why, "opened"),
        }
    }

    /// The program changed the state of a queue pair, if this is one.
    pub fn state(qpn: Qpn, state: Option<QpState>) {
        if let Some(state) = state {
            tell!("rocinante::qp", %qpn, %state, "state");
        }
    }

    /// A completion: failures are reported, but not the requests that they flush.
    #[inline]
    pub fn completed(cqe: &Cqe) {
        if cqe.status != WcStatus::Success && cqe.status != WcStatus::WrFlushErr {
            let (qpn, status, wr_id) = (cqe.qpn, cqe.status, cqe.wr_id);
            tell!("rocinante::qp", %qpn, %status, wr_id, "a request failed");
        }
    }

    pub fn event(event: &AsyncEvent) {
        tell!("rocinante::device", ?event, "asynchronous event");
    }

    /// The private data of programs is theirs.
    pub fn connection(event: &CmEvent) {
        match event {
            CmEvent::Request { conn, request, .. } => {
                let (conn, peer, qpn) = (conn.0.0, request.peer, request.side.qpn);
                tell!("rocinante::cm", conn, %peer, %qpn, "a peer requests a connection");
            }
            CmEvent::Replied { conn, reply } => {
                let (conn, qpn) = (conn.0.0, reply.side.qpn);
                tell!("rocinante::cm", conn, %qpn, "the peer accepts");
            }
            CmEvent::Established { conn } => {
                tell!("rocinante::cm", conn = conn.0.0, "established");
            }
            CmEvent::Rejected { conn, reason, .. } => {
                tell!("rocinante::cm", conn = conn.0.0, %reason, "rejected");
            }
            CmEvent::TimedOut { conn } => {
                tell!("rocinante::cm", conn = conn.0.0, "timed out");
            }
            CmEvent::Disconnected { conn, ended } => {
                tell!("rocinante::cm", conn = conn.0.0, ?ended, "disconnected");
            }
            CmEvent::Resolved { qpn, .. } => {
                tell!("rocinante::cm", %qpn, "a service was found");
            }
            CmEvent::Unresolved { status, .. } => {
                tell!("rocinante::cm", ?status, "a service was not found");
            }
            CmEvent::Asked { asked, .. } => {
                tell!("rocinante::cm", peer = %asked.peer, "a peer asks for a service");
            }
            CmEvent::AskOver { .. } | CmEvent::Released { .. } => {}
        }
    }

    /// The counters of a shard as last reported.
    #[derive(Debug, Default)]
    pub struct Watch {
        device: String,
        counters: Counters,
        drops: Drops,
        told: Option<Instant>,
    }

    /// From one time to the next.
    const PAUSE: Duration = Duration::from_millis(100);

    /// Counters of traffic that goes well.
    const USUAL: [&str; 11] = [
        "sent_pkts",
        "rcvd_pkts",
        "sent_multicast_pkts",
        "rcvd_multicast_pkts",
        "sent_bytes",
        "rcvd_bytes",
        "sent_acks",
        "sent_cnp",
        "rcvd_cnp",
        "rcvd_ecn_ce",
        "icrc_id_solved",
    ];

    impl Watch {
        pub fn new(device: &str) -> Self {
            Self { device: device.to_owned(), ..Self::default() }
        }

        /// Reports the counters of trouble that have grown. Within `PAUSE` of the last report it
        /// reports nothing, and returns the rest of the pause.
        pub fn look(&mut self, counters: &Counters, drops: &Drops) -> Option<Duration> {
            if !enabled!(target: "rocinante::counters", Level::DEBUG) {
                return None;
            }
            let before = self.counters.iter().chain(self.drops.iter());
            let now = counters.iter().chain(drops.iter());
            let grown = now
                .zip(before)
                .filter(|((name, now), (_, before))| now != before && !USUAL.contains(name));
            let mut grown = grown.map(|((name, now), (_, before))| (name, now, now - before));
            let first = grown.next()?;
            let left = self.told.map(|told| PAUSE.saturating_sub(told.elapsed()));
            if let Some(left) = left.filter(|left| !left.is_zero()) {
                return Some(left);
            }
            for (counter, total, by) in std::iter::once(first).chain(grown) {
                debug!(target: "rocinante::counters", device = self.device, counter, by, total);
            }
            (self.counters, self.drops, self.told) = (*counters, *drops, Some(Instant::now()));
            None
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_second_has_so_many_events_and_the_next_says_how_many_more_there_were() {
            let (limit, begin) = (Limit::new(), Instant::now());
            for second in 0..3 {
                let now = begin + Duration::from_secs(second);
                assert_eq!(limit.take(now), Some(if second == 0 { 0 } else { 50 }));
                let told = (1..PER_SECOND + 50).filter(|_| limit.take(now).is_some()).count();
                assert_eq!(told, PER_SECOND as usize - 1);
            }
        }
    }
}
