//! Address handles of the engine, and the paths of the port behind them.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::PathSpec;
use rocinante_stack::PeerAddress;
use rocinante_stack::verbs::AhId;

use super::{Device, Pd};
use crate::error::VerbsError;
use crate::qp::PeerPath;

/// An address handle; dropping it destroys it.
#[derive(Debug)]
pub(crate) struct Ah {
    device: Arc<Device>,
    id: AhId,
    path: u32,
}

impl Ah {
    pub(crate) fn create(pd: &Pd, local: IpAddr, path: &PeerPath) -> Result<Self, VerbsError> {
        let device = pd.device.clone();
        let mut guard = device.core.hold();
        let shard = &mut *guard;
        let id = shard.add_path(&spec(local, path, spread(path))).map_err(VerbsError::Path)?;
        let peer = PeerAddress { local, remote: path.remote, path: id, budget: path.budget };
        let Some(ah) = shard.engine.create_ah(pd.id, &peer) else {
            shard.remove_path(id);
            return Err(VerbsError::Limit { what: "address handles", max: 1 << 20 });
        };
        drop(guard);
        Ok(Self { device, id: ah, path: id })
    }

    pub(crate) fn id(&self) -> AhId {
        self.id
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        let core = &self.device.core;
        let mut shard = core.hold();
        // What was posted before may leave.
        core.take_staged(&mut shard);
        let now = shard.now();
        shard.transmit(now);
        shard.engine.destroy_ah(self.id);
        shard.remove_path(self.path);
    }
}

/// Datagrams to one address all have one source port, so that they share super-packets; those to others have others.
fn spread(path: &PeerPath) -> u32 {
    let mix = |octets: &[u8]| {
        octets.iter().fold(0u32, |sum, octet| sum.wrapping_mul(31).wrapping_add((*octet).into()))
    };
    let sum = match path.remote {
        IpAddr::V4(remote) => mix(&remote.octets()),
        IpAddr::V6(remote) => mix(&remote.octets()),
    };
    sum & 0xf_ffff
}

/// What the port needs to know of a path. Its source port spreads flows over links and queues: it follows from the flow label,
/// or without one from `label`, as `rdma_flow_label_to_udp_sport` of Linux has it.
pub(super) fn spec(local: IpAddr, path: &PeerPath, label: u32) -> PathSpec {
    let label = if path.flow_label == 0 { label } else { path.flow_label & 0xf_ffff };
    #[allow(clippy::cast_possible_truncation)]
    let low = ((label & 0x3fff) ^ (label >> 14)) as u16;
    PathSpec {
        local,
        remote: path.remote,
        src_port: 0xc000 | low,
        tos: path.traffic_class,
        ttl: path.hop_limit,
        flow_label: path.flow_label,
    }
}
