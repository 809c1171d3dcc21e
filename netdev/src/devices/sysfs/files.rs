//! The directory of the tree: its lock, and its owner.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::kernel::inherited::noted;
use crate::tuning::sysfs::WRITE_PATIENCE;

/// Waits until no other process writes, for a while. Makes the directory if it is gone, and refuses
/// one that another user could change.
pub(super) fn hold(root: &Path) -> io::Result<File> {
    own(root.parent().unwrap_or(root))?;
    let open = |_| File::open(root);
    let directory = File::open(root).or_else(|_| make(root).and_then(|()| open(())))?;
    // A child that another thread forks meanwhile would hold it, too.
    let directory = File::from(noted(directory.into()));
    own(root)?;
    let end = Instant::now() + WRITE_PATIENCE;
    loop {
        match directory.try_lock() {
            Ok(()) => return Ok(directory),
            Err(TryLockError::WouldBlock) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Checks that a directory is this user's own.
pub(super) fn own(directory: &Path) -> io::Result<()> {
    let is_own = fs::metadata(directory)?.uid() == rustix::process::geteuid().as_raw();
    if is_own { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Makes a directory that others may read: a program may become another user.
pub(super) fn make(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::inherited::tests::beside_a_child;

    /// Else others would wait for as long as the child lives.
    #[test]
    fn a_child_of_fork_does_not_go_on_to_hold_it() {
        let place = tempfile::TempDir::new().unwrap();
        let root = place.path().join("root");
        let held = hold(&root).unwrap();
        beside_a_child(|| {
            drop(held);
            let begin = Instant::now();
            drop(hold(&root).expect("it is free"));
            assert!(begin.elapsed() < WRITE_PATIENCE);
        });
    }
}
