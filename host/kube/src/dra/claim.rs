//! A claim as the scheduler allocated it, and the record of it.

mod status;

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt as _;
use kube::core::Object;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) use self::status::{Network, Word};
use super::DRIVER;
use super::quantity::{share, short};
use crate::objects::Unused;
use crate::plugin::{SOCKET, SOCKETS};
use crate::sysfs::bits;

/// The class of CDI's devices.
pub(crate) const CDI_KIND: &str = "rocinante.dev/claim";
/// An annotation of a file of CDI: the claim's namespace and name.
const CLAIM: &str = "rocinante.dev/claim";

/// The longest UID, and the longest name of a class.
const ID_MAX: usize = 63;
/// Interfaces of Linux have no longer names.
const INTERFACE_MAX: usize = 15;
/// Devices whose interface's name is no DNS label are called by its bytes.
const BY_BYTES: &str = "x-";
/// The API server's bound of the addresses of a device.
const ADDRESSES_MAX: usize = 16;

pub(crate) type Claim = Object<Unused, ClaimStatus>;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ClaimStatus {
    allocation: Option<Allocation>,
    reserved_for: Option<Vec<Consumer>>,
    /// As drivers wrote it.
    devices: Option<Value>,
}

impl ClaimStatus {
    pub(crate) fn is_allocated(&self) -> bool {
        self.allocation.is_some()
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Option<Devices>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct Devices {
    results: Option<Vec<Outcome>>,
    config: Option<Vec<Configuration>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Outcome {
    request: String,
    driver: String,
    pool: String,
    device: String,
    #[serde(rename = "shareID")]
    share_id: Option<String>,
    consumed_capacity: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Configuration {
    requests: Option<Vec<String>>,
    opaque: Option<Opaque>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Opaque {
    driver: String,
    #[serde(default)]
    parameters: Value,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Consumer {
    resource: String,
    uid: String,
}

/// A claim that is prepared, or about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The UIDs of the pods that may use it.
    pub(crate) pods: BTreeSet<String>,
    #[serde(flatten)]
    parameters: Parameters,
    pub(crate) shares: Vec<Share>,
}

/// One of its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Share {
    pub(crate) request: String,
    pub(crate) pool: String,
    pub(crate) device: String,
    pub(crate) share_id: Option<String>,
    pub(crate) egress: u64,
    pub(crate) ingress: u64,
    limit: Option<u64>,
}

/// A field that is not there, or null, names nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Parameters {
    backend: Option<Backend>,
    class: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Backend {
    Auto,
    Packet,
    Afxdp,
    Udp,
}

/// Whether it may be a part of a file's name and of a device's.
pub(crate) fn is_id(text: &str) -> bool {
    (1..=ID_MAX).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'-')
}

/// The device of an uplink, a DNS label.
pub(crate) fn device_of(interface: &str) -> String {
    let is_plain = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    let is_label = is_id(interface)
        && interface.bytes().all(is_plain)
        && !interface.ends_with('-')
        && !interface.starts_with(BY_BYTES);
    if is_label {
        return interface.to_owned();
    }
    let hex = interface.bytes().map(|byte| format!("{byte:02x}"));
    hex.fold(BY_BYTES.to_owned(), |name, byte| name + &byte)
}

/// The uplink of a device.
fn interface_of(device: &str) -> Option<String> {
    let interface = match device.strip_prefix(BY_BYTES) {
        None => device.to_owned(),
        Some(hex) => {
            let pairs = hex.as_bytes().chunks(2).map(std::str::from_utf8);
            let byte = |pair: Result<&str, _>| u8::from_str_radix(pair.ok()?, 16).ok();
            String::from_utf8(pairs.map(byte).collect::<Option<_>>()?).ok()?
        }
    };
    let is_one = (1..=INTERFACE_MAX).contains(&interface.len());
    (is_one && device_of(&interface) == device).then_some(interface)
}

/// Reads the parameters of an entry into `all`, and into the limit of its share. A claim cannot
/// loosen what its class has: the least limit binds, and two classes or backends are refused.
fn read(parameters: &Value, all: &mut Parameters, limit: &mut Option<u64>) -> Result<(), String> {
    let fields = parameters.as_object().ok_or("the parameters are no object")?;
    for (key, value) in fields {
        let Some(text) = value.as_str() else { return Err(format!("{} is no string", short(key))) };
        let wrong = |what: &str| format!("{key} is {}, and {what}", short(text));
        match &**key {
            "backend" => {
                let backend = serde_json::from_value(value.clone());
                let one = backend.map_err(|_| wrong("there are auto, packet, afxdp and udp"))?;
                if all.backend.replace(one).is_some_and(|it| it != one) {
                    return Err("the claim names two backends".into());
                }
            }
            "class" => {
                let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                if text.is_empty() || text.len() > ID_MAX || !text.chars().all(is_word) {
                    return Err(wrong("a class has 1 to 63 letters, digits, '.', '_' and '-'"));
                }
                if all.class.replace(text.into()).is_some_and(|it| it != text) {
                    return Err("the claim names two classes".into());
                }
            }
            "limit" => {
                let one = bits(text).filter(|bits| share(&bits.to_string()).is_ok());
                let none = || wrong("a limit is 1M to 1T, bits per second with a decimal unit");
                let one = one.ok_or_else(none)?;
                *limit = Some(limit.map_or(one, |it| it.min(one)));
            }
            _ => return Err(format!("{} is no parameter of {DRIVER}", short(key))),
        }
    }
    Ok(())
}

impl Configuration {
    /// The parameters for this driver and this request; a request of a list is `request/sub`.
    fn of(&self, request: &str) -> Option<&Value> {
        let opaque = self.opaque.as_ref().filter(|it| it.driver == DRIVER)?;
        let main = request.split_once('/').map_or(request, |(main, _)| main);
        let names = self.requests.as_deref().unwrap_or_default();
        let is_its = names.is_empty() || names.iter().any(|it| it == request || it == main);
        is_its.then_some(&opaque.parameters)
    }
}

impl Outcome {
    fn capacity(&self, name: &str) -> Result<u64, String> {
        let all = self.consumed_capacity.as_ref();
        let Some(value) = all.and_then(|it| it.get(name)) else {
            return Err(format!(
                "{}: the scheduler allocated no {name}: shares need DRAConsumableCapacity",
                self.device
            ));
        };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        share(&text).map_err(|why| format!("{name} of {}: {why}", self.device))
    }
}

impl Record {
    /// The claim's devices on this node. Error: why it cannot be prepared.
    pub(crate) fn read(claim: &Claim, uid: &str, node: &str) -> Result<Self, String> {
        let now = claim.uid().unwrap_or_default();
        if now != uid {
            return Err(format!("the claim was made anew: its UID is {} now", short(&now)));
        }
        let status = claim.status.as_ref();
        let devices = status.and_then(|it| it.allocation.as_ref()?.devices.as_ref());
        let results = devices.and_then(|it| it.results.as_deref()).unwrap_or_default();
        let configs = devices.and_then(|it| it.config.as_deref()).unwrap_or_default();
        let mut parameters = Parameters::default();
        let mut shares = Vec::new();
        for result in results.iter().filter(|it| it.driver == DRIVER) {
            let Outcome { request, pool, device, share_id, .. } = result;
            if pool != node {
                return Err(format!("{} is no pool of this node", short(pool)));
            }
            if interface_of(device).is_none() {
                return Err(format!("{} is no device of {DRIVER}", short(device)));
            }
            if let Some(id) = share_id.as_ref().filter(|it| !is_id(it)) {
                return Err(format!("{} is no share's id", short(id)));
            }
            let mut limit = None;
            for entry in configs.iter().filter_map(|it| it.of(request)) {
                read(entry, &mut parameters, &mut limit)?;
            }
            let (egress, ingress) = (result.capacity("egress")?, result.capacity("ingress")?);
            if limit.is_some_and(|it| it < egress) {
                return Err(format!("the limit is less than the reserved egress of {device}"));
            }
            let (request, pool, device) = (request.clone(), pool.clone(), device.clone());
            let share_id = share_id.clone();
            shares.push(Share { request, pool, device, share_id, egress, ingress, limit });
        }
        let key = |it: &Share| (it.device.clone(), it.share_id.clone());
        let keys: BTreeSet<_> = shares.iter().map(key).collect();
        if shares.is_empty() || keys.len() < shares.len() {
            let times = if shares.is_empty() { "no device" } else { "one share twice" };
            return Err(format!("{times} of {DRIVER} is allocated to the claim"));
        }
        let this = Self {
            uid: uid.to_owned(),
            namespace: claim.namespace().unwrap_or_default(),
            name: claim.name_any(),
            pods: Self::pods(claim),
            parameters,
            shares,
        };
        if this.pods.is_empty() {
            return Err("the claim is reserved for no pod".into());
        }
        Ok(this)
    }

    /// The pods that a claim is reserved for.
    fn pods(claim: &Claim) -> BTreeSet<String> {
        let all = claim.status.iter().filter_map(|it| it.reserved_for.as_deref()).flatten();
        all.filter(|it| it.resource == "pods").map(|it| it.uid.clone()).collect()
    }

    fn cdi_name(&self, share: &Share) -> String {
        let Share { device, share_id, .. } = share;
        format!("{}.{device}.{}", self.uid, share_id.as_deref().unwrap_or("0"))
    }

    pub(crate) fn cdi_id(&self, share: &Share) -> String {
        format!("{CDI_KIND}={}", self.cdi_name(share))
    }

    /// Its file of CDI.
    pub(crate) fn cdi(&self) -> Value {
        let mut env = vec![format!("{}={}", SOCKET.0, SOCKET.1)];
        // That one or none: the device does not open by another.
        if let Some(backend) = self.parameters.backend {
            env.extend(json!(backend).as_str().map(|it| format!("ROCINANTE_NETDEV={it}")));
        }
        let edits = json!({
            "env": env,
            "mounts": [{
                "hostPath": SOCKETS,
                "containerPath": SOCKETS,
                "options": ["rbind", "ro", "nosuid", "nodev", "noexec"],
            }],
        });
        let device = |it| json!({"name": self.cdi_name(it), "containerEdits": edits.clone()});
        let devices: Vec<Value> = self.shares.iter().map(device).collect();
        json!({
            "cdiVersion": "0.6.0",
            "kind": CDI_KIND,
            "annotations": {CLAIM: format!("{}/{}", self.namespace, self.name)},
            "devices": devices,
        })
    }

    /// The agent's command for it.
    pub(crate) fn command(&self) -> Value {
        let part = |it: &Share| {
            let mut part = json!({"uplink": interface_of(&it.device), "rate": it.egress});
            if let Some(limit) = it.limit {
                part["ceil"] = limit.into();
            }
            part
        };
        let shares: Vec<Value> = self.shares.iter().map(part).collect();
        let mut claim = json!({"uid": self.uid, "pods": self.pods, "shares": shares});
        if let Some(class) = &self.parameters.class {
            claim["class"] = json!(class);
        }
        if let Some(backend @ (Backend::Packet | Backend::Afxdp)) = self.parameters.backend {
            claim["backend"] = json!(backend);
        }
        json!({"version": 1, "command": "claim", "claim": claim})
    }
}

/// The claim of a file of CDI: its namespace and its name.
pub(crate) fn claim_of(cdi: &Value) -> Option<(&str, &str)> {
    cdi["annotations"][CLAIM].as_str()?.split_once('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(results: &Value, config: &Value) -> Claim {
        let claim = json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": "u-1"},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results, "config": config}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p-1"}],
            },
        });
        serde_json::from_value(claim).unwrap()
    }

    fn result(egress: &Value) -> Value {
        json!({
            "request": "a/b", "driver": DRIVER, "pool": "n", "device": "ens1", "shareID": "s-1",
            "consumedCapacity": {"egress": egress, "ingress": "1M"},
        })
    }

    fn config(parameters: &Value) -> Value {
        json!([{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}])
    }

    fn refused(claim: &Claim) -> String {
        Record::read(claim, "u-1", "n").unwrap_err()
    }

    #[test]
    fn an_interface_has_a_device_that_is_a_label() {
        for (interface, device) in [
            ("ens1", "ens1"),
            ("eth0.5", "x-657468302e35"),
            ("Up_0", "x-55705f30"),
            ("x-41", "x-782d3431"),
            ("-a", "x-2d61"),
            ("a-", "x-612d"),
            ("é", "x-c3a9"),
        ] {
            assert_eq!(device_of(interface), device);
            assert_eq!(interface_of(device).as_deref(), Some(interface));
        }
        for none in
            ["", "x-", "x-4", "x-zz", "x-ff", "x-656e7331", "A", "a.b", "../x", "sixteen-bytes-xx"]
        {
            assert_eq!(interface_of(none), None, "{none}");
        }
    }

    #[test]
    fn parameters_are_read_strictly() {
        let all = json!({"backend": "packet", "limit": "5G", "class": "gold"});
        let record =
            Record::read(&claim(&json!([result(&json!("3G"))]), &config(&all)), "u-1", "n");
        let sent = record.unwrap().command();
        let share =
            json!([{"uplink": "ens1", "rate": 3_000_000_000_u64, "ceil": 5_000_000_000_u64}]);
        let claimed = json!({
            "uid": "u-1", "pods": ["p-1"], "shares": share, "class": "gold", "backend": "packet",
        });
        assert_eq!(sent["claim"], claimed);
        for (parameters, says) in [
            (json!(null), "no object"),
            (json!([]), "no object"),
            (json!({"limits": "5G"}), "\"limits\" is no parameter"),
            (json!({"Limit": "5G"}), "no parameter"),
            (json!({"x".repeat(10_000): "5G"}), "no parameter"),
            (json!({"limit": 5}), "no string"),
            (json!({"limit": null}), "no string"),
            (json!({"limit": "3Gi"}), "decimal unit"),
            (json!({"limit": "6e9"}), "decimal unit"),
            (json!({"limit": "3000m"}), "decimal unit"),
            (json!({"limit": "-1G"}), "decimal unit"),
            (json!({"limit": "2T"}), "decimal unit"),
            (json!({"limit": "2G"}), "less than the reserved"),
            (json!({"backend": "Packet"}), "auto, packet, afxdp and udp"),
            (json!({"class": ""}), "a class has"),
            (json!({"class": "a/b"}), "a class has"),
            (json!({"class": "g".repeat(10_000)}), "a class has"),
        ] {
            let why = refused(&claim(&json!([result(&json!("3G"))]), &config(&parameters)));
            assert!(why.contains(says) && why.len() < 300, "{parameters}: {why}");
        }
        let of = |requests: Value, driver: &str| {
            let opaque = json!({"driver": driver, "parameters": {"limit": "4G"}});
            let config = json!([{"requests": requests, "source": "FromClass", "opaque": opaque}]);
            let record = Record::read(&claim(&json!([result(&json!("3G"))]), &config), "u-1", "n");
            record.unwrap().shares[0].limit
        };
        for (requests, driver, limit) in [
            (json!(null), DRIVER, Some(4_000_000_000)),
            (json!(["a"]), DRIVER, Some(4_000_000_000)),
            (json!(["x", "a/b"]), DRIVER, Some(4_000_000_000)),
            (json!(["b"]), DRIVER, None),
            (json!([]), "other.dev", None),
        ] {
            assert_eq!(of(requests.clone(), driver), limit, "{requests}");
        }
    }

    #[test]
    fn a_claim_that_makes_no_sense_is_refused_in_words() {
        let with = |change: &dyn Fn(&mut Value)| {
            let mut one = result(&json!("3G"));
            change(&mut one);
            claim(&json!([one]), &json!(null))
        };
        for (wrong, says) in [
            (with(&|it| it["pool"] = json!("m")), "no pool of this node"),
            (with(&|it| it["device"] = json!("../../etc")), "no device"),
            (with(&|it| it["shareID"] = json!("../x")), "share's id"),
            (with(&|it| it["consumedCapacity"] = json!(null)), "DRAConsumableCapacity"),
            (with(&|it| it["consumedCapacity"] = json!({"egress": "3G"})), "no ingress"),
            (with(&|it| it["consumedCapacity"]["egress"] = json!("-3G")), "negative"),
            (with(&|it| it["consumedCapacity"]["egress"] = json!({})), "no quantity"),
            (with(&|it| it["driver"] = json!("other.dev")), "no device of rocinante.dev"),
            (claim(&json!(null), &json!(null)), "no device of rocinante.dev"),
            (claim(&json!([result(&json!("3G")), result(&json!("2G"))]), &json!([])), "twice"),
        ] {
            let why = refused(&wrong);
            assert!(why.contains(says), "{why}");
        }
        let mut none = with(&|_| {});
        none.status.as_mut().unwrap().reserved_for = None;
        assert!(refused(&none).contains("reserved for no pod"));
        let why = Record::read(&with(&|_| {}), "u-2", "n").unwrap_err();
        assert!(why.contains("made anew"), "{why}");
    }

    /// Replaces each value of an object by each of these, in turn.
    fn each_field(whole: &Value, at: &str, values: &[Value], each: &mut dyn FnMut(Value)) {
        let children: Vec<String> = match whole.pointer(at) {
            Some(Value::Object(it)) => it.keys().map(|key| key.replace('/', "~1")).collect(),
            Some(Value::Array(it)) => (0..it.len()).map(|nth| nth.to_string()).collect(),
            _ => Vec::new(),
        };
        for value in values {
            let mut changed = whole.clone();
            *changed.pointer_mut(at).unwrap() = value.clone();
            each(changed);
        }
        children.iter().for_each(|child| each_field(whole, &format!("{at}/{child}"), values, each));
    }

    #[test]
    fn nonsense_in_any_field_is_refused_or_read() {
        let all = json!({"backend": "udp", "limit": "5G", "class": "gold"});
        let good = json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": "u-1"},
            "spec": {},
            "status": {
                "allocation": {"devices": {
                    "results": [result(&json!("3G"))], "config": config(&all),
                }},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p-1"}],
            },
        });
        let long = "9".repeat(10_000);
        let values = json!([null, true, -1, 1.5, "", "../x", "\u{0}", long, [], [[]], {}, {"": 7}]);
        let (mut tried, mut read) = (0, 0);
        each_field(&good, "", values.as_array().unwrap(), &mut |claim| {
            tried += 1;
            let Ok(claim) = serde_json::from_value::<Claim>(claim) else { return };
            match Record::read(&claim, "u-1", "n") {
                Ok(record) => {
                    read += 1;
                    let name = record.cdi()["devices"][0]["name"].as_str().unwrap().to_owned();
                    assert!(name.len() < 200 && !name.contains(['/', '\0']), "{name}");
                    record.command();
                }
                Err(why) => assert!(why.len() < 300, "{why}"),
            }
        });
        assert!(tried > 300 && read > 10, "{read} of {tried}");
    }
}
