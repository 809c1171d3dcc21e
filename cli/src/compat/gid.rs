//! GIDs: the other programs' form of an address.

use std::net::{IpAddr, Ipv6Addr};

/// The GID of an address: an IPv4 address is IPv4-mapped.
#[must_use]
pub fn of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address of a peer's GID. `option` is the option of the peer's program that chooses another
/// GID, such as `-g`.
///
/// # Errors
/// No packets can be sent to this address. The text says what to do.
pub fn address(gid: [u8; 16], option: &str) -> Result<IpAddr, String> {
    let advice = format!(
        "start it with {option} and the index of a GID that is an IPv4 or a global IPv6 address (`ibv_devinfo -v` lists \
         them)"
    );
    let address = Ipv6Addr::from(gid).to_canonical();
    if address.is_unspecified() {
        return Err(format!("it gave no GID, without which there is no RoCE: {advice}"));
    }
    match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            Err(format!("its GID {v6} is a link-local address: {advice}"))
        }
        IpAddr::V4(v4) if v4.is_broadcast() || v4.is_unspecified() => {
            Err(format!("its GID stands for {v4}, which is no host's address: {advice}"))
        }
        _ if address.is_multicast() => {
            Err(format!("its GID {address} is a multicast address: {advice}"))
        }
        _ => Ok(address),
    }
}

/// Checks that both addresses are of one family, so that the ends can reach each other.
///
/// # Errors
/// They are of different families. The text says what to do.
pub fn same_family(local: IpAddr, remote: IpAddr, option: &str) -> Result<(), String> {
    if local.is_ipv4() == remote.is_ipv4() {
        return Ok(());
    }
    Err(format!(
        "its GID stands for {remote}, and this side uses {local}: give both sides IPv4 or both IPv6 (here --bind or {option}, \
         there {option})"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        for text in ["10.77.0.2", "127.0.0.1", "fd77::2", "2001:db8::1", "::1"] {
            let there: IpAddr = text.parse().unwrap();
            assert_eq!(address(of(there), "-g"), Ok(there));
        }
    }

    #[test]
    fn what_cannot_be_reached_is_explained() {
        let gid = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
        for (text, word) in [
            ("::", "no GID"),
            ("fe80::1", "link-local"),
            ("ff0e::ffff:e001:0203", "multicast"),
            ("::ffff:224.0.0.1", "multicast"),
            ("::ffff:255.255.255.255", "no host's"),
            ("::ffff:0.0.0.0", "no"),
        ] {
            let why = address(gid(text), "-g").unwrap_err();
            assert!(why.contains(word) && why.contains("start it with -g"), "{why}");
        }
        let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        assert!(same_family(v4, v4, "-g").is_ok() && same_family(v6, v6, "-g").is_ok());
        assert!(same_family(v4, v6, "-x").unwrap_err().contains("-x"));
    }
}
