//! The requirements of tests, each with the reason why it is not available.

use rocinante::device::Backend;
use rocinante_lab::{Availability, Privilege};
use std::path::Path;
use std::sync::LazyLock;

static AVAILABLE: LazyLock<Availability> = LazyLock::new(Availability::probe);

/// Ends the test by [`skip!`](crate::skip!) if the value is an `Err`; its text is the reason:
/// `require!(need::lab())`.
#[macro_export]
macro_rules! require {
    ($need:expr) => {
        if let Err(reason) = $need {
            $crate::skip!("{reason}");
        }
    };
}

/// Namespaces, veths and a bridge. Error: the reason why there are none.
pub fn lab() -> Result<(), String> {
    AVAILABLE.lab.clone()
}

/// Rules on the lab's bridge. Error: the reason why there are none.
pub fn nft() -> Result<(), String> {
    AVAILABLE.nft.clone()
}

/// Shapers in the lab. Error: the reason why there are none.
pub fn tc() -> Result<(), String> {
    AVAILABLE.tc.clone()
}

/// The switch of segmentation offload. Error: the reason why there is none.
pub fn ethtool() -> Result<(), String> {
    AVAILABLE.ethtool.clone()
}

/// VXLAN between hosts. Error: the reason why there is none.
pub fn vxlan() -> Result<(), String> {
    AVAILABLE.vxlan.clone()
}

/// The capabilities of root outside of any user namespace. Error: the privilege that the process
/// has instead.
pub fn machine_root() -> Result<(), String> {
    match AVAILABLE.privilege {
        Some(Privilege::Machine) => Ok(()),
        Some(Privilege::UserNamespace) => Err("needs root outside of a user namespace".into()),
        None => Err("needs root".into()),
    }
}

/// Devices with this backend in the lab. Error: the reason why there are none.
pub fn backend(backend: Backend) -> Result<(), String> {
    lab()?;
    match backend {
        Backend::Xdp => machine_root(),
        _ => Ok(()),
    }
}

/// The backends that can be had in the lab. The others are reported as skipped parts of a test.
#[must_use]
pub fn backends(test: &str) -> Vec<Backend> {
    let all = [Backend::Udp, Backend::Packet, Backend::Xdp].into_iter();
    all.filter(|netdev| {
        let found = backend(*netdev);
        let why = found.as_ref().err();
        why.inspect(|why| crate::skip::report(&format!("{test} {netdev}"), why)).is_none()
    })
    .collect()
}

/// A virtual machine with a tap in the lab. The host can drop its packets. Error: the reason why
/// there is none.
pub fn guest() -> Result<(), String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("needs an x86-64 machine".into());
    }
    machine_root()?;
    nft()?;
    program("qemu-system-x86_64")?;
    if Path::new("/dev/net/tun").exists() {
        Ok(())
    } else {
        Err("needs /dev/net/tun (in a container: --device /dev/net/tun)".into())
    }
}

/// A program on the search path or among the system's. Error: the program is not installed.
pub fn program(name: &str) -> Result<(), String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(Into::into);
    if std::env::split_paths(&path).chain(system).any(|dir| Path::new(&dir).join(name).is_file()) {
        Ok(())
    } else {
        Err(format!("{name} is not installed"))
    }
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn programs_are_found_by_name() {
        assert_eq!(program("sh"), Ok(()));
        assert_eq!(program("no-such"), Err("no-such is not installed".into()));
    }
}
