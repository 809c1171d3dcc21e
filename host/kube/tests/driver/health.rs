//! The health of devices, as a kubelet hears it (`pkg/kubelet/cm/dra/manager.go`,
//! `HandleWatchResourcesStream`).

use std::collections::BTreeMap;

use crate::dra::Shared;
use crate::plugins::health::{Health, WatchResponse};
use crate::until;

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
