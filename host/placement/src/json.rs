//! The JSON of annotations: demands as Link et al. have them, and our own uplinks and places.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::{INTERFACES_MAX, Interface, Placed, Rates, UPLINKS_MAX, Uplink};

/// Bits per second of a megabit per second.
const MEGA: u64 = 1_000_000;
/// The longest name of an interface, as the kernel has it (`IFNAMSIZ` without the final zero).
const NAME_MAX: usize = 15;

/// JSON that is not understood, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

/// An interface in the annotation `rdma_interfaces_required`, in Mb/s: `min_tx_rate` and
/// `max_tx_rate` as `RdmaInterfaceRequest` of rit-k8s-rdma-common has them, where 0 is no limit,
/// and for the way in `min_rx_rate`, which is ours. Other keys are passed over, as Go does.
#[derive(Deserialize)]
struct Required {
    #[serde(default)]
    min_tx_rate: u64,
    #[serde(default)]
    max_tx_rate: u64,
    #[serde(default)]
    min_rx_rate: u64,
}

impl Required {
    fn interface(&self) -> Result<Interface, Malformed> {
        let bits = |key, rate: u64| {
            let many = || Malformed(format!("{key} {rate} is no rate in Mb/s: it is too great"));
            rate.checked_mul(MEGA).ok_or_else(many)
        };
        let min = Rates {
            egress: bits("min_tx_rate", self.min_tx_rate)?,
            ingress: bits("min_rx_rate", self.min_rx_rate)?,
        };
        let max = match self.max_tx_rate {
            0 => None,
            rate => Some(bits("max_tx_rate", rate)?),
        };
        match max {
            Some(max) if max < min.egress => Err(Malformed(format!(
                "max_tx_rate {} is less than min_tx_rate {}",
                self.max_tx_rate, self.min_tx_rate
            ))),
            max => Ok(Interface { min, max }),
        }
    }
}

/// The interfaces that an annotation `rdma_interfaces_required` asks for. An empty text asks for
/// none.
///
/// # Errors
/// It is no list of objects with rates in Mb/s, has more than [`INTERFACES_MAX`], a rate that no
/// `u64` of bits per second holds, or a `max_tx_rate` below its `min_tx_rate`.
pub fn demand(text: &str) -> Result<Vec<Interface>, Malformed> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    bounded::<Required, INTERFACES_MAX>(text)?.iter().map(Required::interface).collect()
}

/// The uplinks of a node's annotation: `[{"name":"ens1","egress":10000000000,"ingress":…},…]`.
/// Rates are in bits per second.
///
/// # Errors
/// It is no such list, has more than [`UPLINKS_MAX`], or a name twice or of no interface.
pub fn uplinks(text: &str) -> Result<Vec<Uplink>, Malformed> {
    let uplinks = bounded::<Uplink, UPLINKS_MAX>(text)?;
    for (at, uplink) in uplinks.iter().enumerate() {
        if uplink.name.is_empty() || uplink.name.len() > NAME_MAX {
            return Err(Malformed(format!("{:?} is no name of an interface", uplink.name)));
        }
        if uplinks[..at].iter().any(|it| it.name == uplink.name) {
            return Err(Malformed(format!("{:?} is there twice", uplink.name)));
        }
    }
    Ok(uplinks)
}

/// The places in the annotation of a bound pod:
/// `[{"uplink":"ens1","egress":3000000000,"ingress":0,"max":5000000000},…]`, in bits per second.
///
/// # Errors
/// It is no such list, or has more than [`INTERFACES_MAX`].
pub fn placed(text: &str) -> Result<Vec<Placed>, Malformed> {
    bounded::<Placed, INTERFACES_MAX>(text)
}

/// The text that [`uplinks`] or [`placed`] reads.
///
/// # Errors
/// None for [`Uplink`] and [`Placed`]: serde's signature has one.
pub fn to_json<T: Serialize>(values: &[T]) -> Result<String, Malformed> {
    serde_json::to_string(values).map_err(|error| Malformed(error.to_string()))
}

/// A list of at most `MAX` values: reading ends at the first one more.
fn bounded<T: DeserializeOwned, const MAX: usize>(text: &str) -> Result<Vec<T>, Malformed> {
    struct List<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
            let mut values = Vec::new();
            while let Some(value) = from.next_element()? {
                if values.len() == MAX {
                    return Err(A::Error::invalid_length(MAX + 1, &self));
                }
                values.push(value);
            }
            Ok(values)
        }
    }

    let mut from = serde_json::Deserializer::from_str(text);
    let values = from.deserialize_seq(List::<T, MAX>(PhantomData));
    let values = values.and_then(|values| from.end().map(|()| values));
    values.map_err(|error| Malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1_000_000;

    fn interface(egress: u64, max: Option<u64>) -> Interface {
        Interface { min: Rates { egress, ingress: 0 }, max }
    }

    #[test]
    fn the_annotation_of_link_is_read() {
        let text = r#"[{"min_tx_rate":15000,"max_tx_rate":20000},{"min_tx_rate":5000},{}]"#;
        let wanted = [
            interface(15_000 * M, Some(20_000 * M)),
            interface(5000 * M, None),
            interface(0, None),
        ];
        assert_eq!(demand(text).unwrap(), wanted);
        assert_eq!(demand("").unwrap(), []);
        assert_eq!(demand("[]").unwrap(), []);
        // Of both keys 0 is as if the key were absent.
        assert_eq!(demand(r#"[{"min_tx_rate":0,"max_tx_rate":0}]"#).unwrap(), [interface(0, None)]);
        let both = demand(r#"[{"min_tx_rate":1,"min_rx_rate":2,"vlan":7}]"#).unwrap();
        assert_eq!(both[0].min, Rates { egress: M, ingress: 2 * M });
    }

    #[test]
    fn bad_annotations_are_refused_with_a_reason() {
        for (text, reason) in [
            ("{", "expected a list"),
            ("null", "expected a list"),
            ("3000", "expected a list"),
            (r#"{"min_tx_rate":1}"#, "expected a list"),
            (r#"[{"min_tx_rate":1}"#, "EOF"),
            (r#"[{"min_tx_rate":1}] x"#, "trailing"),
            (r#"[{"min_tx_rate":-1}]"#, "-1"),
            (r#"[{"min_tx_rate":1.5}]"#, "1.5"),
            (r#"[{"min_tx_rate":3e9}]"#, "3000000000.0"),
            (r#"[{"min_tx_rate":"3G"}]"#, "3G"),
            (r#"[{"min_tx_rate":1,"min_tx_rate":2}]"#, "duplicate field"),
            (r#"[{"min_tx_rate":9223372036854775808}]"#, "too great"),
            (r#"[{"max_tx_rate":18446744073709551615}]"#, "too great"),
            (r#"[{"min_tx_rate":18446744073709551616}]"#, "1.8446744073709552e+19"),
            (r#"[{"min_tx_rate":5,"max_tx_rate":4}]"#, "less than min_tx_rate 5"),
        ] {
            let error = demand(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
        assert_eq!(demand(&format!("[{}]", ["{}"; 64].join(","))).unwrap().len(), 64);
        for count in [65, 1_000_000] {
            let error = demand(&format!("[{}]", vec!["{}"; count].join(","))).unwrap_err();
            assert!(error.to_string().contains("a list of at most 64"), "{error}");
        }
        let deep = "[".repeat(100_000);
        assert!(demand(&deep).is_err());
    }

    #[test]
    fn uplinks_and_places_are_read_as_they_are_written() {
        let mut ours = vec![Uplink::new("ens1", 10_000 * M), Uplink::new("ens2", 0)];
        let text = to_json(&ours).unwrap();
        let first = r#"{"name":"ens1","egress":10000000000,"ingress":10000000000}"#;
        assert!(text.starts_with(&format!("[{first},")), "{text}");
        assert_eq!(uplinks(&text).unwrap(), ours);
        // The taken rates are no part of it.
        ours[0].taken.egress = 5;
        assert_eq!(to_json(&ours).unwrap(), text);

        let min = Rates { egress: 3, ingress: 4 };
        let bound = vec![
            Placed { uplink: "ens1".into(), min, max: Some(5) },
            Placed { uplink: "ens2".into(), min, max: None },
        ];
        let text = to_json(&bound).unwrap();
        let second = r#"{"uplink":"ens2","egress":3,"ingress":4}"#;
        assert!(text.ends_with(&format!(",{second}]")), "{text}");
        assert_eq!(placed(&text).unwrap(), bound);
    }

    #[test]
    fn bad_uplinks_and_places_are_refused() {
        let named = |name: &str| format!(r#"{{"name":"{name}","egress":1}}"#);
        let many: Vec<String> = (0..17).map(|at| named(&format!("u{at}"))).collect();
        for text in [
            format!("[{},{}]", named("a"), named("a")),
            format!("[{}]", named("")),
            format!("[{}]", named("sixteen-letters0")),
            format!("[{}]", many.join(",")),
            r#"[{"egress":1}]"#.to_owned(),
            r#"[{"name":"a","egress":-1}]"#.to_owned(),
        ] {
            assert!(uplinks(&text).is_err(), "{text}");
        }
        assert!(placed(r#"[{"egress":1}]"#).is_err());
        assert!(placed(r#"[{"uplink":"a","egress":1.5}]"#).is_err());
    }
}
