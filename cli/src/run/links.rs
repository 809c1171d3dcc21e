//! A directory with the library of verbs under the names by which programs open it.
//!
//! Programs that find it with dlopen(3) ask for `libibverbs.so.1`, or for `libibverbs.so`, which a
//! machine has with the headers. The loader takes a file with that name from `LD_LIBRARY_PATH`, and
//! sees that it is the one that is there already.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use super::own;

const NAMES: [&str; 2] = ["libibverbs.so.1", "libibverbs.so"];

/// The library's own directory if it has both names there, else one of links to it. Error: no
/// directory can be written to, or the one for it belongs to another user.
pub fn directory(verbs: &Path) -> io::Result<PathBuf> {
    if let Some(own) = verbs.parent().filter(|own| has_both(own, verbs)) {
        return Ok(own.to_owned());
    }
    own::anywhere(|place| links_in(place, verbs))
}

/// Makes the links, once for each library.
fn links_in(place: &Path, verbs: &Path) -> io::Result<PathBuf> {
    let uid = rustix::process::getuid().as_raw();
    let mut hasher = DefaultHasher::new();
    verbs.hash(&mut hasher);
    let name = format!("rocinante-{uid}-{:016x}", hasher.finish());
    let links = place.join(name);
    // The loader runs the code that it finds there.
    own::directory(&links)?;
    for name in NAMES {
        match symlink(verbs, links.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    if has_both(&links, verbs) { Ok(links) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn has_both(directory: &Path, verbs: &Path) -> bool {
    let Ok(file) = fs::metadata(verbs) else { return false };
    NAMES.iter().all(|name| {
        fs::metadata(directory.join(name))
            .is_ok_and(|other| (other.dev(), other.ino()) == (file.dev(), file.ino()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_has_both_names_in_one_directory() {
        let place = tempfile::TempDir::new().unwrap();
        let place = place.path();
        let verbs = place.join("librocinante_ibverbs.so");
        fs::write(&verbs, "a library").unwrap();
        let links = links_in(place, &verbs).unwrap();
        assert_ne!(links, place);
        for name in NAMES {
            assert_eq!(fs::read(links.join(name)).unwrap(), b"a library");
        }
        assert_eq!(links_in(place, &verbs).unwrap(), links, "again");
        // Where both names are beside each other it takes no other directory.
        assert_eq!(directory(&links.join(NAMES[0])).unwrap(), links);
        // A directory of another user, or a link to another library, is refused.
        fs::remove_file(links.join(NAMES[1])).unwrap();
        fs::write(links.join(NAMES[1]), "another").unwrap();
        assert_eq!(links_in(place, &verbs).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&links, mode).unwrap();
        assert_eq!(links_in(place, &verbs).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
