//! The rights that the agent keeps: those of its work, and no others.

use std::io;

use rustix::thread::{
    CapabilitySet, capabilities, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};

use crate::error::AgentError;

/// The capabilities to keep, each with its name.
const KEPT: [(CapabilitySet, &str); 9] = [
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"), // links of containers, programs, their rules
    (CapabilitySet::NET_RAW, "CAP_NET_RAW"),     // packet sockets, AF_XDP
    (CapabilitySet::BPF, "CAP_BPF"),             // programs
    (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN"), // namespaces, programs by their number
    (CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"), // namespaces and sockets of processes
    (CapabilitySet::IPC_LOCK, "CAP_IPC_LOCK"),   // memory of afxdp
    (CapabilitySet::SETUID, "CAP_SETUID"),       // guardians become their programs' users
    (CapabilitySet::SETGID, "CAP_SETGID"),
    (CapabilitySet::KILL, "CAP_KILL"), // guardians that have become another user
];

/// A capability for the start: the kernel checks it when a socket is opened that receives
/// announcements of other namespaces.
const AT_START: (CapabilitySet, &str) = (CapabilitySet::NET_BROADCAST, "CAP_NET_BROADCAST");

/// An error that names the rights that are missing. Error: some are.
pub(crate) fn check() -> Result<(), AgentError> {
    let hint = "start it as root, or by host/agent/dist/rocinante-agent.service, or in a \
                container as host/agent/dist/Containerfile says";
    let sets = capabilities(None)
        .map_err(|e| AgentError::os("capabilities cannot be read", &e.into(), hint))?;
    let needed = KEPT.iter().chain([&AT_START]);
    let missing = needed.filter(|(right, _)| !sets.effective.contains(*right));
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(AgentError::new(format!("{} missing", missing.join(", ")), hint))
}

/// Drops every other right of the calling thread, and of those that it starts from now on, for
/// good. Error: the kernel's.
pub(crate) fn drop_others() -> Result<(), AgentError> {
    drop_all_but(KEPT.iter().map(|(right, _)| *right).collect())
        .map_err(|e| AgentError::os("capabilities cannot be dropped", &e, ""))
}

fn drop_all_but(kept: CapabilitySet) -> io::Result<()> {
    let sets = capabilities(None)?;
    // CAP_SETPCAP permits to reduce the bounding set. Without it the set stays. The set bounds the
    // rights of a program that this process executes: it executes none.
    if sets.effective.contains(CapabilitySet::SETPCAP) {
        for right in CapabilitySet::all().difference(kept).iter() {
            match remove_capability_from_bounding_set(right) {
                // One that this kernel does not know.
                Err(rustix::io::Errno::INVAL) => {}
                removed => removed?,
            }
        }
    }
    set_no_new_privs(true)?;
    keep_alone(kept)
}

/// Drops every right of the calling thread but those to become another user, and so of the
/// processes that it starts: none gains one that its parent has not. Error: the kernel's.
pub(crate) fn keep_users_alone() -> io::Result<()> {
    keep_alone(CapabilitySet::SETUID | CapabilitySet::SETGID)
}

fn keep_alone(kept: CapabilitySet) -> io::Result<()> {
    let kept = capabilities(None)?.permitted.intersection(kept);
    let sets = rustix::thread::CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_is_kept_stays() {
        let kept = CapabilitySet::NET_RAW;
        // Of a thread of its own: others of this process keep theirs.
        let after = std::thread::spawn(move || {
            drop_all_but(kept).expect("dropped");
            let status = fs::read_to_string("/proc/thread-self/status").expect("status");
            (capabilities(None).expect("sets"), status)
        });
        let (sets, status) = after.join().expect("no panic");
        assert!(kept.contains(sets.effective) && kept.contains(sets.permitted), "{sets:?}");
        assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    }
}
