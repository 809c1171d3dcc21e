//! The sockets of a port: one per own address on UDP/4791, and others to send from other source
//! ports.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd as _;
use std::time::Instant;

use super::domain::domain_of;
use super::holder;
use super::sys::{Dest, Message, SendScratch, SockAddr, Socket, send};
use crate::ROCE_PORT;
use crate::kernel::descriptors::patiently;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{RouteKind, RouteQuery, Rtnl, Way};
use crate::kernel::worded::worded;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::{Backend, PathSpec};
use crate::port::error::OpenError;
use crate::port::error::a_broadcast_address;
use crate::port::steering;
use crate::tuning::handed::COPIES_HELD_MAX;
use crate::tuning::udp::{ENDING_HOLDER_MAX, SRC_PORT_TRIES, UNSEEN_HOLDER_MAX};

/// Source ports are taken from here up when the wanted one is in use, as RoCEv2 senders do.
const SRC_PORT_MIN: u16 = 0xC000;

/// The purpose of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Receives and sends.
    Receive,
    /// Owns the port and sends. Takes datagrams that do not come by the port's interface, which is
    /// read elsewhere; and on a shared address those for none of these ports, so that they are
    /// counted.
    Guard { iface: u32, mac: [u8; 6], shards: Shards },
    /// Owns the port, drops all input, and sends.
    Shut,
    /// Drops all input, and sends.
    Send,
    /// Receives datagrams to a group.
    Group,
}

/// The configuration of a socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    tx_buffer_bytes: u32,
    rx_buffer_bytes: u32,
    force_buffers: bool,
    /// Whether the kernel merges datagrams that arrive together (`UDP_GRO`).
    merges: bool,
    /// The interface or VRF that it is bound to.
    interface: Option<u32>,
}

impl Options {
    /// For the sockets of a port whose interface belongs to this VRF.
    pub(super) fn new(config: &PortConfig, domain: Option<u32>) -> Self {
        Self {
            interface: domain,
            tx_buffer_bytes: config.tx_buffer_bytes,
            rx_buffer_bytes: config.udp.rx_buffer_bytes,
            force_buffers: config.force_buffers,
            merges: !config.no_segmentation,
        }
    }
}

/// The network namespace and the VRF of a port, which are those of its first sockets. Later sockets
/// are in the namespace of the thread that opens them: that thread may have left the port's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Home {
    netns: Option<u64>,
    pub(super) domain: Option<u32>,
}

impl Home {
    pub(super) fn of(own: &Socket) -> Self {
        Self { netns: own.netns(), domain: own.interface() }
    }

    /// Whether a socket is in this namespace. Before Linux 5.14 that is unknown, and every socket
    /// counts as in it.
    pub(super) fn has(self, socket: &Socket) -> bool {
        self.netns == socket.netns()
    }
}

/// Binds a socket that shares its port with none. A port that is just being freed is waited for, as
/// long as processes end; a port that the same process holds at two looks is in use.
fn bind_alone(socket: &Socket, name: &SocketAddr, address: IpAddr) -> io::Result<()> {
    let begun = Instant::now();
    let mut before = Vec::new();
    loop {
        let bound = patiently(libc::EADDRINUSE, COPIES_HELD_MAX, || socket.bind(name));
        let waited = begun.elapsed();
        match &bound {
            Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) && waited < ENDING_HOLDER_MAX => {}
            _ => return bound,
        }
        let holders = holder::of(address, ROCE_PORT);
        let is_held = holders == before && !holders.is_empty();
        if (is_held || waited >= UNSEEN_HOLDER_MAX) && !holder::is_ending(&holders) {
            return bound;
        }
        before = holders;
    }
}

/// Binds a socket whose address is there once in a VRF and once in none. Linux lets sockets of both
/// bind to it if they share the port, which those of one user may. `None`: that is not so here.
fn bind_beside(iface: &Interface, socket: &Socket, name: &SocketAddr) -> Option<io::Result<()>> {
    let own = domain_of(iface);
    let is_beside = |it: &Interface| {
        it.index != iface.index && it.has(name.ip()) && domain_of(it).is_some() != own.is_some()
    };
    let all = Rtnl::open().and_then(|mut rtnl| rtnl.interfaces()).ok()?;
    all.iter().any(is_beside).then(|| socket.share_port().and_then(|()| socket.bind(name)))
}

/// Opens the sockets of one own address on UDP/4791, one for each port.
pub(super) fn open_own(
    iface: &Interface,
    address: IpAddr,
    options: Options,
    role: Role,
    shards: Shards,
) -> Result<Vec<Socket>, OpenError> {
    let mut sockets = vec![open_bound(iface, address, options, role, true)?];
    if shards.count == 1 {
        return Ok(sockets);
    }
    sockets[0].share_port().map_err(|e| own_error(iface, address, "share", e))?;
    for _ in 1..shards.count {
        // Datagrams that arrived meanwhile are in the other ports' queues; their shards hand them
        // over.
        sockets.push(open_bound(iface, address, options, role, false)?);
    }
    let steered = sockets[0].steer(&steering::by_socket(shards));
    steered.map_err(|e| own_error(iface, address, "steer the datagrams to", e))?;
    Ok(sockets)
}

/// Opens a socket that processes share, on UDP/4791 of an address. It drops all input.
pub(crate) fn open_shared(
    iface: &Interface,
    address: IpAddr,
    config: &PortConfig,
    is_first: bool,
) -> Result<Socket, OpenError> {
    let options = Options::new(config, domain_of(iface));
    if is_first {
        // No other process has the port. A socket that is bound alone cannot have a program later.
        drop(open_bound(iface, address, options, Role::Shut, true)?);
    }
    open_bound(iface, address, options, Role::Shut, false)
}

/// Makes a socket that processes share this process's: with its options, and with nothing in its
/// queue.
pub(super) fn take_over(
    socket: &Socket,
    address: IpAddr,
    options: Options,
    role: Role,
) -> io::Result<()> {
    socket.drop_all_input()?;
    socket.empty();
    // A process that was killed may have begun a message.
    socket.set(libc::SOL_UDP, libc::UDP_CORK, 0)?;
    configure(socket, address.is_ipv6(), options, role)?;
    if role == Role::Receive { socket.take_input() } else { Ok(()) }
}

/// Makes the socket of slot 0 this process's, which is the leader now. Its waiting datagrams are
/// for all.
pub(super) fn inherit(socket: &Socket, address: IpAddr, options: Options) -> io::Result<()> {
    socket.set(libc::SOL_UDP, libc::UDP_CORK, 0)?;
    configure(socket, address.is_ipv6(), options, Role::Receive)?;
    socket.take_input()
}

/// A socket on UDP/4791 of an address. The first of an address is bound while it shares the port
/// with none, which fails if another socket has it.
fn open_bound(
    iface: &Interface,
    address: IpAddr,
    options: Options,
    role: Role,
    is_first: bool,
) -> Result<Socket, OpenError> {
    let name = socket_address(iface, address, ROCE_PORT, 0);
    let socket = make(address, options, role)?;
    if is_first {
        bind_alone(&socket, &name, address)
            .or_else(|e| match e.raw_os_error() {
                Some(libc::EADDRINUSE) => bind_beside(iface, &socket, &name).unwrap_or(Err(e)),
                _ => Err(e),
            })
            .map_err(|e| own_error(iface, address, "bind", e))?;
    } else {
        socket.share_port().map_err(|e| own_error(iface, address, "share", e))?;
        // A child that is about to execute a program may have a copy of the one that was alone. On
        // a busy machine it waits for a processor.
        patiently(libc::EADDRINUSE, UNSEEN_HOLDER_MAX, || socket.bind(&name))
            .map_err(|e| own_error(iface, address, "bind once more", e))?;
    }
    Ok(socket)
}

fn own_error(iface: &Interface, address: IpAddr, what: &str, source: io::Error) -> OpenError {
    let hint = match source.raw_os_error() {
        Some(libc::EADDRINUSE) => holder::hint(address, ROCE_PORT),
        Some(libc::EADDRNOTAVAIL) => format!(
            "{address} is not an address of this network namespace, or is still tentative: see \
             `ip address show dev {}`",
            iface.name
        ),
        _ => String::new(),
    };
    OpenError::os(Backend::Udp, format!("cannot {what} {address}:{ROCE_PORT}"), source, hint)
}

/// A socket that is not bound yet.
fn make(address: IpAddr, options: Options, role: Role) -> Result<Socket, OpenError> {
    let fail = |what: &str, source: io::Error, hint: &str| {
        OpenError::os(Backend::Udp, format!("cannot {what} {address}:{ROCE_PORT}"), source, hint)
    };
    let socket = Socket::new(address.is_ipv6()).map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EAFNOSUPPORT) => "this kernel has no such address family: use the other",
            _ => "",
        };
        fail("make a UDP socket for", e, hint)
    })?;
    place(&socket, options).map_err(|e| {
        let hint = "this process is in another VRF (`ip vrf identify`): start it in the one of the \
                    interface (`ip vrf exec`), or give it CAP_NET_RAW";
        fail("choose the VRF of the UDP socket of", e, hint)
    })?;
    configure(&socket, address.is_ipv6(), options, role)
        .map_err(|e| fail("configure the UDP socket of", e, "Linux 5.0 or newer is needed"))?;
    Ok(socket)
}

/// Opens the socket of a group on UDP/4791, and joins the group at the interface. Other sockets on
/// this machine may do the same: each gets all datagrams.
pub(super) fn open_group(
    iface: &Interface,
    home: Home,
    group: IpAddr,
    options: Options,
) -> io::Result<Socket> {
    let v6 = group.is_ipv6();
    let what = |doing: &str, e: &io::Error| {
        let hint = match e.raw_os_error() {
            Some(libc::EADDRINUSE) => ": a program has the port without sharing it",
            Some(libc::EMFILE | libc::ENFILE) => ": raise the limit of open files (`ulimit -n`)",
            _ => "",
        };
        worded(e, format!("cannot {doing} {group} on {}: {e}{hint}", iface.name))
    };
    let socket = Socket::new(v6).map_err(|e| what("make a UDP socket for", &e))?;
    if !home.has(&socket) {
        let hint =
            "this thread is in another network namespace than the port: join where that was opened";
        let text = format!("cannot join {group} on {}: {hint}", iface.name);
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    place(&socket, options).map_err(|e| what("choose the VRF of", &e))?;
    configure(&socket, v6, options, Role::Group).map_err(|e| what("configure a socket of", &e))?;
    if v6 {
        // To the kernel a group beyond the link is one at all interfaces.
        let _ = socket.bind_to_interface(iface.index);
    }
    let address = socket_address(iface, group, ROCE_PORT, 0);
    socket.bind(&address).map_err(|e| what("bind to", &e))?;
    socket.join(group, iface.index).map_err(|e| what("join", &e))?;
    Ok(socket)
}

/// Opens a socket to send from `address` with source port `wanted`, or the next free one; with
/// `by_port` it is bound to the port's interface, if the kernel lets it. `None` if no port is free,
/// or if the calling thread has left the port's namespace.
pub(super) fn open_sender(
    iface: &Interface,
    home: Home,
    address: IpAddr,
    wanted: u16,
    by_port: bool,
    options: Options,
) -> io::Result<Option<(Socket, u16)>> {
    let socket = Socket::new(address.is_ipv6())?;
    if !home.has(&socket) {
        return Ok(None);
    }
    let is_bound = by_port && socket.bind_to_interface(iface.index).is_ok();
    if !is_bound {
        place(&socket, options)?;
    }
    configure(&socket, address.is_ipv6(), options, Role::Send)?;
    let mut port = wanted;
    for _ in 0..=SRC_PORT_TRIES {
        match socket.bind(&socket_address(iface, address, port, 0)) {
            Ok(()) => {
                let port = socket.local_port()?;
                return Ok(Some((socket, port)));
            }
            Err(e) => match e.raw_os_error() {
                Some(libc::EADDRINUSE | libc::EACCES) => {
                    port = port.checked_add(1).unwrap_or(SRC_PORT_MIN).max(SRC_PORT_MIN);
                }
                _ => return Err(e),
            },
        }
    }
    Ok(None)
}

/// Puts a new socket where those of the port are: in its VRF, or in none. It is in that of the
/// process (`ip vrf exec`), which only `CAP_NET_RAW` may leave.
fn place(socket: &Socket, options: Options) -> io::Result<()> {
    socket.bind_to_interface(options.interface.unwrap_or(0))
}

fn configure(socket: &Socket, v6: bool, options: Options, role: Role) -> io::Result<()> {
    match role {
        Role::Receive => {}
        Role::Guard { iface, mac, shards } => {
            socket.take_other_input(iface, options.interface.map(|_| mac), shards)?;
        }
        Role::Shut | Role::Send => socket.drop_all_input()?,
        Role::Group => {
            socket.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
            // Only datagrams of groups that this socket has joined, of IPv4 at the same interface.
            if v6 {
                socket.set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0)?;
            } else {
                socket.set(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
            }
        }
    }
    // Never fragment. For IPv4 this also makes the identification known: an unconnected socket with
    // DF writes 0, and segmentation counts it up.
    if v6 {
        socket.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        // Lets the flow label of the destination address take effect; 0 leaves it to the kernel.
        // Where the kernel lacks the option, as some emulators of Linux do, it chooses each label.
        match socket.set(libc::IPPROTO_IPV6, libc::IPV6_FLOWINFO_SEND, 1) {
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => {}
            result => result?,
        }
    } else {
        socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
    }
    buffer(socket, libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, options.tx_buffer_bytes, options)?;
    if role == Role::Send {
        return Ok(());
    }
    // Also where all is dropped: otherwise the kernel segments every super-packet for that. Kernels
    // without it merge nothing.
    let merges = socket.set(libc::SOL_UDP, libc::UDP_GRO, i32::from(options.merges));
    if options.merges {
        merges?;
    }
    if role == Role::Shut {
        return Ok(());
    }
    buffer(socket, libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, options.rx_buffer_bytes, options)?;
    if v6 {
        socket.set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        // Peers exist that send checksum 0; the ICRC covers the payload.
        socket.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
    } else {
        socket.set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    }
    Ok(())
}

fn buffer(
    socket: &Socket,
    option: i32,
    force: i32,
    bytes: u32,
    options: Options,
) -> io::Result<()> {
    // The kernel doubles the value.
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX).min(i32::MAX / 2);
    if options.force_buffers && socket.set(libc::SOL_SOCKET, force, bytes).is_ok() {
        return Ok(());
    }
    socket.set(libc::SOL_SOCKET, option, bytes)
}

/// The kernel's form of an address; link-local ones get the scope of `iface`.
pub(super) fn socket_address(
    iface: &Interface,
    address: IpAddr,
    port: u16,
    flow_label: u32,
) -> SocketAddr {
    match address {
        IpAddr::V4(_) => SocketAddr::new(address, port),
        IpAddr::V6(ip) => {
            let link_local = ip.is_unicast_link_local() || ip.is_multicast();
            let scope = if link_local { iface.index } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(ip, port, flow_label & 0xF_FFFF, scope))
        }
    }
}

/// How the datagrams of a path leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// They do not: the kernel's loopback carries them to an address of this machine.
    Looped,
    /// By the port's interface.
    ByPort,
    /// As the kernel's routes say.
    Anyhow,
}

/// Asks the kernel how it would send along this path, and whether at all. `None` if that cannot be
/// known: the calling thread has left the port's namespace, or there is no descriptor left to ask
/// with, or no netlink. A missing route then shows on sending.
pub(super) fn way(iface: &Interface, home: Home, spec: &PathSpec) -> io::Result<Option<Leaving>> {
    let Ok(mut rtnl) = Rtnl::open() else { return Ok(None) };
    if !rtnl.as_fd().try_clone_to_owned().is_ok_and(|fd| home.has(&Socket::from(fd))) {
        return Ok(None);
    }
    let query = RouteQuery {
        destination: spec.remote,
        source: Some(spec.local),
        interface: None,
        tos: spec.tos,
        src_port: spec.src_port,
    };
    let found = match rtnl.way(iface, home.domain, query) {
        Ok(found) => found,
        // Emulators of Linux answer some questions only.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPERM)) => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let (leaving, kind) = match found {
        Way::Own => (Leaving::Looped, RouteKind::Local),
        Way::Port(route) => (Leaving::ByPort, route.kind),
        Way::Any(route) => (Leaving::Anyhow, route.kind),
    };
    match kind {
        RouteKind::Broadcast | RouteKind::Multicast => Err(a_broadcast_address(spec.remote)),
        _ => Ok(Some(leaving)),
    }
}

/// The destination of a path, for a socket with the default TTL or hop limit `ttl_default`.
pub(super) fn destination(iface: &Interface, spec: &PathSpec, ttl_default: u8) -> Dest {
    let name = socket_address(iface, spec.remote, ROCE_PORT, spec.flow_label);
    // Datagrams to a group have another default: 1.
    let ttl_default = if spec.remote.is_multicast() { 1 } else { ttl_default };
    Dest {
        name: SockAddr::new(&name),
        tos: (spec.tos != 0).then_some(spec.tos),
        ttl: (spec.ttl != 0 && spec.ttl != ttl_default).then_some(spec.ttl),
    }
}

/// The TTL or hop limit that the socket uses by default.
pub(super) fn ttl_default(socket: &Socket, v6: bool) -> u8 {
    let value = if v6 {
        socket.get(libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS)
    } else {
        socket.get(libc::IPPROTO_IP, libc::IP_TTL)
    };
    // The kernel never uses 0: it means "unknown", and every path sets its own.
    value.ok().and_then(|v| u8::try_from(v).ok()).unwrap_or(0)
}

/// The segments that the kernel takes per send: 128 since Linux 6.9, 64 before, 1 without
/// `UDP_SEGMENT` (before 4.18).
///
/// Sends one super-packet from `address` to itself, which does not leave the machine.
pub(super) fn segments_max(iface: &Interface, address: IpAddr, options: Options) -> u16 {
    const SEGMENTS: [u16; 2] = [128, 64];
    const SEGMENT_BYTES: usize = 16;
    let probe = || -> io::Result<u16> {
        let (socket, dest) = to_itself(iface, address, options)?;
        if socket.get(libc::SOL_UDP, libc::UDP_SEGMENT).is_err() {
            return Ok(1);
        }
        let payload = [0; SEGMENTS[0] as usize * SEGMENT_BYTES];
        let payload = payload.as_slice();
        let message = Message { payload, dest: &dest, by: None, segment: SEGMENT_BYTES as u16 };
        send(&socket, &mut SendScratch::new(), std::iter::once(message))?;
        Ok(SEGMENTS[0])
    };
    // Any other error (such as a rule that forbids it) says nothing: a lower limit then shows on
    // sending.
    probe().unwrap_or(SEGMENTS[1])
}

/// A socket whose messages arrive at itself, whole: they do not leave the machine.
pub(super) fn to_itself(
    iface: &Interface,
    address: IpAddr,
    options: Options,
) -> io::Result<(Socket, Dest)> {
    let socket = Socket::new(address.is_ipv6())?;
    place(&socket, options)?;
    // A filter that drops super-packets would count an error for each datagram (`Udp: InErrors`).
    let _ = socket.set(libc::SOL_UDP, libc::UDP_GRO, 1);
    socket.bind(&socket_address(iface, address, 0, 0))?;
    let itself = socket_address(iface, address, socket.local_port()?, 0);
    Ok((socket, Dest { name: SockAddr::new(&itself), tos: None, ttl: None }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of one link, or of the machine: a link-local address alone names no link.
    #[test]
    fn an_address_of_the_link_names_its_interface() {
        let iface = Interface {
            name: "v0".into(),
            index: 7,
            mtu: 1500,
            mac: [2; 6],
            up: true,
            loopback: false,
            addresses: Vec::new(),
        };
        for (address, label, scope) in [
            ("10.0.0.1", 0x1_2345, None),
            ("fd00::1", 0, Some(0)),
            ("fd00::1", 0xf_ffff, Some(0)),
            ("fe80::1", 0x1_2345, Some(7)),
            ("ff02::77", 0, Some(7)),
            ("ff15::77", 0, Some(7)),
        ] {
            let ip: IpAddr = address.parse().expect("an address");
            let expected = match ip {
                IpAddr::V4(_) => SocketAddr::new(ip, ROCE_PORT),
                IpAddr::V6(ip) => {
                    SocketAddrV6::new(ip, ROCE_PORT, label, scope.expect("of IPv6")).into()
                }
            };
            assert_eq!(socket_address(&iface, ip, ROCE_PORT, label | 0xfff0_0000), expected);
        }
    }
}
