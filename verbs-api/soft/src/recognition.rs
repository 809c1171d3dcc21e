//! How devices recognise each other: a shard sends the probes and replies of its engine, and passes
//! the engine's reports on to the other shards. The first one has QP1, and probes.

use rocinante_netdev::Backend;
use rocinante_stack::types::{QueueKind, Time};
use rocinante_stack::wire::PeerInfo;
use rocinante_stack::{Budget, Engine};

use super::shard::Shard;
use super::wishes::Settings;
use crate::model::error::VerbsError;
use crate::provider::random::random;

impl Shard {
    /// Sends probes and replies that wait, and leaves mail for the other shards.
    #[inline]
    pub(super) fn probe(&mut self, now: Time) {
        if self.engine.has_probes() {
            self.probe_all(now);
        }
    }

    #[cold]
    fn probe_all(&mut self, now: Time) {
        while let Some(transmit) = self.engine.poll_probe() {
            // Without a path it is lost, as on any network.
            let Ok(path) = self.cm_path(now, (transmit.local, transmit.remote)) else { continue };
            if !self.send_mad(&transmit.mad, path) {
                self.engine.put_back_probe(transmit);
                break;
            }
        }
        self.io.flush();
        self.router.report_peers(&mut self.engine);
    }
}

/// If the device recognises peers, the engine of shard `index` probes unknown ones. The first shard
/// has QP1: it sends the probes, and replies with `info`. Transaction ids name the slot `shared`,
/// if other processes have some.
pub(super) fn start(
    engine: &mut Engine,
    settings: &Settings,
    index: usize,
    shared: Option<u8>,
    info: PeerInfo,
) -> Result<(), VerbsError> {
    if !settings.recognises {
        return Ok(());
    }
    engine.probe_unknown_peers();
    if index == 0 {
        engine.start_recognition(key()?, shared, info);
    }
    Ok(())
}

/// The reply to peers that probe this device: the budget of each of its shards, and its rate for
/// unacknowledged packets. It is about slots from 0 on: a device whose first slot is a later one
/// has none to speak of.
pub(super) fn peer_info(
    (queue, kind): (Budget, QueueKind),
    backend: Backend,
    (first, shards): (u8, usize),
) -> PeerInfo {
    let (packet_ns, kib_ns) = pace_of(backend);
    let slots = if first > 0 { 0 } else { shards };
    PeerInfo {
        bytes: queue.bytes,
        datagrams: queue.datagrams,
        queue: kind,
        slots: u8::try_from(slots).unwrap_or(u8::MAX),
        packet_ns,
        kib_ns,
    }
}

/// Nanoseconds in which a shard takes an unacknowledged datagram, and 1,024 bytes of payload
/// besides, without losing any (`docs/performance/method.md` has the measurement). Over AF_XDP
/// without a driver's help it takes no more than an unknown peer sends.
const fn pace_of(backend: Backend) -> (u32, u32) {
    match backend {
        Backend::Packet => (240, 200),
        Backend::Udp | Backend::Sim => (400, 200),
        Backend::Xdp => (800, 300),
    }
}

/// A random key for the transaction ids of probes, which no peer can guess.
fn key() -> Result<[u64; 2], VerbsError> {
    let word = || Ok::<_, VerbsError>(u64::from(random()?) << 32 | u64::from(random()?));
    Ok([word()?, word()?])
}
