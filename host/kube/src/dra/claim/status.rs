//! A claim's `status.devices`.

use std::net::IpAddr;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

use super::{ADDRESSES_MAX, Backend, Claim, Record, Share};
use crate::dra::DRIVER;

/// A claim's status, as it is written. Without states there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) network: Option<Network>,
    /// Of each share.
    pub(crate) states: Vec<State>,
}

/// The state of a share since a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    fault: Option<String>,
    since: Timestamp,
}

/// The interface of a pod, as the agent knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Network {
    mac: String,
    addresses: Vec<IpAddr>,
}

impl Network {
    pub(crate) fn new(mac: String, mut addresses: Vec<IpAddr>) -> Self {
        addresses.truncate(ADDRESSES_MAX);
        Self { mac, addresses }
    }

    fn data(&self) -> Value {
        let address = |it: &IpAddr| format!("{it}/{}", if it.is_ipv4() { 32 } else { 128 });
        let addresses = self.addresses.iter().map(address);
        json!({"hardwareAddress": self.mac, "ips": addresses.collect::<Vec<_>>()})
    }

    fn read(data: &Value) -> Option<Self> {
        let address = |it: &Value| it.as_str()?.split('/').next()?.parse().ok();
        let addresses = data["ips"].as_array().into_iter().flatten().filter_map(address);
        Some(Self::new(data["hardwareAddress"].as_str()?.to_owned(), addresses.collect()))
    }
}

impl State {
    pub(crate) fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    fn read(entry: &Value) -> Option<Self> {
        let ready = entry["conditions"].as_array()?.iter().find(|it| it["type"] == "Ready")?;
        let fault = match ready["status"].as_str()? {
            "True" => None,
            _ => Some(ready["message"].as_str()?.to_owned()),
        };
        Some(Self { fault, since: ready["lastTransitionTime"].as_str()?.parse().ok()? })
    }
}

impl Record {
    /// The entries of `status.devices`, with the network of a pod if it is known.
    pub(crate) fn status(&self, word: &Word) -> Value {
        let message = match self.parameters.backend {
            Some(Backend::Packet | Backend::Afxdp) => "the rate is reserved on the uplink",
            _ => "the rate is reserved on the uplink; the backend may be udp",
        };
        let entry = |(it, State { fault, since }): (&Share, &State)| {
            let mut entry = Map::new();
            for (key, value) in [("driver", DRIVER), ("pool", &it.pool), ("device", &it.device)] {
                entry.insert(key.into(), value.into());
            }
            entry.extend(it.share_id.iter().map(|id| ("shareID".into(), json!(id))));
            entry.extend(word.network.iter().map(|it| ("networkData".into(), it.data())));
            let (status, reason, message) = match fault {
                None => ("True", "Reserved", message),
                Some(why) => ("False", "Faulty", &**why),
            };
            let ready = json!({
                "type": "Ready",
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": format!("{since:.0}"),
            });
            entry.insert("conditions".into(), json!([ready]));
            Value::Object(entry)
        };
        self.shares.iter().zip(&word.states).map(entry).collect()
    }

    /// The status that a driver has written, if the API's claim has it of each share.
    pub(crate) fn written(&self, claim: &Claim) -> Option<Word> {
        let all = claim.status.as_ref()?.devices.as_ref()?.as_array()?;
        let is_its = |entry: &Value, it: &Share| {
            let keys = [("driver", DRIVER), ("pool", &it.pool), ("device", &it.device)];
            keys.iter().all(|(key, value)| entry[key] == *value)
                && entry["shareID"].as_str() == it.share_id.as_deref()
        };
        let entry = |it: &Share| all.iter().find(|entry| is_its(entry, it));
        let states = self.shares.iter().map(|it| State::read(entry(it)?));
        let states =
            states.collect::<Option<_>>().filter(|_| claim.uid().as_ref() == Some(&self.uid))?;
        let network = self.shares.first().and_then(|it| Network::read(&entry(it)?["networkData"]));
        Some(Word { network, states })
    }

    /// The states of its shares, after those that were written before.
    pub(crate) fn states(
        &self,
        fault: impl Fn(&str) -> Option<String>,
        before: &[State],
    ) -> Vec<State> {
        let state = |(at, share): (usize, &Share)| {
            let fault = fault(&share.device);
            let same = before.get(at).filter(|it| it.fault.is_some() == fault.is_some());
            State { fault, since: same.map_or_else(Timestamp::now, |it| it.since) }
        };
        self.shares.iter().enumerate().map(state).collect()
    }
}
