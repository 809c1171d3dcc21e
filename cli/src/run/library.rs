//! The libraries that a program is given: where they lie, and what makes the loader take them.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// The file name of the library of verbs where it is installed: that of rdma-core's.
const VERBS: &str = "libibverbs.so.1";
/// The same as cargo builds it.
const VERBS_BUILT: &str = "librocinante_ibverbs.so";
/// The library that answers what programs read below /sys/class/infiniband and /dev/infiniband.
const PATHS: &str = "librocinante_paths.so";

const PRELOAD: &str = "LD_PRELOAD";
const SEARCH: &str = "LD_LIBRARY_PATH";

/// The libraries of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libraries {
    /// libibverbs.so.1.
    pub verbs: PathBuf,
    /// The library of paths, if it is there.
    pub paths: Option<PathBuf>,
}

impl Libraries {
    /// Those that belong to this executable: beside it, or in `../lib/rocinante`.
    ///
    /// # Errors
    /// There are none, or no loader could be told of them.
    pub fn find() -> Result<Self, String> {
        let own = env::current_exe().map_err(|error| format!("/proc/self/exe: {error}"))?;
        Self::beside(own.parent().unwrap_or(Path::new("/")))
    }

    /// Those that belong to an executable in `directory`.
    fn beside(directory: &Path) -> Result<Self, String> {
        let places = [directory.to_owned(), directory.join("../lib/rocinante")];
        let found = |names: &[&str]| {
            let files = places.iter().flat_map(|place| names.iter().map(|name| place.join(name)));
            // Without `..`: a program may show its environment.
            files.filter_map(|file| resolved(&file)).find(|file| file.is_file())
        };
        let verbs = found(&[VERBS, VERBS_BUILT]).ok_or_else(|| {
            format!(
                "no {VERBS} in {0} or {0}/../lib/rocinante: install Rocinante's there, or in its \
                 source tree build it with `cargo build --release -p rocinante-capi`",
                directory.display()
            )
        })?;
        // ld.so(8): the list is separated by colons or spaces, and nothing escapes them.
        if verbs.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte)) {
            return Err(format!(
                "{PRELOAD} can name no path with a space or a colon in it: move {}",
                verbs.display()
            ));
        }
        Ok(Self { verbs, paths: found(&[PATHS]) })
    }

    /// The variables of ld.so(8) with these libraries before those that are there. `LD_PRELOAD`
    /// also beats copies that a program brings along under other names; `LD_LIBRARY_PATH` reaches
    /// the children of a program that drops it.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let files = [Some(&self.verbs), self.paths.as_ref()];
        let preload = files.into_iter().flatten().map(|file| file.as_os_str().to_owned());
        let mut variables = vec![(PRELOAD, before(preload.collect(), PRELOAD))];
        if self.verbs.file_name() == Some(OsStr::new(VERBS))
            && let Some(directory) = self.verbs.parent()
        {
            variables.push((SEARCH, before(vec![directory.into()], SEARCH)));
        }
        variables
    }
}

/// `words` before the value of a variable that this process has.
fn before(mut words: Vec<OsString>, variable: &str) -> OsString {
    words.extend(env::var_os(variable).filter(|value| !value.is_empty()));
    words.join(OsStr::new(":"))
}

/// The path with its directory resolved; the file keeps its name, which may be that of a link.
fn resolved(file: &Path) -> Option<PathBuf> {
    Some(file.parent()?.canonicalize().ok()?.join(file.file_name()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A directory of its own, removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let own = format!("rocinante-run-{name}-{}", std::process::id());
            let directory = env::temp_dir().join(own);
            fs::create_dir_all(&directory).unwrap();
            Self(directory.canonicalize().unwrap())
        }

        fn file(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn libraries_lie_beside_the_program_or_in_lib() {
        let scratch = Scratch::new("libraries");
        let bin = scratch.0.join("bin");
        fs::create_dir(&bin).unwrap();
        let error = Libraries::beside(&bin).unwrap_err();
        assert!(error.contains("no libibverbs.so.1 in"), "{error}");
        let built = scratch.file("bin/librocinante_ibverbs.so");
        assert_eq!(Libraries::beside(&bin), Ok(Libraries { verbs: built.clone(), paths: None }));
        fs::remove_file(built).unwrap();
        let verbs = scratch.file("lib/rocinante/libibverbs.so.1");
        let paths = Some(scratch.file("lib/rocinante/librocinante_paths.so"));
        assert_eq!(Libraries::beside(&bin), Ok(Libraries { verbs, paths }));
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        let scratch = Scratch::new("with space");
        scratch.file("libibverbs.so.1");
        let error = Libraries::beside(&scratch.0).unwrap_err();
        assert!(error.contains("no path with a space"), "{error}");
    }

    #[test]
    fn both_variables_name_the_library() {
        let verbs = PathBuf::from("/opt/lib/libibverbs.so.1");
        let libraries = Libraries { verbs, paths: Some("/opt/lib/p.so".into()) };
        let [(preload, files), (search, directory)] = &libraries.environment()[..] else {
            panic!("two variables");
        };
        assert_eq!((*preload, *search), ("LD_PRELOAD", "LD_LIBRARY_PATH"));
        assert!(files.to_str().unwrap().starts_with("/opt/lib/libibverbs.so.1:/opt/lib/p.so"));
        assert!(directory.to_str().unwrap().starts_with("/opt/lib"));
    }
}
