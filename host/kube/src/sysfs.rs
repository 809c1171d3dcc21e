//! The uplinks that an operator names.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use rocinante_placement::Uplink;

/// Bits per second of a megabit per second.
pub(crate) const MEGA: u64 = 1_000_000;
const UNITS: [(&str, u64); 4] =
    [("k", 1000), ("M", MEGA), ("G", 1_000_000_000), ("T", 1_000_000_000_000)];

/// `ens1`, or `ens1=10G`: an interface, and the rate of it that can be reserved, in bits per second
/// with a decimal unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    interface: String,
    rate: Option<u64>,
}

/// Why there is no such uplink.
#[derive(Debug)]
pub struct UplinkError(String);

impl fmt::Display for UplinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UplinkError {}

impl FromStr for Named {
    type Err = UplinkError;

    fn from_str(text: &str) -> Result<Self, UplinkError> {
        let wrong = || UplinkError(format!("{text:?} is no uplink such as ens1 or ens1=10G"));
        let (interface, rate) = match text.split_once('=') {
            None => (text, None),
            Some((interface, rate)) => (interface, Some(bits(rate).ok_or_else(wrong)?)),
        };
        let is_name = !interface.is_empty() && interface.len() <= 15 && !interface.contains('/');
        if !is_name || interface == "." || interface == ".." {
            return Err(wrong());
        }
        Ok(Self { interface: interface.to_owned(), rate })
    }
}

/// A whole number with a unit or none.
pub(crate) fn bits(text: &str) -> Option<u64> {
    let unit = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)));
    let (number, factor) = unit.unwrap_or((text, &1));
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

impl Named {
    /// The uplink, with the speed that the kernel says unless the operator named a rate.
    ///
    /// # Errors
    /// The interface is not there, or has no speed: it is down or no card, such as a bridge.
    pub fn uplink(&self) -> Result<Uplink, UplinkError> {
        self.uplink_below(Path::new("/sys/class/net"))
    }

    fn uplink_below(&self, net: &Path) -> Result<Uplink, UplinkError> {
        let name = &self.interface;
        let folder = net.join(name);
        if !folder.exists() {
            return Err(UplinkError(format!("there is no interface {name}")));
        }
        let speed = match self.rate {
            Some(rate) => rate,
            None => {
                let none = || {
                    UplinkError(format!(
                        "{name} does not say its speed: it is down or no card; name one: {name}=10G"
                    ))
                };
                let text = std::fs::read_to_string(folder.join("speed")).map_err(|_| none())?;
                // -1, or 0 in some drivers, where it is not known.
                let speed = text.trim().parse::<u64>().ok().filter(|speed| *speed > 0);
                speed.and_then(|speed| speed.checked_mul(MEGA)).ok_or_else(none)?
            }
        };
        Ok(Uplink::new(name, speed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(interface: &str, rate: Option<u64>) -> Named {
        Named { interface: interface.to_owned(), rate }
    }

    #[test]
    fn an_uplink_is_named_with_or_without_a_rate() {
        assert_eq!("ens1".parse::<Named>().unwrap(), named("ens1", None));
        for (text, rate) in [("7", 7), ("25G", 25_000_000_000), ("100M", 100_000_000)] {
            let text = format!("a={text}");
            assert_eq!(text.parse::<Named>().unwrap(), named("a", Some(rate)), "{text}");
        }
        for text in ["", "=1G", "a=", "a=G", "a=-1", "a=+1", "a=1.5G", "a=3Gi", "a/b", ".."] {
            assert!(text.parse::<Named>().is_err(), "{text}");
        }
        assert!("a=99999999999T".parse::<Named>().is_err());
    }

    #[test]
    fn the_speed_is_the_kernels_unless_it_is_named() {
        let net = std::env::temp_dir().join(format!("rocinante-speeds-{}", std::process::id()));
        for (name, speed) in [("fast", "25000\n"), ("down", "-1\n"), ("old", "0\n")] {
            std::fs::create_dir_all(net.join(name)).unwrap();
            std::fs::write(net.join(name).join("speed"), speed).unwrap();
        }
        let speed = |name, rate| {
            named(name, rate).uplink_below(&net).map(|uplink| uplink.speed.egress).ok()
        };
        assert_eq!(speed("fast", None), Some(25_000_000_000));
        assert_eq!(speed("fast", Some(5)), Some(5));
        assert_eq!(speed("down", None), None);
        assert_eq!(speed("down", Some(5)), Some(5));
        assert_eq!(speed("old", None), None);
        assert_eq!(speed("absent", Some(5)), None);
        std::fs::remove_dir_all(&net).unwrap();
    }
}
