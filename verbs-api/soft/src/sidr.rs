//! Datagram services on a shard: listeners, and queries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rocinante_stack::cm::{CmEvent, ListenerId, SidrQueryId, SidrReqId};
use rocinante_stack::wire::cm::ServiceId;

use super::Device;
use super::owner::Owner;
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
