//! Datagram services for which the program decides per peer: the peers' questions, and the answers
//! given.
//!
//! A peer repeats its question until an answer arrives, and an answer may be lost. So each answer
//! is kept for a while, and the program is asked only once. At most the listener's backlog of
//! questions may be undecided. Further questions are dropped; the peers repeat them.

use core::net::{IpAddr, SocketAddr};

use super::notes::Requested;
use super::tables::{Ask, ListenAddress, Listener, Stage, Timer, places};
use super::{Asked, CmError, CmEvent, ConnectionManager, ListenerId, SidrReqId};
use crate::tuning::cm::{ANSWER_KEPT, ANSWERS_MAX, SERVICES_MAX};
use crate::types::{Qpn, Time};
use crate::wire::cm::{CmMessage, IpHeader, ServiceId, SidrRep, SidrReq, SidrStatus};

impl ConnectionManager {
    /// Listens for questions about `service` to `address`, as [`listen`](Self::listen) does:
    /// [`CmEvent::Asked`]. At most `backlog` questions may be undecided. Error: [`CmError::InUse`],
    /// [`CmError::Full`].
    pub fn listen_datagrams(
        &mut self,
        service: ServiceId,
        address: Option<IpAddr>,
        backlog: usize,
    ) -> Result<ListenerId, CmError> {
        let place = (service, address);
        if self.resolvers.contains_key(&place) {
            return Err(CmError::InUse);
        }
        if self.resolvers.len() >= SERVICES_MAX {
            return Err(CmError::Full);
        }
        let id = ListenerId(self.ids.draw());
        self.resolvers.insert(place, Listener { id, backlog: backlog.max(1), pending: 0 });
        self.end_waits(service);
        Ok(id)
    }

    /// Stops listening. Undecided questions are refused, unless `is_known` says that the program
    /// has seen them.
    pub fn unlisten_datagrams(
        &mut self,
        now: Time,
        listener: ListenerId,
        is_known: impl Fn(SidrReqId) -> bool,
    ) {
        self.resolvers.retain(|_, other| other.id != listener);
        let waits = |(id, ask): (&SidrReqId, &Ask)| {
            let of_it = matches!(ask.stage, Stage::Waits(of) if of == listener);
            (of_it && !is_known(*id)).then_some(*id)
        };
        let waiting: Vec<SidrReqId> = self.asks.iter().filter_map(waits).collect();
        for id in waiting {
            let _ = self.answer(now, id, Err(SidrStatus::REJECT), &[]);
        }
    }

    /// Answers with a queue pair and its queue key, or refuses. Error: [`CmError::Unknown`] if it
    /// is decided already, or too late; [`CmError::PrivateTooLong`]: 136 bytes.
    pub fn answer(
        &mut self,
        now: Time,
        id: SidrReqId,
        answer: Result<(Qpn, u32), SidrStatus>,
        private: &[u8],
    ) -> Result<(), CmError> {
        if private.len() > SidrRep::PRIVATE_LEN {
            return Err(CmError::PrivateTooLong { max: SidrRep::PRIVATE_LEN });
        }
        let ask = self.asks.get_mut(&id).ok_or(CmError::Unknown)?;
        let Stage::Waits(listener) = ask.stage else { return Err(CmError::Unknown) };
        let status = answer.err().unwrap_or(SidrStatus::SUCCESS);
        let (qpn, qkey) = answer.unwrap_or_default();
        let (request, service, info) = (ask.request, ask.service, &[][..]);
        let rep = SidrRep { request, status, qpn, service, qkey, info, private };
        let mad = Box::new(CmMessage::SidrRep(rep).emit(ask.tid));
        let (addresses, copy, old) = (ask.addresses, *mad, ask.due);
        (ask.stage, ask.due) = (Stage::Answered(mad), now.after(ANSWER_KEPT));
        let due = ask.due;
        self.timers.remove(&(old, Timer::Ask(id)));
        self.timers.insert((due, Timer::Ask(id)));
        self.decided(listener);
        self.answered.push_back(id);
        if self.answered.len() > ANSWERS_MAX
            && let Some(oldest) = self.answered.front().copied()
        {
            self.remove_ask(oldest);
        }
        self.counters.sidr_answered += u64::from(status == SidrStatus::SUCCESS);
        self.send(addresses, copy);
        Ok(())
    }

    pub(super) fn ask_timeout(&mut self, id: SidrReqId) {
        let Some(ask) = self.asks.get(&id) else { return };
        if let Stage::Waits(listener) = ask.stage {
            self.counters.timeouts += 1;
            self.decided(listener);
            self.events.push_back(CmEvent::AskOver { ask: id });
        }
        self.remove_ask(id);
    }

    /// Takes a question for a service that the program decides. Returns whether there is such a
    /// service.
    pub(super) fn on_ask(
        &mut self,
        now: Time,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        ask: &SidrReq<'_>,
    ) -> bool {
        let known = self.by_ask.get(&(src, ask.request)).copied();
        if let Some((id, known)) = known.and_then(|id| Some((id, self.asks.get(&id)?))) {
            if (known.tid, known.service, known.addresses) == (tid, ask.service, (dst, src)) {
                self.counters.duplicates += 1;
                if let Stage::Answered(mad) = &known.stage {
                    let copy = **mad;
                    self.send((dst, src), copy);
                }
                return true;
            }
            if matches!(known.stage, Stage::Waits(_)) {
                // A peer uses each number once: one of the two is not from it.
                self.counters.stray += 1;
                return true;
            }
            self.remove_ask(id);
        }
        let Some(place) = self.resolver(ask.service, dst) else { return false };
        let (peer, user) = match ask.service.port() {
            None => (SocketAddr::new(src, 0), ask.private),
            Some(_) => match IpHeader::parse(ask.private) {
                Ok((header, user)) if header.dst == dst => (header.src, user),
                _ => return false,
            },
        };
        let (local, service, private) = (dst, ask.service, user.to_vec());
        let asked = Box::new(Asked { local, peer, service, private });
        self.put_ask(now, (src, dst), tid, ask.request, place, asked);
        true
    }

    fn put_ask(
        &mut self,
        now: Time,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        request: u32,
        place: ListenAddress,
        asked: Box<Asked>,
    ) {
        let due = now.after(self.patience());
        let Some(listener) = self.resolvers.get_mut(&place) else { return };
        if listener.pending >= listener.backlog {
            return self.counters.backlog_overflow += 1;
        }
        listener.pending += 1;
        let listener = listener.id;
        let id = loop {
            let id = SidrReqId(self.ids.draw() as u32);
            if !self.asks.contains_key(&id) {
                break id;
            }
        };
        let (service, stage) = (asked.service, Stage::Waits(listener));
        let addresses = (dst, src);
        self.asks.insert(id, Ask { addresses, request, tid, service, stage, due });
        self.by_ask.insert((src, request), id);
        self.note_request(addresses, Requested::Service(request), true);
        self.timers.insert((due, Timer::Ask(id)));
        self.counters.requests += 1;
        self.events.push_back(CmEvent::Asked { listener, ask: id, asked });
    }

    fn resolver(&self, service: ServiceId, dst: IpAddr) -> Option<ListenAddress> {
        places(service, dst).into_iter().find(|place| self.resolvers.contains_key(place))
    }

    /// Its listener has one undecided question less.
    fn decided(&mut self, listener: ListenerId) {
        if let Some(it) = self.resolvers.values_mut().find(|it| it.id == listener) {
            it.pending = it.pending.saturating_sub(1);
        }
    }

    fn remove_ask(&mut self, id: SidrReqId) {
        let Some(ask) = self.asks.remove(&id) else { return };
        self.timers.remove(&(ask.due, Timer::Ask(id)));
        self.by_ask.remove(&(ask.addresses.1, ask.request));
        self.note_request(ask.addresses, Requested::Service(ask.request), false);
        if matches!(ask.stage, Stage::Answered(_)) {
            self.answered.retain(|other| *other != id);
        }
    }
}
