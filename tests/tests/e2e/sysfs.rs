//! The files below /sys/class/infiniband under `rocinante run`: each test with the tree mounted,
//! and by the preloaded library alone, as without the right to mount.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_lab::{Container, LabConfig, Pair};
use rocinante_tests::harness::Backend;
use rocinante_tests::running::{Done, Running, open_to_all};
use rocinante_tests::{need, require};
use tempfile::TempDir;

/// An installation in a folder of its own.
struct Installed(TempDir);

/// How programs get at the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Mounted,
    /// Without CAP_SYS_ADMIN, which mounting takes.
    Preloaded,
}

const WAYS: [Way; 2] = [Way::Mounted, Way::Preloaded];

impl Installed {
    fn new() -> Self {
        let installed = Self(open_to_all());
        let built = std::env::current_exe().unwrap();
        for (from, to) in [
            (PathBuf::from(env!("CARGO_BIN_EXE_rocinante-under-test")), "rocinante"),
            // Cargo builds them beside this program.
            (built.with_file_name("librocinante_ibverbs.so"), "libibverbs.so.1"),
            (built.with_file_name("librocinante_paths.so"), "librocinante_paths.so"),
        ] {
            // By another process: a child that another test starts meanwhile would hold this one's
            // descriptor, and a file that can be written to does not start (ETXTBSY).
            let copied =
                Command::new("cp").arg(from).arg(installed.0.path().join(to)).status().unwrap();
            assert!(copied.success());
        }
        installed
    }

    /// Compiles a C program.
    fn compiled(&self, name: &str, more: &[&str]) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/capi").join(name);
        let program = self.0.path().join(format!("{name}{}", more.concat()));
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Werror"]).args(more).arg(source).arg("-o").arg(&program);
        assert!(cc.status().unwrap().success(), "{cc:?}");
        program.display().to_string()
    }

    /// `rocinante run WORDS`.
    fn command(&self, way: Way, words: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        if way == Way::Preloaded {
            command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]);
        }
        command.arg(self.0.path().join("rocinante")).arg("run").args(words);
        command
            .env("XDG_RUNTIME_DIR", self.0.path())
            .env("ROCINANTE_NETDEV", "udp")
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn start(&self, way: Way, at: &Container, words: &[&str]) -> Running {
        Running::of(at.spawn(&mut self.command(way, words)).unwrap())
    }

    fn run(&self, way: Way, at: &Container, words: &[&str]) -> Done {
        self.start(way, at, words).finish()
    }

    fn prints(&self, way: Way, at: &Container, script: &str) -> String {
        let done = self.run(way, at, &["--", "sh", "-c", script]).succeeded();
        assert_eq!(done.err, "", "{script}: {}", done.out);
        done.out
    }
}

fn pair() -> Pair {
    let pair = Pair::new(&LabConfig::default()).unwrap();
    for container in pair.containers() {
        sh(container, "ip link set eth0 addrgenmode none; ip -6 address flush dev eth0");
    }
    pair
}

fn sh(at: &Container, script: &str) {
    let done = at.output(Command::new("sh").args(["-ec", script])).unwrap();
    assert!(done.status.success(), "{script}: {done:?}");
}

const PATHS: &str = "\
/sys/class/infiniband is /sys/class/infiniband
/sys/class/infiniband/roce0 is /sys/devices/rocinante/roce0/infiniband/roce0
/sys/class/infiniband/roce0/ is /sys/devices/rocinante/roce0/infiniband/roce0
/sys/class/infiniband/roce0/.. is /sys/devices/rocinante/roce0/infiniband
/sys/class/infiniband/roce0/../roce0 is /sys/devices/rocinante/roce0/infiniband/roce0
/sys/class/infiniband/roce0/device is /sys/devices/rocinante/roce0
/sys/class/infiniband/roce0/device/../.. is /sys/devices
/sys/class/infiniband/roce0/subsystem is /sys/class/infiniband
/sys/class/infiniband/roce0/ports/1/../../.. is /sys/devices/rocinante/roce0/infiniband
/sys/class/infiniband/../net is /sys/class/net
//sys/class/infiniband is /sys/class/infiniband
/sys/./class/infiniband is /sys/class/infiniband
/sys//class//infiniband/ is /sys/class/infiniband
/usr/../sys/class/infiniband is /sys/class/infiniband
/sys/class/net/../infiniband/roce0 is /sys/devices/rocinante/roce0/infiniband/roce0
/sys/class/infiniband/nosuch is nothing
/sys/class/infiniband/nosuch/.. is nothing
/sys/devices/rocinante/roce0/infiniband_verbs/uverbs0/device/infiniband is \
/sys/devices/rocinante/roce0/infiniband
glob 0
/sys/class/infiniband/roce0/ports/1/state
/sys/class/infiniband/roce1/ports/1/state
glob 0 /sys/class/infiniband/roce0
nftw 0 several
fts calls it /sys/class/infiniband/roce0
fts several
statfs 0
fstatat 0 1
out of it 0
readlinkat ../../devices/rocinante/roce0/infiniband/roce0
inotify 1
chdir 0 0
chdir 0 0
in /sys/devices/rocinante/roce0/infiniband/roce0
out of it 0
short 0
fchdir 0 /sys/class/infiniband
relative /sys/devices/rocinante/roce0/infiniband
listed 2
listed 2
";

#[test]
fn paths_lead_where_sysfs_leads() {
    require!(need::lab());
    require!(need::machine_root());
    require!(need::program("cc"));
    let (installed, pair) = (Installed::new(), pair());
    let [a, _] = pair.containers();
    let program = installed.compiled("paths.c", &[]);
    for way in WAYS {
        let done = installed.run(way, a, &["--", &program]).succeeded();
        assert_eq!(done.out, PATHS, "{way:?}: {}", done.err);
    }
    // A program that no library reaches sees the same, or the reason is printed.
    for kind in ["-static", "-static-pie"] {
        let program = installed.compiled("paths.c", &[kind]);
        let done = installed.run(Way::Mounted, a, &["--", &program]).succeeded();
        assert_eq!(done.out, PATHS, "{kind}");
        assert!(done.err.contains("is linked statically: it finds the devices"), "{}", done.err);
        installed.run(Way::Preloaded, a, &["--", &program]).failed(126, &["is linked statically"]);
    }
    let said = installed.run(Way::Preloaded, a, &["-v", "--", "true"]).succeeded().err;
    assert!(said.contains("programs in Go and static ones do not see it"), "{said}");
    // The mount is the program's own.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(installed.0.path().to_str().unwrap()), "{mounts}");
}

/// A name belongs to its port, for the verbs and for files alike, while interfaces come and go
/// during the shell that `rocinante run` has begun.
#[test]
fn ports_that_come_and_go_are_followed() {
    require!(need::lab());
    require!(need::machine_root());
    require!(need::program("ibv_devices"));
    for way in WAYS {
        let (installed, pair) = (Installed::new(), pair());
        let [a, _] = pair.containers();
        let of_verbs = "ibv_devices | awk 'NR > 2 { print $1 }'";
        let of_files =
            "for d in /sys/class/infiniband/*; do echo ${d##*/} $(ls $d/device/net); done";
        let gids = "cd /sys/class/infiniband/roce2/ports/1/gids && \
            grep -l ffff: * | while read i; do echo $i $(cat $i ../gid_attrs/ndevs/$i); done";
        let script = format!(
            "{of_verbs}; {of_files}
             ip link add d0 type veth peer name d1
             ip link set d0 addrgenmode none; ip link set d1 addrgenmode none
             ip address add 10.9.0.1/24 dev d0; ip link set d1 up; ip link set d0 up
             ip route add default via 10.9.0.7
             echo came; {of_verbs}; {of_files}
             ip address add 10.9.5.2/24 dev d0; ({gids})
             ip address del 10.9.0.1/24 dev d0; ({gids})
             ibv_devinfo -v -d roce2 | awk '/GID/ {{ print $2, $3 }}'
             ip link set d0 name d9; ({gids}); {of_files}
             ip link del d9
             echo went; {of_verbs}; {of_files}; ls /sys/devices/rocinante
             ip link add d0 type veth peer name d1; ip address add 10.9.0.1/24 dev d0
             echo again; {of_verbs}; {of_files}; ls /sys/class/infiniband_verbs"
        );
        let expected = "\
roce0\nroce1\nroce0 eth0\nroce1 lo
came\nroce0\nroce1\nroce2\nroce0 eth0\nroce1 lo\nroce2 d0
0 0000:0000:0000:0000:0000:ffff:0a09:0001 d0\n1 0000:0000:0000:0000:0000:ffff:0a09:0502 d0
1 0000:0000:0000:0000:0000:ffff:0a09:0502 d0\n1]: ::ffff:10.9.5.2,
1 0000:0000:0000:0000:0000:ffff:0a09:0502 d9\nroce0 eth0\nroce1 lo\nroce2 d9
went\nroce0\nroce1\nroce0 eth0\nroce1 lo\nroce0\nroce1
again\nroce0\nroce1\nroce3\nroce0 eth0\nroce1 lo\nroce3 d0
abi_version\nuverbs0\nuverbs1\nuverbs3\n";
        // A link that is renamed while it is up is from Linux 6.2 on.
        let script = script.replace(
            "ip link set d0 name d9",
            "ip link set d0 down; ip link set d0 name d9; ip link set d9 up",
        );
        assert_eq!(installed.prints(way, a, &script), expected, "{way:?}");
    }
}

/// The guardian keeps the tree for a program that no library reaches.
#[test]
fn a_static_program_sees_a_port_that_comes() {
    require!(need::lab());
    require!(need::machine_root());
    require!(need::program("cc"));
    let (installed, pair) = (Installed::new(), pair());
    let [a, _] = pair.containers();
    let program = installed.compiled("waits.c", &["-static"]);
    let gid = "/sys/class/infiniband/roce2/ports/1/gids/0";
    let mut waits = installed.start(Way::Mounted, a, &["--", &program, gid]);
    waits.says("ready");
    sh(a, "ip link add d0 type veth peer name d1; ip address add 10.9.0.1/24 dev d0");
    let done = waits.finish().succeeded();
    assert!(done.out.contains("0000:ffff:0a09:0001"), "{}{}", done.out, done.err);
}

/// Programs that describe devices by files alone.
#[test]
fn programs_that_read_files_describe_the_devices() {
    require!(need::lab());
    require!(need::machine_root());
    let (installed, pair) = (Installed::new(), pair());
    let [a, _] = pair.containers();
    require!(need::program("ibstat"));
    require!(need::program("ibstatus"));
    require!(need::program("lstopo"));
    for (program, words) in [
        ("ibstat", &["CA 'roce0'", "State: Active", "Link layer: Ethernet"][..]),
        ("ibstatus", &["'roce0' port 1 status", "10 Gb/sec (1X FDR10)", "4: ACTIVE"]),
        ("lstopo --of console --whole-io", &["OpenFabrics \"roce0\""]),
    ] {
        for way in WAYS {
            let done = installed.run(way, a, &["--", "sh", "-c", program]).succeeded();
            for word in words {
                assert!(done.out.contains(word), "{way:?} {program}: {}{}", done.out, done.err);
            }
        }
    }
}

/// The counters of a port are those of all processes that use it, are live, and stay when the
/// processes are gone.
#[test]
fn counters_are_live_and_of_all_processes() {
    require!(need::lab());
    require!(need::machine_root());
    require!(need::program("ib_write_bw"));
    let (installed, pair) = (Installed::new(), pair());
    let [a, b] = pair.containers();
    let server_at = b.ipv4().to_string();
    let counter = |way, at: &Container, name: &str| -> u64 {
        let path = format!("/sys/class/infiniband/roce0/ports/1/{name}");
        installed.prints(way, at, &format!("cat {path}")).trim().parse().unwrap()
    };
    let mut sum = 0;
    for way in WAYS {
        let server = ["--", "ib_write_bw", "-d", "roce0", "-s", "65536", "-n", "200"];
        let names = "counters/port_xmit_data,hw_counters/sent_pkts";
        let client = [&server[..], &["-W", names, &server_at]].concat();
        let begin = Instant::now();
        let done = loop {
            let server = installed.start(way, b, &server);
            let done = installed.run(way, a, &client);
            if done.status == 0 {
                server.finish().succeeded();
                break done;
            }
            // It did not listen yet.
            drop(server);
            assert!(begin.elapsed() < Duration::from_secs(60), "{}{}", done.out, done.err);
        };
        let words_sent = 65536 / 4 * 200;
        let prefix = "counters/port_xmit_data=";
        let shown = done.out.lines().find_map(|line| line.trim().strip_prefix(prefix));
        let shown: u64 = shown.unwrap_or_default().trim().parse().unwrap_or_default();
        assert!(shown >= words_sent, "{way:?}: {shown}: {}", done.out);
        // Another process, after that one has gone.
        sum += words_sent;
        for way in WAYS {
            let sent = counter(way, a, "counters/port_xmit_data");
            assert!(sent >= sum, "{way:?}: {sent} of {sum}");
            assert!(counter(way, b, "counters/port_rcv_data") >= sum);
            assert!(counter(way, b, "hw_counters/rcvd_pkts") > 0);
        }
    }
}

/// What goes to groups and what goes to one receiver count apart, and all of it as packets; on
/// `packet` groups have a socket of their own.
#[test]
fn packets_to_groups_are_counted_apart_udp() {
    require!(need::lab());
    packets_to_groups_are_counted_apart("udp");
}

#[test]
fn packets_to_groups_are_counted_apart_packet() {
    require!(need::backend(Backend::Packet));
    packets_to_groups_are_counted_apart("packet");
}

fn packets_to_groups_are_counted_apart(netdev: &str) {
    require!(need::machine_root());
    require!(need::program("mckey"));
    require!(need::program("ibv_rc_pingpong"));
    let (installed, pair) = (Installed::new(), pair());
    let [a, b] = pair.containers();
    let start = |at: &Container, script: &str| {
        let mut command = installed.command(Way::Mounted, &["--", "sh", "-c", script]);
        Running::of(at.spawn(command.env("ROCINANTE_NETDEV", netdev)).unwrap())
    };
    let counters = |at: &Container| -> [u64; 7] {
        const NAMES: [&str; 7] = [
            "port_xmit_packets",
            "unicast_xmit_packets",
            "multicast_xmit_packets",
            "port_rcv_packets",
            "unicast_rcv_packets",
            "multicast_rcv_packets",
            "port_xmit_discards",
        ];
        let script =
            format!("cd /sys/class/infiniband/roce0/ports/1/counters && cat {}", NAMES.join(" "));
        let text = installed.prints(Way::Mounted, at, &script);
        let all: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
        all.try_into().unwrap()
    };
    let [groups_a, groups_b] = [a, b].map(|at| format!("mckey -m 239.1.1.1 -b {}", at.ipv4()));
    let mut receiver = start(b, &groups_b);
    let mut rounds = 0;
    // Each round sends ten messages, and the receiver ends with its tenth: it may join late.
    while receiver.child.child_mut().try_wait().unwrap().is_none() {
        assert!(rounds < 100, "no message arrives");
        start(a, &format!("{groups_a} -s")).finish().succeeded();
        rounds += 1;
    }
    receiver.finish().succeeded();
    let [sender, receiver] = [a, b].map(counters);
    assert_eq!(sender[2], 10 * rounds, "{sender:?}");
    assert!((10..=10 * rounds).contains(&receiver[5]), "{receiver:?} of {rounds}");
    assert_eq!(receiver[2], 0, "{receiver:?}");
    // To one receiver.
    let begin = Instant::now();
    loop {
        let server = start(b, "exec ibv_rc_pingpong -g 0 -n 100");
        if start(a, &format!("ibv_rc_pingpong -g 0 -n 100 {}", b.ipv4())).finish().status == 0 {
            server.finish().succeeded();
            break;
        }
        // It did not listen yet.
        drop(server);
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    for (at, before) in [(a, sender), (b, receiver)] {
        let after = counters(at);
        assert_eq!((after[2], after[5]), (before[2], before[5]), "{before:?} {after:?}");
        assert!(after[1] >= before[1] + 100 && after[4] >= before[4] + 100, "{after:?}");
        assert_eq!((after[1] + after[2], after[4] + after[5]), (after[0], after[3]), "{after:?}");
        assert_eq!(after[6], 0, "{after:?}");
    }
}
