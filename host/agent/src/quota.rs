//! Limits that programs keep by themselves, over all processes of a container, in the words of the
//! kernel's `rdma.max` (cgroup v2).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use rocinante_netdev::handed::page::{Amounts, NO_LIMIT, RESOURCES, Usage};
use serde::{Deserialize, Serialize};

/// The word for no limit.
const MAX: &str = "max";
/// Units of a number: as the kernel's memparse has them.
const UNITS: [(char, u32); 4] = [('k', 10), ('m', 20), ('g', 30), ('t', 40)];

/// A limit of each resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RdmaMax(pub(crate) Amounts);

/// The answer to a container whose programs hold more than they may.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RdmaExceeded {
    /// The log says so.
    #[default]
    Report,
    /// And nothing leaves it, and it gets no port, until they hold less.
    CutOff,
}

impl RdmaExceeded {
    /// Whether it is the rule of a class that says nothing.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if")]
    pub(crate) fn is_report(&self) -> bool {
        *self == Self::Report
    }
}

/// One resource of a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Use {
    /// `None` for no limit.
    pub(crate) max: Option<u64>,
    pub(crate) current: u64,
    pub(crate) peak: u64,
    /// Refusals.
    pub(crate) events: u64,
}

/// The resources of a container by their names.
pub(crate) type Uses = BTreeMap<String, Use>;

impl Default for RdmaMax {
    fn default() -> Self {
        Self([NO_LIMIT; RESOURCES.len()])
    }
}

impl RdmaMax {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The lesser limit of each.
    pub(crate) fn least(self, other: Self) -> Self {
        Self(std::array::from_fn(|nth| self.0[nth].min(other.0[nth])))
    }

    /// With the numbers of a ledger.
    pub(crate) fn uses(self, usage: &Usage) -> Uses {
        let of = |nth: usize| Use {
            max: Some(self.0[nth]).filter(|max| *max != NO_LIMIT),
            current: usage.current[nth],
            peak: usage.peak[nth],
            events: usage.events[nth],
        };
        RESOURCES.iter().enumerate().map(|(nth, name)| ((*name).to_owned(), of(nth))).collect()
    }
}

impl FromStr for RdmaMax {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Self::default();
        for word in text.split_ascii_whitespace() {
            let none = || format!("{word:?} is none of {RESOURCES:?} with its number or {MAX:?}");
            let (name, value) = word.split_once('=').ok_or_else(none)?;
            let nth = RESOURCES.iter().position(|it| *it == name).ok_or_else(none)?;
            all.0[nth] = if value == MAX { NO_LIMIT } else { number(value).ok_or_else(none)? };
        }
        Ok(all)
    }
}

/// A number below [`NO_LIMIT`], with a unit behind it or none.
fn number(text: &str) -> Option<u64> {
    let last = text.chars().last()?.to_ascii_lowercase();
    let unit = UNITS.iter().find(|(name, _)| *name == last);
    let digits = unit.map_or(text, |_| &text[..text.len() - 1]);
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    let number = number.checked_mul(1 << unit.map_or(0, |(_, bits)| *bits))?;
    (number < NO_LIMIT).then_some(number)
}

impl fmt::Display for RdmaMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (name, max)) in RESOURCES.iter().zip(self.0).enumerate() {
            let space = if nth == 0 { "" } else { " " };
            match max {
                NO_LIMIT => write!(f, "{space}{name}={MAX}")?,
                max => write!(f, "{space}{name}={max}")?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for RdmaMax {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RdmaMax> for String {
    fn from(max: RdmaMax) -> Self {
        max.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_reads_them() {
        let none = NO_LIMIT;
        for (text, limits) in [
            ("", [none; 3]),
            ("hca_handle=2 hca_object=2000", [2, 2000, none]),
            ("hca_object=max mr_bytes=0", [none, none, 0]),
            (" mr_bytes=1g\thca_handle=0 ", [0, none, 1 << 30]),
            ("mr_bytes=4K hca_handle=1 hca_handle=3", [3, none, 4096]),
        ] {
            let max: RdmaMax = text.parse().expect(text);
            assert_eq!(max.0, limits, "{text}");
            assert_eq!(max.to_string().parse(), Ok(max));
        }
        let big = format!("mr_bytes={}", u64::MAX);
        let bad = ["hca_handle", "=1", "hca_qp=1", "hca_handle=", "hca_object=-1", "mr_bytes=k"];
        let more = ["hca_object=+1", "hca_object=1.5", "hca_object=Max", "mr_bytes=17179869184g"];
        for text in bad.into_iter().chain(more).chain([big.as_str()]) {
            let why = text.parse::<RdmaMax>().expect_err(text);
            assert!(why.contains("hca_handle"), "{why}");
        }
        let both = RdmaMax([1, none, 7]).least(RdmaMax([2, 5, none]));
        assert_eq!(both.to_string(), "hca_handle=1 hca_object=5 mr_bytes=7");
    }
}
