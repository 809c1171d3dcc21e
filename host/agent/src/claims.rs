//! Claims of pods: reserved parts of uplinks. A driver of Kubernetes has them from the scheduler.
//!
//! A claim is there before its pods have a network. A container is of a pod if its engine says so
//! (`pod` of [`About`](crate::control::About)).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::class::{Handed, Subject};
use crate::config::Config;
use crate::control::{CALLED_MAX, UplinkStatus};
use crate::host::{Rates, Sources};
use crate::rate::Rate;

/// The most claims of a host, the most pods of one, and the most shares.
const CLAIMS_MAX: usize = 4096;
const PODS_MAX: usize = 256;
const SHARES_MAX: usize = 64;

/// A claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Claim {
    pub(crate) uid: String,
    /// The UIDs of the pods that share it.
    pub(crate) pods: BTreeSet<String>,
    pub(crate) shares: Vec<Part>,
    /// The class of its containers whose engine names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) class: Option<String>,
    /// The backend that they need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<Handed>,
}

/// A part of an uplink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    pub(crate) uplink: String,
    /// The rate that is reserved.
    pub(crate) rate: Rate,
    /// The most that the pods get.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ceil: Option<Rate>,
}

/// The terms of a pod's claims, for each of its containers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claimed {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) class: Option<String>,
    /// The most that leaves it, by all uplinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<Rate>,
}

impl Claimed {
    pub(crate) fn rates(&self) -> Rates {
        Rates { egress: self.limit, ..Rates::default() }
    }

    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Claim {
    fn on<'a>(&'a self, uplink: &'a str) -> impl Iterator<Item = &'a Part> {
        self.shares.iter().filter(move |part| part.uplink == uplink)
    }

    /// Its share of an uplink.
    pub(crate) fn rate(&self, uplink: &str) -> Option<Rate> {
        Rate::sum(self.on(uplink).map(|part| part.rate))
    }

    /// The most that its pods get there, if there is one.
    pub(crate) fn ceil(&self, uplink: &str) -> Option<Rate> {
        let all: Option<Vec<Rate>> = self.on(uplink).map(|part| part.ceil).collect();
        Rate::sum(all?)
    }

    fn check(&self, config: &Config) -> Result<(), String> {
        let is_uid = |uid: &String| (1..=CALLED_MAX).contains(&uid.len());
        if !is_uid(&self.uid) || !self.pods.iter().all(is_uid) {
            return Err("a UID has 1 to 1024 bytes".into());
        }
        if self.pods.is_empty() || self.pods.len() > PODS_MAX {
            return Err(format!("a claim is of 1 to {PODS_MAX} pods"));
        }
        if self.shares.is_empty() || self.shares.len() > SHARES_MAX {
            return Err(format!("a claim has 1 to {SHARES_MAX} shares"));
        }
        if let Some(part) = self.shares.iter().find(|it| it.ceil.is_some_and(|c| c < it.rate)) {
            let Part { uplink, rate, .. } = part;
            return Err(format!("the limit of {uplink} is less than the reserved {rate}"));
        }
        let addresses = &Sources::default().addresses;
        let class = self.class.as_deref();
        let rates = Rates::default();
        let of = Subject { end: "", id: None, engine: None, addresses, class, rates };
        let bounds = config.bounds(&of).map_err(|refused| refused.reason)?;
        match self.backend {
            Some(backend) if !bounds.hands(backend) => Err(format!(
                "the class {:?} does not hand over the claim's backend: see backends in agent.toml",
                bounds.class
            )),
            _ => Ok(()),
        }
    }
}

/// The claims of the host, by their UIDs.
#[derive(Debug, Default)]
pub(crate) struct Claims(pub(crate) BTreeMap<String, Claim>);

impl Claims {
    /// Those of a pod.
    pub(crate) fn of<'a>(&'a self, pod: Option<&'a str>) -> impl Iterator<Item = &'a Claim> {
        self.0.values().filter(move |claim| pod.is_some_and(|pod| claim.pods.contains(pod)))
    }

    pub(crate) fn claimed(&self, pod: Option<&str>) -> Claimed {
        let parts = || self.of(pod).flat_map(|claim| &claim.shares);
        let limits: Option<Vec<Rate>> = parts().map(|part| part.ceil).collect();
        let class = self.of(pod).find_map(|claim| claim.class.clone());
        Claimed { class, limit: limits.and_then(Rate::sum) }
    }

    /// Takes a claim, in place of an earlier one of its UID. Error: the reason why not.
    pub(crate) fn take(
        &mut self,
        claim: &Claim,
        config: &Config,
        uplinks: &[UplinkStatus],
    ) -> Result<(), String> {
        let before = self.0.get(&claim.uid);
        // Its pods run, whatever the configuration is by now.
        if before == Some(claim) {
            return Ok(());
        }
        claim.check(config)?;
        if before.is_none() && self.0.len() == CLAIMS_MAX {
            return Err(format!("the host has {CLAIMS_MAX} claims"));
        }
        let others = || self.0.values().filter(|it| it.uid != claim.uid);
        for it in others().filter(|it| !it.pods.is_disjoint(&claim.pods)) {
            if let (Some(class), Some(own)) = (&it.class, &claim.class)
                && class != own
            {
                return Err(format!("a pod has one class, and by another claim {class:?}"));
            }
            if let (Some(backend), Some(own)) = (it.backend, claim.backend)
                && backend != own
            {
                return Err(format!("a pod has one backend, and by another claim {backend:?}"));
            }
        }
        for Part { uplink, .. } in &claim.shares {
            let Some(status) = uplinks.iter().find(|it| it.interface == *uplink) else {
                return Err(format!("{uplink} is no [[uplink]] of agent.toml"));
            };
            // One that was taken stays, also when its uplink has less now: its pods run.
            if before.is_some_and(|it| it.shares == claim.shares) {
                continue;
            }
            if let Some(fault) = &status.fault {
                return Err(format!("{uplink} is not shared: {fault}"));
            }
            let all = others().chain([claim]).filter_map(|it| it.rate(uplink));
            let sum = Rate::sum(all).unwrap_or(status.rate);
            if sum > status.rate {
                let has = status.rate;
                return Err(format!("{uplink} has {has}, and with this claim {sum} are reserved"));
            }
        }
        self.0.insert(claim.uid.clone(), claim.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(uid: &str, pods: &[&str], shares: &serde_json::Value) -> Claim {
        serde_json::from_value(json!({"uid": uid, "pods": pods, "shares": shares})).expect("one")
    }

    #[test]
    fn no_more_is_reserved_than_there_is() {
        let config: Config =
            toml::from_str("[[class]]\nname = \"gold\"\nbackends = [\"packet\"]\n").expect("one");
        let uplink = |rate: &str, fault: Option<&str>| UplinkStatus {
            interface: "up".into(),
            rate: rate.parse().expect("a rate"),
            fault: fault.map(str::to_owned),
        };
        let share = |rate: u64| json!([{"uplink": "up", "rate": rate * 1_000_000_000}]);
        let (mut claims, ten) = (Claims::default(), [uplink("10gbit", None)]);
        let six = claim("six", &["p"], &share(6));
        assert_eq!(claims.take(&six, &config, &ten), Ok(()));
        assert_eq!(claims.take(&six, &config, &ten), Ok(()), "again");
        assert_eq!(claims.take(&claim("four", &["q"], &share(4)), &config, &ten), Ok(()));
        let one = claim("one", &["r"], &share(1));
        let why = claims.take(&one, &config, &ten).expect_err("more than there is");
        assert!(why.contains("up has 10gbit") && why.contains("11gbit"), "{why}");
        // A claim that was taken stays on an uplink that shrank or is down. No other is taken.
        for less in [[uplink("5gbit", None)], [uplink("10gbit", Some("down"))]] {
            assert_eq!(claims.take(&six, &config, &less), Ok(()));
            assert!(claims.take(&one, &config, &less).is_err());
        }
        claims.0.remove("four");
        assert_eq!(claims.take(&one, &config, &ten), Ok(()));
        for (wrong, says) in [
            (claim("", &["p"], &share(1)), "UID"),
            (claim("c", &[], &share(1)), "pods"),
            (claim("c", &["p"], &json!([])), "shares"),
            (claim("c", &["p"], &json!([{"uplink": "ens9", "rate": 1_000_000}])), "ens9"),
            (Claim { class: Some("none".into()), ..claim("c", &["p"], &share(1)) }, "none"),
            (
                Claim {
                    class: Some("gold".into()),
                    backend: Some(Handed::Afxdp),
                    ..claim("c", &["p"], &share(1))
                },
                "backend",
            ),
            (
                claim(
                    "c",
                    &["p"],
                    &json!([{"uplink": "up", "rate": 2_000_000, "ceil": 1_000_000}]),
                ),
                "limit",
            ),
        ] {
            let why = claims.take(&wrong, &config, &ten).expect_err(says);
            assert!(why.contains(says), "{why}");
        }
        let gold = |uid| Claim { class: Some("gold".into()), ..claim(uid, &["p"], &share(1)) };
        assert_eq!(claims.take(&gold("gold"), &config, &ten), Ok(()));
        let other = Claim { class: Some("default".into()), ..gold("other") };
        let why = claims.take(&other, &config, &ten).expect_err("two classes");
        assert!(why.contains("gold"), "{why}");
        let backend = |uid, backend| Claim { backend: Some(backend), ..gold(uid) };
        assert_eq!(claims.take(&backend("packet", Handed::Packet), &config, &ten), Ok(()));
        assert_eq!(claims.take(&backend("packet-2", Handed::Packet), &config, &ten), Ok(()));
        let both: Config = toml::from_str("[[class]]\nname = \"gold\"\n").expect("one");
        let why = claims.take(&backend("afxdp", Handed::Afxdp), &both, &ten).expect_err("two");
        assert!(why.contains("one backend"), "{why}");
        // One that was taken stays when its class has gone from the configuration.
        let none = Config::default();
        assert_eq!(claims.take(&gold("gold"), &none, &ten), Ok(()));
        assert!(claims.take(&gold("late"), &none, &ten).is_err());
    }

    #[test]
    fn a_pod_has_a_limit_if_each_of_its_shares_has_one() {
        let mut claims = Claims::default();
        let share = |ceil: Option<u64>| json!({"uplink": "up", "rate": 1_000_000, "ceil": ceil});
        for (uid, pods, shares) in [
            ("a", &["p", "q"][..], json!([share(Some(2_000_000)), share(Some(3_000_000))])),
            ("b", &["q", "r"], json!([share(Some(4_000_000))])),
            ("c", &["r"], json!([share(None)])),
        ] {
            claims.0.insert(uid.into(), claim(uid, pods, &shares));
        }
        let limit = |pod| claims.claimed(pod).rates().egress.map(Rate::bytes);
        assert_eq!(limit(Some("p")), Some(5_000_000 / 8));
        assert_eq!(limit(Some("q")), Some(9_000_000 / 8));
        assert_eq!([limit(Some("r")), limit(Some("s")), limit(None)], [None; 3]);
    }
}
