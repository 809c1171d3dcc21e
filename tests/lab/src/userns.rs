//! Rights: those of root, or of root in a user namespace.

use crate::error::{LabError, Result};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};
use std::fs;
use std::io;

/// The source of the right to create networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// Root's capabilities on the machine itself: everything works.
    Machine,
    /// Capabilities in a user namespace: networks, `nft` and `tc` work; loading BPF programs does
    /// not.
    UserNamespace,
}

/// Capability numbers of capabilities(7).
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;

/// Gets the right to create namespaces. Does nothing if the process has it, else moves the process
/// into a new user namespace in which the user is root.
///
/// Call it at the start of `main`: the kernel refuses it once the process has a second thread.
/// Error: user namespaces are not allowed here, or the process has several threads already.
pub fn enter_user_namespace() -> Result<Privilege> {
    if let Some(privilege) = privilege() {
        return Ok(privilege);
    }
    become_root_of_a_user_namespace()
        .map_err(|source| LabError::Namespace { doing: "make a user namespace", source })?;
    Ok(Privilege::UserNamespace)
}

/// The present rights of the process; `None` if it cannot create network namespaces.
pub(super) fn privilege() -> Option<Privilege> {
    let effective = effective_capabilities(&fs::read_to_string("/proc/thread-self/status").ok()?)?;
    let has = |capability: u32| effective & (1 << capability) != 0;
    if !(has(CAP_SYS_ADMIN) && has(CAP_NET_ADMIN)) {
        return None;
    }
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    Some(if maps_everyone(&map) { Privilege::Machine } else { Privilege::UserNamespace })
}

fn become_root_of_a_user_namespace() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER)?;
    // The kernel requires this order: an unprivileged group map needs setgroups denied first.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

/// The effective set in a `status` file of proc(5).
fn effective_capabilities(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

/// Whether a `uid_map` is that of the machine's own user namespace: all ids map to themselves.
fn maps_everyone(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_status() {
        let status = "Name:\tcat\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
        assert_eq!(effective_capabilities(status), Some(0x1ff_ffff_ffff));
        assert_eq!(effective_capabilities("Name:\tcat\n"), None);
    }

    #[test]
    fn only_the_initial_namespace_maps_everyone() {
        assert!(maps_everyone("         0          0 4294967295\n"));
        assert!(!maps_everyone("         0       1000          1\n"));
    }
}
