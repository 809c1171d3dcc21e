//! A full socket, and when the port waits for it.

use super::*;
use crate::testing::testns::watched;
use std::os::fd::AsRawFd as _;

/// An interface whose queueing discipline sends one packet and then almost none: its queue is full
/// at once.
fn behind_a_plug() -> io::Result<(NetNs, PacketPort)> {
    needs(&["tc"])?;
    let ns = NetNs::new()?;
    ns.sh("ip link add v0 type veth peer name v1
           ip link set v0 mtu 4200; ip link set v1 mtu 4200; ip link set v1 up; ip link set v0 up
           ip address add 10.9.0.1/24 dev v0
           ip neigh add 10.9.0.2 lladdr 02:00:00:00:09:02 dev v0
           ip neigh add 10.9.0.3 lladdr 02:00:00:00:09:03 dev v0
           tc qdisc add dev v0 root tbf rate 8bit burst 5000 limit 10mb");
    let config = PortConfig { tx_buffer_bytes: 1, force_buffers: false, ..PortConfig::default() };
    let port = open_on(&ns, "v0", &[A4], &config);
    Ok((ns, port))
}

/// The events of the port's own socket in the epoll set.
fn interest(port: &PacketPort) -> Option<i32> {
    let socket = port.io.socket.as_fd().as_raw_fd();
    let entries = watched(port.wait_fd()).into_iter();
    entries.filter(|(fd, _)| *fd == socket).map(|(_, events)| events).next()
}

fn set_buffer(port: &PacketPort, option: i32, bytes: i32) {
    port.io.socket.set(libc::SOL_SOCKET, option, bytes).expect("a buffer");
}

#[test]
fn room_is_waited_for_while_something_waits_for_it_and_somebody_watches() {
    const IN: Option<i32> = Some(libc::EPOLLIN);
    const IN_OUT: Option<i32> = Some(libc::EPOLLIN | libc::EPOLLOUT);
    let (ns, mut a) = or_skip!(behind_a_plug());
    let paths = ["10.9.0.2", "10.9.0.3"].map(|remote| path(&ns, &mut a, A4, remote).id);
    let mut blocked = 0;
    for unwatched in [[false; 3], [true, false, false], [false, true, true], [true; 3]] {
        assert_eq!(interest(&a), IN);
        // It takes a few flushes to fill the socket.
        for _ in 0..5 {
            paths.iter().for_each(|path| drop(commit(&mut a, *path, &[3000])));
            a.flush(crate::testing::no_failure);
        }
        assert!(a.wants_write());
        for unwatched in unwatched {
            assert_eq!(interest(&a), IN_OUT);
            assert!(!has_arrivals(&mut a), "it is full");
            if unwatched {
                a.watch(false).expect("it is watched");
                assert_eq!(interest(&a), None);
            }
            a.flush(crate::testing::no_failure);
            if unwatched {
                assert_eq!(interest(&a), None);
                a.watch(true).expect("room for an entry");
            }
        }
        assert!(a.stats().tx_blocked >= blocked + 4);
        blocked = a.stats().tx_blocked;
        let last = unwatched[2];
        set_buffer(&a, libc::SO_SNDBUFFORCE, 1 << 20);
        assert!(has_arrivals(&mut a), "it takes more");
        if last {
            a.watch(false).expect("it is watched");
        }
        a.flush(crate::testing::no_failure);
        assert!(!a.wants_write());
        if last {
            assert_eq!(interest(&a), None);
            a.watch(true).expect("room for an entry");
        }
        assert_eq!(interest(&a), IN);
        assert!(!has_arrivals(&mut a), "nothing is waited for");
        set_buffer(&a, libc::SO_SNDBUF, 1);
    }
    assert_eq!((a.stats().tx_failed, a.stats().tx_datagrams), (0, 4 * 10));
}
