//! Opening: memory, socket, program, attachment, and a hint for the user if one of them fails.

use super::attach_error;
use super::bpf::{Link, Map, Program, fd_value};
use super::prog::{OwnAddresses, program};
use super::rx::RxHalf;
use super::socket::{Rings, Socket};
use super::tx::TxHalf;
use super::umem::{CHUNK, Umem};
use crate::PortConfig;
use crate::error::OpenError;
use crate::ethtool::receive_queues;
use crate::fd::{COPIES_HELD_MAX, patiently};
use crate::headers::ETH_LEN;
use crate::iface::Interface;
use crate::port::Backend;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of a received frame that fit a chunk: the kernel keeps 256 free (`XDP_PACKET_HEADROOM`).
pub(super) const RX_CHUNK_BYTES: usize = CHUNK - 256;
/// The most chunks of a TX slot: enough for a 4096-byte RoCE payload and all its headers.
const SLOT_CHUNKS_MAX: usize = 2;
/// The fewest and the most chunks for each direction.
const CHUNKS_MIN: u32 = 64;
const CHUNKS_MAX: u32 = 1 << 15;

/// How long to wait until the kernel frees the queue of a closed socket, or of a killed process. A
/// work queue does that, under the lock of all network configuration (RTNL).
const QUEUE_RELEASE_MAX: Duration = Duration::from_secs(2);

const NEEDS_CAPS: &str = "needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF in the host's user namespace: \
     run with --cap-add NET_RAW --cap-add NET_ADMIN --cap-add BPF, or choose --netdev packet or udp";

/// An attached program with its socket. The fields are dropped in this order: the program leaves
/// the interface first.
#[derive(Debug)]
pub(super) struct Opened {
    /// Keeps the program attached, for all sockets.
    pub(super) link: Arc<Link>,
    /// The addresses that the program takes, for all sockets.
    pub(super) own: Arc<Mutex<OwnAddresses>>,
    /// The sending half.
    pub(super) tx: TxHalf,
    /// The receiving half.
    pub(super) rx: RxHalf,
    /// The socket.
    pub(super) socket: Socket,
    /// The memory of both halves.
    pub(super) umem: Umem,
    /// Whether the driver works on the UMEM without copying.
    pub(super) zero_copy: bool,
    /// Chunks for receiving, and as many for sending.
    pub(super) chunks_each: u32,
}

/// Opens `count` sockets, each on a queue of the interface, and attaches the program. A single
/// socket is on the configured queue; several are on the first ones.
pub(super) fn open(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    count: usize,
) -> Result<Vec<Opened>, OpenError> {
    let first = if count == 1 { config.xdp_queue } else { 0 };
    check_interface(iface, config, first, count)?;
    let queues = first..first + count as u32;
    let made = queues.clone().map(|_| make(config)).collect::<Result<Vec<_>, _>>()?;
    let (program, own, sockets) = load_program(iface, addresses, queues.end)?;
    let frame_bytes = iface.mtu as usize + ETH_LEN;
    let per_slot = frame_bytes.div_ceil(CHUNK).min(SLOT_CHUNKS_MAX) as u32;
    let mut opened = Vec::with_capacity(count);
    for (queue, (socket, mut umem, rings, chunks_each)) in queues.zip(made) {
        bind(&socket, iface, queue, QUEUE_RELEASE_MAX)?;
        let zero_copy = socket.zero_copy().unwrap_or(false);
        if let Some(microseconds) = config.xdp_busy_poll_us {
            busy_poll(&socket, iface, zero_copy, microseconds)?;
        }
        let rx = RxHalf::new(rings.rx, rings.fill, chunks_each, &mut umem);
        let (tx, done) = (rings.tx, rings.completion);
        let mut tx = TxHalf::new(tx, done, chunks_each, chunks_each, per_slot);
        tx.set_call_budget(&socket, chunks_each);
        sockets
            .set(&queue.to_ne_bytes(), fd_value(socket.as_fd()))
            .map_err(|e| permission("cannot put the socket into the XSKMAP", e))?;
        opened.push((tx, rx, socket, umem, zero_copy, chunks_each));
    }
    let attach = || program.attach(iface.index, config.xdp_generic);
    let link = patiently(libc::EBUSY, COPIES_HELD_MAX, attach)
        .map_err(|e| attach_error::explain(iface, config.xdp_generic, e))?;
    let (link, own) = (Arc::new(link), Arc::new(Mutex::new(own)));
    let with_link = |(tx, rx, socket, umem, zero_copy, chunks_each)| {
        let (link, own) = (link.clone(), own.clone());
        Opened { link, own, tx, rx, socket, umem, zero_copy, chunks_each }
    };
    Ok(opened.into_iter().map(with_link).collect())
}

/// An unbound socket with its memory and its rings.
fn make(config: &PortConfig) -> Result<(Socket, Umem, Rings, u32), OpenError> {
    let socket = Socket::new().map_err(|e| permission("cannot open an AF_XDP socket", e))?;
    let (umem, chunks_each) = register_memory(&socket, config.ring_frames)?;
    // Twice the entries that the chunks could fill: the kernel shows some of its progress late.
    let rings = socket
        .make_rings(2 * chunks_each)
        .map_err(|e| OpenError::os(Backend::Xdp, "cannot make the AF_XDP rings", e, ""))?;
    socket.set_send_buffer(config.tx_buffer_bytes, config.force_buffers);
    Ok((socket, umem, rings, chunks_each))
}

/// Lets calls of this process drive the driver. Without zero-copy there is no driver queue to poll;
/// on a veth, polling was measured to cost 20 to 108 µs.
fn busy_poll(
    socket: &Socket,
    iface: &Interface,
    zero_copy: bool,
    microseconds: u32,
) -> Result<(), OpenError> {
    if !zero_copy {
        return Err(OpenError::plain(
            Backend::Xdp,
            format!("busy polling needs zero-copy, which the driver of {} has not", iface.name),
            "leave xdp_busy_poll_us out",
        ));
    }
    socket.prefer_busy_poll(microseconds).map_err(|e| permission("cannot poll busily", e))
}

fn check_interface(
    iface: &Interface,
    config: &PortConfig,
    first: u32,
    count: usize,
) -> Result<(), OpenError> {
    let name = &iface.name;
    if iface.loopback {
        return Err(OpenError::plain(
            Backend::Xdp,
            format!("AF_XDP does not work on the loopback interface {name}"),
            "choose --netdev udp, or another interface",
        ));
    }
    let queues = receive_queues(name).unwrap_or(1);
    let last = u64::from(first) + count as u64 - 1;
    if last >= u64::from(queues) {
        let hint = match count {
            1 => "choose a lower queue".to_owned(),
            _ => format!(
                "AF_XDP needs a receive queue for each shard: `ethtool -L {name} combined {count}` (veth: \
                 `ethtool -L {name} rx {count}`), or fewer shards, or --netdev packet"
            ),
        };
        let what = format!("{name} has no receive queue {last}: it has {queues}");
        return Err(OpenError::plain(Backend::Xdp, what, hint));
    }
    if queues as usize > count && !config.xdp_steered {
        let read = if count == 1 { "one".to_owned() } else { count.to_string() };
        return Err(OpenError::plain(
            Backend::Xdp,
            format!(
                "{name} spreads what it receives over {queues} queues, AF_XDP reads only {read}"
            ),
            format!(
                "give it one queue for each shard: `ethtool -L {name} combined {count}` (veth: `ethtool -L {name} rx {count} \
                 tx {count}`), or steer UDP/4791 to what is read and say so in the configuration, or choose \
                 --netdev packet"
            ),
        ));
    }
    Ok(())
}

/// Registers memory for `wanted` chunks each way, or as much as `RLIMIT_MEMLOCK` allows.
fn register_memory(socket: &Socket, wanted: u32) -> Result<(Umem, u32), OpenError> {
    let mut chunks = wanted.clamp(CHUNKS_MIN, CHUNKS_MAX).next_power_of_two();
    loop {
        let umem = Umem::new(2 * chunks).map_err(|e| {
            OpenError::os(Backend::Xdp, "cannot map the packet memory", e, "lower ring_frames")
        })?;
        match socket.register(&umem) {
            Ok(()) => return Ok((umem, chunks)),
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) && chunks > CHUNKS_MIN => {
                chunks /= 2;
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                let kib = 2 * chunks as usize * CHUNK / 1024;
                return Err(OpenError::os(
                    Backend::Xdp,
                    format!("cannot lock the {kib} KiB of packet memory"),
                    e,
                    "raise the limit (`ulimit -l`, docker run --ulimit memlock=-1), add \
                     CAP_IPC_LOCK, or choose --netdev packet or udp",
                ));
            }
            Err(e) => return Err(permission("cannot register the packet memory", e)),
        }
    }
}

fn load_program(
    iface: &Interface,
    addresses: &[IpAddr],
    queues: u32,
) -> Result<(Program, OwnAddresses, Map), OpenError> {
    let failed = |e| permission("cannot make a BPF map", e);
    let own = OwnAddresses::new(addresses, iface.mac).map_err(failed)?;
    let sockets = Map::sockets("roce_sockets", queues).map_err(failed)?;
    let program = Program::load("roce_redirect", &program(&own, &sockets))
        .map_err(|e| permission("cannot load the XDP program", e))?;
    Ok((program, own, sockets))
}

/// Binds to a queue; if it is busy, retries for up to `limit`.
pub(super) fn bind(
    socket: &Socket,
    iface: &Interface,
    queue: u32,
    limit: Duration,
) -> Result<(), OpenError> {
    let bind = |flags| patiently(libc::EBUSY, limit, || socket.bind(iface.index, queue, flags));
    let single = libc::XDP_USE_NEED_WAKEUP;
    let fits_a_chunk = iface.mtu as usize + ETH_LEN <= RX_CHUNK_BYTES;
    // Neither XDP_ZEROCOPY nor XDP_COPY: the kernel takes the former where the driver has it.
    let bound = match bind(single | libc::XDP_USE_SG) {
        // Before Linux 6.6 XDP_USE_SG does not exist; without large frames it is not needed.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) && fits_a_chunk => bind(single),
        other => other,
    };
    bound.map_err(|e| {
        let what = format!("cannot bind to queue {queue} of {}", iface.name);
        let hint = match e.raw_os_error() {
            Some(libc::EBUSY) => {
                "another AF_XDP socket has this queue: stop its program, or choose --netdev packet \
                 or udp"
                    .to_owned()
            }
            Some(libc::EINVAL) if !fits_a_chunk => format!(
                "frames of an MTU of {} need Linux 6.6 or newer for AF_XDP: lower the MTU to 3500, \
                 or choose --netdev packet or udp",
                iface.mtu
            ),
            _ => "choose --netdev packet or udp".to_owned(),
        };
        OpenError::os(Backend::Xdp, what, e, hint)
    })
}

/// An error usually caused by a missing capability.
fn permission(what: &str, error: io::Error) -> OpenError {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => NEEDS_CAPS,
        Some(libc::EAFNOSUPPORT | libc::ENOSYS) => {
            "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS, CONFIG_BPF_SYSCALL): choose --netdev \
             packet or udp"
        }
        _ => "choose --netdev packet or udp",
    };
    OpenError::os(Backend::Xdp, what, error, hint)
}
