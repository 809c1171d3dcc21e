//! Debian packages of the programs, by cargo-deb. `dist` has built their programs.

use crate::command::{self, is_installed, words};
use crate::{demo, files, machine, setup};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of cargo-deb.
const CARGO_DEB: &str = "3.8.0";
/// Installs the packages `$@` in a copy of this machine, removes and purges them, and prints the
/// files that have been left behind.
const TRY: &str = "set -e
    mount -t tmpfs tmpfs /mnt; cd /mnt; mkdir upper work root
    mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
    mount --rbind /proc root/proc; mount --rbind /dev root/dev; mount -t tmpfs tmpfs root/run; mount -t tmpfs tmpfs root/tmp
    mkdir root/debs; cp \"$@\" root/debs
    there() { chroot root \"$@\" >&2; }
    there sh -c 'dpkg --force-depends --install debs/*'
    there rocinante --version
    there rocinante-agent check /etc/rocinante/agent.toml
    there rocinante run -- true
    there test -f /usr/lib/systemd/system/rocinante-agent.service
    there dpkg --remove rocinante rocinante-agent
    there test -f /etc/rocinante/agent.toml
    there dpkg --purge rocinante rocinante-agent
    rm -r root/debs
    find upper ! -type d -path '*rocinante*'";

/// Packs the files of these targets into packages, each of which is one file in `out`.
pub(crate) fn pack(targets: &[(&str, &str)], out: &Path) -> Result<(), String> {
    let tool = setup::tool("cargo-deb", CARGO_DEB, &demo::target()?)?;
    let stage = out.join("deb");
    for (target, processor) in targets {
        let folder = out.join(processor);
        if !folder.join("libibverbs.so.1").exists() {
            println!("SKIPPED dist: no packages for {processor}, as there are no libraries");
            continue;
        }
        println!("dist: packing for Debian on {processor}");
        command::run(
            Command::new("cp").arg("-rT").arg("--no-dereference").args([&folder, &stage]),
        )?;
        let mut made = Vec::new();
        for package in ["rocinante-cli", "rocinante-agent"] {
            let mut pack = Command::new(&tool);
            pack.args(["--no-build", "--no-strip", "--target", target, "-p", package, "-o"]);
            let file = PathBuf::from(command::read(pack.arg(out))?.trim());
            made.push(fs::canonicalize(&file).map_err(files::said(&file))?);
        }
        fs::remove_dir_all(&stage).map_err(files::said(&stage))?;
        if machine::is_of(processor) {
            come_and_go(&made)?;
        }
    }
    Ok(())
}

fn come_and_go(packages: &[PathBuf]) -> Result<(), String> {
    if !machine::is_root() || !is_installed("dpkg") {
        println!("SKIPPED dist: the packages were not installed: that takes root and dpkg");
        return Ok(());
    }
    let mut shell = words("unshare --mount --propagation private sh -c");
    let left = command::read(shell.args([TRY, "sh"]).args(packages))?;
    if !left.trim().is_empty() {
        return Err(format!("purged packages left {}", left.trim()));
    }
    println!("dist: the packages were installed and removed, and left nothing");
    Ok(())
}
