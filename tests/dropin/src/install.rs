//! An installation of the command and its libraries where every user can run it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Where the command is installed.
const COMMAND: &str = "bin/rocinante";
/// The libraries as cargo builds them, and where they are installed.
const LIBRARIES: [(&str, &str); 2] = [
    ("librocinante_ibverbs.so", "lib/rocinante/libibverbs.so.1"),
    ("librocinante_paths.so", "lib/rocinante/librocinante_paths.so"),
];

/// Programs of another processor: scripts that start them by its emulator, called as they are, and
/// their files.
const FOREIGN: &str = "foreign";

/// A directory with `bin/rocinante` and `lib/rocinante`. It is removed at the end.
#[derive(Debug)]
pub struct Installation(TempDir);

impl Installation {
    /// Copies the command, and the libraries that cargo built in `built`, such as
    /// `target/release`. Error: something is not there, or cannot be written.
    pub fn of(command: &Path, built: &Path) -> io::Result<Self> {
        let all = Permissions::from_mode(0o755);
        let place = Self(tempfile::Builder::new().permissions(all).tempdir()?);
        let libraries = LIBRARIES.map(|(from, to)| (built.join(from), to));
        for (from, to) in [(command.to_owned(), COMMAND)].into_iter().chain(libraries) {
            let to = place.0.path().join(to);
            fs::create_dir_all(to.parent().unwrap_or(place.0.path()))?;
            fs::copy(&from, &to)
                .map_err(|error| io::Error::other(format!("{}: {error}", from.display())))?;
            fs::set_permissions(&to, Permissions::from_mode(0o755))?;
        }
        symlink("libibverbs.so.1", place.0.path().join("lib/rocinante/libibverbs.so"))?;
        // Every user puts its files here, as in /tmp.
        fs::create_dir(place.runtime())?;
        fs::set_permissions(place.runtime(), Permissions::from_mode(0o1777))?;
        Ok(place)
    }

    /// Adds the programs in `usr/bin` of `root`, a root file system for another processor, to be
    /// run by `emulator` on the libraries that cargo built for it in `built`. Error: something is
    /// not there, or cannot be written.
    pub fn add_foreign(&self, emulator: &str, root: &Path, built: &Path) -> io::Result<()> {
        let place = self.0.path().join(FOREIGN);
        fs::create_dir(&place)?;
        let copied = Command::new("cp").arg("-a").arg(root).arg(place.join("root")).status()?;
        if !copied.success() {
            return Err(io::Error::other(format!("{}: cp: {copied}", root.display())));
        }
        let [verbs, paths] = LIBRARIES.map(|(from, to)| {
            let to = place.join(Path::new(to).file_name().unwrap_or_default());
            fs::copy(built.join(from), &to).map(|_| to.display().to_string())
        });
        let (verbs, paths, lib) = (verbs?, paths?, place.display());
        let programs = place.join("root/usr/bin");
        fs::create_dir(self.foreign())?;
        for program in fs::read_dir(&programs)?.flatten() {
            let (name, program) = (program.file_name(), program.path());
            // These are not the shell's own LD_PRELOAD and LD_LIBRARY_PATH, for its processor.
            let script = format!(
                "#!/bin/sh\nexec {emulator} -L {lib}/root -E LD_PRELOAD={verbs}:{paths} \\\n\
                 -E LD_LIBRARY_PATH={lib} {} \"$@\"\n",
                program.display()
            );
            let path = self.foreign().join(name);
            fs::write(&path, script)?;
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Where the scripts of [`add_foreign`](Self::add_foreign) lie.
    pub(crate) fn foreign(&self) -> PathBuf {
        self.0.path().join(FOREIGN).join("bin")
    }

    /// A directory of its own below, which every user can write to.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.0.path().join("run")
    }

    /// The command's path.
    pub(crate) fn program(&self) -> PathBuf {
        self.0.path().join(COMMAND)
    }

    /// Writes a file that every user can read. Error: it cannot be written.
    pub(crate) fn script(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.runtime().join(name);
        let error = |error| format!("{}: {error}", path.display());
        fs::write(&path, text).map_err(error)?;
        fs::set_permissions(&path, Permissions::from_mode(0o644)).map_err(error)?;
        Ok(path)
    }

    /// `rocinante run --netdev NETDEV -- WORDS`.
    #[must_use]
    pub fn run<S: AsRef<OsStr>>(
        &self,
        netdev: &str,
        words: impl IntoIterator<Item = S>,
    ) -> Command {
        let run = ["run", "--netdev", netdev, "--"].map(OsString::from);
        let words = words.into_iter().map(|word| word.as_ref().to_owned());
        self.command(run.into_iter().chain(words))
    }

    /// `rocinante WORDS`, with the environment and the streams that [`run`](Self::run) has, too.
    pub fn command<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Command {
        let own = self.program().into_os_string();
        let words = words.into_iter().map(|word| word.as_ref().to_owned());
        self.plain([own].into_iter().chain(words))
    }

    /// These words, with the environment and the streams that [`run`](Self::run) has, too. Panics
    /// if there is no word.
    #[must_use]
    pub fn plain<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Command {
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().expect("a program has a name"));
        command.args(words);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("ROCINANTE_") {
                command.env_remove(name);
            }
        }
        command.env("XDG_RUNTIME_DIR", self.runtime());
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_another_processor_is_started_by_its_emulator() {
        let (own, place) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let [built, root] = ["built", "root"].map(|name| place.path().join(name));
        for folder in [&built, &root.join("usr/bin")] {
            fs::create_dir_all(folder).unwrap();
        }
        LIBRARIES.iter().for_each(|(from, _)| fs::write(built.join(from), "").unwrap());
        fs::write(root.join("usr/bin/rping"), "").unwrap();
        let place_of = own.path().join(FOREIGN).display().to_string();
        let installed = Installation(own);
        installed.add_foreign("echo", &root, &built).unwrap();
        let output = Command::new(installed.foreign().join("rping")).args(["-s", "a b"]).output();
        let wanted = format!(
            "-L {place_of}/root -E LD_PRELOAD={place_of}/libibverbs.so.1:\
             {place_of}/librocinante_paths.so -E LD_LIBRARY_PATH={place_of} \
             {place_of}/root/usr/bin/rping -s a b\n"
        );
        assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), wanted);
    }
}
