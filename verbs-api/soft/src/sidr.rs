//! Datagram services on a shard: listeners, and queries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rocinante_stack::cm::{CmEvent, ListenerId, SidrQueryId, SidrReqId};
use rocinante_stack::wire::cm::ServiceId;

use super::owner::Owner;
use super::{Device, gone};
use crate::model::error::VerbsError;
use crate::provider::manager::Place;
use crate::provider::wakers::Woken;

/// The owners of datagram services and questions.
#[derive(Debug, Default)]
pub(super) struct Services {
    listeners: BTreeMap<ListenerId, Arc<dyn Owner>>,
    queries: BTreeMap<SidrQueryId, Arc<dyn Owner>>,
}

impl Services {
    pub(super) fn owners(&self) -> impl Iterator<Item = &Arc<dyn Owner>> {
        self.listeners.values().chain(self.queries.values())
    }

    /// Gives an event to its listener or question. Returns the question of an event for a listener
    /// that has just been dropped, or has no room.
    pub(super) fn deliver(&self, event: CmEvent, woken: &mut Woken) -> Option<SidrReqId> {
        let (owner, ask) = match event {
            CmEvent::Asked { listener, ask, .. } => (self.listeners.get(&listener), Some(ask)),
            CmEvent::AskOver { ask } => {
                self.listeners.values().for_each(|owner| owner.withdraw_ask(ask));
                return None;
            }
            CmEvent::Resolved { query, .. } | CmEvent::Unresolved { query, .. } => {
                (self.queries.get(&query), None)
            }
            _ => return None,
        };
        let Some(put) = owner.and_then(|owner| owner.put(event)) else { return ask };
        woken.append(put);
        None
    }
}

impl Device {
    pub(super) fn cm_listen_datagrams(
        &self,
        service: ServiceId,
        place: Place,
        owner: Arc<dyn Owner>,
    ) -> Result<ListenerId, VerbsError> {
        self.claim((service, place.address), |shard| {
            let listener = shard.cm().listen_datagrams(service, place.address, place.backlog)?;
            shard.cm_owners.services.listeners.insert(listener, owner);
            shard.serve_early();
            Ok(listener)
        })
    }

    pub(super) fn cm_unlisten_datagrams(&self, listener: ListenerId) {
        let mut shard = self.cm_core().hold();
        self.release_claim(&mut shard, listener);
        let owner = shard.cm_owners.services.listeners.remove(&listener);
        let now = shard.now();
        // The program still decides about requests that it has taken.
        let heard = |ask| owner.as_ref().is_none_or(|owner| !owner.has_ask(ask));
        shard.cm().unlisten_datagrams(now, listener, heard);
        shard.serve_cm(now);
    }

    pub fn resolve_into(
        &self,
        way: (IpAddr, IpAddr),
        service: (ServiceId, u16),
        private: &[u8],
        owner: Arc<dyn Owner>,
    ) -> Result<SidrQueryId, VerbsError> {
        let mut shard = self.cm_core().hold();
        if shard.io.is_broken() {
            return Err(gone());
        }
        let now = shard.now();
        let query = shard.cm().resolve(now, way, service, private)?;
        shard.cm_owners.services.queries.insert(query, owner);
        shard.serve_cm(now);
        Ok(query)
    }

    pub(super) fn cm_forget_query(&self, query: SidrQueryId) {
        let mut shard = self.cm_core().hold();
        shard.cm_owners.services.queries.remove(&query);
        shard.cm().forget_query(query);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::mailbox::Mailbox;
    use rocinante_stack::cm::Asked;
    use rocinante_stack::wire::cm::PortSpace;

    #[test]
    fn a_question_that_is_over_leaves_its_listener_whichever_that_is() {
        for over in [1, 2] {
            let mut services = Services::default();
            let mailboxes = [1, 2].map(|number| {
                let mailbox = Arc::new(Mailbox::default());
                services.listeners.insert(ListenerId(number), mailbox.clone());
                mailbox
            });
            let mut woken = Woken::default();
            for number in [1u8, 2] {
                let (local, peer) = ([10, 0, 0, 1].into(), ([10, 0, 0, 2], 7471).into());
                let service = ServiceId::of_port(PortSpace::Udp, 7471);
                let asked = Box::new(Asked { local, peer, service, private: Vec::new() });
                let (listener, ask) = (ListenerId(number.into()), SidrReqId(number.into()));
                let event = CmEvent::Asked { listener, ask, asked };
                assert_eq!(services.deliver(event, &mut woken), None);
            }
            services.deliver(CmEvent::AskOver { ask: SidrReqId(over) }, &mut woken);
            for (mailbox, ask) in mailboxes.iter().zip([1, 2]) {
                assert_eq!(mailbox.has_ask(SidrReqId(ask)), ask != over);
            }
        }
    }
}
