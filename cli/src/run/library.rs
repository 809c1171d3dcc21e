//! The libraries that a program is given: their places, and the variables with which the loader
//! takes them.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::links;

/// The file name of the library of verbs where it is installed: that of rdma-core's.
const VERBS: &str = "libibverbs.so.1";
/// The same as cargo builds it.
const VERBS_BUILT: &str = "librocinante_ibverbs.so";
/// The library that answers reads below /sys/class/infiniband and /dev/infiniband.
const PATHS: &str = "librocinante_paths.so";

const PRELOAD: &str = "LD_PRELOAD";
const SEARCH: &str = "LD_LIBRARY_PATH";
/// Variables of sanitizers, with the option that each needs and its value. AddressSanitizer refuses
/// to be behind a preloaded library. ThreadSanitizer sees the library's calls of libc, and neither
/// its other accesses to memory nor its locks: so all of them look like races.
const SANITIZERS: [(&str, &str, &str); 2] = [
    ("ASAN_OPTIONS", "verify_asan_link_order", "0"),
    ("TSAN_OPTIONS", "ignore_noninstrumented_modules", "1"),
];

/// The libraries of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libraries {
    /// libibverbs.so.1.
    pub verbs: PathBuf,
    /// The library of paths, if it is there.
    pub paths: Option<PathBuf>,
}

impl Libraries {
    /// Those that belong to this executable: beside it, or in `../lib/rocinante`. Error: there are
    /// none, or their path cannot stand in the loader's variables.
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

    /// The variables of ld.so(8) with these libraries. `LD_PRELOAD` also beats copies that a
    /// program brings along under other names; `LD_LIBRARY_PATH` reaches the children of a program
    /// that drops it, and leads those that ask for the library by [a name](links).
    ///
    /// The caller's own preloaded libraries come first: they may interpose on verbs. Programs with
    /// sanitizers get the options that they need, unless they are given.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut preload = others(&env::var_os(PRELOAD).unwrap_or_default());
        let files = [Some(&self.verbs), self.paths.as_ref()];
        preload.extend(files.into_iter().flatten().map(|file| file.as_os_str().to_owned()));
        let mut variables = vec![(PRELOAD, preload.join(OsStr::new(":")))];
        let links = links::directory(&self.verbs).ok();
        // Where no link can be made, one of the names is better than none.
        let own = self.verbs.parent().filter(|_| self.verbs.file_name() == Some(VERBS.as_ref()));
        if let Some(directory) = links.or_else(|| own.map(Path::to_owned)) {
            variables.push((SEARCH, joined(Some(directory.into()), env::var_os(SEARCH))));
        }
        for (variable, name, value) in SANITIZERS {
            let given = env::var_os(variable);
            if given.as_ref().is_none_or(|given| !given.to_string_lossy().contains(name)) {
                variables.push((variable, joined(given, Some(format!("{name}={value}").into()))));
            }
        }
        variables
    }
}

/// The words of `LD_PRELOAD`, without libraries such as these: those of a `rocinante run` outside
/// of this one.
fn others(preload: &OsStr) -> Vec<OsString> {
    let ours = [VERBS, VERBS_BUILT, PATHS].map(|name| Some(OsStr::new(name)));
    let words = preload.as_bytes().split(|byte| b": ".contains(byte));
    let words = words.filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    words.filter(|word| !ours.contains(&Path::new(word).file_name())).map(OsStr::to_owned).collect()
}

/// Those that there are, separated by a colon.
fn joined(first: Option<OsString>, second: Option<OsString>) -> OsString {
    let both = [first, second].into_iter().flatten().filter(|value| !value.is_empty());
    both.collect::<Vec<_>>().join(OsStr::new(":"))
}

/// The path with its directory resolved; the file keeps its name, which may be that of a link.
fn resolved(file: &Path) -> Option<PathBuf> {
    Some(file.parent()?.canonicalize().ok()?.join(file.file_name()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    /// A directory of its own, removed at the end.
    struct Scratch(TempDir);

    impl Scratch {
        fn new() -> Self {
            Self(TempDir::new().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().canonicalize().unwrap()
        }

        fn file(&self, path: &str) -> PathBuf {
            let path = self.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        }
    }

    #[test]
    fn libraries_lie_beside_the_program_or_in_lib() {
        let scratch = Scratch::new();
        let bin = scratch.path().join("bin");
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
        let scratch = Scratch(tempfile::Builder::new().prefix("with space").tempdir().unwrap());
        scratch.file("libibverbs.so.1");
        let error = Libraries::beside(&scratch.path()).unwrap_err();
        assert!(error.contains("no path with a space"), "{error}");
    }

    #[test]
    fn both_variables_name_the_library() {
        let scratch = Scratch::new();
        let verbs = scratch.file("lib/libibverbs.so.1");
        std::os::unix::fs::symlink(&verbs, scratch.path().join("lib/libibverbs.so")).unwrap();
        let paths = scratch.file("lib/p.so");
        let libraries = Libraries { verbs: verbs.clone(), paths: Some(paths.clone()) };
        let variables = libraries.environment();
        let [(preload, files), (search, directory), ..] = &variables[..] else { panic!() };
        assert_eq!((*preload, *search), ("LD_PRELOAD", "LD_LIBRARY_PATH"));
        let both = format!("{}:{}", verbs.display(), paths.display());
        assert!(files.to_str().unwrap().ends_with(&both), "{}", files.display());
        let own = scratch.path().join("lib").display().to_string();
        assert!(directory.to_str().unwrap().starts_with(&own), "{}", directory.display());
        for (variable, name, value) in SANITIZERS {
            let (_, options) = variables.iter().find(|(it, _)| *it == variable).unwrap();
            assert!(options.to_str().unwrap().ends_with(&format!("{name}={value}")));
        }
    }

    #[test]
    fn what_the_caller_preloads_stays_but_for_other_copies_of_ours() {
        let preload =
            "libasan.so.8:/opt/1/libibverbs.so.1 /opt/1/librocinante_paths.so::libtrace.so";
        assert_eq!(others(OsStr::new(preload)), ["libasan.so.8", "libtrace.so"]);
        assert!(others(OsStr::new("/x/librocinante_ibverbs.so")).is_empty());
    }
}
