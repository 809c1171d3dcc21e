//! The rights that the manifests give: the API server of the tests refuses the rest, so that each
//! scenario says whether they suffice.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hyper::Method;
use k8s_openapi::api::rbac::v1::{PolicyRule, RoleRef, Subject};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The service accounts that a program of tests plays.
const ACCOUNTS: &[&str] = match env!("CARGO_CRATE_NAME").as_bytes() {
    b"driver" => &["rocinante-driver"],
    _ => &["rocinante-scheduler", "rocinante-node"],
};
const MANIFEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes/rights.yaml");

static RIGHTS: LazyLock<Rights> =
    LazyLock::new(|| Rights::of(&std::fs::read_to_string(MANIFEST).expect("the manifests")));

/// Rules, each with the namespace in which it holds if it does not hold in all.
struct Rights(Vec<(Option<String>, PolicyRule)>);

/// A request as the API server judges it (`RequestInfoFactory`): a resource with its subresource.
#[derive(Debug)]
struct Call<'a> {
    group: &'a str,
    resource: String,
    verb: &'static str,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
}

fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).expect("of the API")
}

impl Rights {
    /// Those that the bindings of the manifests give to the accounts (`rbac.RBACAuthorizer`).
    fn of(manifests: &str) -> Self {
        let all: Vec<Value> = serde_saphyr::from_multiple(manifests).expect("YAML");
        let mut rules = Vec::new();
        for binding in all.iter().filter(|it| it["roleRef"].is_object()) {
            let subjects: Vec<Subject> = read(&binding["subjects"]);
            let is_ours = |it: &Subject| {
                it.kind == "ServiceAccount"
                    && it.namespace.as_deref() == Some("rocinante")
                    && ACCOUNTS.contains(&&*it.name)
            };
            if !subjects.iter().any(is_ours) {
                continue;
            }
            let of: RoleRef = read(&binding["roleRef"]);
            let namespace = binding["metadata"]["namespace"].as_str().map(str::to_owned);
            let is_it = |it: &&Value| {
                let of_it = &it["metadata"];
                let is_there = of.kind == "ClusterRole"
                    || of_it["namespace"] == *namespace.as_deref().unwrap_or_default();
                it["kind"] == *of.kind && of_it["name"] == *of.name && is_there
            };
            // Kubernetes has others itself.
            let role = all.iter().find(is_it);
            let of_role: Vec<PolicyRule> = role.map_or_else(Vec::new, |it| read(&it["rules"]));
            rules.extend(of_role.into_iter().map(|it| (namespace.clone(), it)));
        }
        Self(rules)
    }

    /// Error: the call that no rule permits.
    fn check(&self, call: &Call<'_>) -> Result<(), String> {
        let has = |all: &Option<Vec<String>>, it: &str| all.iter().flatten().any(|one| one == it);
        let permits = |(namespace, rule): &(Option<String>, PolicyRule)| {
            let names = rule.resource_names.as_deref().unwrap_or_default();
            has(&rule.api_groups, call.group)
                && has(&rule.resources, &call.resource)
                && rule.verbs.iter().any(|it| it == call.verb)
                && namespace.as_deref().is_none_or(|it| Some(it) == call.namespace)
                && (names.is_empty() || names.iter().any(|it| Some(&**it) == call.name))
        };
        let no = || format!("the manifests do not permit {call:?}");
        self.0.iter().any(permits).then_some(()).ok_or_else(no)
    }
}

impl<'a> Call<'a> {
    fn of(method: &Method, path: &'a str, query: &'a BTreeMap<String, String>) -> Self {
        let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let group = if parts[0] == "apis" { parts.remove(1) } else { "" };
        parts.drain(..2);
        let mut namespace = None;
        if parts[0] == "namespaces" && parts.len() > 2 {
            namespace = parts.drain(..2).nth(1);
        }
        let (resource, name) = match parts[..] {
            [resource, name, below] => (format!("{resource}/{below}"), Some(name)),
            [resource, name] => (resource.to_owned(), Some(name)),
            _ => (parts[0].to_owned(), None),
        };
        // A list or a watch of one object.
        let selected = query
            .get("fieldSelector")
            .and_then(|it| it.split(',').find_map(|term| term.strip_prefix("metadata.name=")));
        let watches = query.get("watch").is_some_and(|it| it == "true" || it == "1");
        let (verb, name) = match *method {
            Method::GET if watches => ("watch", name.or(selected)),
            Method::GET if name.is_none() => ("list", selected),
            Method::GET => ("get", name),
            Method::POST => ("create", name),
            Method::PUT => ("update", name),
            Method::PATCH => ("patch", name),
            _ => ("delete", name),
        };
        Self { group, resource, verb, namespace, name }
    }
}

/// Error: the call that no role permits.
pub(super) fn check(
    method: &Method,
    path: &str,
    query: &BTreeMap<String, String>,
) -> Result<(), String> {
    let call = Call::of(method, path, query);
    RIGHTS.check(&call)?;
    // Of a driver that writes its devices (`DRAResourceClaimGranularStatusAuthorization`).
    if (&*call.resource, call.verb) == ("resourceclaims/status", "patch") {
        for verb in ["associated-node:patch", "associated-node:update"] {
            let resource = "resourceclaims/driver".to_owned();
            RIGHTS.check(&Call { resource, verb, name: Some(rocinante_kube::DRIVER), ..call })?;
        }
    }
    Ok(())
}

/// Rights that hold in one namespace, or for objects of one name.
#[test]
fn a_right_holds_only_in_its_namespace_and_for_its_name() {
    let text = r#"
kind: RoleBinding
metadata: {name: b, namespace: here}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: r}
subjects: [{kind: ServiceAccount, name: ACCOUNT, namespace: rocinante}]
---
kind: Role
metadata: {name: r, namespace: elsewhere}
rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
---
kind: Role
metadata: {name: r, namespace: here}
rules:
  - {apiGroups: [""], resources: [events], verbs: [create]}
  - apiGroups: [x.io]
    resources: [leases, leases/status]
    resourceNames: [one]
    verbs: [watch, patch, create]
"#;
    let rights = |account: &str| Rights::of(&text.replace("ACCOUNT", account));
    let (own, others) = (rights(ACCOUNTS[0]), rights("default"));
    let permits = |method: &Method, path: &str, selector: &str| {
        let query = BTreeMap::from([
            ("watch".to_owned(), "true".to_owned()),
            ("fieldSelector".to_owned(), selector.to_owned()),
        ]);
        let call = Call::of(method, path, &query);
        assert!(others.check(&call).is_err(), "{call:?}");
        own.check(&call).is_ok()
    };
    let leases = "/apis/x.io/v1/namespaces/here/leases";
    let cases = [
        (Method::POST, "/api/v1/namespaces/here/events".to_owned(), "", true),
        (Method::POST, "/api/v1/namespaces/default/events".to_owned(), "", false),
        (Method::POST, "/api/v1/events".to_owned(), "", false),
        (Method::GET, "/api/v1/namespaces/here/pods/p".to_owned(), "", false),
        (Method::PATCH, format!("{leases}/one"), "", true),
        (Method::PATCH, format!("{leases}/one/status"), "", true),
        (Method::PATCH, format!("{leases}/two"), "", false),
        (Method::PATCH, "/apis/x.io/v1/namespaces/there/leases/one".to_owned(), "", false),
        (Method::GET, leases.to_owned(), "metadata.name=one", true),
        (Method::GET, leases.to_owned(), "metadata.name=two", false),
        (Method::GET, leases.to_owned(), "", false),
        // The name of an object that is made is in its body.
        (Method::POST, leases.to_owned(), "", false),
    ];
    for (method, path, selector, is_permitted) in cases {
        assert_eq!(permits(&method, &path, selector), is_permitted, "{method} {path} {selector}");
    }
}
