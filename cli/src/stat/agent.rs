//! The figures that an agent serves over HTTP (docs/agent.md).

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rocinante_netdev::for_agent::rtnl::Queued;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{Container, Limit, Queue, QueuePair, unknown};
use crate::output::{Failure, Kind, Result};

/// Root's socket.
const DEFAULT: &str = "/run/rocinante-agent/stat.sock";
/// The longest that it may take for a part of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer: a container of 256 devices with 4,096 queue pairs each is about that.
const BYTES_MAX: u64 = 512 << 20;
/// The shortest beginning of an engine's name that names a container.
const ID_LEAST: usize = 4;

/// Where an agent answers.
#[derive(Debug, Clone)]
pub(crate) struct Place(String);

impl Default for Place {
    fn default() -> Self {
        Self(DEFAULT.to_owned())
    }
}

/// A container, as far as it is read.
#[derive(Debug, Deserialize)]
pub(super) struct Facts {
    name: String,
    id: Option<String>,
    #[serde(default)]
    class: BTreeMap<String, serde_json::Value>,
    ingress: Option<InForce>,
    egress: Option<InForce>,
    host_end_queue: Option<Queued>,
    #[serde(default)]
    rdma: BTreeMap<String, Use>,
    /// Frames that were not its own, by reason.
    #[serde(default)]
    dropped: BTreeMap<String, u64>,
    #[serde(default)]
    devices: Vec<Device>,
}

/// A rate in force.
#[derive(Debug, Deserialize)]
struct InForce {
    delayed: u64,
    dropped: u64,
    /// An agent of before does not say it.
    #[serde(default)]
    backlog: u64,
}

#[derive(Debug, Deserialize)]
struct Use {
    max: Option<u64>,
    current: u64,
}

#[derive(Debug, Deserialize)]
struct Device {
    device: String,
    open: Vec<Open>,
    counters: BTreeMap<String, u64>,
    #[serde(default)]
    queue_pairs: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Open {
    backend: String,
}

#[derive(Debug, Deserialize)]
struct Row {
    number: u32,
    peer_number: u32,
    peer: Option<IpAddr>,
    service: String,
    state: String,
    sent_bytes: u64,
    received_bytes: u64,
    repeated_packets: u32,
    receiver_not_ready: u32,
    /// An agent of before has none.
    #[serde(default)]
    sent_requests: u32,
    #[serde(default)]
    received_requests: u32,
    #[serde(default)]
    held_by_peer: u32,
    #[serde(default)]
    held_by_network: u32,
}

trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Place {
    pub(super) fn of(place: &str) -> Self {
        Self(place.to_owned())
    }

    /// Error: no agent answers there.
    pub(super) fn containers(&self) -> Result<Vec<Facts>> {
        self.get("/v1/containers")?.ok_or_else(|| self.failed("it is no agent of this release"))
    }

    /// The containers, or those that `name` means: a host's end, or else a whole id, or else the
    /// beginning of one. Error: none; or the agent does not answer.
    pub(super) fn look(&self, name: Option<&str>, qps: bool) -> Result<Vec<Container>> {
        let mut wanted = self.containers()?;
        if let Some(name) = name {
            let is_end = |it: &Facts| it.name == name;
            let has_id = |it: &Facts| it.id.as_deref() == Some(name);
            let begins = |it: &Facts| {
                name.len() >= ID_LEAST && it.id.as_ref().is_some_and(|id| id.starts_with(name))
            };
            let ways: [&dyn Fn(&Facts) -> bool; 3] = [&is_end, &has_id, &begins];
            let way = ways.into_iter().find(|way| wanted.iter().any(way));
            wanted.retain(|it| way.is_some_and(|way| way(it)));
        }
        if let (Some(name), true) = (name, wanted.is_empty()) {
            return Err(unknown(name, "`rocinante stat` lists those that the agent knows"));
        }
        if qps {
            for facts in &mut wanted {
                // It may have gone just now.
                if let Some(more) = self.get(&format!("/v1/containers/{}", facts.name))? {
                    *facts = more;
                }
            }
        }
        Ok(wanted.into_iter().map(Container::from).collect())
    }

    /// `None` if there is no such page.
    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>> {
        let (status, body) = self.ask(path).map_err(|error| self.failed(&error.to_string()))?;
        match status {
            200 => serde_json::from_slice(&body).map(Some).map_err(|e| self.failed(&e.to_string())),
            404 => Ok(None),
            status => Err(self.failed(&format!("status {status}"))),
        }
    }

    fn failed(&self, why: &str) -> Failure {
        let place = &self.0;
        let text = format!("no agent answers at {place}: {why}: see metrics in its configuration");
        Failure::Of(Kind::Connect, text)
    }

    fn ask(&self, path: &str) -> io::Result<(u16, Vec<u8>)> {
        let mut stream = self.connect()?;
        let head = format!("GET {path} HTTP/1.1\r\nhost: rocinante\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(BYTES_MAX).read_to_end(&mut answer)?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "that is no HTTP");
        let end = answer.windows(4).position(|it| it == b"\r\n\r\n").ok_or_else(invalid)?;
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        let status = head.split(' ').nth(1).and_then(|it| it.parse().ok()).ok_or_else(invalid)?;
        answer.drain(..end + 4);
        Ok((status, answer))
    }

    fn connect(&self) -> io::Result<Box<dyn Stream>> {
        if Path::new(&self.0).is_absolute() {
            let stream = UnixStream::connect(&self.0)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            return Ok(Box::new(stream));
        }
        let stream = TcpStream::connect(&self.0)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Box::new(stream))
    }
}

impl Facts {
    fn limits(&self) -> Vec<Limit> {
        let held = self.rdma.iter().filter_map(|(name, it)| {
            Some(Limit { name: name.clone(), current: Some(it.current), max: it.max? })
        });
        let ways = [("ingress_rate", &self.ingress), ("egress_rate", &self.egress)];
        let rates = ways.into_iter().filter(|(_, in_force)| in_force.is_some());
        let rates = rates.filter_map(|(name, _)| {
            let max = self.class.get(name)?.as_u64()?;
            Some(Limit { name: name.to_owned(), current: None, max })
        });
        held.chain(rates).collect()
    }

    fn queues(&self) -> Vec<Queue> {
        let queue = |name, it: &InForce| Queue {
            name,
            backlog: it.backlog,
            delayed: it.delayed as u32,
            dropped: it.dropped as u32,
        };
        let into = self.ingress.as_ref().map(|it| queue("ingress_rate", it));
        // A rate's discipline is one of those at the host's end.
        let rest = self.host_end_queue.map(Queue::of_host_end).map(|all| match &into {
            Some(rate) => Queue {
                name: all.name,
                backlog: all.backlog.saturating_sub(rate.backlog),
                delayed: all.delayed.wrapping_sub(rate.delayed),
                dropped: all.dropped.wrapping_sub(rate.dropped),
            },
            None => all,
        });
        let from = self.egress.as_ref().map(|it| queue("egress_rate", it));
        [into, from, rest].into_iter().flatten().collect()
    }
}

impl From<Facts> for Container {
    fn from(facts: Facts) -> Self {
        let (limits, queues) = (facts.limits(), facts.queues());
        let mut it = Self { name: facts.name, id: facts.id, limits, queues, ..Self::default() };
        for device in facts.devices {
            it.backends.extend(device.open.into_iter().map(|open| open.backend));
            for row in device.queue_pairs {
                let key = (device.device.clone(), row.number);
                it.queue_pairs.insert(key, row.into());
            }
            it.counters.insert(device.device, device.counters);
        }
        // Beside those of a device: a program gives its own any name.
        let forged = facts.dropped.into_iter();
        let forged = forged.map(|(reason, count)| match &*reason {
            // The container's own, and of one without a claim.
            "unclaimed" => ("drop_unclaimed".into(), count),
            _ => (format!("drop_forged_{reason}"), count),
        });
        it.counters.entry(String::new()).or_default().extend(forged);
        it
    }
}

impl From<Row> for QueuePair {
    fn from(row: Row) -> Self {
        Self {
            peer: row.peer,
            peer_number: row.peer_number,
            service: row.service,
            state: row.state,
            sent_bytes: row.sent_bytes,
            received_bytes: row.received_bytes,
            repeated: row.repeated_packets,
            not_ready: row.receiver_not_ready,
            requests: [row.sent_requests, row.received_requests],
            held: [row.held_by_peer, row.held_by_network],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also of a container with a device without a name, which has counted.
    #[test]
    fn forged_frames_are_shown_whatever_devices_are_called() {
        for device in ["eth0", ""] {
            let facts = serde_json::json!({
                "name": "veth0",
                "dropped": {"arp": 3, "ipv4": 4, "unclaimed": 6},
                "devices": [{"device": device, "open": [], "counters": {"drop_pkey": 5}}],
            });
            let facts: Facts = serde_json::from_value(facts).expect("a container");
            let counters = Container::from(facts).counters;
            let all: BTreeMap<&str, u64> =
                counters.values().flatten().map(|(name, count)| (name.as_str(), *count)).collect();
            let of_filter =
                [("drop_forged_arp", 3), ("drop_forged_ipv4", 4), ("drop_unclaimed", 6)];
            let expected = of_filter.into_iter().chain([("drop_pkey", 5)]).collect();
            assert_eq!(all, expected, "{device:?}");
        }
    }
}
