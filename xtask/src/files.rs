//! Files, with errors that name them.

use std::fs;
use std::io::Error;
use std::path::{Path, PathBuf};

/// Names the file of an error.
pub(crate) fn said(file: impl AsRef<Path>) -> impl FnOnce(Error) -> String {
    move |error| format!("{}: {error}", file.as_ref().display())
}

pub(crate) fn read(file: impl AsRef<Path>) -> Result<String, String> {
    fs::read_to_string(&file).map_err(said(file))
}

/// Writes a file, and makes its folder.
pub(crate) fn write(file: impl AsRef<Path>, text: impl AsRef<[u8]>) -> Result<(), String> {
    let folder = file.as_ref().parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).and_then(|()| fs::write(&file, text)).map_err(said(file))
}

/// Copies a file with its permissions, and makes its new folder.
pub(crate) fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), String> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let folder = to.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| fs::copy(from, to))
        .map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))
        .map(drop)
}

/// An empty folder for temporary files of this process, which the caller removes.
pub(crate) fn scratch(name: &str) -> Result<PathBuf, String> {
    let folder = std::env::temp_dir().join(format!("rocinante-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).map(|()| folder.clone()).map_err(said(folder))
}
