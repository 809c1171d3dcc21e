//! A node's uplinks, and `/getpfs`.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use parking_lot::Mutex;
use rocinante_placement::{Uplink, to_json, uplinks};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::api::Api;
use crate::process::Process;
use crate::scheduler::bind;
use crate::{Extender, get, until};

const G: u64 = 1_000_000_000;
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(10);

fn published(api: &Api, node: &str) -> Option<Vec<Uplink>> {
    let text = api.node(node)?["metadata"]["annotations"][rocinante_kube::UPLINKS].clone();
    uplinks(text.as_str()?).ok()
}

#[tokio::test]
async fn what_is_taken_is_said_as_links_daemon_says_it() {
    let api = Api::start(Duration::ZERO).await;
    let ours = [Uplink::new("ens1", 10 * G), Uplink::new("ens2", 25 * G)];
    api.add_node("n1", "[]");
    api.add_node("n2", &to_json(&ours).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let client = api.client();
    let part = ours.clone();
    let task = tokio::spawn(async move {
        rocinante_kube::node(client, listener, "n1", SHORT, || part.to_vec()).await;
    });
    until("the uplinks are there", async || published(&api, "n1").as_deref() == Some(&ours[..]))
        .await;
    until("it is ready", async || get(at, "/healthz").await.0 == 200).await;

    let extender = Extender::ready(&api, LONG).await;
    // Three interfaces at n1, and one elsewhere that does not count there.
    let three = json!([
        {"min_tx_rate": 20_000, "max_tx_rate": 22_000}, {"min_tx_rate": 3500},
        {"min_tx_rate": 8000},
    ]);
    let one = json!([{"min_tx_rate": 9000}]);
    for (name, node, required) in [("a", "n1", three), ("b", "n2", one)] {
        let required = &required.to_string();
        api.add_pod(name, required);
        until(name, async || bind(extender.address, &api.pod(name).unwrap(), node).await.is_ok())
            .await;
    }
    let vf = |at: usize, min: u64, max: u64| {
        json!({
            "vf": at, "mac": "", "vlan": 0, "qos": 0, "vlan_proto": "", "spoof_check": "ON",
            "trust": "OFF", "link_state": "Follow", "min_tx_rate": min, "max_tx_rate": max,
            "vgt_plus": "OFF", "rate_group": 0, "allocated": true,
        })
    };
    let pf = |name: &str, used: u64, capacity: u64, vfs: Vec<Value>| {
        json!({
            "name": name, "used_tx_rate": used, "capacity_tx_rate": capacity,
            "used_vfs": vfs.len(), "capacity_vfs": vfs.len() + 64, "vfs": vfs,
        })
    };
    let expected = json!([
        pf("ens1", 8000, 10_000, vec![vf(0, 8000, 0)]),
        pf("ens2", 23_500, 25_000, vec![vf(0, 20_000, 22_000), vf(1, 3500, 0)]),
    ]);
    let pfs = async || serde_json::from_str::<Value>(&get(at, "/getpfs").await.1).unwrap();
    until("both are counted", async || pfs().await == expected).await;
    api.delete_pod("a");
    let empty = json!([pf("ens1", 0, 10_000, vec![]), pf("ens2", 0, 25_000, vec![])]);
    until("it is free", async || pfs().await == empty).await;
    assert_eq!(get(at, "/scheduler/filter").await.0, 404);
    task.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_publishes_once_the_server_is_there() {
    let api = Api::start(Duration::ZERO).await;
    api.add_node("n1", "[]");
    api.away(true);
    // The loopback has no speed.
    let arguments = ["node", "--name", "n1", "--uplink", "lo=25G", "--listen", "127.0.0.1:0"];
    let process = Process::start(&api, &arguments);
    assert_eq!(get(process.address, "/getpfs").await.0, 503);
    api.away(false);
    let expected = [Uplink::new("lo", 25 * G)];
    until("published", async || published(&api, "n1").as_deref() == Some(&expected[..])).await;
    until("served", async || get(process.address, "/getpfs").await.0 == 200).await;
}

#[tokio::test]
async fn the_uplinks_are_published_again_when_they_change_or_the_node_is_made_anew() {
    let api = Api::start(Duration::ZERO).await;
    api.add_bare_node("n1");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let now = Arc::new(Mutex::new(vec![Uplink::new("ens1", 10 * G)]));
    let (client, of_node) = (api.client(), Arc::clone(&now));
    let _task = tokio::task::JoinSet::from_iter([async move {
        rocinante_kube::node(client, listener, "n1", SHORT, || of_node.lock().clone()).await;
    }]);
    let is_published = async || {
        let wanted = now.lock().clone();
        until("published", async || published(&api, "n1").as_ref() == Some(&wanted)).await;
    };
    is_published().await;
    let two = vec![Uplink::new("ens1", 25 * G), Uplink::new("ens2", G)];
    for uplinks in [two, vec![], vec![Uplink::new("ens1", 10 * G)]] {
        *now.lock() = uplinks;
        is_published().await;
    }
    // Each change was written once.
    let patches = || api.requests().iter().filter(|it| it.starts_with("PATCH")).count();
    assert_eq!(patches(), 4);
    api.fail_nodes([StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE]);
    api.delete_node("n1");
    api.add_bare_node("n1");
    is_published().await;
    assert_eq!(api.node_faults(), 0);
    let other = |node: &mut Value| node["metadata"]["annotations"] = json!({});
    api.change_node("n1", other);
    is_published().await;
}
