//! Devices that come and go. The kernel tells every id that is on one which goes: the id is then
//! good for its destruction only. An id that listens at a wildcard address does so on each that
//! comes (`cma_add_one` of Linux).

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread::JoinHandle;

use rocinante_netdev::InterfacesWatch;
use rocinante_soft::model::event::AsyncEvent;
use rustix::event::{PollFd, PollFlags, poll};

use super::address::Listens;
use super::devices::Opened;
use super::id::Phase;
use super::{Outcome, Ucma};
use crate::devices::Found;
use crate::plain::Bell;

/// A thread that sleeps until something happens to devices, or it is dropped.
pub(super) struct Watch {
    closed: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `work` ends once the bell has rung.
    fn start(name: &str, work: impl FnOnce(&Bell) + Send + 'static) -> io::Result<Self> {
        let closed = Arc::new(Bell::new()?);
        let until = closed.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || work(&until))?;
        Ok(Self { closed, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.closed.ring();
        // The thread itself drops it when the device is gone.
        let thread = self.thread.take();
        let other = thread.filter(|it| it.thread().id() != std::thread::current().id());
        let _ = other.map(JoinHandle::join);
    }
}

/// Whether the device is gone; it may be closed before.
fn wait(opened: &Opened, closed: &Bell) -> bool {
    loop {
        let (news, end) = (opened.device.events.fd(), closed.as_fd());
        let mut both = [&news, &end].map(|fd| PollFd::new(fd, PollFlags::IN));
        // Signals are blocked, so an error means no memory. The program may have closed the
        // descriptors, which are no business of its.
        let is_lost = poll(&mut both, None).is_err() || both[0].revents().contains(PollFlags::NVAL);
        if is_lost || !both[1].revents().is_empty() {
            return false;
        }
        while let Some(event) = opened.device.events.next() {
            if event == AsyncEvent::DeviceFatal {
                return true;
            }
        }
    }
}

impl Ucma {
    /// Opens a device, and watches it.
    pub(super) fn open_device(
        self: &Arc<Self>,
        found: &Found,
        is_needed: bool,
    ) -> Outcome<Arc<Opened>> {
        let of = Arc::downgrade(self);
        let opened = self.devices.open(found, is_needed, |opened| {
            let opened = opened.clone();
            Watch::start("roce-cm-device", move |closed| {
                if wait(&opened, closed)
                    && let Some(ucma) = of.upgrade()
                {
                    ucma.remove(&opened);
                }
            })
        })?;
        self.ports.lock().join(&opened);
        Ok(opened)
    }

    /// From now on ids at wildcard addresses listen on devices that come, too.
    pub(super) fn follow(self: &Arc<Self>) -> Outcome<()> {
        let of = Arc::downgrade(self);
        let started = self.devices.follow(|| {
            let mut watch = InterfacesWatch::open()?;
            Watch::start("roce-cm-links", move |closed| {
                loop {
                    let (news, end) = (watch.as_fd(), closed.as_fd());
                    let mut both = [&news, &end].map(|fd| PollFd::new(fd, PollFlags::IN));
                    // As in `wait`.
                    let is_lost = poll(&mut both, None).is_err();
                    let [news, end] = both.map(|fd| fd.revents());
                    if is_lost || news.contains(PollFlags::NVAL) || !end.is_empty() {
                        return;
                    }
                    let Some(ucma) = of.upgrade().filter(|_| watch.look()) else { continue };
                    ucma.spread();
                }
            })
        });
        started.map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))
    }

    /// Ids at wildcard addresses listen on each device that can be opened now.
    fn spread(self: &Arc<Self>) {
        let mut devices = self.devices.all().unwrap_or_default();
        // Others come after a link-local address, and an open device takes no more.
        devices.retain(|found| found.interface.addresses.iter().any(|(it, _)| is_routed(it)));
        for id in self.table.ids_of(None) {
            let mut held = id.held.lock();
            let Some(at) = Listens::of(&id, &held).filter(Listens::is_wildcard) else { continue };
            let Phase::Listening(places) = &mut held.phase else { continue };
            for found in &devices {
                if places.iter().all(|(opened, _)| opened.found.name != found.name) {
                    // A device that cannot be opened yet changes again.
                    places.extend(self.listen_at(&id, at, found));
                }
            }
        }
    }

    /// The device is gone: so are the connections and listeners of all ids that are on it.
    fn remove(self: &Arc<Self>, device: &Arc<Opened>) {
        self.devices.forget(device);
        self.ports.lock().leave(Some(device));
        // A listener may have made an id for a request meanwhile. Without listeners none comes.
        while self.table.ids_of(None).into_iter().filter(|id| self.remove_from(device, id)).count()
            > 0
        {}
        // One of the same name may have come before.
        if self.devices.follows() {
            self.spread();
        }
    }

    /// Returns whether the id was on the device.
    fn remove_from(&self, device: &Arc<Opened>, id: &Arc<super::Id>) -> bool {
        let mut held = id.held.lock();
        if held.is_on(device) {
            self.leave_phase(id, &mut held);
            (held.phase, held.has_port, held.opened) = (Phase::Removed, false, None);
            id.tell_removal();
            return true;
        }
        let service = id.service_of(&held);
        let Phase::Listening(places) = &mut held.phase else { return false };
        let gone: Vec<_> =
            places.extract_if(.., |(opened, _)| Arc::ptr_eq(opened, device)).collect();
        for (opened, listener) in &gone {
            opened.device.unlisten(*listener, service);
        }
        !gone.is_empty()
    }
}

fn is_routed(address: &IpAddr) -> bool {
    !matches!(address, IpAddr::V6(it) if it.is_unicast_link_local())
}
