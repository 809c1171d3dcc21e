//! Rates as `tc` and CNI's `bandwidth` have them.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Bits in a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Rate(u64);

/// Units by their names in lower case: `bit` may stand behind each.
const UNITS: [(&str, u64); 5] =
    [("", 1), ("k", 1000), ("m", 1_000_000), ("g", 1_000_000_000), ("t", 1_000_000_000_000)];

impl Rate {
    /// A second of the least rate is twice a super-packet.
    const LEAST: Self = Self(1_000_000);
    pub(crate) const MOST: Self = Self(1_000_000_000_000);

    /// Bytes in a second.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0 / 8
    }

    /// The rate that stays beside others, or the least.
    pub(crate) fn without(self, others: impl IntoIterator<Item = Self>) -> Self {
        let taken = others.into_iter().map(|rate| rate.0).fold(0, u64::saturating_add);
        Self(self.0.saturating_sub(taken)).max(Self::LEAST)
    }

    /// The sum of all, if there are any.
    pub(crate) fn sum(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        all.into_iter().reduce(|sum, rate| Self(sum.0.saturating_add(rate.0)))
    }

    /// An equal part of it, or the least.
    pub(crate) fn among(self, parts: u64) -> Self {
        Self(self.0 / parts.max(1)).max(Self::LEAST)
    }

    /// A rate of this number of bits in a second. Error: it is less than a megabit, or more than a
    /// terabit.
    pub fn of_bits(bits: u64) -> Result<Self, String> {
        let rate = Self(bits);
        if (Self::LEAST..=Self::MOST).contains(&rate) {
            return Ok(rate);
        }
        Err(format!("a rate is {} to {}, and not {rate}", Self::LEAST, Self::MOST))
    }
}

impl std::str::FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let none = || format!("{text:?} is no rate such as \"500mbit\" or \"2.5G\", in bits");
        let lower = text.to_ascii_lowercase();
        let end = lower.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(lower.len());
        let (number, unit) = lower.split_at(end);
        let unit = unit.strip_suffix("bit").unwrap_or(unit);
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(none)?;
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(part) || part.len() > 9 {
            return Err(none());
        }
        let whole: u64 = whole.parse().map_err(|_| none())?;
        let part: u64 = part.parse().map_err(|_| none())?;
        let places = number.split_once('.').map_or(1, |(_, part)| part.len() as u32);
        let bits = u128::from(whole) * u128::from(*factor)
            + u128::from(part) * u128::from(*factor) / 10_u128.pow(places);
        Self::of_bits(bits.try_into().unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fitting = UNITS.iter().rev();
        let (name, factor) = fitting
            .find(|(_, it)| self.0 >= *it && self.0.is_multiple_of((it / 1000).max(1)))
            .unwrap_or(&UNITS[0]);
        let (whole, part) = (self.0 / factor, self.0 % factor * 1000 / factor);
        write!(f, "{whole}")?;
        if part > 0 {
            let digits = format!("{part:03}");
            write!(f, ".{}", digits.trim_end_matches('0'))?;
        }
        write!(f, "{name}bit")
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;

        impl Visitor<'_> for Either {
            type Value = Rate;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a rate such as \"500mbit\", or bits in a second")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Rate, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_i64<E: Error>(self, bits: i64) -> Result<Rate, E> {
                self.visit_u64(bits.try_into().unwrap_or(0))
            }

            fn visit_u64<E: Error>(self, bits: u64) -> Result<Rate, E> {
                Rate::of_bits(bits).map_err(E::custom)
            }
        }

        from.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_written_as_tc_has_them() {
        for (text, bits, again) in [
            ("500mbit", 500_000_000, "500mbit"),
            ("3G", 3_000_000_000, "3gbit"),
            ("2.5Gbit", 2_500_000_000, "2.5gbit"),
            ("1000000", 1_000_000, "1mbit"),
            ("1500kbit", 1_500_000, "1.5mbit"),
            ("1234567bit", 1_234_567, "1234.567kbit"),
            ("1t", 1_000_000_000_000, "1tbit"),
            ("0.001234567g", 1_234_567, "1234.567kbit"),
        ] {
            let rate: Rate = text.parse().expect(text);
            assert_eq!((rate.0, rate.to_string().as_str()), (bits, again), "{text}");
            assert_eq!(again.parse(), Ok(rate), "{text}");
        }
        for text in [
            "",
            "mbit",
            "-5mbit",
            "5 mbit",
            "5xbit",
            "5mbps",
            "5mbyte",
            "1.m",
            ".5g",
            "1.2.3g",
            "0",
            "500",
            "999kbit",
            "1001gbit",
            "1e9",
            "0x10m",
            "99999999999999999999",
            "1.0000000001g",
            "18446744073709551615t",
            "٣mbit",
            "500mbitbit",
        ] {
            text.parse::<Rate>().expect_err(text);
        }
    }
}
