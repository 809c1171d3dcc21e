//! Acquiring the parts of a port (memory, socket, program, attachment, and a hint for the user if
//! one of them fails), and assembling them.

use super::XdpIo;
use super::attach_error::{self, NEEDS};
use super::mapping::{is_memory_file, memory_file};
use super::prog::{Own, OwnMac, program};
use super::retry::Retry;
use super::rx::RxHalf;
use super::socket::{Rings, XdpSocket};
use super::tx::TxHalf;
use super::umem::{CHUNK, Umem};
use crate::frames::{Acquire, Assembled, FRAMES_ARE_COPIED};
use crate::kernel::bpf::{Link, Map, Program, fd_value};
use crate::kernel::descriptors::{apart, patiently};
use crate::kernel::ethtool::receive_queues;
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards, XdpConfig};
use crate::port::contract::{Backend, Capabilities, QueueKind, RxBudget};
use crate::port::error::OpenError;
use crate::port::headers::{ETH_LEN, HEADERS_V6};
use crate::port::parts::{BackendParts, Fds, Manifest, Parts, SharedSockets};
use crate::tuning::handed::COPIES_HELD_MAX;
use crate::tuning::xdp::{CHUNKS_MAX, CHUNKS_MIN, QUEUE_RELEASE_MAX};
use crate::udp;
use std::any::Any;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Bytes of a received frame that fit a chunk: the kernel keeps 256 free (`XDP_PACKET_HEADROOM`).
const RX_CHUNK_BYTES: usize = CHUNK - 256;
/// The most chunks of a TX slot: enough for a 4096-byte RoCE payload and all its headers.
const SLOT_CHUNKS_MAX: usize = 2;

/// The memory of a socket and its rings, mapped.
#[derive(Debug)]
struct Mapped {
    umem: Umem,
    rings: Rings,
}

/// A socket with its memory and its rings.
pub(super) struct Made {
    pub(super) socket: XdpSocket,
    pub(super) memory: OwnedFd,
    mapped: Mapped,
    /// Chunks for each direction.
    pub(super) chunks: u32,
}

/// A socket that is bound to a queue.
pub(super) struct OnQueue {
    pub(super) made: Made,
    pub(super) queue: u32,
    pub(super) zero_copy: bool,
}

/// The sockets of several ports, and the objects that take frames to them.
pub(super) struct Opened {
    pub(super) sockets: Vec<OnQueue>,
    pub(super) link: Link,
    /// The map of the interface's MAC.
    pub(super) mac: OwnedFd,
}

impl Acquire for XdpIo {
    const BACKEND: Backend = Backend::Xdp;

    /// Opens a socket for each port, each on a queue of the interface, and attaches the program. A
    /// single socket is on the configured queue; several are on the first ones.
    fn acquire(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
        shared: Option<SharedSockets>,
    ) -> Result<Vec<Parts>, OpenError> {
        // The guards come first: from the first redirected frame on, UDP/4791 is ours.
        let guards = udp::acquire_guards(Backend::Xdp, iface, addresses, config, shards, shared)?;
        let Opened { sockets, link, mac } =
            open_sockets(iface, addresses, config, shards, QUEUE_RELEASE_MAX)?;
        let segments_max = guards.segments_max;
        let parts = sockets.into_iter().zip(guards.into_ports()).map(|(opened, guard)| {
            let OnQueue { made: Made { socket, memory, mapped, chunks }, queue, zero_copy } =
                opened;
            let mut fds = vec![socket.into(), memory, copy(link.as_fd())?, copy(mac.as_fd())?];
            fds.extend(guard);
            let backend = BackendParts::Xdp { queue, chunks, zero_copy };
            let manifest = Manifest::new(iface, addresses, config, segments_max, backend);
            Ok(Parts { mapped: Some(Box::new(mapped)), ..Parts::new(manifest, fds) })
        });
        parts.collect()
    }

    /// Takes a socket with its memory and its rings over.
    fn assemble(
        manifest: &Manifest,
        fds: &mut Fds,
        mapped: Option<Box<dyn Any + Send>>,
    ) -> Result<Assembled<Self>, OpenError> {
        let BackendParts::Xdp { chunks, .. } = manifest.backend else {
            unreachable!("the port has checked the backend")
        };
        let [socket, memory, link, mac] = [(); 4].map(|()| fds.take());
        let socket = XdpSocket::from(socket);
        let mapped = mapped.and_then(|mapped| mapped.downcast::<Mapped>().ok());
        let Mapped { mut umem, rings } = match mapped {
            Some(mapped) => *mapped,
            None => {
                check_memory(memory.as_fd(), chunks)?;
                map(&socket, memory.as_fd(), chunks)?
            }
        };
        let Manifest { interface: iface, .. } = manifest;
        let frame_bytes_max = iface.mtu as usize + ETH_LEN;
        let per_slot = frame_bytes_max.div_ceil(CHUNK).min(SLOT_CHUNKS_MAX) as u32;
        let rx = RxHalf::new(rings.rx, rings.fill, chunks, &mut umem);
        let mut tx = TxHalf::new(rings.tx, rings.completion, chunks, chunks, per_slot);
        tx.set_call_budget(&socket, chunks);
        let retry =
            Retry::new().map_err(|e| OpenError::os(Backend::Xdp, "cannot make a timer", e, ""))?;
        let frame_max = tx.slot_bytes().min(frame_bytes_max);
        let capabilities = Capabilities {
            backend: Backend::Xdp,
            link_mtu: iface.mtu,
            segments_max: 1,
            run_bytes_max: frame_max.saturating_sub(HEADERS_V6) as u32,
            ip_id_exact: true,
            tos_on_send: true,
            tos_on_receive: true,
            rx_budget: rx_budget(chunks, iface.mtu),
            local_budget: RxBudget { bytes: 0, datagrams: 0 },
            rx_queue: QueueKind::Frames,
            copies_because: Some(FRAMES_ARE_COPIED.into()),
        };
        let mac = OwnMac::of_map(mac.as_fd()).map_err(|e| {
            let what = "cannot map the interface's Ethernet address";
            OpenError::os(
                Backend::Xdp,
                what,
                e,
                "send the descriptors in the order of the manifest",
            )
        })?;
        let io =
            Self { _link: link, mac, tx, rx, socket, umem, frame_bytes_max, reserved: None, retry };
        Ok(Assembled { io, capabilities })
    }
}

/// Opens a socket for each port, each on a queue, and attaches the program. Waits for a held queue
/// or program, up to `patience`: by a socket that was just closed, or by a copy of a descriptor.
pub(super) fn open_sockets(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    shards: Shards,
    patience: Duration,
) -> Result<Opened, OpenError> {
    let first = if shards.count == 1 { config.xdp.queue } else { 0 };
    check_interface(iface, &config.xdp, first, shards.count)?;
    let queues = first..first + shards.count as u32;
    let made = queues.clone().map(|_| make(config)).collect::<Result<Vec<_>, _>>()?;
    let mut sockets = Vec::with_capacity(shards.count);
    for (queue, made) in queues.clone().zip(made) {
        bind(&made.socket, iface, queue, patience)?;
        let zero_copy = made.socket.zero_copy().unwrap_or(false);
        sockets.push(OnQueue { made, queue, zero_copy });
    }
    let (program, own, by_queue) = load_program(iface, addresses, shards, queues.end)?;
    for OnQueue { made, queue, .. } in &sockets {
        by_queue
            .set(&queue.to_ne_bytes(), fd_value(made.socket.as_fd()))
            .map_err(|e| permission("cannot put the socket into the XSKMAP", e))?;
    }
    let attach = || program.attach(iface.index);
    let link = patiently(libc::EBUSY, COPIES_HELD_MAX.min(patience), attach)
        .map_err(|e| attach_error::explain(iface, e))?;
    Ok(Opened { sockets, link, mac: copy(own.mac.as_fd())? })
}

/// Capacity of `chunks` receive chunks, less an eighth for other senders' frames.
///
/// Where a frame may take two chunks, the number of datagrams is halved: the budget's bytes alone
/// would let small datagrams use up the chunks that large ones need. So with `d` datagrams allowed,
/// `k` of them in two chunks each, `d + k ≤ chunks` holds because the bytes allow `k ≤ d`.
fn rx_budget(chunks: u32, mtu: u32) -> RxBudget {
    let chunks = chunks - chunks / 8;
    let per_frame = (mtu as usize + ETH_LEN).div_ceil(RX_CHUNK_BYTES).min(2) as u32;
    let datagrams = chunks / per_frame;
    RxBudget { bytes: datagrams * RxBudget::cost(RX_CHUNK_BYTES as u32), datagrams }
}

/// An unbound socket with its memory and its rings.
fn make(config: &PortConfig) -> Result<Made, OpenError> {
    let socket = XdpSocket::new().map_err(|e| permission("cannot open an AF_XDP socket", e))?;
    let (memory, umem, chunks) = register_memory(&socket, config.xdp.ring_frames)?;
    // Before Linux 6.4 the rings cannot be mapped once the socket is bound.
    let rings = socket
        .make_rings(ring_entries(chunks))
        .and_then(|()| socket.map_rings(ring_entries(chunks)))
        .map_err(|e| OpenError::os(Backend::Xdp, "cannot make the AF_XDP rings", e, ""))?;
    socket.set_send_buffer(config.tx_buffer_bytes, config.force_buffers);
    Ok(Made { socket, memory, mapped: Mapped { umem, rings }, chunks })
}

/// Entries of each ring: twice the number that the chunks could fill, because the kernel shows some
/// of its progress late.
pub(super) fn ring_entries(chunks: u32) -> u32 {
    2 * chunks
}

/// Maps the memory and the rings of a socket that another process made.
fn map(socket: &XdpSocket, memory: BorrowedFd<'_>, chunks: u32) -> Result<Mapped, OpenError> {
    let umem = Umem::of_file(memory, 2 * chunks).map_err(|e| {
        OpenError::os(Backend::Xdp, "cannot map the packet memory", e, "lower ring_frames")
    })?;
    let rings = socket.map_rings(ring_entries(chunks)).map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EBUSY) => "another process can map them since Linux 6.4: open the port here",
            _ => "",
        };
        OpenError::os(Backend::Xdp, "cannot map the AF_XDP rings", e, hint)
    })?;
    Ok(Mapped { umem, rings })
}

/// An error unless this is a memory file for that number of chunks for each direction.
fn check_memory(memory: BorrowedFd<'_>, chunks: u32) -> Result<(), OpenError> {
    let is_valid = (CHUNKS_MIN..=CHUNKS_MAX).contains(&chunks) && chunks.is_power_of_two();
    if is_valid && is_memory_file(memory, Umem::bytes(2 * chunks)) {
        return Ok(());
    }
    Err(OpenError::plain(
        Backend::Xdp,
        format!("no memory file of {chunks} chunks for each direction"),
        "send the descriptors in the order of the manifest",
    ))
}

pub(super) fn copy(fd: BorrowedFd<'_>) -> Result<OwnedFd, OpenError> {
    fd.try_clone_to_owned()
        .map(apart)
        .map_err(|e| OpenError::os(Backend::Xdp, "cannot copy a descriptor", e, ""))
}

fn check_interface(
    iface: &Interface,
    config: &XdpConfig,
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
    if queues as usize > count && !config.steered {
        let read = if count == 1 { "one".to_owned() } else { count.to_string() };
        return Err(OpenError::plain(
            Backend::Xdp,
            format!("{name} spreads packets over {queues} queues, AF_XDP reads only {read}"),
            format!(
                "give it one queue for each shard: `ethtool -L {name} combined {count}` (veth: `ethtool -L {name} rx {count} \
                 tx {count}`), or steer UDP/4791 to what is read and say so in the configuration, or choose \
                 --netdev packet"
            ),
        ));
    }
    Ok(())
}

/// Registers memory for `wanted` chunks each way, or for the number that `RLIMIT_MEMLOCK` allows.
fn register_memory(socket: &XdpSocket, wanted: u32) -> Result<(OwnedFd, Umem, u32), OpenError> {
    let mut chunks = wanted.clamp(CHUNKS_MIN, CHUNKS_MAX).next_power_of_two();
    loop {
        let no_memory =
            |e| OpenError::os(Backend::Xdp, "cannot map the packet memory", e, "lower ring_frames");
        let memory =
            memory_file(c"rocinante-frames", Umem::bytes(2 * chunks)).map_err(no_memory)?;
        let umem = Umem::of_file(memory.as_fd(), 2 * chunks).map_err(no_memory)?;
        match socket.register(&umem) {
            Ok(()) => return Ok((memory, umem, chunks)),
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
    shards: Shards,
    queues: u32,
) -> Result<(Program, Own, Map), OpenError> {
    let failed = |e| permission("cannot make a BPF map", e);
    let own = Own::new(addresses, iface.mac).map_err(failed)?;
    let sockets = Map::sockets("roce_sockets", queues).map_err(failed)?;
    let program = Program::load("roce_redirect", &program(&own, shards, &sockets))
        .map_err(|e| permission("cannot load the XDP program", e))?;
    Ok((program, own, sockets))
}

/// Binds to a queue; if it is busy, retries for up to `limit`.
pub(super) fn bind(
    socket: &XdpSocket,
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
        Some(libc::EPERM | libc::EACCES) => {
            format!("{}, or choose --netdev packet or udp", NEEDS.explain())
        }
        Some(libc::EAFNOSUPPORT | libc::ENOSYS) => {
            "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS, CONFIG_BPF_SYSCALL): choose --netdev \
             packet or udp"
                .to_owned()
        }
        _ => "choose --netdev packet or udp".to_owned(),
    };
    OpenError::os(Backend::Xdp, what, error, hint)
}
