//! Why the kernel denied something to the calling thread (`EPERM`), in words for error messages: a
//! capability that it lacks, a user namespace other than the host's, or a seccomp profile.

use std::fs;

/// A capability of capabilities(7), by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Capability {
    NetAdmin = 12,
    NetRaw = 13,
    SysAdmin = 21,
    Bpf = 39,
}

impl Capability {
    /// The name as container runtimes take it, without `CAP_`.
    const fn name(self) -> &'static str {
        match self {
            Self::NetAdmin => "NET_ADMIN",
            Self::NetRaw => "NET_RAW",
            Self::SysAdmin => "SYS_ADMIN",
            Self::Bpf => "BPF",
        }
    }
}

/// The rights that a system call needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// The call, for the message: `bpf(2)`.
    pub(crate) call: &'static str,
    pub(crate) capabilities: &'static [Capability],
    /// Whether they count only in the host's user namespace.
    pub(crate) of_the_host: bool,
}

/// A thread's rights, as `/proc` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rights {
    effective: u64,
    /// Whether system calls pass a filter (`SECCOMP_MODE_FILTER`).
    filtered: bool,
    /// Whether this is the first user namespace, which maps every user to itself.
    of_the_host: bool,
}

impl Needs {
    /// Why the calling thread was denied the call, and what to do: `needs CAP_NET_RAW: run with
    /// --cap-add NET_RAW`.
    pub(crate) fn explain(&self) -> String {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        self.explain_for(Rights::parse(
            &read("/proc/thread-self/status"),
            &read("/proc/self/uid_map"),
        ))
    }

    fn explain_for(&self, rights: Rights) -> String {
        let Self { call, capabilities, of_the_host } = *self;
        let all = list(capabilities);
        let place = if of_the_host { " in the host's user namespace" } else { "" };
        let missing: Vec<_> = capabilities.iter().copied().filter(|c| !rights.have(*c)).collect();
        if of_the_host && !rights.of_the_host {
            return format!("needs {all}{place}, and this process is in another one");
        }
        if !missing.is_empty() {
            let lacks = if missing.len() < capabilities.len() {
                format!(", and lacks {}", list(&missing))
            } else {
                String::new()
            };
            let options: Vec<_> =
                missing.iter().map(|c| format!("--cap-add {}", c.name())).collect();
            return format!("needs {all}{place}{lacks}: run with {}", options.join(" "));
        }
        if rights.filtered {
            return format!(
                "has {all}, but the container's seccomp profile forbids {call}: run with \
                 --security-opt seccomp=FILE and a profile that permits it, or seccomp=unconfined"
            );
        }
        format!("has {all}, but a security module or lockdown(7) of this kernel forbids {call}")
    }
}

impl Rights {
    fn parse(status: &str, uid_map: &str) -> Self {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let effective = field("CapEff:").and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        let all_users = ["0", "0", "4294967295"];
        Self {
            effective: effective.unwrap_or(0),
            filtered: field("Seccomp:").is_some_and(|mode| mode.trim() == "2"),
            of_the_host: uid_map.split_whitespace().eq(all_users),
        }
    }

    /// Whether the capability is there. `CAP_SYS_ADMIN` includes `CAP_BPF`, and for bpf(2)
    /// `CAP_NET_ADMIN` too.
    const fn have(self, capability: Capability) -> bool {
        let sys_admin = matches!(capability, Capability::Bpf)
            && self.effective >> Capability::SysAdmin as u32 & 1 == 1;
        sys_admin || self.effective >> capability as u32 & 1 == 1
    }
}

fn list(capabilities: &[Capability]) -> String {
    let names: Vec<_> = capabilities.iter().map(|c| format!("CAP_{}", c.name())).collect();
    match names.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BPF: Needs = Needs {
        call: "bpf(2)",
        capabilities: &[Capability::NetRaw, Capability::NetAdmin, Capability::Bpf],
        of_the_host: true,
    };

    fn explained(capabilities: &[Capability], seccomp: u32, uid_map: &str) -> String {
        let effective = capabilities.iter().fold(0_u64, |bits, c| bits | 1 << *c as u32);
        let status = format!("Name:\tx\nCapEff:\t{effective:016x}\nSeccomp:\t{seccomp}\n");
        BPF.explain_for(Rights::parse(&status, uid_map))
    }

    #[test]
    fn what_is_there_is_not_asked_for() {
        use Capability::{Bpf, NetAdmin, NetRaw, SysAdmin};
        const HOST: &str = "         0          0 4294967295\n";
        let all = [NetRaw, NetAdmin, Bpf];
        assert_eq!(
            explained(&[], 0, HOST),
            "needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF in the host's user namespace: run with \
             --cap-add NET_RAW --cap-add NET_ADMIN --cap-add BPF"
        );
        let text = explained(&[NetRaw, NetAdmin], 2, HOST);
        assert!(text.ends_with(", and lacks CAP_BPF: run with --cap-add BPF"), "{text}");
        for rights in [&all[..], &[NetRaw, NetAdmin, SysAdmin]] {
            let text = explained(rights, 2, HOST);
            assert!(text.contains("seccomp profile forbids bpf(2)"), "{text}");
            assert!(!text.contains("--cap-add"), "{text}");
        }
        assert!(explained(&all, 0, HOST).contains("security module"));
        let text = explained(&all, 2, "0 100000 65536\n");
        assert!(text.contains("host's user namespace, and this process is in another"), "{text}");
    }
}
