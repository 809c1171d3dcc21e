//! Of several extenders one binds.

use std::time::{Duration, Instant};

use hyper::StatusCode;
use serde_json::json;

use crate::api::Api;
use crate::binds::{LONG, cluster, is_free, pod};
use crate::scheduler::bind;
use crate::{Extender, get, until};

/// How long an extender of these tests may be silent.
const LEASE: Duration = Duration::from_secs(4);

async fn start(api: &Api) -> Extender {
    Extender::start_with(api, LONG, LEASE).await
}

#[tokio::test]
async fn another_extender_takes_the_place_of_one_that_ended() {
    let api = cluster().await;
    let first = start(&api).await.readied().await;
    let holder = || api.lease().unwrap()["spec"]["holderIdentity"].clone();
    let (before, second) = (holder(), start(&api).await);
    let (one, two) = (pod(&api, "one", &[7]), pod(&api, "two", &[3]));
    let refused = bind(second.address, &one, "n1").await.unwrap_err();
    assert!(refused.contains("is not this extender's"), "{refused}");
    bind(first.address, &one, "n1").await.unwrap();
    assert_eq!((get(second.address, "/healthz").await.0, holder()), (503, before.clone()));
    // A scheduler asks again.
    drop(first);
    until("it binds", async || {
        let now = api.pod("two").unwrap();
        bind(second.address, &now, "n1").await.is_ok()
    })
    .await;
    assert_ne!(holder(), before);
    assert_ne!(
        api.pod("two").unwrap()["metadata"]["resourceVersion"],
        two["metadata"]["resourceVersion"]
    );
    assert!(!is_free(&api, &second, "n1", 1).await && is_free(&api, &second, "n2", 10).await);
}

#[tokio::test]
async fn an_extender_that_cannot_renew_its_lease_binds_nothing_meanwhile() {
    let api = cluster().await;
    let extender = start(&api).await.readied().await;
    bind(extender.address, &pod(&api, "before", &[1]), "n1").await.unwrap();
    let one = pod(&api, "one", &[7]);
    // More than it meets.
    api.fail_resources(vec![StatusCode::SERVICE_UNAVAILABLE; 100_000]);
    until("it is too old", async || extender.lease_refuses(&api).await).await;
    assert!(bind(extender.address, &one, "n1").await.is_err());
    api.clear_resource_faults();
    until("it is renewed", async || bind(extender.address, &one, "n1").await.is_ok()).await;
}

/// The holder of a lease that is deleted does not know it yet.
#[tokio::test]
async fn a_lease_that_is_gone_is_another_holders_still() {
    let api = cluster().await;
    // It is the other's for longer than this test needs to delete it.
    let spec = json!({"holderIdentity": "another", "leaseDurationSeconds": 600});
    api.put_lease(json!({"metadata": {"name": "rocinante-extender"}, "spec": spec}));
    let _extender = start(&api).await;
    // The second look ends the first.
    let looks = || api.requests().iter().filter(|it| it.contains("/leases/")).count();
    until("it has seen it", async || looks() >= 2).await;
    let deleted = Instant::now();
    api.delete_lease();
    until("it has one", async || api.lease().is_some()).await;
    assert!(deleted.elapsed() >= LEASE, "{:?}", deleted.elapsed());
}

impl Extender {
    /// Whether a pod that does not fit is refused for the lease.
    async fn lease_refuses(&self, api: &Api) -> bool {
        let none = pod(api, "none", &[10]);
        bind(self.address, &none, "n1").await.unwrap_err().contains("is not this extender's")
    }
}

#[tokio::test]
async fn an_extender_whose_lease_another_has_ends() {
    let api = cluster().await;
    let extender = start(&api).await.readied().await;
    let mut lease = api.lease().unwrap();
    lease["spec"]["holderIdentity"] = "another".into();
    api.put_lease(lease);
    until("it ends", async || extender.task.is_finished()).await;
}
