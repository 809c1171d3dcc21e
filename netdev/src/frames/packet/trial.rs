//! A try whether the kernel takes UDP super-packets from packet sockets. One that does gives them,
//! too: `virtio_net_hdr_to_skb` and `virtio_net_hdr_from_skb` of `include/linux/virtio_net.h`
//! learned of them together.

use std::io;

use super::sys::PacketSocket;
use super::vnet::{self, VNET_LEN};
use crate::port::contract::Backend;
use crate::port::error::OpenError;

/// The index of loopback in each network namespace.
const LOOPBACK: u32 = 1;
const UDP_OFFSET: usize = 14 + 20;
const HEADERS: usize = UDP_OFFSET + 8;
/// Two datagrams. Some kernels refuse segments that are shorter than the headers.
const SEGMENT: u16 = 1024;
const PAYLOAD: usize = SEGMENT as usize + 256;

/// Sends a super-packet on loopback, where nothing takes it: its Ethernet destination is another
/// station's. Error: the kernel does not know what it is. Where loopback is down nothing is known.
pub(super) fn sends_super_packets(socket: &PacketSocket) -> Result<(), OpenError> {
    judged(socket.send_by(LOOPBACK, &super_packet()))
}

fn judged(sent: io::Result<()>) -> Result<(), OpenError> {
    match sent {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let what = "the kernel refuses to send a UDP super-packet on loopback: it gives packet \
                        sockets no UDP super-packets";
            let hint = "use --netdev udp, or Linux 6.2 or newer";
            Err(OpenError::os(Backend::Packet, what, e, hint))
        }
        _ => Ok(()),
    }
}

pub(super) fn super_packet() -> Vec<u8> {
    let lengths = [20 + 8 + PAYLOAD, 8 + PAYLOAD].map(|length| (length as u16).to_be_bytes());
    let mut frame = vnet::outgoing(HEADERS, UDP_OFFSET, true, Some(SEGMENT)).to_vec();
    frame.extend([2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x08, 0x00]);
    frame.extend([0x45, 0, lengths[0][0], lengths[0][1], 0, 0, 0x40, 0, 1, 17, 0, 0]);
    frame.extend([127, 0, 0, 1, 127, 0, 0, 1]);
    // From port 9 to port 9 (discard).
    frame.extend([0, 9, 0, 9, lengths[1][0], lengths[1][1], 0, 0]);
    frame.resize(VNET_LEN + HEADERS + PAYLOAD, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::testns::{NetNs, or_skip};

    #[test]
    fn what_the_kernel_says_of_super_packets_is_heard() {
        let ns = or_skip!(NetNs::new());
        ns.run(|| {
            let socket = or_skip!(PacketSocket::new());
            socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1).expect("set");
            let send = |frame: &[u8]| socket.send_by(LOOPBACK, frame);
            let arrived = || {
                let table = std::fs::read_to_string("/proc/thread-self/net/snmp").expect("a table");
                let line = table.lines().rfind(|line| line.starts_with("Icmp: ")).expect("a line");
                line.split(' ').nth(1).and_then(|n| n.parse::<u32>().ok()).expect("a number")
            };
            send(&super_packet()).expect("this kernel takes it");
            assert_eq!(arrived(), 0, "no station answers");
            // A kind that no kernel knows.
            let mut unknown = super_packet();
            unknown[1] = 7;
            let refused = judged(send(&unknown)).expect_err("refused");
            assert_eq!(refused.errno(), libc::EINVAL);
            assert!(refused.to_string().contains("super-packet on loopback"), "{refused}");
            ns.sh("ip link set lo down");
            let down = send(&super_packet()).expect_err("it is down");
            assert_eq!(down.raw_os_error(), Some(libc::ENETDOWN));
            judged(Err(down)).expect("nothing is known");
        });
    }
}
