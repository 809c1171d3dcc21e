//! Reasons for which the kernel refused to attach the program, in words.

use crate::kernel::denied::{Capability, Needs};
use crate::kernel::interface::Interface;
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use std::io;

/// What opening a port needs.
pub(super) const NEEDS: Needs = Needs {
    call: "bpf(2)",
    capabilities: &[Capability::NetRaw, Capability::NetAdmin, Capability::Bpf],
    of_the_host: true,
};

/// The error of `BPF_LINK_CREATE` for an XDP program, explained.
pub(super) fn explain(iface: &Interface, error: io::Error) -> OpenError {
    let name = &iface.name;
    let hint = match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) => format!(
            "another XDP program is attached to {name} (`ip link show dev {name}` names it): detach \
             it, or choose --netdev packet or udp"
        ),
        Some(libc::ERANGE) => format!(
            "the driver does not take XDP at this MTU ({}; a veth's other end counts too): lower \
             it, or choose --netdev packet or udp",
            iface.mtu
        ),
        Some(libc::EOPNOTSUPP) => format!(
            "the driver of {name} has no native XDP (or not with its present offloads): choose \
             --netdev packet or udp"
        ),
        Some(libc::EPERM | libc::EACCES) => {
            format!("{}, or choose --netdev packet or udp", NEEDS.explain())
        }
        _ => "choose --netdev packet or udp".to_owned(),
    };
    let what = format!("cannot attach the XDP program to {name} in native mode");
    OpenError::os(Backend::Xdp, what, error, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_says_what_to_do() {
        let iface = Interface {
            name: "eth0".into(),
            index: 2,
            mtu: 9000,
            mac: [2, 0, 0, 0, 0, 1],
            up: true,
            loopback: false,
            addresses: Vec::new(),
        };
        for (errno, word) in [
            (libc::EBUSY, "another XDP program"),
            (libc::ERANGE, "9000"),
            (libc::EOPNOTSUPP, "no native XDP"),
            (libc::EPERM, "CAP_NET_ADMIN"),
            (libc::EIO, "--netdev packet"),
        ] {
            let error = explain(&iface, io::Error::from_raw_os_error(errno));
            assert!(error.hint.contains(word), "{error}");
            assert_eq!(error.errno(), errno);
        }
    }
}
