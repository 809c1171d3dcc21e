//! The health of devices, as a kubelet hears it (`pkg/kubelet/cm/dra/manager.go`,
//! `HandleWatchResourcesStream`).

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::dra::{Shared, UID, share, with};
use crate::plugins::health::{Health, WatchResponse};
use crate::{NEVER, until};

fn words(response: WatchResponse) -> BTreeMap<String, (Health, String)> {
    let each = response.devices.into_iter().map(|it| {
        assert!(it.last_updated > 1_700_000_000, "a time");
        let (health, device) = (it.health(), it.device.unwrap());
        assert_eq!(device.pool, "n1");
        (device.device, (health, it.message))
    });
    each.collect()
}

/// Two uplinks, of which one goes down and is up again; then one leaves the configuration, and the
/// agent ends and another begins. Two kubelets of different versions watch.
#[tokio::test]
async fn a_kubelet_hears_of_uplinks_and_of_the_agent() {
    let (it, agent, _driver) = Shared::running().await;
    let mut streams = Vec::new();
    for version in ["v1", "v1alpha1"] {
        streams.push(it.manager.watch(version).await.unwrap());
    }
    let mut heard = vec![BTreeMap::new(); 2];
    let hear =
        async |streams: &mut Vec<_>, heard: &mut Vec<_>, what: &str, device: &str, health| {
            for (stream, last) in streams.iter_mut().zip(heard) {
                until(what, async || {
                    let stream: &mut tonic::Streaming<WatchResponse> = stream;
                    *last = words(stream.message().await.unwrap().unwrap());
                    last.get(device).is_some_and(|(now, _): &(Health, String)| *now == health)
                })
                .await;
            }
        };
    hear(&mut streams, &mut heard, "it is well", "ens1", Health::Healthy).await;
    assert_eq!(heard[0]["ens1"].1, "");
    agent.has(&[("ens1", 10, None), ("ens2", 10, Some("it is down"))]);
    hear(&mut streams, &mut heard, "ens2 is down", "ens2", Health::Unhealthy).await;
    assert!(heard[1]["ens2"].1.contains("it is down"), "{heard:?}");
    assert_eq!(heard[1]["ens1"].0, Health::Healthy);
    agent.has(&[("ens1", 10, None), ("ens2", 10, None)]);
    hear(&mut streams, &mut heard, "ens2 is up", "ens2", Health::Healthy).await;
    drop(agent);
    hear(&mut streams, &mut heard, "the agent ends", "ens1", Health::Unhealthy).await;
    assert!(heard.iter().all(|it| it["ens2"].1.contains("does not answer")), "{heard:?}");
    let _agent = it.node.agent(&[10]);
    hear(&mut streams, &mut heard, "another begins", "ens1", Health::Healthy).await;
    until("one uplink is left", async || {
        heard[0] = words(streams[0].message().await.unwrap().unwrap());
        heard[0].len() == 1
    })
    .await;
}

/// Two claims on two uplinks, of which one goes down while their pods run, and the agent ends and
/// is back. Each condition has the time of its own change.
#[tokio::test]
async fn the_status_of_a_claim_follows_its_uplink() {
    let (it, agent, _driver) = Shared::running().await;
    agent.has(&[("ens1", 10, None), ("ens2", 10, None)]);
    let mut second = share("s-2", "1G");
    second["device"] = "ens2".into();
    const OTHER: &str = "0f1e2d3c-4b5b";
    for (name, uid, pod, share) in [("c", UID, "p", share("s-1", "3G")), ("d", OTHER, "q", second)]
    {
        it.api().put_claim(name, uid, &[pod], &with(&[share], &json!({})));
        it.manager.prepare(pod, (uid, name)).await.unwrap();
        agent.has_pod(pod, "02:00:00:00:00:01", "fd00::7");
    }
    let status = |name: &str| it.device(name);
    let ready = |name: &str| status(name)["conditions"][0].clone();
    let is = |it: &Value, status: &str, says: &str| {
        it["status"] == status && it["message"].as_str().is_some_and(|it| it.contains(says))
    };
    for name in ["c", "d"] {
        until("it is ready", async || is(&ready(name), "True", "reserved")).await;
        until("its network", async || status(name)["networkData"].is_object()).await;
    }
    let before = [ready("c"), status("d")["networkData"].clone()];
    tokio::time::sleep(Duration::from_millis(1100)).await;
    agent.has(&[("ens1", 10, None), ("ens2", 10, Some("its link is down"))]);
    until("ens2 is down", async || is(&ready("d"), "False", "its link is down")).await;
    assert_eq!(ready("d")["reason"], "Faulty");
    assert_ne!(ready("d")["lastTransitionTime"], before[0]["lastTransitionTime"]);
    assert_eq!([ready("c"), status("d")["networkData"].clone()], before, "the other, and the rest");
    agent.has(&[("ens1", 10, None), ("ens2", 10, None)]);
    until("ens2 is up", async || is(&ready("d"), "True", "reserved")).await;
    // A server that is busy, or that has not seen a new token yet.
    for code in [StatusCode::TOO_MANY_REQUESTS, StatusCode::UNAUTHORIZED] {
        for (fault, condition) in [(Some("its link is down"), "False"), (None, "True")] {
            it.api().fail_resources([code; 2]);
            agent.has(&[("ens1", 10, None), ("ens2", 10, fault)]);
            until("it is written later", async || ready("d")["status"] == condition).await;
        }
    }
    drop(agent);
    for name in ["c", "d"] {
        until("the agent ends", async || is(&ready(name), "False", "does not answer")).await;
    }
    let agent = it.node.agent(&[10]);
    agent.has(&[("ens1", 10, None), ("ens2", 10, None)]);
    for name in ["c", "d"] {
        until("it is back", async || is(&ready(name), "True", "reserved")).await;
    }
    assert_eq!(status("d")["networkData"], before[1]);
}

/// A fault that comes, goes and comes again; each time another driver takes over.
#[tokio::test]
async fn a_driver_that_takes_over_keeps_the_time_of_a_condition() {
    let (it, agent, driver) = Shared::running().await;
    it.has_network(&agent).await;
    let device = || it.device("c");
    let mut last = driver;
    for (nth, (fault, status)) in
        [(Some("down"), "False"), (None, "True"), (Some("no cable"), "False")]
            .into_iter()
            .enumerate()
    {
        // The times have whole seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let before = device()["conditions"][0]["lastTransitionTime"].clone();
        agent.has(&[("ens1", 10, fault)]);
        until("it is written", async || device()["conditions"][0]["status"] == status).await;
        let written = device();
        assert_ne!(written["conditions"][0]["lastTransitionTime"], before, "{nth}");
        drop(last);
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let of_claim = |it: &&String| it.contains("resourceclaims");
        let asked = || it.api().requests().iter().filter(of_claim).count();
        let before = asked();
        last = it.driver(&format!("next-{nth}"));
        it.registered(1).await;
        // It reads the claim to mend it, and its status; and writes nothing.
        until("it looks", async || asked() >= before + 2).await;
        tokio::time::sleep(crate::PERIOD * 10).await;
        assert_eq!((asked(), device()), (before + 2, written), "{nth}");
    }
    // Another fault is written, and the status is the same.
    let before = device()["conditions"][0].clone();
    agent.has(&[("ens1", 10, Some("no such interface"))]);
    let message = |it: &Value| it["message"].as_str().unwrap().contains("no such interface");
    until("it is written", async || message(&device()["conditions"][0])).await;
    assert_eq!(device()["conditions"][0]["lastTransitionTime"], before["lastTransitionTime"]);
}

/// An agent that cannot write its state ends, and another is there in its place before the driver
/// misses it.
#[tokio::test]
async fn an_agent_that_restarts_at_once_gets_its_claims_again() {
    let (it, agent, _driver) = Shared::running_with(NEVER).await;
    it.api().has_claim("c", UID, &["p"]);
    it.manager.prepare("p", (UID, "c")).await.unwrap();
    let device = || it.device("c");
    // Its pod has no network yet.
    until("its status", async || device()["conditions"][0]["status"] == "True").await;
    let mut last = agent;
    for _ in 0..3 {
        let claims = last.claims();
        drop(last);
        last = it.node.agent(&[10]);
        until("it is claimed", async || last.claims() == claims).await;
    }
}

/// The agent ends before the driver, and another driver begins.
#[tokio::test]
async fn a_driver_that_finds_no_agent_ends_ready() {
    let (it, agent, driver) = Shared::running().await;
    it.has_network(&agent).await;
    let device = || it.device("c");
    let network = device()["networkData"].clone();
    drop((driver, agent));
    assert_eq!(device()["conditions"][0]["status"], "True");
    let of_claim = |it: &&String| it.contains("resourceclaims");
    let asked = || it.api().requests().iter().filter(of_claim).count();
    let before = asked();
    let _driver = it.driver("b");
    until("it is not ready", async || device()["conditions"][0]["status"] == "False").await;
    assert_eq!(device()["networkData"], network);
    // It reads the claim and writes it.
    tokio::time::sleep(crate::PERIOD * 10).await;
    assert_eq!(asked(), before + 2);
}

/// A pod in the host's network, beside one that the agent names.
#[tokio::test]
async fn a_running_pod_without_an_interface_of_its_own_loses_none() {
    let (it, agent, _driver) = Shared::running_with(NEVER).await;
    it.api().has_claim("c", UID, &["p", "q"]);
    for pod in ["p", "q"] {
        it.manager.prepare(pod, (UID, "c")).await.unwrap();
        it.api().put_pod(pod, "c");
        it.api().set_phase(pod, "Running");
    }
    agent.has_pod("q", "02:00:00:00:00:01", "fd00::7");
    let device = || it.device("c");
    until("its network", async || device()["networkData"].is_object()).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(device()["conditions"][0]["status"], "True");
    agent.lacks_pod("q");
    until("it ends", async || device()["conditions"][0]["status"] == "False").await;
}

/// Two pods on one claim: one that is deleted, and one whose interface goes while it runs.
#[tokio::test]
async fn a_running_pod_without_its_interface_ends_ready() {
    let (it, agent, driver) = Shared::running().await;
    it.api().has_claim("c", UID, &["p", "q"]);
    for pod in ["p", "q"] {
        it.manager.prepare(pod, (UID, "c")).await.unwrap();
        it.api().put_pod(pod, "c");
        it.api().set_phase(pod, "Running");
        agent.has_pod(pod, "02:00:00:00:00:01", "fd00::7");
    }
    let status = || it.api().claim("c").unwrap()["status"]["devices"].clone();
    let ready = || status()[0]["conditions"][0].clone();
    until("the network", async || status()[0]["networkData"].is_object()).await;
    // An end as others.
    agent.lacks_pod("q");
    it.api().delete_pod("q");
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(ready()["status"], "True");
    it.api().put_pod("q", "c");
    it.api().set_phase("q", "Running");
    until("the claim is not ready", async || ready()["status"] == "False").await;
    let written = ready();
    assert!(
        written["message"].as_str().unwrap().contains("no interface of the pod q"),
        "{written}"
    );
    // The next driver knows it, and nothing changes while it learns.
    drop(driver);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let writes = || it.api().log().iter().filter(|it| it.kind == "resourceclaims").count();
    let before = writes();
    let _driver = it.driver("b");
    it.registered(1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((ready(), writes()), (written, before));
    // Its interface is made anew.
    agent.has_pod("q", "02:00:00:00:00:02", "fd00::8");
    until("it is bound", async || ready()["status"] == "True").await;
}
