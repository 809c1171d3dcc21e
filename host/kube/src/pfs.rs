//! `GET /getpfs`, as the daemon of Link et al. answers on each node (rit-k8s-rdma, `rdma-ds`): a
//! list of physical functions with their rates in Mb/s. Here an uplink is a physical function, and
//! an interface that is placed there one of its virtual functions, all of which are in use.

use std::sync::Arc;

use parking_lot::Mutex;
use rocinante_placement::{INTERFACES_MAX, Placed, Uplink};
use serde::Serialize;

use crate::ledger::Ledger;
use crate::sysfs::MEGA;

/// The uplinks of one node.
#[derive(Clone)]
pub(crate) struct Pfs {
    node: Arc<str>,
    ledger: Arc<Mutex<Ledger>>,
}

#[derive(Serialize)]
struct Pf {
    name: String,
    /// Rounded up, as the free rate is then rounded down.
    used_tx_rate: u64,
    capacity_tx_rate: u64,
    used_vfs: usize,
    /// An uplink takes any number of interfaces, so as many are free as a pod may ask for.
    capacity_vfs: usize,
    vfs: Vec<Vf>,
}

/// Of a virtual function only the rates and the state of its policies are known here.
#[derive(Default, Serialize)]
struct Vf {
    vf: usize,
    mac: &'static str,
    vlan: u32,
    qos: u32,
    vlan_proto: &'static str,
    /// The agent lets a container's own addresses out alone.
    spoof_check: &'static str,
    trust: &'static str,
    link_state: &'static str,
    min_tx_rate: u64,
    /// Rounded up: 0 is no limit.
    max_tx_rate: u64,
    vgt_plus: &'static str,
    rate_group: u32,
    allocated: bool,
}

impl Pfs {
    pub(crate) fn new(node: &str, ledger: Arc<Mutex<Ledger>>) -> Self {
        Self { node: node.into(), ledger }
    }

    /// Error: the taken rates are not known yet.
    pub(crate) fn ready(&self) -> Result<(), String> {
        self.ledger.lock().ready()
    }

    /// The answer, as JSON.
    pub(crate) fn text(&self) -> Result<String, String> {
        self.ready()?;
        let uplinks = self.ledger.lock().of_node(&self.node);
        let pfs: Vec<Pf> = uplinks.iter().map(|(uplink, placed)| pf(uplink, placed)).collect();
        serde_json::to_string(&pfs).map_err(|error| error.to_string())
    }
}

fn pf(uplink: &Uplink, placed: &[Placed]) -> Pf {
    Pf {
        name: uplink.name.clone(),
        used_tx_rate: uplink.taken.egress.div_ceil(MEGA),
        capacity_tx_rate: uplink.speed.egress / MEGA,
        used_vfs: placed.len(),
        capacity_vfs: placed.len() + INTERFACES_MAX,
        vfs: placed.iter().enumerate().map(|(at, placed)| vf(at, placed)).collect(),
    }
}

fn vf(at: usize, placed: &Placed) -> Vf {
    Vf {
        vf: at,
        spoof_check: "ON",
        trust: "OFF",
        link_state: "Follow",
        vgt_plus: "OFF",
        min_tx_rate: placed.min.egress.div_ceil(MEGA),
        max_tx_rate: placed.max.map_or(0, |max| max.div_ceil(MEGA)),
        allocated: true,
        ..Vf::default()
    }
}

#[cfg(test)]
mod tests {
    use rocinante_placement::Rates;

    use super::*;

    #[test]
    fn a_limit_is_never_written_as_none() {
        for (max, says) in [(None, 0), (Some(1), 1), (Some(MEGA), 1), (Some(MEGA + 1), 2)] {
            let min = Rates { egress: 0, ingress: 0 };
            let placed = Placed { uplink: "a".into(), min, max };
            assert_eq!(vf(0, &placed).max_tx_rate, says, "{max:?}");
        }
    }
}
