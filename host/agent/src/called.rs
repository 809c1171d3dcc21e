//! Engines' names for containers, for people: that by which an engine introduced a container, else
//! that in the control group where the engine put the process that asks.
//!
//! Programs with a right of their own make control groups with any name, so a name decides no
//! right. It decides only which processes in a namespace of their own are searched for the ports of
//! a container ([`holders`](crate::holders)).

use std::fmt;
use std::fs::File;
use std::io::Read as _;

use serde::{Deserialize, Serialize};

use crate::log::short;

/// The longest file that is read: sixteen hierarchies with paths of 4 KiB.
const BYTES_MAX: u64 = 64 << 10;
/// The longest name of containerd.
const NAME_MAX: usize = 76;
/// The engines, by the beginning of a control group's name before a container's id.
const ENGINES: [(&str, &str); 6] = [
    ("docker-", "docker"),
    // Beside the service that started it (`podman run --cgroups=split`, which quadlet has).
    ("libpod-payload-", "libpod"),
    ("libpod-", "libpod"),
    ("crio-", "cri-o"),
    ("cri-containerd-", "containerd"),
    ("nerdctl-", "nerdctl"),
];

/// An engine's name for a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Called {
    pub(crate) id: String,
    pub(crate) engine: String,
}

impl Called {
    fn new(id: &str, engine: &str) -> Self {
        Self { id: id.into(), engine: engine.into() }
    }

    /// The name of the container of a process.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let mut bytes = Vec::new();
        let file = File::open(format!("/proc/{pid}/cgroup")).ok()?;
        // The kernel shows 4 KiB of a path, or nothing.
        file.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Self::of_groups(&String::from_utf8_lossy(&bytes))
    }

    /// The name in a `cgroup` file of proc(5): `hierarchy:controllers:path` in each line.
    pub(crate) fn of_groups(text: &str) -> Option<Self> {
        text.lines().find_map(|line| Self::of_path(line.splitn(3, ':').nth(2)?))
    }

    /// The outermost name: a container makes control groups below its own alone.
    fn of_path(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').collect();
        // ctr and nerdctl, in the namespace that they have if none is named.
        if let ["", "default", name, ..] = parts[..]
            && is_name(name)
        {
            return Some(Self::new(name, "containerd"));
        }
        parts.iter().enumerate().find_map(|(at, part)| {
            let scope = part.strip_suffix(".scope").unwrap_or(part);
            let named = |(prefix, engine): &(&str, &str)| {
                let id = scope.strip_prefix(prefix).filter(|id| is_id(id))?;
                Some(Self::new(id, engine))
            };
            if let Some(called) = ENGINES.iter().find_map(named) {
                return Some(called);
            }
            if !is_id(part) {
                return None;
            }
            let engine = match parts.get(at.wrapping_sub(1)) {
                Some(&"docker") => "docker",
                Some(pod) if pod.starts_with("pod") => "kubernetes",
                // podman's pod.
                _ if parts.get(at + 1).is_some_and(|it| it.starts_with("libpod-")) => return None,
                _ => "unknown",
            };
            Some(Self::new(part, engine))
        })
    }
}

/// As people write it: the beginning of a long id.
impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = if is_id(&self.id) { &self.id[..12] } else { short(&self.id) };
        write!(f, "{} {id}", short(&self.engine))
    }
}

/// Whether it is the id that engines choose by themselves.
fn is_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether containerd allows such a name.
fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.len() <= NAME_MAX
        && text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(is_inner)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: &str = "6d5fe22c86c363fd26a5e03edf8ea9d40a9e51ae948d4a39d79184cad9c0d8ee";
    const TWO: &str = "0b47edd349bb682d221f527cc91e444c20ac1ea4469d30d554a8a9e7d79c9d27";

    /// Paths as engines make them, with `ONE` and `TWO` for their ids.
    #[test]
    fn each_engine_has_its_paths() {
        let burst = "kubepods.slice/kubepods-burstable.slice";
        let pod = "kubepods-burstable-pod0f1e2d3c_4b5a_6978_8796_a5b4c3d2e1f0.slice";
        let user = "user.slice/user-1000.slice/user@1000.service";
        for (path, id, engine) in [
            // As podman 4.3, Docker 20.10 and ctr 1.6 of Debian make them with cgroupfs.
            ("/libpod_parent/libpod-ONE", "ONE", "libpod"),
            ("/mine/libpod-ONE", "ONE", "libpod"),
            ("/some.service/libpod-payload-ONE", "ONE", "libpod"),
            ("/docker/ONE", "ONE", "docker"),
            ("/mine/ONE", "ONE", "unknown"),
            ("/default/one.a-b", "one.a-b", "containerd"),
            ("/default/ONE", "ONE", "containerd"),
            // As their sources have it.
            ("/libpod_parent/TWO/libpod-ONE", "ONE", "libpod"),
            ("/machine.slice/libpod-ONE.scope/container", "ONE", "libpod"),
            ("/machine.slice/machine-libpod_pod_TWO.slice/libpod-ONE.scope", "ONE", "libpod"),
            (&format!("/{user}/user.slice/libpod-ONE.scope/container"), "ONE", "libpod"),
            (&format!("/{user}/app.slice/a.service/libpod-payload-ONE"), "ONE", "libpod"),
            ("/system.slice/docker-ONE.scope", "ONE", "docker"),
            (&format!("/{user}/user.slice/docker-ONE.scope"), "ONE", "docker"),
            ("/system.slice/nerdctl-ONE.scope", "ONE", "nerdctl"),
            (&format!("/{burst}/{pod}/crio-ONE.scope/container"), "ONE", "cri-o"),
            (&format!("/{burst}/{pod}/cri-containerd-ONE.scope"), "ONE", "containerd"),
            (&format!("/{burst}/{pod}/docker-ONE.scope"), "ONE", "docker"),
            ("/kubepods/besteffort/pod0f1e2d3c-4b5a/crio-ONE", "ONE", "cri-o"),
            ("/kubepods/pod0f1e2d3c-4b5a/ONE", "ONE", "kubernetes"),
            // Engines in containers: the agent's host knows the outer one.
            ("/docker/ONE/docker/TWO", "ONE", "docker"),
            ("/docker/ONE/libpod-TWO", "ONE", "docker"),
            ("/docker/ONE/system.slice/docker-TWO.scope", "ONE", "docker"),
            ("/default/one/docker/TWO", "one", "containerd"),
            (&format!("/system.slice/docker-ONE.scope/kubelet.slice/{pod}"), "ONE", "docker"),
            ("/../../docker/ONE", "ONE", "docker"),
        ] {
            let path = path.replace("ONE", ONE).replace("TWO", TWO);
            let of = Called::new(&id.replace("ONE", ONE), engine);
            let both = ["1:name=systemd:PATH\n0::/\n", "9:memory:/\n0::PATH\n", "0::PATH"];
            for text in both.map(|text| text.replace("PATH", &path)) {
                assert_eq!(Called::of_groups(&text).as_ref(), Some(&of), "{text}");
            }
        }
        for path in [
            "/",
            "/system.slice/ssh.service",
            "/machine.slice/libpod-conmon-ONE.scope",
            "/docker",
            "/docker/short",
            "/default",
            "/default/.hidden",
            "/default/a b",
            "/default/a\\012",
            "/x/default/a",
            "/docker-.scope",
            "/docker-ONEx.scope",
            "/docker-ONE.slice",
        ] {
            let path = path.replace("ONE", ONE);
            assert_eq!(Called::of_groups(&format!("0::{path}\n")), None, "{path}");
        }
        let upper = ONE.to_uppercase();
        assert_eq!(Called::of_path(&format!("/docker/{upper}")), None);
        assert_eq!(Called::of_path(&format!("/default/{}", "a".repeat(NAME_MAX + 1))), None);
        assert_eq!(Called::of_groups("no colons\n::\n:\n\n"), None);
    }

    #[test]
    fn a_line_of_the_log_has_the_beginning() {
        assert_eq!(Called::new(ONE, "docker").to_string(), "docker 6d5fe22c86c3");
        assert_eq!(Called::new("one", "containerd").to_string(), "containerd one");
        assert!(Called::new(&"é".repeat(4000), "é").to_string().chars().count() < 250);
    }

    proptest! {
        /// The name in any path is short, and has nothing to be escaped.
        #[test]
        fn no_path_makes_a_name_that_is_none(
            parts in prop::collection::vec(
                prop_oneof![
                    Just(ONE.to_owned()), Just("default".to_owned()), Just("docker".to_owned()),
                    Just(format!("libpod-{ONE}")), "[a-z.-]{0,90}", "[^/\n]{0,300}",
                ],
                0..40,
            ),
        ) {
            let text = format!("0::/{}\n", parts.join("/"));
            if let Some(Called { id, engine }) = Called::of_groups(&text) {
                prop_assert!(is_id(&id) || is_name(&id), "{}", id);
                prop_assert!(text.contains(&id));
                prop_assert!(engine == "unknown" || engine.len() < 12);
            }
        }

        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Called::of_groups(&String::from_utf8_lossy(&bytes));
        }
    }
}
