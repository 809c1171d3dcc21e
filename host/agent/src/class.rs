//! Classes of containers: which limits bind which container.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use rocinante_netdev::Backend;
use rocinante_netdev::handed::{Code, Refused};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::host::Rates;
use crate::quota::{RdmaExceeded, RdmaMax};
use crate::rate::Rate;

/// The class of the containers that are in no other.
pub(crate) const DEFAULT: &str = "default";
/// The longest name.
const NAME_MAX: usize = 64;
/// The same of an interface.
const INTERFACE_MAX: usize = 15;

/// A table `[[class]]` of the configuration: a name, the containers, and their limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Class {
    /// Its name. `default` is for the containers that are in no other.
    pub name: String,
    /// Names of containers: of the host's end, or the engine's. `*` stands for any text.
    pub containers: Vec<String>,
    /// Names of engines, likewise.
    pub engines: Vec<String>,
    /// Prefixes of addresses.
    pub networks: Vec<IpNet>,
    /// The backends that the containers get; without it, each.
    pub backends: Option<Vec<Handed>>,
    /// In place of the option of this name.
    pub ports_max: Option<usize>,
    /// Likewise.
    pub ring_mib_max: Option<usize>,
    /// Likewise.
    pub ring_frames_max: Option<u32>,
    /// Likewise.
    pub requests_per_second: Option<u32>,
    /// The rate into a container, by each of its interfaces.
    pub ingress_rate: Option<Rate>,
    /// The rate out of it, likewise.
    pub egress_rate: Option<Rate>,
    /// The rate that is reserved for each container on each uplink.
    pub uplink_rate: Option<Rate>,
    /// The most that it gets of an uplink.
    pub uplink_ceil: Option<Rate>,
    /// What its programs may hold together. They keep it themselves.
    pub rdma_max: RdmaMax,
    /// The answer if they do not.
    pub rdma_exceeded: RdmaExceeded,
}

/// A table `[[uplink]]` of the configuration: a link that leaves the host, which containers share.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uplink {
    /// Its name.
    pub interface: String,
    /// The rate of all frames that leave by it.
    pub rate: Rate,
}

/// A backend that an agent hands over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Handed {
    /// `packet`.
    Packet,
    /// `afxdp`.
    Afxdp,
}

/// The facts about a container that decide its class.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    /// The name of its end on the host.
    pub(crate) end: &'a str,
    /// The engine's name for it, and the engine.
    pub(crate) id: Option<&'a str>,
    pub(crate) engine: Option<&'a str>,
    /// The addresses that may leave.
    pub(crate) addresses: &'a BTreeSet<IpAddr>,
    /// The class that its engine named.
    pub(crate) class: Option<&'a str>,
    /// Rates of its own, from its engine.
    pub(crate) rates: Rates,
}

/// The limits of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bounds {
    /// The name of its class.
    #[serde(rename = "name")]
    pub(crate) class: String,
    /// Without it, each.
    #[serde(skip_serializing_if = "Option::is_none")]
    backends: Option<Vec<Handed>>,
    pub(crate) ports_max: usize,
    pub(crate) ring_mib_max: usize,
    pub(crate) ring_frames_max: u32,
    pub(crate) requests_per_second: u32,
    #[serde(flatten)]
    pub(crate) rates: Rates,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uplink_rate: Option<Rate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uplink_ceil: Option<Rate>,
    #[serde(default, skip_serializing_if = "RdmaMax::is_none")]
    pub(crate) rdma_max: RdmaMax,
    #[serde(default, skip_serializing_if = "RdmaExceeded::is_report")]
    pub(crate) rdma_exceeded: RdmaExceeded,
}

impl Bounds {
    /// Whether the container gets ports of this backend.
    pub(crate) fn has(&self, backend: Backend) -> bool {
        let handed = match backend {
            Backend::Packet => Handed::Packet,
            Backend::Xdp => Handed::Afxdp,
            _ => return false,
        };
        self.hands(handed)
    }

    /// Likewise.
    pub(crate) fn hands(&self, backend: Handed) -> bool {
        self.backends.as_ref().is_none_or(|all| all.contains(&backend))
    }
}

impl Config {
    /// The limits of a container: of the class that its engine named, else of the first class that
    /// it matches, else of the class `default`.
    ///
    /// # Errors
    /// Its engine named a class that is not there.
    pub(crate) fn bounds(&self, of: &Subject<'_>) -> Result<Bounds, Refused> {
        let named = |name: &str| self.classes.iter().find(|class| class.name == name);
        let class = match of.class {
            Some(DEFAULT) => named(DEFAULT),
            Some(name) => Some(named(name).ok_or_else(|| {
                let reason = format!("the class {name:?} of the container is not configured");
                Refused::new(Code::Forbidden, reason, "see [[class]] in agent.toml")
            })?),
            None => self.classes.iter().find(|it| it.matches(of)).or_else(|| named(DEFAULT)),
        };
        let none = Class::default();
        let it = class.unwrap_or(&none);
        Ok(Bounds {
            class: class.map_or(DEFAULT, |class| &class.name).to_owned(),
            backends: it.backends.clone(),
            ports_max: it.ports_max.unwrap_or(self.ports_max),
            ring_mib_max: it.ring_mib_max.unwrap_or(self.ring_mib_max),
            ring_frames_max: it.ring_frames_max.unwrap_or(self.ring_frames_max),
            requests_per_second: it.requests_per_second.unwrap_or(self.requests_per_second),
            rates: it.rates().least(of.rates),
            uplink_rate: it.uplink_rate,
            uplink_ceil: it.uplink_ceil,
            rdma_max: it.rdma_max,
            rdma_exceeded: it.rdma_exceeded,
        })
    }

    /// The first fault of the classes.
    pub(crate) fn check_classes(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        for class in &self.classes {
            if !names.insert(&class.name) {
                return Err(format!("two classes are called {:?}", class.name));
            }
            class.check().map_err(|why| format!("class {:?}: {why}", class.name))?;
        }
        let mut names = BTreeSet::new();
        for Uplink { interface, rate } in &self.uplinks {
            if interface.is_empty() || interface.len() > INTERFACE_MAX {
                return Err(format!("uplink {interface:?}: an interface has 1 to 15 bytes"));
            }
            if !names.insert(interface) {
                return Err(format!("two uplinks are {interface:?}"));
            }
            let more = |class: &&Class| class.uplink_rate.is_some_and(|it| it > *rate);
            if let Some(Class { name, .. }) = self.classes.iter().find(more) {
                return Err(format!("class {name:?}: uplink_rate is more than {interface:?} has"));
            }
        }
        Ok(())
    }
}

impl Class {
    fn rates(&self) -> Rates {
        Rates { ingress: self.ingress_rate, egress: self.egress_rate, ..Rates::default() }
    }

    fn has_matches(&self) -> bool {
        let Self { containers, engines, networks, .. } = self;
        !(containers.is_empty() && engines.is_empty() && networks.is_empty())
    }

    /// Whether a container has one of the names, one of the engines and one of the addresses, as
    /// far as the class asks for each. A class that asks for nothing is one that engines name.
    fn matches(&self, of: &Subject<'_>) -> bool {
        let fit = |all: &[String], name: &str| all.iter().any(|pattern| fits(pattern, name));
        let is_called =
            fit(&self.containers, of.end) || of.id.is_some_and(|id| fit(&self.containers, id));
        let has_engine = of.engine.is_some_and(|engine| fit(&self.engines, engine));
        let has_address =
            of.addresses.iter().any(|it| self.networks.iter().any(|n| n.contains(it)));
        self.has_matches()
            && (self.containers.is_empty() || is_called)
            && (self.engines.is_empty() || has_engine)
            && (self.networks.is_empty() || has_address)
    }

    fn check(&self) -> Result<(), &'static str> {
        let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.name.is_empty() || self.name.len() > NAME_MAX || !self.name.chars().all(is_word) {
            return Err("a name has 1 to 64 letters, digits, '.', '_' and '-'");
        }
        if self.name == DEFAULT && self.has_matches() {
            return Err("it is for all that are in no other, and matches nothing itself");
        }
        match self {
            Self { backends: Some(none), .. } if none.is_empty() => {
                Err("backends has at least one, else the containers get no port")
            }
            Self { ports_max: Some(0), .. } => Err("ports_max is at least 1"),
            Self { ring_mib_max: Some(0), .. } => Err("ring_mib_max is at least 1"),
            Self { ring_frames_max: Some(0), .. } => Err("ring_frames_max is at least 1"),
            Self { requests_per_second: Some(0), .. } => Err("requests_per_second is at least 1"),
            Self { uplink_rate: None, uplink_ceil: Some(_), .. } => {
                Err("uplink_ceil has an uplink_rate beside it")
            }
            Self { uplink_rate: Some(rate), uplink_ceil: Some(ceil), .. } if rate > ceil => {
                Err("uplink_ceil is uplink_rate at least")
            }
            _ => Ok(()),
        }
    }
}

/// Whether a name is that of the pattern, in which `*` stands for any text.
fn fits(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        toml::from_str(text).expect("a configuration")
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, fitting, others) in [
            ("veth0", &["veth0"][..], &["veth00", "veth", ""][..]),
            ("veth*", &["veth", "veth0"], &["eth", "aveth"]),
            ("*-db", &["-db", "a-db", "-db-db"], &["a-dbx"]),
            ("a*b*c", &["abc", "a1b2c", "abbcc"], &["acb", "ac", "abcd"]),
            ("*", &["", "x"], &[]),
            ("**x", &["x", "yx"], &["xy"]),
            ("a*a", &["aa", "aba"], &["a"]),
        ] {
            fitting.iter().for_each(|name| assert!(fits(pattern, name), "{pattern} {name}"));
            others.iter().for_each(|name| assert!(!fits(pattern, name), "{pattern} {name}"));
        }
    }

    #[test]
    fn the_first_class_that_matches_is_the_containers() {
        let config = config(
            r#"
            ports_max = 7
            [[class]]
            name = "alone"
            ports_max = 1
            [[class]]
            name = "pod"
            containers = ["c0ffee*"]
            engines = ["libpod", "cri*"]
            [[class]]
            name = "net"
            networks = ["10.88.0.0/16", "fd00::/8"]
            ring_mib_max = 3
            [[class]]
            name = "default"
            ports_max = 2
            "#,
        );
        let v4: BTreeSet<IpAddr> = ["10.88.7.1".parse().expect("an address")].into();
        let v6: BTreeSet<IpAddr> = ["fe80::1", "fd00::1"].map(|a| a.parse().expect("one")).into();
        let other: BTreeSet<IpAddr> = ["10.89.0.1".parse().expect("an address")].into();
        let of = |id, engine, addresses, class| {
            let (end, rates) = ("veth0", Rates::default());
            let bounds = config.bounds(&Subject { end, id, engine, addresses, class, rates });
            bounds.map(|it| (it.class, it.ports_max, it.ring_mib_max))
        };
        let is = |class: &str, ports, mib| Ok((class.to_owned(), ports, mib));
        assert_eq!(of(None, None, &v4, None), is("net", 7, 3));
        assert_eq!(of(None, None, &v6, None), is("net", 7, 3));
        assert_eq!(of(None, None, &other, None), is("default", 2, 512));
        let id = Some("c0ffee17");
        assert_eq!(of(id, Some("crio"), &v4, None), is("pod", 7, 512), "it stands first");
        assert_eq!(of(id, Some("docker"), &other, None), is("default", 2, 512), "both are asked");
        assert_eq!(of(id, None, &v4, None), is("net", 7, 3), "the engine is not known");
        assert_eq!(of(id, Some("libpod"), &v4, Some("alone")), is("alone", 1, 512));
        assert_eq!(of(None, None, &v4, Some("default")), is("default", 2, 512));
        let refused = of(None, None, &v4, Some("gold")).expect_err("there is none");
        assert!(refused.reason.contains("\"gold\""), "{refused}");
        // Without a class `default` there are the options alone.
        let bounds = Config::default().bounds(&Subject {
            end: "veth0",
            id: None,
            engine: None,
            addresses: &v4,
            class: Some("default"),
            rates: Rates::default(),
        });
        assert_eq!(bounds.expect("it is there").ports_max, 64);
    }
}
