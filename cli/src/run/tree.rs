//! The directory that all processes of one `rocinante run` share: the names of their devices, and
//! the files that they read below /sys and /dev (`rocinante_netdev::sysfs`).
//!
//! It is named for the process that this one stays when it becomes the program. A later `run`
//! removes it once that process is gone.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rocinante_netdev::NamedInterface;
use rocinante_netdev::sysfs::{self, Devices, PATHS_VARIABLE};

use super::own;

/// The devices of this list, and their directory. That of the program which runs this one stays,
/// if it is for the same: a name, once given, belongs to its port. Error: as `Devices::list`.
pub fn make(list: &str) -> io::Result<(Vec<NamedInterface>, io::Result<PathBuf>)> {
    let mut outer = Devices::of_environment();
    if let Some(root) = outer.root().map(Path::to_owned)
        && root.is_dir()
        && outer.is_for(list)
    {
        return Ok((outer.list(Some(list))?, Ok(root)));
    }
    let root = place().and_then(|place| {
        clean(&place);
        let root = fresh(&place)?;
        sysfs::counts::clean(&root);
        Ok(root)
    });
    let mut devices = root.as_ref().map_or_else(|_| Devices::own(), |root| Devices::shared(root));
    let found = devices.list(Some(list));
    // Programs that no library reaches see the earlier counts, too.
    let _ = devices.count(Some(list));
    if let (Err(_), Ok(root)) = (&found, &root) {
        let _ = fs::remove_dir_all(root);
    }
    Ok((found?, root))
}

/// Makes a directory for this process. It has one already if it was another `run` before.
fn fresh(place: &Path) -> io::Result<PathBuf> {
    let own = own_name()?;
    let mut roots = (0_u32..).map(|at| place.join(format!("{own}-{at}")));
    let made = roots.find_map(|root| match DirBuilder::new().mode(0o755).create(&root) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
        made => Some(made.map(|()| root)),
    });
    made.unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()))
}

/// A directory of this user's own. Error: no directory can be written to, or the one for it belongs
/// to another user.
fn place() -> io::Result<PathBuf> {
    let uid = rustix::process::getuid().as_raw();
    own::anywhere(|place| {
        let place = place.join(format!("rocinante-{uid}"));
        own::directory(&place)?;
        // Without links: paths are compared with it.
        place.canonicalize()
    })
}

/// A name that no process has had since the boot: its namespace of processes, its number there, and
/// when it began.
fn own_name() -> io::Result<String> {
    let began = began(std::process::id()).ok_or(io::ErrorKind::NotFound)?;
    Ok(format!("{}-{}-{began}", namespace()?, std::process::id()))
}

fn namespace() -> io::Result<u64> {
    fs::metadata("/proc/self/ns/pid").map(|file| file.ino())
}

/// When a process began, in ticks since the boot (proc_pid_stat(5)).
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may have spaces and brackets in it.
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(19)?.parse().ok()
}

/// Whether a process has the directory in its environment: one that its program left behind, or
/// itself, whose start time differs in another time namespace.
fn is_named(root: &Path) -> bool {
    let variable = format!("{PATHS_VARIABLE}={}", root.display());
    fs::read_dir("/proc").into_iter().flatten().flatten().any(|process| {
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    })
}

/// Removes the directories of processes that are gone. It keeps those of another PID namespace,
/// whose processes it cannot see.
fn clean(place: &Path) {
    let Ok(own) = namespace() else { return };
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let mut words = name.to_str().unwrap_or_default().splitn(4, '-').map(str::parse::<u64>);
        if let (Some(Ok(space)), Some(Ok(pid)), Some(Ok(since))) =
            (words.next(), words.next(), words.next())
            && space == own
            && u32::try_from(pid).ok().and_then(began) != Some(since)
            && !is_named(&entry.path())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_process() {
        let folder = tempfile::TempDir::new().unwrap();
        let place = folder.path().join("tree");
        own::directory(&place).unwrap();
        let space = namespace().unwrap();
        // This process was another `run` before.
        let [own, again] = [(); 2].map(|()| {
            let root = fresh(&place).unwrap();
            root.file_name().unwrap().to_str().unwrap().to_owned()
        });
        let since = began(std::process::id()).unwrap();
        let gone = format!("{space}-{}-{}-1", std::process::id(), since + 1);
        let elsewhere = format!("{}-1-1", space + 1);
        for name in [&gone, &elsewhere, "counters-x"] {
            fs::create_dir(place.join(name)).unwrap();
        }
        // A child of a program that has ended.
        let child = std::process::Command::new("sleep")
            .arg("3600")
            .env(PATHS_VARIABLE, place.join(&gone))
            .spawn();
        let mut child = child.unwrap();
        while !is_named(&place.join(&gone)) {
            assert!(child.try_wait().unwrap().is_none());
            std::thread::yield_now();
        }
        clean(&place);
        assert!(place.join(&gone).exists());
        child.kill().unwrap();
        child.wait().unwrap();
        clean(&place);
        let mut left: Vec<String> = fs::read_dir(&place)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut expected = vec![own, again, elsewhere, "counters-x".to_owned()];
        left.sort();
        expected.sort();
        assert_eq!(left, expected);
    }
}
