//! Opening, adding and joining when some resource runs out: everything taken is given back.
//!
//! A separate process runs these tests and nothing else, because it counts its own resources.

use std::fmt::Debug;
use std::io;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use crate::frames::xdp::tests::another_program;
use crate::handed::Agent;
use crate::kernel::rtnl::Rtnl;
use crate::testing::sides::{self, SELECTOR, ip, lo, open_once};
use crate::testing::testns::{NetNs, Pair, limit_descriptors, or_skip};
use crate::{AnyPort, Backend, Interface, OpenError, PathSpec, Port, PortConfig, Shards, Slots};

const OWN: [&str; 2] = ["10.9.0.1", "fd09::1"];
const BACKENDS: [Backend; 3] = [Backend::Udp, Backend::Packet, Backend::Xdp];
/// More descriptors than anything here needs.
const ROOM_MAX: usize = 100;

#[test]
fn what_fails_gives_back_what_it_took() {
    let pair = or_skip!(Pair::new_in_calm());
    let output = Command::new(std::env::current_exe().expect("this test's program"))
        .args(["--exact", "testing::scarcity::in_a_process_of_its_own", "--nocapture"])
        .env("ROCINANTE_TEST_NETNS", pair.a.path())
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let text = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
    assert!(
        output.status.success() && text[0].contains("everything was tried"),
        "{}",
        text.concat()
    );
}

/// The separate process. Without a namespace in its environment there is nothing to test.
#[test]
fn in_a_process_of_its_own() {
    let Ok(namespace) = std::env::var("ROCINANTE_TEST_NETNS") else { return };
    let ns = NetNs::at(&namespace).expect("the parent's");
    ns.run(|| {
        let v0 = Interface::by_name("v0").expect("v0");
        for backend in BACKENDS {
            // The first call takes resources that stay: the names of features, the kernel's
            // modules.
            if let Err(e) = open(&v0, backend, 1) {
                println!("{e}");
                continue;
            }
            without_descriptors(&v0, backend);
            what_is_refused(&v0, backend);
        }
        others_in_the_way(&v0);
        println!("everything was tried");
    });
}

fn own() -> Vec<IpAddr> {
    OWN.map(ip).to_vec()
}

fn open(v0: &Interface, backend: Backend, count: usize) -> Result<Vec<AnyPort>, OpenError> {
    open_once(v0, backend, &own(), count)
}

fn spec(remote: &str, src_port: u16) -> PathSpec {
    PathSpec { src_port, ..sides::spec(OWN[usize::from(remote.contains(':'))], remote) }
}

/// Resources of the process and its network that a port takes.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    /// Mappings of rings.
    rings: usize,
    /// Sockets and memberships in groups, as the kernel lists them.
    listed: [usize; 5],
    attached: bool,
}

fn held(v0: &Interface) -> Held {
    let lines = |path: &str| std::fs::read_to_string(path).map_or(0, |text| text.lines().count());
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    let net = ["udp", "udp6", "packet", "igmp", "igmp6"];
    Held {
        descriptors: std::fs::read_dir("/proc/self/fd").expect("descriptors").count(),
        rings: maps.lines().filter(|line| line.contains("socket:")).count(),
        listed: net.map(|table| lines(&format!("/proc/thread-self/net/{table}"))),
        attached: Rtnl::open().and_then(|mut r| r.link(v0.index)).expect("v0").xdp_attached,
    }
}

/// Bytes of the process's address space.
fn mapped_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    pages.split(' ').next().and_then(|pages| pages.parse::<usize>().ok()).expect("pages") * 4096
}

/// Fails with each number of descriptors below what `attempt` needs. Returns its result, and the
/// number of failures.
fn until_it_succeeds<T, E: Debug>(
    v0: &Interface,
    mut attempt: impl FnMut() -> Result<T, E>,
    errno: impl Fn(&E) -> i32,
) -> (T, usize) {
    let (before, bytes) = (held(v0), mapped_bytes());
    for room in 0..ROOM_MAX {
        let unlimited = limit_descriptors(room);
        let result = attempt();
        drop(unlimited);
        match result {
            Ok(made) => return (made, room),
            Err(e) => assert_eq!(errno(&e), libc::EMFILE, "room for {room}: {e:?}"),
        }
        assert_eq!(held(v0), before, "room for {room}");
        // Freed memory may stay with the process, but must not grow with each failure.
        let grown = mapped_bytes().saturating_sub(bytes);
        assert!(grown < 64 << 20, "room for {room}: {grown} bytes more");
    }
    panic!("{ROOM_MAX} descriptors are not enough");
}

fn without_descriptors(v0: &Interface, backend: Backend) {
    let before = held(v0);
    let counts = if backend == Backend::Xdp { 1..2 } else { 1..3 };
    for count in counts {
        let errno = |e: &OpenError| {
            assert!(e.to_string().contains("ulimit -n"), "{e}");
            e.errno()
        };
        let (ports, failed) = until_it_succeeds(v0, || open(v0, backend, count), errno);
        assert!(failed >= 3 * count, "{backend}, {count}: {failed}");
        drop(ports);
        assert_eq!(held(v0), before, "{backend}, {count}");
    }
    let mut port = open(v0, backend, 1).expect("a port").pop().expect("one");
    let opened = held(v0);
    // Paths work without descriptors: they leave from UDP/4791.
    for remote in ["10.9.0.2", "fd09::2", "10.9.0.1"] {
        for room in 0..4 {
            let unlimited = limit_descriptors(room);
            let path = port.add_path(&spec(remote, 0xc000 + room as u16));
            drop(unlimited);
            port.remove_path(path.expect("a path").id);
            assert_eq!(held(v0), opened, "{backend}, {remote}, room for {room}");
        }
    }
    for group in ["239.1.2.3", "ff15::77"] {
        let joins = || port.join(ip(group));
        let error = |e: &io::Error| {
            assert!(e.to_string().contains("ulimit -n"), "{e}");
            crate::errno(e).unwrap_or(0)
        };
        let ((), failed) = until_it_succeeds(v0, joins, error);
        assert_eq!(failed, 1, "a socket each");
        assert_ne!(held(v0), opened);
        port.leave(ip(group));
        assert_eq!(held(v0), opened, "{backend}, {group}");
    }
    drop(port);
    assert_eq!(held(v0), before, "{backend}");
}

/// More often than there is room for leaked entries.
fn what_is_refused(v0: &Interface, backend: Backend) {
    let before = held(v0);
    let mut port = open(v0, backend, 1).expect("a port").pop().expect("one");
    let opened = held(v0);
    for round in 0..300 {
        for remote in ["203.0.113.1", "2001:db8::1"] {
            port.add_path(&spec(remote, 0xc000 + round)).expect_err("no route");
        }
        let mixed = PathSpec { remote: ip("fd09::2"), ..spec("10.9.0.2", 0xc000) };
        port.add_path(&mixed).expect_err("two families");
        port.add_path(&PathSpec { local: ip("10.9.0.9"), ..mixed }).expect_err("not our address");
        port.join(ip("10.9.0.2")).expect_err("no group");
    }
    assert_eq!(held(v0), opened, "{backend}");
    // The kernel refuses at the last step.
    let memberships = |max: &str| {
        std::fs::write("/proc/sys/net/ipv4/igmp_max_memberships", max).expect("a limit");
    };
    memberships("0");
    for _ in 0..300 {
        let error = port.join(ip("239.1.2.3")).expect_err("no more groups");
        assert_eq!(crate::errno(&error), Some(libc::ENOBUFS), "{error}");
    }
    memberships("20");
    assert_eq!(held(v0), opened, "{backend}");
    port.join(ip("239.1.2.3")).expect("there is room again");
    // Two of each: the other one stays after the first is gone.
    port.join(ip("239.1.2.4")).expect("another");
    let path = |port: &mut AnyPort| port.add_path(&spec("10.9.0.2", 0xc123)).expect("a path").id;
    let [one, two] = [path(&mut port), path(&mut port)];
    let both = held(v0);
    port.leave(ip("239.1.2.3"));
    port.leave(ip("239.1.2.3"));
    port.remove_path(one);
    port.remove_path(one);
    let one_socket_less = both.descriptors - 1;
    assert_eq!(held(v0).descriptors, one_socket_less, "the second path has the first's socket");
    port.leave(ip("239.1.2.4"));
    port.remove_path(two);
    assert_eq!(held(v0), opened, "{backend}");
    drop(port);
    assert_eq!(held(v0), before, "{backend}");
}

/// Everything was taken when the last step fails.
fn others_in_the_way(v0: &Interface) {
    let before = held(v0);
    let udp = std::net::UdpSocket::bind((OWN[1], 4791)).expect("the last address");
    let with_udp = held(v0);
    for backend in BACKENDS {
        for count in [1, 2] {
            open(v0, backend, count).expect_err("UDP/4791 is taken");
            assert_eq!(held(v0), with_udp, "{backend}");
        }
    }
    drop(udp);
    for backend in BACKENDS {
        let elsewhere = [own(), vec![ip("10.9.0.99")]].concat();
        open_once(v0, backend, &elsewhere, 1).expect_err("not all are ours");
        let gone = Interface { index: 4711, ..v0.clone() };
        if backend != Backend::Udp {
            open(&gone, backend, 1).expect_err("no such interface");
        }
        assert_eq!(held(v0), before, "{backend}");
    }
    let config = crate::PortConfig::default();
    crate::choose::auto::preview(v0, &own(), None, &config, &Agent::off()).expect("a choice");
    crate::choose::auto::choose(v0, &own(), None, &config, &Agent::off()).expect("a port");
    for want in [None, Some(Backend::Udp), Some(Backend::Packet), Some(Backend::Xdp)] {
        crate::choose::auto::choose(v0, &[ip("10.9.0.99")], want, &config, &Agent::off())
            .expect_err("not ours");
    }
    assert_eq!(held(v0), before);
    // Attaching is the last step.
    if let Ok(attached) = another_program(v0.index) {
        let with_program = held(v0);
        for _ in 0..3 {
            let error = open(v0, Backend::Xdp, 1).expect_err("it cannot attach");
            assert!(error.to_string().contains("another XDP program"), "{error}");
            assert_eq!(held(v0), with_program);
        }
        drop(attached);
        open(v0, Backend::Xdp, 1).expect("nothing is in the way");
        assert_eq!(held(v0), before);
    }
}

/// The one `afxdp` of an address is taken on all addresses or on none.
#[test]
fn afxdp_that_is_refused_on_one_address_is_free_on_the_other() {
    let ns = or_skip!(NetNs::new());
    ns.run(|| {
        let both = [ip("127.0.0.2"), ip("127.0.0.3")];
        let lease = |own: &[IpAddr]| {
            let shards = Shards { first: 0, count: 1, selector: SELECTOR, shared: true };
            Slots::lease(&lo(), own, &PortConfig::default(), shards).expect("slots")
        };
        for taken in both {
            let (holder, asker) = (lease(&[taken]), lease(&both));
            holder.take_xdp().expect("it is free");
            assert_eq!(asker.take_xdp(), Err(taken));
            // Each of two, whichever is asked for first.
            for address in both {
                let other = lease(&[address]);
                let expected = if address == taken { Err(taken) } else { Ok(()) };
                assert_eq!(other.take_xdp(), expected, "{taken} is taken");
                other.leave_xdp();
            }
            holder.leave_xdp();
            asker.take_xdp().expect("they are free");
        }
    });
}
