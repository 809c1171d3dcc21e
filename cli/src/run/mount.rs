//! The tree of files under its own name, for programs that no library reaches: those in Go, and
//! static ones.
//!
//! sysfs takes no new directories. So directories in memory cover /sys/class and /sys/devices. The
//! original contents are mounted again into these, and the tree beside. Only this process and
//! those that it begins see that. All other mounts stay shared with the machine, as they were.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

const NONE: Option<&str> = None;
const HARMLESS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);
/// The directories that are covered.
const COVERED: [&str; 2] = ["sys/class", "sys/devices"];

/// Mounts the tree in this directory. Error: this process has not the right to (`EPERM`:
/// CAP_SYS_ADMIN), or there is no sysfs at /sys. Then it sees all as before.
pub(super) fn over(root: &Path) -> io::Result<()> {
    if is_there(root) {
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    // From now on mounts below /sys are not seen outside.
    mount(NONE, "/sys", NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)?;
    for (at, covered) in COVERED.iter().enumerate() {
        if let Err(error) = cover(root, covered) {
            for covered in &COVERED[..=at] {
                let _ = umount2(&Path::new("/").join(covered), MntFlags::MNT_DETACH);
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Whether /sys has this tree already.
fn is_there(root: &Path) -> bool {
    let class = |root: &Path| {
        // By the system call: a preloaded library may lead this process, too.
        let found = rustix::fs::stat(root.join("sys/class/infiniband")).ok()?;
        Some((found.st_dev, found.st_ino))
    };
    class(root).is_some_and(|tree| class(Path::new("/")) == Some(tree))
}

/// Covers a directory of the machine's with one that has the tree's entries, too.
fn cover(root: &Path, covered: &str) -> io::Result<()> {
    let place = Path::new("/").join(covered);
    let below = File::open(&place)?;
    let below = (format!("/proc/self/fd/{}", below.as_raw_fd()), below);
    let machine: Vec<fs::DirEntry> = fs::read_dir(&place)?.collect::<io::Result<_>>()?;
    let tree = root.join(covered);
    let own: Vec<fs::DirEntry> = fs::read_dir(&tree)?.collect::<io::Result<_>>()?;

    mount(Some("rocinante"), &place, Some("tmpfs"), HARMLESS, Some("mode=755"))?;
    let is_own =
        |entry: &&fs::DirEntry| !own.iter().any(|own| own.file_name() == entry.file_name());
    for entry in machine.iter().filter(is_own) {
        let (name, from) = (entry.file_name(), Path::new(&below.0).join(entry.file_name()));
        if entry.file_type()?.is_symlink() {
            symlink(fs::read_link(&from)?, place.join(name))?;
        } else {
            bind(&from, &place.join(name), entry.file_type()?.is_dir())?;
        }
    }
    for entry in &own {
        let at = place.join(entry.file_name());
        bind(&entry.path(), &at, true)?;
        read_only(&at);
    }
    read_only(&place);
    Ok(())
}

fn bind(from: &Path, to: &Path, is_directory: bool) -> io::Result<()> {
    if is_directory {
        fs::create_dir(to)?;
    } else {
        File::create(to)?;
    }
    Ok(mount(Some(from), to, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE)?)
}

/// As far as it may be: in a user namespace the other flags of a mount may have to be named, too.
fn read_only(at: &Path) {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    let _ = mount(NONE, at, NONE, flags.union(HARMLESS), NONE);
}
