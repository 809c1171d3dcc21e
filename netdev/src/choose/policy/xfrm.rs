//! IPsec: the policies of the network namespace, by netlink (`include/uapi/linux/xfrm.h`). The
//! kernel applies them where IP sends and receives, which a packet socket is not: datagrams that a
//! policy encrypts for a UDP socket leave a packet socket in the clear.

use std::io;
use std::net::IpAddr;

use super::rules::{ADMIN, Audit};
use crate::ROCE_PORT;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::socket::{Attributes, NetlinkSocket};

const NETLINK_XFRM: isize = 6;
const NEWPOLICY: u16 = 0x13;
const GETPOLICY: u16 = 0x15;
/// The answer has a byte each for `in`, `fwd` and `out` (`struct xfrm_userpolicy_default`).
const GETDEFAULT: u16 = 0x28;
const DEFAULT_BLOCK: u8 = 1;
/// `struct xfrm_userpolicy_id`, which a request to list all has too.
const ID_LEN: usize = 64;

// `struct xfrm_userpolicy_info`, which begins with a `struct xfrm_selector`.
const DPORT: usize = 32;
const DPORT_MASK: usize = 34;
const PREFIX_D: usize = 42;
const PREFIX_S: usize = 43;
const PROTO: usize = 44;
const IFINDEX: usize = 48;
const DIR: usize = 160;
const ACTION: usize = 161;
const INFO_LEN: usize = 168;

const DIR_IN: u8 = 0;
const DIR_OUT: u8 = 1;
const DIR_FWD: u8 = 2;
const ACTION_ALLOW: u8 = 0;
/// The attribute that says how a policy transforms.
const XFRMA_TMPL: u16 = 5;

/// Adds the policies that datagrams of ours could meet on `iface`.
pub(super) fn audit(iface: &Interface, audit: &mut Audit) {
    for (direction, count) in policies(iface, false, audit) {
        audit.found(format!("ipsec: {count} policies of direction {direction}"), true);
    }
}

/// The directions of policies that datagrams of ours could meet on `iface`, with their number; with
/// `forwards`, those that meet datagrams forwarded for the interface's addresses. Notes if they
/// could not be read.
pub(super) fn policies(
    iface: &Interface,
    forwards: bool,
    audit: &mut Audit,
) -> Vec<(&'static str, usize)> {
    let mut found = [("in", 0), ("out", 0), ("fwd", 0)];
    let read = read(&mut |kind, body| match (kind, body) {
        (NEWPOLICY, policy) => {
            if let Some(direction) = concerned(policy, iface, forwards) {
                found[usize::from(direction)].1 += 1;
            }
        }
        // The defaults for packets that no policy matches.
        (GETDEFAULT, [inward, forwarded, out, ..]) => {
            found[0].1 += usize::from(!forwards && *inward == DEFAULT_BLOCK);
            found[1].1 += usize::from(*out == DEFAULT_BLOCK);
            found[2].1 += usize::from(forwards && *forwarded == DEFAULT_BLOCK);
        }
        _ => {}
    });
    if let Err(e) = read {
        audit.note_unseen("the IPsec policies", || ADMIN.explain(), &e);
    }
    found.into_iter().filter(|(_, count)| *count > 0).collect()
}

fn read(each: &mut dyn FnMut(u16, &[u8])) -> io::Result<()> {
    let mut socket = match NetlinkSocket::open(NETLINK_XFRM) {
        // A kernel without IPsec.
        Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(()),
        socket => socket?,
    };
    socket.request(GETPOLICY, true, &[0; ID_LEN], each)?;
    match socket.request(GETDEFAULT, false, &[0; 4], each) {
        // Linux before 5.15 knows none.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        read => read,
    }
}

/// The direction of a policy, unless none of our datagrams can meet it.
pub(super) fn concerned(policy: &[u8], iface: &Interface, forwards: bool) -> Option<u8> {
    let info = policy.get(..INFO_LEN)?;
    let (direction, action) = (info[DIR], info[ACTION]);
    let u16_at = |at: usize| u16::from_be_bytes([info[at], info[at + 1]]);
    let (to, from) = ((&info[..16], info[PREFIX_D]), (&info[16..32], info[PREFIX_S]));
    // Forwarded datagrams meet `fwd` and then `out` (`ip_forward`), in both directions of travel.
    let own = match (direction, forwards) {
        (DIR_IN, false) => [to, to],
        (DIR_OUT, false) => [from, from],
        (DIR_OUT | DIR_FWD, true) => [to, from],
        _ => return None,
    };
    let transforms = Attributes(&policy[INFO_LEN..]).any(|(kind, _)| kind == XFRMA_TMPL);
    let index = u32::from_ne_bytes(info[IFINDEX..IFINDEX + 4].try_into().ok()?);
    let matches = matches!(info[PROTO], 0 | UDP)
        && (u16_at(DPORT) ^ ROCE_PORT) & u16_at(DPORT_MASK) == 0
        && (index == 0 || index == iface.index)
        && iface.addresses.iter().any(|(at, _)| own.iter().any(|end| is_within(*at, *end)));
    (matches && (transforms || action != ACTION_ALLOW)).then_some(direction)
}

const UDP: u8 = 17;

/// Whether the first `bits` of the address are those of the prefix. One of the other family has
/// other bits, unless there are none.
fn is_within(address: IpAddr, (prefix, bits): (&[u8], u8)) -> bool {
    let octets = match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let bit = |bytes: &[u8], at: usize| bytes.get(at / 8).map(|byte| byte >> (7 - at % 8) & 1);
    (0..usize::from(bits)).all(|at| bit(&octets, at) == bit(prefix, at))
}
