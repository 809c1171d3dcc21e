//! The health of the node's devices: that of the agent, and of each uplink. The kubelet writes it
//! into the status of pods that have them (`allocatedResourcesStatus`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use tokio::sync::watch::{Receiver, Sender};
use tonic::{Request, Response};

use self::api::dra_resource_health_server::DraResourceHealth;
use self::api::{DeviceHealth, Health, Identifier, WatchRequest, WatchResponse};
use super::claim::device_of;
use super::state::Store;
use crate::agent::Status;
use crate::objects::since_1970;

/// The kubelet's API. Tests have the other half of it.
#[allow(dead_code, missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod api {
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

/// The period after which a kubelet that watches gets the same answer again, and the seconds after
/// which it would take the health for unknown: those that the answer names. One of v1alpha1 does
/// not read them, and has 30.
const AGAIN: Duration = Duration::from_secs(60);
const VALID: i64 = 150;
const AGAIN_ALPHA: Duration = Duration::from_secs(10);

/// Marks a request of v1alpha1.
#[derive(Clone)]
pub(crate) struct Alpha;

/// The agent counts as gone after it has not answered this often: one that restarts, or is busy,
/// misses fewer.
const SILENCES: u32 = 5;

/// Tells `serves` whether the agent is there, by whether it answers, until the driver ends. It says
/// nothing of an agent that was not asked for long enough.
pub(crate) async fn judge(
    mut is_there: Receiver<bool>,
    soon: Duration,
    serves: Sender<Option<bool>>,
) {
    loop {
        let answer = tokio::time::timeout(SILENCES * soon, is_there.wait_for(|it| *it));
        let word = answer.await.is_ok();
        serves.send_if_modified(|it| it.replace(word) != Some(word));
        if is_there.wait_for(|it| *it != word).await.is_err() {
            return;
        }
    }
}

/// The devices, as far as the driver knows them. Its clones see the same.
#[derive(Clone)]
pub(crate) struct Devices {
    pub(crate) node: Arc<str>,
    pub(crate) store: Arc<Store>,
    /// The agent's last word, and whether it answers now.
    pub(crate) uplinks: Receiver<Option<Status>>,
    pub(crate) is_there: Receiver<bool>,
    /// Whether it serves its containers, by [`judge`].
    pub(crate) serves: Receiver<Option<bool>>,
}

impl Devices {
    /// Why a device does not serve its pods, if so.
    pub(crate) fn fault(&self, device: &str) -> Option<String> {
        if *self.serves.borrow() == Some(false) {
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
        let since = since_1970();
        let device = |device: String| {
            let fault = self.fault(&device);
            let health = match (*self.serves.borrow(), &fault) {
                (None, _) => Health::Unknown,
                (_, None) => Health::Healthy,
                (_, Some(_)) => Health::Unhealthy,
            };
            DeviceHealth {
                device: Some(Identifier { pool: self.node.to_string(), device }),
                health: health.into(),
                last_updated: since.as_secs().try_into().unwrap_or(i64::MAX),
                timeout: VALID,
                message: fault.unwrap_or_default(),
            }
        };
        WatchResponse { devices: names.into_iter().map(device).collect() }
    }

    /// Until something has changed, or is to be said again. `None` when the driver ends.
    async fn changed(&mut self, again: Duration) -> Option<()> {
        tokio::select! {
            changed = self.uplinks.changed() => changed.ok(),
            changed = self.serves.changed() => changed.ok(),
            () = tokio::time::sleep(again) => Some(()),
        }
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Devices {
    type NodeWatchResourcesStream = BoxStream<'static, Result<WatchResponse, tonic::Status>>;

    async fn node_watch_resources(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, tonic::Status> {
        let mut devices = self.clone();
        devices.serves.mark_changed();
        let is_alpha = request.extensions().get::<Alpha>().is_some();
        let again = if is_alpha { AGAIN_ALPHA } else { AGAIN };
        let words = stream::unfold(devices, move |mut devices: Self| async move {
            devices.changed(again).await?;
            Some((Ok(devices.all()), devices))
        });
        Ok(Response::new(words.boxed()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch::channel;
    use tokio::time::sleep;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(2);

    /// An agent that was not asked yet, that restarts, and that ends; of two drivers one was never
    /// answered.
    #[tokio::test(start_paused = true)]
    async fn a_restart_of_the_agent_is_no_fault() {
        let ((is_there, answers), (_absent, never)) = (channel(false), channel(false));
        let ((to, serves), (to_other, other)) = (channel(None), channel(None));
        tokio::spawn(judge(answers, PERIOD, to));
        tokio::spawn(judge(never, PERIOD, to_other));
        sleep(4 * PERIOD).await;
        assert_eq!((*serves.borrow(), *other.borrow()), (None, None));
        is_there.send_replace(true);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(*serves.borrow(), Some(true));
        for _ in 0..3 {
            is_there.send_replace(false);
            sleep(4 * PERIOD).await;
            assert_eq!((*serves.borrow(), *other.borrow()), (Some(true), Some(false)));
            is_there.send_replace(true);
            sleep(PERIOD).await;
        }
        is_there.send_replace(false);
        sleep(6 * PERIOD).await;
        assert_eq!(*serves.borrow(), Some(false));
        is_there.send_replace(true);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(*serves.borrow(), Some(true));
    }
}
