//! The part of kube-scheduler that asks an extender.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::api::Api;
use crate::post;

/// Whether the scheduler sends nodes or their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    Capable,
    Incapable,
}

pub(crate) fn arguments(api: &Api, pod: &Value, nodes: &[&str], cache: Cache) -> Value {
    match cache {
        Cache::Capable => json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}),
        Cache::Incapable => {
            let items: Vec<Value> = nodes.iter().filter_map(|name| api.node(name)).collect();
            json!({"Pod": pod, "Nodes": {"metadata": {}, "items": items}, "NodeNames": null})
        }
    }
}

/// The nodes that pass `filter`, and the reasons for the others.
pub(crate) async fn filter(
    api: &Api,
    at: SocketAddr,
    pod: &Value,
    nodes: &[&str],
    cache: Cache,
) -> Result<(Vec<String>, BTreeMap<String, String>), String> {
    let arguments = arguments(api, pod, nodes, cache);
    let (status, text) = post(at, "/scheduler/filter", arguments.to_string().as_bytes()).await;
    let Ok(answer) = serde_json::from_str::<Value>(&text) else {
        return Err(format!("{status} {text}"));
    };
    match answer["Error"].as_str() {
        Some("") => {}
        other => return Err(other.unwrap_or_default().to_owned()),
    }
    let passed = match cache {
        Cache::Capable => serde_json::from_value(answer["NodeNames"].clone()).unwrap(),
        Cache::Incapable => {
            let items = answer["Nodes"]["items"].as_array().unwrap().iter();
            items.map(|node| node["metadata"]["name"].as_str().unwrap().to_owned()).collect()
        }
    };
    Ok((passed, serde_json::from_value(answer["FailedNodes"].clone()).unwrap()))
}

/// The answer to `bind`: an error, or none.
pub(crate) async fn bind(at: SocketAddr, pod: &Value, node: &str) -> Result<(), String> {
    let body = json!({
        "PodName": pod["metadata"]["name"],
        "PodNamespace": pod["metadata"]["namespace"],
        "PodUID": pod["metadata"]["uid"],
        "Node": node,
    });
    let (status, text) = post(at, "/scheduler/bind", body.to_string().as_bytes()).await;
    let answer: Value =
        serde_json::from_str(&text).map_err(|error| format!("{status} {text} {error}"))?;
    match answer["Error"].as_str() {
        Some("") => Ok(()),
        other => Err(other.unwrap_or_default().to_owned()),
    }
}

/// One try for a pod, as kube-scheduler makes it; the node that it is bound to.
pub(crate) async fn schedule(
    api: &Api,
    at: SocketAddr,
    pod: &Value,
    nodes: &[&str],
    cache: Cache,
) -> Result<String, String> {
    let (passed, failed) = filter(api, at, pod, nodes, cache).await?;
    if passed.is_empty() {
        return Err(format!("{failed:?}"));
    }
    let passed: Vec<&str> = passed.iter().map(String::as_str).collect();
    let arguments = arguments(api, pod, &passed, cache);
    let (status, text) = post(at, "/scheduler/prioritize", arguments.to_string().as_bytes()).await;
    let Ok(Value::Array(scores)) = serde_json::from_str(&text) else {
        return Err(format!("{status} {text}"));
    };
    assert_eq!(scores.len(), passed.len());
    let best = scores.iter().max_by_key(|it| it["Score"].as_u64().unwrap()).unwrap();
    let node = best["Host"].as_str().unwrap();
    bind(at, pod, node).await.map(|()| node.to_owned())
}
