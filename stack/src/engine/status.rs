//! The state of an engine and of its queue pairs, for queries.

use super::Engine;
use crate::any::AnyQp;
use crate::qp::Urgency;
use crate::qp::attr::{QpAttr, QpInit};
use crate::shared::EngineConfig;
use crate::stats::LimitsHit;
use crate::stats::{Counters, Drops, QpCounters};
use crate::types::{Key, Psn, Qpn};
use crate::verbs::QpState;

impl Engine {
    /// State and attributes of a queue pair (`ibv_query_qp(3)`).
    #[must_use]
    pub fn query_qp(&self, qpn: Qpn) -> Option<(QpState, QpAttr, QpInit)> {
        let qp = self.qp(qpn)?;
        let core = qp.core();
        let mut attr = core.attr.attr();
        let (next, _, expected) = qp.sequence();
        if core.state.requests() {
            attr.sq_psn = Some(Psn::truncate(next));
        }
        if core.state.receives() && attr.dest_qpn.is_some() {
            attr.rq_psn = Some(Psn::truncate(expected));
        }
        attr.state = Some(core.state);
        Some((core.state, attr, core.init))
    }

    /// Whether a queue pair in SQD has requests that were begun and are not done (`sq_draining`).
    #[must_use]
    pub fn is_draining(&self, qpn: Qpn) -> bool {
        self.qp(qpn).is_some_and(|qp| qp.core().state == QpState::Sqd && !qp.is_drained())
    }

    /// The counters of a queue pair.
    #[must_use]
    pub fn qp_counters(&self, qpn: Qpn) -> Option<QpCounters> {
        Some(self.qp(qpn)?.core().tally.get())
    }

    /// How often each limit ended a turn of a queue pair: why it did not send.
    #[must_use]
    pub fn qp_limits_hit(&self, qpn: Qpn) -> Option<LimitsHit> {
        Some(self.qp(qpn)?.core().limits_hit.get())
    }

    /// The same of all queue pairs that there are and were.
    #[must_use]
    pub fn limits_hit(&self) -> &LimitsHit {
        &self.shared.limits_hit
    }

    /// How soon a request must leave that is posted to this queue pair now. [`Urgency::Idle`] while
    /// answers are in flight that will have the engine driven; [`Urgency::By`] if datagrams just
    /// left that nothing answers, so that the caller must drive the engine then.
    #[inline]
    #[must_use]
    pub fn post_urgency(&self, qpn: Qpn) -> Urgency {
        self.qp(qpn).map_or(Urgency::Now, AnyQp::post_urgency)
    }

    /// Whether a posted request names the region `key`. This looks at every posted request: a
    /// region is deregistered rarely, and a count for each key would cost every post.
    #[must_use]
    pub fn uses_key(&self, key: Key) -> bool {
        self.qps.iter().flatten().any(|qp| qp.core().uses(key)) || self.shared.srqs.uses(key)
    }

    /// Number of queue pairs.
    #[must_use]
    pub fn qp_count(&self) -> usize {
        self.qps.len() - self.free.len()
    }

    /// Number of reserved queue pair numbers.
    #[must_use]
    pub fn reserved_qpns(&self) -> usize {
        self.reserved.len()
    }

    /// Counters of the transport.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Counters of dropped packets, by reason.
    #[must_use]
    pub fn drops(&self) -> &Drops {
        &self.shared.drops
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    fn qp(&self, qpn: Qpn) -> Option<&AnyQp> {
        self.qps[self.slot(qpn)?].as_ref()
    }
}
