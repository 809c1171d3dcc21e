//! Ports of the port spaces, as `cma.c` gives them out. Other processes see them by a claim on each
//! address of the devices that are open, which the kernel drops when the process ends.

use std::collections::HashMap;
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;

use rustix::thread::{CapabilitySet, capabilities};

use crate::plain::{PortClaim, PortSpace};

use super::Outcome;
use super::devices::{Opened, zone};

/// The ports from which one is taken where the program names none (`ip_local_port_range`).
fn free() -> RangeInclusive<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let text = text.unwrap_or_default();
    let mut ends = text.split_whitespace().map_while(|end| end.parse().ok());
    match (ends.next(), ends.next()) {
        (Some(first @ 1..), Some(last)) if first <= last => first..=last,
        _ => 32_768..=60_999,
    }
}

/// Whether this thread may not bind to the port (`ip_unprivileged_port_start`,
/// `CAP_NET_BIND_SERVICE`).
fn is_reserved(port: u16) -> bool {
    let start = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let start = start.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024);
    port < start
        && !capabilities(None)
            .is_ok_and(|of| of.effective.contains(CapabilitySet::NET_BIND_SERVICE))
}

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

impl Bound {
    /// Whether it is on this address of a device.
    fn covers(&self, address: IpAddr, device: &Opened) -> bool {
        let own = self.address.ip();
        own == address && device.scoped(self.address) == self.address
            || own.is_unspecified() && (own.is_ipv4() == address.is_ipv4() || !self.one_family)
    }
}

pub(super) type Key = (PortSpace, u16);

/// The ids that have each port.
#[derive(Default)]
pub(super) struct Ports {
    bound: HashMap<Key, Vec<Bound>>,
    next: u16,
    /// The devices on whose addresses ports are claimed.
    devices: Vec<Arc<Opened>>,
}

impl Ports {
    /// Gives the id its port, or a free one for port 0. Returns the address with the port. Error:
    /// `EADDRINUSE` or `EADDRNOTAVAIL` if the port is another's; `EACCES` if this user may not have
    /// it.
    pub(super) fn bind(&mut self, space: PortSpace, of: Bound) -> Outcome<SocketAddr> {
        if of.address.port() != 0 {
            if is_reserved(of.address.port()) {
                return Err(libc::EACCES);
            }
            return self.take(space, of);
        }
        self.bind_in(space, of, &free())
    }

    /// As [`bind`](Self::bind), for port 0, with these ports to take one from.
    fn bind_in(
        &mut self,
        space: PortSpace,
        mut of: Bound,
        free: &RangeInclusive<u16>,
    ) -> Outcome<SocketAddr> {
        for _ in free.clone() {
            let port = self.free(space, free).ok_or(libc::EADDRNOTAVAIL)?;
            of.address.set_port(port);
            // Another process may have it.
            match self.take(space, of) {
                Err(libc::EADDRINUSE | libc::EADDRNOTAVAIL) => {}
                taken => return taken,
            }
        }
        Err(libc::EADDRNOTAVAIL)
    }

    fn take(&mut self, space: PortSpace, of: Bound) -> Outcome<SocketAddr> {
        let port = of.address.port();
        let owners = self.bound.entry((space, port)).or_default();
        conflict(owners, &of, of.reuse)?;
        owners.push(of);
        let mut devices = self.devices.iter();
        if let Err(error) = devices.try_for_each(|device| self.claim((space, port), device)) {
            self.release(space, port, of.id);
            return Err(match error.raw_os_error() {
                Some(libc::EADDRINUSE) => in_the_way(&of),
                errno => errno.unwrap_or(libc::ENODEV),
            });
        }
        Ok(of.address)
    }

    /// Claims a port on the addresses of a device, as far as ids have it there.
    fn claim(&self, (space, port): Key, device: &Opened) -> std::io::Result<()> {
        let owners = self.bound.get(&(space, port)).map_or(&[][..], Vec::as_slice);
        device.device.gids.iter().try_for_each(|address| {
            let mut here = owners.iter().filter(|owner| owner.covers(*address, device));
            let claim = match here.next() {
                None => PortClaim::None,
                Some(first) if first.reuse && here.all(|owner| owner.reuse) => PortClaim::Shared,
                Some(_) => PortClaim::Alone,
            };
            device.device.claim_port((*address, space, port), claim)
        })
    }

    /// A device is open: the ports bound on its addresses are claimed there. A port that another
    /// process has already is in the way once an id listens.
    pub(super) fn join(&mut self, device: &Arc<Opened>) {
        if self.devices.iter().any(|other| Arc::ptr_eq(other, device)) {
            return;
        }
        self.devices.push(device.clone());
        for key in self.bound.keys() {
            let _ = self.claim(*key, device);
        }
    }

    /// A device is gone, or all are closed.
    pub(super) fn leave(&mut self, device: Option<&Arc<Opened>>) {
        self.devices.retain(|other| device.is_some_and(|device| !Arc::ptr_eq(other, device)));
    }

    /// The id listens from now on: no other id or process may have its place, with `reuseaddr` or
    /// without, now or later. Error: as [`bind`](Self::bind).
    pub(super) fn listen(&mut self, space: PortSpace, of: &Bound) -> Outcome<()> {
        let port = of.address.port();
        let owners = self.bound.get(&(space, port));
        owners.map_or(Ok(()), |owners| conflict(owners, of, false))?;
        if self.change(space, &Bound { reuse: false, ..*of }).is_err() {
            // Addresses without a neighbour are claimed alone by now.
            let _ = self.change(space, of);
            return Err(in_the_way(of));
        }
        Ok(())
    }

    /// The id with this port has this address and these options from now on. Error: on one address
    /// at least another process is in the way.
    pub(super) fn change(&mut self, space: PortSpace, of: &Bound) -> std::io::Result<()> {
        let port = of.address.port();
        let owners = self.bound.get_mut(&(space, port));
        let owner = owners.and_then(|all| all.iter_mut().find(|owner| owner.id == of.id));
        let Some(owner) = owner else { return Ok(()) };
        *owner = *of;
        let claims = self.devices.iter().map(|device| self.claim((space, port), device));
        claims.fold(Ok(()), std::io::Result::and)
    }

    pub(super) fn release(&mut self, space: PortSpace, port: u16, id: u32) {
        if let Some(owners) = self.bound.get_mut(&(space, port)) {
            owners.retain(|owner| owner.id != id);
            if owners.is_empty() {
                self.bound.remove(&(space, port));
            }
            for device in &self.devices {
                let _ = self.claim((space, port), device);
            }
        }
    }

    /// The number of ids that have a port.
    pub(super) fn count(&self) -> usize {
        self.bound.values().map(Vec::len).sum()
    }

    /// The ports of an id, for tests of what refusals leave.
    #[cfg(test)]
    pub(super) fn owners(&self, id: u32) -> Vec<(Key, Bound)> {
        let all = self.bound.iter().flat_map(|(key, all)| all.iter().map(|of| (*key, *of)));
        all.filter(|(_, of)| of.id == id).collect()
    }

    fn free(&mut self, space: PortSpace, of: &RangeInclusive<u16>) -> Option<u16> {
        if !of.contains(&self.next) {
            // Another process begins elsewhere.
            let scattered = std::process::id().wrapping_mul(2_654_435_761) >> 16;
            let at = scattered as usize % of.len();
            self.next = of.clone().nth(at)?;
        }
        for _ in of.clone() {
            let port = self.next;
            self.next = if port < *of.end() { port + 1 } else { *of.start() };
            if !self.bound.contains_key(&(space, port)) {
                return Some(port);
            }
        }
        None
    }
}

/// The errno where the id of another process has the port.
fn in_the_way(of: &Bound) -> c_int {
    if of.address.ip().is_unspecified() { libc::EADDRNOTAVAIL } else { libc::EADDRINUSE }
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
        // Link-local addresses of two links differ.
        let [own, new] = [owner.address, of.address].map(|it| (it.ip(), zone(it)));
        if own == new {
            return Err(libc::EADDRINUSE);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(id: u32, address: &str, reuse: bool) -> Bound {
        Bound { id, address: address.parse().unwrap(), reuse, one_family: false }
    }

    /// As `rdma_listen` of `cma.c`: an id that listens is alone from then on.
    #[test]
    fn a_port_that_is_listened_on_is_reused_by_none() {
        for (address, error) in [
            ("10.0.0.1:7", libc::EADDRINUSE),
            ("0.0.0.0:7", libc::EADDRNOTAVAIL),
            ("[fe80::1%3]:7", libc::EADDRINUSE),
        ] {
            let (mut ports, space) = (Ports::default(), PortSpace::Tcp);
            let [first, second, third] = [1, 2, 3].map(|id| of(id, address, true));
            ports.bind(space, first).unwrap();
            ports.bind(space, second).unwrap();
            for _ in 0..2 {
                assert_eq!(ports.listen(space, &first), Err(error), "{address}: two have it");
            }
            ports.bind(space, third).expect("a refusal changes nothing");
            ports.release(space, 7, second.id);
            ports.release(space, 7, third.id);
            ports.listen(space, &first).unwrap();
            for late in [second, Bound { reuse: false, ..third }] {
                assert_eq!(ports.bind(space, late), Err(error), "{address}");
            }
            assert_eq!(ports.count(), 1);
            ports.release(space, 7, first.id);
            ports.bind(space, second).unwrap();
        }
    }

    /// Options that an id gets when it has its port.
    #[test]
    fn options_hold_for_a_port_that_is_bound() {
        let (mut ports, space) = (Ports::default(), PortSpace::Tcp);
        let (first, second) = (of(1, "10.0.0.1:7", false), of(2, "10.0.0.1:7", true));
        ports.bind(space, first).unwrap();
        assert_eq!(ports.bind(space, second), Err(libc::EADDRINUSE));
        ports.change(space, &Bound { reuse: true, ..first }).unwrap();
        ports.bind(space, second).unwrap();
        let [v4, v6] = ["0.0.0.0:8", "[::]:8"].map(|any| of(3, any, false));
        ports.bind(space, v4).unwrap();
        let alone = Bound { id: 4, one_family: true, ..v6 };
        assert_eq!(ports.bind(space, alone), Err(libc::EADDRNOTAVAIL));
        ports.change(space, &Bound { one_family: true, ..v4 }).unwrap();
        ports.bind(space, alone).unwrap();
    }

    /// The free ports come round, each is given to one id at a time, and a port that was given back
    /// is free.
    #[test]
    fn every_free_port_is_given_out_again_and_again() {
        let (free, end) = (50_000..=50_099, 50_099);
        let mut ports = Ports { next: end - 1, ..Ports::default() };
        let any = |id| of(id, "10.0.0.1:0", false);
        let spaces = [PortSpace::Tcp, PortSpace::Udp];
        for round in 0..3 {
            let bind =
                |port: u16| ports.bind_in(spaces[0], any(port.into()), &free).unwrap().port();
            let mut given: Vec<u16> = free.clone().map(bind).collect();
            if round == 0 {
                assert_eq!(given[..3], [end - 1, end, *free.start()]);
            }
            for _ in 0..2 {
                assert_eq!(
                    ports.bind_in(spaces[0], any(1), &free),
                    Err(libc::EADDRNOTAVAIL),
                    "{round}"
                );
            }
            let other = ports.bind_in(spaces[1], any(1), &free).unwrap().port();
            assert_eq!(ports.count(), free.len() + 1);
            ports.release(spaces[1], other, 1);
            for (id, port) in free.clone().zip(&given) {
                ports.release(spaces[0], *port, id.into());
            }
            assert_eq!(ports.count(), 0);
            given.sort_unstable();
            assert!(given.into_iter().eq(free.clone()), "{round}");
        }
    }
}
