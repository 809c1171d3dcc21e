//! Directories for what a run leaves to its programs.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Calls `make` with the user's directory for such files, and with that of temporary files if the
/// first fails or there is none. Error: what `make` says of the second.
pub(super) fn anywhere(make: impl Fn(&Path) -> io::Result<PathBuf>) -> io::Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").ok_or(io::ErrorKind::NotFound.into());
    // It may be that of the user that this process was before.
    runtime
        .and_then(|place| make(Path::new(&place)))
        .or_else(|_: io::Error| make(&std::env::temp_dir()))
}

/// Makes a directory that only this user writes, or finds it made. Error: it cannot be made;
/// `PermissionDenied` if there is something else than a directory, another user's, or one that
/// others can write.
pub(super) fn directory(path: &Path) -> io::Result<()> {
    directory_of(path, rustix::process::getuid().as_raw())
}

fn directory_of(path: &Path, uid: u32) -> io::Result<()> {
    // Others may read it: a program may become another user.
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != uid || found.mode() & 0o022 != 0 {
        let why = format!("{} is not this user's own", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn only_a_directory_that_no_other_user_writes_is_the_own() {
        let folder = tempfile::TempDir::new().unwrap();
        let place = folder.path().join("own");
        let uid = rustix::process::getuid().as_raw();
        directory(&place).unwrap();
        directory(&place).expect("it is there");
        let kind = |path: &Path, uid| directory_of(path, uid).unwrap_err().kind();
        assert_eq!(kind(&place, uid + 1), io::ErrorKind::PermissionDenied);
        let [link, file] = ["link", "file"].map(|name| place.join(name));
        symlink(&place, &link).unwrap();
        fs::write(&file, "").unwrap();
        for other in [&link, &file] {
            assert_eq!(kind(other, uid), io::ErrorKind::PermissionDenied, "{other:?}");
        }
        assert_eq!(kind(&place.join("no/such"), uid), io::ErrorKind::NotFound);
        for mode in [0o775, 0o757] {
            fs::set_permissions(&place, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(kind(&place, uid), io::ErrorKind::PermissionDenied, "{mode:o}");
        }
    }
}
