//! The state that an earlier agent left.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use rocinante_netdev::{Kept, keep_again};

use super::ports::{Port, PortId};
use super::rates::Shaped;
use super::{Container, Containers, Inner, no_filter};
use crate::asker::Own;
use crate::holders::Holder;
use crate::host::{SourceFilter, Sources};
use crate::limits::Share;
use crate::links::peer_elsewhere;
use crate::state::{Known, KnownPort};

impl Containers {
    /// Takes over from an earlier agent: the programs at the hosts' ends, and its ports. Returns
    /// those ports, of which some may have no holder any more.
    pub(crate) fn recover(&self, own: &Own) -> io::Result<Vec<PortId>> {
        let state = self.state.read().unwrap_or_else(|why| {
            tracing::warn!("the state is not used: {why}");
            Default::default()
        });
        if let Err(error) = SourceFilter::try_apart() {
            let reason = no_filter(&error, "an interface");
            tracing::error!("containers get no ports: {reason}");
        }
        let mut inner = self.lock();
        inner.claims.0 = state.claims.into_iter().map(|it| (it.uid.clone(), it)).collect();
        let known: BTreeMap<u32, Known> =
            state.containers.into_iter().map(|known| (known.host_end, known)).collect();
        let (mut held, mut ends) = (Vec::new(), Vec::new());
        for link in inner.namespaces.links(None)? {
            let Some(peer) = peer_elsewhere(&link) else { continue };
            let known = known.get(&link.index).filter(|k| k.interface == peer.1);
            let filter = SourceFilter::find(link.index)?;
            let fixed = match (known, &filter) {
                (Some(Known { fixed, .. }), _) => fixed.clone().map(Sources::from),
                // The state is lost: the addresses that the program lets through are all that is
                // known.
                (None, Some(filter)) => Some(filter.sources()?.unwrap_or_default()),
                // None of ours.
                (None, None) => continue,
            };
            let namespace = known.map_or(0, |known| known.namespace);
            let introduced = known.and_then(|known| known.introduced.clone());
            let called = known.and_then(|known| known.called.clone());
            let filter = filter.as_ref();
            // Changes since then are announced as followed ones.
            let before = filter.map(SourceFilter::sources).transpose()?.flatten();
            let before = before.unwrap_or_default();
            let container = Container {
                name: link.name,
                peer,
                namespace,
                fixed,
                introduced,
                called,
                unguarded: inner.unguarded(peer.0),
                sources: Sources { is_closed: namespace == 0 && before.is_closed, ..before },
                dropped: filter.map(SourceFilter::all_dropped).transpose()?.unwrap_or_default(),
                ports: BTreeMap::new(),
                // It may have rates from before.
                shaped: Shaped::unknown(),
            };
            inner.journal.names(Share::Container(namespace), &container.label());
            inner.containers.insert(link.index, container);
            ends.push((link.index, known));
        }
        // All are known: one may be open by another's claim.
        let mut are_gone = false;
        for (end, known) in ends {
            if !inner.follow(end) {
                are_gone |= inner.remove(end).is_some();
                continue;
            }
            for port in known.into_iter().flat_map(|known| &known.ports) {
                held.extend(inner.take_up(end, port, own));
            }
        }
        if are_gone {
            inner.follow_closed(|_| true);
        }
        if !inner.containers.is_empty() {
            let containers = inner.containers.len();
            tracing::info!(containers, ports = held.len(), "took over from an earlier agent");
        }
        self.write(&inner);
        drop(inner);
        self.shape_all();
        Ok(held)
    }
}

impl Containers {
    /// Guards the rings of a port that an earlier agent handed over, by copies of its holder's
    /// descriptors.
    pub(crate) fn guard_again(&self, port: PortId, holder: &Holder) {
        let ring = self.lock().unguarded_port(port).and_then(|it| it.ring);
        let Some(ring) = ring else { return };
        let again = |(socket, _): &(u64, i32)| keep_again(holder.copy_of(*socket)?, ring).ok();
        let kept: Vec<Kept> = holder.sockets.iter().filter_map(again).collect();
        if let Some(port) = self.lock().unguarded_port(port) {
            // An older agent did not write it.
            port.bytes = port.bytes.max(kept.iter().map(Kept::ring_bytes).sum());
            port.kept = kept;
        }
    }
}

impl Inner {
    fn unguarded_port(&mut self, PortId { host_end, number }: PortId) -> Option<&mut Port> {
        let port = self.containers.get_mut(&host_end)?.ports.get_mut(&number);
        port.filter(|port| port.kept.is_empty())
    }

    /// Notes a port that an earlier agent handed over, as it was written.
    pub(super) fn take_up(&mut self, host_end: u32, port: &KnownPort, own: &Own) -> Option<PortId> {
        let container = self.containers.get_mut(&host_end)?;
        if container.namespace == own.network().inode() {
            return None;
        }
        let sockets: BTreeSet<u64> = port.sockets.iter().copied().collect();
        let number = self.next_port;
        self.next_port += 1;
        let &KnownPort { ring, bytes, slots, .. } = port;
        container.ports.insert(number, Port { sockets, ring, kept: Vec::new(), bytes, slots });
        Some(PortId { host_end, number })
    }
}
