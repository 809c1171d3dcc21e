//! Datagram services: our questions, and questions of peers for which there is no listener. The
//! program answers the others, see `asks`.

use core::net::IpAddr;

use super::calls::{request_private, with_user};
use super::tables::{Query, Timer};
use super::{CmError, CmEvent, ConnectionManager, SidrQueryId};
use crate::tuning::cm::SERVICES_MAX;
use crate::types::{Pkey, Qpn, Time};
use crate::wire::cm::{CmMessage, IpHeader, ServiceId, SidrRep, SidrReq, SidrStatus};

impl ConnectionManager {
    /// Asks a peer for the queue pair of a service: [`CmEvent::Resolved`] or
    /// [`CmEvent::Unresolved`] follows. Error: [`CmError::Family`], [`CmError::PrivateTooLong`]
    /// (180 bytes where the service has a port), [`CmError::Full`].
    pub fn resolve(
        &mut self,
        now: Time,
        addresses: (IpAddr, IpAddr),
        (service, source_port): (ServiceId, u16),
        private: &[u8],
    ) -> Result<SidrQueryId, CmError> {
        let (local, remote) = addresses;
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(CmError::Family);
        }
        let header = request_private(service, local, source_port, remote);
        let private = with_user(header, private, SidrReq::PRIVATE_LEN)?;
        if self.queries.len() >= SERVICES_MAX {
            return Err(CmError::Full);
        }
        let id = loop {
            let id = SidrQueryId(self.ids.draw() as u32);
            if !self.queries.contains_key(&id) {
                break id;
            }
        };
        let tid = self.ids.draw() << 32 | u64::from(id.0);
        let ask = SidrReq { request: id.0, pkey: Pkey::DEFAULT, service, private: &private };
        let mad = Box::new(CmMessage::SidrReq(ask).emit(tid));
        let (retries, due) = (self.config.max_retries, now.after(self.interval()));
        self.send(addresses, *mad);
        self.queries.insert(id, Query { addresses, service, tid, mad, retries, due });
        self.timers.insert((due, Timer::Query(id)));
        Ok(id)
    }

    /// The program no longer needs the answer.
    pub fn forget_query(&mut self, query: SidrQueryId) {
        if let Some(it) = self.queries.remove(&query) {
            self.timers.remove(&(it.due, Timer::Query(query)));
        }
    }

    pub(super) fn query_timeout(&mut self, now: Time, id: SidrQueryId) {
        let due = now.after(self.interval());
        let Some(query) = self.queries.get_mut(&id) else { return };
        if query.retries == 0 {
            self.queries.remove(&id);
            self.counters.timeouts += 1;
            self.events.push_back(CmEvent::Unresolved {
                query: id,
                status: None,
                private: Vec::new(),
            });
            return;
        }
        query.retries -= 1;
        query.due = due;
        let (addresses, mad) = (query.addresses, *query.mad);
        self.counters.repeated += 1;
        self.timers.insert((due, Timer::Query(id)));
        self.send(addresses, mad);
    }

    /// Takes a question. One for which there is no listener may wait for one.
    pub(super) fn on_sidr_req(
        &mut self,
        now: Time,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        ask: &SidrReq<'_>,
        may_wait: bool,
    ) {
        if self.on_ask(now, (src, dst), tid, ask) {
            return;
        }
        let is_for_us = ask.service.port().is_none()
            || IpHeader::parse(ask.private).map(|(header, _)| header.dst) == Ok(dst);
        let (request, service) = (ask.request, ask.service);
        let emit = || CmMessage::SidrReq(*ask).emit(tid);
        if may_wait
            && is_for_us
            && self.wait_for_listener(now, (src, dst), (service, request), emit)
        {
            return;
        }
        let refusal = SidrRep {
            request,
            status: SidrStatus::UNSUPPORTED,
            qpn: Qpn::default(),
            service,
            qkey: 0,
            info: &[],
            private: &[],
        };
        self.send((dst, src), CmMessage::SidrRep(refusal).emit(tid));
    }

    pub(super) fn on_sidr_rep(
        &mut self,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        rep: &SidrRep<'_>,
    ) {
        let id = SidrQueryId(rep.request);
        let ours = |query: &Query| {
            query.addresses == (dst, src) && query.service == rep.service && query.tid == tid
        };
        if !self.queries.get(&id).is_some_and(ours) {
            return self.counters.stray += 1;
        }
        self.forget_query(id);
        let (query, private) = (id, rep.private.to_vec());
        self.events.push_back(match rep.status {
            SidrStatus::SUCCESS => {
                CmEvent::Resolved { query, qpn: rep.qpn, qkey: rep.qkey, private }
            }
            status => CmEvent::Unresolved { query, status: Some(status), private },
        });
    }
}
