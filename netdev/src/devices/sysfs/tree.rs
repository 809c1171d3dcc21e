//! Writes the tree of files.

use std::collections::HashSet;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use super::counts::Counts;
use super::files::make;
use super::nodes::{self, Facts, Node};
use crate::devices::names::NamedInterface;

/// The file with the tree's facts, by which a process knows that there is nothing to write.
const STATE: &str = "state";
/// The directories with the tree.
const TOPS: [&str; 2] = ["sys", "dev"];

/// The mode of files, as in sysfs.
const MODE: u32 = 0o444;

/// Makes the tree of these devices, from the one that is there.
pub(super) fn show(root: &Path, devices: &[NamedInterface]) -> io::Result<()> {
    let facts: Vec<Facts<'_>> = devices.iter().map(Facts::of).collect();
    let state = serde_json::to_vec(&facts).map_err(io::Error::other)?;
    if fs::read(root.join(STATE)).is_ok_and(|known| known == state) {
        return Ok(());
    }
    // A process that is interrupted here leaves a tree that the next one writes again.
    let _ = fs::remove_file(root.join(STATE));
    let mut wanted = nodes::common();
    facts.iter().for_each(|facts| facts.add(&mut wanted));
    // A link has a target at each moment: it comes after its target and goes before it
    // (/sys/devices is behind /sys/class), and leads to a new one before the old one goes.
    for (path, node) in wanted.iter().rev() {
        let whole = root.join(path);
        match node {
            Node::Directory => make(&whole)?,
            Node::Text(text) => write(root, path, text)?,
            Node::Count if whole.exists() => {}
            Node::Count => write(root, path, "0")?,
            Node::Link(target) => link(root, path, target)?,
        }
    }
    let kept: HashSet<&Path> = wanted.keys().flat_map(|path| path.ancestors()).collect();
    TOPS.iter().for_each(|top| sweep(root, Path::new(top), &kept));
    replace(root, Path::new(STATE), &state)
}

/// The directories of a device's counters.
pub(super) fn counters_of(device: &NamedInterface) -> [PathBuf; 2] {
    ["counters", "hw_counters"].map(|name| nodes::port_of(device).join(name))
}

/// Writes the counters of a device that have changed.
pub(super) fn count(root: &Path, device: &NamedInterface, counts: &Counts) -> io::Result<()> {
    let port = nodes::port_of(device);
    for (name, value) in counts {
        let path = port.join(name);
        if root.join(&path).exists() {
            write(root, &path, &value.to_string())?;
        }
    }
    Ok(())
}

/// Removes all else than `kept` below a directory.
fn sweep(root: &Path, directory: &Path, kept: &HashSet<&Path>) {
    let mut entries: Vec<fs::DirEntry> =
        fs::read_dir(root.join(directory)).into_iter().flatten().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = directory.join(entry.file_name());
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory {
            sweep(root, &path, kept);
        }
        if !kept.contains(&*path) {
            let remove = if is_directory { fs::remove_dir } else { fs::remove_file };
            let _ = remove(&entry.path());
        }
    }
}

/// Gives a file this line, unless it has it. It stays the same file, so a program that has it open
/// reads the line, too.
fn write(root: &Path, path: &Path, text: &str) -> io::Result<()> {
    let line = format!("{text}\n");
    let whole = root.join(path);
    match fs::read(&whole) {
        Ok(known) if known == line.as_bytes() => Ok(()),
        Ok(known) => {
            let mode = |mode| fs::set_permissions(&whole, Permissions::from_mode(mode));
            mode(0o644)?;
            let opened = OpenOptions::new().write(true).open(&whole);
            mode(MODE)?;
            let mut file = opened?;
            file.write_all(line.as_bytes())?;
            if line.len() < known.len() {
                file.set_len(line.len() as u64)?;
            }
            Ok(())
        }
        Err(_) => replace(root, path, line.as_bytes()),
    }
}

/// Gives a file these bytes, at once. It is another file then.
pub(super) fn replace(root: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    appear(root, path, |draft| {
        fs::write(draft, bytes)?;
        fs::set_permissions(draft, Permissions::from_mode(MODE))
    })
}

fn link(root: &Path, path: &Path, target: &str) -> io::Result<()> {
    if fs::read_link(root.join(path)).is_ok_and(|known| known == Path::new(target)) {
        return Ok(());
    }
    appear(root, path, |draft| symlink(target, draft))
}

/// Has a file appear whole: `begin` makes it elsewhere.
fn appear(root: &Path, path: &Path, begin: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let draft: PathBuf = root.join(format!(".{}", std::process::id()));
    let whole = root.join(path);
    let _ = fs::remove_file(&draft);
    make(whole.parent().unwrap_or(root))?;
    begin(&draft)?;
    fs::rename(&draft, &whole).inspect_err(|_| drop(fs::remove_file(&draft)))
}
