//! Containers that their engine introduces before they run: from then on only the addresses that it
//! gave leave them.

use rocinante_netdev::handed::{Code, Refused};

use super::{Containers, Hints, HostEnd};
use crate::asker::Namespace;
use crate::called::Called;
use crate::control::About;
use crate::host::{HostLink, NsId, SourceFilter, Sources};
use crate::links::{WayOut, ends, failed, way_out};
use crate::state::Introduced;

impl About {
    /// To be kept, with the addresses of now.
    pub(super) fn introduced(&self, now: &Sources) -> Introduced {
        let called = Called { id: self.id.clone(), engine: self.engine.clone() };
        Introduced { called, class: self.class.clone(), given: now.into() }
    }
}

impl Containers {
    /// Makes the interface of a container known, or all that leave it. Returns the host's end.
    ///
    /// # Errors
    /// The reason why the agent does not serve it.
    pub(crate) fn introduce(
        &self,
        namespace: &Namespace,
        about: &About,
        is_administered_by_itself: bool,
    ) -> Result<HostEnd, Refused> {
        let (_, interface) = self.interface_of(namespace, about)?;
        let about = Some(about);
        let hints = Hints { interface, is_administered_by_itself, about, called: None };
        self.attach(self.find(namespace, hints)?)
    }

    /// The host's end of such an interface, if the program is there and the container is known.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(crate) fn introduced(
        &self,
        namespace: &Namespace,
        about: &About,
    ) -> Result<Option<String>, Refused> {
        let (id, interface) = self.interface_of(namespace, about)?;
        let mut inner = self.lock();
        let (_, host) = ends(&mut inner.namespaces, id, interface)?;
        let known = inner.containers.get(&host.index);
        let is_known = known.is_some_and(|it| it.namespace == namespace.inode());
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
