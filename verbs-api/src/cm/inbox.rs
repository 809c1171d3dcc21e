//! The receiving end of connection manager events: a place where they arrive, and ways to wait for
//! them.

use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::mailbox::Mailbox;
use rocinante_soft::provider::manager::{ListensTo, Manager, Place};
use rocinante_soft::provider::wakers::{poll_until, until};
use rocinante_stack::cm::{CmEvent, ListenerId};

use crate::context;
use crate::device::Device;

/// The connection manager's events for one listener, connection or service request.
#[derive(Debug, Clone)]
pub(super) struct Inbox {
    pub(super) manager: Arc<dyn Manager>,
    mailbox: Arc<Mailbox>,
}

impl Inbox {
    pub(super) fn new(manager: Arc<dyn Manager>, mailbox: Arc<Mailbox>) -> Self {
        Self { manager, mailbox }
    }

    /// The next event, if there is one. Error: the reason why no more will come.
    pub(super) fn pop(&self) -> Result<Option<CmEvent>, VerbsError> {
        self.mailbox.pop()
    }

    /// Drives the device until `look` finds something. `None` waits without limit.
    pub(super) fn wait<T>(
        &self,
        patience: Option<Duration>,
        mut look: impl FnMut() -> Result<Option<T>, VerbsError>,
    ) -> Result<T, VerbsError> {
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(VerbsError::TimedOut);
            }
            self.manager.wait(&self.mailbox, deadline)?;
        }
    }

    /// Readable while there are events, and from the end of the connection or request on. Made at
    /// the first call.
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        Ok(self.mailbox.fd()?)
    }

    /// Polls until `look` finds something.
    pub(super) fn poll<T>(
        &self,
        cx: &Context<'_>,
        mut look: impl FnMut() -> Result<Option<T>, VerbsError>,
    ) -> Poll<Result<T, VerbsError>> {
        let register = || {
            self.mailbox.tasks.register(cx);
            Ok(())
        };
        poll_until(register, |_| look())
    }

    /// Waits until `look` finds something.
    pub(super) async fn until<T>(
        &self,
        mut look: impl FnMut() -> Result<Option<T>, VerbsError>,
    ) -> Result<T, VerbsError> {
        until(&self.mailbox.tasks, || Ok(()), |_| look()).await
    }

    /// Whether the last event was taken.
    pub(super) fn is_over(&self) -> bool {
        self.mailbox.is_over()
    }

    pub(super) fn notifier(&self) -> Result<Notifier, VerbsError> {
        self.fd()?;
        Ok(Notifier { mailbox: self.mailbox.clone() })
    }
}

/// A descriptor of a [`Connecting`](super::Connecting), a [`Connection`](super::Connection) or a
/// [`Resolving`](super::Resolving). A reactor can own it while the program owns that object. It is
/// readable while there is something to do, and from the end on. It costs nothing until the program
/// requests it.
#[derive(Debug, Clone)]
pub struct Notifier {
    mailbox: Arc<Mailbox>,
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.fd().expect("made when it was asked for")
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A listener of either kind.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) device: Device,
    pub(super) inbox: Inbox,
    pub(super) address: SocketAddr,
    id: ListenerId,
    to: ListensTo,
}

impl Port {
    /// Listens at the address, and makes the descriptor at once.
    pub(super) fn bind(
        ctx: &context::Context,
        address: SocketAddr,
        backlog: usize,
        to: ListensTo,
    ) -> Result<Self, VerbsError> {
        let place = place(&ctx.device, address, backlog)?;
        let manager = ctx.device.manager();
        let (id, mailbox) = manager.listen(place, to)?;
        let (device, inbox) = (ctx.device.clone(), Inbox::new(manager, mailbox));
        let port = Self { device, inbox, address, id, to };
        port.inbox.fd()?;
        Ok(port)
    }

    /// The next event for which `of` returns something, if there is one now.
    pub(super) fn next<T>(
        &self,
        of: impl Fn(CmEvent) -> Option<T>,
    ) -> Result<Option<T>, VerbsError> {
        while let Some(event) = self.inbox.pop()? {
            if let Some(found) = of(event) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// The place of a listener at a program's address. As of TCP, the unspecified address of IPv6
/// stands for all, and that of IPv4 for all of its family.
fn place(device: &Device, address: SocketAddr, backlog: usize) -> Result<Place, VerbsError> {
    let ip = address.ip();
    if !ip.is_unspecified() && !device.gids().contains(&ip) {
        let name = device.name();
        let why = format!("{name} does not have the address {ip}: see `rocinante devices`");
        return Err(VerbsError::Invalid(why));
    }
    if address.port() == 0 {
        return Err(VerbsError::Invalid("port 0 is none: choose one".into()));
    }
    let ip = Some(ip).filter(|ip| *ip != Ipv6Addr::UNSPECIFIED);
    Ok(Place { address: ip, port: address.port(), backlog })
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inbox.fd().expect("made with the listener")
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.inbox.manager.unlisten(self.id, self.to);
    }
}
