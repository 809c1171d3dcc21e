//! The workflow of `docs/examples` that runs unmodified programs, in a container without any
//! privilege.

use super::examples::{documents, path};
use super::{Done, Running};
use rocinante_lab::ChildGuard;
use rocinante_tests::running::{install, install_script, open_to_all};
use rocinante_tests::{need, require};
use rustix::process::{Resource, getrlimit};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Names the environment variable with the folder of an unpacked archive, to try that one.
const FOLDER_VARIABLE: &str = "ROCINANTE_FOLDER";
/// The programs of the workflow's image that the script needs.
const PROGRAMS: [&str; 11] = [
    "sh",
    "awk",
    "cat",
    "grep",
    "mktemp",
    "rm",
    "sleep",
    "timeout",
    "ib_write_bw",
    "ib_send_lat",
    "ibv_rc_pingpong",
];
/// The files that an archive has for `rocinante run`, and how cargo calls them beside this program.
const FILES: [(&str, &str); 2] = [
    ("libibverbs.so.1", "librocinante_ibverbs.so"),
    ("librocinante_paths.so", "librocinante_paths.so"),
];
/// How long a container may run, in seconds, also if this test is killed.
const LIFETIME: &str = "100";

/// A name that no other test has.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("rocinante-container-{}-{next}", std::process::id())
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    install(from, to, 0o755);
}

/// A root file system and all that podman keeps, in a directory that is removed at the end.
pub(super) struct Image {
    pub(super) folder: TempDir,
    name: String,
}

impl Image {
    /// The contents of the workflow's image, made from this machine's programs.
    pub(super) fn new() -> Self {
        let image = Self { folder: open_to_all(), name: unique() };
        let root = image.root();
        for directory in ["tmp", "proc", "sys", "dev", "etc", "opt/rocinante"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::set_permissions(root.join("tmp"), Permissions::from_mode(0o1777)).unwrap();
        for program in PROGRAMS {
            image.add(&found(program), &format!("usr/bin/{program}"));
        }
        if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
            for file in ["rocinante", FILES[0].0, FILES[1].0] {
                image.add(&Path::new(&folder).join(file), &format!("opt/rocinante/{file}"));
            }
        } else {
            let own = env!("CARGO_BIN_EXE_rocinante-under-test");
            image.add(Path::new(own), "opt/rocinante/rocinante");
            let built = std::env::current_exe().unwrap();
            for (file, from) in FILES {
                image.add(&built.with_file_name(from), &format!("opt/rocinante/{file}"));
            }
        }
        copy(Path::new(&path("perftest.sh")), &root.join("opt/perftest.sh"));
        image
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// Adds a program or a library, and the libraries that it needs.
    fn add(&self, file: &Path, to: &str) {
        copy(file, &self.root().join(to));
        let list = Command::new("ldd").arg(file).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        for library in list.split_whitespace().filter(|word| word.starts_with('/')) {
            let to = self.root().join(&library[1..]);
            if !to.exists() {
                copy(Path::new(library), &to);
            }
        }
    }

    /// podman, which keeps its state in the folder.
    fn podman(&self) -> Command {
        let mut podman = apart(&[], "exec \"$@\"");
        podman.args(["sh", "podman"]).args(self.kept());
        podman
    }

    /// podman's options that have it keep its state in the folder.
    pub(super) fn kept(&self) -> Vec<String> {
        let mut options = vec!["--storage-driver".to_owned(), "vfs".to_owned()];
        for (option, place) in [("--root", "store"), ("--runroot", "run"), ("--tmpdir", "state")] {
            options
                .extend([option.to_owned(), self.folder.path().join(place).display().to_string()]);
        }
        options
    }

    /// Runs words as PID 1, with these options of `docker run`.
    fn run(&self, options: &[&str], words: &[&str]) -> Done {
        let mut podman = self.podman();
        podman.args(["run", "--name", &self.name, "--timeout", LIFETIME]).args(options);
        podman.args(ulimits());
        podman.arg("--rootfs").arg(self.root()).args(words);
        Running::start(&mut podman).finish()
    }
}

/// A shell with these lines in a mount namespace of its own, and in `more` of unshare(1); the words
/// are to follow. Where the machine has both versions of cgroups (`hybrid`) it sees the first: crun
/// 1.8 refuses the second if that has a controller.
pub(super) fn apart(more: &[&str], lines: &str) -> Command {
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "--propagation", "private"]).args(more).args(["sh", "-c"]);
    shell.arg(format!("umount /sys/fs/cgroup/unified 2>/dev/null; {lines}"));
    shell.stdin(Stdio::null());
    shell
}

/// podman's defaults may be more than this process may give.
pub(super) fn ulimits() -> Vec<String> {
    let processes = getrlimit(Resource::Nproc).maximum.map_or(4096, |most| most.min(4096));
    let limits = [("nofile", 1024), ("nproc", processes)];
    limits.map(|(limit, most)| format!("--ulimit={limit}={most}:{most}")).into()
}

impl Drop for Image {
    fn drop(&mut self) {
        // The container does not end with the command that started it.
        let mut remove = self.podman();
        remove.args(["rm", "--force", "--ignore", "--time", "0", &self.name]);
        remove.stdout(Stdio::null()).stderr(Stdio::null());
        if let Ok(mut removal) = ChildGuard::spawn(&mut remove) {
            let _ = removal.wait(Duration::from_secs(30));
        }
    }
}

pub(super) fn found(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    let mut places = std::env::split_paths(&path).map(|directory| directory.join(program));
    places.find(|place| place.is_file()).unwrap_or_else(|| panic!("no {program}"))
}

/// Calls `check` with the options and the words of the workflow's `docker run`.
fn as_the_workflow_says(check: impl FnOnce(&[&str], &[&str])) {
    let workflow = &documents("perftest.yml")[0];
    let steps = workflow["jobs"]["perftest"]["steps"].as_vec().unwrap();
    let line = steps.last().unwrap()["run"].as_str().unwrap();
    let line = line.strip_prefix("docker run ").unwrap();
    // The name of the image is between them.
    let (options, words) = line.split_once(" perftest ").unwrap();
    let options: Vec<&str> = options.split_whitespace().collect();
    let words: Vec<&str> = words.split_whitespace().collect();
    check(&options, &words);
}

#[test]
fn unmodified_programs_run_in_a_container_without_any_privilege() {
    require!(need::machine_root());
    require!(need::program("podman"));
    require!(need::program("ib_write_bw"));
    require!(need::program("ibv_rc_pingpong"));
    as_the_workflow_says(|options, words| {
        let image = Image::new();
        let what = "^(Uid|CapBnd|CapEff|NoNewPrivs|Seccomp):";
        let rights = image.run(options, &["grep", "-E", what, "/proc/1/status"]).succeeded();
        let rights: Vec<&str> = rights.out.split_whitespace().collect();
        let none = "0000000000000000";
        let expected =
            ["Uid:", "65534", "65534", "65534", "65534", "CapEff:", none, "CapBnd:", none];
        assert_eq!(rights, [&expected[..], &["NoNewPrivs:", "1", "Seccomp:", "2"]].concat());
        let done = image.run(options, words).succeeded();
        for line in ["ib_write_bw, MB/s: ", "ib_send_lat, us: ", "1000 iters in ", "all of it ran"]
        {
            assert!(done.out.lines().any(|it| it.starts_with(line)), "{line}: {}", done.out);
        }
        // Without the libraries it fails: nothing of the machine's is in their place.
        fs::remove_file(image.root().join("opt/rocinante/libibverbs.so.1")).unwrap();
        image.run(options, words).failed(1, &["ib_write_bw: the client failed"]);
    });
}

/// The result of `perftest.sh` beside a `rocinante` that is a shell script with these cases.
fn script(of_programs: &str) -> Done {
    let folder = TempDir::new().unwrap();
    let program = folder.path().join("rocinante");
    let text = format!("#!/bin/sh\nshift 4\ncase $1 in\n{of_programs}\nesac\n");
    install_script(text, &program, 0o755);
    let mut sh = Command::new("sh");
    sh.arg(path("perftest.sh")).arg(folder.path()).stdin(Stdio::null());
    Running::start(&mut sh).finish()
}

#[test]
fn the_script_fails_where_figures_are_missing_or_bytes_are_wrong() {
    let write = "ib_write_bw) echo ' 65536  5000  9.0  8.5  0.01';;";
    let send = "ib_send_lat) echo ' 2  1000  3.0  9.0  4.0  5.0';;";
    let pingpong = "ibv_rc_pingpong) echo '1000 iters in 0.02 seconds = 23.50 usec/iter';;";
    let done = script(&[write, send, pingpong].join("\n")).succeeded();
    assert!(done.out.contains("ib_write_bw, MB/s: 8.5\n"), "{}", done.out);
    assert!(done.out.contains("ib_send_lat, us: 4.0\n"), "{}", done.out);
    let none = "ib_write_bw) echo ' 65536  5000  0.0  0.0  0.0';;";
    script(&[none, send, pingpong].join("\n")).failed(1, &["no ib_write_bw, MB/s"]);
    script(&[write, "ib_send_lat) ;;", pingpong].join("\n")).failed(1, &["no ib_send_lat, us"]);
    let status = "ib_send_lat) exit 3;;";
    script(&[write, status, pingpong].join("\n")).failed(1, &["ib_send_lat: the client failed"]);
    script(&[write, send].join("\n")).failed(1, &["no figures of ibv_rc_pingpong"]);
    let wrong = "ibv_rc_pingpong) echo 'invalid data in page 0'; echo '1000 iters';;";
    script(&[write, send, wrong].join("\n")).failed(1, &["other bytes came"]);
    // A client that comes before its server tries again.
    let early = "ib_write_bw) if [ \"$#\" = 4 ] && mkdir $0.late 2>/dev/null; then \
                 echo \"Couldn't connect\"; exit 1; fi; echo ' 65536  5000  9.0  8.5  0.01';;";
    let done = script(&[early, send, pingpong].join("\n")).succeeded();
    assert!(!done.out.contains("Couldn't"), "{}", done.out);
    // The server alone fails.
    let server = "ib_write_bw) [ \"$#\" = 4 ] || exit 4; echo ' 65536  5000  9.0  8.5  0.01';;";
    let done = script(&[server, send, pingpong].join("\n"));
    done.failed(1, &["ib_write_bw: the server failed with status 4"]);
}
