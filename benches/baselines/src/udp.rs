//! The baseline of UDP sockets: `UDP_SEGMENT` out, `UDP_GRO` in.

use std::io::{self, IoSlice};
use std::net::SocketAddrV4;

use rocinante_wire::icrc::Template;

use crate::sys::{Name, Slots, Socket};
use crate::wire::{Guess, gather, is_gathered, write_run};
use crate::{Arrived, Flow, Link, Packet, ROCE_PORT, RunLimits, SRC_PORT};

/// Receive buffer of the socket, in bytes.
const RECEIVE_BUFFER: i32 = 4 << 20;
/// Messages per call: they stay in a second-level cache.
const BURST: usize = 4;

/// Sockets bound to the two ports. They are unconnected and never fragment, so their IPv4
/// identifications are 0, and *i* for datagram *i* of a super-packet.
pub struct UdpLink {
    sender: Socket,
    receiver: Socket,
    to: Name,
    outgoing: Template,
    incoming: Template,
    guess: Guess,
    slots: Slots,
    staging: Vec<u8>,
    limits: RunLimits,
}

impl UdpLink {
    /// Opens both sockets. Error: UDP/4791 is taken, or the address is not local.
    pub fn open(flow: Flow) -> io::Result<Self> {
        let (sender, receiver) = (Socket::udp()?, Socket::udp()?);
        for (socket, port) in [(&sender, SRC_PORT), (&receiver, ROCE_PORT)] {
            socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
            socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER)?;
            socket.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, RECEIVE_BUFFER)?;
            socket.bind(SocketAddrV4::new(flow.local, port))?;
        }
        receiver.set(libc::SOL_UDP, libc::UDP_GRO, 1)?;
        let limits = RunLimits::super_packet();
        Ok(Self {
            sender,
            receiver,
            to: Name::new(SocketAddrV4::new(flow.remote, ROCE_PORT)),
            outgoing: flow.outgoing(SRC_PORT),
            incoming: flow.incoming(SRC_PORT),
            guess: Guess::default(),
            slots: Slots::new(BURST),
            staging: vec![0; limits.bytes],
            limits,
        })
    }
}

impl Link for UdpLink {
    fn limits(&self) -> RunLimits {
        self.limits
    }

    fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool> {
        let segment = (run.len() > 1).then(|| run[0].len() as u16);
        let Self { sender, to, outgoing, staging, .. } = self;
        if is_gathered(run) {
            return gather(run, outgoing, &[], |pieces| sender.send(pieces, Some(to), segment));
        }
        let end = write_run(run, staging, outgoing);
        sender.send(&[IoSlice::new(&staging[..end])], Some(to), segment)
    }

    fn receive(&mut self, mut take: impl FnMut(Arrived<'_>)) -> io::Result<u64> {
        let mut bad = 0;
        for i in 0..self.slots.receive(&self.receiver)? {
            let (bytes, segment) = self.slots.message(i);
            for (index, datagram) in bytes.chunks(segment).enumerate() {
                match self.guess.parse(datagram, &mut self.incoming, index) {
                    Some(arrived) => take(arrived),
                    None => bad += 1,
                }
            }
        }
        Ok(bad)
    }
}
