//! Address handles of the engine, and the paths of the port behind them.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::PathSpec;
use rocinante_stack::verbs::AhId;

use super::charge::Charge;
use super::faults::Verb;
use super::{Device, Pd};
use crate::model::error::VerbsError;
use crate::model::qp::PeerPath;

/// An address handle; dropping it destroys it.
#[derive(Debug)]
pub struct Ah {
    device: Arc<Device>,
    id: AhId,
    /// The path of each shard.
    paths: Box<[u32]>,
    _charge: Charge,
}

impl Ah {
    pub fn create(pd: &Pd, local: IpAddr, path: &PeerPath) -> Result<Self, VerbsError> {
        pd.admitted()?;
        let device = pd.device.clone();
        device.called(Verb::CreateAh)?;
        let charge = Charge::object(device.hca())?;
        let mut shards = device.shards.hold_all();
        let spec = spec(local, path, spread(path));
        let mut paths = Vec::with_capacity(device.shards.count());
        let mut failed = None;
        for shard in shards.iter_mut() {
            match shard.io.add_path(&spec) {
                Ok(id) => paths.push(id),
                Err(error) => {
                    failed = Some(VerbsError::Path(error));
                    break;
                }
            }
        }
        let mut made = None;
        if failed.is_none() {
            for (shard, path_id) in shards.iter_mut().zip(&paths) {
                let peer = device.peer_at(local, path, *path_id);
                let ah = shard.engine.create_ah(pd.id, &peer);
                // All shards assign and free numbers in the same order, so all run out at once.
                debug_assert!(made.is_none() || ah == made);
                made = ah;
            }
        }
        let Some(id) = made else {
            for (shard, path) in shards.iter_mut().zip(paths) {
                shard.remove_path(path);
            }
            let full = VerbsError::Limit { what: "address handles", max: 1 << 20 };
            return Err(failed.unwrap_or(full));
        };
        drop(shards);
        Ok(Self { device, id, paths: paths.into(), _charge: charge })
    }

    pub fn id(&self) -> AhId {
        self.id
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        let mut shards = self.device.shards.hold_all();
        for (shard, path) in shards.iter_mut().zip(&self.paths) {
            // Requests that were posted before may still leave.
            shard.take_staged();
            shard.send_waiting();
            shard.engine.destroy_ah(self.id);
            shard.remove_path(*path);
        }
    }
}

/// The flow label for an address. Datagrams to one address share a source port, so that they share
/// super-packets; other addresses get other ports.
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

/// The port's description of a path. The source port spreads flows over links and queues. It
/// follows from the flow label, or from `label` if there is none, as in Linux's
/// `rdma_flow_label_to_udp_sport`.
pub(super) fn spec(local: IpAddr, path: &PeerPath, label: u32) -> PathSpec {
    let label = if path.flow_label == 0 { label } else { path.flow_label & 0xf_ffff };
    let low = ((label & 0x3fff) ^ (label >> 14)) as u16;
    PathSpec {
        local,
        remote: path.remote,
        src_port: 0xc000 | low,
        tos: path.traffic_class,
        // As in the kernel (ib_resolve_unicast_gid_dmac): programs such as rdma-core's ping-pongs
        // say 1, and mean nothing by it.
        ttl: if path.remote.is_multicast() { path.hop_limit } else { 0 },
        flow_label: path.flow_label,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_to_another_address_have_another_port_in_either_family() {
        for [one, other] in
            [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"], ["fe80::1:1", "fe80::2:1"]]
        {
            let port = |remote: &str| {
                let path = PeerPath::new(remote.parse().unwrap());
                spec(path.remote, &path, spread(&path)).src_port
            };
            assert_ne!(port(one), port(other), "{one}, {other}");
            assert_eq!(port(one), port(one));
        }
    }

    /// A group is as far away as the program says, a peer as far as the network says.
    #[test]
    fn the_hop_limit_is_that_of_groups_in_either_family() {
        for (remote, is_group) in [
            ("239.1.1.1", true),
            ("224.0.0.1", true),
            ("ff15::1", true),
            ("ff02::1", true),
            ("10.0.0.2", false),
            ("fd00::2", false),
            ("fe80::2", false),
        ] {
            let path = PeerPath { hop_limit: 9, ..PeerPath::new(remote.parse().unwrap()) };
            let ttl = spec(path.remote, &path, 0).ttl;
            assert_eq!(ttl, if is_group { 9 } else { 0 }, "{remote}");
        }
    }
}
