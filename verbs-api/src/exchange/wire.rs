//! The line of JSON in which one side describes its queue pairs, and the checks of a peer's.

use std::net::IpAddr;

use rocinante_stack::Budget;
use rocinante_stack::mem::RemoteSlice;
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, QueueKind};
use serde::{Deserialize, Serialize};

use super::{Endpoint, Hello};

const VERSION: u32 = 1;
/// PSNs have 24 bits.
const PSN_MAX: u32 = 0xff_ffff;
/// QPNs have 24 bits, too; the last stands for multicast.
const QPN_MAX: u32 = 0xff_fffe;
/// The first two queue pairs are for management, never a program's.
const QPN_MIN: u32 = 2;

#[derive(Serialize, Deserialize)]
struct WireHello {
    rocinante: u32,
    endpoints: Vec<WireEndpoint>,
    regions: Vec<WireRegion>,
    note: String,
}

#[derive(Serialize, Deserialize)]
struct WireRegion {
    address: u64,
    len: u64,
    rkey: u32,
}

#[derive(Serialize, Deserialize)]
struct WireEndpoint {
    address: IpAddr,
    qpn: u32,
    psn: u32,
    mtu: u32,
    budget_bytes: u32,
    budget_datagrams: u32,
    /// [`QueueKind::name`]. Earlier versions neither write nor read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
}

/// The line for a hello.
pub(super) fn line(hello: &Hello) -> String {
    serde_json::to_string(&WireHello::from(hello)).expect("a hello is JSON")
}

/// Parses a peer's line. `own` is the address to connect to the peer's.
pub(super) fn parse(line: &str, own: Option<IpAddr>) -> Result<Hello, String> {
    let wire: WireHello = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if wire.rocinante != VERSION {
        return Err(format!("it speaks version {}, not {VERSION}", wire.rocinante));
    }
    let endpoints = wire.endpoints.into_iter().map(|endpoint| endpoint.checked(own));
    let endpoints = endpoints.collect::<Result<_, String>>()?;
    let regions = wire.regions.into_iter().map(WireRegion::checked);
    let regions = regions.collect::<Result<_, String>>()?;
    Ok(Hello { endpoints, regions, note: wire.note })
}

impl WireRegion {
    fn checked(self) -> Result<RemoteSlice, String> {
        let Self { address, len, rkey } = self;
        if address.checked_add(len).is_none() {
            return Err(format!("its region of {len} bytes at {address:#x} has no end"));
        }
        Ok(RemoteSlice { address, len, rkey: Key(rkey) })
    }
}

impl WireEndpoint {
    fn checked(self, own: Option<IpAddr>) -> Result<Endpoint, String> {
        let Self { address, qpn, psn, mtu, budget_bytes, budget_datagrams, queue } = self;
        if !(QPN_MIN..=QPN_MAX).contains(&qpn) {
            return Err(format!("{qpn} is no number of a queue pair"));
        }
        if psn > PSN_MAX {
            return Err(format!("{psn} is no PSN: those have 24 bits"));
        }
        let mtu = Mtu::from_bytes(mtu).ok_or_else(|| format!("no such path MTU: {mtu}"))?;
        let address = address.to_canonical();
        let nobodys = match address {
            IpAddr::V4(v4) => v4.is_unspecified() || v4.is_broadcast() || v4.is_multicast(),
            IpAddr::V6(v6) => v6.is_unspecified() || v6.is_multicast(),
        };
        if nobodys {
            return Err(format!("{address} is no host's address"));
        }
        if own.is_some_and(|own| own.is_ipv4() != address.is_ipv4()) {
            return Err(format!(
                "its address {address} and this side's are of two families: give both IPv4, or both IPv6"
            ));
        }
        let budget = Budget { bytes: budget_bytes, datagrams: budget_datagrams };
        // A kind that a later version has is as good as none.
        let queue = queue.and_then(|name| QueueKind::from_name(&name));
        let endpoint = Endpoint::new(address, Qpn::new(qpn), Psn::new(psn), mtu);
        Ok(endpoint.budget(budget).queue(queue))
    }
}

impl From<&Hello> for WireHello {
    fn from(hello: &Hello) -> Self {
        let endpoints = hello.endpoints.iter().map(|endpoint| WireEndpoint {
            address: endpoint.address,
            qpn: endpoint.qpn.value(),
            psn: endpoint.psn.value(),
            mtu: endpoint.mtu.bytes(),
            budget_bytes: endpoint.budget.bytes,
            budget_datagrams: endpoint.budget.datagrams,
            queue: endpoint.queue.map(|kind| kind.name().to_owned()),
        });
        let regions = hello.regions.iter().map(|region| WireRegion {
            address: region.address,
            len: region.len,
            rkey: region.rkey.0,
        });
        Self {
            rocinante: VERSION,
            endpoints: endpoints.collect(),
            regions: regions.collect(),
            note: hello.note.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const OWN: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)));

    fn hello() -> Hello {
        let (qpn, psn) = (Qpn::new(0xff_fffe), Psn::new(0xff_ffff));
        let endpoint = Endpoint::new([10, 0, 0, 2].into(), qpn, psn, Mtu::Mtu2048)
            .budget(Budget { bytes: 7, datagrams: 3 })
            .queue(Some(QueueKind::Places));
        let region = RemoteSlice { address: 4096, len: 64, rkey: Key(u32::MAX) };
        Hello { endpoints: vec![endpoint], regions: vec![region], note: "\u{1b}".into() }
    }

    #[test]
    fn what_is_said_is_heard() {
        assert_eq!(parse(&line(&hello()), OWN), Ok(hello()));
        assert_eq!(parse(&line(&hello()), None), Ok(hello()));
    }

    /// The line with one field of an endpoint or a region replaced.
    fn spoiled(field: &str, value: Value) -> Result<Hello, String> {
        let mut said: Value = serde_json::from_str(&line(&hello())).unwrap();
        let place = if said["regions"][0].get(field).is_some() && field != "address" {
            &mut said["regions"][0]
        } else {
            &mut said["endpoints"][0]
        };
        place[field] = value;
        parse(&said.to_string(), OWN)
    }

    #[test]
    fn what_nothing_can_be_connected_to_is_refused() {
        for (field, value, word) in [
            ("qpn", json!(0), "no number"),
            ("qpn", json!(1), "no number"),
            ("qpn", json!(0xff_ffff), "no number"),
            ("qpn", json!(0x0100_0000), "no number"),
            ("qpn", json!(u64::MAX), "invalid value"),
            ("qpn", json!(-1), "invalid value"),
            ("psn", json!(0x0100_0000), "24 bits"),
            ("psn", json!(u32::MAX), "24 bits"),
            ("mtu", json!(0), "no such path MTU: 0"),
            ("mtu", json!(9), "no such path MTU: 9"),
            ("mtu", json!(999), "no such path MTU: 999"),
            ("address", json!("0.0.0.0"), "no host's"),
            ("address", json!("255.255.255.255"), "no host's"),
            ("address", json!("239.1.2.3"), "no host's"),
            ("address", json!("::"), "no host's"),
            ("address", json!("ff02::1"), "no host's"),
            ("address", json!("fd00::2"), "two families"),
            ("address", json!("10.0.0.256"), "invalid"),
            ("len", json!(u64::MAX), "no end"),
            ("rkey", json!(1u64 << 32), "invalid value"),
            ("budget_bytes", json!(null), "invalid type"),
        ] {
            let why = spoiled(field, value.clone()).unwrap_err();
            assert!(why.contains(word), "{field} {value}: no {word:?} in: {why}");
        }
        let mapped = spoiled("address", json!("::ffff:10.0.0.2")).unwrap();
        assert_eq!(mapped, hello(), "IPv4 in IPv6 is IPv4");
    }

    /// A line of a version that knew no kind of queue, and one of a version that knows more.
    #[test]
    fn a_kind_that_is_missing_or_unknown_is_none() {
        let of = |queue| {
            let mut hello = hello();
            hello.endpoints[0].queue = queue;
            hello
        };
        let earlier = r#"{"rocinante":1,"endpoints":[{"address":"10.0.0.2","qpn":16777214,
            "psn":16777215,"mtu":2048,"budget_bytes":7,"budget_datagrams":3}],
            "regions":[{"address":4096,"len":64,"rkey":4294967295}],"note":"\u001b"}"#;
        assert_eq!(parse(earlier, OWN), Ok(of(None)));
        assert!(!line(&of(None)).contains("queue"));
        for queue in QueueKind::ALL {
            assert_eq!(parse(&line(&of(Some(queue))), OWN), Ok(of(Some(queue))));
        }
        assert_eq!(spoiled("queue", json!("stack")), Ok(of(None)));
        assert!(spoiled("queue", json!(3)).is_err());
    }

    #[test]
    fn other_versions_and_strangers_are_told_apart() {
        let other = line(&hello()).replace("\"rocinante\":1", "\"rocinante\":2");
        assert!(parse(&other, OWN).unwrap_err().contains("version 2, not 1"));
        for stranger in ["", "{}", "[]", "SSH-2.0-OpenSSH", "null", &"[".repeat(100_000)] {
            assert!(parse(stranger, OWN).is_err(), "{stranger}");
        }
    }

    #[test]
    fn any_damage_is_read_or_refused() {
        let good = line(&hello());
        for at in 0..good.len() {
            for byte in ["", "\"", "0", "9", "-", "e", "{", "]", ",", "\u{0}", "\u{7fff}"] {
                let text = [&good[..at], byte, &good[at + 1..]].concat();
                if let Ok(hello) = parse(&text, OWN) {
                    assert!(hello.endpoints.iter().all(|end| end.qpn.value() >= QPN_MIN), "{text}");
                }
            }
        }
    }
}
