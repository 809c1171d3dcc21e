//! A claim's `status.devices`.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::{ADDRESSES_MAX, Backend, Record, Share};
use crate::dra::DRIVER;

/// A claim's status, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    pub(crate) mac: String,
    pub(crate) addresses: Vec<std::net::IpAddr>,
}

impl Network {
    fn data(&self) -> Value {
        let address =
            |it: &std::net::IpAddr| format!("{it}/{}", if it.is_ipv4() { 32 } else { 128 });
        let addresses = self.addresses.iter().take(ADDRESSES_MAX).map(address);
        json!({"hardwareAddress": self.mac, "ips": addresses.collect::<Vec<_>>()})
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

    /// The states of its shares, after those that were written before.
    pub(crate) fn states(
        &self,
        fault: impl Fn(&str) -> Option<String>,
        before: Option<&[State]>,
    ) -> Vec<State> {
        let state = |(at, share): (usize, &Share)| {
            let fault = fault(&share.device);
            let before = before.and_then(|it| it.get(at));
            let since = match before {
                Some(before) if before.fault.is_some() == fault.is_some() => before.since,
                None if fault.is_none() => self.since,
                _ => Timestamp::now(),
            };
            State { fault, since }
        };
        self.shares.iter().enumerate().map(state).collect()
    }
}
