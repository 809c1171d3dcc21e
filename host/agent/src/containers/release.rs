//! Containers are released: the programs at their hosts' ends go, and all that is known of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use super::Containers;
use crate::control::Reply;
use crate::host::{NsId, Shaper, SourceFilter, is_ours};
use crate::log::Listed;

impl Containers {
    /// Releases the container that an operator means, or all; none if several are meant. One with
    /// ports, or with a request under way, goes only with `force`. It goes with all its hosts'
    /// ends: a port sends by each of them.
    pub(crate) fn release(&self, name: Option<&str>, force: bool, each: &mut dyn FnMut(Reply)) {
        let inner = self.lock();
        let meant = name.map(|name| inner.meant(name));
        let mut all = BTreeMap::<NsId, String>::new();
        for (end, container) in &inner.containers {
            if meant.as_ref().is_none_or(|meant| meant.contains(end)) {
                all.entry(container.peer.0).or_insert_with(|| container.label());
            }
        }
        drop(inner);
        let reason = match (name, all.len()) {
            (Some(name), 0) => Some(format!("no container is called {name:?}")),
            (Some(name), 2..) => {
                Some(format!("{name:?} means several containers: {:?}", Listed(all.values())))
            }
            _ => None,
        };
        if let Some(reason) = reason {
            return each(Reply::Refused { reason });
        }
        all.into_keys().for_each(|namespace| self.release_one(namespace, force, each));
        self.share_uplinks(false);
        if name.is_none() {
            self.release_unknown(each);
            if self.lock().containers.is_empty()
                && let Err(error) = self.unshare_all()
            {
                tracing::warn!("shares of uplinks stay: {error}");
            }
        }
    }

    fn release_one(&self, namespace: NsId, force: bool, each: &mut dyn FnMut(Reply)) {
        let inner = self.lock();
        let of_it = inner.containers.iter().filter(|(_, it)| it.peer.0 == namespace);
        let ends: BTreeSet<u32> = of_it.map(|(end, _)| *end).collect();
        drop(inner);
        // So that no request puts a program there meanwhile.
        let turns: Vec<_> = ends.iter().map(|end| self.turn_of(*end)).collect();
        let _turns: Vec<_> =
            turns.iter().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let mut inner = self.lock();
        let of_it = |end: &u32| inner.containers.get(end).filter(|it| it.peer.0 == namespace);
        let ports: usize = ends.iter().filter_map(of_it).map(|it| it.ports.len()).sum();
        let is_asking = ends.iter().any(|end| inner.reserved.contains_key(end));
        let names = ends.iter().filter_map(|end| Some((*end, of_it(end)?.name.clone())));
        let names: Vec<(u32, String)> = names.collect();
        if !force && (ports > 0 || is_asking) {
            let reason =
                if ports > 0 { "it has open ports" } else { "a request of it is under way" };
            for (_, name) in names {
                each(Reply::Kept { name, reason: reason.into() });
            }
            return;
        }
        let gone: Vec<_> = names.iter().filter_map(|(end, _)| inner.remove(*end)).collect();
        self.write(&inner);
        drop(inner);
        // The kernel takes its time with the rings of ports, and with programs.
        drop(gone);
        for (end, name) in names {
            each(self.detach(end, name));
        }
    }

    /// Takes the programs off an end whose turn this thread has.
    pub(super) fn detach(&self, end: u32, name: String) -> Reply {
        let detached = SourceFilter::detach_all(end).and_then(|()| Shaper::open()?.clear(end));
        let mut inner = self.lock();
        // An announcement made it known again meanwhile: then the program is to be there.
        if inner.containers.contains_key(&end) && !inner.follow(end) {
            inner.remove(end);
        }
        match detached {
            Err(error) => {
                Reply::Kept { name, reason: format!("what is at its end stays: {error}") }
            }
            Ok(()) => {
                tracing::info!(container = name, "released");
                Reply::Released { name }
            }
        }
    }

    /// Takes off programs of ours that are on other links.
    fn release_unknown(&self, each: &mut dyn FnMut(Reply)) {
        let Ok(links) = self.lock().namespaces.links(None) else { return };
        for link in links {
            let turn = self.turn_of(link.index);
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let is_known = self.lock().containers.contains_key(&link.index);
            if !is_known && matches!(is_ours(&link), Ok(true)) {
                each(self.detach(link.index, link.name));
            }
        }
        if let Err(error) = self.remove_ifbs() {
            tracing::warn!("parts of containers that have gone stay: {error}");
        }
    }
}
