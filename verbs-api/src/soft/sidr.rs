//! Datagram services on a shard: listeners, and queries.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rocinante_stack::cm::{AskId, CmEvent, ListenerId, QueryId};
use rocinante_stack::wire::cm::{PortSpace, ServiceId, SidrStatus};

use super::Device;
use super::shard::Shard;
use crate::model::error::VerbsError;
use crate::provider::mailbox::Mailbox;
use crate::provider::manager::Place;
use crate::provider::random::random;

/// The mailboxes for events of datagram services.
#[derive(Debug, Default)]
pub(super) struct Services {
    listeners: BTreeMap<ListenerId, Arc<Mailbox>>,
    queries: BTreeMap<QueryId, Arc<Mailbox>>,
}

impl Services {
    pub(super) fn mailboxes(&self) -> impl Iterator<Item = &Arc<Mailbox>> {
        self.listeners.values().chain(self.queries.values())
    }
}

impl Shard {
    /// Puts an event of a datagram service into the mailbox of its listener or query.
    pub(super) fn deliver_service(&mut self, event: CmEvent) {
        let services = &self.post.services;
        match &event {
            CmEvent::Asked { listener, ask, .. } => match services.listeners.get(listener) {
                Some(mailbox) => self.host.woken.append(mailbox.push(event)),
                // The listener has just been dropped.
                None => {
                    let (ask, now) = (*ask, self.now());
                    let _ = self.cm().answer(now, ask, Err(SidrStatus::REJECT), &[]);
                }
            },
            CmEvent::AskOver { ask } => {
                for mailbox in services.listeners.values() {
                    mailbox.retain(|event| !is_asked(event, *ask));
                }
            }
            CmEvent::Resolved { query, .. } | CmEvent::Unresolved { query, .. } => {
                if let Some(mailbox) = services.queries.get(query) {
                    self.host.woken.append(mailbox.push(event));
                }
            }
            _ => {}
        }
    }
}

fn is_asked(event: &CmEvent, of: AskId) -> bool {
    matches!(event, CmEvent::Asked { ask, .. } if *ask == of)
}

impl Device {
    pub(super) fn cm_listen_datagrams(
        &self,
        place: Place,
    ) -> Result<(ListenerId, Arc<Mailbox>), VerbsError> {
        let service = ServiceId::of_port(PortSpace::Udp, place.port);
        self.claim((service, place.address), |shard| {
            let listener = shard.cm().listen_datagrams(service, place.address, place.backlog)?;
            let mailbox = Arc::new(Mailbox::default());
            shard.post.services.listeners.insert(listener, mailbox.clone());
            Ok((listener, mailbox))
        })
    }

    pub(super) fn cm_unlisten_datagrams(&self, listener: ListenerId) {
        let mut shard = self.cm_core().hold();
        self.release_claim(&mut shard, listener);
        let mailbox = shard.post.services.listeners.remove(&listener);
        let now = shard.now();
        // The program still decides about requests that it has taken.
        let heard = |ask| mailbox.as_ref().is_none_or(|it| !it.any(|event| is_asked(event, ask)));
        shard.cm().unlisten_datagrams(now, listener, heard);
        shard.serve_cm(now);
    }

    pub(super) fn cm_resolve(
        &self,
        local: IpAddr,
        peer: SocketAddr,
        private: &[u8],
    ) -> Result<(QueryId, Arc<Mailbox>), VerbsError> {
        let service = ServiceId::of_port(PortSpace::Udp, peer.port());
        #[allow(clippy::cast_possible_truncation)]
        let source_port = 0x8000 | random()? as u16;
        let mut shard = self.cm_core().hold();
        let now = shard.now();
        let way = (local, peer.ip());
        let query = shard.cm().resolve(now, way, (service, source_port), private)?;
        let mailbox = Arc::new(Mailbox::default());
        shard.post.services.queries.insert(query, mailbox.clone());
        shard.serve_cm(now);
        Ok((query, mailbox))
    }

    pub(super) fn cm_forget_query(&self, query: QueryId) {
        let mut shard = self.cm_core().hold();
        shard.post.services.queries.remove(&query);
        shard.cm().forget_query(query);
    }
}
