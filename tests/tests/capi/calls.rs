//! Calls of `capi`'s library and commands of librdmacm, each with its refusals and results, as an
//! ordinary user in a container: C programs that check their own expectations.

use std::process::Command;

use nix::sys::signal::Signal;
use rocinante_lab::{Container, LabConfig, Pair};
use rocinante_tests::capi::{Library, librdmacm};
use rocinante_tests::{need, require};

fn pair() -> Pair {
    Pair::new(&LabConfig::default()).unwrap()
}

/// Each call's refusal has its errno, and the object that it named works as before.
#[test]
fn a_refusal_changes_nothing() {
    require!(need::lab());
    require!(need::program("cc"));
    let (library, pair) = (Library::new(), pair());
    let program = library.compiled("refusals.c", &["-libverbs"]);
    let done = library.run(&pair.containers()[0], &program).succeeded();
    assert_eq!(done.out, "all as expected\n", "{}", done.err);
}

/// Threads of a program are cancelled in the calls in which they sleep. Nothing waits for them.
#[test]
fn a_sleeping_thread_is_cancelled() {
    require!(need::lab());
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let program = library.compiled("cancelled.c", &["-lrdmacm", "-libverbs", "-lpthread"]);
    let serves = library.start(b, &format!("{program} {}", b.ipv4())).that_says("listens");
    library.run(a, &format!("{program} ask {}", b.ipv4())).succeeded();
    let done = serves.finish().succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}{}", done.out, done.err);
}

/// Wildcards of both families, link-local addresses of two links, addresses that no machine has,
/// and a peer that is cut off.
#[test]
fn ways_of_librdmacm_are_the_kernels() {
    require!(need::lab());
    require!(librdmacm());
    let (library, pair) = (Library::new(), pair());
    let [a, b] = pair.containers();
    let ip = |at: &Container, words: &str| {
        let done = at.output(Command::new("ip").args(words.split(' '))).unwrap();
        assert!(done.status.success(), "ip {words}: {done:?}");
    };
    for (at, own) in [(a, "fe80::a"), (b, "fe80::b")] {
        ip(at, "link set eth0 addrgenmode none");
        ip(at, "-6 addr flush dev eth0");
        ip(at, &format!("address add {own}/64 dev eth0 nodad"));
    }
    ip(a, "link add eth1 type veth peer name eth2");
    for name in ["eth1", "eth2"] {
        ip(a, &format!("link set {name} addrgenmode none"));
        ip(a, &format!("link set {name} up"));
    }
    ip(a, "address add fe80::a/64 dev eth1 nodad");
    let program = library.compiled("ways.c", &["-lrdmacm", "-libverbs"]);
    let mut serves = library.start(b, &format!("{program} serve")).that_says("listens");
    let [x, y, z, _] = a.ipv4().octets();
    let mut asks = library.start(a, &format!("{program} ask {} {x}.{y}.{z}.253", b.ipv4()));
    asks.says("cut");
    ip(b, "link set eth0 down");
    asks.child.signal(Signal::SIGUSR1);
    let done = asks.finish().succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}{}", done.out, done.err);
    serves.child.kill();
    let limits = ["-qw", "net.ipv6.bindv6only=1", "net.ipv4.ip_local_port_range=50000 50010"];
    let set = a.output(Command::new("sysctl").args(limits)).unwrap();
    assert!(set.status.success(), "{set:?}");
    let done = library.run(a, &format!("{program} sysctl")).succeeded();
    assert_eq!(done.out, "all as expected\n", "{}", done.err);
}
