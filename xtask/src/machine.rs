//! What this machine lets us do.

use crate::command;
use std::process::Command;

/// Whether this process has root's own rights, and not only those of a user namespace.
pub(crate) fn is_root() -> bool {
    let own =
        |file: &str| std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let everyone = own("uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    everyone && effective_uid(&own("status")) == Some(0)
}

/// A command prefix that makes an ordinary user root of a user namespace, where that is possible.
pub(crate) fn user_namespace() -> Option<&'static str> {
    let probe = ["--user", "--map-root-user", "--net", "true"];
    command::read(Command::new("unshare").args(probe)).ok()?;
    Some("unshare --user --map-root-user")
}

/// The target triple of this machine.
pub(crate) fn triple() -> Result<String, String> {
    let version = command::read(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "rustc -vV names no host".into())
}

/// The second of the four ids in a `status` file of proc(5).
fn effective_uid(status: &str) -> Option<u32> {
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    ids.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::effective_uid;

    #[test]
    fn the_effective_uid_counts() {
        assert_eq!(effective_uid("Name:\tx\nUid:\t1000\t0\t0\t0\n"), Some(0));
        assert_eq!(effective_uid("Name:\tx\n"), None);
    }
}
