//! `rocinante run`: the environment of the program, and programs that cannot be run.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rocinante_tests::running::{install, install_script, open_to_all};
use rocinante_tests::{need, require};
use tempfile::TempDir;

const CANNOT: i32 = 126;
const NOT_FOUND: i32 = 127;
const NOBODY: u32 = 65534;

/// An installation in a directory of its own, which every user can read.
pub(super) struct Installed(TempDir);

impl Installed {
    /// In the place of libibverbs.so.1 there is a library that every program has anyhow, so that
    /// preloading it has no effect but the loader's verdict.
    pub(super) fn new() -> Self {
        let installed = Self(open_to_all());
        fs::create_dir_all(installed.0.path().join("lib/rocinante")).unwrap();
        installed.copy(Path::new(env!("CARGO_BIN_EXE_rocinante-under-test")), "rocinante", 0o755);
        let mapped = fs::read_to_string("/proc/self/maps").unwrap();
        let library = mapped.lines().find_map(|line| {
            line.split(' ').next_back().filter(|path| path.contains("/libgcc_s.so"))
        });
        installed.copy(Path::new(library.unwrap()), "lib/rocinante/libibverbs.so.1", 0o644);
        symlink("libibverbs.so.1", installed.0.path().join("lib/rocinante/libibverbs.so")).unwrap();
        // Beside the program, and in `../lib/rocinante` from its directory.
        fs::create_dir(installed.0.path().join("bin")).unwrap();
        fs::rename(installed.0.path().join("rocinante"), installed.0.path().join("bin/rocinante"))
            .unwrap();
        installed
    }

    fn copy(&self, from: &Path, to: &str, mode: u32) -> PathBuf {
        let to = self.0.path().join(to);
        install(from, &to, mode);
        to
    }

    fn file(&self, name: &str, mode: u32, bytes: &[u8]) -> String {
        let path = self.0.path().join(name);
        install_script(bytes, &path, mode);
        path.into_os_string().into_string().unwrap()
    }

    /// `rocinante run WORDS`.
    pub(super) fn run(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.0.path().join("bin/rocinante"));
        command.arg("run").args(words).stdin(Stdio::null());
        command.env("XDG_RUNTIME_DIR", self.0.path()).env_remove("ROCINANTE_NETDEV");
        command
    }

    /// The directory.
    pub(super) fn place(&self) -> &Path {
        self.0.path()
    }

    /// Asserts that a program is refused with this status and these words, where `run` may not
    /// mount: then it has no way to show its files to the program.
    #[track_caller]
    fn refuses(&self, program: &str, status: i32, word: &str) {
        let run = self.run(&["--", program]);
        let mut command = Command::new("setpriv");
        if rustix::process::geteuid().is_root() {
            command.arg("--bounding-set=-sys_admin");
        }
        command.arg(run.get_program()).args(run.get_args()).stdin(Stdio::null());
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        refused(&command.output().unwrap(), status, word);
    }
}

#[track_caller]
fn refused(output: &Output, status: i32, word: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(word), "no {word:?} in: {said}");
}

/// An ELF file of 64 bits for this machine, with a segment that names a loader or with none.
fn elf(loader: Option<&str>) -> Vec<u8> {
    let own = fs::read("/proc/self/exe").unwrap();
    // Header and program header of elf(5), by their offsets there.
    let mut file = own[..64].to_vec();
    file[32..40].copy_from_slice(&64_u64.to_ne_bytes());
    file[56..58].copy_from_slice(&u16::from(loader.is_some()).to_ne_bytes());
    if let Some(loader) = loader {
        let len = loader.len() as u64 + 1;
        let (interp, readable) = (3_u32.to_ne_bytes(), 4_u32.to_ne_bytes());
        file.extend([interp, readable].concat());
        for value in [120, 0, 0, len, len, 1_u64] {
            file.extend(value.to_ne_bytes());
        }
        file.extend(loader.bytes().chain([0]));
    }
    file
}

#[test]
fn status_signals_and_output_are_the_programs() {
    let installed = Installed::new();
    let output =
        installed.run(&["--", "sh", "-c", "echo $0 $1; exit 7", "a", "b"]).output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"a b\n"[..]));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = installed.run(&["sh", "-c", "kill -TERM $$"]).output().unwrap();
    assert_eq!(output.status.signal(), Some(15));
    // A script is its interpreter's, and a program keeps the name that it was called by.
    let script =
        installed.file("script", 0o755, b"#!/usr/bin/env -S sh -e\necho $0\nfalse\nexit 9\n");
    let output = installed.run(&["--", &script]).output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout),
        (Some(1), format!("{script}\n").into_bytes())
    );
}

#[test]
fn the_environment_names_the_library() {
    let installed = Installed::new();
    let options = ["--netdev", "udp", "--device", "lo=x0", "--counters", "--", "env"];
    let output = installed.run(&options).env("LD_LIBRARY_PATH", "/before").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let place = installed.0.path().canonicalize().unwrap().join("lib/rocinante");
    let place = place.display();
    for line in [
        format!("LD_PRELOAD={place}/libibverbs.so.1"),
        format!("LD_LIBRARY_PATH={place}:/before"),
        "ROCINANTE_NETDEV=udp".to_owned(),
        "ROCINANTE_DEVICES=lo=x0".to_owned(),
        "ROCINANTE_COUNTERS=1".to_owned(),
    ] {
        assert!(said.lines().any(|other| other == line), "{line}: {said}");
    }
    let mut again = installed.run(&["--", "env"]);
    let output = again.env("LD_PRELOAD", "libc.so.6").output().unwrap();
    // The caller's own preloaded library may interpose on verbs, or has to be the first.
    let line = format!("LD_PRELOAD=libc.so.6:{place}/libibverbs.so.1\n");
    assert!(String::from_utf8(output.stdout).unwrap().contains(&line));
}

#[test]
fn devices_and_backends_are_told_when_asked() {
    let installed = Installed::new();
    let output = installed.run(&["-v", "--device", "lo=x0", "--", "true"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    for word in ["libibverbs.so.1 is ", "device x0: lo (127.0.0.1", "backend udp: "] {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
    let output = installed.run(&["--device", "nosuch0", "--", "true"]).output().unwrap();
    refused(&output, CANNOT, "no interface \"nosuch0\": there are");
    refused(&installed.run(&["--netdev", "pigeon", "--", "true"]).output().unwrap(), 2, "pigeon");
    // A program that becomes another `run` for other devices.
    let own = installed.place().join("bin/rocinante").display().to_string();
    let line = ["--device", "lo=x0", "--", &own, "run", "-v", "--device", "lo=x1", "--", "true"];
    let output = installed.run(&line).output().unwrap();
    refused(&output, 0, "device x1: lo (127.0.0.1");
    refused(&output, 0, "/sys/class/infiniband is /");
}

/// An invalid value of each variable, and words of its message.
const WRONG: [(&str, &str, &str); 8] = [
    ("ROCINANTE_NETDEV", "pigeon", "ROCINANTE_NETDEV: "),
    ("ROCINANTE_SHARDS", "65", "ROCINANTE_SHARDS=65: a device has 1 to 64 shards"),
    ("ROCINANTE_KEEP_ALIVE", "abc", "ROCINANTE_KEEP_ALIVE=abc: give it seconds"),
    ("ROCINANTE_FAULT", "lost=1%", "ROCINANTE_FAULT: \"lost\" is no word"),
    ("ROCINANTE_DEVICES", "nosuch0", "ROCINANTE_DEVICES: no interface \"nosuch0\""),
    ("ROCINANTE_AGENT", "no", "ROCINANTE_AGENT=no: give it the path of a socket, or `off`"),
    ("ROCINANTE_LOG", "loud", "ROCINANTE_LOG=loud: give it off, warn, info or debug"),
    ("ROCINANTE_COUNTERS", "yes", "ROCINANTE_COUNTERS=yes: give it 1 or 0"),
];

/// Variables that `run` does not judge, and why.
const OTHERS: [(&str, &str); 4] = [
    ("ROCINANTE_FAULT_LOG", "the library names a file that it cannot write"),
    ("ROCINANTE_DEVICE", "programs in Rust alone read it, and get an error with the devices"),
    ("ROCINANTE_PATHS", "run sets it"),
    ("ROCINANTE_GUARDIAN", "run sets it"),
];

#[test]
fn variables_are_checked_before_the_program_begins() {
    let installed = Installed::new();
    for (variable, value, word) in WRONG {
        let output = installed.run(&["--", "true"]).env(variable, value).output().unwrap();
        refused(&output, CANNOT, word);
    }
    // An option overrides its variable.
    let options = ["--netdev=udp", "--fault=off", "--device=lo", "--counters", "--", "true"];
    let mut named = installed.run(&options);
    for (variable, value, _) in WRONG {
        if ["NETDEV", "FAULT", "DEVICES", "COUNTERS"].iter().any(|it| variable.ends_with(it)) {
            named.env(variable, value);
        }
    }
    assert_eq!(named.output().unwrap().status.code(), Some(0));
}

/// A new constant of the sources for a variable has to be in `WRONG` or in `OTHERS`.
#[test]
fn each_variable_of_the_sources_is_in_a_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut left: Vec<PathBuf> =
        ["netdev", "verbs-api", "cli", "host"].map(|folder| root.join(folder)).into();
    let mut found = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|name| name == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let begun = text.split("VARIABLE: &str = \"").skip(1);
            found.extend(begun.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
    }
    found.sort();
    let wrong = WRONG.iter().map(|it| it.0);
    let mut known: Vec<&str> = wrong.chain(OTHERS.iter().map(|it| it.0)).collect();
    known.sort_unstable();
    assert_eq!(found, known);
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    let installed = Installed::new();
    installed.refuses("no-such-program", NOT_FOUND, "not found in PATH");
    installed.refuses("/nowhere/x", NOT_FOUND, "not found");
    installed.refuses("/usr", CANNOT, "is a directory");
    installed.refuses("", CANNOT, "no program is named");
    installed.refuses(&installed.file("data", 0o644, b""), CANNOT, "Permission denied");
    let program = |name: &str, bytes: &[u8]| installed.file(name, 0o755, bytes);
    installed.refuses(&program("static", &elf(None)), CANNOT, "linked statically");
    let musl = program("musl", &elf(Some("/lib/ld-musl-x86_64.so.1")));
    installed.refuses(&musl, CANNOT, "built for musl");
    let absent = program("absent", &elf(Some("/nowhere/ld.so")));
    installed.refuses(&absent, CANNOT, "needs the loader /nowhere/ld.so");
    // The machine, and the class.
    for (at, value) in [(18, 0xf7), (4, 1)] {
        let mut other = elf(Some("/lib64/ld-linux-x86-64.so.2"));
        other[at] = value;
        installed.refuses(&program("other", &other), CANNOT, "another architecture");
    }
    let script = program("script", format!("#!{musl}\n").as_bytes());
    installed.refuses(&script, CANNOT, "built for musl");
    let script = program("by-env", format!("#!/usr/bin/env -S A=1 {musl} x\n").as_bytes());
    installed.refuses(&script, CANNOT, "built for musl");
    installed.refuses(
        &program("orphan", b"#!/nowhere/sh\n"),
        CANNOT,
        "its interpreter /nowhere/sh",
    );
    // A file that is no program at all is the kernel's to refuse, or a shell's to run.
    let output = installed.run(&["--", &program("text", b"exit 3\n")]).output().unwrap();
    assert!([Some(3), Some(CANNOT)].contains(&output.status.code()), "{output:?}");
}

/// The library here has none of the versions of libibverbs.
#[test]
fn a_library_without_the_versions_is_refused() {
    let program = "/usr/bin/ibv_devices";
    if !Path::new(program).exists() {
        rocinante_tests::skip!("no ibv_devices: apt install ibverbs-utils");
    }
    Installed::new().refuses(program, CANNOT, "version `IBVERBS_1.1' not found");
}

#[test]
fn a_program_with_privileges_of_its_own_is_refused() {
    require!(need::machine_root());
    let installed = Installed::new();
    let shell = Path::new("/bin/sh").canonicalize().unwrap();
    for (mode, word) in [(0o4755, "set-user-ID"), (0o2755, "set-group-ID")] {
        let program = installed.copy(&shell, "program", 0o755);
        chown(&program, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
        installed.refuses(program.to_str().unwrap(), CANNOT, word);
        // It belongs to `nobody`: that user gains no right by it.
        let mut own = installed.run(&["--", program.to_str().unwrap(), "-c", "exit 4"]);
        let output = own.uid(NOBODY).gid(NOBODY).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{output:?}");
    }
    // VFS_CAP_REVISION_2 of capabilities(7), effective, with CAP_NET_RAW.
    let capable = installed.copy(&shell, "capable", 0o755);
    let words: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
    let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::fs::setxattr(&capable, "security.capability", &value, rustix::fs::XattrFlags::empty())
        .unwrap();
    let words = ["--", capable.to_str().unwrap(), "-c", "exit 4"];
    let mut nobodys = installed.run(&words);
    refused(&nobodys.uid(NOBODY).gid(NOBODY).output().unwrap(), CANNOT, "file capabilities");
    assert_eq!(installed.run(&words).output().unwrap().status.code(), Some(4));
}
