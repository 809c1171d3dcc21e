//! The baseline of `AF_XDP`: the port itself, without an engine behind it.
//!
//! The measurement is not about the rings, the program and its loading, so they are not written
//! again. The same link over the other ports shows the difference between a baseline and its port,
//! and between a port and the engine.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante_netdev::{PathId, PathSpec, Port, RxDatagram, RxIpId};
use rocinante_wire::icrc::Template;

use crate::{Arrived, Flow, Link, Packet, RunLimits, SRC_PORT};

/// Datagrams per call.
const BURST: usize = 64;
/// Runs between two reads of the clock.
const CHORES_EVERY: u32 = 64;

/// A port of any backend as a link.
pub struct PortLink<P> {
    port: P,
    path: PathId,
    outgoing: Template,
    incoming: Template,
    /// Packets of the current run that are already committed.
    committed: usize,
    runs: u32,
    chores_due: Instant,
}

impl<P: Port> PortLink<P> {
    /// Uses `port`, and waits until it has resolved the way to the peer. Error: there is no route
    /// to the peer.
    pub fn new(mut port: P, flow: Flow) -> io::Result<Self> {
        let path = port.add_path(&PathSpec {
            local: IpAddr::V4(flow.local),
            remote: IpAddr::V4(flow.remote),
            src_port: SRC_PORT,
            tos: 0,
            ttl: 64,
            flow_label: 0,
        })?;
        // No thread waits for arrivals: the link is polled all the time.
        port.watch(false)?;
        Ok(Self {
            port,
            path: path.id,
            outgoing: flow.outgoing(path.src_port),
            incoming: flow.incoming(path.src_port),
            committed: 0,
            runs: 0,
            chores_due: Instant::now(),
        })
    }

    /// Lets the port run its chores.
    fn chores(&mut self) {
        self.runs = self.runs.wrapping_add(1);
        if self.runs.is_multiple_of(CHORES_EVERY) && Instant::now() >= self.chores_due {
            let pause = self.port.maintain().unwrap_or(Duration::from_secs(1));
            self.chores_due = Instant::now() + pause;
        }
    }
}

impl<P: Port> Link for PortLink<P> {
    fn limits(&self) -> RunLimits {
        RunLimits { packets: 128, bytes: 4 * 65_536 }
    }

    fn send(&mut self, run: &[Packet<'_>]) -> io::Result<bool> {
        for packet in &run[self.committed..] {
            let Some(slot) = self.port.reserve(self.path, packet.len()) else { break };
            packet.write(slot.buf, &mut self.outgoing, slot.ip_id);
            self.port.commit();
            self.committed += 1;
        }
        self.port.flush(|_| ());
        self.chores();
        let done = self.committed == run.len();
        if done {
            self.committed = 0;
        }
        Ok(done)
    }

    fn receive(&mut self, mut take: impl FnMut(Arrived<'_>)) -> io::Result<u64> {
        let (mut bad, incoming) = (0, &mut self.incoming);
        self.port.receive(BURST, |datagram: RxDatagram<'_>| {
            let id = match datagram.ip_id {
                RxIpId::Exact { id, .. } | RxIpId::Hint(id) => id,
                RxIpId::None => 0,
            };
            match Arrived::parse(datagram.payload, incoming, id) {
                Some(arrived) => take(arrived),
                None => bad += 1,
            }
        })?;
        Ok(bad)
    }
}
