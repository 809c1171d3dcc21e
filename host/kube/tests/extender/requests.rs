//! Requests as schedulers send them, and requests that none sends.

use std::time::Duration;

use rocinante_placement::{Uplink, to_json};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::api::Api;
use crate::scheduler::{Cache, arguments, filter, schedule};
use crate::{Extender, get, post, posted};

const G: u64 = 1_000_000_000;
const LONG: Duration = Duration::from_secs(3600);

/// Nodes with uplinks of these speeds in G.
async fn cluster(nodes: &[(&str, &[u64])]) -> (Api, Extender) {
    let api = Api::start(Duration::ZERO).await;
    for (name, speeds) in nodes {
        let named = speeds.iter().enumerate();
        let uplinks: Vec<Uplink> =
            named.map(|(at, g)| Uplink::new(&format!("ens{at}"), g * G)).collect();
        api.add_node(name, &to_json(&uplinks).unwrap());
    }
    let extender = Extender::ready(&api, LONG).await;
    (api, extender)
}

/// What kube-scheduler 1.20.2 sent, with a `path`, headers and a body each.
fn recorded() -> Vec<Value> {
    let lines = include_str!("../data/requests.jsonl").lines();
    let requests: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(requests.len(), 6);
    requests
}

#[tokio::test]
async fn the_requests_of_a_real_scheduler_are_answered() {
    let (_api, extender) = cluster(&[("n1", &[10]), ("n2", &[10]), ("n3", &[25])]).await;
    let mut seen = Vec::new();
    for request in recorded() {
        let body = &request["body"];
        let answer = posted(extender.address, "/scheduler/filter", body).await;
        assert_eq!(answer["Error"], "");
        assert_eq!(answer["NodeNames"], Value::Null);
        let given = body["Nodes"]["items"].as_array().unwrap();
        let kept = answer["Nodes"]["items"].as_array().unwrap();
        // A node that fits comes back as it was.
        assert!(kept.iter().all(|node| given.contains(node)));
        let names = kept.iter().map(|node| node["metadata"]["name"].as_str().unwrap().to_owned());
        let failed = answer["FailedNodes"].as_object().unwrap();
        assert_eq!(given.len(), kept.len() + failed.len());
        seen.push((names.collect::<Vec<_>>(), failed.keys().cloned().collect::<Vec<_>>()));

        let scores = posted(extender.address, "/scheduler/prioritize", body).await;
        assert_eq!(scores.as_array().unwrap().len(), given.len());
    }
    let list = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
    // 3000 + 1000, 7000, twice 20000, twice 100 Mb/s.
    assert_eq!(
        seen,
        [
            (list(&["n1"]), list(&[])),
            (list(&["n1"]), list(&[])),
            (list(&[]), list(&["n1"])),
            (list(&["n3"]), list(&["n1", "n2"])),
            (list(&["n1"]), list(&[])),
            (list(&["n1"]), list(&[])),
        ]
    );
}

#[tokio::test]
async fn both_forms_and_both_spellings_have_the_same_answer() {
    let (api, extender) = cluster(&[("n1", &[9, 6]), ("n2", &[9, 5]), ("n3", &[])]).await;
    api.add_pod("p", r#"[{"min_tx_rate":3000},{"min_tx_rate":3000},{"min_tx_rate":8000}]"#);
    let (pod, nodes) = (api.pod("p").unwrap(), ["n1", "n2", "n3"]);
    for cache in [Cache::Capable, Cache::Incapable] {
        let (passed, failed) = filter(&api, extender.address, &pod, &nodes, cache).await.unwrap();
        assert_eq!(passed, ["n1"], "{cache:?}");
        assert_eq!(failed.keys().collect::<Vec<_>>(), ["n2", "n3"]);
    }
    // A scheduler before 1.17.
    let old = json!({"pod": pod, "nodes": null, "nodenames": nodes});
    let answer = posted(extender.address, "/scheduler/filter", &old).await;
    assert_eq!(answer["NodeNames"], json!(["n1"]));
    // No eviction makes room for it there.
    let never = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    assert_eq!(never.keys().collect::<Vec<_>>(), ["n2", "n3"]);

    api.add_pod("q", r#"[{"min_tx_rate":2000}]"#);
    schedule(&api, extender.address, &pod, &nodes, Cache::Capable).await.unwrap();
    let asks = api.pod("q").unwrap();
    let scores = posted(
        extender.address,
        "/scheduler/prioritize",
        &arguments(&api, &asks, &nodes, Cache::Incapable),
    )
    .await;
    // 14 of 15 and 2 would be more than there is; 2 of 14.
    assert_eq!(
        scores,
        json!([
            {"Host": "n1", "Score": 10},
            {"Host": "n2", "Score": 1},
            {"Host": "n3", "Score": 0},
        ])
    );
}

#[tokio::test]
async fn a_best_fit_leaves_the_emptier_node_to_a_larger_pod() {
    let (api, extender) = cluster(&[("n1", &[10]), ("n2", &[10])]).await;
    let mut nodes = Vec::new();
    for (name, rate) in [("a", 3000), ("b", 3000), ("c", 10_000)] {
        api.add_pod(name, &json!([{"min_tx_rate": rate}]).to_string());
        let pod = api.pod(name).unwrap();
        let node = schedule(&api, extender.address, &pod, &["n1", "n2"], Cache::Capable).await;
        nodes.push(node.unwrap());
    }
    assert_eq!(nodes[0], nodes[1]);
    assert_ne!(nodes[0], nodes[2]);
}

#[tokio::test]
async fn a_bad_annotation_fails_at_every_node_with_a_reason() {
    let (api, extender) = cluster(&[("n1", &[10]), ("n2", &[10])]).await;
    let million = format!("[{}]", vec!["{}"; 1_000_000].join(","));
    for (text, reason) in [
        ("{", "expected a list"),
        (r#"[{"min_tx_rate":9223372036854775808}]"#, "too great"),
        (&*million, "at most 64"),
    ] {
        let pod = json!({"metadata": {"annotations": {rocinante_kube::REQUIRED: text}}});
        for cache in [Cache::Capable, Cache::Incapable] {
            let nodes = ["n1", "n2"];
            let (passed, failed) =
                filter(&api, extender.address, &pod, &nodes, cache).await.unwrap();
            assert!(passed.is_empty());
            assert_eq!(failed.len(), 2);
            assert!(failed.values().all(|it| it.contains(reason)), "{failed:?}");
        }
    }
}

#[tokio::test]
async fn requests_that_no_scheduler_sends_are_refused() {
    let (api, extender) = cluster(&[("n1", &[10])]).await;
    let at = extender.address;
    assert_eq!(get(at, "/scheduler/filter").await.0, 405);
    assert_eq!(post(at, "/scheduler/preempt", b"{}").await.0, 404);
    assert_eq!(get(at, "/getpfs").await.0, 404);
    for body in [&b""[..], b"{", b"[]", b"{}", b"null", br#"{"Pod":{"metadata":{}}}"#, b"\xff\0"] {
        let (status, text) = post(at, "/scheduler/filter", body).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_ne!(answer["Error"], "", "{status} {text}");
        assert_eq!(post(at, "/scheduler/prioritize", body).await.0, 400);
        let (_, text) = post(at, "/scheduler/bind", body).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert!(answer["Error"].as_str().unwrap().starts_with("not understood"), "{text}");
    }
    // Longer than any request may be, by its head and without one.
    let huge = vec![b' '; rocinante_kube::BODY_MAX + 1];
    assert_eq!(post(at, "/scheduler/filter", &huge).await.0, 413);
    // Cut in its middle, and again.
    for _ in 0..2 {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let head = "POST /scheduler/bind HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.unwrap();
    }
    // Nothing of that is left.
    api.add_pod("p", r#"[{"min_tx_rate":10000}]"#);
    let pod = api.pod("p").unwrap();
    let node = schedule(&api, at, &pod, &["n1"], Cache::Incapable).await;
    assert_eq!(node.as_deref(), Ok("n1"));
}

/// Every recorded request with bytes changed or cut: an answer or a refusal, and the extender goes
/// on.
#[tokio::test]
async fn changed_requests_end_nothing() {
    let (_api, extender) = cluster(&[("n1", &[10])]).await;
    let mut random = fastrand::Rng::new();
    let seed = random.u64(..);
    println!("seed {seed}");
    random.seed(seed);
    for request in recorded() {
        let body = request["body"].to_string().into_bytes();
        for _ in 0..40 {
            let mut changed = body.clone();
            for _ in 0..random.usize(1..8) {
                let at = random.usize(..changed.len());
                changed[at] = random.u8(..);
            }
            changed.truncate(random.usize(1..=changed.len()));
            for verb in ["filter", "prioritize", "bind"] {
                let path = format!("/scheduler/{verb}");
                let (status, text) = post(extender.address, &path, &changed).await;
                assert!(matches!(status, 200 | 400), "seed {seed}: {status} {text}");
            }
        }
    }
    assert_eq!(get(extender.address, "/healthz").await.0, 200);
}
