//! Ports of any backend on the two sides of a pair of namespaces.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::frames::{FrameIo, FramePort};
use crate::kernel::descriptors;
use crate::port::parts::{Parts, SharedSockets};
use crate::testing::ReceiveBy as _;
use crate::testing::testns::{NetNs, Pair};
use crate::udp::UdpPort;
use crate::{
    AnyPort, Backend, Interface, OpenError, PathSpec, Port, PortConfig, RxDatagram, RxIpId, Shards,
};

/// The byte that says which port a datagram is for.
pub(crate) const SELECTOR: u16 = 5;

pub(crate) fn ip(address: &str) -> IpAddr {
    address.parse().expect("an address")
}

/// A path between these addresses.
pub(crate) fn spec(local: &str, remote: &str) -> PathSpec {
    let (local, remote) = (ip(local), ip(remote));
    PathSpec { local, remote, src_port: 0xc0de, tos: 0, ttl: 64, flow_label: 0 }
}

/// A received datagram, owned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) payload: Vec<u8>,
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) src_port: u16,
    pub(crate) ip_id: RxIpId,
    pub(crate) tos: Option<u8>,
}

impl From<RxDatagram<'_>> for Got {
    fn from(d: RxDatagram<'_>) -> Self {
        let RxDatagram { payload, src, dst, src_port, ip_id, tos } = d;
        Self { payload: payload.to_vec(), src, dst, src_port, ip_id, tos }
    }
}

/// Receives until `want` datagrams have arrived, or for this long.
pub(crate) fn receive_for(port: &mut impl Port, want: usize, patience: Duration) -> Vec<Got> {
    let (mut got, mut taken, end) = (Vec::new(), 0, Instant::now() + patience);
    loop {
        taken += port.receive_by(64, &mut |d| got.push(d.into())).expect("alive");
        assert_eq!(taken, got.len(), "receive() returns their number");
        if got.len() >= want || Instant::now() > end {
            return got;
        }
        descriptors::wait_readable(port.wait_fd(), 20).expect("poll");
    }
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

/// Takes the parts of ports from the kernel.
type Take =
    fn(&Interface, &[IpAddr], &PortConfig, Shards, Option<SharedSockets>) -> Parted<Vec<Parts>>;
type Parted<T> = Result<T, OpenError>;

/// Ports of a backend whose two steps of opening are one.
pub(crate) trait Open: Sized {
    const TAKE: Take;
    const ASSEMBLE: fn(Parts) -> Parted<Self>;

    fn open(iface: &Interface, addresses: &[IpAddr], config: &PortConfig) -> Parted<Self> {
        let ports = Self::open_shards(iface, addresses, config, Shards::ONE);
        ports.map(|mut ports| ports.pop().expect("one was asked for"))
    }

    fn open_shards(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
    ) -> Parted<Vec<Self>> {
        let parts = Self::TAKE(iface, addresses, config, shards, None)?;
        parts.into_iter().map(Self::ASSEMBLE).collect()
    }
}

impl Open for UdpPort {
    const TAKE: Take = Self::acquire;
    const ASSEMBLE: fn(Parts) -> Parted<Self> = Self::assemble;
}

impl<F: FrameIo> Open for FramePort<F> {
    const TAKE: Take = Self::acquire;
    const ASSEMBLE: fn(Parts) -> Parted<Self> = Self::assemble;
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
    let end = Instant::now() + Duration::from_secs(20);
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
    let shards = Shards { shared: false, first: 0, count, selector: SELECTOR };
    let parts = acquire(iface, backend, own, shards)?;
    parts.into_iter().map(AnyPort::assemble).collect()
}

/// Takes the parts of ports with the default configuration.
pub(crate) fn acquire(
    iface: &Interface,
    backend: Backend,
    own: &[IpAddr],
    shards: Shards,
) -> Result<Vec<Parts>, OpenError> {
    let take = match backend {
        Backend::Udp => UdpPort::TAKE,
        Backend::Packet => PacketPort::TAKE,
        _ => XdpPort::TAKE,
    };
    take(iface, own, &PortConfig::default(), shards, None)
}

pub(crate) fn sides(backend: Backend) -> Result<(Pair, AnyPort, AnyPort), String> {
    let pair = Pair::new().map_err(|e| e.to_string())?;
    let a = open(&pair.a, backend, &["10.9.0.1", "fd09::1"]).map_err(|e| e.to_string())?;
    let b = open(&pair.b, backend, &["10.9.0.2", "fd09::2"]).map_err(|e| e.to_string())?;
    Ok((pair, a, b))
}

/// A module of tests for each case, one for each of its backends.
macro_rules! on_each {
    ($file:literal: $($case:ident: $($test:ident $backend:ident),+;)+) => {$(
        mod $case {$(
            #[test]
            fn $test() {
                $crate::testing::testns::or_skip!($file, super::$case($crate::Backend::$backend));
            }
        )+}
    )+};
}
pub(crate) use on_each;
