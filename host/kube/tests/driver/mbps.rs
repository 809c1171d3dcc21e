//! The extended resource of the node.

use std::time::{Duration, Instant};

use hyper::StatusCode;
use rocinante_kube::{MBPS, UPLINKS};
use serde_json::json;

use crate::{Node, until};

impl Node {
    pub(crate) fn mbps(&self) -> Option<String> {
        let capacity = self.api.node("n1")?["status"]["capacity"][MBPS].clone();
        capacity.as_str().map(str::to_owned)
    }

    async fn has_mbps(&self, wanted: Option<&str>) {
        until(&format!("it is {wanted:?}"), async || self.mbps().as_deref() == wanted).await;
    }

    fn patches(&self) -> usize {
        self.api.requests().iter().filter(|it| it.starts_with("PATCH")).count()
    }
}

#[tokio::test]
async fn the_nodes_mbps_are_those_of_the_agents_uplinks() {
    let node = Node::new().await;
    let (agent, _driver) = (node.agent(&[10, 25]), node.driver());
    node.has_mbps(Some("35k")).await;
    assert_eq!(node.patches(), 1);
    // What the kubelet writes stays.
    node.api.change_node("n1", |node| node["status"]["capacity"]["cpu"] = "4".into());
    agent.has_uplinks(&[10]);
    node.has_mbps(Some("10k")).await;
    assert_eq!(node.api.node("n1").unwrap()["status"]["capacity"]["cpu"], "4");
    // Without an agent the uplinks are still there.
    drop(agent);
    let agent = node.agent(&[40]);
    node.has_mbps(Some("40k")).await;
    agent.has_uplinks(&[]);
    node.has_mbps(None).await;
    // Nothing is written that is there.
    assert_eq!(node.patches(), 4);
}

/// It is asked at each period.
#[tokio::test]
async fn an_agent_without_watch_is_asked_for_its_status() {
    let node = Node::new().await;
    let agent = node.agent(&[10]);
    agent.is_old();
    let _driver = node.driver();
    node.has_mbps(Some("10k")).await;
    agent.has_uplinks(&[25]);
    node.has_mbps(Some("25k")).await;
    drop(agent);
    let agent = node.agent(&[40]);
    node.has_mbps(Some("40k")).await;
    assert!(agent.asked() > 0, "it has watch");
}

#[tokio::test]
async fn the_mbps_come_back_when_another_process_drops_them() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[10]), node.driver());
    node.has_mbps(Some("10k")).await;
    // A kubelet without a checkpoint: `reconcileExtendedResource`.
    node.api.change_node("n1", |node| node["status"]["capacity"][MBPS] = "0".into());
    node.has_mbps(Some("10k")).await;
    // The Node is made anew.
    node.api.delete_node("n1");
    node.api.add_bare_node("n1");
    node.has_mbps(Some("10k")).await;
    // A watch that begins anew.
    node.api.forget_history();
    node.api.change_node("n1", |node| node["status"]["capacity"] = json!({}));
    node.has_mbps(Some("10k")).await;
}

#[tokio::test]
async fn the_mbps_come_when_the_api_is_there_again() {
    let node = Node::with_latency(Duration::from_millis(100)).await;
    node.api.away(true);
    let (agent, _driver) = (node.agent(&[10]), node.driver());
    node.kubelet.start();
    // The kubelet does not wait for the API.
    node.has_healthy(crate::DEVICES as usize).await;
    let refused = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE];
    node.api.fail_nodes(refused);
    node.api.away(false);
    node.has_mbps(Some("10k")).await;
    assert_eq!(node.api.node_faults(), 0);
    node.api.away(true);
    agent.has_uplinks(&[20]);
    node.api.fail_nodes([StatusCode::FORBIDDEN]);
    until("it is asked", async || agent.asked() > 40).await;
    node.api.away(false);
    node.has_mbps(Some("20k")).await;
}

#[tokio::test]
async fn a_refused_change_is_tried_again_with_pauses() {
    let node = Node::new().await;
    node.api.fail_nodes([StatusCode::FORBIDDEN; 4]);
    let begun = Instant::now();
    let (_agent, _driver) = (node.agent(&[10]), node.driver());
    node.has_mbps(Some("10k")).await;
    let pauses = Duration::from_secs(1 + 2 + 4 + 8);
    assert!(begun.elapsed() >= pauses, "{:?}", begun.elapsed());
    assert_eq!(node.patches(), 5);
}

#[tokio::test]
async fn a_node_of_the_extenders_has_no_mbps() {
    let node = Node::new().await;
    let (_agent, _driver) = (node.agent(&[10]), node.driver());
    node.has_mbps(Some("10k")).await;
    node.api.change_node("n1", |node| node["metadata"]["annotations"][UPLINKS] = "[]".into());
    node.has_mbps(None).await;
    node.api.change_node("n1", |node| {
        node["metadata"]["annotations"].as_object_mut().unwrap().remove(UPLINKS);
    });
    node.has_mbps(Some("10k")).await;
}
