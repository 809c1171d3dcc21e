//! The facts about queue pairs that completions need, by number.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::QpType;

/// The queue pairs of a device.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Whether a queue pair ever had a value of the program's.
    contexts: AtomicBool,
    qps: RwLock<HashMap<Qpn, Entry>>,
}

#[derive(Debug)]
struct Entry {
    qp_type: QpType,
    context: u64,
    peer: Option<IpAddr>,
}

impl Known {
    pub(super) fn insert(&self, qpn: Qpn, qp_type: QpType, context: u64) {
        self.qps.write().insert(qpn, Entry { qp_type, context, peer: None });
        self.contexts.fetch_or(context != 0, Ordering::Relaxed);
    }

    pub(super) fn remove(&self, qpn: Qpn) {
        self.qps.write().remove(&qpn);
    }

    pub(super) fn set_peer(&self, qpn: Qpn, peer: IpAddr) {
        if let Some(entry) = self.qps.write().get_mut(&qpn) {
            entry.peer = Some(peer);
        }
    }

    #[inline]
    pub(super) fn context_of(&self, qpn: Qpn) -> u64 {
        if !self.contexts.load(Ordering::Relaxed) {
            return 0;
        }
        self.qps.read().get(&qpn).map_or(0, |entry| entry.context)
    }

    /// Whether it receives datagrams. A queue pair that is gone may have received some.
    pub(super) fn may_be_datagrams(&self, qpn: Qpn) -> bool {
        self.qps.read().get(&qpn).is_none_or(|entry| entry.qp_type == QpType::Ud)
    }

    pub(super) fn peer_of(&self, qpn: Qpn) -> Option<IpAddr> {
        self.qps.read().get(&qpn)?.peer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_pair_has_its_own_type_value_and_peer() {
        let known = Known::default();
        let [a, b] = [1, 2].map(Qpn::new);
        let peer = IpAddr::from([10, 0, 0, 1]);
        known.insert(a, QpType::Rc, 0);
        assert_eq!((known.context_of(a), known.peer_of(a)), (0, None));
        known.insert(b, QpType::Ud, 7);
        known.set_peer(b, peer);
        let of = |qpn| (known.context_of(qpn), known.peer_of(qpn));
        assert_eq!((of(a), of(b)), ((0, None), (7, Some(peer))));
        known.insert(Qpn::new(3), QpType::Uc, 0);
        assert_eq!(of(b), (7, Some(peer)), "one that comes later has no value");
        assert_eq!(
            [1, 2, 3].map(|qpn| known.may_be_datagrams(Qpn::new(qpn))),
            [false, true, false]
        );
        known.remove(b);
        assert!(known.may_be_datagrams(b) && !known.may_be_datagrams(a));
        assert_eq!((of(a), of(b)), ((0, None), (0, None)));
    }
}
