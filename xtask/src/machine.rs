//! Rights and resources on this machine.

use crate::command::{self, words};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// The most that `cargo xtask test` writes below an empty target directory.
const WHOLE_RUN: &str = "7 GB";

/// Whether this process is root outside any user namespace: then it may install packages.
pub(crate) fn is_root() -> bool {
    // proc(5): the files belong to the effective user.
    ids_are_the_machines() && std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Whether this process has all rights that tests need: root in a container often does not.
pub(crate) fn has_all_rights() -> bool {
    // capabilities(7): CAP_NET_ADMIN is 12, CAP_SYS_ADMIN 21.
    let needed = 1 << 12 | 1 << 21;
    ids_are_the_machines() && effective_capabilities(&own("status")) & needed == needed
}

/// A command prefix that makes an ordinary user root of a user namespace, if possible.
pub(crate) fn user_namespace() -> Option<&'static str> {
    command::read(&mut words("unshare --user --map-root-user --net true")).ok()?;
    Some("unshare --user --map-root-user")
}

/// The target triple of this machine.
pub(crate) fn triple() -> Result<String, String> {
    let version = command::read(&mut words("rustc -vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "rustc -vV names no host".into())
}

/// Whether programs for `processor` run here.
pub(crate) fn is_of(processor: &str) -> bool {
    triple().is_ok_and(|triple| triple.starts_with(processor))
}

/// The free space on the disk of `target`, in words. A full disk shows as failures of the programs
/// that compile then.
pub(crate) fn room(target: &Path) -> String {
    let existing = target.ancestors().find(|dir| dir.is_dir()).unwrap_or(target);
    let free = command::read(words("df --output=avail -h").arg(existing)).unwrap_or_default();
    let free = free.lines().last().unwrap_or("?").trim();
    format!(
        "disk: {free} free for {}; all of it together takes up to {WHOLE_RUN}, in CARGO_TARGET_DIR if \
         that is set",
        target.display()
    )
}

fn own(file: &str) -> String {
    std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default()
}

fn ids_are_the_machines() -> bool {
    own("uid_map").split_whitespace().eq(["0", "0", "4294967295"])
}

/// The effective set in a `status` file of proc(5).
fn effective_capabilities(status: &str) -> u64 {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or_default();
    u64::from_str_radix(hex.trim(), 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{effective_capabilities, room};
    use std::path::Path;

    #[test]
    fn the_room_is_that_of_a_folder_that_will_be_there() {
        let words = room(Path::new("/not/there/yet"));
        assert!(words.contains(" free for /not/there/yet; ") && !words.contains('?'), "{words}");
    }

    #[test]
    fn capabilities_are_read_from_status() {
        assert_eq!(effective_capabilities("Name:\tx\nCapEff:\t0000000000201000\n"), 0x20_1000);
        assert_eq!(effective_capabilities("Name:\tx\n"), 0);
    }
}
