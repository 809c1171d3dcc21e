//! A root file system of Debian for another processor, with which libraries for it are linked and
//! in which they are tried. apt downloads its packages with a private view of the machine's
//! sources, and nothing is installed.

use crate::command::{self, is_installed, words};
use crate::files::said;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its packages: glibc with its part that is linked statically, the unwinder of Rust's panics, and
/// programs with all that they need.
const PACKAGES: [&str; 5] = ["libc6-dev", "libgcc-s1", "ibverbs-utils", "perftest", "rdmacm-utils"];
/// Of [`PACKAGES`]: a program that lists devices.
const PROGRAM: &str = "usr/bin/ibv_devices";
/// A program of each other package.
const MORE: [&str; 2] = ["usr/bin/ib_write_bw", "usr/bin/rping"];
/// The libraries that a linker does not find there by their names: the link of one leads out of the
/// root, and the other has none.
const LINKED: [(&str, &str); 2] = [("libm.so", "libm.so.6"), ("libgcc_s.so", "libgcc_s.so.1")];

/// Debian's name of a processor.
pub(crate) fn debian(processor: &str) -> Option<&'static str> {
    match processor {
        "aarch64" => Some("arm64"),
        "x86_64" => Some("amd64"),
        _ => None,
    }
}

/// The root file system.
pub(crate) struct Root {
    pub(crate) path: PathBuf,
    /// The folder in it with the names that a linker looks for.
    links: PathBuf,
}

impl Root {
    /// The one for `processor` below `target`, made if it is not there.
    pub(crate) fn of(processor: &str, target: &Path) -> Result<Self, String> {
        let architecture = debian(processor).ok_or(format!("Debian has no {processor}"))?;
        let folder = target.join("foreign").join(architecture);
        let root = Self::in_folder(&folder, processor);
        let mut programs = [PROGRAM].into_iter().chain(MORE);
        if !root.is_linked() || !programs.all(|program| root.path.join(program).exists()) {
            // An incomplete root is made anew.
            let _ = fs::remove_dir_all(&folder);
            println!("set-up: Debian's libraries for {processor} into {}", folder.display());
            unpack(architecture, &folder.join("apt"), &root.path)?;
            let _ = fs::remove_dir_all(folder.join("apt"));
            root.link().map_err(said(&folder))?;
        }
        Ok(root)
    }

    fn in_folder(folder: &Path, processor: &str) -> Self {
        let path = folder.join("root");
        Self { links: path.join(format!("usr/lib/{processor}-linux-gnu")), path }
    }

    fn is_linked(&self) -> bool {
        LINKED.iter().all(|(name, _)| self.links.join(name).exists())
    }

    fn link(&self) -> std::io::Result<()> {
        // Where packages have it before the merge of /lib with /usr/lib.
        let other = self.path.join("lib").join(self.links.file_name().unwrap_or_default());
        for (name, file) in LINKED {
            let mut places = [&self.links, &other].into_iter().map(|folder| folder.join(file));
            let found = places.find(|path| path.exists());
            let found = found.ok_or_else(|| std::io::Error::other(format!("no {file}")))?;
            let _ = fs::remove_file(self.links.join(name));
            symlink(found, self.links.join(name))?;
        }
        Ok(())
    }

    /// Options of cargo that link with it, by rustc's own linker.
    pub(crate) fn linking(&self, target: &str) -> [String; 4] {
        // A name that is nowhere is an error here, and not where the library is loaded.
        let flags = [
            format!("-Lnative={}", self.links.display()),
            format!("-Clink-arg=--sysroot={}", self.path.display()),
            "-Clink-arg=-zdefs".into(),
        ];
        [
            "--config".into(),
            format!("target.{target}.linker=\"rust-lld\""),
            "--config".into(),
            format!("target.{target}.rustflags={flags:?}"),
        ]
    }

    /// Runs Debian's `ibv_devices` on these libraries, by an emulator of the processor, and returns
    /// its output. The libraries are preloaded, as `rocinante run` does it.
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
    fn links_lead_to_what_the_packages_have() {
        let folder = crate::files::scratch("links").unwrap();
        let root = Root::in_folder(&folder, "x");
        let add = |file: &str| crate::files::write(root.path.join(file), file).unwrap();
        add("lib/x-linux-gnu/libm.so.6");
        fs::create_dir_all(&root.links).unwrap();
        symlink("/lib/x-linux-gnu/libm.so.6", root.links.join("libm.so")).unwrap();
        let error = root.link().unwrap_err().to_string();
        assert!(error.contains("libgcc_s.so.1") && !root.is_linked(), "{error}");
        add("usr/lib/x-linux-gnu/libgcc_s.so.1");
        root.link().unwrap();
        let read = |name: &str| fs::read_to_string(root.links.join(name)).unwrap();
        assert_eq!(read("libgcc_s.so"), "usr/lib/x-linux-gnu/libgcc_s.so.1");
        assert_eq!(read("libm.so"), "lib/x-linux-gnu/libm.so.6");
        assert!(root.is_linked());
        fs::remove_dir_all(folder).unwrap();
    }
}
