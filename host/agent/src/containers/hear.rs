//! The kernel's announcements about containers.

use std::collections::BTreeSet;
use std::time::Instant;

use tracing::Level;

use super::{Container, Containers, FoundEnd, Inner, tell_attached};
use crate::host::{Heard, NsId, SourceFilter};
use crate::limits::Share;
use crate::links::{WayOut, way_out};

/// The subject of an announcement about a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HeardOf {
    HostEnd(u32),
    /// A link of the own namespace that has gone, and may be back.
    Gone(u32),
    /// The interface of one, in its namespace.
    Elsewhere(NsId, u32),
    Anything,
}

impl From<Heard> for HeardOf {
    fn from(heard: Heard) -> Self {
        match heard {
            Heard::Link(index) => Self::HostEnd(index),
            Heard::LinkGone(index) => Self::Gone(index),
            Heard::Elsewhere(namespace, index) => Self::Elsewhere(namespace, index),
            Heard::Anything => Self::Anything,
        }
    }
}

impl Containers {
    /// Acts on announcements of the kernel.
    pub(crate) fn hear(&self, heard: &BTreeSet<HeardOf>) {
        let mut inner = self.lock();
        let mut lost = Vec::new();
        let indices: Vec<u32> = inner.containers.keys().copied().collect();
        for index in indices {
            let Some(container) = inner.containers.get(&index) else { continue };
            let (namespace, interface) = container.peer;
            let concerns = heard.contains(&HeardOf::Anything)
                || heard.contains(&HeardOf::HostEnd(index))
                || heard.contains(&HeardOf::Gone(index))
                || heard.contains(&HeardOf::Elsewhere(namespace, interface));
            if concerns && !inner.follow(index) {
                lost.push(index);
            }
        }
        self.guard_late(&mut inner, heard);
        let lost = lost.into_iter().filter_map(|index| Some((index, inner.remove(index)?)));
        let lost: Vec<_> = lost.collect();
        // One whose pod has a claim may have opened others of its network namespace.
        let of_pods = lost.iter().filter(|(_, it)| it.pod().is_some());
        let of_pods: BTreeSet<u64> = of_pods.map(|(_, it)| it.namespace).collect();
        inner.follow_closed(|it| of_pods.contains(&it.namespace));
        for (_, container) in &lost {
            let Container { namespace, ports, .. } = container;
            if inner.journal.permits(Share::Container(*namespace), Level::INFO, Instant::now()) {
                let container = container.label();
                tracing::info!(container, namespace, ports = ports.len(), "ended");
            }
        }
        if lost.is_empty() {
            // By an address that is new it may be in another.
            self.classify(&inner);
        } else {
            self.write(&inner);
        }
        let misshaped = inner.to_shape(&self.config());
        drop(inner);
        lost.iter().for_each(|(end, container)| container.clear_gone(*end));
        drop(lost);
        self.shape_each(&misshaped);
        self.forget_uplinks(heard);
        self.share_uplinks(false);
    }

    /// Guards interfaces that came to a container after its ports.
    fn guard_late(&self, inner: &mut Inner, heard: &BTreeSet<HeardOf>) {
        let config = self.config();
        for of in heard {
            let HeardOf::Elsewhere(id, index) = *of else { continue };
            let mut known = inner.containers.values().filter(|container| container.peer.0 == id);
            let Some(first) = known.next() else { continue };
            let (namespace, follows) = (first.namespace, first.fixed.is_none());
            let called = first.called.clone();
            if first.peer.1 == index || known.any(|container| container.peer.1 == index) {
                continue;
            }
            let Ok(link) = inner.namespaces.link(Some(id), index) else {
                inner.lost_unguarded(id, index);
                continue;
            };
            match way_out(&mut inner.namespaces, id, &link) {
                WayOut::None => {}
                WayOut::HostEnd(host) => {
                    let of = (namespace, None, None);
                    let found = inner.found(&config, (id, follows), of, (&link, host));
                    let Ok(found) = found else { continue };
                    let (end, interface) = (found.end.clone(), found.interface.clone());
                    let allowed = inner.allowed_of(&found);
                    if let Err(e) = SourceFilter::attach(end.index, &allowed) {
                        inner.journal.failed(namespace, &end.name, "cannot be guarded", &e);
                        continue;
                    }
                    let container = FoundEnd { introduced: None, called, ..found }.container(None);
                    tell_attached(&inner.journal, &container, &interface);
                    let old = inner.containers.insert(end.index, container);
                    // It may have gone.
                    if !inner.follow(end.index) {
                        inner.remove(end.index);
                    }
                    // It may have come from a pod whose claim opened others.
                    if let Some(old) = old.filter(|old| old.pod().is_some()) {
                        inner.follow_closed(|it| it.namespace == old.namespace);
                    }
                    self.write(inner);
                }
                WayOut::Unguarded => {
                    let rule = self.config().other_ways_out;
                    inner.came_unguarded(id, (index, &link.name), rule);
                }
            }
        }
    }
}
