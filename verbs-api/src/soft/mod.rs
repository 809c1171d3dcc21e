//! The software provider: an engine and a port instead of a card.

mod ah;
mod announce;
mod cm;
mod core;
#[cfg(test)]
mod core_tests;
mod cq;
mod flood;
mod front;
mod groups;
mod host;
mod mr;
mod mw;
mod posting;
mod qp;
mod shard;
mod sidr;
mod spin;
mod srq;
mod staging;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use rocinante_netdev::{AnyPort, Capabilities, Port};
use rocinante_stack::mem::PdId;
use rocinante_stack::types::Mtu;
use rocinante_stack::{Budget, Engine, EngineConfig};

pub(crate) use self::ah::Ah;
use self::core::Core;
pub(crate) use self::cq::{Channel, Cq};
use self::host::Host;
pub(crate) use self::mr::{Change, Registration};
pub(crate) use self::mw::Window;
pub(crate) use self::qp::{Qp, QpInitAttr};
use self::shard::Shard;
pub(crate) use self::srq::Srq;
use crate::context::{DeviceCounters, Limits};
use crate::error::VerbsError;
use crate::event::AsyncEvent;
use crate::resources::Resources;

/// How a device is started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) limits: Limits,
    /// The most packets that a queue pair has unacknowledged.
    pub(crate) window_max: u32,
    pub(crate) advertise_credits: bool,
    /// Whether a thread drives the device while the program does not.
    pub(crate) background: bool,
}

/// What lives as long as any object of the device.
pub(crate) struct Device {
    core: Arc<Core>,
    pub(crate) limits: Limits,
    pub(crate) active_mtu: Mtu,
    /// What peers are told of our receive queue.
    pub(crate) advertised: Budget,
    pub(crate) name: String,
    /// Why this backend was chosen.
    pub(crate) why: String,
    pub(crate) capabilities: Capabilities,
    pub(crate) gids: Vec<IpAddr>,
    thread: Option<JoinHandle<()>>,
    pds: AtomicU32,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("backend", &self.capabilities.backend)
            .field("gids", &self.gids)
            .finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.core.shut_down();
        if let Some(thread) = self.thread.take() {
            // The thread never panics on purpose; if it did, there is nothing left to save.
            let _ = thread.join();
        }
    }
}

impl Device {
    pub(crate) fn start(
        settings: &Settings,
        name: &str,
        port: AnyPort,
        why: String,
    ) -> Result<Arc<Self>, VerbsError> {
        let capabilities = port.capabilities().clone();
        let gids = port.addresses().to_vec();
        let budget = capabilities.rx_budget;
        let budget = Budget { bytes: budget.bytes, datagrams: budget.datagrams };
        let active_mtu = Mtu::for_link(capabilities.link_mtu).ok_or_else(|| {
            VerbsError::Invalid(format!(
                "{name} has an MTU of {} bytes: RoCE needs 336",
                capabilities.link_mtu
            ))
        })?;
        let mut engine = Engine::new(EngineConfig {
            max_qp: settings.limits.max_qp,
            // Three quarters for what peers send of their own accord, one for what we ask for.
            own_budget: budget.part(1, 4),
            port_mtu: active_mtu,
            window_max: settings.window_max,
            advertise_credits: settings.advertise_credits,
            ..EngineConfig::default()
        });
        engine.start_cm(cm::config(settings.limits.max_qp)?);
        let host = Host::new(settings.limits.max_mr as usize);
        let core = Arc::new(Core::new(Shard::new(engine, port, host))?);
        let thread = if settings.background {
            let core = core.clone();
            let thread = std::thread::Builder::new().name(format!("roce-{name}"));
            Some(thread.spawn(move || core.background())?)
        } else {
            None
        };
        Ok(Arc::new(Self {
            core,
            limits: settings.limits,
            active_mtu,
            advertised: budget.part(3, 4),
            name: name.to_owned(),
            why,
            capabilities,
            gids,
            thread,
            pds: AtomicU32::new(1),
        }))
    }

    pub(crate) fn counters(&self) -> DeviceCounters {
        let shard = self.core.hold();
        DeviceCounters {
            transport: *shard.engine.counters(),
            drops: *shard.engine.drops(),
            port: shard.port.stats(),
            refused: shard.refused,
        }
    }

    pub(crate) fn resources(&self) -> Resources {
        let mut shard = self.core.hold();
        Resources {
            qps: shard.engine.qp_count(),
            kept_qpns: shard.engine.kept_qpns(),
            mrs: shard.host.regions.len(),
            connections: shard.cm().len(),
            paths: shard.paths_of_queue_pairs(),
        }
    }

    pub(crate) fn progress(&self) {
        self.core.drive();
    }

    pub(crate) fn next_event(&self) -> Option<AsyncEvent> {
        self.core.next_event()
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.core.event_fd()
    }
}

/// A protection domain: a number that regions and queue pairs must share.
#[derive(Debug)]
pub(crate) struct Pd {
    device: Arc<Device>,
    id: PdId,
}

impl Pd {
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        let id = device.pds.fetch_add(1, Ordering::Relaxed);
        Self { device: device.clone(), id: PdId(id) }
    }
}
