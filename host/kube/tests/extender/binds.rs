//! Binds, and the state that they leave when the API server fails in the middle of one.

use std::time::Duration;

use rocinante_placement::{Uplink, to_json};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::api::{Api, Fault};
use crate::scheduler::{Cache, bind, filter};
use crate::{Extender, get, until};

const NODES: [&str; 2] = ["n1", "n2"];
const G: u64 = 1_000_000_000;
/// Longer than any test: an assumed pod stays so.
pub(crate) const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(50);

/// Two nodes of one uplink of 10G.
pub(crate) async fn cluster() -> Api {
    cluster_of(Duration::ZERO).await
}

async fn cluster_of(latency: Duration) -> Api {
    let api = Api::start(latency).await;
    for name in NODES {
        api.add_node(name, &to_json(&[Uplink::new("ens1", 10 * G)]).unwrap());
    }
    api
}

fn required(rates: &[u64]) -> String {
    let one = |rate: &u64| json!({"min_tx_rate": rate * 1000, "max_tx_rate": 10_000});
    Value::from(rates.iter().map(one).collect::<Vec<_>>()).to_string()
}

pub(crate) fn pod(api: &Api, name: &str, rates: &[u64]) -> Value {
    api.add_pod(name, &required(rates));
    api.pod(name).unwrap()
}

/// Whether another pod with this rate, in G, would fit at a node.
async fn fits(api: &Api, extender: &Extender, node: &str, rate: u64) -> bool {
    let asks = json!({"metadata": {
        "uid": "asks",
        "annotations": {rocinante_kube::REQUIRED: required(&[rate])},
    }});
    let (passed, _) = filter(api, extender.address, &asks, &NODES, Cache::Capable).await.unwrap();
    passed.iter().any(|it| it == node)
}

/// That exactly this much is free, in G.
pub(crate) async fn is_free(api: &Api, extender: &Extender, node: &str, rate: u64) -> bool {
    fits(api, extender, node, rate).await && !fits(api, extender, node, rate + 1).await
}

fn node_of(api: &Api, pod: &str) -> Value {
    api.pod(pod).unwrap()["spec"]["nodeName"].clone()
}

fn binds(api: &Api) -> usize {
    api.requests().iter().filter(|request| request.ends_with("/binding")).count()
}

#[tokio::test]
async fn a_bind_reserves_binds_and_writes_the_places() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    let (first, second) = (pod(&api, "first", &[4, 3]), pod(&api, "second", &[2]));
    bind(extender.address, &first, "n1").await.unwrap();
    bind(extender.address, &second, "n1").await.unwrap();
    assert!(is_free(&api, &extender, "n1", 1).await);
    assert!(is_free(&api, &extender, "n2", 10).await);
    let bound = api.pod("first").unwrap();
    assert_eq!(bound["spec"]["nodeName"], "n1");
    let one =
        |rate: u64| json!({"uplink": "ens1", "egress": rate * G, "ingress": 0, "max": 10 * G});
    let placed = bound["metadata"]["annotations"][rocinante_kube::PLACED].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(placed).unwrap(), json!([one(4), one(3)]));
    // In a pod's life the API was asked twice.
    let of_first = api.requests().iter().filter(|it| it.contains("/pods/first")).count();
    assert_eq!(of_first, 2);

    // A change of the annotation makes no room.
    api.set_annotation("first", rocinante_kube::PLACED, "[]");
    api.delete_pod("second");
    until("second is gone", async || is_free(&api, &extender, "n1", 3).await).await;
    api.set_phase("first", "Failed");
    until("second is gone", async || is_free(&api, &extender, "n1", 10).await).await;
}

#[tokio::test]
async fn what_does_not_fit_is_refused_and_holds_nothing() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    bind(extender.address, &pod(&api, "first", &[7]), "n1").await.unwrap();
    let second = pod(&api, "second", &[4]);
    let error = bind(extender.address, &second, "n1").await.unwrap_err();
    assert_eq!(error, "not enough free RDMA bandwidth");
    assert_eq!(node_of(&api, "second"), Value::Null);
    assert_eq!(binds(&api), 1);
    bind(extender.address, &second, "n2").await.unwrap();
    assert!(is_free(&api, &extender, "n1", 3).await);
    assert!(is_free(&api, &extender, "n2", 6).await);
}

#[tokio::test]
async fn pods_that_cannot_be_bound_are_refused_in_words() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    let at = extender.address;
    let refused = async |pod: &Value, node: &str, reason: &str| {
        let error = bind(at, pod, node).await.unwrap_err();
        assert!(error.contains(reason), "{error}");
    };
    let gone = pod(&api, "gone", &[1]);
    api.delete_pod("gone");
    refused(&gone, "n1", "pod default/gone: it is gone").await;
    let again = pod(&api, "gone", &[1]);
    refused(&gone, "n1", "another one by now").await;
    refused(&again, "n9", "the node is not known yet").await;
    bind(at, &again, "n1").await.unwrap();
    // A repeated request whose first answer was lost.
    bind(at, &again, "n1").await.unwrap();
    refused(&again, "n2", "the pod is bound to n1").await;
    api.add_pod("bad", r#"[{"min_tx_rate":1.5}]"#);
    refused(&api.pod("bad").unwrap(), "n1", "rdma_interfaces_required: ").await;
    assert!(is_free(&api, &extender, "n1", 9).await);
    assert!(is_free(&api, &extender, "n2", 10).await);
}

#[tokio::test]
async fn a_pod_without_a_demand_is_bound_without_places() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.add_pod("plain", "");
    let plain = api.pod("plain").unwrap();
    let (passed, _) =
        filter(&api, extender.address, &plain, &["n1", "elsewhere"], Cache::Capable).await.unwrap();
    assert_eq!(passed, ["n1", "elsewhere"]);
    bind(extender.address, &plain, "elsewhere").await.unwrap();
    assert_eq!(node_of(&api, "plain"), "elsewhere");
    let annotations = &api.pod("plain").unwrap()["metadata"]["annotations"];
    assert_eq!(annotations[rocinante_kube::PLACED], Value::Null);
}

#[tokio::test]
async fn a_conflict_gives_back_once_the_pod_is_fenced() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.fail([Fault::Conflicts]);
    let one = pod(&api, "one", &[7]);
    assert!(bind(extender.address, &one, "n1").await.unwrap_err().contains("modified"));
    until("one is forgotten", async || is_free(&api, &extender, "n1", 10).await).await;
    bind(extender.address, &one, "n2").await.unwrap();
}

/// The API server answers so where its storage has done it, and it did not learn that.
#[tokio::test]
async fn a_conflict_of_a_bind_that_was_done_gives_nothing_back() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.fail([Fault::DoesAndConflicts]);
    let one = pod(&api, "one", &[7]);
    assert!(bind(extender.address, &one, "n1").await.unwrap_err().contains("leader changed"));
    let two = pod(&api, "two", &[7]);
    bind(extender.address, &two, "n1").await.unwrap_err();
    assert!(is_free(&api, &extender, "n1", 3).await);
}

#[tokio::test]
async fn a_bind_that_lands_after_its_pod_was_forgotten_binds_nothing() {
    let api = cluster().await;
    let extender = Extender::ready(&api, SHORT).await;
    api.fail([Fault::Late(Duration::from_secs(6))]);
    let one = pod(&api, "one", &[7]);
    let error = bind(extender.address, &one, "n1").await.unwrap_err();
    assert!(error.contains("none within"), "{error}");
    until("one is forgotten", async || is_free(&api, &extender, "n1", 10).await).await;
    bind(extender.address, &pod(&api, "two", &[7]), "n1").await.unwrap();
    until("the late bind is answered", async || api.landed() == 1).await;
    // It counts as landed right before it is done or refused.
    until("two is shown", async || is_free(&api, &extender, "n1", 3).await).await;
    assert_eq!(node_of(&api, "one"), Value::Null);
}

/// Else one user's pod stops the scheduling of all.
#[tokio::test]
async fn a_pod_that_cannot_be_fenced_is_waited_for_no_longer_than_a_bind_takes() {
    let api = cluster().await;
    let hostile = pod(&api, "hostile", &[1]);
    api.refuse_patches_of("hostile");
    let extender = Extender::start(&api, SHORT).await;
    // One that asks for nothing needs nothing of the ledger.
    api.add_pod("plain", "");
    let plain = api.pods().into_iter().find(|it| it["metadata"]["name"] == "plain").unwrap();
    bind(extender.address, &plain, "n1").await.unwrap();
    until("it is ready", async || bind(extender.address, &hostile, "n2").await.is_ok()).await;
}

#[tokio::test]
async fn an_error_of_the_server_gives_back_only_after_it_was_asked() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.fail([Fault::Refuses]);
    let one = pod(&api, "one", &[7]);
    let error = bind(extender.address, &one, "n1").await.unwrap_err();
    assert!(error.contains("no answer from the API server"), "{error}");
    // It may be bound: it counts, and goes nowhere else.
    assert!(is_free(&api, &extender, "n1", 3).await);
    assert!(bind(extender.address, &one, "n2").await.unwrap_err().contains("under way"));
    let (passed, _) = filter(&api, extender.address, &one, &NODES, Cache::Capable).await.unwrap();
    assert_eq!(passed, ["n1"]);
    bind(extender.address, &one, "n1").await.unwrap();
    assert!(is_free(&api, &extender, "n1", 3).await);

    drop(extender);
    api.delete_lease();
    let hasty = Extender::ready(&api, SHORT).await;
    api.fail([Fault::Refuses]);
    let two = pod(&api, "two", &[2]);
    bind(hasty.address, &two, "n1").await.unwrap_err();
    until("two is forgotten", async || is_free(&api, &hasty, "n1", 3).await).await;
    bind(hasty.address, &api.pod("two").unwrap(), "n2").await.unwrap();
}

#[tokio::test]
async fn a_bind_whose_answer_was_lost_counts_once() {
    let api = cluster().await;
    let extender = Extender::ready(&api, SHORT).await;
    api.fail([Fault::LosesAnswer]);
    let one = pod(&api, "one", &[7]);
    bind(extender.address, &one, "n1").await.unwrap_err();
    assert!(is_free(&api, &extender, "n1", 3).await);
    // The scheduler tries again.
    bind(extender.address, &one, "n1").await.unwrap();
    assert_eq!(binds(&api), 1);
    assert!(is_free(&api, &extender, "n1", 3).await);
    api.delete_pod("one");
    until("it is gone", async || is_free(&api, &extender, "n1", 10).await).await;
}

#[tokio::test]
async fn a_bind_goes_on_when_its_scheduler_has_gone() {
    let api = cluster_of(Duration::from_millis(200)).await;
    let extender = Extender::ready(&api, LONG).await;
    let one = pod(&api, "one", &[7]);
    let body = json!({
        "PodName": "one",
        "PodNamespace": "default",
        "PodUID": one["metadata"]["uid"],
        "Node": "n1",
    })
    .to_string();
    let mut stream = tokio::net::TcpStream::connect(extender.address).await.unwrap();
    let head = "POST /scheduler/bind HTTP/1.1\r\nHost: x\r\n";
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.unwrap();
    // It has not come further than to read the pod.
    until("it is read", async || api.requests().iter().any(|it| it.ends_with("/one"))).await;
    drop(stream);
    until("it is bound", async || node_of(&api, "one") == "n1").await;
    assert!(is_free(&api, &extender, "n1", 3).await);
    api.delete_pod("one");
    until("it is gone", async || is_free(&api, &extender, "n1", 10).await).await;
}

#[tokio::test]
async fn a_bind_that_takes_longer_than_its_scheduler_waits_counts() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.fail([Fault::Late(Duration::from_secs(6))]);
    let error = bind(extender.address, &pod(&api, "one", &[7]), "n1").await.unwrap_err();
    assert!(error.contains("none within 4s"), "{error}");
    assert_eq!(node_of(&api, "one"), Value::Null);
    assert!(is_free(&api, &extender, "n1", 3).await);
    until("it is bound", async || node_of(&api, "one") == "n1").await;
    assert!(is_free(&api, &extender, "n1", 3).await);
    api.delete_pod("one");
    until("it is gone", async || is_free(&api, &extender, "n1", 10).await).await;
}

#[tokio::test]
async fn of_two_binds_of_one_pod_at_once_one_reserves() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    api.fail([Fault::Late(Duration::from_millis(300))]);
    let one = pod(&api, "one", &[7]);
    let at = extender.address;
    let first = async {
        bind(at, &one, "n1").await.unwrap();
    };
    let second = async {
        until("the first is at the server", async || binds(&api) == 1).await;
        for node in NODES {
            assert!(bind(at, &one, node).await.unwrap_err().contains("under way"));
        }
    };
    tokio::join!(first, second);
    assert_eq!(binds(&api), 1);
    assert!(is_free(&api, &extender, "n1", 3).await);
    assert!(is_free(&api, &extender, "n2", 10).await);
}

#[tokio::test]
async fn without_the_server_nothing_is_promised_and_nothing_forgotten() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    bind(extender.address, &pod(&api, "one", &[7]), "n1").await.unwrap();
    let two = pod(&api, "two", &[2]);
    api.away(true);
    assert!(bind(extender.address, &two, "n1").await.unwrap_err().contains("no answer"));
    assert!(is_free(&api, &extender, "n1", 3).await);
    // What happens meanwhile is seen afterwards, from a list: the history is gone, too.
    api.delete_pod("one");
    api.add_node("n1", &to_json(&[Uplink::new("ens1", 5 * G)]).unwrap());
    api.forget_history();
    api.away(false);
    until("it is seen", async || is_free(&api, &extender, "n1", 5).await).await;
    bind(extender.address, &two, "n1").await.unwrap();
}

#[tokio::test]
async fn a_watch_that_is_too_old_begins_anew() {
    let api = cluster().await;
    let extender = Extender::ready(&api, LONG).await;
    bind(extender.address, &pod(&api, "one", &[7]), "n1").await.unwrap();
    for round in 0..2 {
        api.forget_history();
        let name = format!("more-{round}");
        bind(extender.address, &pod(&api, &name, &[1]), "n1").await.unwrap();
        assert!(is_free(&api, &extender, "n1", 2 - round).await);
    }
    api.delete_pod("one");
    until("it is gone", async || is_free(&api, &extender, "n1", 8).await).await;
}

#[tokio::test]
async fn an_extender_that_starts_counts_what_is_bound() {
    let api = cluster().await;
    let before = Extender::ready(&api, LONG).await;
    bind(before.address, &pod(&api, "one", &[7]), "n1").await.unwrap();
    bind(before.address, &pod(&api, "two", &[4]), "n2").await.unwrap();
    api.set_phase("two", "Succeeded");
    drop(before);
    api.delete_lease();
    api.away(true);
    let after = Extender::start(&api, LONG).await;
    assert_eq!(get(after.address, "/healthz").await.0, 503);
    let three = pod(&api, "three", &[1]);
    let error = bind(after.address, &three, "n1").await.unwrap_err();
    assert!(error.contains("no answer from the API server"), "{error}");
    let asked = filter(&api, after.address, &three, &NODES, Cache::Capable).await;
    assert!(asked.unwrap_err().contains("not known yet"));
    api.away(false);
    until("it is ready", async || get(after.address, "/healthz").await.0 == 200).await;
    assert!(is_free(&api, &after, "n1", 3).await);
    assert!(is_free(&api, &after, "n2", 10).await);
}

/// A bind of a process that was killed lands after its successor has read the bound pods.
#[tokio::test]
async fn no_bind_of_an_earlier_process_succeeds_after_the_start() {
    let api = cluster().await;
    pod(&api, "late", &[7]);
    let version = api.pod("late").unwrap()["metadata"]["resourceVersion"].clone();
    let extender = Extender::ready(&api, LONG).await;
    assert_ne!(api.pod("late").unwrap()["metadata"]["resourceVersion"], version);
    let body = json!({
        "metadata": {"resourceVersion": version},
        "target": {"name": "n1"},
    })
    .to_string();
    let path = "/api/v1/namespaces/default/pods/late/binding";
    let (status, _) = crate::post(api.address, path, body.as_bytes()).await;
    assert_eq!(status, 409);
    bind(extender.address, &api.pod("late").unwrap(), "n1").await.unwrap();
}
