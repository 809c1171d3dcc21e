//! Ports that an agent opened: in a process without privileges, and what such a process cannot do.

mod lies;

use std::fs::File;
use std::os::fd::OwnedFd;

use super::super::handing::memory_bytes;
use super::super::mapping::memory_file;
use super::super::prog::OwnMac;
use super::super::umem::Umem;
use super::*;
use crate::choose::give::{GiveLimits, Given, give};
use crate::frames::packet::tests::handed::strays;
use crate::handed::testing::{
    ASK_NEW_MAC, ASK_OTHER, Parent, Server, asked_of, child, choose_from, descriptors, done,
    expected_of, serve, succeeds,
};
use crate::handed::{Agent, Code, Granted, Request};
use crate::kernel::bpf::link_program_by_id;
use crate::kernel::rtnl::Rtnl;
use crate::testing::parts::{A, B, SPARE, assert_unprivileged, exchange, exchange_all};
use crate::testing::sides::{ip, open};
use crate::testing::testns::{needs, without_capability};
use crate::{AnyPort, Backend};

const CAP_NET_RAW: u32 = 13;

/// A child gets `count` ports from an agent and exchanges datagrams with a port of this process.
fn another_process_gets(count: usize) -> Result<(), String> {
    needs(&["ethtool"]).map_err(|e| e.to_string())?;
    let pair = Pair::new_seeing().map_err(|e| e.to_string())?;
    pair.a.sh(&format!("ip address add {SPARE}/24 dev v0"));
    for ns in [&pair.a, &pair.b] {
        ns.sh(&format!("ethtool -L v0 rx {count} tx {count}"));
    }
    // Whether this kernel has it.
    open_in(&pair.b, &config_with(|xdp| xdp.steered = true)).map_err(|e| e.to_string())?;
    let agent = Server::honest(&pair.a);
    let mut peer = open(&pair.b, Backend::Udp, &B).map_err(|e| e.to_string())?;
    let test = "frames::xdp::tests::handed::in_a_process_without_privileges";
    let child = pair.a.run(|| child(test, &agent, count)).map_err(|e| e.to_string())?;
    serve(&pair, &mut peer, child, || strays(&pair));
    // Nothing is kept, and nothing is left.
    let given = std::mem::take(&mut *agent.given.lock().expect("no panic"));
    assert!(given.iter().filter(|(_, kept)| kept.is_empty()).count() >= 1);
    detaches(&pair.a);
    Ok(())
}

/// The child. Without an agent there is nothing to test.
#[test]
fn in_a_process_without_privileges() {
    let test = "frames::xdp::tests::handed::in_a_process_without_privileges";
    let Some((count, path)) = expected_of(test) else { return };
    assert_unprivileged();
    assert_eq!(XdpSocket::new().expect_err("it is forbidden").raw_os_error(), Some(libc::EPERM));
    let v0 = Interface::by_name("v0").expect("v0");
    let before = descriptors();
    let agent = Agent::at(&path);
    // Without a named backend there is no program on the interface.
    let (ports, choice) = choose_from(&v0, None, count, &agent).expect("ports");
    assert_eq!(choice.backend, Backend::Packet, "{choice}");
    assert!(!attached_to(&v0));
    drop(ports);
    let chosen = choose_from(&v0, Some(Backend::Xdp), count, &agent);
    let (mut ports, choice) = chosen.expect("ports");
    assert_eq!((choice.backend, ports.len()), (Backend::Xdp, count), "{choice}");
    let asked = format!("asked for; opened by the agent at {path}");
    assert_eq!(choice.reason, asked);
    assert!(attached_to(&v0));
    exchange_all(&mut ports, Backend::Xdp);
    ports.iter().for_each(|port| cannot_be_changed(io_of(port), &v0));
    let parent = Parent::of_this_process();
    // The program follows the interface, by the process that has the port.
    parent.asked(ASK_NEW_MAC);
    exchange_all(&mut ports, Backend::Xdp);
    let malformed = |ports: &[AnyPort]| ports.iter().map(|p| p.stats().rx_malformed).sum::<u64>();
    let bad = malformed(&ports);
    parent.asked(ASK_OTHER);
    exchange(&mut ports, Backend::Xdp, 0, 0);
    assert_eq!(malformed(&ports), bad);
    drop(ports);
    assert!(!attached_to(&v0), "the program goes with its port");
    drop(parent);
    assert_eq!(descriptors(), before);
    println!("everything was exchanged");
}

fn attached_to(v0: &Interface) -> bool {
    Rtnl::open().and_then(|mut rtnl| rtnl.link(v0.index)).expect("v0").xdp_attached
}

fn io_of(port: &AnyPort) -> &XdpIo {
    let AnyPort::Xdp(port) = port else { panic!("{port:?} is another") };
    &port.io
}

/// A process that has the port can change neither its program, nor its interface, nor the size of
/// its memory.
fn cannot_be_changed(io: &XdpIo, v0: &Interface) {
    let errno = |result: io::Result<()>| result.expect_err("it is refused").raw_os_error();
    let socket = &io.socket;
    // Rings and memory of any size would be kernel memory that is charged to no user.
    assert_eq!(errno(socket.make_rings(1 << 20)), Some(libc::EBUSY));
    for option in [
        libc::XDP_UMEM_FILL_RING,
        libc::XDP_UMEM_COMPLETION_RING,
        libc::XDP_RX_RING,
        libc::XDP_TX_RING,
    ] {
        assert_eq!(errno(socket.make_ring(option, 1 << 20)), Some(libc::EBUSY), "{option}");
    }
    let memory = memory_file(c"test", Umem::bytes(16)).expect("a file");
    let other = Umem::of_file(memory.as_fd(), 16).expect("mapped");
    assert_eq!(errno(socket.register(&other)), Some(libc::EBUSY));
    for (interface, queue) in [(v0.index, 0), (v0.index, 1), (1, 0)] {
        for flags in [0, libc::XDP_SHARED_UMEM, libc::XDP_COPY] {
            assert_eq!(errno(socket.bind(interface, queue, flags)), Some(libc::EBUSY));
        }
    }
    // Its program, by which the map of addresses and that of sockets can be found, is not had.
    assert_eq!(errno(link_program_by_id(io._link.as_fd()).map(drop)), Some(libc::EPERM));
}

#[test]
fn a_process_without_privileges_gets_a_port() {
    or_skip!(another_process_gets(1));
}

#[test]
fn a_process_without_privileges_gets_two_on_two_queues() {
    or_skip!(another_process_gets(2));
}

/// The child of the next test.
#[test]
fn a_child_that_waits() {
    let Some((_, path)) = expected_of("frames::xdp::tests::handed::a_child_that_waits") else {
        return;
    };
    assert_unprivileged();
    let v0 = Interface::by_name("v0").expect("v0");
    let chosen = choose_from(&v0, Some(Backend::Xdp), 1, &Agent::at(&path));
    let (mut ports, _) = chosen.expect("a port");
    let parent = Parent::of_this_process();
    parent.asked(ASK_OTHER);
    exchange(&mut ports, Backend::Xdp, 0, 0);
    // Until it is killed.
    parent.asked(ASK_OTHER);
    unreachable!("the parent ends this");
}

/// The program lives exactly as long as the process that has the port, even if the agent ends.
#[test]
fn the_program_goes_with_the_process_and_not_with_the_agent() {
    let pair = or_skip!(Pair::new_seeing());
    let mut peer = or_skip!(open(&pair.b, Backend::Udp, &B));
    let mut agent = Some(Server::honest(&pair.a));
    let test = "frames::xdp::tests::handed::a_child_that_waits";
    let (mut child, socket) =
        pair.a.run(|| child(test, agent.as_ref().unwrap(), 1)).expect("a child");
    let asked = asked_of(&pair, &mut peer, (&mut child, &socket));
    if asked.is_none() {
        succeeds(child);
        return;
    }
    assert!(attached(&pair.a));
    drop(agent.take());
    assert!(attached(&pair.a));
    done(&socket);
    assert_eq!(asked_of(&pair, &mut peer, (&mut child, &socket)), Some(ASK_OTHER));
    assert!(attached(&pair.a));
    child.kill().expect("killed");
    child.wait().expect("waited for");
    detaches(&pair.a);
}

fn request(v0: &Interface) -> Request {
    Request {
        backend: Backend::Xdp,
        interface: v0.index,
        addresses: A.map(ip).to_vec(),
        shards: Shards::ONE,
        ring_frames: None,
        tx_buffer_bytes: None,
        despite_rules: true,
        wait_ms: None,
    }
}

/// Gives in a namespace. A queue is free some time after its socket was closed.
fn give_in(ns: &NetNs, request: &Request, limits: &GiveLimits) -> Given {
    let end = Instant::now() + PATIENCE;
    loop {
        let given = ns.run(|| give(request, limits));
        match &given.answer.outcome {
            Err(refused) if refused.code == Code::InUse && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => return given,
        }
    }
}

#[test]
fn an_agent_gives_no_more_than_its_limits_and_what_is_free() {
    let pair = or_skip!(Pair::new());
    let v0 = pair.a.run(|| Interface::by_name("v0")).expect("v0");
    let limits = GiveLimits { ring_frames_max: 200, tx_buffer_bytes_max: 1 << 16 };
    let asked =
        Request { ring_frames: Some(u32::MAX), tx_buffer_bytes: Some(u32::MAX), ..request(&v0) };
    let given = or_skip!(give_in(&pair.a, &asked, &limits).whole());
    assert_eq!(given.answer.outcome, Ok(Granted::Xdp { chunks: 128 }));
    assert_eq!((given.descriptors.len(), given.kept.len()), (4, 0));
    assert_eq!((given.bytes, limits.memory_bytes(&asked)), (memory_bytes(128), memory_bytes(128)));
    let [socket, memory, link, mac] = &given.descriptors[..] else { unreachable!() };
    let buffer = rustix::net::sockopt::socket_send_buffer_size(socket).expect("a socket");
    assert_eq!(buffer, 2 << 16, "the kernel doubles it");
    // The memory keeps its size, and no process unseals it.
    let file = File::from(memory.try_clone().expect("a copy"));
    assert_eq!(file.metadata().expect("of a file").len(), 2 * 128 * 4096);
    for bytes in [0, 4096, 1 << 30] {
        file.set_len(bytes).expect_err("its size is sealed");
    }
    use rustix::fs::SealFlags;
    let sealed = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW;
    assert!(rustix::fs::fcntl_get_seals(memory).expect("seals").contains(sealed));
    assert_eq!(crate::kernel::bpf::interface_of(link.as_fd()).expect("read"), Some(v0.index));
    OwnMac::of_map(mac.as_fd()).expect("the map of the Ethernet address");
    // Nothing of it stays with this process, mapped or open.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    let inode = rustix::fs::fstat(memory).expect("a file").st_ino;
    let is_of = |line: &&str| line.split_whitespace().nth(4) == Some(&inode.to_string());
    assert_eq!(maps.lines().find(is_of), None);
    // The queue has one socket, the interface one program.
    let refused = pair.a.run(|| give(&asked, &limits)).answer.outcome.expect_err("in use");
    assert_eq!(refused.code, Code::InUse, "{refused}");
    drop((given, file));
    for (change, code) in [
        (Request { interface: v0.index + 1000, ..asked.clone() }, Code::Interface),
        (Request { addresses: vec![ip("10.9.0.99")], ..asked.clone() }, Code::Interface),
        (Request { interface: 1, ..asked.clone() }, Code::Interface),
        (
            Request {
                shards: Shards { shared: false, first: 0, count: 2, selector: 5 },
                ..asked.clone()
            },
            Code::Failed,
        ),
    ] {
        let refused = give_in(&pair.a, &change, &limits);
        assert_eq!(refused.answer.outcome.expect_err("refused").code, code);
        assert!(refused.descriptors.is_empty());
    }
    detaches(&pair.a);
    give_in(&pair.a, &asked, &limits).whole().expect("it is free again");
}

#[test]
fn a_rule_means_no_port_unless_the_program_wants_it_despite() {
    let pair = or_skip!(Pair::new_seeing());
    let v0 = pair.a.run(|| Interface::by_name("v0")).expect("v0");
    // It binds `packet`, and not `afxdp`.
    pair.a.sh("tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 50ms");
    let careful = Request { despite_rules: false, ..request(&v0) };
    let limits = GiveLimits::default();
    let refused = give_in(&pair.a, &careful, &limits).answer.outcome.expect_err("refused");
    assert_eq!(refused.code, Code::Bypasses);
    or_skip!(give_in(&pair.a, &request(&v0), &limits).whole());
    let server = Server::honest(&pair.a);
    let agent = server.agent();
    let choice = pair.a.run(|| {
        without_capability(CAP_NET_RAW, || {
            choose_from(&v0, Some(Backend::Xdp), 1, &agent).map(|(_, choice)| choice)
        })
    });
    let choice = choice.expect("as named").reason;
    assert!(choice.contains("asked for; it bypasses tc: tbf"), "{choice}");
}

/// A queue that is held for a while is waited for by the program that asks, and not by the agent.
#[test]
fn what_is_in_use_is_waited_for_and_then_named() {
    let pair = or_skip!(Pair::new_seeing());
    pair.a.sh(&format!("ip address add {SPARE}/24 dev v0"));
    let v0 = pair.a.run(|| Interface::by_name("v0")).expect("v0");
    let held = || XdpPort::open(&v0, &[ip(SPARE)], &PortConfig::default());
    let port = or_skip!(pair.a.run(held));
    let server = Server::honest(&pair.a);
    let agent = server.agent();
    let ask = || {
        let choose = || choose_from(&v0, Some(Backend::Xdp), 1, &agent).map(|(_, choice)| choice);
        pair.a.run(|| without_capability(CAP_NET_RAW, choose))
    };
    let start = Instant::now();
    let error = ask().expect_err("it stays in use").to_string();
    assert!(error.contains("another AF_XDP socket has this queue"), "{error}");
    assert!((Duration::from_secs(1)..Duration::from_secs(20)).contains(&start.elapsed()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            drop(port);
        });
        ask().expect("it is free in time");
    });
}

/// What only a process with the capabilities can have is not asked for.
#[test]
fn other_options_are_not_asked_for() {
    let pair = or_skip!(Pair::new());
    let server = Server::new(|_| panic!("it is asked"));
    let agent = server.agent();
    let v0 = pair.a.run(|| Interface::by_name("v0")).expect("v0");
    let config = config_with(|xdp| xdp.steered = true);
    let choose =
        || crate::choose::auto::choose(&v0, &A.map(ip), Some(Backend::Xdp), &config, &agent);
    let chosen = pair.a.run(|| without_capability(CAP_NET_RAW, choose));
    let error = chosen.expect_err("it may not").to_string();
    assert!(error.contains("leave out the other options of xdp"), "{error}");
}
