//! A network in memory, for tests and for measuring the cost of everything else.
//!
//! [`SimNet`] is the network, a [`SimPort`] a device on it. A flushed datagram is in its receiver's
//! queue at once. Faults are those of any port ([`with_faults`](crate::AnyPort::with_faults)).
//!
//! ```
//! use rocinante_netdev::sim::{SimConfig, SimNet};
//! use rocinante_netdev::{PathSpec, Port};
//! use std::net::IpAddr;
//!
//! let net = SimNet::new();
//! let [a, b] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
//! let mut alice = net.port(&[a], &SimConfig::default())?;
//! let mut bob = net.port(&[b], &SimConfig::default())?;
//!
//! let spec = PathSpec { local: a, remote: b, src_port: 0xC000, tos: 0, ttl: 64, flow_label: 0 };
//! let path = alice.add_path(&spec)?;
//! alice.reserve(path.id, 5).unwrap().buf.copy_from_slice(b"hello");
//! alice.commit();
//! alice.flush(|failure| panic!("{failure:?}"));
//! assert_eq!(bob.receive(64, |d| assert_eq!(d.payload, b"hello"))?, 1);
//! # Ok::<(), std::io::Error>(())
//! ```

mod batch;
mod gate;
mod hub;

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use gate::SimGate;

use crate::kernel::descriptors::EventFd;
use crate::port::contract::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortStats, QueueKind, RxBudget,
    RxDatagram, RxIpId, TxFailure, TxSlot,
};
use batch::{Batch, Flow, Mark};
use gate::Bell;
use hub::Hub;

use crate::tuning::sim::TX_BYTES;

/// UDP payload bytes in one run.
const RUN_BYTES_MAX: u32 = 65_469;

/// The network: a handle that can be cloned freely.
#[derive(Clone, Default)]
pub struct SimNet(Arc<Mutex<Hub>>);

/// A callback that sees every datagram before its receiver does; see [`SimNet::set_tap`].
pub type Tap = Box<dyn FnMut(&TapDatagram<'_>) -> Verdict + Send>;

/// A datagram as a [`Tap`] sees it.
#[derive(Debug, Clone, Copy)]
pub struct TapDatagram<'a> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP payload, from the BTH to the ICRC.
    pub payload: &'a [u8],
}

/// The decision of a [`Tap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The datagram goes on.
    Pass,
    /// The datagram is lost.
    Drop,
}

/// A simulated port's knowledge of the IPv4 identification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SimIpId {
    /// It writes its own, counting up, and reads received ones, as `packet` and `afxdp` do.
    #[default]
    Exact,
    /// Its runs count from 0, and it knows the position in a received run, as `udp` does.
    Hint,
}

/// Counts since the network was made, in datagrams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Flushed by a port, and not too long for its link.
    pub sent: u64,
    /// Put into a receive queue.
    pub delivered: u64,
    /// Lost because no port has the destination address.
    pub unroutable: u64,
}

/// How a simulated port behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimConfig {
    /// MTU of its link in bytes, IP header included; longer datagrams fail with `EMSGSIZE`.
    pub mtu: u32,
    /// Capacity of its receive queue.
    pub rx_budget: RxBudget,
    /// The most datagrams in one run.
    pub segments_max: u16,
    /// Its knowledge of the IPv4 identification.
    pub ip_id: SimIpId,
}

impl Default for SimConfig {
    /// MTU 9000, a receive queue of 4 MiB and 4096 datagrams, runs of 64, exact identification.
    fn default() -> Self {
        Self {
            mtu: 9000,
            rx_budget: RxBudget { bytes: 4 << 20, datagrams: 4096 },
            segments_max: 64,
            ip_id: SimIpId::Exact,
        }
    }
}

impl SimNet {
    /// An empty network.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A device with these addresses. Error: no address, an address that another port has, or no
    /// descriptor left.
    pub fn port(&self, addresses: &[IpAddr], config: &SimConfig) -> io::Result<SimPort> {
        self.attach(addresses, config, Bell::Plain(EventFd::new()?))
    }

    /// As [`port`](Self::port), with a gate that can block it. Error: as [`port`](Self::port).
    pub fn gated_port(
        &self,
        addresses: &[IpAddr],
        config: &SimConfig,
    ) -> io::Result<(SimPort, SimGate)> {
        let gate = SimGate::new()?;
        Ok((self.attach(addresses, config, Bell::Gated(gate.clone()))?, gate))
    }

    fn attach(&self, addresses: &[IpAddr], config: &SimConfig, bell: Bell) -> io::Result<SimPort> {
        if addresses.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a port needs an address"));
        }
        let bell = Arc::new(bell);
        let id = self.hub().attach(addresses, config.rx_budget, Arc::clone(&bell))?;
        Ok(SimPort {
            capabilities: Capabilities {
                backend: Backend::Sim,
                link_mtu: config.mtu,
                segments_max: config.segments_max.max(1),
                run_bytes_max: RUN_BYTES_MAX,
                ip_id_exact: config.ip_id == SimIpId::Exact,
                tos_on_send: true,
                tos_on_receive: true,
                rx_budget: config.rx_budget,
                local_budget: config.rx_budget,
                rx_queue: QueueKind::Frames,
                copies_because: Some("simulated".into()),
            },
            net: self.clone(),
            id,
            addresses: addresses.to_vec(),
            ip_id: config.ip_id,
            paths: Vec::new(),
            free: Vec::new(),
            staging: Batch::new(config.rx_budget),
            reserved: None,
            run: None,
            next_id: 0,
            too_long: Vec::new(),
            reading: Batch::new(config.rx_budget),
            cursor: 0,
            bell,
            blocked: false,
            stats: PortStats::default(),
        })
    }

    /// Shows every datagram to `tap` before its receiver gets it; `None` removes the tap. The tap
    /// runs inside [`Port::flush`] with the network locked: it must not call the network.
    pub fn set_tap(&self, tap: Option<Tap>) {
        self.hub().tap = tap;
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        self.hub().stats
    }

    fn hub(&self) -> MutexGuard<'_, Hub> {
        // A panic under the lock comes from a test's tap: other users continue.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for SimNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hub = self.hub();
        f.debug_struct("SimNet").field("stats", &hub.stats).finish()
    }
}

/// A device on a [`SimNet`].
///
/// A flush to one receiver with an empty queue hands over the whole buffer: no copy, no
/// allocation, one lock. [`wait_fd`](Port::wait_fd) costs nothing until its first call; from then
/// on each arrival at an empty queue costs a system call.
pub struct SimPort {
    capabilities: Capabilities,
    net: SimNet,
    id: usize,
    addresses: Vec<IpAddr>,
    ip_id: SimIpId,
    paths: Vec<Option<Flow>>,
    free: Vec<u32>,
    staging: Batch,
    reserved: Option<SimSlot>,
    run: Option<SimRun>,
    next_id: u16,
    too_long: Vec<TxFailure>,
    reading: Batch,
    /// The first datagram of `reading` that was not handed up.
    cursor: usize,
    bell: Arc<Bell>,
    /// A flush found the gate shut.
    blocked: bool,
    stats: PortStats,
}

/// A slot that is not committed yet.
#[derive(Debug, Clone, Copy)]
struct SimSlot {
    path: PathId,
    len: usize,
    mark: Mark,
}

/// The run that the next datagram may join.
#[derive(Debug, Clone, Copy)]
struct SimRun {
    path: PathId,
    segment: usize,
    last: usize,
    segments: u16,
    bytes: usize,
}

impl SimPort {
    /// The position of a datagram in its run.
    fn index(&self, path: PathId, len: usize) -> u16 {
        let joins = |run: &SimRun| {
            run.path == path
                && run.last == run.segment
                && (1..=run.segment).contains(&len)
                && run.segments < self.capabilities.segments_max
                && run.bytes + len <= RUN_BYTES_MAX as usize
        };
        self.run.as_ref().filter(|run| joins(run)).map_or(0, |run| run.segments)
    }

    /// Header bytes of a datagram besides its payload, as the MTU counts them.
    fn ip_and_udp_bytes(address: IpAddr) -> usize {
        if address.is_ipv4() { 20 + 8 } else { 40 + 8 }
    }

    /// Hands up datagrams already taken from the hub, at most `budget`.
    fn hand_up(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        let end = self.reading.len().min(self.cursor.saturating_add(budget));
        let start = self.cursor;
        for i in start..end {
            let (flow, mark, payload) = self.reading.get(i);
            let ip_id = match (flow.dst, self.ip_id) {
                (IpAddr::V6(_), _) => RxIpId::None,
                (_, SimIpId::Exact) => RxIpId::Exact { id: mark.id, flags: 0x4000 },
                (_, SimIpId::Hint) => RxIpId::Hint(mark.index),
            };
            self.stats.rx_bytes += payload.len() as u64;
            self.stats.rx_runs += u64::from(mark.index == 0);
            sink(RxDatagram {
                payload,
                src: flow.src,
                dst: flow.dst,
                src_port: flow.src_port,
                ip_id,
                tos: Some(flow.tos),
            });
        }
        self.cursor = end;
        self.stats.rx_datagrams += (end - start) as u64;
        end - start
    }
}

impl Port for SimPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        let what = if spec.local.is_ipv4() != spec.remote.is_ipv4() {
            format!("{} and {} are of two families", spec.local, spec.remote)
        } else if self.addresses.contains(&spec.local) {
            let free = self.free.pop().unwrap_or_else(|| {
                self.paths.push(None);
                self.paths.len() as u32 - 1
            });
            let path = PathId(free);
            let PathSpec { local: src, remote: dst, src_port, tos, .. } = *spec;
            self.paths[free as usize] = Some(Flow { path, src_port, tos, src, dst });
            return Ok(Path { id: path, src_port });
        } else {
            format!("{} is not an address of this port", spec.local)
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, what))
    }

    fn remove_path(&mut self, path: PathId) {
        let entry = self.paths.get_mut(path.0 as usize);
        if entry.and_then(Option::take).is_some() {
            self.free.push(path.0);
            // A new path with this id must not join its run.
            self.run = None;
            self.reserved = None;
        }
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        if !group.is_multicast() {
            let what = format!("{group} is no multicast group");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.net.hub().groups.insert((group, self.id));
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) {
        self.net.hub().groups.remove(&(group, self.id));
    }

    fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let mut total = self.hand_up(budget, &mut sink);
        if self.cursor == self.reading.len() {
            self.reading.clear();
            self.cursor = 0;
            if total < budget && self.net.hub().take(self.id, &mut self.reading) {
                total += self.hand_up(budget - total, &mut sink);
            }
        }
        Ok(total)
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        self.reserved = None;
        let flow = self.paths.get(path.0 as usize)?.as_ref()?;
        if self.staging.used() + len > TX_BYTES && !self.staging.is_empty() {
            return None;
        }
        let index = self.index(path, len);
        let id = match (flow.src, self.ip_id) {
            (IpAddr::V6(_), _) => 0,
            (_, SimIpId::Exact) => self.next_id,
            (_, SimIpId::Hint) => index,
        };
        let buf = self.staging.reserve(len)?;
        self.reserved = Some(SimSlot { path, len, mark: Mark { id, index } });
        Some(TxSlot { buf, ip_id: id })
    }

    fn commit(&mut self) {
        let reserved = self.reserved.take();
        debug_assert!(reserved.is_some(), "commit without reserve");
        let Some(SimSlot { path, len, mark }) = reserved else { return };
        let flow = self.paths[path.0 as usize].as_ref().expect("remove_path discards the slot");
        if len + Self::ip_and_udp_bytes(flow.src) > self.capabilities.link_mtu as usize {
            self.too_long.push(TxFailure { path, datagrams: 1, errno: libc::EMSGSIZE });
            return;
        }
        self.next_id = self.next_id.wrapping_add(1);
        self.staging.commit(flow, mark, len);
        self.stats.tx_runs += u64::from(mark.index == 0);
        if let Some(run) = self.run.as_mut().filter(|_| mark.index > 0) {
            run.last = len;
            run.segments += 1;
            run.bytes += len;
        } else {
            self.run = Some(SimRun { path, segment: len, last: len, segments: 1, bytes: len });
        }
    }

    fn flush(&mut self, failed: impl FnMut(TxFailure)) {
        self.reserved = None;
        self.run = None;
        self.blocked = !self.staging.is_empty() && self.bell.is_shut();
        if !self.staging.is_empty() && !self.blocked {
            self.stats.tx_datagrams += self.staging.len() as u64;
            self.stats.tx_bytes += self.staging.payload_bytes();
            self.net.hub().send(&mut self.staging);
        }
        self.stats.tx_failed += self.too_long.len() as u64;
        self.too_long.drain(..).for_each(failed);
    }

    fn wants_write(&self) -> bool {
        self.blocked
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.net.hub().arm(self.id, self.cursor < self.reading.len());
        self.bell.fd()
    }

    fn watch(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn maintain(&mut self) -> Option<Duration> {
        None
    }

    fn stats(&self) -> PortStats {
        PortStats { rx_queue_drops: self.net.hub().drops(self.id), ..self.stats }
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        self.net.hub().detach(self.id);
    }
}

#[cfg(test)]
mod tests;
