//! Of several extenders one binds.

use hyper::StatusCode;

use crate::binds::{LONG, cluster, is_free, pod};
use crate::scheduler::bind;
use crate::{Extender, get, until};

#[tokio::test]
async fn another_extender_takes_the_place_of_one_that_ended() {
    let api = cluster().await;
    let first = Extender::ready(&api, LONG).await;
    let holder = || api.lease().unwrap()["spec"]["holderIdentity"].clone();
    let (before, second) = (holder(), Extender::start(&api, LONG).await);
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
    let extender = Extender::ready(&api, LONG).await;
    bind(extender.address, &pod(&api, "before", &[1]), "n1").await.unwrap();
    let one = pod(&api, "one", &[7]);
    api.fail_resources([StatusCode::SERVICE_UNAVAILABLE; 9]);
    until("it is too old", async || extender.lease_refuses(&api).await).await;
    assert!(api.has_resource_faults());
    assert!(bind(extender.address, &one, "n1").await.is_err());
    until("it is renewed", async || bind(extender.address, &one, "n1").await.is_ok()).await;
    assert!(!api.has_resource_faults());
}

impl Extender {
    /// Whether a pod that does not fit is refused for the lease.
    async fn lease_refuses(&self, api: &crate::api::Api) -> bool {
        let none = pod(api, "none", &[10]);
        bind(self.address, &none, "n1").await.unwrap_err().contains("is not this extender's")
    }
}

#[tokio::test]
async fn an_extender_whose_lease_another_has_ends() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    let mut lease = api.lease().unwrap();
    lease["spec"]["holderIdentity"] = "another".into();
    api.put_lease(lease);
    until("it ends", async || extender.task.is_finished()).await;
}
