//! The kernel's announcements of changes: of one interface, of its neighbours, and of the routes.
//!
//! Joining these groups of rtnetlink(7) needs no privilege. The kernel drops announcements about
//! links, addresses and neighbours of other interfaces. Routes, rules and next hops of all
//! interfaces come through: another interface may take over a route that left through this one.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use libc::sock_filter;
use netlink_sys::Socket;

use super::query::{family, ip};
use super::socket::{Attributes, Messages};
use crate::kernel::descriptors::{attach_filter, netlink};
use crate::tuning::routes::BURST;

/// Of `linux/rtnetlink.h`; the crate `libc` lacks it.
const RTNLGRP_NEXTHOP: u32 = 32;
const GROUPS: [u32; 9] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_NEIGH,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV6_RULE,
    RTNLGRP_NEXTHOP,
];
/// Messages that have the interface's index as the second word of their header.
const OF_INTERFACES: [u16; 6] = [
    libc::RTM_NEWLINK,
    libc::RTM_DELLINK,
    libc::RTM_NEWNEIGH,
    libc::RTM_DELNEIGH,
    libc::RTM_NEWADDR,
    libc::RTM_DELADDR,
];
/// Length of `struct ndmsg` and of `struct rtmsg`.
const HEADER_LEN: usize = 12;
/// The longest message that is parsed; a longer one counts as [`Change::Anything`].
const MESSAGE_MAX: usize = 16 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The interface or its addresses.
    Interface,
    /// The entry of a neighbour.
    Neighbour(IpAddr),
    /// Routes to the addresses that share this many leading bits with this one.
    Routes(IpAddr, u8),
    /// Routes to any address.
    AllRoutes,
    /// The queue overflowed, or a message was not understood: anything may have changed.
    Anything,
}

impl Change {
    /// Whether this change of routes may affect the way to `address`.
    #[must_use]
    pub(crate) fn is_of_way_to(&self, address: IpAddr) -> bool {
        match *self {
            Self::Neighbour(_) => false,
            Self::Routes(prefix, bits) => has_prefix(address, prefix, bits),
            Self::Interface | Self::AllRoutes | Self::Anything => true,
        }
    }
}

/// Receives announcements.
pub(crate) struct Monitor {
    socket: Socket,
    buffer: Box<[u8]>,
    /// The queue overflowed since it was last empty. Until it is empty again, the kernel drops
    /// further announcements without notice.
    overrun: bool,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").finish_non_exhaustive()
    }
}

impl Monitor {
    /// Receives changes from now on, about an interface of the calling thread's network namespace.
    /// Error: the kernel's answer to `socket(AF_NETLINK)`: no descriptors left, or a seccomp
    /// filter.
    pub(crate) fn open(interface: u32) -> io::Result<Self> {
        Self::of(interface, &GROUPS)
    }

    /// As [`open`](Self::open), but about the interface itself only: not about its addresses,
    /// neighbours and routes. Error: as [`open`](Self::open).
    pub(crate) fn of_link(interface: u32) -> io::Result<Self> {
        Self::of(interface, &[libc::RTNLGRP_LINK])
    }

    fn of(interface: u32, groups: &[u32]) -> io::Result<Self> {
        Self::with(groups, &program(interface))
    }

    /// Receives the groups' announcements that this program takes. Error: as [`open`](Self::open);
    /// and the kernel rejects the program.
    pub(crate) fn with(groups: &[u32], program: &[sock_filter]) -> io::Result<Self> {
        let mut socket = netlink(netlink_sys::protocols::NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        attach_filter(&socket, program)?;
        for &group in groups {
            match socket.add_membership(group) {
                // Linux before 5.3 has no next hop objects.
                Err(_) if group == RTNLGRP_NEXTHOP => {}
                joined => joined?,
            }
        }
        Ok(Self { socket, buffer: vec![0; MESSAGE_MAX].into(), overrun: false })
    }

    /// Takes the announcements that this program takes, from now on. Error: the kernel rejects it,
    /// or no memory is left.
    pub(crate) fn filter(&self, program: &[sock_filter]) -> io::Result<()> {
        attach_filter(&self.socket, program)
    }

    /// Shrinks the queue to a few messages.
    #[cfg(test)]
    pub(crate) fn shrink(&self) {
        self.socket.set_rx_buf_sz(2048_i32).expect("a buffer");
    }

    /// Hands received changes to `each`. Does not allocate.
    pub(crate) fn read(&mut self, mut each: impl FnMut(Change)) {
        for _ in 0..BURST {
            let mut room = &mut self.buffer[..];
            match self.socket.recv(&mut room, 0) {
                Ok(length) => hand_out(&self.buffer[..length.min(MESSAGE_MAX)], &mut each),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if std::mem::take(&mut self.overrun) {
                        each(Change::Anything);
                    }
                    return;
                }
                // ENOBUFS: some were dropped.
                Err(_) => {
                    self.overrun = true;
                    each(Change::Anything);
                }
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Takes announcements about `interface`, and those about no interface.
fn program(interface: u32) -> Vec<sock_filter> {
    const LD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const LD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    const LD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    // The program's loads convert from network order, but netlink has the machine's byte order.
    let half = |value: u16| u32::from(u16::from_be_bytes(value.to_ne_bytes()));
    let word = |value: u32| u32::from_be_bytes(value.to_ne_bytes());
    let mut code = vec![op(LD_HALF, 4, 0, 0)]; // nlmsg_type
    for (left, kind) in (1..=OF_INTERFACES.len() as u8).rev().zip(OF_INTERFACES) {
        code.push(op(JEQ, half(kind), left, 0));
    }
    code.extend([
        op(RET, u32::MAX, 0, 0),
        op(LD_WORD, 20, 0, 0),
        op(JEQ, word(interface), 0, 8),
        op(LD_BYTE, 16, 0, 0), // entries of a bridge are not our neighbours
        op(JEQ, libc::AF_BRIDGE as u32, 6, 0),
        op(LD_HALF, 4, 0, 0),
        op(JEQ, half(libc::RTM_NEWNEIGH), 0, 3),
        op(LD_HALF, 24, 0, 0), // ndm_state: while the kernel checks an entry, we use it as before
        op(JEQ, half(libc::NUD_DELAY), 2, 0),
        op(JEQ, half(libc::NUD_PROBE), 1, 0),
        op(RET, u32::MAX, 0, 0),
        op(RET, 0, 0, 0),
    ]);
    code
}

pub(super) fn hand_out(datagram: &[u8], each: &mut impl FnMut(Change)) {
    let mut is_empty = true;
    for (header, body) in Messages(datagram) {
        is_empty = false;
        each(match header.kind {
            libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => neighbour(body),
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => routes(body),
            libc::RTM_NEWLINK | libc::RTM_DELLINK | libc::RTM_NEWADDR | libc::RTM_DELADDR => {
                Change::Interface
            }
            _ => Change::AllRoutes,
        });
    }
    if is_empty {
        each(Change::Anything);
    }
}

fn neighbour(body: &[u8]) -> Change {
    let address = body.get(HEADER_LEN..).and_then(|attributes| {
        Attributes(attributes).find(|(kind, _)| *kind == libc::NDA_DST).and_then(|(_, a)| ip(a))
    });
    address.map_or(Change::Anything, Change::Neighbour)
}

fn routes(body: &[u8]) -> Change {
    let Some((header, attributes)) = body.split_first_chunk::<HEADER_LEN>() else {
        return Change::Anything;
    };
    match Attributes(attributes).find(|(kind, _)| *kind == libc::RTA_DST) {
        Some((_, address)) => {
            ip(address).map_or(Change::Anything, |a| Change::Routes(a, header[1]))
        }
        None => Change::AllRoutes,
    }
}

fn has_prefix(address: IpAddr, prefix: IpAddr, bits: u8) -> bool {
    let word = |address: IpAddr| match address {
        IpAddr::V4(a) => u128::from(a.to_bits()) << 96,
        IpAddr::V6(a) => a.to_bits(),
    };
    let differing = word(address) ^ word(prefix);
    family(address) == family(prefix) && differing.leading_zeros() >= u32::from(bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::descriptors::wait_readable;
    use crate::kernel::interface::Interface;
    use crate::testing::testns::{Pair, or_skip};

    fn all(monitor: &mut Monitor) -> Vec<Change> {
        let mut all = Vec::new();
        monitor.read(|change| all.push(change));
        all
    }

    fn ip(address: &str) -> IpAddr {
        address.parse().expect("an address")
    }

    fn open() -> Monitor {
        let v0 = Interface::by_name("v0").expect("v0").index;
        Monitor::open(v0).expect("netlink")
    }

    #[test]
    fn changes_are_heard_of_and_those_that_change_nothing_here_are_not() {
        let pair = or_skip!(
            "monitor::changes_are_heard_of_and_those_that_change_nothing_here_are_not",
            Pair::new()
        );
        pair.a.sh("ip link add w0 type veth peer name w1; ip link set w0 up");
        let mut monitor = pair.a.run(open);
        // The kernel is still setting up IPv6 on the new link.
        pair.a.sh("ip -6 neigh add fd09::7 lladdr 02:00:00:00:00:07 dev v0");
        let changes = all(&mut monitor);
        assert!(changes.contains(&Change::Neighbour(ip("fd09::7"))), "{changes:?}");
        for (what, change) in [
            (
                "ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0",
                Change::Neighbour(ip("10.9.0.7")),
            ),
            ("ip neigh del 10.9.0.7 dev v0", Change::Neighbour(ip("10.9.0.7"))),
            ("ip route add 192.0.2.0/24 via 10.9.0.2", Change::Routes(ip("192.0.2.0"), 24)),
            ("ip route add 2001:db8::/32 via fd09::2", Change::Routes(ip("2001:db8::"), 32)),
            ("ip route add default via 10.9.0.2", Change::AllRoutes),
            ("ip rule add prio 77 from 10.9.0.1 lookup main", Change::AllRoutes),
            ("ip link set v0 address 02:00:00:00:09:77", Change::Interface),
            ("ip address add 10.9.0.9/32 dev v0", Change::Interface),
        ] {
            pair.a.sh(what);
            let changes = all(&mut monitor);
            assert!(changes.contains(&change), "{what}: {changes:?}");
        }
        pair.a.sh("ip neigh add 10.9.0.8 lladdr 02:00:00:00:00:07 dev v0 nud delay
                   ip link set w0 address 02:00:00:00:09:78
                   ip neigh add 10.9.0.8 lladdr 02:00:00:00:00:07 dev w0");
        // IPv6 neighbours come and go without our doing.
        let strange = |change: &Change| {
            matches!(
                change,
                Change::Interface | Change::Neighbour(IpAddr::V4(_)) | Change::Anything
            )
        };
        let changes = all(&mut monitor);
        assert!(!changes.iter().any(strange), "{changes:?}");
    }

    #[test]
    fn of_a_link_nothing_else_is_heard() {
        let pair = or_skip!("monitor::of_a_link_nothing_else_is_heard", Pair::new_in_calm());
        pair.a.sh("ip link add w0 type veth peer name w1");
        let link = || {
            let v0 = Interface::by_name("v0").expect("v0").index;
            Monitor::of_link(v0).expect("netlink")
        };
        let mut monitor = pair.a.run(link);
        pair.a.sh("ip link set v0 mtu 1400");
        let changes = all(&mut monitor);
        assert!(
            changes.iter().all(|change| *change == Change::Interface) && !changes.is_empty(),
            "{changes:?}"
        );
        pair.a.sh("ip address add 10.9.0.9/32 dev v0
                   ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0
                   ip route add 192.0.2.0/24 via 10.9.0.2
                   ip link set w0 mtu 1400");
        assert_eq!(all(&mut monitor), []);
    }

    #[test]
    fn what_did_not_fit_may_have_been_anything() {
        let pair = or_skip!("monitor::what_did_not_fit_may_have_been_anything", Pair::new());
        let mut monitor = pair.a.run(open);
        monitor.shrink();
        let many: Vec<String> = (10..60)
            .map(|host| format!("ip neigh add 10.9.0.{host} lladdr 02:00:00:00:00:07 dev v0"))
            .collect();
        pair.a.sh(&many.join("\n"));
        let changes = all(&mut monitor);
        assert!(changes.contains(&Change::Anything));
        // Announcements between the first dropped one and the end of the queue were dropped too.
        assert_eq!(changes.last(), Some(&Change::Anything));
        assert!(!wait_readable(&monitor, 0).expect("poll"), "it is announced once");
    }

    #[test]
    fn a_route_is_of_the_addresses_with_its_prefix() {
        for (prefix, bits, address, is_of) in [
            ("192.0.2.0", 24, "192.0.2.77", true),
            ("192.0.2.0", 25, "192.0.2.177", false),
            ("0.0.0.0", 0, "192.0.2.77", true),
            ("::", 0, "192.0.2.77", false),
            ("2001:db8::", 32, "2001:db8:1::1", true),
            ("2001:db8::1", 128, "2001:db8::2", false),
            ("2001:db8::", 255, "2001:db8::", false),
        ] {
            let change = Change::Routes(ip(prefix), bits);
            assert_eq!(change.is_of_way_to(ip(address)), is_of, "{prefix}/{bits}, {address}");
        }
        assert!(!Change::Neighbour(ip("10.9.0.1")).is_of_way_to(ip("10.9.0.1")));
    }

    #[test]
    fn what_is_not_understood_may_be_anything() {
        let mut changes = Vec::new();
        for datagram in [&[][..], &[7; 9], &[255; 64]] {
            hand_out(datagram, &mut |change| changes.push(change));
        }
        assert_eq!((neighbour(&[0; 5]), routes(&[0; 5])), (Change::Anything, Change::Anything));
        assert_eq!(changes, [Change::Anything; 3]);
    }
}
