//! The containers that the agent knows: the host's end of each, the source addresses that may leave
//! there, and the ports that it handed over.
//!
//! [`Containers::find`] and [`Containers::attach`] are the one way to become known. The rules in
//! force are in the kernel; this module keeps the state that maintains them.

mod claims;
mod classes;
mod closed;
mod hear;
mod introduce;
mod mtu;
mod ports;
mod promise;
mod rates;
mod recover;
mod release;
mod report;
mod uplinks;
mod ways_out;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rocinante_netdev::handed::{Code, Refused};
use tokio::sync::watch;
use tracing::Level;

use crate::asker::Namespace;
use crate::called::Called;
use crate::claims::Claims;
use crate::class::Bounds;
use crate::config::{Config, DefaultPolicy, OtherWaysOut, SelfAdministered};
use crate::control::About;
use crate::host::{Attached, HostLink, Namespaces, NsId, SourceFilter, Sources, announce};
use crate::journal::{Drops, Journal, Seldom};
use crate::limits::{Limits, Share};
use crate::links::{
    WayOut, ends, failed, is_gone, not_guarded, peer_elsewhere, sources_of, way_out,
};
use crate::log::{Listed, short};
use crate::pages::Pages;
use crate::state::{Fixed, Introduced, Known, KnownPort, StateFile};
use crate::steps;

use self::classes::subject;
use self::closed::allowed;
pub(crate) use self::hear::HeardOf;
pub(crate) use self::ports::PortId;
use self::ports::{Port, Taken};
use self::rates::Shaped;
pub(crate) use self::report::Totals;
use self::uplinks::Uplinks;
use self::ways_out::Unguarded;

/// The most links of a container: the kernel is asked about each, while other containers wait.
const LINKS_MAX: usize = 1024;

/// The facts about a container beside its namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hints<'a> {
    /// The index of the container's interface.
    pub(crate) interface: u32,
    /// Whether its processes may change its addresses.
    pub(crate) is_administered_by_itself: bool,
    /// What its engine says before it runs. So the addresses of now are those that it was given.
    pub(crate) about: Option<&'a About>,
    /// Its name by the control group of the process that asks.
    pub(crate) called: Option<&'a Called>,
}

/// What [`Containers::find`] found.
#[derive(Debug)]
pub(crate) struct Found {
    /// The host's end of the interface that is asked for.
    end: FoundEnd,
    /// Those of the container's other interfaces.
    others: Vec<FoundEnd>,
    unguarded: Unguarded,
}

impl Found {
    /// The host's end of the interface that is asked for.
    pub(crate) fn end(&self) -> &HostEnd {
        &self.end.end
    }
}

#[derive(Debug)]
struct FoundEnd {
    end: HostEnd,
    peer: (NsId, u32),
    namespace: u64,
    fixed: Option<Sources>,
    introduced: Option<Introduced>,
    called: Option<Called>,
    /// The name of the container's interface, by the container.
    interface: String,
}

impl FoundEnd {
    /// The container as it is kept, which goes on from an older one at this end.
    fn container(self, old: Option<Container>) -> Container {
        let Self { end, peer, namespace, fixed, introduced, called, .. } = self;
        let (ports, dropped, unguarded, shaped) =
            old.map(|old| (old.ports, old.dropped, old.unguarded, old.shaped)).unwrap_or_default();
        let HostEnd { name, sources, .. } = end;
        Container {
            name,
            peer,
            namespace,
            fixed,
            introduced,
            called,
            unguarded,
            sources,
            dropped,
            ports,
            shaped,
        }
    }
}

/// The host's end of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostEnd {
    pub(crate) index: u32,
    pub(crate) name: String,
    /// The source addresses that may leave there.
    pub(crate) sources: Sources,
    /// The limits of its class.
    pub(crate) bounds: Bounds,
}

#[derive(Debug)]
pub(crate) struct Containers {
    config: Mutex<Arc<Config>>,
    state: StateFile,
    inner: Mutex<Inner>,
    /// By the index of the host's end.
    turns: Mutex<HashMap<u32, Weak<Mutex<()>>>>,
    unwritten: Mutex<Seldom>,
    limits: Arc<Limits>,
    pages: Arc<Pages>,
    uplinks: Mutex<Uplinks>,
    news: watch::Sender<()>,
}

#[derive(Debug)]
struct Inner {
    namespaces: Namespaces,
    /// By the index of the host's end.
    containers: BTreeMap<u32, Container>,
    claims: Claims,
    policy: DefaultPolicy,
    /// The resources of ports that are being made, by the index of the host's end.
    reserved: BTreeMap<u32, Taken>,
    next_port: u64,
    /// The network namespaces that are cut off, and since when.
    cut_off: BTreeMap<u64, Instant>,
    journal: Arc<Journal>,
}

#[derive(Debug)]
struct Container {
    name: String,
    /// The number of its namespace, and its interface there.
    peer: (NsId, u32),
    namespace: u64,
    /// The source addresses that may leave, if they do not follow the namespace's addresses.
    fixed: Option<Sources>,
    introduced: Option<Introduced>,
    called: Option<Called>,
    unguarded: Unguarded,
    /// The source addresses that may leave now.
    sources: Sources,
    /// Frames that were dropped, as far as the log has them.
    dropped: Drops,
    ports: BTreeMap<u64, Port>,
    shaped: Shaped,
}

impl Containers {
    pub(crate) fn new(
        config: &Config,
        state: StateFile,
        journal: &Arc<Journal>,
        (limits, pages): (&Arc<Limits>, &Arc<Pages>),
    ) -> io::Result<Self> {
        let namespaces = Namespaces::open()?;
        let inner = Inner {
            namespaces,
            containers: BTreeMap::new(),
            claims: Claims::default(),
            policy: config.default_policy,
            reserved: BTreeMap::new(),
            next_port: 0,
            cut_off: BTreeMap::new(),
            journal: Arc::clone(journal),
        };
        Ok(Self {
            config: Mutex::new(Arc::new(config.clone())),
            state,
            inner: Mutex::new(inner),
            turns: Mutex::default(),
            unwritten: Mutex::default(),
            limits: Arc::clone(limits),
            pages: Arc::clone(pages),
            uplinks: Mutex::default(),
            news: watch::Sender::new(()),
        })
    }

    /// The configuration in force.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another one in force, for later requests.
    pub(crate) fn configure(&self, config: Config) {
        self.limits.set_rate(config.requests_per_second);
        let policy = config.default_policy;
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
        let mut inner = self.lock();
        inner.has_policy(policy);
        self.classify(&inner);
    }

    /// Looks for the host's end of a container's interface, and the addresses that may leave there.
    /// Error: the refusal to send.
    pub(crate) fn find(&self, namespace: &Namespace, hints: Hints<'_>) -> Result<Found, Refused> {
        let config = self.config();
        let rule = config.self_administered;
        if hints.is_administered_by_itself && rule == SelfAdministered::Refuse {
            let reason = "your container may change its own addresses";
            let hint = "run it without CAP_NET_ADMIN, or see self_administered in agent.toml";
            return Err(Refused::new(Code::Forbidden, reason, hint));
        }
        let mut inner = self.lock();
        if inner.cut_off.contains_key(&namespace.inode()) {
            let reason = "your container's programs hold more than its rdma_max";
            return Err(Refused::new(Code::Forbidden, reason, "close some devices"));
        }
        let id = inner.namespaces.id(namespace.file()).map_err(|e| failed("number", &e))?;
        let follows = !hints.is_administered_by_itself || rule == SelfAdministered::Follow;
        let (own, host) = ends(&mut inner.namespaces, id, hints.interface)?;
        let of = (namespace.inode(), hints.about, hints.called);
        let end = inner.found(&config, (id, follows), of, (&own, host))?;
        // An engine that adds an interface says nothing of those that the container has already.
        let of = (of.0, hints.about.filter(|about| about.interface.is_none()), of.2);
        // A port can send from each interface of its namespace.
        let all = inner.namespaces.links(Some(id)).map_err(|e| failed("list", &e))?;
        if all.len() > LINKS_MAX {
            let reason = format!("your network namespace has {} interfaces", all.len());
            return Err(Refused::new(Code::Interface, reason, "remove those that are not used"));
        }
        let accepts = config.other_ways_out == OtherWaysOut::Accept;
        let (mut others, mut unguarded) = (Vec::new(), Unguarded::new());
        for link in all.iter().filter(|link| link.index != own.index) {
            match way_out(&mut inner.namespaces, id, link) {
                WayOut::None => {}
                WayOut::HostEnd(host) => {
                    others.push(inner.found(&config, (id, follows), of, (link, host))?);
                }
                WayOut::Unguarded if accepts => {
                    unguarded.insert(link.index, link.name.clone());
                }
                WayOut::Unguarded => {
                    return Err(not_guarded(&mut inner.namespaces, link));
                }
            }
        }
        Ok(Found { end, others, unguarded })
    }

    /// Makes the interface of a container one that may have ports: from then on only its own
    /// addresses leave it. May be called again, and repairs a missing part.
    ///
    /// The kernel takes its time to put a program there, so other containers do not wait for it.
    /// Error: the refusal to send.
    pub(crate) fn attach(&self, found: Found) -> Result<HostEnd, Refused> {
        let Found { end, others, unguarded } = found;
        let id = end.peer.0;
        others.into_iter().try_for_each(|other| self.guard(other).map(drop))?;
        let end = self.guard(end)?;
        // Only accepted ones are found.
        self.lock().has_unguarded(id, &unguarded, OtherWaysOut::Accept);
        Ok(end)
    }

    fn guard(&self, found: FoundEnd) -> Result<HostEnd, Refused> {
        let (end, namespace, peer) = (found.end.clone(), found.namespace, found.peer);
        let turn = self.turn_of(end.index);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let allowed = self.lock().allowed_of(&found);
        let (_, how) =
            SourceFilter::attach(end.index, &allowed).map_err(|e| no_filter(&e, &end.name))?;
        steps::reached("filter attached");
        tell_mended(how, &end.name);
        let mut inner = self.lock();
        let old = inner.containers.get(&end.index);
        let is_new = old.is_none_or(|old| old.namespace != namespace);
        let old = match is_new {
            true => inner.remove(end.index),
            false => inner.containers.remove(&end.index),
        };
        let left = old.as_ref().map(|old| old.namespace);
        let is_sibling = |it: &Container| it.namespace == namespace || Some(it.namespace) == left;
        let interface = found.interface.clone();
        let container = found.container(old);
        inner.journal.names(Share::Container(namespace), &container.label());
        if is_new {
            tell_attached(&inner.journal, &container, &interface);
        }
        inner.containers.insert(end.index, container);
        // A change since the addresses were read was announced before the container was in the
        // table.
        if !inner.follow(end.index) {
            inner.remove(end.index);
            inner.follow_closed(is_sibling);
            return Err(Refused::new(Code::Interface, "your interface has gone", ""));
        }
        inner.follow_closed(|it| is_sibling(it) && it.peer != peer);
        self.write(&inner);
        steps::reached("filter recorded");
        drop(inner);
        self.shape(end.index)?;
        self.share_uplinks(false);
        Ok(end)
    }

    /// The lock of a host's end, so that two do not put a program there at once.
    fn turn_of(&self, host_end: u32) -> Arc<Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = turns.get(&host_end).and_then(Weak::upgrade).unwrap_or_default();
        turns.insert(host_end, Arc::downgrade(&turn));
        turn
    }

    /// Counts the forged frames that were dropped since the last call. Returns the network
    /// namespaces of all containers.
    pub(crate) fn count_forged(&self) -> BTreeSet<u64> {
        let inner = self.lock();
        let ends: Vec<(u32, u64)> =
            inner.containers.iter().map(|(end, container)| (*end, container.namespace)).collect();
        // Nothing waits for these questions to the kernel.
        drop(inner);
        for (end, _) in &ends {
            let Ok(Some(filter)) = SourceFilter::find(*end) else { continue };
            let Ok(now) = filter.all_dropped() else { continue };
            let mut inner = self.lock();
            let Some(container) = inner.containers.get_mut(end) else { continue };
            let before = std::mem::replace(&mut container.dropped, now);
            let share = Share::Container(container.namespace);
            inner.journal.forged(share, &more_than(&before, &now));
        }
        ends.into_iter().map(|(_, namespace)| namespace).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, inner: &Inner) {
        let known = |(host_end, container): (&u32, &Container)| Known {
            host_end: *host_end,
            interface: container.peer.1,
            namespace: container.namespace,
            fixed: container.fixed.as_ref().map(Fixed::from),
            introduced: container.introduced.clone(),
            called: container.called.clone(),
            ports: container.ports.values().map(KnownPort::from).collect(),
        };
        let claims = inner.claims.0.values().cloned().collect();
        if let Err(error) = self.state.write(inner.containers.iter().map(known).collect(), claims) {
            // The rules in force stay; only a restarted agent would miss them.
            let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            if unwritten.permits(Instant::now()) {
                tracing::error!("the state cannot be written: {error}");
            }
        }
        self.classify(inner);
        steps::reached("state written");
    }
}

impl Inner {
    /// A host's end, with the addresses that may leave there.
    fn found(
        &mut self,
        config: &Config,
        (id, follows): (NsId, bool),
        (namespace, about, called): (u64, Option<&About>, Option<&Called>),
        (own, host): (&HostLink, HostLink),
    ) -> Result<FoundEnd, Refused> {
        let now = sources_of(&mut self.namespaces, id, own);
        let now = now.map_err(|e| failed("read addresses of", &e))?;
        let peer = (id, own.index);
        let known = self.containers.get(&host.index);
        // After the state file was lost the namespace is 0, unknown. A container that may change
        // its addresses then keeps those that its filter lets through.
        let is_same = |of: u64| of == namespace || of == 0 && !follows;
        let known = known.filter(|c| c.peer == peer && is_same(c.namespace));
        let before = known.and_then(|known| known.introduced.as_ref());
        let mut introduced = match about {
            Some(about) => Some(about.introduced(&now, before)),
            None => before.cloned(),
        };
        if let Some(it) = &mut introduced {
            it.claimed = self.claims.claimed(it.pod.as_deref());
        }
        let called = called.or(known.and_then(|known| known.called.as_ref())).cloned();
        let given = introduced.as_ref().map(|it| narrowed(&it.given.clone().into(), &now));
        let fixed = match known {
            // Once fixed it stays so, whichever process of the container asks or begins.
            Some(Container { fixed: Some(fixed), .. }) if !about.is_some_and(About::gives) => {
                Some(narrowed(fixed, &now))
            }
            // One of its processes may change them, now that we know: they stay as they are, or as
            // its engine gave them.
            Some(_) | None => (!follows).then(|| given.unwrap_or_else(|| now.clone())),
        };
        let sources = fixed.clone().unwrap_or(now);
        let bounds = config.bounds(&subject(&host.name, introduced.as_ref(), &sources))?;
        let end = HostEnd { index: host.index, name: host.name, sources, bounds };
        let interface = own.name.clone();
        Ok(FoundEnd { end, peer, namespace, fixed, introduced, called, interface })
    }

    /// Forgets a host's end. A later network namespace may have the number of one without ends, so
    /// such a number is cut off no more, and the log knows it no more.
    fn remove(&mut self, end: u32) -> Option<Container> {
        let gone = self.containers.remove(&end)?;
        if self.containers.values().all(|it| it.namespace != gone.namespace) {
            self.cut_off.remove(&gone.namespace);
            self.journal.forget(Share::Container(gone.namespace));
        }
        Some(gone)
    }

    /// Announces a container that has another address, if its end is a port of a bridge.
    fn announce(&mut self, end: u32, host: &HostLink, mac: [u8; 6]) {
        let bridge = host.master.and_then(|it| self.namespaces.link(None, it).ok());
        let Some(bridge) = bridge.filter(|it| it.kind == "bridge") else { return };
        if let Err(e) = announce(bridge.index, end, mac)
            && let Some(Container { namespace, name, .. }) = self.containers.get(&end)
        {
            self.journal.failed(*namespace, name, "cannot be announced", &e);
        }
    }

    /// Lets out the addresses that the container has now, or fewer. Returns whether it is still
    /// there.
    fn follow(&mut self, index: u32) -> bool {
        let Some(container) = self.containers.get(&index) else { return false };
        let is_closed = self.closes(container);
        let Some(container) = self.containers.get_mut(&index) else { return false };
        let host = match self.namespaces.link(None, index) {
            Ok(host) => host,
            Err(e) if is_gone(&e) => return false,
            Err(e) => {
                let of = container.namespace;
                self.journal.failed(of, &container.name, "cannot be read", &e);
                return true;
            }
        };
        container.name = host.name.clone();
        let sources = if peer_elsewhere(&host) == Some(container.peer) {
            let now = self.namespaces.link(Some(container.peer.0), container.peer.1);
            let now =
                now.and_then(|link| sources_of(&mut self.namespaces, container.peer.0, &link));
            match (now, &mut container.fixed) {
                (Ok(now), None) => now,
                (Ok(now), Some(fixed)) => {
                    *fixed = narrowed(fixed, &now);
                    fixed.clone()
                }
                (Err(e), _) => {
                    let of = container.namespace;
                    self.journal.failed(of, &container.name, "cannot be followed", &e);
                    container.sources.clone()
                }
            }
        } else {
            // Its other end is in another namespace, which has announced nothing yet: the addresses
            // permitted before stay, and no others.
            container.sources.clone()
        };
        let sources = Sources { is_closed: container.sources.is_closed, ..sources };
        let allowed = allowed(&self.cut_off, container.namespace, &sources, is_closed);
        match SourceFilter::attach(index, &allowed) {
            Ok((_, how)) => {
                tell_mended(how, &container.name);
                if sources != container.sources {
                    tell_followed(&self.journal, container, &sources);
                    let is_new = sources.mac != container.sources.mac
                        || !sources.addresses.is_subset(&container.sources.addresses);
                    container.sources = sources;
                    if is_new && !allowed.addresses.is_empty() {
                        self.announce(index, &host, allowed.mac);
                    }
                }
            }
            Err(e) if is_gone(&e) => return false,
            Err(e) => {
                let of = container.namespace;
                self.journal.failed(of, &container.name, "cannot be guarded", &e);
            }
        }
        true
    }
}

impl From<Fixed> for Sources {
    fn from(fixed: Fixed) -> Self {
        let addresses = fixed.addresses.into_iter().collect();
        Self { mac: fixed.mac, addresses, is_closed: false }
    }
}

impl From<&Sources> for Fixed {
    fn from(sources: &Sources) -> Self {
        Self { mac: sources.mac, addresses: sources.addresses.iter().copied().collect() }
    }
}

/// The fixed addresses without those that are gone. The Ethernet address stays the fixed one:
/// frames with another do not leave.
fn narrowed(fixed: &Sources, now: &Sources) -> Sources {
    let addresses = fixed.addresses.intersection(&now.addresses).copied().collect();
    Sources { mac: fixed.mac, addresses, is_closed: false }
}

/// The difference of counters, which are at zero again in a new program.
fn more_than(before: &Drops, now: &Drops) -> Drops {
    std::array::from_fn(|at| now[at].checked_sub(before[at]).unwrap_or(now[at]))
}

/// The refusal if a program cannot be put at the host's end with this name.
fn no_filter(error: &io::Error, name: &str) -> Refused {
    let reason = format!(
        "the agent cannot keep forged frames back: it tried to put a program at the tcx ingress of \
         {name}: {error}"
    );
    let hint = match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS) => "the host's kernel needs tcx, which Linux 6.6 has",
        _ => "",
    };
    Refused::new(Code::Unsupported, reason, hint)
}

fn tell_mended(how: Attached, name: &str) {
    if how == Attached::Mended {
        tracing::warn!(container = name, "the source filter was damaged and has been replaced");
    }
}

fn tell_attached(journal: &Journal, container: &Container, interface: &str) {
    let Container { namespace, sources, .. } = container;
    if journal.permits(Share::Container(*namespace), Level::INFO, Instant::now()) {
        let (interface, addresses) = (short(interface), Listed(sources.addresses.iter()));
        let container = container.label();
        tracing::info!(container, namespace, interface, ?addresses, "attached");
    }
}

fn tell_followed(journal: &Journal, container: &Container, now: &Sources) {
    let Container { namespace, sources: before, .. } = container;
    if journal.permits(Share::Container(*namespace), Level::INFO, Instant::now()) {
        let gained = Listed(now.addresses.difference(&before.addresses));
        let lost = Listed(before.addresses.difference(&now.addresses));
        let container = container.label();
        tracing::info!(container, ?gained, ?lost, "its addresses changed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fixed_only_gets_less() {
        let sources = |addresses: &[&str]| Sources {
            mac: [2; 6],
            addresses: addresses.iter().map(|a| a.parse().expect("an address")).collect(),
            is_closed: false,
        };
        let fixed = sources(&["10.0.0.1", "fd00::1"]);
        assert_eq!(narrowed(&fixed, &sources(&["10.0.0.1", "10.0.0.9"])), sources(&["10.0.0.1"]));
        let other = Sources { mac: [4; 6], ..sources(&["fd00::1"]) };
        assert_eq!(narrowed(&fixed, &other), sources(&["fd00::1"]));
    }
}
