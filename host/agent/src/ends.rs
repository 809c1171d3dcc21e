//! Which network namespaces have a host's end. A program can make any number of others.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::host::{Namespaces, NsId};

use crate::asker::{Asker, Namespace, Own};
use crate::limits::Share;
use crate::links::peer_elsewhere;

/// How long a list of all ends is used: to read it takes the kernel a millisecond for 200.
const FRESH: Duration = Duration::from_millis(50);

/// The host's ends. A list of its own, so that no question waits for work on a container.
#[derive(Debug)]
pub(crate) struct Ends {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    namespaces: Namespaces,
    all: BTreeMap<u32, End>,
    read: Option<Instant>,
}

/// A host's end.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) name: String,
    namespace: NsId,
    /// The index of the container's interface in its namespace.
    peer: u32,
}

impl Ends {
    /// Those of the calling thread's network namespace.
    pub(crate) fn new() -> io::Result<Self> {
        let namespaces = Namespaces::open()?;
        let inner = Inner { namespaces, all: BTreeMap::new(), read: None };
        Ok(Self { inner: Mutex::new(inner) })
    }

    /// The share of a program.
    pub(crate) fn share_of(&self, asker: &Asker, own: &Own) -> Share {
        let inode = asker.namespace.inode();
        if inode == own.network().inode() {
            return Share::User(asker.user.0);
        }
        if self.has_end(&asker.namespace) { Share::Container(inode) } else { Share::Stranger }
    }

    fn has_end(&self, namespace: &Namespace) -> bool {
        self.end_of(namespace).is_some()
    }

    /// The first host's end of a namespace, with its index.
    pub(crate) fn end_of(&self, namespace: &Namespace) -> Option<(u32, End)> {
        self.end_of_interface(namespace, None)
    }

    /// That of an interface of the namespace, by its index there, or the first.
    pub(crate) fn end_of_interface(
        &self,
        namespace: &Namespace,
        interface: Option<u32>,
    ) -> Option<(u32, End)> {
        let mut inner = self.lock();
        let id = inner.namespaces.known_id(namespace.file()).ok()??;
        let all = inner.fresh(Instant::now()).ok()?;
        let is_it = |end: &End| {
            end.namespace == id && interface.is_none_or(|interface| interface == end.peer)
        };
        let (index, end) = all.iter().find(|(_, end)| is_it(end))?;
        Some((*index, end.clone()))
    }

    /// All, by their indices.
    pub(crate) fn all(&self) -> io::Result<BTreeMap<u32, End>> {
        self.all_at(Instant::now())
    }

    /// The same for a question at this time.
    pub(crate) fn all_at(&self, now: Instant) -> io::Result<BTreeMap<u32, End>> {
        self.lock().fresh(now).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn fresh(&mut self, now: Instant) -> io::Result<&BTreeMap<u32, End>> {
        if self.read.is_none_or(|read| now.saturating_duration_since(read) >= FRESH) {
            let links = self.namespaces.links(None)?.into_iter();
            let ends = links.filter_map(|it| {
                let (namespace, peer) = peer_elsewhere(&it)?;
                Some((it.index, End { name: it.name, namespace, peer }))
            });
            self.all = ends.collect();
            self.read = Some(now);
        }
        Ok(&self.all)
    }
}
