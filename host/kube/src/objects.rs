//! The few fields of the API's objects that matter here, and the requests for them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use futures_util::{StreamExt as _, stream};
use kube::api::{ApiResource, GroupVersionKind, ListParams, Patch, PatchParams, PostParams};
use kube::core::Object;
use kube::{Api, Client, ResourceExt as _};
use rocinante_placement::{Placed, to_json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::ledger::Outcome;

/// A node's annotation: its uplinks, as [`rocinante_placement::uplinks`] reads them.
pub const UPLINKS: &str = "rocinante.dev/uplinks";
/// The extended resource of a node: the Mb/s of its uplinks, which any scheduler sums.
pub const MBPS: &str = "rocinante.dev/mbps";
/// A pod's annotation: the interfaces that it asks for, as Link et al. have it.
pub const REQUIRED: &str = "rdma_interfaces_required";
/// A bound pod's annotation: the places of its interfaces, as [`rocinante_placement::placed`] reads
/// them.
pub const PLACED: &str = "rocinante.dev/interfaces";

/// A pod's annotation that is written to change the pod's resource version.
const FENCE: &str = "rocinante.dev/fence";

/// Pods without a node.
const UNBOUND: &str = "spec.nodeName=";
/// Pods that hold their reservations: they are bound and have not ended.
pub(crate) const HOLDING: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// The longest that one request may take. kube-scheduler gives an extender five seconds.
const REQUEST_MAX: Duration = Duration::from_secs(4);

/// When to ask again, after the API server gave no answer or refused.
pub(crate) const AGAIN: Duration = Duration::from_secs(1);
/// Pods of a page of a list.
const PAGE: u32 = 500;
/// Pods that are fenced at a time.
const FENCED_AT_ONCE: usize = 16;

pub(crate) type Pod = Object<PodSpec, PodStatus>;
pub(crate) type Node = Object<Unused, NodeStatus>;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node_name: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PodStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) phase: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct NodeStatus {
    #[serde(default)]
    pub(crate) capacity: Capacity,
}

/// Of [`MBPS`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Capacity {
    #[serde(rename = "rocinante.dev/mbps", skip_serializing_if = "Option::is_none")]
    pub(crate) mbps: Option<String>,
}

/// Fields that are not read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Unused {}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The object is not there.
    Gone,
    /// The server refused it, and did nothing.
    Refused(String),
    /// So for now: it is busy (429), or a token has just expired (401).
    Later(String),
    /// The server speaks of a conflict. It says so of a bind, too, whose outcome its storage did
    /// not learn (`BindingREST.assignPod`).
    Conflict(String),
    /// The server may have done it.
    Unknown(String),
}

impl Failed {
    /// As an answer to a bind.
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Gone | Self::Refused(_) | Self::Later(_) => Outcome::Refused,
            Self::Conflict(_) | Self::Unknown(_) => Outcome::Unknown,
        }
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gone => f.write_str("it is gone"),
            Self::Refused(why) | Self::Later(why) | Self::Conflict(why) => f.write_str(why),
            Self::Unknown(why) => write!(f, "no answer from the API server: {why}"),
        }
    }
}

/// The API server, for pods and nodes.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
}

impl Cluster {
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// All pods.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::all_with(self.client.clone(), &resource("Pod", "pods"))
    }

    /// All nodes.
    pub(crate) fn nodes(&self) -> Api<Node> {
        Api::all_with(self.client.clone(), &resource("Node", "nodes"))
    }

    fn pods_in(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced_with(self.client.clone(), namespace, &resource("Pod", "pods"))
    }

    pub(crate) async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, Failed> {
        asked(self.pods_in(namespace).get(name)).await
    }

    /// Binds a pod to a node and writes its places, in one request. `setPodHostAndAnnotations` of
    /// the API server merges a Binding's annotations into the pod's, and compares the UID and the
    /// resource version: a pod that has changed since it was read is not bound.
    pub(crate) async fn bind(
        &self,
        pod: &PodKey,
        node: &str,
        placed: &[Placed],
    ) -> Result<(), Failed> {
        let mut annotations = BTreeMap::new();
        if !placed.is_empty() {
            let text = to_json(placed).map_err(|error| Failed::Refused(error.to_string()))?;
            annotations.insert(PLACED, text);
        }
        let PodKey { namespace, name, uid, version } = pod;
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": uid,
                "resourceVersion": version,
                "annotations": annotations,
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        });
        let pods = self.pods_in(namespace);
        let params = PostParams::default();
        let done = pods.create_subresource::<_, Ignored>("binding", name, &params, &binding);
        asked(done).await.map(|Ignored {}| ())
    }

    /// The pod as it is once no bind that was sent before can succeed any more: it is bound, or
    /// its resource version is another one now.
    pub(crate) async fn fence(&self, key: &PodKey) -> Result<Pod, Failed> {
        let pod = self.pod(&key.namespace, &key.name).await?;
        if pod.uid().as_deref() != Some(&*key.uid) {
            return Err(Failed::Gone);
        }
        if pod.node().is_some() {
            return Ok(pod);
        }
        // A patch that changes nothing keeps the version.
        let since = since_1970();
        let patch = json!({"metadata": {
            "resourceVersion": pod.metadata.resource_version,
            "annotations": {FENCE: format!("{}", since.as_nanos())},
        }});
        let (pods, params) = (self.pods_in(&key.namespace), PatchParams::default());
        asked(pods.patch(&key.name, &params, &Patch::Merge(&patch))).await
    }

    /// Fences all pods that wait for interfaces: no bind of an earlier process succeeds afterwards.
    /// It gives up a pod that cannot be fenced for so long that the API server has given up such a
    /// bind itself.
    pub(crate) async fn fence_all(&self, patience: Duration) {
        let waiting = self.waiting().await;
        let until = Instant::now() + patience;
        let each = |pod: &Pod| {
            let key = PodKey::of(pod);
            async move {
                while let Err(failed) = self.fence(&key).await
                    && !matches!(failed, Failed::Gone)
                    && Instant::now() < until
                {
                    tracing::warn!(pod = key.name, "not fenced yet: {failed}");
                    tokio::time::sleep(AGAIN).await;
                }
            }
        };
        stream::iter(&waiting).for_each_concurrent(FENCED_AT_ONCE, each).await;
    }

    /// The pods that wait for interfaces.
    async fn waiting(&self) -> Vec<Pod> {
        let pods = self.pods();
        let first = ListParams::default().fields(UNBOUND).limit(PAGE);
        let (mut params, mut waiting) = (first.clone(), Vec::new());
        loop {
            match asked(pods.list(&params)).await {
                Ok(list) => {
                    let next = list.metadata.continue_.unwrap_or_default();
                    let items = list.items.into_iter();
                    waiting.extend(items.filter(|pod| pod.annotations().contains_key(REQUIRED)));
                    if next.is_empty() {
                        return waiting;
                    }
                    params = params.continue_token(&next);
                }
                Err(failed) => {
                    tracing::warn!("the waiting pods are not known: {failed}");
                    (params, waiting) = (first.clone(), Vec::new());
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }

    /// Changes a node, or its status. The node as it is then.
    pub(crate) async fn change_node(&self, name: &str, change: &Change) -> Result<Node, Failed> {
        let (nodes, params) = (self.nodes(), PatchParams::default());
        match change {
            Change::Object(patch) => asked(nodes.patch(name, &params, &Patch::Merge(patch))).await,
            Change::Status(patch) => {
                asked(nodes.patch_status(name, &params, &Patch::Merge(patch))).await
            }
        }
    }
}

/// A merge patch of an object, or of its subresource `status`, which has rights of its own.
#[derive(Debug, PartialEq)]
pub(crate) enum Change {
    Object(Value),
    Status(Value),
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Object(patch) | Self::Status(patch)) = self;
        patch.fmt(f)
    }
}

/// One state of one pod.
#[derive(Debug, Clone)]
pub(crate) struct PodKey {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    version: String,
}

impl PodKey {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
            version: pod.resource_version().unwrap_or_default(),
        }
    }
}

/// The fields of a pod that are read.
pub(crate) trait PodState {
    /// The node that it is bound to.
    fn node(&self) -> Option<&str>;
    /// Whether all its containers have ended for good.
    fn has_ended(&self) -> bool;
}

impl PodState for Pod {
    fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    fn has_ended(&self) -> bool {
        let phase = self.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }
}

/// An answer whose fields do not matter.
#[derive(Deserialize)]
struct Ignored {}

fn resource(kind: &str, plural: &str) -> ApiResource {
    resource_of("", kind, plural)
}

pub(crate) fn resource_of(group: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural)
}

pub(crate) async fn asked<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Failed> {
    match tokio::time::timeout(REQUEST_MAX, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(Failed::Gone),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
            Err(Failed::Conflict(status.message.clone()))
        }
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 429) => {
            Err(Failed::Later(status.message.clone()))
        }
        // 408 says that the server gave up, and not what it had done.
        Ok(Err(kube::Error::Api(status)))
            if (400..500).contains(&status.code) && status.code != 408 =>
        {
            Err(Failed::Refused(status.message.clone()))
        }
        Ok(Err(error)) => Err(Failed::Unknown(error.to_string())),
        Err(_) => Err(Failed::Unknown(format!("none within {REQUEST_MAX:?}"))),
    }
}

/// The time since 1970; its nanoseconds make names that do not come again.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
