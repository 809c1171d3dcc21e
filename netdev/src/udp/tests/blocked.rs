//! Full sockets: which of them the port waits for.

use super::*;
use crate::testing::testns::{NetNs, needs, watched};
use std::os::fd::AsRawFd as _;

const LEN: usize = 3000;
const PEER: [u8; 4] = [10, 9, 0, 2];

/// An interface that takes one packet and then next to nothing, for a port with two addresses.
fn behind_a_plug() -> io::Result<(NetNs, UdpPort)> {
    needs(&["tc"])?;
    let ns = NetNs::new()?;
    ns.sh("ip link add v0 type veth peer name v1
           ip link set v0 mtu 4200; ip link set v1 mtu 4200; ip link set v1 up; ip link set v0 up
           ip address add 10.9.0.1/24 dev v0; ip address add 10.9.0.11/24 dev v0
           ip neigh add 10.9.0.2 lladdr 02:00:00:00:09:02 dev v0
           tc qdisc add dev v0 root tbf rate 8bit burst 5000 limit 10mb");
    let config = PortConfig {
        tx_buffer_bytes: 1,
        force_buffers: false,
        no_segmentation: true,
        ..PortConfig::default()
    };
    let own = [[10, 9, 0, 1], [10, 9, 0, 11]].map(IpAddr::from);
    let port = ns.run(|| {
        let v0 = Interface::by_name("v0").unwrap();
        UdpPort::open(&v0, &own, &config).unwrap()
    });
    Ok((ns, port))
}

/// Fills the socket of a path.
fn fill(port: &mut UdpPort, path: PathId) {
    let UdpPort { paths, scratch, .. } = port;
    let entry = paths.entry(path);
    let message = || sys::Message { payload: &[0; LEN], dest: &entry.dest, by: None, segment: 0 };
    let full = (0..100).any(|_| {
        let sent = sys::send(paths.socket(entry.socket), scratch, std::iter::once(message()));
        sent.is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN))
    });
    assert!(full, "it takes without end");
}

fn descriptor(port: &UdpPort, path: PathId) -> i32 {
    port.paths.socket(port.paths.entry(path).socket).as_fd().as_raw_fd()
}

/// The sockets that the port waits to write to.
fn waited_for(port: &UdpPort) -> Vec<i32> {
    let entries = watched(port.wait_fd()).into_iter();
    entries.filter(|(_, events)| events & libc::EPOLLOUT != 0).map(|(fd, _)| fd).collect()
}

#[test]
fn of_sockets_that_are_full_only_the_one_that_is_next_is_waited_for() {
    let (ns, mut port) = or_skip!(behind_a_plug());
    let calm = watched(port.wait_fd());
    assert_eq!(calm.len(), 3, "the two own addresses, and the interface");
    assert!(calm.iter().all(|(_, events)| *events == libc::EPOLLIN));
    // The sockets of own addresses are always in the set, others are not.
    let paths =
        [(1, 4791), (1, 0xC001), (11, 4791), (11, 0xC002), (1, 0xC003)].map(|(own, src_port)| {
            let wanted = spec(IpAddr::from([10, 9, 0, own]), IpAddr::from(PEER));
            ns.run(|| port.add_path(&PathSpec { src_port, ..wanted })).unwrap().id
        });
    paths.iter().for_each(|path| fill(&mut port, *path));
    // Each is followed by each of the others once.
    for order in [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [1, 0, 3, 2, 4], [4, 3, 1, 2, 0]] {
        for path in order.map(|at| paths[at]) {
            port.reserve(path, LEN).unwrap().buf.fill(1);
            port.commit();
        }
        for path in order.map(|at| paths[at]) {
            for _ in 0..2 {
                port.flush(crate::testing::no_failure);
                assert_eq!(waited_for(&port), [descriptor(&port, path)]);
                assert!(!descriptors::wait_readable(port.wait_fd(), 0).unwrap(), "it is full");
            }
            let entry = port.paths.entry(path).socket;
            port.paths.socket(entry).set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, 1 << 20).unwrap();
            assert!(descriptors::wait_readable(port.wait_fd(), 0).unwrap(), "it takes more");
        }
        port.flush(crate::testing::no_failure);
        assert!(!port.wants_write());
        assert_eq!(watched(port.wait_fd()), calm);
        assert!(!descriptors::wait_readable(port.wait_fd(), 0).unwrap(), "nothing is waited for");
        for path in paths {
            let entry = port.paths.entry(path).socket;
            port.paths.socket(entry).set(libc::SOL_SOCKET, libc::SO_SNDBUF, 1).unwrap();
        }
    }
    // Removed while one is full: the port waits for its remaining datagrams, and then for nothing.
    port.reserve(paths[1], LEN).unwrap().buf.fill(1);
    port.commit();
    port.flush(crate::testing::no_failure);
    let full = descriptor(&port, paths[1]);
    paths.iter().for_each(|path| port.remove_path(*path));
    assert_eq!(waited_for(&port), [full]);
    ns.sh("tc qdisc del dev v0 root");
    assert!(descriptors::wait_readable(port.wait_fd(), 5000).unwrap(), "it drains");
    port.flush(crate::testing::no_failure);
    assert_eq!(watched(port.wait_fd()), calm);
}

#[test]
fn paths_come_and_go_while_a_datagram_of_another_waits() {
    let (ns, mut port) = or_skip!(behind_a_plug());
    let wanted = |src_port| PathSpec { src_port, ..spec([10, 9, 0, 1].into(), PEER.into()) };
    let add = |port: &mut UdpPort, at| ns.run(|| port.add_path(&wanted(at))).unwrap().id;
    let waits = add(&mut port, 0xC001);
    fill(&mut port, waits);
    stage(&mut port, waits, &[LEN]);
    port.remove_path(waits);
    for round in 0..20 {
        port.flush(crate::testing::no_failure);
        let paths = [0xC002, 0xC003].map(|at| add(&mut port, at));
        assert_eq!(paths.iter().map(|path| path.0).max(), Some(2), "round {round}");
        assert!(!paths.contains(&waits));
        paths.iter().for_each(|path| port.remove_path(*path));
        assert!(port.wants_write() && port.holds(waits));
    }
    ns.sh("tc qdisc del dev v0 root");
    assert!(descriptors::wait_readable(port.wait_fd(), 5000).unwrap(), "it drains");
    port.flush(crate::testing::no_failure);
    assert_eq!((port.wants_write(), port.paths.open_senders()), (false, 0));
    // Now its id may be another's.
    let ids = [0xC002, 0xC003, 0xC004].map(|at| add(&mut port, at));
    assert!(ids.contains(&waits) && ids.iter().all(|id| id.0 <= 2), "{ids:?}");
}

/// A guard sends by the sockets of its addresses, too.
#[test]
fn a_guard_waits_for_its_full_socket() {
    let (ns, port) = or_skip!(behind_a_plug());
    drop(port);
    let (mut port, path) = ns.run(|| {
        let v0 = Interface::by_name("v0").unwrap();
        let config = PortConfig { tx_buffer_bytes: 1, force_buffers: false, ..Default::default() };
        let own = IpAddr::from([10, 9, 0, 1]);
        let mut port = open_guard_with(&v0, own, config);
        let to_peer = PathSpec { src_port: 4791, ..spec(own, IpAddr::from(PEER)) };
        let path = port.add_path(&to_peer).unwrap().id;
        (port, path)
    });
    let calm = watched(port.wait_fd());
    fill(&mut port, path);
    port.reserve(path, LEN).unwrap().buf.fill(1);
    port.commit();
    port.flush(crate::testing::no_failure);
    assert_eq!(waited_for(&port), [descriptor(&port, path)]);
    ns.sh("tc qdisc del dev v0 root");
    assert!(descriptors::wait_readable(port.wait_fd(), 5000).unwrap(), "it drains");
    port.flush(crate::testing::no_failure);
    assert_eq!(watched(port.wait_fd()), calm);
}
