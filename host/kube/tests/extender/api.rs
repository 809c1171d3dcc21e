//! An API server for tests: pods and nodes with resource versions, lists, watches with field
//! selectors, merge patches, also of a node's status, and bindings, 404, 409 and 410 as
//! kube-apiserver answers them. A write goes on when its client has gone, as a request does that
//! etcd already has.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

#[path = "resource.rs"]
#[allow(dead_code)]
mod resource;
#[path = "rights.rs"]
mod rights;

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

/// A change: the object before, and after it.
#[derive(Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) kind: &'static str,
    pub(crate) before: Option<Value>,
    pub(crate) after: Option<Value>,
}

/// How the server treats a bind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// It answers 503 and does nothing.
    Refuses,
    /// It answers 409 and does nothing.
    Conflicts,
    /// It does it, and answers 409.
    DoesAndConflicts,
    /// It does it, and answers 504.
    LosesAnswer,
    /// It does it after this time.
    Late(Duration),
}

#[derive(Default)]
struct Inner {
    version: u64,
    /// Watches from before this version are answered 410.
    oldest: u64,
    /// By kind, and by `namespace/name` or name.
    objects: BTreeMap<&'static str, BTreeMap<String, Value>>,
    log: Vec<Change>,
    faults: VecDeque<Fault>,
    /// Late binds whose time has come.
    landed: usize,
    /// The next patches of nodes are answered so, and do nothing.
    node_faults: VecDeque<StatusCode>,
    /// The pod that cannot be patched.
    fixed: Option<String>,
    is_away: bool,
    /// Answers to requests of `resource.k8s.io`, in their place.
    resource_faults: VecDeque<StatusCode>,
    /// The next lines of watches are cut, and their streams end.
    cuts: usize,
    /// Fields that it does not keep.
    drops: Vec<&'static str>,
    requests: Vec<String>,
}

/// The server. Its clones are one.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<u64>>,
    /// What every request takes.
    latency: Duration,
}

const PODS: &str = "pods";
const NODES: &str = "nodes";

impl Api {
    pub(crate) async fn start(latency: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let this = Self {
            address: listener.local_addr().unwrap(),
            inner: Arc::default(),
            changed: Arc::new(watch::Sender::new(0)),
            latency,
        };
        let server = this.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                let service = service_fn(move |request| {
                    let server = server.clone();
                    async move { server.answered(request).await }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        this
    }

    pub(crate) fn client(&self) -> kube::Client {
        let url = format!("http://{}", self.address).parse().unwrap();
        let mut config = kube::Config::new(url);
        config.default_namespace = "rocinante".into();
        rocinante_kube::client(config).unwrap()
    }

    pub(crate) fn add_node(&self, name: &str, uplinks: &str) {
        let metadata = json!({"name": name, "annotations": {rocinante_kube::UPLINKS: uplinks}});
        self.put(NODES, name, json!({"metadata": metadata, "spec": {}, "status": {}}));
    }

    /// A node without uplinks.
    pub(crate) fn add_bare_node(&self, name: &str) {
        let metadata = json!({"name": name, "annotations": {}});
        self.put(NODES, name, json!({"metadata": metadata, "spec": {}, "status": {}}));
    }

    pub(crate) fn delete_node(&self, name: &str) {
        self.write(&mut self.inner.lock(), NODES, name, None);
    }

    /// Changes a node as another process does.
    pub(crate) fn change_node(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut inner = self.inner.lock();
        let mut node = inner.get(NODES, name).cloned().unwrap();
        change(&mut node);
        self.write(&mut inner, NODES, name, Some(node));
    }

    /// The next patches of nodes are answered with these.
    pub(crate) fn fail_nodes(&self, codes: impl IntoIterator<Item = StatusCode>) {
        self.inner.lock().node_faults.extend(codes);
    }

    /// The answers of [`fail_nodes`](Self::fail_nodes) that no patch has met yet.
    pub(crate) fn node_faults(&self) -> usize {
        self.inner.lock().node_faults.len()
    }

    /// A configuration of clients, in this file.
    pub(crate) fn write_config(&self, path: &Path) {
        let server = format!("http://{}", self.address);
        let context = json!({"cluster": "test", "user": "test", "namespace": "rocinante"});
        let text = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": context}],
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": {}}],
        });
        std::fs::write(path, text.to_string()).unwrap();
    }

    /// A pod in the namespace `default` that waits for a node; its UID.
    pub(crate) fn add_pod(&self, name: &str, required: &str) -> String {
        let mut inner = self.inner.lock();
        let uid = format!("uid-{name}-{}", inner.version);
        let metadata = json!({
            "name": name,
            "namespace": "default",
            "uid": uid,
            "annotations": match required {
                "" => json!({}),
                _ => json!({rocinante_kube::REQUIRED: required}),
            },
        });
        let pod = json!({"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}});
        self.write(&mut inner, PODS, &key(name), Some(pod));
        uid
    }

    pub(crate) fn set_phase(&self, name: &str, phase: &str) {
        self.change(name, |pod| pod["status"]["phase"] = phase.into());
    }

    pub(crate) fn set_annotation(&self, name: &str, key: &str, value: &str) {
        self.change(name, |pod| pod["metadata"]["annotations"][key] = value.into());
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut inner = self.inner.lock();
        if let Some(mut pod) = inner.get(PODS, &key(name)).cloned() {
            change(&mut pod);
            self.write(&mut inner, PODS, &key(name), Some(pod));
        }
    }

    pub(crate) fn delete_pod(&self, name: &str) {
        self.write(&mut self.inner.lock(), PODS, &key(name), None);
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Value> {
        self.inner.lock().get(PODS, &key(name)).cloned()
    }

    pub(crate) fn node(&self, name: &str) -> Option<Value> {
        self.inner.lock().get(NODES, name).cloned()
    }

    pub(crate) fn pods(&self) -> Vec<Value> {
        let inner = self.inner.lock();
        inner.objects.get(PODS).into_iter().flat_map(|it| it.values()).cloned().collect()
    }

    /// All changes until now.
    pub(crate) fn log(&self) -> Vec<Change> {
        self.inner.lock().log.clone()
    }

    /// The next binds meet these.
    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.inner.lock().faults.extend(faults);
    }

    /// Patches of this pod are refused, as those that make its annotations too long.
    pub(crate) fn refuse_patches_of(&self, name: &str) {
        self.inner.lock().fixed = Some(format!("default/{name}"));
    }

    /// Late binds that were done or refused.
    pub(crate) fn landed(&self) -> usize {
        self.inner.lock().landed
    }

    /// Faults that no bind has met yet.
    pub(crate) fn faults(&self) -> usize {
        self.inner.lock().faults.len()
    }

    /// From now on every request is answered 503, and running watches end; or no longer.
    pub(crate) fn away(&self, is_away: bool) {
        self.inner.lock().is_away = is_away;
        self.changed.send_modify(|_| {});
    }

    /// Running watches end, and those from before now are answered 410.
    pub(crate) fn forget_history(&self) {
        let mut inner = self.inner.lock();
        inner.version += 1;
        inner.oldest = inner.version;
        self.changed.send_modify(|version| *version = inner.version);
    }

    /// The methods and paths of all requests until now.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.inner.lock().requests.clone()
    }

    fn put(&self, kind: &'static str, key: &str, object: Value) {
        self.write(&mut self.inner.lock(), kind, key, Some(object));
    }

    fn write(&self, inner: &mut Inner, kind: &'static str, key: &str, object: Option<Value>) {
        inner.version += 1;
        let version = inner.version;
        let after = object.map(|mut object| {
            object["metadata"]["resourceVersion"] = version.to_string().into();
            object
        });
        let objects = inner.objects.entry(kind).or_default();
        let before = match &after {
            Some(object) => objects.insert(key.to_owned(), object.clone()),
            None => objects.remove(key),
        };
        if before.is_some() || after.is_some() {
            inner.log.push(Change { version, kind, before, after });
        }
        self.changed.send_modify(|last| *last = version);
    }

    async fn answered(self, request: Request<Incoming>) -> Result<Answer, Infallible> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let path = head.uri.path().to_owned();
        {
            let mut inner = self.inner.lock();
            inner.requests.push(format!("{} {path}", head.method));
            if inner.is_away {
                return Ok(status(StatusCode::SERVICE_UNAVAILABLE, "away"));
            }
        }
        let query = query(head.uri.query().unwrap_or_default());
        if let Err(why) = rights::check(&head.method, &path, &query) {
            return Ok(status(StatusCode::FORBIDDEN, &why));
        }
        let depth = if path.starts_with("/api/") { 3 } else { 4 };
        let parts: Vec<String> = path.split('/').skip(depth).map(str::to_owned).collect();
        let work = tokio::spawn(async move {
            tokio::time::sleep(self.latency).await;
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            match (&head.method, &parts[..]) {
                (&Method::GET, ["pods"]) => self.listed(PODS, &query),
                (&Method::GET, ["nodes"]) => self.listed(NODES, &query),
                (&Method::GET, ["namespaces", space, "pods", name]) => {
                    self.got(PODS, &format!("{space}/{name}"))
                }
                (&Method::PATCH, ["namespaces", space, "pods", name]) => {
                    self.patched(PODS, &format!("{space}/{name}"), &body)
                }
                (&Method::PATCH, ["nodes", name]) => self.patched_node(name, &body, false),
                (&Method::PATCH, ["nodes", name, "status"]) => self.patched_node(name, &body, true),
                (&Method::POST, ["namespaces", space, "pods", name, "binding"]) => {
                    self.bound(&format!("{space}/{name}"), &body).await
                }
                (method, parts) => self.resource(method, parts, &query, &body),
            }
        });
        Ok(work.await.unwrap_or_else(|error| status(StatusCode::BAD_REQUEST, &error.to_string())))
    }

    fn got(&self, kind: &'static str, key: &str) -> Answer {
        match self.inner.lock().get(kind, key) {
            Some(object) => json_answer(StatusCode::OK, object),
            None => status(StatusCode::NOT_FOUND, "not found"),
        }
    }

    fn listed(&self, kind: &'static str, query: &BTreeMap<String, String>) -> Answer {
        let selector = Selector::of(query.get("fieldSelector").map_or("", String::as_str));
        if query.get("watch").is_some_and(|it| it == "true" || it == "1") {
            return self.watched(kind, selector, query.get("resourceVersion"));
        }
        let inner = self.inner.lock();
        let objects = inner.objects.get(kind).into_iter().flat_map(|it| it.values());
        let items: Vec<&Value> = objects.filter(|it| selector.matches(it)).collect();
        let metadata = json!({"resourceVersion": inner.version.to_string()});
        json_answer(StatusCode::OK, &json!({"metadata": metadata, "items": items}))
    }

    fn watched(&self, kind: &'static str, selector: Selector, from: Option<&String>) -> Answer {
        let from: u64 = from.and_then(|it| it.parse().ok()).unwrap_or(0);
        if from < self.inner.lock().oldest {
            // In the stream, as kube-apiserver's watch cache says it.
            let object = json!({
                "kind": "Status", "status": "Failure", "code": 410, "reason": "Expired",
                "message": "too old resource version",
            });
            return json_answer(StatusCode::OK, &json!({"type": "ERROR", "object": object}));
        }
        let begun = self.inner.lock().oldest;
        let state = (self.clone(), self.changed.subscribe(), from, selector);
        let events = stream::unfold(state, move |(api, mut changed, seen, selector)| async move {
            loop {
                let (mut text, last) = {
                    changed.mark_unchanged();
                    let inner = api.inner.lock();
                    if inner.is_away || inner.oldest != begun || seen == u64::MAX {
                        return None;
                    }
                    let news = inner.log.iter().skip_while(|it| it.version <= seen);
                    let news = news.filter(|it| it.kind == kind);
                    let news = news.filter_map(|it| selector.event(it));
                    let lines = news.map(|event| format!("{event}\n"));
                    (lines.collect::<String>(), inner.version)
                };
                let is_cut = !text.is_empty() && api.is_cut();
                let last = if is_cut { u64::MAX } else { last };
                if is_cut {
                    text.truncate(text.len() / 2);
                }
                if !text.is_empty() {
                    let frame = Frame::data(Bytes::from(std::mem::take(&mut text)));
                    return Some((frame, (api, changed, last, selector)));
                }
                if changed.changed().await.is_err() {
                    return None;
                }
            }
        });
        Response::new(StreamBody::new(events.map(Ok::<_, Infallible>)).boxed_unsync())
    }

    fn patched_node(&self, name: &str, body: &[u8], of_status: bool) -> Answer {
        if let Some(code) = self.inner.lock().node_faults.pop_front() {
            return status(code, "not now");
        }
        if !of_status {
            return self.patched(NODES, name, body);
        }
        let Ok(patch) = serde_json::from_slice::<Value>(body) else {
            return status(StatusCode::BAD_REQUEST, "no JSON");
        };
        let mut inner = self.inner.lock();
        let Some(mut node) = inner.get(NODES, name).cloned() else {
            return status(StatusCode::NOT_FOUND, "not found");
        };
        let before = node.clone();
        for (name, value) in patch["status"]["capacity"].as_object().into_iter().flatten() {
            if !node["status"]["capacity"].is_object() {
                node["status"]["capacity"] = json!({});
            }
            let capacity = node["status"]["capacity"].as_object_mut().unwrap();
            match value.as_str() {
                Some(text) => capacity.insert(name.clone(), canonical(text).into()),
                None => capacity.remove(name),
            };
        }
        if node != before {
            self.write(&mut inner, NODES, name, Some(node.clone()));
        }
        json_answer(StatusCode::OK, &node)
    }

    fn patched(&self, kind: &'static str, key: &str, body: &[u8]) -> Answer {
        let Ok(patch) = serde_json::from_slice::<Value>(body) else {
            return status(StatusCode::BAD_REQUEST, "no JSON");
        };
        let mut inner = self.inner.lock();
        let Some(mut object) = inner.get(kind, key).cloned() else {
            return status(StatusCode::NOT_FOUND, "not found");
        };
        if inner.fixed.as_deref() == Some(key) {
            return status(StatusCode::UNPROCESSABLE_ENTITY, "annotations: Too long");
        }
        let expected = &patch["metadata"]["resourceVersion"];
        if !expected.is_null() && *expected != object["metadata"]["resourceVersion"] {
            return status(StatusCode::CONFLICT, "the object has been modified");
        }
        let before = object.clone();
        for (name, value) in patch["metadata"]["annotations"].as_object().into_iter().flatten() {
            object["metadata"]["annotations"][name] = value.clone();
        }
        if object != before {
            self.write(&mut inner, kind, key, Some(object));
        }
        match inner.get(kind, key) {
            Some(object) => json_answer(StatusCode::OK, object),
            None => status(StatusCode::NOT_FOUND, "not found"),
        }
    }

    /// `setPodHostAndAnnotations` of kube-apiserver's `registry/core/pod/storage/storage.go`.
    async fn bound(&self, key: &str, body: &[u8]) -> Answer {
        let Ok(binding) = serde_json::from_slice::<Value>(body) else {
            return status(StatusCode::BAD_REQUEST, "no JSON");
        };
        let fault = self.inner.lock().faults.pop_front();
        match fault {
            Some(Fault::Refuses) => return status(StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Some(Fault::Conflicts) => return status(StatusCode::CONFLICT, "modified"),
            Some(Fault::Late(by)) => {
                tokio::time::sleep(by).await;
                self.inner.lock().landed += 1;
            }
            Some(Fault::DoesAndConflicts | Fault::LosesAnswer) | None => {}
        }
        let mut inner = self.inner.lock();
        let Some(mut pod) = inner.get(PODS, key).cloned() else {
            return status(StatusCode::NOT_FOUND, "not found");
        };
        for field in ["uid", "resourceVersion"] {
            let expected = &binding["metadata"][field];
            if !expected.is_null() && *expected != pod["metadata"][field] {
                return status(StatusCode::CONFLICT, "Precondition failed");
            }
        }
        if pod["spec"]["nodeName"].is_string() {
            return status(StatusCode::CONFLICT, "pod is already assigned to a node");
        }
        pod["spec"]["nodeName"] = binding["target"]["name"].clone();
        for (name, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
            pod["metadata"]["annotations"][name] = value.clone();
        }
        self.write(&mut inner, PODS, key, Some(pod));
        match fault {
            Some(Fault::DoesAndConflicts) => status(StatusCode::CONFLICT, "leader changed"),
            Some(Fault::LosesAnswer) => status(StatusCode::GATEWAY_TIMEOUT, "etcd timed out"),
            _ => status(StatusCode::CREATED, ""),
        }
    }
}

impl Inner {
    fn get(&self, kind: &'static str, key: &str) -> Option<&Value> {
        self.objects.get(kind)?.get(key)
    }
}

fn key(name: &str) -> String {
    format!("default/{name}")
}

/// A quantity as `resource.Quantity` writes it: with the greatest unit that leaves it whole.
fn canonical(text: &str) -> String {
    let mut number: u64 = text.parse().unwrap();
    let mut units = ["", "k", "M", "G", "T", "P", "E"].into_iter();
    let mut unit = units.next();
    while number != 0 && number.is_multiple_of(1000) {
        number /= 1000;
        unit = units.next();
    }
    format!("{number}{}", unit.unwrap())
}

/// A field selector: fields that have a value, or have not.
struct Selector(Vec<(String, bool, String)>);

impl Selector {
    fn of(text: &str) -> Self {
        let terms = text.split(',').filter(|term| !term.is_empty()).map(|term| {
            let (field, value) = term.split_once('=').expect("a selector has an operator");
            match field.strip_suffix('!') {
                Some(field) => (field.to_owned(), false, value.to_owned()),
                None => (field.to_owned(), true, value.to_owned()),
            }
        });
        Self(terms.collect())
    }

    fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|(field, is, value)| {
            let has = object.pointer(&format!("/{}", field.replace('.', "/")));
            (has.and_then(Value::as_str).unwrap_or_default() == value) == *is
        })
    }

    /// The event of a change in a watch.
    fn event(&self, change: &Change) -> Option<Value> {
        let matched = |object: &Option<Value>| object.clone().filter(|it| self.matches(it));
        let (kind, mut object) = match (matched(&change.before), matched(&change.after)) {
            (None, None) => return None,
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(before), None) => ("DELETED", before),
        };
        object["metadata"]["resourceVersion"] = change.version.to_string().into();
        Some(json!({"type": kind, "object": object}))
    }
}

fn query(text: &str) -> BTreeMap<String, String> {
    let decoded = |text: &str| {
        let text = text.replace('+', " ");
        let mut bytes = text.bytes();
        let mut out = Vec::new();
        while let Some(byte) = bytes.next() {
            let hex = |byte: Option<u8>| (byte? as char).to_digit(16);
            out.push(match byte {
                b'%' => (hex(bytes.next()).unwrap() * 16 + hex(bytes.next()).unwrap()) as u8,
                byte => byte,
            });
        }
        String::from_utf8(out).unwrap()
    };
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (decoded(key), decoded(value))).collect()
}

fn json_answer(code: StatusCode, value: &Value) -> Answer {
    let text = Full::new(Bytes::from(value.to_string()));
    let mut response = Response::new(text.boxed_unsync());
    *response.status_mut() = code;
    response
}

/// `metav1.Status`.
fn status(code: StatusCode, message: &str) -> Answer {
    let outcome = if code.is_success() { "Success" } else { "Failure" };
    let value = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "status": outcome,
        "message": message,
        "reason": code.canonical_reason().unwrap_or_default(),
        "code": code.as_u16(),
    });
    json_answer(code, &value)
}
