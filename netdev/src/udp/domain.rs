//! VRFs: an address may be there once in each, and a socket has the addresses of one.

use super::sys::Socket;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::Rtnl;

/// The VRF of an interface. Where the kernel does not say, it has none.
pub(crate) fn domain_of(iface: &Interface) -> Option<u32> {
    domain_of_index(iface.index)
}

fn domain_of_index(index: u32) -> Option<u32> {
    Rtnl::open().and_then(|mut rtnl| rtnl.domain(index)).unwrap_or(None)
}

impl Interface {
    /// Of several that have one address: the one that sockets of this process have it of. Those are
    /// in the VRF that `ip vrf exec` has chosen, or in none. Without such an interface the first.
    pub fn nearest<T>(
        among: impl IntoIterator<Item = T>,
        interface: impl Fn(&T) -> &Self,
    ) -> Option<T> {
        let mut all: Vec<T> = among.into_iter().collect();
        let mut at = 0;
        if all.len() > 1 {
            let place = Socket::new(false).ok().and_then(|socket| socket.interface());
            let is_there = |it: &T| {
                let index = interface(it).index;
                place == Some(index) || place == domain_of_index(index)
            };
            at = all.iter().position(is_there).unwrap_or(0);
        }
        (at < all.len()).then(|| all.swap_remove(at))
    }
}
