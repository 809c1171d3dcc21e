//! Raw baselines: the throughput and latency of an interface without a protocol.
//!
//! Each baseline sends packets of the same sizes as a WRITE, in super-packets if the backend has
//! them. It gathers their payload from a region and copies it into one at the other end, and it
//! computes and checks the ICRC. Nothing is acknowledged or retransmitted: the receiver counts
//! whole packets. The only code shared with the engine is the ICRC.
//!
//! [`measure`] and [`answer`] are the two sides of a list of [`Task`]s, over one [`Link`] each and
//! an [`Exchange`](rocinante::exchange::Exchange) between them.

mod drive;
mod flood;
mod packet;
mod ping;
mod port;
mod quinn;
mod shape;
mod sys;
mod udp;
mod wire;

use std::io;
use std::net::Ipv4Addr;

use rocinante_wire::icrc::{DF, IpFields, Template};

pub use drive::{Kind, Raw, Task, answer, measure};
pub use packet::PacketLink;
pub use port::PortLink;
pub use quinn::QuinnLink;
pub use sys::Tally;
pub use udp::UdpLink;
pub use wire::{Arrived, Packet};

/// The UDP destination port of RoCEv2.
const ROCE_PORT: u16 = 4791;
/// The UDP source port of the baselines.
const SRC_PORT: u16 = 50_000;

/// Two addresses of two interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The own address.
    pub local: Ipv4Addr,
    /// The peer's address.
    pub remote: Ipv4Addr,
}

impl Flow {
    /// The ICRC template of sent packets.
    fn outgoing(self, src_port: u16) -> Template {
        let ip = IpFields::V4 { src: self.local, dst: self.remote, id: 0, flags: DF };
        Template::new(&ip, src_port)
    }

    /// The ICRC template of received packets.
    fn incoming(self, src_port: u16) -> Template {
        Self { local: self.remote, remote: self.local }.outgoing(src_port)
    }
}

/// The limits of one call of [`Link::send`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLimits {
    /// Packets.
    pub packets: usize,
    /// Bytes, from the BTHs to the ICRCs.
    pub bytes: usize,
}

impl RunLimits {
    /// A super-packet, with room for Ethernet, IP and UDP headers below 64 KiB: from there on a
    /// device segments in software.
    fn super_packet() -> Self {
        Self { packets: segments_max(), bytes: 65_535 - 14 - 4 - 20 - 8 }
    }
}

/// A way to send and to receive.
pub trait Link {
    /// The limits of one [`send`](Self::send).
    fn limits(&self) -> RunLimits;

    /// Sends packets of one size; the last may be shorter. `false` if there is no room now. Error:
    /// the interface is gone, or never takes such packets.
    fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool>;

    /// Hands a burst of received datagrams to `take`; returns the number of datagrams that were not
    /// whole or not ours. Error: the interface is gone.
    fn receive(&mut self, take: impl FnMut(Arrived<'_>)) -> io::Result<u64>;
}

/// The most datagrams of a super-packet: Linux 6.9 doubled this limit.
fn segments_max() -> usize {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (6, 9) { 128 } else { 64 }
}
