//! The files of `deploy/kubernetes`, as the API server judges them: it stores none.

use std::path::Path;

use futures_util::FutureExt as _;
use hyper::Request;
use serde_json::{Value, json};

use crate::parts::Cluster;
use crate::{Done, Scenario};

pub(crate) const ALL: &[Scenario] = &[Scenario {
    name: "manifests_are_accepted",
    needs: &[],
    run: |c, _| accepted(c).boxed_local(),
}];

/// The collection of a kind, below its namespace if it has one, and the first minor version of
/// Kubernetes that takes this object whole.
fn known(object: &Value) -> Result<(&'static str, &'static str, u32), String> {
    let has_claims = object.to_string().contains("\"resourceClaims\"");
    let kind = object["kind"].as_str().unwrap_or_default();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let of_pods = if has_claims { 34 } else { 0 };
    Ok(match kind {
        "Namespace" => ("/api/v1", "namespaces", 0),
        "ServiceAccount" => ("/api/v1", "serviceaccounts", 0),
        "Service" => ("/api/v1", "services", 0),
        "NetworkPolicy" => ("/apis/networking.k8s.io/v1", "networkpolicies", 7),
        "Pod" => ("/api/v1", "pods", of_pods),
        "ClusterRole" => ("/apis/rbac.authorization.k8s.io/v1", "clusterroles", 0),
        "ClusterRoleBinding" => ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", 0),
        "Role" => ("/apis/rbac.authorization.k8s.io/v1", "roles", 0),
        "RoleBinding" => ("/apis/rbac.authorization.k8s.io/v1", "rolebindings", 0),
        // `maxSurge` of DaemonSets.
        "DaemonSet" if name == "rocinante-driver" => ("/apis/apps/v1", "daemonsets", 22),
        // `appArmorProfile`.
        "DaemonSet" => ("/apis/apps/v1", "daemonsets", 30),
        "Deployment" => ("/apis/apps/v1", "deployments", of_pods),
        "DeviceClass" => ("/apis/resource.k8s.io/v1", "deviceclasses", 34),
        // With `capacity`, on from 1.36.
        "ResourceClaim" => ("/apis/resource.k8s.io/v1", "resourceclaims", 36),
        "ResourceClaimTemplate" => ("/apis/resource.k8s.io/v1", "resourceclaimtemplates", 36),
        "ValidatingAdmissionPolicy" => {
            ("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicies", 30)
        }
        "ValidatingAdmissionPolicyBinding" => {
            ("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings", 30)
        }
        other => return Err(format!("an unknown kind: {other}")),
    })
}

/// Fields of the sent object that the answer has not.
fn dropped(sent: &Value, kept: &Value, at: &str) -> Vec<String> {
    match (sent, kept) {
        (Value::Object(all), _) => {
            let each = all.iter().filter(|(_, it)| !it.is_null());
            each.flat_map(|(key, it)| dropped(it, &kept[key], &format!("{at}.{key}"))).collect()
        }
        (Value::Array(all), Value::Array(_)) => {
            let each = all.iter().enumerate();
            each.flat_map(|(n, it)| dropped(it, &kept[n], &format!("{at}[{n}]"))).collect()
        }
        (_, Value::Null) => vec![at.to_owned()],
        _ => Vec::new(),
    }
}

async fn posted(cluster: &Cluster, path: &str, object: &Value) -> Result<Value, String> {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(object.to_string().into_bytes()).map_err(|it| it.to_string())?;
    cluster.client.request(request).await.map_err(|error| format!("{path}: {error}"))
}

async fn accepted(cluster: &mut Cluster) -> Done {
    let minor = cluster.binaries.minor;
    // One that was built without a number says 0.
    let version = if minor == 0 { "this version".to_owned() } else { format!("1.{minor}") };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes");
    let read = |path: &Path| -> Result<Vec<Value>, String> {
        let text =
            std::fs::read_to_string(path).map_err(|it| format!("{}: {it}", path.display()))?;
        serde_saphyr::from_multiple(&text).map_err(|it| it.to_string())
    };
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rocinante"}});
    posted(cluster, "/api/v1/namespaces", &namespace).await?;
    let (mut taken, mut absent) = (0, 0);
    for folder in [folder.clone(), folder.join("examples")] {
        let kustomization = &read(&folder.join("kustomization.yaml"))?[0];
        for file in kustomization["resources"].as_array().into_iter().flatten() {
            for mut object in read(&folder.join(file.as_str().unwrap_or_default()))? {
                let (group, collection, since) = known(&object)?;
                let what = format!("{} {}", object["kind"], object["metadata"]["name"]);
                if since > minor {
                    println!("not in {version}: {what} of {file} (1.{since})");
                    absent += 1;
                    continue;
                }
                if object["kind"] == "Namespace" {
                    object["metadata"]["name"] = "another".into();
                }
                let is_namespaced = matches!(
                    collection,
                    "serviceaccounts"
                        | "services"
                        | "networkpolicies"
                        | "pods"
                        | "roles"
                        | "rolebindings"
                        | "daemonsets"
                        | "deployments"
                        | "resourceclaims"
                        | "resourceclaimtemplates"
                );
                let space =
                    object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
                let path = match is_namespaced {
                    true => format!("{group}/namespaces/{space}/{collection}?dryRun=All"),
                    false => format!("{group}/{collection}?dryRun=All"),
                };
                let kept = posted(cluster, &path, &object)
                    .await
                    .map_err(|why| format!("{what}: {why}"))?;
                let lost = dropped(&object, &kept, "");
                if !lost.is_empty() {
                    return Err(format!("{what}: the server drops {lost:?}"));
                }
                taken += 1;
            }
        }
    }
    println!("{taken} objects are accepted, {absent} are not in {version}");
    if taken > 0 { Ok(()) } else { Err("no object was sent".into()) }
}
