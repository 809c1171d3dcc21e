//! UDP sockets that `quinn-udp` drives: the socket layer of a QUIC implementation, with
//! `UDP_SEGMENT` out and `UDP_GRO` in. It shares no code with our own baseline of UDP but the
//! packets, so it tells whether ours is a good one.

use std::array;
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use rocinante_wire::icrc::Template;

use crate::wire::{Guess, write_run};
use crate::{Arrived, Flow, Link, Packet, ROCE_PORT, RunLimits, SRC_PORT};

/// Buffers of the socket, in bytes, as far as the system allows.
const BUFFER: usize = 4 << 20;
/// Messages of one call.
const BURST: usize = 4;
/// Bytes of a receive slot: a super-packet fits.
const SLOT_BYTES: usize = 65_536;

/// Sockets bound to the two ports. As the baseline's own they are unconnected and never fragment,
/// so the kernel gives their datagrams the same IPv4 identifications.
pub struct QuinnLink {
    sender: Driven,
    receiver: Driven,
    to: SocketAddr,
    outgoing: Template,
    incoming: Template,
    guess: Guess,
    staging: Vec<u8>,
    slots: Vec<u8>,
    limits: RunLimits,
}

struct Driven {
    socket: UdpSocket,
    state: UdpSocketState,
}

impl Driven {
    fn bind(address: SocketAddrV4) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let state = UdpSocketState::new((&socket).into())?;
        state.set_send_buffer_size((&socket).into(), BUFFER)?;
        state.set_recv_buffer_size((&socket).into(), BUFFER)?;
        Ok(Self { socket, state })
    }
}

impl QuinnLink {
    /// Opens both sockets. Error: UDP/4791 is taken, or the address is not local.
    pub fn open(flow: Flow) -> io::Result<Self> {
        let sender = Driven::bind(SocketAddrV4::new(flow.local, SRC_PORT))?;
        let receiver = Driven::bind(SocketAddrV4::new(flow.local, ROCE_PORT))?;
        let limits =
            RunLimits { packets: sender.state.max_gso_segments(), ..RunLimits::super_packet() };
        Ok(Self {
            sender,
            receiver,
            to: SocketAddrV4::new(flow.remote, ROCE_PORT).into(),
            outgoing: flow.outgoing(SRC_PORT),
            incoming: flow.incoming(SRC_PORT),
            guess: Guess::default(),
            staging: vec![0; limits.bytes],
            slots: vec![0; BURST * SLOT_BYTES],
            limits,
        })
    }
}

impl Link for QuinnLink {
    fn limits(&self) -> RunLimits {
        self.limits
    }

    fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool> {
        let end = write_run(run, &mut self.staging, &mut self.outgoing);
        let transmit = Transmit {
            destination: self.to,
            ecn: None,
            contents: &self.staging[..end],
            segment_size: (run.len() > 1).then(|| run[0].len()),
            src_ip: None,
        };
        let Driven { socket, state } = &self.sender;
        match state.try_send(socket.into(), &transmit) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn receive(&mut self, mut take: impl FnMut(Arrived<'_>)) -> io::Result<u64> {
        let Driven { socket, state } = &self.receiver;
        let mut metas = [RecvMeta::default(); BURST];
        let mut slots = self.slots.chunks_exact_mut(SLOT_BYTES);
        let mut bufs: [IoSliceMut<'_>; BURST] =
            array::from_fn(|_| IoSliceMut::new(slots.next().expect("a slot")));
        let count = match state.recv(socket.into(), &mut bufs, &mut metas) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(error),
        };
        let mut bad = 0;
        for (buf, meta) in bufs.iter().zip(&metas).take(count) {
            for (index, datagram) in buf[..meta.len].chunks(meta.stride.max(1)).enumerate() {
                match self.guess.parse(datagram, &mut self.incoming, index) {
                    Some(arrived) => take(arrived),
                    None => bad += 1,
                }
            }
        }
        Ok(bad)
    }
}
