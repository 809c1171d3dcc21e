//! The device's counters, by the names that the kernel has below `ports/1`.

use rocinante_soft::model::device::DeviceCounters;

use crate::plain::sysfs::Counts;

/// The counters of the port (IBTA, PortCounters and PortCountersExtended), and those of Soft-RoCE
/// and mlx5.
pub(crate) fn of_kernel(counted: &DeviceCounters) -> Counts {
    let DeviceCounters { transport, drops, port, refused, handed_over, .. } = counted;
    // Data are in words of four bytes. All but the transport's headers count: a port of RoCE has no
    // others of InfiniBand.
    let words = |bytes: u64| bytes / 4;
    let multicast = [transport.sent_multicast_pkts, transport.rcvd_multicast_pkts];
    let counters = [
        ("port_xmit_data", words(port.tx_bytes)),
        ("port_rcv_data", words(port.rx_bytes)),
        ("port_xmit_packets", port.tx_datagrams),
        ("port_rcv_packets", port.rx_datagrams),
        ("unicast_xmit_packets", port.tx_datagrams.saturating_sub(multicast[0])),
        ("unicast_rcv_packets", port.rx_datagrams.saturating_sub(multicast[1])),
        ("multicast_xmit_packets", multicast[0]),
        ("multicast_rcv_packets", multicast[1]),
        ("port_rcv_errors", port.rx_malformed + drops.malformed + drops.icrc),
        ("port_xmit_discards", port.tx_failed + refused.0),
        ("excessive_buffer_overrun_errors", port.rx_queue_drops + handed_over.1),
    ];
    let hw_counters = [
        ("sent_pkts", transport.sent_pkts),
        ("rcvd_pkts", transport.rcvd_pkts),
        ("duplicate_request", transport.duplicate_request),
        ("out_of_seq_request", transport.out_of_seq_request),
        ("rcvd_rnr_err", transport.rcvd_rnr_err),
        ("send_rnr_err", transport.send_rnr_err),
        ("rcvd_seq_err", transport.rcvd_seq_err),
        ("retry_exceeded_err", transport.retry_exceeded_err),
        ("retry_rnr_exceeded_err", transport.retry_rnr_exceeded_err),
        ("send_err", port.tx_failed),
        ("local_ack_timeout_err", transport.local_ack_timeout_err),
        ("implied_nak_seq_err", transport.implied_nak_seq_err),
        ("packet_seq_err", transport.rcvd_seq_err),
        ("np_cnp_sent", transport.sent_cnp),
        ("rp_cnp_handled", transport.rcvd_cnp),
        ("np_ecn_marked_roce_packets", transport.rcvd_ecn_ce),
        ("resp_remote_access_errors", transport.remote_access_errors),
        ("rx_icrc_encapsulated", drops.icrc),
    ];
    let in_folder = |folder: &'static str| {
        move |(name, count): (&str, u64)| (format!("{folder}/{name}"), count)
    };
    let counters = counters.into_iter().map(in_folder("counters"));
    counters.chain(hw_counters.into_iter().map(in_folder("hw_counters"))).collect()
}
