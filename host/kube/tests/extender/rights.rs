//! The rights that the manifests give: the API server of the tests refuses the rest, so that each
//! scenario says whether they suffice.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hyper::Method;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::Value;

/// The roles whose holders a program of tests plays.
const ROLES: &[&str] = match env!("CARGO_CRATE_NAME").as_bytes() {
    b"driver" => &["rocinante-driver"],
    _ => &["rocinante-extender", "rocinante-node"],
};

static RULES: LazyLock<Vec<PolicyRule>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes/rights.yaml");
    let text = std::fs::read_to_string(path).expect("the manifests");
    let all: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let is_ours = |it: &&Value| ROLES.iter().any(|name| it["metadata"]["name"] == *name);
    let rules = all.iter().filter(is_ours).filter_map(|it| it["rules"].as_array()).flatten();
    rules.map(|it| serde_json::from_value(it.clone()).expect("a rule")).collect()
});

/// The group, the resource with its subresource, and the verb of a request, as the API server has
/// them (`RequestInfoFactory`).
fn asked<'a>(
    method: &Method,
    path: &'a str,
    query: &BTreeMap<String, String>,
) -> (&'a str, String, &'static str) {
    let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let group = if parts[0] == "apis" { parts.remove(1) } else { "" };
    parts.drain(..2);
    if parts[0] == "namespaces" && parts.len() > 2 {
        parts.drain(..2);
    }
    let resource = match parts[..] {
        [resource, _, below] => format!("{resource}/{below}"),
        _ => parts[0].to_owned(),
    };
    let watches = query.get("watch").is_some_and(|it| it == "true" || it == "1");
    let verb = match *method {
        Method::GET if watches => "watch",
        Method::GET if parts.len() == 1 => "list",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        _ => "delete",
    };
    (group, resource, verb)
}

/// Error: the call that no role permits.
pub(super) fn check(
    method: &Method,
    path: &str,
    query: &BTreeMap<String, String>,
) -> Result<(), String> {
    let (group, resource, verb) = asked(method, path, query);
    let has = |all: &Option<Vec<String>>, it: &str| all.iter().flatten().any(|one| one == it);
    let permits = |rule: &PolicyRule| {
        has(&rule.api_groups, group)
            && has(&rule.resources, &resource)
            && rule.verbs.iter().any(|it| it == verb)
    };
    let no = || format!("the manifests permit no {verb} of {resource} in the group {group:?}");
    RULES.iter().any(permits).then_some(()).ok_or_else(no)
}
