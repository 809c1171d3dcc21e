//! The program to run: where it is, and whether a preloaded library can reach it.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, FileKind, ReadCache, elf};
use rustix::fs::{Access, StatVfsMountFlags};

use super::library::Libraries;
use super::{NOT_FOUND, Refusal};

/// Where programs are if there is no `PATH`, as execvp(3) has it.
const SEARCH: &str = "/bin:/usr/bin";
/// The longest chain of scripts that interpret each other: `BINPRM_MAX_RECURSION` of Linux.
const SCRIPTS_MAX: u32 = 5;
/// Bytes of a script's first line that the kernel reads: `BINPRM_BUF_SIZE` of Linux.
const FIRST_LINE_MAX: u64 = 256;

/// The file that execvp(3) would start as `name`. Error: there is none, or it cannot be executed.
pub fn find(name: &OsStr) -> Result<PathBuf, Refusal> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return executable(&path).map(|()| path);
    }
    let mut refusal =
        Refusal { status: NOT_FOUND, why: format!("{}: not found in PATH", name.display()) };
    let search = std::env::var_os("PATH").unwrap_or_else(|| SEARCH.into());
    for directory in std::env::split_paths(&search) {
        // An empty word is the working directory.
        let path = Path::new(".").join(directory).join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(worse) if worse.status != NOT_FOUND => refusal = worse,
            Err(_) => {}
        }
    }
    Err(refusal)
}

fn executable(path: &Path) -> Result<(), Refusal> {
    let shown = path.display();
    match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Refusal { status: NOT_FOUND, why: format!("{shown}: not found") })
        }
        Err(error) => Err(Refusal::cannot(format!("{shown}: {error}"))),
        Ok(file) if file.is_dir() => Err(Refusal::cannot(format!("{shown} is a directory"))),
        Ok(_) => rustix::fs::access(path, Access::EXEC_OK)
            .map_err(|error| Refusal::cannot(format!("{shown}: {error}"))),
    }
}

/// Checks that the loader will put the libraries into the program at `path`, or into its
/// interpreter if it is a script. Error: the reason why not.
pub fn check(path: &Path, libraries: &Libraries) -> Result<(), Refusal> {
    let Kind::Elf(ours) = Kind::of(&libraries.verbs).map_err(Refusal::cannot)? else {
        return Err(Refusal::cannot(format!("{} is no library", libraries.verbs.display())));
    };
    let elf = program_of(path, SCRIPTS_MAX)?;
    elf.map_or(Ok(()), |(path, elf)| elf.check(&path, &ours, libraries).map_err(Refusal::cannot))
}

/// Why no library reaches the system calls of the program at `path`; `None` if one does.
#[must_use]
pub fn blindness(path: &Path) -> Option<String> {
    let (path, elf) = program_of(path, SCRIPTS_MAX).ok()??;
    (elf.loader.is_none() && !is_loader(&path))
        .then(|| format!("{} is linked statically", path.display()))
}

/// The loader itself runs the program that is its argument.
fn is_loader(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld"))
}

/// The program that the kernel starts for `path`; `None` if that cannot be known.
fn program_of(path: &Path, scripts: u32) -> Result<Option<(PathBuf, Elf)>, Refusal> {
    match Kind::of(path).map_err(Refusal::cannot)? {
        Kind::Elf(elf) => Ok(Some((path.to_owned(), elf))),
        Kind::Script(words) if scripts > 0 => {
            let interpreter = find(&words[0]).map_err(|refusal| Refusal {
                why: format!("{}: its interpreter {}", path.display(), refusal.why),
                status: super::CANNOT_RUN,
            })?;
            let env = interpreter.file_name() == Some(OsStr::new("env"));
            match words[1..].iter().find(|word| env && is_program_of_env(word)) {
                Some(name) => program_of(&find(name)?, scripts - 1),
                None => program_of(&interpreter, scripts - 1),
            }
        }
        Kind::Script(_) | Kind::Unknown => Ok(None),
    }
}

/// Whether a word after `env` is the program, and no option or assignment.
fn is_program_of_env(word: &OsStr) -> bool {
    !word.as_bytes().starts_with(b"-") && !word.as_bytes().contains(&b'=')
}

/// The kind of a file that the kernel executes.
enum Kind {
    Elf(Elf),
    /// The words of its first line, of which there is one at least.
    Script(Vec<OsString>),
    /// It may be executed without being read, or is a text that execvp(3) gives to a shell.
    Unknown,
}

/// The fields of a program's header that the kernel and the loader read.
struct Elf {
    /// Class, byte order and machine (`EI_CLASS`, `EI_DATA`, `e_machine` of elf(5)).
    architecture: [u8; 4],
    /// The loader that it names; a static program names none.
    loader: Option<PathBuf>,
}

impl Kind {
    fn of(path: &Path) -> Result<Self, String> {
        let in_words = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                return Ok(Self::Unknown);
            }
            Err(error) => return Err(in_words(&error)),
        };
        let mut start = Vec::new();
        file.by_ref()
            .take(FIRST_LINE_MAX)
            .read_to_end(&mut start)
            .map_err(|error| in_words(&error))?;
        if let Some(line) = start.strip_prefix(b"#!") {
            return Ok(Self::script(line));
        }
        let data = ReadCache::new(file);
        let loader = match FileKind::parse(&data) {
            Ok(FileKind::Elf64) => loader(&data).map_err(|error| in_words(&error))?,
            // Its architecture says enough: we have libraries of 64 bits alone.
            Ok(FileKind::Elf32) => None,
            _ => return Ok(Self::Unknown),
        };
        // Byte order is part of it, so the bytes can be compared as they are.
        let architecture = [4, 5, 18, 19].map(|at| start.get(at).copied().unwrap_or_default());
        Ok(Self::Elf(Elf { architecture, loader }))
    }

    fn script(line: &[u8]) -> Self {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
        let words: Vec<OsString> = words.map(|word| OsString::from_vec(word.to_vec())).collect();
        if words.is_empty() { Self::Unknown } else { Self::Script(words) }
    }
}

/// The loader that a program of 64 bits names.
fn loader(data: &ReadCache<File>) -> object::Result<Option<PathBuf>> {
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    for segment in header.program_headers(endian, data)? {
        if let Some(path) = segment.interpreter(endian, data)? {
            return Ok(Some(PathBuf::from(OsStr::from_bytes(path))));
        }
    }
    Ok(None)
}

impl Elf {
    fn check(&self, path: &Path, ours: &Self, libraries: &Libraries) -> Result<(), String> {
        let shown = path.display();
        if self.architecture != ours.architecture {
            return Err(format!(
                "{shown} is for another architecture than {}",
                libraries.verbs.display()
            ));
        }
        let Some(loader) = &self.loader else {
            return if is_loader(path) {
                Ok(())
            } else {
                Err(format!(
                    "{shown} is linked statically: no library can be put into it; use a build of \
                     it that is linked dynamically"
                ))
            };
        };
        if loader.as_os_str().as_bytes().windows(7).any(|part| part == b"ld-musl") {
            return Err(format!(
                "{shown} is built for musl ({}), and {} for glibc: use a build of it for glibc",
                loader.display(),
                libraries.verbs.display()
            ));
        }
        if !loader.is_file() {
            return Err(format!(
                "{shown} needs the loader {}, which is not here",
                loader.display()
            ));
        }
        unprivileged(path)?;
        versions(path, loader, libraries)
    }
}

/// Checks that the program gets no privileges: else the loader ignores our variables (`AT_SECURE`
/// of getauxval(3)).
fn unprivileged(path: &Path) -> Result<(), String> {
    let Ok(file) = path.metadata() else { return Ok(()) };
    let ignored = rustix::thread::no_new_privs().unwrap_or(false)
        || rustix::fs::statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID));
    match privilege(path, &file).filter(|_| !ignored) {
        Some(what) => Err(format!(
            "{} is {what}, so the loader takes no library from its caller: run a copy of it \
             (`cp`) that is not",
            path.display()
        )),
        None => Ok(()),
    }
}

fn privilege(path: &Path, file: &Metadata) -> Option<&'static str> {
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    // As the kernel: set-group-ID without the group's right to execute means mandatory locking.
    if file.mode() & 0o4000 != 0 && file.uid() != uid.as_raw() {
        return Some("set-user-ID");
    }
    if file.mode() & 0o2010 == 0o2010 && file.gid() != gid.as_raw() {
        return Some("set-group-ID");
    }
    let capable = rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 64]).is_ok();
    (capable && !uid.is_root()).then_some("given file capabilities")
}

/// Asks the program's loader whether the libraries have every version that the program and its
/// libraries want.
fn versions(path: &Path, loader: &Path, libraries: &Libraries) -> Result<(), String> {
    let mut ask = Command::new(loader);
    ask.arg("--list").arg(path).envs(libraries.environment()).env("LC_ALL", "C");
    ask.stdin(Stdio::null()).stdout(Stdio::null());
    // A loader that cannot be asked decides when it runs the program.
    let Ok(answer) = ask.output() else { return Ok(()) };
    let said = String::from_utf8_lossy(&answer.stderr);
    let ours = libraries.verbs.display().to_string();
    let missing = said.lines().find(|line| line.contains(&ours) && line.contains("not found"));
    match missing {
        Some(line) => Err(format!(
            "{}: {}; a newer Rocinante may have it",
            path.display(),
            line.strip_prefix(&format!("{}: ", path.display())).unwrap_or(line)
        )),
        None => Ok(()),
    }
}
