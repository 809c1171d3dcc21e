//! Events of a port and of a device, as a program sees them.

use crate::guest::{Guest, Link};
use crate::matrix::Step;

/// The port of the device on the tap goes down, comes up, and gains and loses an address, while a
/// program listens.
pub(super) fn of_port(guest: &Guest) -> Step {
    let network = guest.network();
    let device = network.device(Link::Tap);
    let address = network.address(Link::Tap, false);
    // `up` removes the IPv6 addresses: they are put back.
    let script = format!(
        "IF=$(cat /sys/class/infiniband/{device}/parent); ip -6 -o address show dev $IF scope global >/tmp/addresses; \
         /host/rocinante-interop watch {device} {address} 3 >/tmp/events 2>&1 & \
         until grep -q listening /tmp/events; do sleep 0.1; done; \
         ip address add 10.78.0.77/24 dev $IF; sleep 0.3; ip address del 10.78.0.77/24 dev $IF; sleep 0.3; \
         ip link set $IF down; sleep 0.3; ip link set $IF up; wait; \
         while read -r _ _ _ a _; do ip -6 address replace $a dev $IF nodad; done </tmp/addresses; \
         cat /tmp/events"
    );
    let said = guest.read(&script, super::PATIENCE).map_err(|error| error.to_string())?;
    let at = |what: &str| said.find(what).ok_or_else(|| format!("no {what}: {said}"));
    if at("GidChange")? < at("PortErr")? && at("PortErr")? < at("PortActive")? {
        Ok(())
    } else {
        Err(format!("another order: {said}"))
    }
}

/// A device is removed while a program listens for connections.
pub(super) fn removal(guest: &Guest) -> Step {
    let script = "ip link add gone0 type dummy; ip link set gone0 up; ip address add 10.99.0.1/24 dev gone0; \
        rdma link add gone type rxe netdev gone0; \
        /host/rocinante-interop gone gone 10.99.0.1 >/tmp/gone 2>&1 & \
        until grep -q . /tmp/gone; do sleep 0.1; done; rdma link delete gone; wait; ip link delete gone0; cat /tmp/gone";
    let said = guest.read(script, super::PATIENCE).map_err(|error| error.to_string())?;
    if said.contains("gone is gone") { Ok(()) } else { Err(said) }
}
