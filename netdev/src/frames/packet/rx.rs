//! From frames to datagrams.

use std::cell::Cell;

use super::ring::RxFrame;
use super::sys::PacketSocket;
use super::vnet::{self, Incoming};
use crate::port::contract::{PortStats, RxDatagram, RxIpId};
use crate::port::headers::parse_frame;

/// Frames dropped because the ring was full, since the port was opened. The kernel's own counter
/// restarts from 0 whenever it is read.
#[derive(Debug, Default)]
pub(super) struct Drops(Cell<u64>);

impl Drops {
    /// The sum up to now.
    pub(super) fn read(&self, socket: &PacketSocket) -> u64 {
        let new = socket.take_drops().unwrap_or(0);
        self.0.set(self.0.get() + u64::from(new));
        self.0.get()
    }
}

/// Hands the datagrams of a frame to `sink`; returns their number.
pub(super) fn deliver(
    received: RxFrame<'_>,
    stats: &mut PortStats,
    sink: &mut impl FnMut(RxDatagram<'_>),
) -> usize {
    let segment = match vnet::incoming(received.vnet) {
        _ if !received.whole => None,
        Incoming::Single => Some(usize::MAX),
        Incoming::Run(segment) => Some(usize::from(segment)),
        Incoming::Other => None,
    };
    let (Some(segment), Some(frame)) = (segment, parse_frame(received.bytes)) else {
        stats.rx_malformed += 1;
        return 0;
    };
    let headers = &frame.headers;
    let mut rest = frame.payload;
    let mut count = 0;
    // An empty datagram is one datagram.
    while count == 0 || !rest.is_empty() {
        let (payload, next) = rest.split_at(segment.min(rest.len()));
        rest = next;
        sink(RxDatagram {
            payload,
            src: headers.src,
            dst: headers.dst,
            src_port: headers.src_port,
            ip_id: identification(headers.ip_id, count),
            tos: Some(headers.tos),
        });
        count += 1;
    }
    stats.rx_runs += 1;
    stats.rx_datagrams += count as u64;
    stats.rx_bytes += frame.payload.len() as u64;
    count
}

/// The identification of datagram `index` of a frame. Segmentation would have counted up from the
/// frame's. In a run merged by a receiver (GRO), all may have had the same, so it is only a hint.
fn identification(ip: Option<(u16, u16)>, index: usize) -> RxIpId {
    match ip {
        None => RxIpId::None,
        Some((id, flags)) if index == 0 => RxIpId::Exact { id, flags },
        Some((id, _)) => RxIpId::Hint(id.wrapping_add(index as u16)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::contract::PathSpec;
    use crate::port::headers::FrameTemplate;

    fn frame(payload: &[u8]) -> Vec<u8> {
        let spec = PathSpec {
            local: "10.0.0.1".parse().expect("address"),
            remote: "10.0.0.2".parse().expect("address"),
            src_port: 0,
            tos: 0x2a,
            ttl: 64,
            flow_label: 0,
        };
        let template = FrameTemplate::new([2; 6], [4; 6], &spec, 49999).expect("one family");
        let mut frame = vec![0; template.header_len()];
        template.write(&mut frame, payload.len(), 0xfffe);
        frame.extend_from_slice(payload);
        frame
    }

    fn deliver_to_vec(
        vnet: [u8; vnet::VNET_LEN],
        bytes: &[u8],
        whole: bool,
    ) -> (Vec<(usize, RxIpId)>, PortStats) {
        let mut counters = PortStats::default();
        let mut got = Vec::new();
        let frame = RxFrame { vnet: &vnet, bytes, whole, time: (0, 0) };
        let count = deliver(frame, &mut counters, &mut |d| {
            assert_eq!((d.src_port, d.tos), (49999, Some(0x2a)));
            got.push((d.payload.len(), d.ip_id));
        });
        assert_eq!(count, got.len());
        (got, counters)
    }

    #[test]
    fn runs_are_cut_and_their_identifications_counted_up() {
        let vnet = vnet::outgoing(42, 34, true, Some(100));
        let (got, counters) = deliver_to_vec(vnet, &frame(&[1; 250]), true);
        let exact = RxIpId::Exact { id: 0xfffe, flags: 0x4000 };
        assert_eq!(got, [(100, exact), (100, RxIpId::Hint(0xffff)), (50, RxIpId::Hint(0))]);
        assert_eq!((counters.rx_datagrams, counters.rx_runs, counters.rx_bytes), (3, 1, 250));
    }

    #[test]
    fn an_empty_datagram_is_one() {
        let vnet = vnet::outgoing(42, 34, false, None);
        assert_eq!(deliver_to_vec(vnet, &frame(&[]), true).0.len(), 1);
        let vnet = vnet::outgoing(42, 34, false, Some(9));
        assert_eq!(deliver_to_vec(vnet, &frame(&[]), true).0.len(), 1);
    }

    #[test]
    fn what_is_cut_off_or_of_another_kind_is_counted() {
        let single = vnet::outgoing(42, 34, false, None);
        let mut tcp = single;
        tcp[1] = 1;
        for (vnet, bytes, whole) in [
            (single, frame(&[1; 9]), false),
            (tcp, frame(&[1; 9]), true),
            (single, frame(&[1; 9])[..50].to_vec(), true),
        ] {
            let (got, counters) = deliver_to_vec(vnet, &bytes, whole);
            assert_eq!((got.len(), counters.rx_malformed, counters.rx_datagrams), (0, 1, 0));
        }
    }

    #[test]
    fn whatever_a_virtio_header_says_the_payload_is_handed_up_once_or_not_at_all() {
        const NONE: u8 = 0;
        const UDP_L4: u8 = 5;
        let any = [0, 1, 2, 41, 42, 62, u16::MAX - 1, u16::MAX];
        for payload in [0, 1, 2, 999, 65_000] {
            let bytes = frame(&vec![3; payload]);
            for kind in 0..=u8::MAX {
                for segment in any {
                    for other in any {
                        let mut vnet = [0; vnet::VNET_LEN];
                        (vnet[0], vnet[1]) = (other as u8, kind);
                        vnet[4..6].copy_from_slice(&segment.to_ne_bytes());
                        for at in [2, 6, 8] {
                            vnet[at..at + 2].copy_from_slice(&other.to_ne_bytes());
                        }
                        let expected = match (kind & 0x7f, segment) {
                            (NONE, _) => Some(1),
                            (UDP_L4, 1..) => Some(payload.div_ceil(usize::from(segment)).max(1)),
                            _ => None,
                        };
                        // Try the slow cases once only.
                        if expected.is_some_and(|count| count > 1000) && other != 0 {
                            continue;
                        }
                        let (got, counters) = deliver_to_vec(vnet, &bytes, true);
                        assert_eq!(got.len(), expected.unwrap_or(0), "{kind} {segment} {payload}");
                        let sum: usize = got.iter().map(|(len, _)| len).sum();
                        assert_eq!(sum, if expected.is_some() { payload } else { 0 });
                        assert_eq!(counters.rx_malformed, u64::from(expected.is_none()));
                    }
                }
            }
        }
    }
}
