//! The files of `deploy/kubernetes`: read by the API's types, whole, and consistent with the code.

mod policy;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const FOLDERS: [&str; 2] = ["deploy/kubernetes", "deploy/kubernetes/examples"];
/// Images that `cargo xtask dist` does not make.
const OTHERS: [&str; 2] = ["registry.k8s.io/kube-scheduler:v1.36.0", "localhost/perftest:0.1.0"];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(REPOSITORY).join(path))
        .unwrap_or_else(|why| panic!("{path}: {why}"))
}

fn documents(path: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(&read(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// The resources that the kustomization of a folder names.
fn resources(folder: &str) -> Vec<String> {
    let all = documents(&format!("{folder}/kustomization.yaml"));
    let [kustomization] = &all[..] else { panic!("one document") };
    texts(&kustomization["resources"]).iter().map(|it| format!("{folder}/{it}")).collect()
}

fn texts(list: &Value) -> Vec<String> {
    let text = |it: &Value| it.as_str().expect("a text").to_owned();
    list.as_array().into_iter().flatten().map(text).collect()
}

/// All objects, with their files.
fn objects() -> Vec<(String, Value)> {
    let files = FOLDERS.iter().flat_map(|folder| resources(folder));
    files.flat_map(|file| documents(&file).into_iter().map(move |it| (file.clone(), it))).collect()
}

fn of_kind(kind: &str) -> Vec<Value> {
    objects().into_iter().map(|it| it.1).filter(|it| it["kind"] == kind).collect()
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

/// The specification of a pod, if the object has one.
fn pod(object: &Value) -> Option<&Value> {
    match object["kind"].as_str()? {
        "Pod" => Some(&object["spec"]),
        "DaemonSet" | "Deployment" => Some(&object["spec"]["template"]["spec"]),
        _ => None,
    }
}

fn containers(pod: &Value) -> &Vec<Value> {
    pod["containers"].as_array().expect("containers")
}

/// As the API's type has it.
fn typed(object: &Value) -> Value {
    fn of<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
        let it: T =
            serde_json::from_value(object.clone()).unwrap_or_else(|e| panic!("{e}: {object}"));
        json!(it)
    }
    match object["kind"].as_str().expect("a kind") {
        "Namespace" => of::<Namespace>(object),
        "ServiceAccount" => of::<ServiceAccount>(object),
        "ClusterRole" => of::<ClusterRole>(object),
        "ClusterRoleBinding" => of::<ClusterRoleBinding>(object),
        "Role" => of::<Role>(object),
        "RoleBinding" => of::<RoleBinding>(object),
        "DaemonSet" => of::<DaemonSet>(object),
        "Deployment" => of::<Deployment>(object),
        "Pod" => of::<Pod>(object),
        "Service" => of::<Service>(object),
        "NetworkPolicy" => of::<NetworkPolicy>(object),
        "DeviceClass" => of::<DeviceClass>(object),
        "ResourceClaim" => of::<ResourceClaim>(object),
        "ResourceClaimTemplate" => of::<ResourceClaimTemplate>(object),
        "ValidatingAdmissionPolicy" => of::<ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => of::<ValidatingAdmissionPolicyBinding>(object),
        other => panic!("a kind that no test knows: {other}"),
    }
}

/// Without fields that say nothing.
fn told(value: &Value) -> Value {
    let says = |it: &Value| !matches!(it, Value::Null) && *it != json!({}) && *it != json!([]);
    match value {
        Value::Object(all) => {
            let all = all.iter().map(|(key, it)| (key.clone(), told(it)));
            Value::Object(all.filter(|(_, it)| says(it)).collect())
        }
        Value::Array(all) => Value::Array(all.iter().map(told).collect()),
        other => other.clone(),
    }
}

#[test]
fn each_file_is_named_and_has_no_field_that_the_api_does_not_know() {
    for folder in FOLDERS {
        let entries = fs::read_dir(Path::new(REPOSITORY).join(folder)).expect("a folder");
        let files = entries.map(|it| it.expect("an entry").path()).filter(|it| it.is_file());
        let named = resources(folder).into_iter().map(|it| Path::new(REPOSITORY).join(it));
        let (files, mut named): (BTreeSet<PathBuf>, BTreeSet<PathBuf>) =
            (files.collect(), named.collect());
        let kustomization = &documents(&format!("{folder}/kustomization.yaml"))[0];
        let made = kustomization["configMapGenerator"].as_array().into_iter().flatten();
        let made = made.flat_map(|it| texts(&it["files"])).chain(["kustomization.yaml".into()]);
        named.extend(made.map(|it| Path::new(REPOSITORY).join(folder).join(it)));
        assert_eq!(files, named);
    }
    let mut seen = BTreeSet::new();
    for (file, object) in objects() {
        assert_eq!(told(&typed(&object)), told(&object), "{file}");
        let of = &object["metadata"];
        let key = [&object["kind"], &of["namespace"], &of["name"]].map(Value::to_string);
        assert!(seen.insert(key), "twice: {file}");
    }
    assert_eq!(resources(FOLDERS[1]).len(), 7);
}

/// `tests/tests/cli/network_policy.rs` has the rules that follow.
#[test]
fn the_network_policy_permits_rocev2_in_both_directions() {
    let spec = &of_kind("NetworkPolicy")[0]["spec"];
    assert_eq!(texts(&spec["policyTypes"]), ["Ingress", "Egress"]);
    for (list, peers) in [("ingress", "from"), ("egress", "to")] {
        let rule = &spec[list][0];
        assert_eq!(rule["ports"], serde_json::json!([{"protocol": "UDP", "port": 4791}]));
        assert_eq!(rule[peers][0]["podSelector"], spec["podSelector"]);
    }
}

#[test]
fn what_a_manifest_refers_to_is_there() {
    let names =
        |kind: &str| of_kind(kind).iter().map(|it| name(it).to_owned()).collect::<BTreeSet<_>>();
    let accounts = names("ServiceAccount");
    let has = |kind: &Value, role: &str, namespace: &Value| {
        let is_it = |it: &Value| name(it) == role && it["metadata"]["namespace"] == *namespace;
        of_kind(kind.as_str().expect("a kind")).iter().any(is_it)
    };
    let kustomization = &documents(&format!("{}/kustomization.yaml", FOLDERS[0]))[0];
    let maps = kustomization["configMapGenerator"].as_array().expect("a list");
    for (file, object) in objects() {
        if let "DaemonSet" | "Deployment" = object["kind"].as_str().expect("a kind") {
            let labels = &object["spec"]["template"]["metadata"]["labels"];
            assert_eq!(&object["spec"]["selector"]["matchLabels"], labels, "{file}");
        }
        let of_role = &object["roleRef"];
        if let Some(role) = of_role["name"].as_str() {
            let is_own = role.starts_with("rocinante-");
            // A Role is of its binding's namespace.
            let in_it = &object["metadata"]["namespace"];
            assert!(!is_own || has(&of_role["kind"], role, in_it), "{role}");
            let subject = object["subjects"][0]["name"].as_str().expect("a name");
            assert!(accounts.contains(subject), "{subject}");
        }
        let Some(pod) = pod(&object) else { continue };
        if let Some(account) = pod["serviceAccountName"].as_str() {
            assert!(accounts.contains(account), "{account}");
        }
        let volumes = pod["volumes"].as_array().cloned().unwrap_or_default();
        for map in volumes.iter().filter_map(|it| it["configMap"]["name"].as_str()) {
            assert!(maps.iter().any(|it| it["name"] == map), "{map}");
        }
        for container in containers(pod) {
            for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                let volume = volumes.iter().find(|it| it["name"] == mount["name"]);
                let path = &volume.expect("a volume")["hostPath"]["path"];
                // Paths mean the same in the container and on the host.
                assert!(path.is_null() || *path == mount["mountPath"], "{file}: {path}");
            }
            let claims = pod["resourceClaims"].as_array().cloned().unwrap_or_default();
            for claim in container["resources"]["claims"].as_array().into_iter().flatten() {
                let claim = claims.iter().find(|it| it["name"] == claim["name"]).expect("a claim");
                let (how, kind) = match claim["resourceClaimName"].is_null() {
                    true => ("resourceClaimTemplateName", "ResourceClaimTemplate"),
                    false => ("resourceClaimName", "ResourceClaim"),
                };
                assert!(names(kind).contains(claim[how].as_str().expect("a name")), "{file}");
            }
        }
    }
    let policies = names("ValidatingAdmissionPolicy");
    for binding in of_kind("ValidatingAdmissionPolicyBinding") {
        assert!(policies.contains(binding["spec"]["policyName"].as_str().expect("a name")));
    }
    let policy = &of_kind("ValidatingAdmissionPolicy")[0]["spec"];
    let condition = policy["matchConditions"][0]["expression"].as_str().expect("CEL");
    for account in ["rocinante-driver", "rocinante-node"] {
        assert!(condition.contains(&format!("\"system:serviceaccount:rocinante:{account}\"")));
    }
}

/// A request of the code: the role, the group, the resource and the verb, and where it is.
type Use = (&'static str, &'static str, &'static str, &'static str, &'static str, &'static str);

const DRA: &str = "resource.k8s.io";
const LEASES: &str = "coordination.k8s.io";
const USES: [Use; 27] = [
    ("driver", DRA, "resourceclaims", "get", "dra/objects.rs", "&claims()).get(name)"),
    ("driver", DRA, "resourceclaims/status", "patch", "dra/objects.rs", "claims.patch_status("),
    // Rights that the server asks for beside the one for the status.
    (
        "driver",
        DRA,
        "resourceclaims/driver",
        "associated-node:patch",
        "dra/objects.rs",
        ".patch_status(",
    ),
    (
        "driver",
        DRA,
        "resourceclaims/driver",
        "associated-node:update",
        "dra/objects.rs",
        ".patch_status(",
    ),
    ("driver", DRA, "resourceslices", "list", "dra/slices.rs", "watcher(dra.cluster.slices()"),
    ("driver", DRA, "resourceslices", "watch", "dra/slices.rs", "watcher(dra.cluster.slices()"),
    ("driver", DRA, "resourceslices", "create", "dra/objects.rs", "slices.create("),
    ("driver", DRA, "resourceslices", "update", "dra/objects.rs", "slices.replace("),
    ("driver", DRA, "resourceslices", "delete", "dra/objects.rs", "slices().delete("),
    ("driver", "", "pods", "list", "dra/tend.rs", "watcher(dra.cluster.pod_claims()"),
    ("driver", "", "pods", "watch", "dra/tend.rs", "watcher(dra.cluster.pod_claims()"),
    ("driver", "", "nodes", "list", "publish.rs", "watcher(cluster.nodes()"),
    ("driver", "", "nodes", "watch", "publish.rs", "watcher(cluster.nodes()"),
    ("driver", "", "nodes/status", "patch", "objects.rs", "nodes.patch_status("),
    ("driver", "", "events", "create", "dra/objects.rs", "events.create("),
    ("node", "", "pods", "list", "watch.rs", "watcher(cluster.pods()"),
    ("node", "", "pods", "watch", "watch.rs", "watcher(cluster.pods()"),
    ("node", "", "nodes", "list", "watch.rs", "watcher(cluster.nodes()"),
    ("node", "", "nodes", "watch", "watch.rs", "watcher(cluster.nodes()"),
    ("node", "", "nodes", "patch", "objects.rs", "nodes.patch(name"),
    ("extender", "", "pods", "get", "objects.rs", "pods_in(namespace).get(name)"),
    ("extender", "", "pods", "patch", "objects.rs", "pods.patch(&key.name"),
    (
        "extender",
        "",
        "pods/binding",
        "create",
        "objects.rs",
        "create_subresource::<_, Ignored>(\"binding\"",
    ),
    ("extender", "", "nodes", "watch", "watch.rs", "watcher(cluster.nodes()"),
    ("extender", LEASES, "leases", "get", "lease.rs", "leases.get(NAME)"),
    ("extender", LEASES, "leases", "create", "lease.rs", "leases.create("),
    ("extender", LEASES, "leases", "update", "lease.rs", "leases.replace(NAME"),
];

/// The one namespace and the one name for which a right is given, if it is not for all.
fn bounds(resource: &str, verb: &str) -> [&'static str; 2] {
    match (resource, verb) {
        ("events", _) => ["default", ""],
        ("resourceclaims/driver", _) => ["", "rocinante.dev"],
        // The name of a new object is no part of the request.
        ("leases", "create") => ["rocinante", ""],
        ("leases", _) => ["rocinante", "rocinante-extender"],
        _ => ["", ""],
    }
}

/// That they suffice say the scenarios of the other tests, whose API server grants no more.
#[test]
fn a_role_has_each_right_that_the_code_uses_and_no_other() {
    let mut used = BTreeSet::new();
    let right = |role: &str, group: &str, resource: &str, verb: &str| {
        let [namespace, name] = bounds(resource, verb);
        [role, group, resource, verb, namespace, name].map(str::to_owned)
    };
    for (role, group, resource, verb, file, call) in USES {
        let source = read(&format!("host/kube/src/{file}"));
        assert!(source.contains(call), "{file} does not call {call}");
        used.insert(right(role, group, resource, verb));
    }
    // The extender lists and watches as a node does.
    for resource in ["pods", "nodes"] {
        for verb in ["list", "watch"] {
            used.insert(right("extender", "", resource, verb));
        }
    }
    let mut granted = BTreeSet::new();
    for role in of_kind("ClusterRole").iter().chain(&of_kind("Role")) {
        for rule in role["rules"].as_array().expect("rules") {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    for verb in texts(&rule["verbs"]) {
                        let of = name(role).strip_prefix("rocinante-").expect("ours");
                        let space = role["metadata"]["namespace"].as_str().unwrap_or_default();
                        let names = texts(&rule["resourceNames"]).join(" ");
                        let right =
                            [of, &group, &resource, &verb, space, &names].map(str::to_owned);
                        assert!(!right.iter().any(|it| it.contains('*')), "{right:?}");
                        assert!(granted.insert(right.clone()), "twice: {right:?}");
                    }
                }
            }
        }
    }
    assert_eq!(granted, used);
}

/// The profile `restricted` of the Pod Security Standards, of which these fields are all that a pod
/// has to set.
#[test]
fn examples_are_restricted_and_only_the_agent_has_capabilities() {
    let volumes = ["configMap", "emptyDir", "projected", "secret", "downwardAPI"];
    for (file, object) in objects() {
        let Some(pod) = pod(&object) else { continue };
        let of_pod = &pod["securityContext"];
        let is_example = file.starts_with(FOLDERS[1]);
        let is_agent = name(&object) == "rocinante-agent";
        for container in containers(pod) {
            let own = &container["securityContext"];
            let either =
                |field: &str| if own[field].is_null() { &of_pod[field] } else { &own[field] };
            assert_eq!(own["allowPrivilegeEscalation"], false, "{file}");
            assert_eq!(own["capabilities"]["drop"], json!(["ALL"]), "{file}");
            assert_eq!(own["capabilities"]["add"].is_null(), !is_agent, "{file}");
            // An engine's profile keeps it from the namespaces of processes outside of it.
            let is_unconfined = own["appArmorProfile"] == json!({"type": "Unconfined"});
            assert_eq!(is_unconfined, is_agent, "{file}");
            assert_eq!(either("seccompProfile")["type"], "RuntimeDefault", "{file}");
            assert!(own["privileged"].is_null(), "{file}");
            if is_example {
                assert_eq!(either("runAsNonRoot"), true, "{file}");
                assert!(either("runAsUser").as_u64().is_some_and(|it| it > 0), "{file}");
            }
        }
        if is_example {
            for field in ["hostNetwork", "hostPID", "hostIPC"] {
                assert!(pod[field].is_null(), "{file}: {field}");
            }
            let all = pod["volumes"].as_array().into_iter().flatten();
            assert!(
                all.clone().all(|it| volumes.iter().any(|kind| it[*kind].is_object())),
                "{file}"
            );
        }
        let has_token = pod["automountServiceAccountToken"] != false;
        assert!(!is_agent || !has_token, "the agent has no credentials");
    }
    let unit = read("host/agent/dist/rocinante-agent.service");
    let line = unit.lines().find_map(|it| it.strip_prefix("CapabilityBoundingSet="));
    let wanted =
        line.expect("a line").split(' ').map(|it| it.trim_start_matches("CAP_").to_owned());
    let agent = of_kind("DaemonSet").into_iter().find(|it| name(it) == "rocinante-agent");
    let agent = agent.expect("the agent");
    let added =
        &containers(pod(&agent).expect("a pod"))[0]["securityContext"]["capabilities"]["add"];
    assert_eq!(texts(added), wanted.collect::<Vec<_>>());
}

/// Whether the command's own definition takes these words.
fn takes(words: &[String]) -> bool {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-kube"));
    let output = command.args(words).arg("--help").output().expect("it runs");
    output.status.success()
}

#[test]
fn the_commands_take_their_words_and_images_are_those_of_a_release() {
    assert!(!takes(&["driver".into(), "--nonsense".into()]));
    assert!(!takes(&["driver".into(), "--accounting=perhaps".into()]));
    let made = read("xtask/src/images.rs");
    let mut commands = BTreeMap::new();
    for (file, object) in objects() {
        for container in pod(&object).into_iter().flat_map(containers) {
            let image = container["image"].as_str().expect("an image");
            if OTHERS.contains(&image) {
                continue;
            }
            let name = image.strip_prefix("localhost/").expect(image);
            let (name, version) = name.split_once(':').expect(image);
            assert_eq!(version, env!("CARGO_PKG_VERSION"), "{file}");
            assert!(made.contains(&format!("name: \"{name}\",")), "no image {name}");
            if name != "rocinante-kube" {
                continue;
            }
            let words = texts(&container["args"]);
            assert!(takes(&words), "{file}: {words:?}");
            let env = container["env"].as_array().cloned().unwrap_or_default();
            let env = env.iter().map(|it| it["name"].as_str().expect("a name").to_owned());
            commands.insert(words[0].clone(), env.collect::<Vec<_>>());
        }
    }
    let env = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    assert_eq!(commands["driver"], env(&["NODE_NAME", "POD_UID"]));
    assert_eq!(commands["node"], env(&["NODE_NAME"]));
    assert_eq!(commands["extender"], env(&[]));
    let scheduler = &documents(&format!("{}/scheduler.yaml", FOLDERS[0]))[0];
    let extender = &scheduler["extenders"][0];
    assert_eq!(extender["urlPrefix"], "http://127.0.0.1:8888/scheduler");
    let verbs = ["filterVerb", "prioritizeVerb", "bindVerb"].map(|it| &extender[it]);
    assert_eq!(verbs, ["filter", "prioritize", "bind"]);
    let named = of_kind("Pod")
        .into_iter()
        .filter_map(|it| Some(it["spec"]["schedulerName"].as_str()?.to_owned()));
    assert_eq!(
        named.collect::<Vec<_>>(),
        [scheduler["profiles"][0]["schedulerName"].as_str().expect("a name")]
    );
}
