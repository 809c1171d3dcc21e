//! Behaviour without privileges, and when the process is killed.
#![allow(unsafe_code)]

use super::*;
use crate::testing::ReceiveBy as _;
use crate::testing::testns::without_capabilities;
use std::process::{Child, Command, Stdio};

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_BPF: u32 = 39;

/// Gives the calling thread alone a real user of its own: the kernel counts locked memory for each
/// real user. The effective user and the capabilities stay.
fn be_another_user() {
    // SAFETY: gettid and setresuid take numbers alone; without libc's function, setresuid changes
    // one thread. -1 leaves the effective and the saved user.
    let changed = unsafe {
        let user = (1 << 24) + libc::syscall(libc::SYS_gettid);
        libc::syscall(libc::SYS_setresuid, user, -1i64, -1i64)
    };
    assert_eq!(changed, 0, "setresuid: {}", io::Error::last_os_error());
}

/// Opens a port on a thread without some capabilities.
fn open_without(ns: &NetNs, config: &PortConfig, drop: &[u32]) -> Result<XdpPort, OpenError> {
    ns.run(|| {
        let iface = Interface::by_name("v0").expect("v0");
        let addresses: Vec<IpAddr> = iface.addresses.iter().map(|(a, _)| *a).collect();
        be_another_user();
        without_capabilities(drop, || XdpPort::open(&iface, &addresses, config))
    })
}

/// A pair on which a port can be opened. Another pair serves for the attempt: a child that another
/// test is just forking may still hold descriptors closed a moment ago.
fn usable_pair() -> Result<Pair, String> {
    let [tried, pair] = [Pair::new(), Pair::new()].map(|pair| pair.map_err(|e| e.to_string()));
    open_in(&tried?.a, &PortConfig::default()).map_err(|e| e.to_string())?;
    pair
}

#[test]
fn the_documented_capabilities_suffice() {
    let pair = or_skip!(usable_pair());
    let kept = [CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF];
    let others: Vec<u32> = (0..64).filter(|cap| !kept.contains(cap)).collect();
    open_without(&pair.a, &PortConfig::default(), &others).expect("a port");
}

#[test]
fn a_missing_capability_is_named() {
    let pair = or_skip!(usable_pair());
    for (drop, advice) in [
        (&[CAP_NET_RAW][..], "--cap-add NET_RAW, or"),
        (&[CAP_BPF, CAP_SYS_ADMIN], "--cap-add BPF, or"),
        (&[CAP_NET_ADMIN, CAP_SYS_ADMIN], "--cap-add NET_ADMIN, or"),
    ] {
        let error = open_without(&pair.a, &PortConfig::default(), drop).expect_err("refused");
        let text = error.to_string();
        assert_eq!(error.errno(), libc::EPERM, "{text}");
        assert!(text.contains(advice) && text.contains("--netdev packet"), "{text}");
    }
    assert!(!attached(&pair.a));
}

#[test]
fn memory_shrinks_to_the_limit_where_it_applies() {
    let pair = or_skip!(usable_pair());
    let config = config_with(|xdp| xdp.ring_frames = 1 << 15);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one `rlimit`.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    if !(1 << 19..(1 << 15) * 2 * 4096).contains(&limit.rlim_cur) {
        let why = "RLIMIT_MEMLOCK is too large to be reached, or less than the least memory";
        return crate::testing::testns::skip(
            "xdp::memory_shrinks_to_the_limit_where_it_applies",
            &why,
        );
    }
    let port = open_without(&pair.a, &config, &[CAP_IPC_LOCK]).expect("a port");
    let bytes = u64::from(port.io.umem.region().1 as u32);
    assert!(bytes <= limit.rlim_cur, "{bytes} of {}", limit.rlim_cur);
}

#[test]
fn another_program_on_the_interface_is_reported() {
    let pair = or_skip!(usable_pair());
    pair.a.run(|| {
        let iface = Interface::by_name("v0").unwrap();
        let _attached = another_program(iface.index).unwrap();
        let error = XdpPort::open(&iface, &["10.9.0.1".parse().unwrap()], &PortConfig::default());
        let text = error.expect_err("refused").to_string();
        assert!(text.contains("another XDP program is attached to v0"), "{text}");
        assert!(text.contains("--netdev packet or udp"), "{text}");
    });
    detaches(&pair.a);
}

/// The child of the next test: this binary run again with a namespace in its environment. It opens
/// a port and waits for its end. Without a namespace there is nothing to test.
#[test]
fn open_and_wait() {
    let Ok(namespace) = std::env::var("ROCINANTE_TEST_NETNS") else { return };
    let file = std::fs::File::open(namespace).unwrap();
    // SAFETY: takes no pointer; only this thread, which ends with the test, changes its namespace.
    let entered = unsafe {
        use std::os::fd::AsRawFd as _;
        libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET)
    };
    assert_eq!(entered, 0);
    let iface = Interface::by_name("v0").unwrap();
    let addresses = ["10.9.0.1".parse().unwrap()];
    let _port = XdpPort::open(&iface, &addresses, &PortConfig::default()).unwrap();
    std::thread::sleep(Duration::from_secs(30));
}

/// That child, after it has attached its program.
fn child_with_port(pair: &Pair) -> Child {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "frames::xdp::tests::life::open_and_wait"])
        .env("ROCINANTE_TEST_NETNS", pair.a.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the child attaches", || attached(&pair.a));
    child
}

fn kill_9(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn kill_9_leaves_no_black_hole() {
    let pair = or_skip!(usable_pair());
    let child = child_with_port(&pair);
    kill_9(child);
    detaches(&pair.a);
    tcp_works(&pair, "10.9.0.2");
}

#[test]
fn a_program_that_is_started_again_has_its_queue_again() {
    let pair = or_skip!(usable_pair());
    for _ in 0..20 {
        drop(open_in(&pair.a, &PortConfig::default()).expect("a closed port is freed"));
    }
    for _ in 0..3 {
        // A process that another test is just starting may still hold the port's descriptors.
        detaches(&pair.a);
        kill_9(child_with_port(&pair));
        drop(open_in(&pair.a, &PortConfig::default()).expect("a killed process's port is freed"));
    }
}

/// An unbound socket with its memory.
fn unbound() -> io::Result<(XdpSocket, Umem, socket::Rings)> {
    let (socket, umem) = (XdpSocket::new()?, Umem::new(2)?);
    socket.register(&umem)?;
    socket.make_rings(2)?;
    let rings = socket.map_rings(2)?;
    Ok((socket, umem, rings))
}

#[test]
fn a_busy_queue_is_waited_for_and_not_for_ever() {
    let pair = or_skip!(usable_pair());
    let iface = pair.a.run(|| Interface::by_name("v0").unwrap());
    let other = pair.a.run(|| unbound().unwrap());
    other.0.bind(iface.index, 0, 0).unwrap();
    pair.a.run(|| {
        let (socket, _umem, _rings) = unbound().unwrap();
        let error = open::bind(&socket, &iface, 0, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.errno(), libc::EBUSY);
        assert!(error.to_string().contains("another AF_XDP socket has this queue"), "{error}");
    });
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // As late as the kernel is while other processes change networks.
            std::thread::sleep(Duration::from_millis(700));
            drop(other);
        });
        open_in(&pair.a, &PortConfig::default()).expect("it is free in the end");
    });
}

#[test]
fn a_port_follows_the_ethernet_address_of_its_interface() {
    let (pair, mut a, mut b) = or_skip!(pair_with(1500, &PortConfig::default()));
    let path = pair.a.run(|| a.add_path(&spec(false, true))).unwrap().id;
    // Another address than at the time of opening, and back.
    for last in [0x12, 2] {
        pair.b.sh(&format!("ip link set v0 address 02:00:00:00:09:{last:02x}"));
        pair.a.sh("ip neigh flush dev v0");
        wait_until("it arrives", || sent_to(&mut a, &mut b, path) == Some(last));
    }
}

/// The last byte of the destination Ethernet address of a datagram, if it arrives. Both ports are
/// maintained.
fn sent_to(a: &mut XdpPort, b: &mut XdpPort, path: PathId) -> Option<u8> {
    while b.receive_by(64, &mut |_| ()).unwrap() > 0 {}
    for port in [&mut *a, &mut *b] {
        port.maintain();
        port.flush(crate::testing::no_failure);
    }
    let to = match a.paths.hop(path) {
        Some(Hop::Direct(template)) => template.dst_mac()[5],
        _ => 0,
    };
    send(a, path, &[1; 64]);
    std::thread::sleep(Duration::from_millis(20));
    (b.receive_by(64, &mut |_| ()).unwrap() > 0).then_some(to)
}
