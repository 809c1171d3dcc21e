//! The lease that lets one of several extenders bind. Another extender takes the lease when it has
//! seen no change of it for its whole time, also of one that is gone. The holder trusts the lease
//! for two thirds of that time from its last request on. So clocks must run at the same rate, but
//! need not agree.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::ResourceExt;
use kube::api::PostParams;
use kube::core::DynamicObject;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::objects::{Cluster, Failed, asked, resource_of, since_1970};
use crate::said::Said;

const GROUP: &str = "coordination.k8s.io";
const NAME: &str = "rocinante-extender";

/// How long a holder may be silent before another takes its place.
pub const LEASE_FOR: Duration = Duration::from_secs(15);
/// How often the lease is looked at in that time.
const LOOKS: u32 = 8;

pub(crate) struct Lease {
    leases: Api<DynamicObject>,
    holder: String,
    time: Duration,
    /// The end of the time for which this process trusts the lease; `None` before it first has it.
    until: watch::Sender<Option<Instant>>,
}

impl Lease {
    /// A lease in the client's namespace.
    pub(crate) fn new(cluster: &Cluster, time: Duration) -> Self {
        let of = resource_of(GROUP, "Lease", "leases");
        let leases = Api::default_namespaced_with(cluster.client.clone(), &of);
        let since = since_1970();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let holder = format!("{}_{}_{:x}", host.trim(), std::process::id(), since.as_nanos());
        Self { leases, holder, time, until: watch::Sender::new(None) }
    }

    /// Error: this process may not bind now.
    pub(crate) fn held(&self) -> Result<(), String> {
        let is_held = self.until.borrow().is_some_and(|until| Instant::now() < until);
        is_held.then_some(()).ok_or_else(|| format!("the lease {NAME} is not this extender's"))
    }

    /// Waits until this process first has the lease.
    pub(crate) async fn first(&self) {
        let _ = self.until.subscribe().wait_for(Option::is_some).await;
    }

    /// Gets the lease, and keeps it until another has it.
    pub(crate) async fn keep(&self) {
        let (mut said, mut seen) = (Said::default(), None);
        loop {
            let begun = Instant::now();
            match self.turn(&mut seen).await {
                Ok(true) => {
                    said.info(format!("{} has the lease {NAME}", self.holder));
                    self.until.send_replace(Some(begun + self.time * 2 / 3));
                }
                Ok(false) if self.until.borrow().is_some() => return,
                Ok(false) => said.info(format!("another extender has the lease {NAME}")),
                Err(failed) => said.warn(format!("the lease {NAME} is not renewed: {failed}")),
            }
            tokio::time::sleep(self.time / LOOKS).await;
        }
    }

    /// Gets or renews the lease. Returns whether this process has it. `seen` is the last version of
    /// another holder's lease, or that it is gone, and the time of its first sight.
    async fn turn(&self, seen: &mut Option<(Option<String>, Instant)>) -> Result<bool, Failed> {
        let old = match asked(self.leases.get(NAME)).await {
            Err(Failed::Gone) => None,
            lease => Some(lease?),
        };
        let version = old.as_ref().and_then(ResourceExt::resource_version);
        let spec = old.as_ref().map(|it| &it.data["spec"]);
        let its = spec.and_then(|it| it["leaseDurationSeconds"].as_u64()).unwrap_or(0);
        let time = Duration::from_secs(its).max(self.time);
        match seen {
            _ if spec.is_some_and(|it| it["holderIdentity"] == *self.holder) => {}
            // Another that held it would trust it still.
            None if spec.is_none() => {}
            Some((last, since)) if *last == version && since.elapsed() >= time => {}
            Some((last, _)) if *last == version => return Ok(false),
            _ => {
                *seen = Some((version, Instant::now()));
                return Ok(false);
            }
        }
        let (params, lease) = (PostParams::default(), self.lease(version.as_deref())?);
        match version {
            None => asked(self.leases.create(&params, &lease)).await?,
            Some(_) => asked(self.leases.replace(NAME, &params, &lease)).await?,
        };
        *seen = None;
        Ok(true)
    }

    /// The lease with this process as its holder, in the place of this version.
    fn lease(&self, version: Option<&str>) -> Result<DynamicObject, Failed> {
        let lease = json!({
            "apiVersion": format!("{GROUP}/v1"),
            "kind": "Lease",
            "metadata": {"name": NAME, "resourceVersion": version},
            "spec": {
                "holderIdentity": self.holder,
                "leaseDurationSeconds": self.time.as_secs().max(1),
                "renewTime": format!("{:.6}", Timestamp::now()),
            },
        });
        serde_json::from_value(lease).map_err(|error| Failed::Refused(error.to_string()))
    }
}
