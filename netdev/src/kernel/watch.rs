//! Follows an interface: whether it is up, and its addresses.
//!
//! The kernel's announcements come to a descriptor, so that nothing has to look or to run in
//! between. A filter in the kernel has the known state: the descriptor becomes readable for a
//! change, and not when an address is only renewed (by DHCP, or by each router advertisement). A
//! program that sleeps on the descriptor and then takes an event finds one.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use libc::sock_filter;

use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{Monitor, Rtnl};
use crate::tuning::routes::ATTEMPTS;

/// The filter knows no more addresses: its memory is limited (`net.core.optmem_max`).
const KNOWN_MAX: usize = 64;
const GROUPS: [u32; 3] = [libc::RTNLGRP_LINK, libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR];

/// Follows an interface of the network namespace of the thread that made it.
#[derive(Debug)]
pub struct InterfaceWatch {
    monitor: Monitor,
    rtnl: Rtnl,
    index: u32,
    /// The interface when it was last looked at; `None` once it is gone.
    now: Option<Interface>,
    /// It could not be looked at.
    is_due: bool,
}

impl InterfaceWatch {
    /// Follows the interface with this index from now on. Error: no descriptor or no memory left;
    /// `NotFound` if there is no such interface.
    pub fn open(index: u32) -> io::Result<Self> {
        let monitor = Monitor::with(&GROUPS, &program(index, None))?;
        let mut this = Self { monitor, rtnl: Rtnl::open()?, index, now: None, is_due: true };
        this.look();
        match this.now {
            Some(_) => Ok(this),
            None => Err(io::Error::new(io::ErrorKind::NotFound, format!("no interface {index}"))),
        }
    }

    /// The interface as it was at the last look; `None` once it is gone.
    #[must_use]
    pub fn interface(&self) -> Option<&Interface> {
        self.now.as_ref()
    }

    /// Looks at the interface if the kernel announced a change. Returns whether there was one. A
    /// call with nothing to do costs a system call.
    pub fn look(&mut self) -> bool {
        let mut announced = std::mem::take(&mut self.is_due);
        self.monitor.read(|_| announced = true);
        if !announced {
            return false;
        }
        let mut changed = false;
        for _ in 0..ATTEMPTS {
            let Ok(all) = self.rtnl.interfaces() else { break };
            let found = all.into_iter().find(|interface| interface.index == self.index);
            if same(found.as_ref(), self.now.as_ref()) {
                return changed;
            }
            (self.now, changed) = (found, true);
            // The kernel may not have announced a change between this look and the new filter: it
            // is looked at once more.
            let exact = self.monitor.filter(&program(self.index, self.now.as_ref()));
            if exact.or_else(|_| self.monitor.filter(&program(self.index, None))).is_err() {
                break;
            }
        }
        self.is_due = true;
        changed
    }
}

impl AsFd for InterfaceWatch {
    /// Readable while there is a change that was not looked at.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }
}

/// Follows all interfaces of the network namespace of the thread that made it.
#[derive(Debug)]
pub struct InterfacesWatch(Monitor);

impl InterfacesWatch {
    /// Follows them from now on. Error: no descriptor or no memory left.
    pub fn open() -> io::Result<Self> {
        let code = (libc::BPF_RET | libc::BPF_K) as u16;
        let all = [sock_filter { code, jt: 0, jf: 0, k: u32::MAX }];
        Monitor::with(&GROUPS, &all).map(Self)
    }

    /// Whether the kernel announced a change of links or addresses since the last call.
    pub fn look(&mut self) -> bool {
        let mut announced = false;
        self.0.read(|_| announced = true);
        announced
    }
}

impl AsFd for InterfacesWatch {
    /// Readable while there is an announcement.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether all that the filter knows is the same.
fn same(one: Option<&Interface>, other: Option<&Interface>) -> bool {
    let known = |interface: &Interface| (interface.up, interface.addresses.clone());
    one.map(known) == other.map(known)
}

/// Takes announcements about the interface that differ from the known state. Without an interface
/// nothing is known.
fn program(index: u32, known: Option<&Interface>) -> Vec<sock_filter> {
    const LD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const LD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    const LD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    const LD_AT_X: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_IND) as u16;
    const LD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_IMM) as u16;
    const LDX_NUMBER: u16 = (libc::BPF_LDX | libc::BPF_IMM) as u16;
    const TAX: u16 = (libc::BPF_MISC | libc::BPF_TAX) as u16;
    const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
    const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    /// Offsets in a message: `struct nlmsghdr`, then `struct ifinfomsg` or `struct ifaddrmsg`,
    /// which have the family and the index in the same places.
    const TYPE: u32 = 4;
    const FAMILY: u32 = 16;
    const ADDRESS_FLAGS: u32 = 18;
    const INDEX: u32 = 20;
    const LINK_FLAGS: u32 = 24;
    const ADDRESS_ATTRIBUTES: u32 = 24;
    /// `SKF_AD_OFF + SKF_AD_NLATTR`: finds the attribute X from A on.
    const FIND_ATTRIBUTE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_NLATTR) as u32;
    const UP: u32 = (libc::IFF_UP | libc::IFF_LOWER_UP) as u32;
    let op = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let (take, drop) = (op(RET, u32::MAX, 0, 0), op(RET, 0, 0, 0));
    // The program's loads convert from network order, but netlink has the machine's byte order.
    let half = |value: u16| u32::from(u16::from_be_bytes(value.to_ne_bytes()));
    let word = |value: u32| u32::from_be_bytes(value.to_ne_bytes());
    let mut code = vec![
        op(LD_WORD, INDEX, 0, 0),
        op(JEQ, word(index), 1, 0),
        drop,
        op(LD_BYTE, FAMILY, 0, 0), // a port of a bridge
        op(JEQ, libc::AF_BRIDGE as u32, 0, 1),
        drop,
    ];
    let Some(known) = known else {
        code.push(take);
        return code;
    };
    let (is_up, is_down) = if known.up { (0, 1) } else { (1, 0) };
    code.extend([
        op(LD_HALF, TYPE, 0, 0),
        op(JEQ, half(libc::RTM_NEWLINK), 0, 5),
        op(LD_WORD, LINK_FLAGS, 0, 0),
        op(AND, word(UP), 0, 0),
        op(JEQ, word(UP), is_up, is_down),
        drop,
        take,
        op(JEQ, half(libc::RTM_NEWADDR), 1, 0),
        take,
        // An address that the kernel still checks cannot be used.
        op(LD_BYTE, ADDRESS_FLAGS, 0, 0),
        op(AND, libc::IFA_F_TENTATIVE | libc::IFA_F_OPTIMISTIC, 0, 0),
        op(JEQ, libc::IFA_F_TENTATIVE, 0, 1),
        drop,
        // IFA_ADDRESS is the peer's on a link to one peer, where IFA_LOCAL exists too.
        op(LDX_NUMBER, libc::IFA_LOCAL.into(), 0, 0),
        op(LD_NUMBER, ADDRESS_ATTRIBUTES, 0, 0),
        op(LD_WORD, FIND_ATTRIBUTE, 0, 0),
        op(JEQ, 0, 0, 3),
        op(LDX_NUMBER, libc::IFA_ADDRESS.into(), 0, 0),
        op(LD_NUMBER, ADDRESS_ATTRIBUTES, 0, 0),
        op(LD_WORD, FIND_ATTRIBUTE, 0, 0),
        op(TAX, 0, 0, 0),
    ]);
    for (address, _) in known.addresses.iter().take(KNOWN_MAX) {
        let (family, octets) = match address {
            IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
            IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
        };
        // From each comparison to behind `drop`.
        let mut left = octets.len() as u8 / 2 + 1;
        code.extend([op(LD_BYTE, FAMILY, 0, 0), op(JEQ, family as u32, 0, left)]);
        for (at, octets) in (4..).step_by(4).zip(octets.chunks_exact(4)) {
            left -= 2;
            let value = u32::from_be_bytes([octets[0], octets[1], octets[2], octets[3]]);
            code.extend([op(LD_AT_X, at, 0, 0), op(JEQ, value, 0, left)]);
        }
        code.push(drop);
    }
    code.push(take);
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::descriptors::wait_readable;
    use crate::testing::testns::{Pair, or_skip};

    fn open(name: &str) -> InterfaceWatch {
        InterfaceWatch::open(Interface::by_name(name).expect(name).index).expect("netlink")
    }

    fn is_readable(watch: &InterfaceWatch) -> bool {
        wait_readable(watch, 0).expect("poll")
    }

    /// Whether there is a change, of which the kernel may tell a little later.
    fn changes(watch: &mut InterfaceWatch) -> bool {
        wait_readable(&*watch, 20_000).expect("poll") && watch.look()
    }

    fn has(watch: &InterfaceWatch, address: &str) -> bool {
        let address: IpAddr = address.parse().expect("an address");
        watch.interface().is_some_and(|i| i.addresses.iter().any(|(own, _)| *own == address))
    }

    #[test]
    fn it_is_readable_for_what_changes_and_for_nothing_else() {
        let pair = or_skip!(
            "watch::it_is_readable_for_what_changes_and_for_nothing_else",
            Pair::new_in_calm()
        );
        pair.a.sh("ip link add w0 type veth peer name w1; ip link set w0 up
                   ip address add 10.9.0.5/24 dev v0
                   ip address add fd09::5/64 dev v0 nodad valid_lft 1000 preferred_lft 1000");
        let (mut watch, mut other) = pair.a.run(|| (open("v0"), open("w0")));
        assert!(!watch.look() && !is_readable(&watch));
        for renewed in [
            "ip address change 10.9.0.5/24 dev v0 valid_lft 2000 preferred_lft 2000",
            "ip address change fd09::5/64 dev v0 nodad valid_lft 2000 preferred_lft 2000",
            "ip address change fd09::1/64 dev v0 nodad valid_lft 2000 preferred_lft 2000",
            "ip link set v0 address 02:00:00:00:09:77",
            "ip link set v0 mtu 4000",
            "ip address add 10.7.0.1/24 dev w0",
            "ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0",
        ] {
            pair.a.sh(renewed);
            assert!(!is_readable(&watch) && !watch.look(), "{renewed}");
        }
        assert!(changes(&mut other) && has(&other, "10.7.0.1"));
        for (change, address, is_there) in [
            ("ip address add 10.9.0.6/24 dev v0", "10.9.0.6", true),
            ("ip address del 10.9.0.5/24 dev v0", "10.9.0.5", false),
            ("ip address add 10.9.0.5/24 dev v0", "10.9.0.5", true),
            ("ip address add fd09::6/64 dev v0 nodad", "fd09::6", true),
            ("ip address del fd09::5/64 dev v0", "fd09::5", false),
            ("ip address add 10.9.0.8 peer 10.9.0.5/32 dev v0", "10.9.0.8", true),
        ] {
            pair.a.sh(change);
            assert!(changes(&mut watch), "{change}");
            assert_eq!(has(&watch, address), is_there, "{change}");
            assert!(!is_readable(&watch) && !watch.look(), "{change}, once more");
        }
        for (change, up) in [("ip link set v0 down", false), ("ip link set v0 up", true)] {
            pair.a.sh(change);
            assert!(changes(&mut watch), "{change}");
            assert_eq!(watch.interface().map(|interface| interface.up), Some(up));
        }
        assert!(!is_readable(&other) && !other.look());
        // The carrier is the other end's.
        pair.b.sh("ip link set v0 down");
        assert!(changes(&mut watch));
        assert_eq!(watch.interface().map(|interface| interface.up), Some(false));
        pair.a.sh("ip link delete v0");
        assert!(changes(&mut watch) && watch.interface().is_none());
    }

    #[test]
    fn more_addresses_than_the_filter_knows_are_seen_all_the_same() {
        let pair = or_skip!(
            "watch::more_addresses_than_the_filter_knows_are_seen_all_the_same",
            Pair::new_in_calm()
        );
        let many: Vec<String> = (0..KNOWN_MAX + 20)
            .map(|at| format!("address add fd0a::{at:x}/64 dev v0 nodad"))
            .collect();
        let file = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
        std::fs::write(&file, many.join("\n")).expect("a file");
        pair.a.sh(&format!("ip -batch {}", file.display()));
        let mut watch = pair.a.run(|| open("v0"));
        pair.a.sh("ip address del fd0a::53/64 dev v0");
        assert!(changes(&mut watch) && !has(&watch, "fd0a::53"));
        assert!(has(&watch, "fd0a::52") && !watch.is_due);
    }

    #[test]
    fn there_must_be_an_interface() {
        let error = InterfaceWatch::open(u32::MAX >> 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
