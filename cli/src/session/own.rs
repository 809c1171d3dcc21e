//! The own address, as users name it: by itself, or by its interface.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::str::FromStr;

use rocinante_netdev::Interface;

use super::address::wait_for;

/// An own address, or those of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    name: String,
    /// One, or those of the interface in the order of its GIDs.
    addresses: Vec<IpAddr>,
}

impl FromStr for Own {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The device finds the interface of a link-local address by itself.
        let address = text.split_once('%').map_or(text, |(address, _zone)| address);
        if let Ok(address) = address.parse() {
            wait_for(|it| it.address == address);
            return Ok(Self { name: text.to_owned(), addresses: vec![address] });
        }
        wait_for(|it| it.interface == text);
        let interface = Interface::by_name(text).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                "it is neither an IP address nor an interface: `rocinante devices` lists both"
                    .to_owned()
            }
            _ => error.to_string(),
        })?;
        let addresses: Vec<IpAddr> =
            interface.addresses.iter().map(|(address, _)| *address).collect();
        if addresses.is_empty() {
            return Err("the interface has no address: give it one with `ip address add`".into());
        }
        Ok(Self { name: text.to_owned(), addresses })
    }
}

impl From<IpAddr> for Own {
    fn from(address: IpAddr) -> Self {
        Self { name: address.to_string(), addresses: vec![address] }
    }
}

impl Own {
    /// The words of the user.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address that is used where any will do.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        self.addresses[0]
    }

    /// Whether it is the address or one of the interface's.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    /// The only address; `None` for an interface with several.
    #[must_use]
    pub fn only(&self) -> Option<IpAddr> {
        Some(self.addresses[0]).filter(|_| self.addresses.len() == 1)
    }

    /// The address for packets to `peer`: of the same family, and link-local if `peer` is.
    #[must_use]
    pub fn towards(&self, peer: IpAddr) -> Option<IpAddr> {
        let suits = |own: &&IpAddr| own.is_ipv4() == peer.is_ipv4();
        let suited = || self.addresses.iter().filter(suits);
        let alike = suited().find(|own| is_link_local(**own) == is_link_local(peer));
        alike.or_else(|| suited().next()).copied()
    }
}

/// Whether the address has a meaning on one link only.
#[must_use]
pub fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_an_address_for_each_peer() {
        let [v4, v6, local]: [IpAddr; 3] =
            ["10.0.0.5", "fd00::5", "fe80::5"].map(|text| text.parse().unwrap());
        let own = Own { name: "eth7".into(), addresses: vec![v4, v6, local] };
        for (peer, wanted) in
            [("10.0.0.9", v4), ("192.0.2.1", v4), ("fd00::9", v6), ("fe80::9", local)]
        {
            assert_eq!(own.towards(peer.parse().unwrap()), Some(wanted), "{peer}");
        }
        assert_eq!((own.first(), own.only(), own.has(v6)), (v4, None, true));
        let own = Own::from(v4);
        assert_eq!((own.towards(v6), own.only()), (None, Some(v4)));
    }

    #[test]
    fn addresses_and_interfaces_are_taken() {
        let lo: Own = "lo".parse().unwrap();
        assert!(lo.has(IpAddr::from([127, 0, 0, 1])), "{lo:?}");
        let zone: Own = "fe80::5%eth7".parse().unwrap();
        assert_eq!((zone.first(), zone.name()), ("fe80::5".parse().unwrap(), "fe80::5%eth7"));
        let why = "no-such-thing".parse::<Own>().unwrap_err();
        assert!(why.contains("rocinante devices"), "{why}");
    }
}
