//! Requests and questions that come before their listener. A program may tell its peer by a first
//! connection that it listens for a second one now, and do so a moment later.

use core::net::IpAddr;

use super::ConnectionManager;
use super::tables::{Early, Timer};
use crate::tuning::cm::EARLY_MAX;
use crate::types::Time;
use crate::wire::MadBytes;
use crate::wire::cm::{CmMessage, ServiceId};

impl ConnectionManager {
    /// Keeps a request, which has this number of its peer's, for a while. Returns whether it is
    /// kept.
    pub(super) fn wait_for_listener(
        &mut self,
        now: Time,
        way: (IpAddr, IpAddr),
        (service, request): (ServiceId, u32),
        emit: impl FnOnce() -> MadBytes,
    ) -> bool {
        if self.config.refusal_delay == 0 {
            return false;
        }
        let is_it = |it: &Early| (it.way, it.service, it.request) == (way, service, request);
        if self.early.values().any(is_it) {
            self.counters.duplicates += 1;
            return true;
        }
        if self.early.len() >= EARLY_MAX {
            return false;
        }
        let id = self.early.last_key_value().map_or(0, |(last, _)| last + 1);
        let mad = Box::new(emit());
        let due = now.after(self.config.refusal_delay);
        let early = Early { way, request, service, mad, due };
        self.early.insert(id, early);
        self.timers.insert((due, Timer::Early(id)));
        true
    }

    /// `service` has a listener now: the requests and questions that wait for it are due.
    pub(super) fn end_waits(&mut self, service: ServiceId) {
        for (id, early) in &mut self.early {
            if [early.service, early.service.listened()].contains(&service) {
                self.timers.remove(&(early.due, Timer::Early(*id)));
                early.due = Time(0);
                self.timers.insert((early.due, Timer::Early(*id)));
            }
        }
    }

    /// Forgets the requests and questions that have waited until `now`, if another process of the
    /// address listens for them by now: it gets those that the peer repeats.
    pub fn leave_to_others(&mut self, now: Time, listens: impl Fn(ServiceId, IpAddr) -> bool) {
        let Self { early, timers, .. } = self;
        early.retain(|id, it| {
            let services = [it.service, it.service.listened()];
            let left = it.due <= now && services.iter().any(|of| listens(*of, it.way.1));
            if left {
                timers.remove(&(it.due, Timer::Early(*id)));
            }
            !left
        });
    }

    /// Takes a request that has waited, or refuses it.
    pub(super) fn early_timeout(&mut self, now: Time, id: u64) {
        let Some(early) = self.early.remove(&id) else { return };
        match CmMessage::parse(&early.mad[..]) {
            Ok((header, CmMessage::Req(req))) => {
                self.on_req(now, early.way, header.tid, &req, false);
            }
            Ok((header, CmMessage::SidrReq(ask))) => {
                self.on_sidr_req(now, early.way, header.tid, &ask, false);
            }
            _ => {}
        }
    }
}
