//! One type for all backends, so that a driver is compiled once.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use crate::choose::faulty::{FaultyPort, Seal};
use crate::fault::Plan;
use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::port::contract::{
    Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, RxDatagram, TxFailure, TxSlot,
};
use crate::port::error::OpenError;
use crate::port::parts::{BackendParts, Parts};
use crate::sim::SimPort;
use crate::udp::{SharedAddresses, UdpPort};

/// A port of any backend.
///
/// Each call costs one predictable branch.
// One per device: their sizes do not matter.
#[allow(clippy::large_enum_variant)]
pub enum AnyPort {
    /// UDP sockets.
    Udp(UdpPort),
    /// `AF_XDP`.
    Xdp(XdpPort),
    /// `AF_PACKET`.
    Packet(PacketPort),
    /// The seeded in-memory network.
    Sim(SimPort),
    /// A port of any of these, whose datagrams meet faults.
    Faulty(Box<FaultyPort>),
}

/// Evaluates an expression with `$port` bound to the port of whichever backend it is.
macro_rules! on {
    ($any:expr, $port:ident => $call:expr) => {
        match $any {
            AnyPort::Udp($port) => $call,
            AnyPort::Xdp($port) => $call,
            AnyPort::Packet($port) => $call,
            AnyPort::Sim($port) => $call,
            AnyPort::Faulty($port) => $call,
        }
    };
}

impl AnyPort {
    /// Makes a port of its parts, in the network namespace where they were acquired. Error: as the
    /// backend's `assemble`.
    pub fn assemble(parts: Parts) -> Result<Self, OpenError> {
        match parts.manifest().backend {
            BackendParts::Udp => UdpPort::assemble(parts).map(Self::from),
            BackendParts::Packet { .. } => PacketPort::assemble(parts).map(Self::from),
            BackendParts::Xdp { .. } => XdpPort::assemble(parts).map(Self::from),
        }
    }
}

impl AnyPort {
    /// Shares its addresses with other processes from now on, as the `nth` port of its device.
    pub(super) fn share(
        &mut self,
        addresses: Arc<dyn SharedAddresses>,
        nth: usize,
    ) -> Result<(), OpenError> {
        match self {
            Self::Udp(port) => port.share(addresses, nth),
            Self::Xdp(port) => port.share(addresses, nth),
            Self::Packet(port) => port.share(addresses, nth),
            // Its addresses are of its own network.
            Self::Sim(_) => Ok(()),
            Self::Faulty(port) => port.inner().share(addresses, nth),
        }
    }

    /// Lets its datagrams meet the faults of a plan from now on, as the `nth` port of its device;
    /// the decisions go to `log`. Error: no descriptor is left, or the log cannot be written.
    pub fn with_faults(
        self,
        plan: (&Plan, u64),
        nth: usize,
        log: Option<&FilePath>,
        seal: Seal,
    ) -> io::Result<Self> {
        let port = FaultyPort::new(self, plan, nth, log, seal)?;
        Ok(Self::Faulty(Box::new(port)))
    }

    /// Sends at once the datagrams that faults delay, because the program ends.
    pub fn let_go(&mut self) {
        if let Self::Faulty(port) = self {
            port.let_go();
        }
    }
}

impl Port for AnyPort {
    fn capabilities(&self) -> &Capabilities {
        on!(self, port => port.capabilities())
    }

    fn addresses(&self) -> &[IpAddr] {
        on!(self, port => port.addresses())
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        on!(self, port => port.add_path(spec))
    }

    fn remove_path(&mut self, path: PathId) {
        on!(self, port => port.remove_path(path));
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        on!(self, port => port.join(group))
    }

    fn leave(&mut self, group: IpAddr) {
        on!(self, port => port.leave(group));
    }

    fn receive(&mut self, budget: usize, sink: impl FnMut(RxDatagram<'_>)) -> io::Result<usize> {
        on!(self, port => port.receive(budget, sink))
    }

    #[inline]
    fn is_filled(&self, eighths: u32) -> bool {
        on!(self, port => port.is_filled(eighths))
    }

    fn runs(&self) -> PortRuns {
        on!(self, port => port.runs())
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        on!(self, port => port.reserve(path, len))
    }

    fn commit(&mut self) {
        on!(self, port => port.commit());
    }

    fn flush(&mut self, failed: impl FnMut(TxFailure)) {
        on!(self, port => port.flush(failed));
    }

    fn wants_write(&self) -> bool {
        on!(self, port => port.wants_write())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        on!(self, port => port.wait_fd())
    }

    fn watch(&mut self, on: bool) -> io::Result<()> {
        on!(self, port => port.watch(on))
    }

    fn maintain(&mut self) -> Option<Duration> {
        on!(self, port => port.maintain())
    }

    fn stats(&self) -> PortStats {
        on!(self, port => port.stats())
    }
}

/// `From` for each backend.
macro_rules! from {
    ($($variant:ident($port:ty)),+ $(,)?) => {$(
        impl From<$port> for AnyPort {
            fn from(port: $port) -> Self {
                Self::$variant(port)
            }
        }
    )+};
}

from!(Udp(UdpPort), Xdp(XdpPort), Packet(PacketPort), Sim(SimPort));

impl std::fmt::Debug for AnyPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AnyPort({} on {:?})", self.capabilities().backend, self.addresses())
    }
}
