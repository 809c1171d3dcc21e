//! Which network namespaces have a host's end. A program can make any number of others.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Mutex, PoisonError};
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
    with_end: BTreeSet<NsId>,
    read: Option<Instant>,
}

impl Ends {
    /// Those of the calling thread's network namespace.
    pub(crate) fn new() -> io::Result<Self> {
        let namespaces = Namespaces::open()?;
        let inner = Inner { namespaces, with_end: BTreeSet::new(), read: None };
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
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(Some(id)) = inner.namespaces.known_id(namespace.file()) else { return false };
        if inner.read.is_none_or(|read| read.elapsed() >= FRESH) {
            let Ok(links) = inner.namespaces.links(None) else { return false };
            inner.with_end = links.iter().filter_map(|it| Some(peer_elsewhere(it)?.0)).collect();
            inner.read = Some(Instant::now());
        }
        inner.with_end.contains(&id)
    }
}
