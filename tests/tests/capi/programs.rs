//! The devices that `capi`'s library reports, and its answers to wrong calls, as an ordinary user
//! in a container. `dropin.rs` has the programs that send.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante_dropin::row::listens_on;
use rocinante_lab::{Container, LabConfig, Pair};
use rocinante_tests::capi::{Library, NOBODY, librdmacm};
use rocinante_tests::harness::Backend;
use rocinante_tests::running::{Done, Running};
use rocinante_tests::{need, on_backends, require};

/// Starts a ping-pong's client anew until its server listens, and returns the client's result.
fn once_it_listens(mut client: impl FnMut() -> Running) -> Done {
    let begin = Instant::now();
    loop {
        let done = client().finish();
        if !done.err.contains("Couldn't connect") {
            return done.succeeded();
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "the server does not listen");
    }
}

fn pair() -> Pair {
    Pair::new(&LabConfig::default()).unwrap()
}

#[test]
fn devices_are_listed_and_described_and_nothing_is_opened() {
    require!(need::lab());
    require!(need::program("ibv_devinfo"));
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let list = library.run(a, "ibv_devices").succeeded().out;
    let names: Vec<&str> =
        list.lines().skip(2).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["roce0", "roce1"], "{list}");
    // The port of RoCE is taken, and the questions are answered all the same.
    let taken = a.run(|| std::net::UdpSocket::bind((a.ipv4(), 4791)).unwrap()).unwrap();
    let told = library.run(a, "ibv_devinfo -v -d roce0").succeeded().out;
    drop(taken);
    for words in ["PORT_ACTIVE (4)", "active_mtu:\t\t4096 (5)", "RoCE v2", "max_qp:\t\t\t\t16384"] {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    let [c, d] = [a.ipv4().octets()[2], a.ipv4().octets()[3]];
    let gid = format!("::ffff:{}.{}.{c}.{d}", a.ipv4().octets()[0], a.ipv4().octets()[1]);
    assert!(told.contains(&gid), "no {gid} in {told}");
    // A chosen device under a chosen name.
    let mut command = library.command("ibv_devices");
    let named = command.env("ROCINANTE_DEVICES", "lo=mlx5_0");
    let list = String::from_utf8(a.output(named).unwrap().stdout).unwrap();
    assert!(list.contains("mlx5_0") && !list.contains("roce"), "{list}");
}

/// A test of each row: a script in Python finds all as expected.
macro_rules! scripts {
    ($( $(#[$doc:meta])* $name:ident: $script:literal; )*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            require!(need::lab());
            require!(need::program("python3"));
            all_as_expected($script);
        }
    )*};
}

scripts! {
    /// Calls with invalid arguments: an error each, and the program goes on.
    bad_arguments_get_the_errno_of_the_manual: "misuse.py";
    /// Objects that are gone or of another context, and bits of masks and flags that no call knows.
    objects_and_masks_that_a_call_does_not_take_are_refused: "objects.py";
    /// Calls that no program of the other tests makes, each with valid and invalid arguments.
    rare_calls_give_what_the_manual_says: "calls.py";
    transitions_take_what_the_kernels_table_has_and_queries_give_it_back: "states.py";
    limits_can_be_reached_at_once: "limits.py";
    a_port_that_a_fault_takes_down_says_so: "down.py";
    signals_interrupt_calls_that_block_and_flags_are_obeyed: "signals.py";
    a_child_keeps_nothing_of_its_parent_alive_and_starts_clean: "forked.py";
    a_child_lists_opens_and_ends_whatever_threads_held_at_the_fork: "forking.py";
}

fn all_as_expected(script: &str) {
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    // IPv6 addresses come late, and are an event.
    for words in ["link set eth0 addrgenmode none", "-6 addr flush dev eth0"] {
        let done = a.output(Command::new("ip").args(words.split(' '))).unwrap();
        assert!(done.status.success(), "ip {words}: {done:?}");
    }
    let done = library.run(a, &library.script(script)).succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}{}", done.out, done.err);
}

#[test]
fn an_open_device_takes_the_mtu_that_its_port_says() {
    require!(need::lab());
    require!(need::program("python3"));
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let set_mtu = |mtu| a.netns().ip(&["link", "set", "eth0", "mtu", mtu]).unwrap();
    set_mtu("1500");
    let mut program = library.start(a, &library.script("mtu.py")).that_says("ready");
    set_mtu("4200");
    program.child.signal(Signal::SIGUSR1);
    let done = program.finish().succeeded();
    assert_eq!(done.out, "all as expected\n", "{}", done.err);
}

/// Two contexts that make no object hear of their port, each by itself.
#[test]
fn contexts_without_objects_hear_of_their_port() {
    require!(need::lab());
    require!(need::program("python3"));
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let own = a.ipv4().to_string();
    let ip = |words: &str| {
        let done = a.output(Command::new("ip").args(words.split(' '))).unwrap();
        assert!(done.status.success(), "ip {words}: {done:?}");
    };
    // IPv6 addresses come and go with the link.
    ip("link set eth0 addrgenmode none");
    ip("-6 addr flush dev eth0");
    ip("address add 10.99.1.1/24 dev eth0");
    let mut program = library.start(a, &library.script("events.py"));
    program.says(&format!("ready 0={own} 1=10.99.1.1"));
    for (change, event, table) in [
        ("link set eth0 down", 10, "0=OWN 1=10.99.1.1"),
        ("link set eth0 up", 9, "0=OWN 1=10.99.1.1"),
        ("address add 10.99.2.1/24 dev eth0", 18, "0=OWN 1=10.99.1.1 2=10.99.2.1"),
        ("address del 10.99.1.1/24 dev eth0", 18, "0=OWN 2=10.99.2.1"),
        ("address add 10.99.3.1/24 dev eth0", 18, "0=OWN 1=10.99.3.1 2=10.99.2.1"),
    ] {
        ip(change);
        let mut missing = [0, 1]
            .map(|context| Some(format!("{context} ({event}) {}", table.replace("OWN", &own))));
        program.hears(change, |line| {
            for wanted in &mut missing {
                wanted.take_if(|wanted| *wanted == line);
            }
            missing.iter().all(Option::is_none)
        });
    }
}

/// The last acknowledgement leaves, whichever way a program ends, and whether or not the peer asked
/// for it; at `_exit(2)` by the library of paths, which `rocinante run` preloads too.
#[test]
fn the_end_right_after_the_last_completion_leaves_the_peer_no_error() {
    require!(need::lab());
    require!(need::program("python3"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let script = library.script("pong.py");
    let ways = [("return", 40), ("exit", 40), ("_exit", 200), ("quiet", 10), ("forked", 10)];
    for (how, rounds) in ways {
        let server = library.start(b, &format!("{script} server - 0 {how}")).that_says("ready");
        let mut client = library.command(&format!("{script} client {} {rounds} {how}", b.ipv4()));
        if how == "_exit" {
            let preload = [library.path().join("libibverbs.so.1"), library.copy_of_paths()];
            let [verbs, paths] = preload.map(|path| path.display().to_string());
            client.env("LD_PRELOAD", format!("{verbs}:{paths}"));
        }
        let done = a.output(&mut client).unwrap();
        assert!(done.status.success(), "{how}: {done:?}");
        let done = server.finish().succeeded();
        assert!(done.out.starts_with("0 errors"), "{how}: {}{}", done.out, done.err);
    }
}

const HOLD: &str = "\
import ctypes as c
lib = c.CDLL('libibverbs.so.1')
lib.ibv_get_device_list.restype = lib.ibv_open_device.restype = c.c_void_p
lib.ibv_create_comp_channel.restype = c.c_void_p
devices = lib.ibv_get_device_list(None)
for index in 0, 1, 0:
    device = c.c_void_p.from_address(devices + 8 * index)
    context = c.c_void_p(lib.ibv_open_device(device))
    assert lib.ibv_create_comp_channel(context)
print('done')
";

const CLOSE_AND_FORK: &str = "\
import ctypes as c, os
lib = c.CDLL('libibverbs.so.1')
lib.ibv_get_device_list.restype = lib.ibv_open_device.restype = c.c_void_p
lib.ibv_create_comp_channel.restype = c.c_void_p
devices = lib.ibv_get_device_list(None)
context = c.c_void_p(lib.ibv_open_device(c.c_void_p.from_address(devices)))
channel = c.c_void_p(lib.ibv_create_comp_channel(context))
assert not lib.ibv_destroy_comp_channel(channel) and not lib.ibv_close_device(context)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print('done')
";

/// Two devices, one of them opened twice: each is counted once, whether its contexts were closed
/// before the exit or are open still, and by its own process alone.
#[test]
fn counters_are_printed_once_at_the_exit() {
    require!(need::lab());
    require!(need::program("python3"));
    require!(need::program("ibv_rc_pingpong"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    for (words, devices) in [(HOLD, &["roce0", "roce1"][..]), (CLOSE_AND_FORK, &["roce0"])] {
        let script = library.path().join("script.py");
        fs::write(&script, words).unwrap();
        let mut command = library.command(&format!("/usr/bin/python3 {}", script.display()));
        command.env("ROCINANTE_COUNTERS", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        let done = Running::of(a.spawn(&mut command).unwrap()).finish().succeeded();
        assert_eq!(done.out, "done\n");
        for device in devices {
            let head = format!("counters of {device} (");
            assert_eq!(done.err.matches(&head).count(), 1, "{}", done.err);
        }
    }
    // A program that sends something, and closes all that it opened.
    let server = library.start(b, "ibv_rc_pingpong -g 0 -n 10");
    let mut command = library.command(&format!("ibv_rc_pingpong -g 0 -n 10 {}", b.ipv4()));
    command.env("ROCINANTE_COUNTERS", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    let done = once_it_listens(|| Running::of(a.spawn(&mut command).unwrap()));
    let server = server.finish().succeeded();
    assert!(!server.err.contains("counters"), "{}", server.err);
    assert_eq!(done.err.matches("counters of").count(), 1, "{}", done.err);
    let count = |name: &str| -> u64 {
        let line = done.err.lines().find(|line| line.split_whitespace().next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {}", done.err));
        line.split_whitespace().next_back().unwrap().parse().unwrap()
    };
    assert!(count("transport.sent_pkts") >= 40 && count("port.rx_datagrams") >= 40, "{}", done.err);
}

/// librspreload and libvma take over the names of calls: they get the calls of the program alone.
#[test]
fn calls_that_a_preloaded_library_takes_over_are_not_used() {
    require!(need::lab());
    require!(need::program("cc"));
    require!(need::program("ibv_rc_pingpong"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let taken = library.compiled("taken.c", &["-shared", "-fPIC"]);
    let start = |at: &Container, line: &str| {
        let mut command = library.command(line);
        let ours = library.path().join("libibverbs.so.1");
        command.env("LD_PRELOAD", format!("{taken}:{}", ours.display()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(at.spawn(&mut command).unwrap())
    };
    let server = start(b, "ibv_rc_pingpong -g 0 -n 100 -c");
    once_it_listens(|| start(a, &format!("ibv_rc_pingpong -g 0 -n 100 -c {}", b.ipv4())));
    server.finish().succeeded();
}

#[test]
fn beside_a_program_that_has_afxdp_another_one_takes_packet_and_warns() {
    require!(need::backend(Backend::Xdp));
    require!(need::program("ibv_rc_pingpong"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let start = |at: &Container, netdev: &str, level: &str, line: &str| {
        let mut command = library.command(line);
        command.uid(0).gid(0).env("ROCINANTE_NETDEV", netdev).env("ROCINANTE_LOG", level);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(at.spawn(&mut command).unwrap())
    };
    let words = |port: u16| format!("ibv_rc_pingpong -g 0 -e -c -n 300 -p {port}");
    let mut first = start(b, "afxdp", "info", &words(18601));
    first.says("afxdp: asked for; bound UDP port 4791");
    let mut second = start(b, "afxdp", "warn", &words(18602));
    second.says("packet: not afxdp, because another process on");
    for port in [18602, 18601] {
        let client = format!("{} {}", words(port), b.ipv4());
        once_it_listens(|| start(a, "udp", "warn", &client));
    }
    for server in [first, second] {
        server.finish().succeeded();
    }
}

#[test]
fn the_log_says_what_is_bound_and_why_retries_are_exceeded() {
    require!(need::lab());
    require!(need::program("ibv_rc_pingpong"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let file = library.path().join("log");
    fs::write(&file, "before\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    let words = "ibv_rc_pingpong -g 0 -n 1000000000";
    let read = || fs::read_to_string(&file).unwrap();
    let bereaved = || {
        let mut server = library.start(b, words);
        listens_on(&mut server.child, 18515).unwrap();
        let mut command = library.command(&format!("{words} {}", b.ipv4()));
        command.env("ROCINANTE_LOG", format!("debug,{}", file.display()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let connected = read().matches("Rts, peer").count();
        let mut client = Running::of(a.spawn(&mut command).unwrap());
        let begin = Instant::now();
        while read().matches("Rts, peer").count() == connected {
            assert!(begin.elapsed().as_secs() < 20, "{}", read());
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(300));
        server.child.kill();
        client.child.wait(Duration::from_secs(10)).ok().map(|_| client.finish())
    };
    // A server that dies between its ACK and its own message leaves a client that only waits.
    let done = (0..5).find_map(|_| bereaved()).expect("one server dies with a message in flight");
    let log = read();
    assert_eq!(done.status, 1, "{}{log}", done.err);
    assert!(!done.err.contains("rocinante["), "{}", done.err);
    let bound = format!("bound UDP port 4791 of {}", a.ipv4());
    let why = format!("retries exceeded: {} answers no longer", b.ipv4());
    for words in ["before\n", "roce0: eth0 on udp: ", &bound, &why] {
        assert!(log.contains(words), "no {words:?} in {log}");
    }
    // Without the variable it prints nothing.
    assert_eq!(library.run(a, "ibv_devinfo").succeeded().err, "");
}

/// Resources that a process may run out of: `starved.py` has a function for each.
const SHORTAGES: [&str; 7] = [
    "descriptors",
    "no_descriptor_at_all",
    "memory",
    "memory_at_the_beginning",
    "closed_descriptors",
    "reused_descriptors",
    "forks",
];

#[test]
fn a_process_that_runs_out_of_something_gets_an_errno() {
    require!(need::lab());
    require!(need::program("python3"));
    let (library, pair) = (Library::new(), pair());
    let script = library.path().join("starved.py");
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("data/capi/starved.py"), &script).unwrap();
    let mut failed = Vec::new();
    for shortage in SHORTAGES {
        let mut command =
            library.command(&format!("/usr/bin/python3 {} {shortage}", script.display()));
        command.env_remove("ROCINANTE_LOG").stdout(Stdio::piped()).stderr(Stdio::piped());
        let done = Running::of(pair.containers()[0].spawn(&mut command).unwrap()).finish();
        if (done.status, &*done.out, &*done.err) != (0, "as expected\n", "") {
            failed.push(format!("{shortage}: {}, {}{}", done.status, done.out, done.err));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Without `/sys` and `/proc`, and where nothing can be written.
#[test]
fn a_bare_file_system_is_enough() {
    require!(need::lab());
    require!(need::program("ibv_rc_pingpong"));
    require!(need::program("unshare"));
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let bare = |words: &str| {
        let script = format!(
            "mount -o remount,bind,ro / && mount -t tmpfs -o ro t /sys && mount -t tmpfs -o ro t \
             /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups env \
             LD_PRELOAD={0}/libibverbs.so.1 ROCINANTE_NETDEV=udp {words}",
            library.path().display()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let words = "ibv_rc_pingpong -g 0 -e -c";
    let server = Running::of(b.spawn(&mut bare(words)).unwrap());
    let mut command = bare(&format!("{words} {}", b.ipv4()));
    let client = once_it_listens(|| Running::of(a.spawn(&mut command).unwrap()));
    assert_eq!((&*client.err, &*server.finish().succeeded().err), ("", ""));
    assert!(client.out.contains("1000 iters in"), "{}", client.out);
}

/// Events, status codes, lengths of private data, ports, backlogs, signals: as the kernel has them.
#[test]
fn librdmacm_is_told_what_the_kernel_tells() {
    require!(need::lab());
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let program = library.compiled("rdmacm.c", &["-lrdmacm", "-libverbs"]);
    let done = library.run(a, &format!("{program} {}", a.ipv4())).succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}", done.out);
    let done = library.run(a, &format!("{program} {} neighbours", a.ipv4())).succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}", done.out);
    // A program that ends has its connections ended, as a closed file has. With few descriptors.
    let script = library.path().join("few.sh");
    fs::write(&script, format!("ulimit -n 64; exec {program} {} $1\n", b.ipv4())).unwrap();
    let script = format!("sh {}", script.display());
    let watches = library.start(b, &format!("{script} watch")).that_says("listens");
    library.run(a, &format!("{script} leave")).succeeded();
    assert!(watches.finish().succeeded().out.ends_with("ended\n"));
}

/// A profile that forbids mprotect(2) leaves librdmacm's calls with the kernel, and the log says so
/// once.
#[test]
fn librdmacm_without_import_slots_is_named_in_the_log() {
    require!(need::lab());
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let program = library.compiled("rdmacm.c", &["-lrdmacm", "-libverbs"]);
    let done = library.run(a, &format!("{program} {} slotless", a.ipv4())).succeeded();
    assert_eq!(done.out, "all as expected\n");
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    for words in ["no rdma_cm: ", "mprotect: Operation not permitted", "/dev/infiniband/rdma_cm"] {
        assert!(done.err.contains(words), "no {words:?} in {}", done.err);
    }
}

// UDP's sockets outlive the interface, a ring does not.
on_backends! {
    ids_of_rdma_cm_are_told_that_their_device_is_gone_udp: Udp =>
        ids_are_told_that_their_device_is_gone((NOBODY, "udp"));
    ids_of_rdma_cm_are_told_that_their_device_is_gone_packet: Packet =>
        ids_are_told_that_their_device_is_gone((0, "packet"));
}

fn ids_are_told_that_their_device_is_gone((user, backend): (u32, &str)) {
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let program = library.compiled("rdmacm.c", &["-lrdmacm", "-libverbs"]);
    let mut command = library.command(&format!("{program} {} lose", a.ipv4()));
    command.uid(user).gid(user).env("ROCINANTE_NETDEV", backend);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut loses = Running::of(a.spawn(&mut command).unwrap());
    let ip = |words: &str| a.netns().ip(&words.split(' ').collect::<Vec<_>>()).unwrap();
    loses.says("has all");
    ip("link delete eth0");
    loses.says("asks for another");
    ip("link add eth0 type veth peer name eth9");
    ip("link set eth9 up");
    ip("address add 10.99.7.1/24 dev eth0");
    ip("link set eth0 up");
    loses.says("asks for one more");
    let script = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6 && ip -batch - <<END
        link delete eth0
        link add eth0 type veth peer name eth9
        link set eth9 up
        address add 10.99.7.2/24 dev eth0
        link set eth0 up
        END";
    let script = script.lines().map(|line| format!("{}\n", line.trim())).collect::<String>();
    let done = a.output(Command::new("sh").args(["-c", &script])).unwrap();
    assert!(done.status.success(), "{done:?}");
    let done = loses.finish().succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}", done.out);
}

#[test]
fn commands_to_rdma_cm_that_make_no_sense_get_an_errno() {
    require!(need::lab());
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let program = library.compiled("ucma.c", &["-libverbs"]);
    for seed in 1..=5 {
        let done = library.run(a, &format!("{program} {} {seed}", a.ipv4())).succeeded();
        assert_eq!(done.out, "all as expected\n", "seed {seed}");
    }
}
