//! Interfaces of containers by which frames leave that are judged by nothing on this host.

use std::collections::BTreeMap;
use std::time::Instant;

use tracing::Level;

use super::Inner;
use crate::config::OtherWaysOut;
use crate::host::NsId;
use crate::limits::Share;
use crate::links::{WayOut, way_out};
use crate::log::short;

/// Those of a container that are named. It may make any number.
const NAMED_MAX: usize = 16;

/// Names, by index.
pub(super) type Unguarded = BTreeMap<u32, String>;

impl Inner {
    /// Those of a network namespace.
    pub(super) fn unguarded(&mut self, id: NsId) -> Unguarded {
        let links = self.namespaces.links(Some(id)).unwrap_or_default();
        let leaves = links
            .into_iter()
            .filter(|link| matches!(way_out(&mut self.namespaces, id, link), WayOut::Unguarded));
        leaves.map(|link| (link.index, link.name)).take(NAMED_MAX).collect()
    }

    /// Notes all of a container that is known.
    pub(super) fn has_unguarded(&mut self, id: NsId, now: &Unguarded, rule: OtherWaysOut) {
        self.each_end(id, |known| known.retain(|index, _| now.contains_key(index)));
        now.iter().for_each(|(index, name)| self.came_unguarded(id, (*index, name), rule));
    }

    /// Notes one, and names it in the log if it is new.
    pub(super) fn came_unguarded(
        &mut self,
        id: NsId,
        (index, name): (u32, &str),
        rule: OtherWaysOut,
    ) {
        let mut is_new = false;
        self.each_end(id, |known| {
            if known.len() < NAMED_MAX {
                is_new |= known.insert(index, name.to_owned()).is_none();
            }
        });
        let mut ends = self.containers.values();
        let Some(first) = ends.find(|it| is_new && it.peer.0 == id) else { return };
        let level = match rule {
            OtherWaysOut::Accept => Level::WARN,
            OtherWaysOut::Refuse => Level::ERROR,
        };
        if !self.journal.permits(Share::Container(first.namespace), level, Instant::now()) {
            return;
        }
        let (container, interface) = (first.label(), short(name));
        match rule {
            OtherWaysOut::Accept => tracing::warn!(
                container,
                interface,
                "forged frames that leave by it are not kept back"
            ),
            OtherWaysOut::Refuse => tracing::error!(
                container,
                interface,
                "an interface came to a container with ports, and forged frames that leave by it \
                 cannot be kept back"
            ),
        }
    }

    /// Forgets one that has gone.
    pub(super) fn lost_unguarded(&mut self, id: NsId, index: u32) {
        self.each_end(id, |known| drop(known.remove(&index)));
    }

    fn each_end(&mut self, id: NsId, mut change: impl FnMut(&mut Unguarded)) {
        let ends = self.containers.values_mut().filter(|it| it.peer.0 == id);
        ends.for_each(|container| change(&mut container.unguarded));
    }
}
