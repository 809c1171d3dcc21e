//! Containers that their engine introduces before they run: from then on only the addresses that it
//! gave leave them.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use rocinante_netdev::handed::{Code, Refused};

use super::mtu::Before;
use super::{Container, Containers, Found, Hints, HostEnd, narrowed};
use crate::asker::Namespace;
use crate::called::Called;
use crate::claims::Claimed;
use crate::control::{About, Reply};
use crate::host::{HostLink, NsId, SourceFilter, Sources};
use crate::links::{WayOut, ends, failed, way_out};
use crate::state::Introduced;

/// The word of an engine about a host's end, and the addresses fixed by it.
type Word = (Option<Introduced>, Option<Sources>);
/// By the hosts' ends of a container; `None` for one that is not known.
type Words = BTreeMap<u32, Option<Word>>;

impl About {
    /// Whether the engine has just given the interface its addresses. Otherwise a process begins,
    /// perhaps in a namespace where others have changed them.
    pub(super) fn gives(&self) -> bool {
        self.interface.is_some()
    }

    /// To be kept, with the addresses of now or what is left of those given before.
    pub(super) fn introduced(&self, now: &Sources, before: Option<&Introduced>) -> Introduced {
        let called = Called { id: self.id.clone(), engine: self.engine.clone() };
        let rates = self.rates.or(before.and_then(|it| it.rates));
        let before = before.filter(|_| !self.gives());
        let class = self.class.as_ref().or(before.and_then(|it| it.class.as_ref())).cloned();
        let given = before.map(|it| narrowed(&it.given.clone().into(), now));
        let pod = self.pod.as_ref().or(before.and_then(|it| it.pod.as_ref())).cloned();
        let given = given.as_ref().unwrap_or(now).into();
        Introduced { called, class, rates, pod, claimed: Claimed::default(), given }
    }
}

impl Containers {
    /// Makes the interface of a container known, or all that leave it. Returns the host's end.
    /// Error: the reason why the agent does not serve it. Then the interface is as before.
    pub(crate) fn introduce(
        &self,
        namespace: &Namespace,
        about: &About,
        is_administered_by_itself: bool,
    ) -> Result<HostEnd, Refused> {
        let (_, interface) = self.interface_of(namespace, about)?;
        let about = Some(about);
        let hints = Hints { interface, is_administered_by_itself, about, called: None };
        let found = self.find(namespace, hints)?;
        let before = self.words(&found, namespace);
        let mtu = about.and_then(|about| about.mtu);
        let mtu = mtu.map(|mtu| self.set_mtu(namespace, interface, mtu)).transpose()?;
        self.attach(found).inspect_err(|_| {
            mtu.iter().for_each(Before::restore);
            before.iter().for_each(|(end, word)| self.take_back(*end, word.clone(), &before));
            self.lock().follow_closed(|it| it.namespace == namespace.inode());
        })
    }

    /// The earlier words about each end of a container that is about to be introduced.
    fn words(&self, found: &Found, namespace: &Namespace) -> Words {
        let inner = self.lock();
        let ends = found.others.iter().chain([&found.end]).map(|it| it.end.index);
        let word = |end: &u32| {
            let known = inner.containers.get(end).filter(|it| it.namespace == namespace.inode());
            known.map(|it| (it.introduced.clone(), it.fixed.clone()))
        };
        ends.map(|end| (end, word(&end))).collect()
    }

    /// Has a host's end as it was before an introduction that failed: with the earlier word, or
    /// forgotten. While one of the container's ends has a port, which sends by all of them, only
    /// the word is forgotten.
    pub(super) fn take_back(&self, end: u32, word: Option<Word>, ends: &Words) {
        let turn = self.turn_of(end);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.lock();
        let has_port = |end| inner.containers.get(end).is_some_and(|it| !it.ports.is_empty());
        let is_used = ends.keys().any(|end| inner.reserved.contains_key(end) || has_port(end));
        let Some(container) = inner.containers.get_mut(&end) else { return };
        if let Some((introduced, fixed)) = word {
            (container.introduced, container.fixed) = (introduced, fixed);
            inner.follow(end);
            self.write(&inner);
            drop(inner);
            // Its rates of before may fail likewise: the status says so.
            let _ = self.shape(end);
        } else if !is_used {
            let name = container.name.clone();
            inner.remove(end);
            self.write(&inner);
            drop(inner);
            if let Reply::Kept { name, reason } = self.detach(end, name) {
                tracing::warn!(container = name, "{reason}");
            }
        } else {
            // A program asked meanwhile. Addresses that are fixed stay so.
            container.introduced = None;
            inner.follow(end);
            self.write(&inner);
            drop(inner);
            let _ = self.shape(end);
        }
    }

    /// The host's end of such an interface, if the program is there and the container is known. Its
    /// MTU and its own rates are those of `about`, if that has any. Error: the reason why there is
    /// none.
    pub(crate) fn introduced(
        &self,
        namespace: &Namespace,
        about: &About,
    ) -> Result<Option<String>, Refused> {
        let (id, interface) = self.interface_of(namespace, about)?;
        let mut inner = self.lock();
        let (own, host) = ends(&mut inner.namespaces, id, interface)?;
        let differs = |it: &&HostLink| about.mtu.is_some_and(|mtu| it.mtu != mtu);
        if let Some(HostLink { name, mtu, .. }) = [&own, &host].into_iter().find(differs) {
            let reason = format!("the MTU of {name} is {mtu} now");
            return Err(Refused::new(Code::Interface, reason, ""));
        }
        let known = inner.containers.get(&host.index);
        let known = known.filter(|it| it.namespace == namespace.inode());
        let is_known = known.is_some();
        if let Some(Container { shaped, introduced, .. }) = known {
            let of_its_own = introduced.as_ref().and_then(|it| it.rates);
            let others = about.rates.is_some() && about.rates != of_its_own;
            let others = others.then(|| "it has other rates now".to_owned());
            if let Some(reason) = shaped.fault.clone().or(others) {
                return Err(Refused::new(Code::Interface, reason, ""));
            }
        }
        drop(inner);
        let filter = SourceFilter::find(host.index).map_err(|e| failed("look at", &e))?;
        Ok((is_known && filter.is_some()).then_some(host.name))
    }

    /// The number of the namespace, and the index of the interface there.
    fn interface_of(&self, namespace: &Namespace, about: &About) -> Result<(NsId, u32), Refused> {
        let mut inner = self.lock();
        let id = inner.namespaces.id(namespace.file()).map_err(|e| failed("number", &e))?;
        let links = inner.namespaces.links(Some(id)).map_err(|e| failed("list", &e))?;
        let mut leaves = |link: &HostLink| {
            matches!(way_out(&mut inner.namespaces, id, link), WayOut::HostEnd(_))
        };
        let wanted = |link: &HostLink| match &about.interface {
            Some(name) => link.name == *name,
            None => leaves(link),
        };
        let none = || {
            let reason = match &about.interface {
                Some(name) => format!("the container has no interface {name:?}"),
                None => "no interface of the container has an end on this host".to_owned(),
            };
            Refused::new(Code::Interface, reason, "")
        };
        links.into_iter().find(wanted).map(|link| (id, link.index)).ok_or_else(none)
    }
}
