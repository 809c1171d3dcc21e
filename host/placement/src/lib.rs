//! Which uplink of a node each interface of a pod gets, so that all reserved rates fit.
//!
//! Rates are integers of bits per second. The crate has no clock and no I/O: uplinks and demands
//! come in as values or as JSON, and [`place`] answers with a place for each interface, or with a
//! reason. All JSON may be hostile: it comes from annotations that users write.
//!
//! ```
//! use rocinante_placement::{STEPS, Uplink, demand, place};
//!
//! const G: u64 = 1_000_000_000;
//! let uplinks = [Uplink::new("ens1", 9 * G), Uplink::new("ens2", 6 * G)];
//! let wanted = demand(r#"[{"min_tx_rate":3000},{"min_tx_rate":3000},{"min_tx_rate":8000}]"#)?;
//! assert_eq!(place(&uplinks, &wanted, STEPS), Ok(vec![1, 1, 0]));
//! # Ok::<(), rocinante_placement::Malformed>(())
//! ```

#![forbid(unsafe_code)]

mod json;
mod search;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::json::{Malformed, demand, placed, to_json, uplinks};
pub use self::search::{Refused, STEPS, place};

/// Uplinks that a node may have.
pub const UPLINKS_MAX: usize = 16;
/// Interfaces that a pod may ask for.
pub const INTERFACES_MAX: usize = 64;

/// Rates of both directions, in bits per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Out of the node.
    #[serde(default)]
    pub egress: u64,
    /// Into the node.
    #[serde(default)]
    pub ingress: u64,
}

impl Rates {
    /// Whether these rates leave room for `others`.
    #[must_use]
    pub fn hold(self, others: Self) -> bool {
        self.egress >= others.egress && self.ingress >= others.ingress
    }

    /// The rates without `others`, and no less than 0.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self {
            egress: self.egress.saturating_sub(others.egress),
            ingress: self.ingress.saturating_sub(others.ingress),
        }
    }

    /// The sum with `others`. Sums that are too great for a `u64` become the greatest: full.
    #[must_use]
    pub fn with(self, others: Self) -> Self {
        Self {
            egress: self.egress.saturating_add(others.egress),
            ingress: self.ingress.saturating_add(others.ingress),
        }
    }
}

/// A link by which a node's containers reach others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// The interface's name on its node.
    pub name: String,
    /// All that can be reserved.
    #[serde(flatten)]
    pub speed: Rates,
    /// The sum of all reservations. It is more than `speed` where an uplink became slower.
    #[serde(skip)]
    pub taken: Rates,
}

impl Uplink {
    /// An uplink with the same speed, in bits per second, both ways, of which nothing is taken.
    #[must_use]
    pub fn new(name: &str, speed: u64) -> Self {
        let speed = Rates { egress: speed, ingress: speed };
        Self { name: name.to_owned(), speed, taken: Rates::default() }
    }

    /// The rates that can still be reserved.
    #[must_use]
    pub fn free(&self) -> Rates {
        self.speed.without(self.taken)
    }
}

/// An interface that a pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interface {
    /// The rates that are reserved for it.
    pub min: Rates,
    /// The highest rate out of the node that it may reach, in bits per second; `None` is no limit.
    /// Not less than `min.egress`.
    pub max: Option<u64>,
}

/// An interface that has its place: a value of the annotation that a pod gets when it is bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The name of its uplink.
    pub uplink: String,
    /// The rates that are reserved for it.
    #[serde(flatten)]
    pub min: Rates,
    /// As [`Interface::max`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bit/s out and {} bit/s in", self.egress, self.ingress)
    }
}
