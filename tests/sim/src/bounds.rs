//! Bounds of an engine's resources: never more than its queue pairs account for, and none at the
//! end.

use rocinante_stack::Footprint;
use rocinante_stack::cm::CmFootprint;
use rocinante_stack::verbs::QpState;

use crate::check::Verdict;
use crate::talk::Talk;
use crate::world::{Host, World};

/// Calls of an engine between two checks.
const EACH: u64 = 16;

impl World<'_> {
    /// Now and then checks the footprint of the engine of `host`.
    pub(crate) fn weigh(&mut self, host: usize) -> Verdict {
        self.weighed += 1;
        if !self.weighed.is_multiple_of(EACH) {
            return Ok(());
        }
        let Host { engine: Some(engine), config, ends, .. } = &self.hosts[host] else {
            return Ok(());
        };
        let found = engine.footprint();
        let handles = ends.iter().flat_map(|end| &self.ends[*end].letters.handles);
        let handles = handles.flatten().count();
        let there = ends.iter().filter(|end| self.ends[**end].qpn.is_some());
        let answers = |end: &usize| usize::from(self.ends[*end].terms.rd_atomic);
        let (qps, records) = (there.clone().count(), there.map(answers).sum::<usize>());
        let keeps = |talk: &&Talk| self.calls[talk.call].end.is_some() && talk.qpn.value() > 0;
        let known_peers = if self.has.strangers { self.hosts.len() } else { 0 };
        let kept = self.hosts[host].users.talks.values().filter(keeps).count();
        let bounds = [
            ("queue pairs", found.qps, qps),
            ("address handles", found.address_handles, handles),
            ("users of receiver credit", found.credit_users, qps + handles),
            ("queue pairs that wait for credit", found.waiting_for_credit, qps),
            ("forgotten queue pairs", found.forgotten, 0),
            ("deadlines", found.timers, qps),
            ("queue pairs with something to send", found.queued, qps),
            ("events", found.events, 0),
            ("slots of reorder buffers", found.reorder_slots, config.reorder_packets_max as usize),
            ("in-flight lists", found.in_flight_lists, qps),
            ("reserved queue pair numbers", found.reserved_qpns, kept),
            ("responder resources", found.responder_resources, records),
            ("known peers", found.known_peers, known_peers),
        ];
        for (what, count, most) in bounds {
            if count > most {
                return Err(format!("host {host} holds {count} {what}, and should {most}"));
            }
        }
        self.weigh_manager(host)?;
        let blocks = found.reordered_packets + found.spare_reorder_slots;
        if blocks != found.reorder_slots {
            return Err(format!(
                "host {host} lost memory for packets: {blocks} are left of {}",
                found.reorder_slots
            ));
        }
        Ok(())
    }

    /// Checks the footprint of the connection manager of `host`.
    fn weigh_manager(&self, host: usize) -> Verdict {
        let Host { engine: Some(engine), users, .. } = &self.hosts[host] else { return Ok(()) };
        let Some(found) = engine.cm_footprint() else { return Ok(()) };
        let talks = users.talks.len();
        let listening = users.listening.iter().flatten();
        let pending = listening.clone().map(|listening| users.pending(listening.id)).sum();
        let bounds = [
            ("connections", found.connections, talks),
            ("ways to find a request", found.by_request, talks),
            ("ways to find a queue pair", found.by_qpn, talks),
            ("listeners", found.listeners, listening.count()),
            ("requests in backlogs", found.pending, pending),
            ("deadlines of connections", found.timers, talks),
            ("events of connections", found.events, 0),
            ("questions", found.asks + found.by_ask + found.queries, 0),
        ];
        for (what, count, most) in bounds {
            if count > most {
                return Err(format!("host {host} holds {count} {what}, and should {most}"));
            }
        }
        Ok(())
    }

    /// Destroys everything once nothing is in flight: nothing may be left.
    pub(crate) fn dissolve(&mut self, host: usize) -> Verdict {
        let Some(engine) = &self.hosts[host].engine else { return Ok(()) };
        let resting = engine.footprint();
        if resting.in_flight_packets > 0
            || resting.reordered_packets > 0
            || resting.waiting_for_credit > 0
        {
            return Err(format!("host {host} is at rest and holds {resting:?}"));
        }
        for end in self.hosts[host].ends.clone() {
            let this = &mut self.ends[end];
            let Host { engine: Some(engine), ram, .. } = &mut self.hosts[host] else { break };
            let handles = this.letters.handles.drain(..).flatten();
            let lost = handles.filter(|handle| !engine.destroy_ah(*handle)).count();
            let Some(qpn) = this.qpn.take() else { continue };
            let state = engine.query_qp(qpn).map(|(state, ..)| state);
            if lost > 0 || state != Some(QpState::Rts) {
                return Err(format!("end {end} is {state:?} in the end, and lost {lost} handles"));
            }
            engine.destroy_qp(qpn).map_err(|error| format!("end {end}: {error}"))?;
            if let Some(effect) = ram.effects.first() {
                return Err(format!("end {end}: {effect:?} of a queue pair that is gone"));
            }
        }
        let Host { engine: Some(engine), srqs, .. } = &mut self.hosts[host] else { return Ok(()) };
        for id in srqs.iter().filter_map(|srq| srq.id) {
            engine.destroy_srq(id).map_err(|error| format!("host {host}: {error}"))?;
        }
        let left = engine.footprint();
        // Memory for packets and lists is kept for reuse.
        let nothing = Footprint {
            spare_in_flight_lists: left.spare_in_flight_lists,
            reorder_slots: left.spare_reorder_slots,
            spare_reorder_slots: left.spare_reorder_slots,
            // Peers that were asked are remembered.
            known_peers: left.known_peers,
            ..Footprint::default()
        };
        let manager = engine.cm_footprint();
        if left != nothing || manager.is_some_and(|left| left != CmFootprint::default()) {
            return Err(format!("host {host} gave everything up and holds {left:?}, {manager:?}"));
        }
        Ok(())
    }
}
