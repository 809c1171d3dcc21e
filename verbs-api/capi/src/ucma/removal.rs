//! Devices that go: the kernel tells every id that is on one, which then is good for its
//! destruction only.

use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use rocinante_soft::model::event::AsyncEvent;
use rustix::event::{PollFd, PollFlags, poll};

use super::devices::Opened;
use super::id::Phase;
use super::{Outcome, Ucma};
use crate::devices::Found;
use crate::plain::Bell;

/// A thread that sleeps until an open device is gone, or closed.
pub(super) struct Watch {
    closed: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(opened: Arc<Opened>, of: Weak<Ucma>) -> io::Result<Self> {
        let closed = Arc::new(Bell::new()?);
        let until = closed.clone();
        let work = move || {
            if wait(&opened, &until)
                && let Some(ucma) = of.upgrade()
            {
                ucma.remove(&opened);
            }
        };
        let thread = std::thread::Builder::new().name("roce-cm-device".to_owned()).spawn(work)?;
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
    pub(super) fn open_device(self: &Arc<Self>, found: &Found) -> Outcome<Arc<Opened>> {
        let of = Arc::downgrade(self);
        let opened = self.devices.open(found, |opened| Watch::start(opened.clone(), of))?;
        self.ports.lock().join(&opened);
        Ok(opened)
    }

    /// The device is gone: so are the connections and listeners of all ids that are on it.
    fn remove(&self, device: &Arc<Opened>) {
        self.devices.forget(device);
        self.ports.lock().leave(Some(device));
        // A listener may have made an id for a request meanwhile. Without listeners none comes.
        while self.table.ids_of(None).into_iter().filter(|id| self.remove_from(device, id)).count()
            > 0
        {}
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
