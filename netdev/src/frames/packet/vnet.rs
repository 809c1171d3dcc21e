//! `struct virtio_net_hdr`, which `PACKET_VNET_HDR` puts before every frame in both directions.
//!
//! Source: `include/uapi/linux/virtio_net.h`. Its integers have the machine's byte order here.

/// Length of the header.
pub(super) const VNET_LEN: usize = 10;

const NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_UDP_L4: u8 = 5;
/// Means that the sender of TCP segments understands ECN; no meaning for UDP.
const GSO_ECN: u8 = 0x80;
const UDP_CHECKSUM_OFFSET: u16 = 6;

/// A header for a frame to be sent.
///
/// `headers` is the length of Ethernet, IP and UDP headers. With `checksum`, the kernel or the
/// device completes the UDP checksum. With a `segment`, the UDP payload is a run of datagrams of
/// that many bytes each (the last may be shorter); that implies `checksum`.
pub(super) fn outgoing(
    headers: usize,
    udp_offset: usize,
    checksum: bool,
    segment: Option<u16>,
) -> [u8; VNET_LEN] {
    let mut out = [0; VNET_LEN];
    let mut put = |at: usize, value: u16| out[at..at + 2].copy_from_slice(&value.to_ne_bytes());
    put(2, headers as u16);
    put(4, segment.unwrap_or(0));
    if checksum || segment.is_some() {
        put(6, udp_offset as u16);
        put(8, UDP_CHECKSUM_OFFSET);
        out[0] = NEEDS_CSUM;
    }
    out[1] = if segment.is_some() { GSO_UDP_L4 } else { GSO_NONE };
    out
}

/// The frame as a received header describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Incoming {
    /// One datagram.
    Single,
    /// A run of UDP datagrams, each with this many bytes of payload (the last may have fewer).
    Run(u16),
    /// Not UDP datagrams.
    Other,
}

/// Reads a received header.
pub(super) fn incoming(header: &[u8; VNET_LEN]) -> Incoming {
    let segment = u16::from_ne_bytes([header[4], header[5]]);
    match header[1] & !GSO_ECN {
        GSO_NONE => Incoming::Single,
        GSO_UDP_L4 if segment > 0 => Incoming::Run(segment),
        _ => Incoming::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_as_it_is_written() {
        assert_eq!(incoming(&outgoing(42, 34, false, Some(4112))), Incoming::Run(4112));
        assert_eq!(incoming(&outgoing(62, 54, true, None)), Incoming::Single);
        assert_eq!(outgoing(42, 34, false, None)[0], 0, "no checksum wanted");
    }

    #[test]
    fn other_offloads_are_refused() {
        let mut header = outgoing(42, 34, false, Some(100));
        for kind in [1, 3, 4, 6, 255] {
            header[1] = kind;
            assert_eq!(incoming(&header), Incoming::Other);
        }
        header = outgoing(42, 34, false, Some(0));
        assert_eq!(incoming(&header), Incoming::Other, "a run of nothing");
    }
}
