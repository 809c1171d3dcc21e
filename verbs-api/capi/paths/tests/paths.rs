//! The library, preloaded into programs that read paths in every way that it knows.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A tree of its own, removed at the end.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let name = format!("rocinante-paths-{name}-{}", std::process::id());
        let tree = Self(std::env::temp_dir().join(name));
        let port = tree.0.join("sys/class/infiniband/x0/ports/1");
        let devices = tree.0.join("dev/infiniband");
        fs::create_dir_all(&port).unwrap();
        fs::create_dir_all(&devices).unwrap();
        fs::create_dir_all(tree.0.join("sys/class/infiniband_verbs/uverbs0")).unwrap();
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        symlink("/dev/null", devices.join("uverbs0")).unwrap();
        tree
    }

    /// A shell with the library, which leads into this tree.
    fn shell(&self, script: &str) -> Output {
        let mut library = std::env::current_exe().unwrap();
        // Cargo built it beside this program.
        library.set_file_name("librocinante_paths.so");
        assert!(library.is_file(), "{}", library.display());
        let mut shell = plain(script);
        shell.env("LD_PRELOAD", library).env("ROCINANTE_PATHS", &self.0).output().unwrap()
    }

    /// Each file with all that can be changed of it.
    fn list(&self) -> String {
        let mut list = Command::new("find");
        let listed = list.arg(&self.0).args(["-printf", "%p %m %u %g %T@ %s\n"]).output();
        String::from_utf8(listed.unwrap().stdout).unwrap()
    }

    #[track_caller]
    fn prints(&self, script: &str, expected: &str) {
        let output = self.shell(script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{script}: {said}");
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn plain(script: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("LC_ALL", "C").stdin(Stdio::null());
    shell
}

#[test]
fn programs_find_the_tree() {
    let tree = Tree::new("find");
    tree.prints("cat /sys/class/infiniband/x0/ports/1/state", "4: ACTIVE\n");
    tree.prints("read line < /sys/class/infiniband/x0/ports/1/state; echo $line", "4: ACTIVE\n");
    tree.prints(
        "ls /sys/class/infiniband /sys/class/infiniband_verbs/",
        "\
        /sys/class/infiniband:\nx0\n\n/sys/class/infiniband_verbs/:\nuverbs0\n",
    );
    tree.prints("echo /sys/class/infiniband/*/ports/*", "/sys/class/infiniband/x0/ports/1\n");
    let device = "/dev/infiniband/uverbs0";
    tree.prints(&format!("[ -c {device} ] && [ -r {device} ] && [ -w {device} ] && echo y"), "y\n");
    tree.prints(
        &format!("readlink {device}; stat -L -c %F {device}"),
        "/dev/null\n\
        character special file\n",
    );
    tree.prints("cd /sys/class/infiniband/x0 && cat ports/1/state", "4: ACTIVE\n");
    // The tree itself is not seen, and `ls -l` finds no fault with its files.
    let path = "/sys/class/infiniband/x0";
    tree.prints(
        &format!("realpath {path}/ports/.. 2>&1; readlink -f {path}"),
        &format!(
            "\
        {path}\n{path}\n"
        ),
    );
    // The tree lies over the machine's own files.
    let state = "infiniband/x0/ports/1/state";
    for way in [
        format!("cat /sys/./class//{state}"),
        format!("cat //sys/class/net/../{state}"),
        format!("cat /usr/../sys/class/{state}"),
        format!("cd /sys/class && cat {state}"),
        format!("cd /sys/class/net && cat ../{state}"),
        "cd /sys/class/infiniband/x0/ports && cat ../ports/1/state".to_owned(),
        "cd / && cat sys/class/infiniband/*/ports/1/state".to_owned(),
    ] {
        tree.prints(&way, "4: ACTIVE\n");
    }
    let lo = fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
    for way in ["/sys/class/infiniband/../net", "/dev/infiniband/../../sys/class/net"] {
        tree.prints(&format!("cat {way}/lo/mtu"), &lo);
    }
    tree.prints("cd /sys/class/infiniband/x0 && cat ../../net/lo/mtu", &lo);
    tree.prints("cd /sys/class/infiniband/x0/ports && pwd -P", &format!("{path}/ports\n"));
    tree.prints("ls /sys/class | grep infiniband_v", "infiniband_verbs\n");
    tree.prints("ls -d /sys/class/*/x0", "/sys/class/infiniband/x0\n");
    tree.prints("cat /sys/class/infiniband/nosuch/../x0/node_type; ls /dev/infinib*", "uverbs0\n");
    tree.prints("stat -f -c %T /sys/class/infiniband", "sysfs\n");
    let long = tree.shell("ls -lR /sys/class/infiniband /dev/infiniband");
    assert!(long.status.success() && long.stderr.is_empty(), "{long:?}");
}

/// Changes fail by every path there, for root too.
#[test]
fn the_tree_cannot_be_changed() {
    let tree = Tree::new("change");
    let list = || tree.list();
    let before = list();
    for script in [
        ": > state",
        "echo junk >> state",
        "echo x > new",
        "chmod 600 state",
        "chown 1 state",
        "touch state",
        "truncate -s 0 state",
        "rm -f state",
        "mv state other",
        "f=$(mktemp) && mv $f state; failed=$?; rm -f $f; exit $failed",
        "ln state other",
        "ln -s state other",
        "mkdir other",
        "mkfifo other",
        "rm -r ../1",
        "rmdir ../../../../infiniband_verbs/uverbs0",
        "touch -h /dev/infiniband/uverbs0",
    ] {
        let (cd, port) = ("cd /sys/class", "infiniband/x0/ports/1");
        let by_path = script.replace("state", &format!("/sys/class/{port}/state"));
        for script in
            [format!("{cd}/{port} && {script}"), format!("{cd}/{port}/.. && cd 1; {by_path}")]
        {
            let output = tree.shell(&script);
            assert_ne!(output.status.code(), Some(0), "{script}");
            let said = String::from_utf8_lossy(&output.stderr);
            let is_owners = ["chmod", "chown"].iter().any(|it| script.contains(it));
            let word = if is_owners { "Operation not permitted" } else { "Permission denied" };
            assert!(said.contains(word), "{script}: {said}");
            assert!(list() == before, "{script}");
        }
    }
    // As the kernel has it: ENOENT and EEXIST come before EACCES.
    let port = "/sys/class/infiniband/x0/ports/1";
    for (script, words) in [
        ("rm none", "No such file"),
        ("mv none other", "No such file"),
        ("chmod 600 none", "No such file"),
        ("truncate -c -s 1 none && mkdir ../1", "File exists"),
        ("mkdir /dev/infiniband", "File exists"),
        ("ln -s x state", "File exists"),
    ] {
        let output = tree.shell(&format!("cd {port} && {script}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{script}: {said}");
    }
    for file in ["state", "."] {
        tree.prints(
            &format!("cd {port} && if test -w {file}; then echo y; else echo n; fi"),
            "n\n",
        );
    }
    tree.prints("cd /sys/class/infiniband/x0 && : > /dev/infiniband/uverbs0 && echo y", "y\n");
}

/// Changes through an open file fail as an ordinary user's do in the kernel's own tree. The second
/// column is from Linux 6.18.
#[test]
fn an_open_file_of_the_tree_cannot_be_changed() {
    if !has_python("an_open_file_of_the_tree_cannot_be_changed") {
        return;
    }
    let tree = Tree::new("open");
    let before = tree.list();
    let state = "/sys/class/infiniband/x0/ports/1/state";
    let calls = [
        ("os.fchmod(file, 0o600)", "EPERM"),
        ("os.fchown(file, 1, 1)", "EPERM"),
        ("os.utime(file, (1, 1))", "EPERM"),
        ("os.utime(file)", "EACCES"),
        ("os.setxattr(file, b'user.x', b'1')", "EACCES"),
        ("os.removexattr(file, b'user.x')", "EACCES"),
        ("os.ftruncate(file, 0)", "EINVAL"),
        ("os.posix_fallocate(file, 0, 9)", "EBADF"),
        ("os.write(file, b'x')", "EBADF"),
        ("os.fchmod(folder, 0o700)", "EPERM"),
        ("os.fchown(folder, 1, 1)", "EPERM"),
        ("os.utime(folder, (1, 1))", "EPERM"),
        // By the name that an open file has.
        ("os.chmod(f'/proc/self/fd/{file}', 0o600)", "EPERM"),
        ("os.utime(f'/dev/fd/{file}')", "EACCES"),
        ("os.truncate(f'/proc/{os.getpid()}/fd/{file}', 0)", "EACCES"),
        ("open(f'/proc/thread-self/fd/{file}', 'w')", "EACCES"),
        ("os.chmod(f'/proc/self/fd/{folder}/state', 0o600)", "EPERM"),
        // AT_EMPTY_PATH, and no path.
        ("at(libc.fchownat(file, b'', 1, 1, 0x1000))", "EPERM"),
        ("at(libc.fchmodat(file, b'', 0o600, 0x1000))", "EPERM"),
        ("at(libc.utimensat(file, b'', times, 0x1000))", "EPERM"),
        ("at(libc.futimesat(folder, None, None))", "EACCES"),
        // Reading goes on, and other files are not concerned.
        ("os.pread(file, 2, 0) == b'4:' or at(-1)", "0"),
        ("open(f'/proc/self/fd/{file}').read(2) == '4:' or at(-1)", "0"),
        ("os.fchmod(other, 0o600)", "0"),
        ("os.utime(other, (1, 1))", "0"),
        ("os.chmod(f'/proc/self/fd/{other}', 0o640)", "0"),
        ("at(libc.utimensat(other, b'', None, 0x1000))", "0"),
    ];
    let mut script = format!(
        "
import ctypes as c, errno, os, tempfile
libc = c.CDLL(None, use_errno=True)
file = os.open('{state}', os.O_RDONLY)
folder, kept = os.open(os.path.dirname('{state}'), os.O_RDONLY), tempfile.TemporaryFile()
other, times = kept.fileno(), (c.c_long * 4)(1, 0, 1, 0)
def at(status):
    if status: raise OSError(c.get_errno(), '')
def errno_of(call):
    try: call()
    except OSError as error: return errno.errorcode[error.errno]
    return 0
"
    );
    let mut expected = String::new();
    for (nth, (call, errno)) in calls.iter().enumerate() {
        script += &format!("print({nth}, errno_of(lambda: {call}))\n");
        expected += &format!("{nth} {errno}\n");
    }
    tree.prints(&format!("{PYTHON} - <<'END'\n{script}\nEND"), &expected);
    assert_eq!(tree.list(), before);
}

const PYTHON: &str = "/usr/bin/python3";

fn has_python(test: &str) -> bool {
    let has_it = Command::new(PYTHON).arg("-V").output().is_ok();
    if !has_it {
        println!("SKIPPED paths::{test}: no {PYTHON}: apt install python3");
    }
    has_it
}

#[test]
fn python_finds_the_tree() {
    if !has_python("python_finds_the_tree") {
        return;
    }
    let python = PYTHON;
    let tree = Tree::new("python");
    let script = "import os; c = '/sys/class/infiniband'; d = '/dev/infiniband/uverbs0'; \
        print(os.listdir(c), next(os.scandir(c)).is_dir(), os.access(d, os.R_OK | os.W_OK), \
        os.path.realpath(c), open(c + '/x0/ports/1/state').read().strip())";
    tree.prints(
        &format!("{python} -c \"{script}\""),
        "['x0'] True True /sys/class/infiniband 4: ACTIVE\n",
    );
    // Functions of libc that no command here calls: the kinds are FTS_D, FTS_SL and FTS_SL.
    symlink("x0", tree.0.join("sys/class/infiniband/x1")).unwrap();
    let script = "
import ctypes as c, os, platform
libc = c.CDLL(None)
libc.fts_open.restype = libc.fts_read.restype = c.c_void_p
libc.getwd.restype = c.c_char_p
many = c.c_ulong if platform.machine() == 'x86_64' else c.c_uint
class Entry(c.Structure):
    _fields_ = [('pointers', c.c_void_p * 7), ('numbers', c.c_int * 2), ('lens', c.c_ushort * 2),
        ('ino', c.c_ulong), ('dev', c.c_ulong), ('links', many), ('level', c.c_short),
        ('info', c.c_ushort)]
roots = (c.c_char_p * 2)(b'/sys/class/infiniband/x1', None)
def kind(options):
    return Entry.from_address(libc.fts_read(c.c_void_p(libc.fts_open(roots, options, None)))).info
print(kind(2), kind(16), kind(16 | 4))
found = (c.c_void_p * 9)()
print(libc.glob(b'/s*s/class/infini*d/*0/ports', 0, None, found), c.string_at(
    c.c_void_p.from_address(found[1]).value).decode())
os.chdir('/sys/class/infiniband/x0')
print(libc.getwd(c.create_string_buffer(4096)).decode())
";
    tree.prints(
        &format!("{python} -c \"{script}\""),
        "1 12 12\n0 /sys/class/infiniband/x0/ports\n/sys/class/infiniband/x0\n",
    );
}

/// Output, errors and status are the same with the library and without.
#[test]
fn other_paths_stay_as_they_are() {
    let tree = Tree::new("others");
    for script in [
        "ls -l /sys/class/net /etc/ /dev/pts; stat -c '%n %s %i' /etc/passwd /; exit 5",
        "cat /nowhere /etc/hostname; echo $?; readlink /proc/self/exe; realpath /sys/class/net/lo",
        "cd /usr/bin/../lib && pwd -P; [ -e /dev/null ] && [ ! -e /dev/infinibandage ] && echo y",
        "cd /sys/class/net && cat lo/mtu ../net/lo/mtu; pwd -P; ls .. | grep -c '^net$'",
        "find /etc -maxdepth 1 -name 'host*' | sort; cat ''; ls /dev/infinibandage",
        "d=$(mktemp -d) && cd $d && echo a > b && ln -s b c && cat c && stat -c %F c && rm -r $d",
    ] {
        let (with, without) = (tree.shell(script), plain(script).output().unwrap());
        let parts = |output: Output| {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        assert_eq!(parts(with), parts(without), "{script}");
    }
}
