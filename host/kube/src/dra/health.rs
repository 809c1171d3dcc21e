//! The health of the node's devices: that of the agent, and of each uplink. The kubelet writes it
//! into the status of pods that have them (`allocatedResourcesStatus`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use tokio::sync::watch::Receiver;
use tonic::{Request, Response};

use self::api::dra_resource_health_server::DraResourceHealth;
use self::api::{DeviceHealth, Health, Identifier, WatchRequest, WatchResponse};
use super::claim::device_of;
use super::state::Store;
use crate::agent::Status;

/// The kubelet's API. Tests have the other half of it.
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

/// How often a kubelet that watches is told the same again: it takes the health for unknown after
/// 30 s.
const AGAIN: Duration = Duration::from_secs(10);

/// The devices, as far as the driver knows them. Its clones see the same.
#[derive(Clone)]
pub(crate) struct Devices {
    pub(crate) node: Arc<str>,
    pub(crate) store: Arc<Store>,
    /// The agent's last word, and whether it answers now.
    pub(crate) uplinks: Receiver<Option<Status>>,
    pub(crate) is_there: Receiver<bool>,
}

impl Devices {
    /// Why a device does not serve its pods, if so.
    pub(crate) fn fault(&self, device: &str) -> Option<String> {
        if !*self.is_there.borrow() {
            return Some("the agent of the node does not answer".into());
        }
        let status = self.uplinks.borrow();
        let uplinks = &status.as_ref()?.uplinks;
        match uplinks.iter().find(|it| device_of(&it.interface) == device) {
            Some(uplink) => uplink.fault.as_ref().map(|why| format!("the uplink: {why}")),
            None => Some("it is no uplink of the agent's any more".into()),
        }
    }

    /// Those of the agent, and those that claims have.
    fn all(&self) -> WatchResponse {
        let mut names = BTreeSet::new();
        if let Some(status) = &*self.uplinks.borrow() {
            names.extend(status.uplinks.iter().map(|it| device_of(&it.interface)));
        }
        let records = self.store.read().unwrap_or_default();
        names.extend(records.values().flat_map(|it| &it.shares).map(|it| it.device.clone()));
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let device = |device: String| {
            let fault = self.fault(&device);
            let health = if fault.is_none() { Health::Healthy } else { Health::Unhealthy };
            DeviceHealth {
                device: Some(Identifier { pool: self.node.to_string(), device }),
                health: health.into(),
                last_updated: since.as_secs().try_into().unwrap_or(i64::MAX),
                timeout: 0,
                message: fault.unwrap_or_default(),
            }
        };
        WatchResponse { devices: names.into_iter().map(device).collect() }
    }

    /// Until something has changed, or is to be said again. `None` when the driver ends.
    async fn changed(&mut self) -> Option<()> {
        tokio::select! {
            changed = self.uplinks.changed() => changed.ok(),
            changed = self.is_there.changed() => changed.ok(),
            () = tokio::time::sleep(AGAIN) => Some(()),
        }
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Devices {
    type NodeWatchResourcesStream = BoxStream<'static, Result<WatchResponse, tonic::Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<WatchRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, tonic::Status> {
        let mut devices = self.clone();
        devices.is_there.mark_changed();
        let words = stream::unfold(devices, async |mut devices| {
            devices.changed().await?;
            Some((Ok(devices.all()), devices))
        });
        Ok(Response::new(words.boxed()))
    }
}
