//! Ports of the port spaces, as `cma.c` gives them out: within the process. Other processes on the
//! same addresses are in the way once they listen.

use std::collections::HashMap;
use std::ffi::c_int;
use std::net::SocketAddr;

use rocinante::plain::PortSpace;

use super::Outcome;

/// The ports from which one is taken where the program names none.
const FREE: std::ops::Range<u16> = 32_768..61_000;

/// An id with a port.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub(super) id: u32,
    pub(super) address: SocketAddr,
    /// `RDMA_OPTION_ID_REUSEADDR`.
    pub(super) reuse: bool,
    /// `RDMA_OPTION_ID_AFONLY`.
    pub(super) one_family: bool,
}

/// The ids that have each port.
#[derive(Debug, Default)]
pub(super) struct Ports {
    bound: HashMap<(u16, u16), Vec<Bound>>,
    next: u16,
}

impl Ports {
    /// Gives the id its port, or a free one for port 0. Returns the address with the port.
    ///
    /// # Errors
    /// `EADDRINUSE` or `EADDRNOTAVAIL` if the port is another's.
    pub(super) fn bind(&mut self, space: PortSpace, mut of: Bound) -> Outcome<SocketAddr> {
        if of.address.port() == 0 {
            let port = self.free(space).ok_or(libc::EADDRNOTAVAIL)?;
            of.address.set_port(port);
        }
        let owners = self.bound.entry((space.number(), of.address.port())).or_default();
        conflict(owners, &of, of.reuse)?;
        owners.push(of);
        Ok(of.address)
    }

    /// The id listens from now on: nobody else has its place, whatever is reused.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub(super) fn listen(&self, space: PortSpace, of: &Bound) -> Outcome<()> {
        let owners = self.bound.get(&(space.number(), of.address.port()));
        owners.map_or(Ok(()), |owners| conflict(owners, of, false))
    }

    pub(super) fn release(&mut self, space: PortSpace, port: u16, id: u32) {
        if let Some(owners) = self.bound.get_mut(&(space.number(), port)) {
            owners.retain(|owner| owner.id != id);
            if owners.is_empty() {
                self.bound.remove(&(space.number(), port));
            }
        }
    }

    /// How many ids have one.
    pub(super) fn count(&self) -> usize {
        self.bound.values().map(Vec::len).sum()
    }

    fn free(&mut self, space: PortSpace) -> Option<u16> {
        if self.next == 0 {
            // Another process begins elsewhere.
            let scattered = std::process::id().wrapping_mul(2_654_435_761) >> 16;
            let count = u32::from(FREE.end - FREE.start);
            self.next = FREE.start + u16::try_from(scattered % count).unwrap_or(0);
        }
        for _ in FREE {
            let port = self.next;
            self.next = if port + 1 < FREE.end { port + 1 } else { FREE.start };
            if !self.bound.contains_key(&(space.number(), port)) {
                return Some(port);
            }
        }
        None
    }
}

/// Whether another id is in the way, as `cma_check_port` of `cma.c` has it.
fn conflict(owners: &[Bound], of: &Bound, reuse: bool) -> Result<(), c_int> {
    for owner in owners.iter().filter(|owner| owner.id != of.id) {
        let other_family = owner.address.is_ipv4() != of.address.is_ipv4();
        if reuse && owner.reuse || other_family && owner.one_family && of.one_family {
            continue;
        }
        if owner.address.ip().is_unspecified() || of.address.ip().is_unspecified() {
            return Err(libc::EADDRNOTAVAIL);
        }
        if owner.address.ip() == of.address.ip() {
            return Err(libc::EADDRINUSE);
        }
    }
    Ok(())
}
