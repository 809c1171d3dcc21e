//! `resource.k8s.io/v1`: slices, and claims with their status, each read by the types that are made
//! of Kubernetes' own definition; and events.

use std::collections::BTreeMap;

use hyper::{Method, StatusCode};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Answer, Api, Inner, PODS, json_answer, key, status};

const SLICES: &str = "resourceslices";
const CLAIMS: &str = "resourceclaims";
const EVENTS: &str = "events";
const LEASES: &str = "leases";
const LEASE: &str = "rocinante-extender";

/// An object is as it was read: it has no field that the API does not know.
fn is_valid<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let read: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    let again = serde_json::to_value(&read).map_err(|error| error.to_string())?;
    // Null stands for absent.
    if again == *object { Ok(()) } else { Err(format!("unknown fields: {object} is {again}")) }
}

impl Api {
    /// The next requests of `resource.k8s.io` are answered with these, and do nothing.
    pub(crate) fn fail_resources(&self, codes: impl IntoIterator<Item = StatusCode>) {
        self.inner.lock().resource_faults.extend(codes);
    }

    /// The next lines of watches are cut.
    pub(crate) fn cut_watches(&self, count: usize) {
        self.inner.lock().cuts = count;
    }

    pub(super) fn is_cut(&self) -> bool {
        let cuts = &mut self.inner.lock().cuts;
        let is_cut = *cuts > 0;
        *cuts -= usize::from(is_cut);
        is_cut
    }

    /// Drops these fields of devices from now on, as a server without their feature.
    pub(crate) fn drops(&self, fields: &[&'static str]) {
        self.inner.lock().drops = fields.to_vec();
    }

    pub(crate) fn slices(&self) -> Vec<Value> {
        let inner = self.inner.lock();
        inner.objects.get(SLICES).into_iter().flat_map(|it| it.values()).cloned().collect()
    }

    /// As `wipeResourceSlices` of a kubelet that starts.
    pub(crate) fn wipe_slices(&self) {
        for slice in self.slices() {
            let name = slice["metadata"]["name"].as_str().unwrap();
            self.write(&mut self.inner.lock(), SLICES, name, None);
        }
    }

    /// Changes a slice, or makes one, as another process does.
    pub(crate) fn put_slice(&self, slice: Value) {
        let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
        self.put(SLICES, &name, slice);
    }

    /// A slice that is shown, and that no request finds.
    pub(crate) fn put_lost_slice(&self, slice: Value) {
        self.put(SLICES, "lost", slice);
    }

    pub(crate) fn events(&self) -> Vec<Value> {
        let inner = self.inner.lock();
        inner.objects.get(EVENTS).into_iter().flat_map(|it| it.values()).cloned().collect()
    }

    /// A claim in the namespace `default`, as the scheduler leaves it: its results, its
    /// configuration and the UIDs of the pods that it is reserved for.
    pub(crate) fn put_claim(&self, name: &str, uid: &str, pods: &[&str], devices: &Value) {
        let consumer = |uid: &&str| json!({"resource": "pods", "name": uid, "uid": uid});
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "spec": {},
            "status": {
                "allocation": {"devices": devices},
                "reservedFor": pods.iter().map(consumer).collect::<Vec<_>>(),
            },
        });
        is_valid::<ResourceClaim>(&claim).unwrap();
        self.put(CLAIMS, &key(name), claim);
    }

    /// A claim that no server would have.
    pub(crate) fn put_garbage(&self, name: &str, claim: Value) {
        self.put(CLAIMS, &key(name), claim);
    }

    pub(crate) fn delete_claim(&self, name: &str) {
        self.write(&mut self.inner.lock(), CLAIMS, &key(name), None);
    }

    pub(crate) fn claim(&self, name: &str) -> Option<Value> {
        self.inner.lock().get(CLAIMS, &key(name)).cloned()
    }

    /// A pod of the node `n1` with a claim.
    pub(crate) fn put_pod(&self, uid: &str, claim: &str) {
        self.put_pod_in("default", uid, claim);
    }

    pub(crate) fn put_pod_in(&self, namespace: &str, uid: &str, claim: &str) {
        let claims = json!([{"name": "rdma", "resourceClaimName": claim}]);
        let pod = json!({
            "metadata": {"name": uid, "namespace": namespace, "uid": uid},
            "spec": {"nodeName": "n1", "resourceClaims": claims},
            "status": {},
        });
        self.put(PODS, &format!("{namespace}/{uid}"), pod);
    }

    pub(super) fn resource(
        &self,
        method: &Method,
        parts: &[&str],
        query: &BTreeMap<String, String>,
        body: &[u8],
    ) -> Answer {
        if let Some(code) = self.inner.lock().resource_faults.pop_front() {
            return status(code, "not now");
        }
        let sent = serde_json::from_slice::<Value>(body).unwrap_or_default();
        match (method, parts) {
            (&Method::GET, ["resourceslices"]) => self.listed(SLICES, query),
            (&Method::POST, ["resourceslices"]) => self.slice_written(sent, None),
            (&Method::PUT, ["resourceslices", name]) => self.slice_written(sent, Some(name)),
            (&Method::DELETE, ["resourceslices", name]) => {
                let mut inner = self.inner.lock();
                let Some(old) = inner.get(SLICES, name).cloned() else {
                    return status(StatusCode::NOT_FOUND, "not found");
                };
                self.write(&mut inner, SLICES, name, None);
                json_answer(StatusCode::OK, &old)
            }
            (&Method::GET, ["namespaces", space, "resourceclaims", name]) => {
                self.got(CLAIMS, &format!("{space}/{name}"))
            }
            (&Method::PATCH, ["namespaces", space, "resourceclaims", name, "status"]) => {
                let is_apply = query.get("fieldManager").is_some_and(|it| it == "rocinante.dev");
                assert!(is_apply, "{query:?}");
                self.applied(&format!("{space}/{name}"), &sent)
            }
            (&Method::GET, ["namespaces", "rocinante", LEASES, name]) => self.got(LEASES, name),
            (&Method::POST, ["namespaces", "rocinante", LEASES]) => self.lease_written(sent, None),
            (&Method::PUT, ["namespaces", "rocinante", LEASES, name]) => {
                self.lease_written(sent, Some(name))
            }
            (&Method::POST, ["namespaces", "default", "events"]) => {
                if let Err(why) = is_valid::<Event>(&sent) {
                    return status(StatusCode::UNPROCESSABLE_ENTITY, &why);
                }
                self.put(EVENTS, sent["metadata"]["name"].as_str().unwrap(), sent.clone());
                json_answer(StatusCode::CREATED, &sent)
            }
            _ => status(StatusCode::NOT_FOUND, "no such path"),
        }
    }

    pub(crate) fn lease(&self) -> Option<Value> {
        self.inner.lock().get(LEASES, LEASE).cloned()
    }

    pub(crate) fn delete_lease(&self) {
        self.write(&mut self.inner.lock(), LEASES, LEASE, None);
    }

    /// As another process.
    pub(crate) fn put_lease(&self, lease: Value) {
        self.put(LEASES, LEASE, lease);
    }

    fn lease_written(&self, lease: Value, name: Option<&str>) -> Answer {
        if let Err(why) = is_valid::<Lease>(&lease) {
            return status(StatusCode::UNPROCESSABLE_ENTITY, &why);
        }
        let mut inner = self.inner.lock();
        let version = |it: &Value| it["metadata"]["resourceVersion"].clone();
        let is_its = match (inner.get(LEASES, LEASE), name) {
            (old, None) => old.is_none(),
            (old, Some(_)) => old.is_some_and(|old| version(old) == version(&lease)),
        };
        if !is_its {
            return status(StatusCode::CONFLICT, "the object has been modified");
        }
        self.write(&mut inner, LEASES, LEASE, Some(lease));
        json_answer(StatusCode::OK, inner.get(LEASES, LEASE).unwrap())
    }

    fn slice_written(&self, mut slice: Value, name: Option<&str>) -> Answer {
        if let Err(why) = is_valid::<ResourceSlice>(&slice).and_then(|()| is_slice(&slice)) {
            return status(StatusCode::UNPROCESSABLE_ENTITY, &why);
        }
        let mut inner = self.inner.lock();
        let own = slice["metadata"]["name"].as_str().unwrap().to_owned();
        match (inner.get(SLICES, &own), name) {
            (Some(_), None) => return status(StatusCode::CONFLICT, "already exists"),
            (None, Some(_)) => return status(StatusCode::NOT_FOUND, "not found"),
            (Some(old), Some(name)) => {
                assert_eq!(own, name);
                if old["metadata"]["resourceVersion"] != slice["metadata"]["resourceVersion"] {
                    return status(StatusCode::CONFLICT, "the object has been modified");
                }
            }
            (None, None) => {}
        }
        let dropped = |device: &mut Value| {
            for field in &inner.drops {
                device.as_object_mut().unwrap().remove(*field);
                if *field == "allowMultipleAllocations" {
                    for capacity in device["capacity"].as_object_mut().unwrap().values_mut() {
                        capacity.as_object_mut().unwrap().remove("requestPolicy");
                    }
                }
            }
            let taints = device.get_mut("taints").and_then(Value::as_array_mut);
            for taint in taints.into_iter().flatten() {
                taint["timeAdded"] = "2026-01-01T00:00:00Z".into();
            }
        };
        slice["spec"]["devices"].as_array_mut().into_iter().flatten().for_each(dropped);
        self.write(&mut inner, SLICES, &own, Some(slice));
        json_answer(StatusCode::OK, inner.get(SLICES, &own).unwrap())
    }

    /// Server-side apply of `status.devices`, a list by driver, pool, device and share.
    fn applied(&self, name: &str, sent: &Value) -> Answer {
        let mut inner = self.inner.lock();
        let Some(mut claim) = inner.get(CLAIMS, name).cloned() else {
            return status(StatusCode::NOT_FOUND, "not found");
        };
        if sent["metadata"]["uid"] != claim["metadata"]["uid"] {
            return status(StatusCode::CONFLICT, "the UID in the precondition");
        }
        let is_ours = |it: &Value| it["driver"] == "rocinante.dev";
        let mut all = claim["status"]["devices"].as_array().cloned().unwrap_or_default();
        all.retain(|it| !is_ours(it));
        let devices = sent["status"]["devices"].as_array().cloned().unwrap_or_default();
        assert!(devices.iter().all(is_ours));
        all.extend(devices);
        claim["status"]["devices"] = all.into();
        if let Err(why) = is_valid::<ResourceClaim>(&claim) {
            return status(StatusCode::UNPROCESSABLE_ENTITY, &why);
        }
        self.write(&mut inner, CLAIMS, name, Some(claim));
        json_answer(StatusCode::OK, inner.get(CLAIMS, name).unwrap())
    }
}

/// The rules of `ValidateResourceSlice` that the driver could break.
fn is_slice(slice: &Value) -> Result<(), String> {
    let devices = slice["spec"]["devices"].as_array().ok_or("no devices")?;
    let mut names: Vec<&str> = devices.iter().filter_map(|it| it["name"].as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let is_label = |name: &&str| {
        let is_inner = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
        name.len() <= 63 && name.bytes().all(is_inner) && !name.starts_with('-')
    };
    let has_one_value = |it: &Value| it.as_object().is_some_and(|it| it.len() == 1);
    let attributes = devices.iter().filter_map(|it| it["attributes"].as_object());
    if names.len() < devices.len() || !names.iter().all(is_label) {
        return Err(format!("names of devices: {names:?}"));
    }
    if devices.len() > 64 || !attributes.flat_map(|it| it.values()).all(has_one_value) {
        return Err("devices and their attributes".into());
    }
    Ok(())
}

impl Inner {
    /// Whether a fault is left that no request has met.
    pub(super) fn has_resource_faults(&self) -> bool {
        !self.resource_faults.is_empty()
    }
}

impl Api {
    pub(crate) fn clear_resource_faults(&self) {
        self.inner.lock().resource_faults.clear();
    }

    pub(crate) fn has_resource_faults(&self) -> bool {
        self.inner.lock().has_resource_faults()
    }
}
