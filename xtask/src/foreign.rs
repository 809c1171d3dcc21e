//! A root file system of Debian for another processor, with which libraries for it are linked and
//! in which they are tried. apt downloads its packages with a private view of the machine's
//! sources, and nothing is installed.

use crate::command::{self, is_installed, words};
use crate::files::said;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its packages: glibc with its part that is linked statically, the unwinder of Rust's panics, and
/// programs with all that they need.
const PACKAGES: [&str; 5] = ["libc6-dev", "libgcc-s1", "ibverbs-utils", "perftest", "rdmacm-utils"];
/// Of [`PACKAGES`]: a program that lists devices.
const PROGRAM: &str = "usr/bin/ibv_devices";
/// A program of each other package.
const MORE: [&str; 2] = ["usr/bin/ib_write_bw", "usr/bin/rping"];
/// The libraries that Rust's library asks a linker for, and the files that have them. From glibc
/// 2.34 on `libc.so.6` has all of the C library's parts, but for functions such as
/// pthread_atfork(3), which each library has for itself.
const LINKED: [(&str, &[&str]); 7] = [
    ("libc.so", &["libc.so.6", "libc_nonshared.a"]),
    ("libdl.so", &["libc.so.6"]),
    ("libgcc_s.so", &["libgcc_s.so.1"]),
    ("libm.so", &["libm.so.6"]),
    ("libpthread.so", &["libc.so.6"]),
    ("librt.so", &["libc.so.6"]),
    ("libutil.so", &["libc.so.6"]),
];

/// Debian's name of a processor.
fn debian(processor: &str) -> Option<&'static str> {
    match processor {
        "aarch64" => Some("arm64"),
        "x86_64" => Some("amd64"),
        _ => None,
    }
}

/// The root file system.
pub(crate) struct Root {
    pub(crate) path: PathBuf,
    /// Scripts with the names that a linker looks for.
    links: PathBuf,
}

impl Root {
    /// The one for `processor` below `target`, made if it is not there.
    ///
    /// # Errors
    /// The machine has no apt, or no network.
    pub(crate) fn of(processor: &str, target: &Path) -> Result<Self, String> {
        let architecture = debian(processor).ok_or(format!("Debian has no {processor}"))?;
        let folder = target.join("foreign").join(architecture);
        let root = Self { path: folder.join("root"), links: folder.join("links") };
        let complete = LINKED.iter().all(|(name, _)| root.links.join(name).exists());
        let mut programs = [PROGRAM].into_iter().chain(MORE);
        if !complete || !programs.all(|program| root.path.join(program).exists()) {
            // An incomplete root is made anew.
            let _ = fs::remove_dir_all(&folder);
            println!("set-up: Debian's libraries for {processor} into {}", folder.display());
            unpack(architecture, &folder.join("apt"), &root.path)?;
            let _ = fs::remove_dir_all(folder.join("apt"));
            root.link(processor).map_err(said(&folder))?;
        }
        Ok(root)
    }

    /// Writes the scripts. They are there as soon as all are.
    fn link(&self, processor: &str) -> std::io::Result<()> {
        let new = self.links.with_extension("new");
        fs::create_dir_all(&new)?;
        let below = format!("{processor}-linux-gnu");
        let folders = ["usr/lib", "lib"].map(|lib| self.path.join(lib).join(&below));
        for (name, files) in LINKED {
            let mut script = String::from("GROUP (");
            for file in files {
                let mut paths = folders.iter().map(|folder| folder.join(file));
                let found = paths.find(|path| path.exists());
                let found = found.ok_or_else(|| std::io::Error::other(format!("no {file}")))?;
                script += &format!(" \"{}\"", found.display());
            }
            fs::write(new.join(name), script + " )\n")?;
        }
        fs::rename(new, &self.links)
    }

    /// Options of cargo that link with it, by rustc's own linker.
    pub(crate) fn linking(&self, target: &str) -> [String; 4] {
        let links = format!("-Lnative={}", self.links.display());
        [
            "--config".into(),
            format!("target.{target}.linker=\"rust-lld\""),
            "--config".into(),
            // A name that is nowhere is an error here, and not where the library is loaded.
            format!("target.{target}.rustflags=[{links:?}, \"-Clink-arg=-zdefs\"]"),
        ]
    }

    /// Runs Debian's `ibv_devices` on these libraries, by an emulator of the processor, and returns
    /// its output. The libraries are preloaded, as `rocinante run` does it.
    ///
    /// # Errors
    /// It fails.
    pub(crate) fn list_devices(
        &self,
        emulator: &str,
        libraries: &[PathBuf],
    ) -> Result<String, String> {
        let libraries: Vec<String> =
            libraries.iter().map(|path| path.display().to_string()).collect();
        let mut command = Command::new(emulator);
        command.arg("-L").arg(&self.path).arg("-E");
        command.arg(format!("LD_PRELOAD={}", libraries.join(":")));
        command::read(command.arg(self.path.join(PROGRAM)))
    }
}

/// Downloads [`PACKAGES`] with their dependencies, and unpacks them into `root`.
fn unpack(architecture: &str, apt: &Path, root: &Path) -> Result<(), String> {
    for program in ["apt-get", "dpkg-deb"] {
        if !is_installed(program) {
            return Err(format!("{program} is not installed: only Debian and its kin have it"));
        }
    }
    let archives = apt.join("cache/archives");
    for part in [&apt.join("lists/partial"), &archives.join("partial"), root] {
        fs::create_dir_all(part).map_err(said(part))?;
    }
    // Nothing counts as installed.
    let status = apt.join("status");
    fs::write(&status, "").map_err(said(&status))?;
    let get = |args: &[&str]| {
        // Nothing of the machine is changed, so neither its locks nor another user are needed.
        let mut apt_get = words("apt-get -qq -oDebug::NoLocking=1 -oAPT::Sandbox::User=");
        for (option, path) in [
            ("State::lists", "lists"),
            ("State::status", "status"),
            ("State::extended_states", "extended"),
            ("Cache", "cache"),
        ] {
            apt_get.arg(format!("-oDir::{option}={}", apt.join(path).display()));
        }
        for option in ["Architecture", "Architectures"] {
            apt_get.arg(format!("-oAPT::{option}={architecture}"));
        }
        apt_get.arg("-oAcquire::Retries=3").args(args);
        command::read(apt_get.env("DEBIAN_FRONTEND", "noninteractive"))
    };
    get(&["update"])?;
    let install = ["install", "-y", "--no-install-recommends", "--download-only"];
    get(&[&install, &PACKAGES[..]].concat())?;
    let files = fs::read_dir(&archives).map_err(said(&archives))?;
    for file in files.flatten().map(|entry| entry.path()) {
        if file.extension().is_some_and(|extension| extension == "deb") {
            command::run(words("dpkg-deb -x").arg(file).arg(root))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_made_of_what_the_packages_have_and_all_or_none() {
        let folder = std::env::temp_dir().join(format!("rocinante-links-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let root = Root { path: folder.join("root"), links: folder.join("links") };
        // Files of packages before and after the merge of /lib with /usr/lib.
        let files = ["libc.so.6", "libc_nonshared.a", "libgcc_s.so.1"];
        let places = ["lib/x-linux-gnu", "usr/lib/x-linux-gnu", "usr/lib/x-linux-gnu"];
        let files = [0, 1, 2].map(|at| format!("{}/{}", places[at], files[at]));
        for file in &files {
            fs::create_dir_all(root.path.join(file).parent().unwrap()).unwrap();
            fs::write(root.path.join(file), file).unwrap();
        }
        let error = root.link("x").unwrap_err().to_string();
        assert!(error.contains("libm.so.6") && !root.links.exists(), "{error}");
        fs::remove_dir_all(root.links.with_extension("new")).unwrap();
        fs::write(root.path.join("lib/x-linux-gnu/libm.so.6"), "").unwrap();
        root.link("x").unwrap();
        let [c, shared, gcc] = files.map(|file| format!("\"{}\"", root.path.join(file).display()));
        let [all, dl, unwinder] = ["libc.so", "libdl.so", "libgcc_s.so"]
            .map(|name| fs::read_to_string(root.links.join(name)).unwrap());
        assert_eq!(
            [all, dl, unwinder],
            [format!("{c} {shared}"), c, gcc].map(|files| format!("GROUP ( {files} )\n"))
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
