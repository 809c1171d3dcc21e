//! Listeners of the connection manager, at one device or at those of all interfaces.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rocinante::cm::{Listener, Request};
use rocinante::{Context, VerbsError};
use rocinante_netdev::Interface;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::own::{Own, is_link_local};
use super::{OpenArgs, address};
use crate::output::{Failure, Output, Result};

/// Requests that may wait at a listener.
const BACKLOG: usize = 128;

/// Listeners on one port, each with its device.
#[derive(Debug)]
pub struct Listeners {
    all: Vec<(Context, Listener)>,
    /// Where they listen, for messages.
    place: String,
}

impl Listeners {
    /// Opens the device with the address `own` and listens there; without one, opens the devices of
    /// all interfaces. Error: there is no device, it cannot be opened, or the port is taken.
    pub fn open(device: &OpenArgs, own: Option<&Own>, port: u16, out: Output) -> Result<Self> {
        let opened = match own {
            Some(own) => match own.only() {
                Some(address) => (vec![device.open(address, out)?], own.name().to_owned()),
                None => (vec![device.open_interface(own.name(), out)?], own.name().to_owned()),
            },
            None => match device.named() {
                Some(name) if Interface::by_name(&name).is_ok() => {
                    (vec![device.open_interface(&name, out)?], name)
                }
                Some(_) => {
                    let address = address::only()?;
                    (vec![device.open(address, out)?], address.to_string())
                }
                None => (everywhere(device, out)?, "all addresses".to_owned()),
            },
        };
        let (devices, place) = opened;
        let listen = |ctx: Context| {
            let address = match ctx.gids() {
                [only] => *only,
                _ => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            };
            let listener = Listener::bind(&ctx, SocketAddr::new(address, port), BACKLOG)?;
            Ok::<_, Failure>((ctx, listener))
        };
        let all = devices.into_iter().map(listen).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { all, place: format!("{place} port {port}") })
    }

    /// Where they listen.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The next request, and the device that it came to. `None` if there is none within `timeout`.
    pub fn next(
        &self,
        timeout: Option<Duration>,
    ) -> Result<Option<(&Context, Request)>, VerbsError> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            for (ctx, listener) in &self.all {
                if let Some(found) = listener.try_request()? {
                    return Ok(Some((ctx, found)));
                }
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            let fds = self.all.iter().map(|(_, listener)| listener.as_fd());
            wait(&fds.collect::<Vec<_>>(), left)?;
        }
    }

    /// As [`next`](Self::next), without a limit.
    pub fn wait(&self) -> Result<(&Context, Request), VerbsError> {
        loop {
            if let Some(found) = self.next(None)? {
                return Ok(found);
            }
        }
    }

    /// The listeners' descriptors, ready when [`next`](Self::next) may find something.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|(_, listener)| listener.as_fd())
    }
}

/// Opens the devices of all interfaces that have an address, loopback too.
fn everywhere(device: &OpenArgs, out: Output) -> Result<Vec<Context>> {
    let all = Interface::all().map_err(|error| {
        Failure::Failed(format!("cannot list the interfaces: {error}: say which address to use"))
    })?;
    let usable = |interface: &&Interface| {
        interface.up && interface.addresses.iter().any(|(address, _)| !is_link_local(*address))
    };
    let (mut opened, mut failed) = (Vec::new(), None);
    for interface in all.iter().filter(usable) {
        match device.open_interface(&interface.name, out) {
            Ok(ctx) => opened.push(ctx),
            Err(failure) => {
                out.note(format_args!("not on {}: {failure}", interface.name));
                failed = Some(failure);
            }
        }
    }
    match failed {
        Some(failure) if opened.is_empty() => Err(failure),
        None if opened.is_empty() => {
            Err(Failure::Usage("no interface has an address: say which address to use".into()))
        }
        _ => Ok(opened),
    }
}

/// Sleeps until one of `fds` is readable, or `left` is over.
pub(super) fn wait(fds: &[BorrowedFd<'_>], left: Option<Duration>) -> io::Result<()> {
    let mut fds: Vec<_> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut fds, left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
