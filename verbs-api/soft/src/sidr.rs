//! Datagram services on a shard: listeners, and queries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rocinante_stack::cm::{CmEvent, ListenerId, QueryId};
use rocinante_stack::wire::cm::{ServiceId, SidrStatus};

use super::Device;
use super::owner::Owner;
use super::shard::Shard;
use crate::model::error::VerbsError;
use crate::provider::manager::Place;

/// The owners of datagram services and questions.
#[derive(Debug, Default)]
pub(super) struct Services {
    listeners: BTreeMap<ListenerId, Arc<dyn Owner>>,
    queries: BTreeMap<QueryId, Arc<dyn Owner>>,
}

impl Services {
    pub(super) fn owners(&self) -> impl Iterator<Item = &Arc<dyn Owner>> {
        self.listeners.values().chain(self.queries.values())
    }
}

impl Shard {
    /// Gives an event of a datagram service to its listener or question.
    pub(super) fn deliver_service(&mut self, event: CmEvent) {
        let services = &self.post.services;
        match event {
            CmEvent::Asked { listener, ask, .. } => {
                let owner = services.listeners.get(&listener);
                match owner.and_then(|owner| owner.put(event)) {
                    Some(woken) => self.host.woken.append(woken),
                    // The listener has just been dropped, or has no room.
                    None => {
                        let now = self.now();
                        let _ = self.cm().answer(now, ask, Err(SidrStatus::REJECT), &[]);
                    }
                }
            }
            CmEvent::AskOver { ask } => {
                services.listeners.values().for_each(|owner| owner.withdraw_ask(ask));
            }
            CmEvent::Resolved { query, .. } | CmEvent::Unresolved { query, .. } => {
                let owner = services.queries.get(&query);
                if let Some(woken) = owner.and_then(|owner| owner.put(event)) {
                    self.host.woken.append(woken);
                }
            }
            _ => {}
        }
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
            shard.post.services.listeners.insert(listener, owner);
            Ok(listener)
        })
    }

    pub(super) fn cm_unlisten_datagrams(&self, listener: ListenerId) {
        let mut shard = self.cm_core().hold();
        self.release_claim(&mut shard, listener);
        let owner = shard.post.services.listeners.remove(&listener);
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
    ) -> Result<QueryId, VerbsError> {
        let mut shard = self.cm_core().hold();
        let now = shard.now();
        let query = shard.cm().resolve(now, way, service, private)?;
        shard.post.services.queries.insert(query, owner);
        shard.serve_cm(now);
        Ok(query)
    }

    pub(super) fn cm_forget_query(&self, query: QueryId) {
        let mut shard = self.cm_core().hold();
        shard.post.services.queries.remove(&query);
        shard.cm().forget_query(query);
    }
}
