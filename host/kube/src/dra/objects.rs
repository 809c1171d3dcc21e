//! The requests of the driver.

use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use super::DRIVER;
use super::claim::{Claim, Record};
use crate::objects::{Cluster, Failed, asked, resource_of, since_1970};

const GROUP: &str = "resource.k8s.io";

impl Cluster {
    pub(crate) async fn claim(&self, namespace: &str, name: &str) -> Result<Claim, Failed> {
        if namespace.is_empty() || name.is_empty() {
            return Err(Failed::Gone);
        }
        asked(Api::<Claim>::namespaced_with(self.client.clone(), namespace, &claims()).get(name))
            .await
    }

    /// Has a claim's status say this of our devices, and leaves those of other drivers.
    pub(crate) async fn report(&self, record: &Record, devices: &Value) -> Result<(), Failed> {
        let Record { namespace, name, uid, .. } = record;
        let claim = json!({
            "apiVersion": format!("{GROUP}/v1"),
            "kind": "ResourceClaim",
            // Of another UID it is a conflict.
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "status": {"devices": devices},
        });
        let params = PatchParams::apply(DRIVER).force();
        let claims: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &claims());
        asked(claims.patch_status(name, &params, &Patch::Apply(&claim))).await.map(drop)
    }

    pub(crate) fn slices(&self) -> Api<DynamicObject> {
        let of = resource_of(GROUP, "ResourceSlice", "resourceslices");
        Api::all_with(self.client.clone(), &of)
    }

    /// Makes a slice, or puts it in the place of one with its resource version.
    pub(crate) async fn write_slice(&self, slice: &DynamicObject) -> Result<DynamicObject, Failed> {
        let (slices, params) = (self.slices(), PostParams::default());
        match slice.resource_version() {
            None => asked(slices.create(&params, slice)).await,
            Some(_) => asked(slices.replace(&slice.name_any(), &params, slice)).await,
        }
    }

    pub(crate) async fn delete_slice(&self, name: &str) -> Result<(), Failed> {
        asked(self.slices().delete(name, &DeleteParams::default())).await.map(drop)
    }

    /// The pods of a node.
    pub(crate) fn pod_claims(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &resource_of("", "Pod", "pods"))
    }

    /// Tells the operators of a node.
    pub(crate) async fn event(&self, node: &str, reason: &str, message: &str) {
        let since = since_1970();
        let now = Timestamp::now();
        let event = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": "default", "name": format!("{node}.{:x}", since.as_nanos())},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": DRIVER, "host": node},
            "firstTimestamp": format!("{now:.0}"),
            "lastTimestamp": format!("{now:.0}"),
            "count": 1,
        });
        tracing::warn!("{message}");
        let of = resource_of("", "Event", "events");
        let events: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), "default", &of);
        let Ok(event) = serde_json::from_value(event) else { return };
        if let Err(failed) = asked(events.create(&PostParams::default(), &event)).await {
            tracing::warn!("the event {reason} is not written: {failed}");
        }
    }
}

fn claims() -> ApiResource {
    resource_of(GROUP, "ResourceClaim", "resourceclaims")
}
