//! Descriptions of a device: its limits, attributes and counters.

use rocinante_netdev::{Backend, Capabilities, PortStats};
use rocinante_stack::stats::{Counters, Drops, LimitsHit};
use rocinante_stack::types::Mtu;

use super::error::VerbsError;
use super::qp::QpCaps;

/// Limits of a device (`struct ibv_device_attr`);
/// `Context::query_device` reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Queue pairs, at most 65,000.
    pub max_qp: u32,
    /// Memory regions; in the device in software, regions and windows together.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Depth of a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter-gather elements of a request.
    pub max_sge: u32,
    /// Bytes of inline data. `u32::MAX` if the device does not report its limit, which then applies
    /// when a queue pair is made.
    pub max_inline_data: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Depth of a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter-gather elements of a shared receive.
    pub max_srq_sge: u32,
    /// READs and atomics that a queue pair may have outstanding, in either direction.
    pub max_qp_rd_atom: u32,
}

setters! {
    Limits {
        max_qp: u32,
        max_mr: u32,
        max_mw: u32,
        max_cq: u32,
        max_cqe: u32,
        max_qp_wr: u32,
        max_sge: u32,
        max_inline_data: u32,
        max_srq: u32,
        max_srq_wr: u32,
        max_srq_sge: u32,
        max_qp_rd_atom: u32,
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_qp: 16_384,
            max_mr: 65_536,
            max_mw: 65_536,
            max_cq: 16_384,
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 16,
            max_sge: 32,
            max_inline_data: 4096,
            max_srq: 4096,
            max_srq_wr: 1 << 16,
            max_srq_sge: 32,
            max_qp_rd_atom: 128,
        }
    }
}

impl Limits {
    /// Whether a completion queue may have this many entries.
    #[doc(hidden)]
    pub fn check_depth(&self, depth: u32) -> Result<(), VerbsError> {
        let max = self.max_cqe;
        if (1..=max).contains(&depth) {
            return Ok(());
        }
        let why = format!("a completion queue has 1 to {max} entries, not {depth}");
        Err(VerbsError::Invalid(why))
    }

    #[doc(hidden)]
    pub fn check(&self, caps: &QpCaps) -> Result<(), VerbsError> {
        let checks = [
            ("max_send_wr", caps.max_send_wr, self.max_qp_wr),
            ("max_recv_wr", caps.max_recv_wr, self.max_qp_wr),
            ("max_send_sge", caps.max_send_sge, self.max_sge),
            ("max_recv_sge", caps.max_recv_sge, self.max_sge),
            ("max_inline_data", caps.max_inline_data, self.max_inline_data),
        ];
        for (name, wanted, max) in checks {
            if wanted > max {
                return Err(VerbsError::Invalid(format!(
                    "{name} is {wanted}, the device takes {max} at most"
                )));
            }
        }
        Ok(())
    }
}

/// Optional operations of a device (bits of `device_cap_flags_ex` of `ibv_query_device_ex(3)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OptionalOperations {
    /// FLUSH for [`Placement::GLOBAL`](rocinante_stack::mem::Placement::GLOBAL).
    pub flush_global: bool,
    /// FLUSH for [`Placement::PERSISTENT`](rocinante_stack::mem::Placement::PERSISTENT), of
    /// persistent memory.
    pub flush_persistent: bool,
    /// ATOMIC WRITE.
    pub atomic_write: bool,
}

impl OptionalOperations {
    /// None of them.
    #[doc(hidden)]
    pub const NONE: Self =
        Self { flush_global: false, flush_persistent: false, atomic_write: false };
}

/// The attributes of a device (`struct ibv_device_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttr {
    /// The limits.
    pub limits: Limits,
    /// The optional operations that it answers. To request one, the library must support it as
    /// well: see `PostError::Unsupported`.
    pub optional: OptionalOperations,
    /// The types of memory windows.
    pub windows: MwSupport,
    /// The capabilities of the port of a device in software.
    pub port: Option<Capabilities>,
    /// Attributes that only a device of the kernel has.
    pub hardware: Option<HardwareAttr>,
    /// The largest path MTU that fits the link.
    pub active_mtu: Mtu,
    /// The carrier of the packets, and the reason for that choice.
    pub chosen_because: String,
    /// The backend that the program or the environment named, if the port is of another one:
    /// `afxdp`, which another process has on one of the addresses. `chosen_because` says it, too.
    pub instead_of: Option<Backend>,
}

impl DeviceAttr {
    /// A device without a port and attributes of the kernel's.
    #[doc(hidden)]
    #[must_use]
    pub fn new(
        limits: Limits,
        optional: OptionalOperations,
        windows: MwSupport,
        active_mtu: Mtu,
        why: &str,
    ) -> Self {
        let (port, hardware, instead_of, chosen_because) = (None, None, None, why.to_owned());
        Self { limits, optional, windows, port, hardware, active_mtu, chosen_because, instead_of }
    }
}

/// Which memory windows a device has (`IBV_DEVICE_MEM_WINDOW` and the like).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MwSupport {
    /// Type 1.
    pub type_1: bool,
    /// Type 2A: all queue pairs of its domain with the same peer may use the window.
    pub type_2a: bool,
    /// Type 2B: only the queue pair that bound the window may use it. Windows of type 2 of the
    /// device in software are of this kind.
    pub type_2b: bool,
}

/// The carrier of a device's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Provider {
    /// The device in software, over this backend.
    Software(Backend),
    /// A device of the kernel, through `libibverbs`.
    Hardware,
}

impl Provider {
    /// The name used on the command line and in JSON: `udp`, `packet`, `afxdp`, `sim`, `hw`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Software(backend) => backend.name(),
            Self::Hardware => "hw",
        }
    }
}

impl std::fmt::Display for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// All counters of a device. A device of the kernel counts for all its users together, and only the
/// counters that its driver shows in `hw_counters`; the others are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// The transport's counters.
    pub transport: Counters,
    /// Dropped packets, by reason.
    pub drops: Drops,
    /// Why queue pairs that had their turn sent nothing more: how often each limit applied.
    pub limits_hit: LimitsHit,
    /// The port's counters.
    pub port: PortStats,
    /// Datagrams that the kernel refused, and its last errno.
    pub refused: (u64, i32),
    /// Datagrams that arrived at the port of another shard, or at another process: the number
    /// handed over to their owner, and the number lost because that one had no room. See
    /// `OpenOptions::shards`.
    pub handed_over: (u64, u64),
}

impl DeviceCounters {
    /// Group, name and value of each counter, in order: `("transport", "sent_pkts", 7)`.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let port = &self.port;
        let ports = [
            ("rx_datagrams", port.rx_datagrams),
            ("rx_bytes", port.rx_bytes),
            ("rx_runs", port.rx_runs),
            ("rx_queue_drops", port.rx_queue_drops),
            ("rx_malformed", port.rx_malformed),
            ("tx_datagrams", port.tx_datagrams),
            ("tx_bytes", port.tx_bytes),
            ("tx_runs", port.tx_runs),
            ("tx_failed", port.tx_failed),
            ("tx_blocked", port.tx_blocked),
            ("tx_unresolved", port.tx_unresolved),
            ("tx_by_reference", port.tx_by_reference),
        ];
        let shards =
            [("handed_over", self.handed_over.0), ("handed_over_lost", self.handed_over.1)];
        let limits = self.limits_hit.iter().map(|(limit, count)| (limit.name(), count));
        let all = [
            ("transport", self.transport.iter().collect::<Vec<_>>()),
            ("drops", self.drops.iter().collect()),
            ("limits_hit", limits.collect()),
            ("port", ports.to_vec()),
            ("shards", shards.to_vec()),
        ];
        all.into_iter().flat_map(|(group, list)| {
            list.into_iter().map(move |(name, count)| (group, name, count))
        })
    }

    /// Folder, name and value of the counters that the kernel has below `ports/1`: those of the
    /// port (IBTA, PortCounters and PortCountersExtended), and those of Soft-RoCE and others.
    #[doc(hidden)]
    #[must_use]
    pub fn of_kernel(&self) -> [(&'static str, &'static str, u64); 30] {
        let DeviceCounters { transport, drops, port, refused, handed_over, .. } = self;
        // Data are in words of four bytes. All but the transport's headers count: a port of RoCE
        // has no others of InfiniBand.
        let words = |bytes: u64| bytes / 4;
        let multicast = [transport.sent_multicast_pkts, transport.rcvd_multicast_pkts];
        [
            ("counters", "port_xmit_data", words(port.tx_bytes)),
            ("counters", "port_rcv_data", words(port.rx_bytes)),
            ("counters", "port_xmit_packets", port.tx_datagrams),
            ("counters", "port_rcv_packets", port.rx_datagrams),
            ("counters", "unicast_xmit_packets", port.tx_datagrams.saturating_sub(multicast[0])),
            ("counters", "unicast_rcv_packets", port.rx_datagrams.saturating_sub(multicast[1])),
            ("counters", "multicast_xmit_packets", multicast[0]),
            ("counters", "multicast_rcv_packets", multicast[1]),
            ("counters", "port_rcv_errors", port.rx_malformed + drops.malformed + drops.icrc),
            ("counters", "port_xmit_discards", port.tx_failed + refused.0),
            ("counters", "excessive_buffer_overrun_errors", port.rx_queue_drops + handed_over.1),
            ("hw_counters", "sent_pkts", transport.sent_pkts),
            ("hw_counters", "rcvd_pkts", transport.rcvd_pkts),
            ("hw_counters", "duplicate_request", transport.duplicate_request),
            ("hw_counters", "out_of_seq_request", transport.out_of_seq_request),
            ("hw_counters", "rcvd_rnr_err", transport.rcvd_rnr_err),
            ("hw_counters", "send_rnr_err", transport.send_rnr_err),
            ("hw_counters", "rcvd_seq_err", transport.rcvd_seq_err),
            ("hw_counters", "retry_exceeded_err", transport.retry_exceeded_err),
            ("hw_counters", "retry_rnr_exceeded_err", transport.retry_rnr_exceeded_err),
            ("hw_counters", "send_err", port.tx_failed),
            ("hw_counters", "local_ack_timeout_err", transport.local_ack_timeout_err),
            ("hw_counters", "implied_nak_seq_err", transport.implied_nak_seq_err),
            ("hw_counters", "packet_seq_err", transport.rcvd_seq_err),
            ("hw_counters", "np_cnp_sent", transport.sent_cnp),
            ("hw_counters", "rp_cnp_handled", transport.rcvd_cnp),
            ("hw_counters", "np_ecn_marked_roce_packets", transport.rcvd_ecn_ce),
            ("hw_counters", "resp_remote_access_errors", transport.remote_access_errors),
            ("hw_counters", "rx_icrc_encapsulated", drops.icrc),
            ("hw_counters", "retrans_pkts", transport.retransmitted_pkts),
        ]
    }

    /// Adds what another shard counted.
    #[doc(hidden)]
    pub fn add(&mut self, other: &Self) {
        self.transport.add(&other.transport);
        self.drops.add(&other.drops);
        self.limits_hit.add(&other.limits_hit);
        self.port.add(&other.port);
        self.refused.0 += other.refused.0;
        if other.refused.0 > 0 {
            self.refused.1 = other.refused.1;
        }
        self.handed_over.0 += other.handed_over.0;
        self.handed_over.1 += other.handed_over.1;
    }
}

/// Attributes that only a device of the kernel has (`struct ibv_device_attr`, `struct
/// ibv_port_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HardwareAttr {
    /// Version of its firmware; empty if it has none.
    pub firmware: String,
    /// The node's GUID.
    pub node_guid: u64,
    /// The vendor's IEEE number.
    pub vendor_id: u32,
    /// The vendor's part number.
    pub vendor_part_id: u32,
    /// The vendor's version number.
    pub hw_ver: u32,
    /// Size of the largest region in bytes.
    pub max_mr_size: u64,
    /// The scope of its atomics.
    pub atomics: Atomics,
    /// The port in use, by the device's numbering.
    pub port: u8,
    /// The largest path MTU that the port supports.
    pub max_mtu: Mtu,
    /// Size of the longest message in bytes.
    pub max_msg_sz: u32,
    /// The index of each of `Context::gids` in the device's table.
    pub gid_indices: Vec<u8>,
}

impl HardwareAttr {
    /// A port by its number and its largest path MTU, and nothing else known.
    #[doc(hidden)]
    #[must_use]
    pub const fn of_port(port: u8, max_mtu: Mtu) -> Self {
        Self {
            firmware: String::new(),
            node_guid: 0,
            vendor_id: 0,
            vendor_part_id: 0,
            hw_ver: 0,
            max_mr_size: 0,
            atomics: Atomics::None,
            port,
            max_mtu,
            max_msg_sz: 0,
            gid_indices: Vec::new(),
        }
    }
}

/// The scope of atomics (`enum ibv_atomic_cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomics {
    /// The device has none.
    None,
    /// Atomic against other atomics of this device, not against the processor's.
    Device,
    /// Atomic against the processor's, too.
    Global,
}
