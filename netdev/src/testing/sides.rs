//! Ports of any backend on the two sides of a pair of namespaces.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::testing::testns::{NetNs, Pair};
use crate::udp::UdpPort;
use crate::{AnyPort, Backend, Interface, OpenError, PortConfig, Shards};

/// The byte that says which port a datagram is for.
pub(crate) const SELECTOR: u16 = 5;

pub(crate) fn ip(address: &str) -> IpAddr {
    address.parse().expect("an address")
}

/// The loopback interface, as it is in every namespace.
pub(crate) fn lo() -> Interface {
    Interface {
        name: "lo".into(),
        index: 1,
        mtu: 65_536,
        mac: [0; 6],
        up: true,
        loopback: true,
        addresses: vec![(ip("127.0.0.1"), 8)],
    }
}

/// A port on `v0`, for the addresses given.
pub(crate) fn open(ns: &NetNs, backend: Backend, own: &[&str]) -> Result<AnyPort, OpenError> {
    let mut ports = open_shards(ns, backend, own, 1)?;
    Ok(ports.pop().expect("one was asked for"))
}

/// Opens several ports that share the addresses. A socket closed by another test may live on for a
/// moment, in a child between fork and exec.
pub(crate) fn open_shards(
    ns: &NetNs,
    backend: Backend,
    own: &[&str],
    count: usize,
) -> Result<Vec<AnyPort>, OpenError> {
    let own: Vec<IpAddr> = own.iter().map(|address| ip(address)).collect();
    let end = Instant::now() + Duration::from_secs(3);
    ns.run(|| {
        let iface = Interface::by_name("v0").expect("v0");
        loop {
            match open_once(&iface, backend, &own, count) {
                Err(e) if e.errno() == libc::EADDRINUSE && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                ports => return ports,
            }
        }
    })
}

/// As [`open_shards`], but in the calling thread's namespace, and with a single attempt.
pub(crate) fn open_once(
    iface: &Interface,
    backend: Backend,
    own: &[IpAddr],
    count: usize,
) -> Result<Vec<AnyPort>, OpenError> {
    let (config, shards) =
        (PortConfig::default(), Shards { shared: false, first: 0, count, selector: SELECTOR });
    let parts = match backend {
        Backend::Udp => UdpPort::acquire(iface, own, &config, shards, None),
        Backend::Packet => PacketPort::acquire(iface, own, &config, shards, None),
        _ => XdpPort::acquire(iface, own, &config, shards, None),
    };
    parts?.into_iter().map(AnyPort::assemble).collect()
}

/// A port on each side.
pub(crate) fn sides(backend: Backend) -> Result<(Pair, AnyPort, AnyPort), String> {
    let pair = Pair::new().map_err(|e| e.to_string())?;
    let a = open(&pair.a, backend, &["10.9.0.1", "fd09::1"]).map_err(|e| e.to_string())?;
    let b = open(&pair.b, backend, &["10.9.0.2", "fd09::2"]).map_err(|e| e.to_string())?;
    Ok((pair, a, b))
}

/// One test for each backend.
macro_rules! on_each {
    ($file:literal: $($name:ident: $case:ident, $backend:ident;)+) => {$(
        #[test]
        fn $name() {
            $crate::testing::testns::or_skip!($file, $case($crate::Backend::$backend));
        }
    )+};
}
pub(crate) use on_each;
