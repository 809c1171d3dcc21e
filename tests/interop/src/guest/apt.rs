//! Debian packages, downloaded and unpacked without installing them. A private view of apt is made
//! of the machine's own sources, so packages installed here hide no dependency of the guest.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::tool::Tool;
use crate::error::{Error, Result};

/// A private view of apt.
#[derive(Debug)]
pub(crate) struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Makes the view below `dir`, and reads the package lists from the network. Error: no apt, no
    /// sources, no network.
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        for part in ["lists/partial", "cache/archives/partial", "sources"] {
            fs::create_dir_all(dir.join(part))?;
        }
        fs::write(dir.join("status"), "")?;
        let apt = Self { dir: dir.to_owned() };
        apt.copy_sources()?;
        apt.get(&["update"])?;
        Ok(apt)
    }

    /// The first of `names` that exists. Error: none exists.
    pub(crate) fn first_of(&self, names: &[&str]) -> Result<String> {
        let there = |name: &&&str| {
            self.tool("apt-cache", &["show", "--quiet=2", name])
                .read()
                .is_ok_and(|text| !text.trim().is_empty())
        };
        let name = names.iter().find(there);
        name.map(|&name| name.to_owned()).ok_or_else(|| {
            Error::new(format!("the machine's package sources have none of {}", names.join(", ")))
        })
    }

    /// The kernel package behind a meta package such as `linux-image-amd64`. Error: there is none
    /// behind it.
    pub(crate) fn kernel_behind(&self, meta: &str) -> Result<String> {
        let plan = self
            .tool("apt-get", &["--simulate", "--no-install-recommends", "install", meta])
            .read()?;
        let image = |line: &str| {
            let name = line.strip_prefix("Inst ")?.split(' ').next()?;
            let version = name.strip_prefix("linux-image-")?;
            version.starts_with(|c: char| c.is_ascii_digit()).then(|| name.to_owned())
        };
        plan.lines()
            .find_map(image)
            .ok_or_else(|| Error::new(format!("the package {meta} brings no kernel")))
    }

    /// Downloads one package alone and unpacks it into `root`. Error: no network, or no space.
    pub(crate) fn unpack_one(&self, package: &str, root: &Path) -> Result<()> {
        let place = self.dir.join("one");
        fs::create_dir_all(&place)?;
        self.tool("apt-get", &["-qq", "download", package]).in_directory(&place).read()?;
        for file in debs(&place)? {
            unpack(&file, root)?;
            fs::remove_file(&file)?;
        }
        Ok(())
    }

    /// Downloads packages with all dependencies and unpacks them into `root`. Returns the names of
    /// their files. Error: no network, or no space.
    pub(crate) fn unpack_all(&self, packages: &[&str], root: &Path) -> Result<Vec<String>> {
        let install = ["install", "-y", "--no-install-recommends", "--download-only"];
        self.get(&[&install, packages].concat())?;
        let files = debs(&self.dir.join("cache/archives"))?;
        for file in &files {
            unpack(file, root)?;
        }
        let name = |file: &PathBuf| file.file_name().map(|n| n.to_string_lossy().into_owned());
        Ok(files.iter().filter_map(name).collect())
    }

    fn copy_sources(&self) -> Result<()> {
        let etc = Path::new("/etc/apt");
        let target = self.dir.join("sources");
        if let Ok(list) = fs::read(etc.join("sources.list")) {
            fs::write(target.join("main.list"), list)?;
        }
        for entry in fs::read_dir(etc.join("sources.list.d")).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_source = path.extension().is_some_and(|e| e == "list" || e == "sources");
            if let (true, Ok(text)) = (is_source, fs::read(&path)) {
                fs::write(target.join(entry.file_name()), text)?;
            }
        }
        Ok(())
    }

    fn get(&self, args: &[&str]) -> Result<()> {
        self.tool("apt-get", &[&["-qq"], args].concat()).read().map(drop)
    }

    fn tool(&self, program: &str, args: &[&str]) -> Tool {
        let dir = |option: &str, path: &str| {
            let mut setting = OsString::from(format!("-oDir::{option}="));
            setting.push(self.dir.join(path));
            setting
        };
        Tool::new(program)
            .arg("-oDir::Etc::sourcelist=/dev/null")
            .arg(dir("Etc::sourceparts", "sources"))
            .arg(dir("State::lists", "lists"))
            .arg(dir("State::status", "status"))
            .arg(dir("State::extended_states", "extended"))
            .arg(dir("Cache", "cache"))
            // Nothing of the machine is changed, so neither its locks nor another user are needed.
            .args(&["-oDebug::NoLocking=1", "-oAPT::Sandbox::User=", "-oAcquire::Retries=3"])
            .args(&["-oAPT::Architectures=amd64", "-oAPT::Architecture=amd64"])
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
    }
}

fn debs(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir)?.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    files.sort();
    Ok(files)
}

fn unpack(package: &Path, root: &Path) -> Result<()> {
    Tool::new("dpkg-deb").arg("-x").arg(package).arg(root).read().map(drop)
}
