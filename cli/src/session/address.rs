//! Chooses a side's address where none was given, and explains why a TCP port cannot be used.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use rocinante_netdev::{Interface, ROCE_PORT, holder};

use crate::output::Failure;

/// The local address of packets to `peer`.
///
/// # Errors
/// There is no route.
pub fn towards(peer: IpAddr) -> Result<IpAddr, Failure> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a UDP socket sends no packet. It only asks the routing table.
    let asked = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((peer, ROCE_PORT))?;
        socket.local_addr()
    });
    asked.map(|local| local.ip()).map_err(|error| {
        Failure::Failed(format!(
            "no route to {peer}: {error}: see `ip route get {peer}`, or give --bind"
        ))
    })
}

/// The server's address. If `bind` is given, the address is of the same family.
///
/// # Errors
/// The name is unknown, or has no such address.
pub fn resolve(host: &str, port: u16, bind: Option<IpAddr>) -> Result<SocketAddr, Failure> {
    let failed = |why: String| Failure::Failed(why);
    let found = (host, port).to_socket_addrs().map_err(|error| {
        failed(format!(
            "cannot find {host:?}: {error}: is the name right? An IP address will do as well"
        ))
    })?;
    let found: Vec<SocketAddr> = found.collect();
    let first = found.first().ok_or_else(|| failed(format!("{host:?} has no address")))?;
    let Some(bind) = bind else { return Ok(*first) };
    found.iter().find(|address| address.is_ipv4() == bind.is_ipv4()).copied().ok_or_else(|| {
        failed(format!(
            "{host} is {}, which {bind} cannot reach: give both of one family, IPv4 or IPv6",
            first.ip()
        ))
    })
}

/// The address of the only interface that is up and has one, besides loopback.
///
/// # Errors
/// There is no such interface, or several. The text names them.
pub fn only() -> Result<IpAddr, Failure> {
    let all = Interface::all().map_err(|error| {
        Failure::Failed(format!("cannot list the interfaces: {error}: give --bind"))
    })?;
    let usable = |interface: &&Interface| interface.up && !interface.loopback;
    let found: Vec<_> = all
        .iter()
        .filter(usable)
        .filter_map(|interface| {
            interface.addresses.first().map(|(address, _)| (&interface.name, *address))
        })
        .collect();
    match found[..] {
        [(_, address)] => Ok(address),
        [] => Err(Failure::Usage("no interface but loopback has an address: give --bind".into())),
        _ => {
            let named: Vec<_> =
                found.iter().map(|(name, address)| format!("{address} ({name})")).collect();
            Err(Failure::Usage(format!(
                "which address? Give --bind with one of {}",
                named.join(", ")
            )))
        }
    }
}

/// Listens on `bind`, or on all addresses of both families.
///
/// # Errors
/// The port is taken, or needs a privilege. The text names the process that has it, if that is
/// visible.
pub fn listen(bind: Option<IpAddr>, port: u16) -> Result<TcpListener, Failure> {
    let listener = match bind {
        Some(address) => TcpListener::bind((address, port)),
        None => {
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
                ErrorKind::AddrInUse => Err(error),
                // The machine has no IPv6.
                _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            })
        }
    };
    listener.map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::AddrInUse => taken(bind, port),
            ErrorKind::PermissionDenied => {
                "ports below 1024 need root: give another with -p".to_owned()
            }
            _ => "give another address with --bind, or another port with -p".to_owned(),
        };
        let place = bind.map_or(String::new(), |address| format!("{address} "));
        Failure::Failed(format!("cannot listen on TCP {place}port {port}: {error}: {advice}"))
    })
}

fn taken(bind: Option<IpAddr>, port: u16) -> String {
    let wanted = match bind {
        Some(address) => vec![address],
        None => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
    };
    let mut holders: Vec<(u32, String)> =
        wanted.into_iter().flat_map(|address| holder::tcp_listeners(address, port)).collect();
    holders.sort_unstable();
    holders.dedup();
    match holders.first() {
        Some((pid, command)) => {
            format!(
                "pid {pid} ({command}) listens there: stop it, or give both sides another port with -p"
            )
        }
        None => format!(
            "a process that is not visible from here listens there (`ss -tlpn 'sport = :{port}'` as root shows it): \
             give both sides another port with -p"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_from_loopback() {
        assert_eq!(towards([127, 3, 2, 1].into()).unwrap(), IpAddr::from([127, 0, 0, 1]));
    }

    #[test]
    fn hosts_are_found_in_the_family_of_the_own_address() {
        let v4 = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(resolve("127.0.0.9", 7, Some(v4)).unwrap(), "127.0.0.9:7".parse().unwrap());
        let mixed = resolve("::1", 7, Some(v4)).unwrap_err().to_string();
        assert!(mixed.contains("one family"), "{mixed}");
        let unknown = resolve("no such host", 7, None).unwrap_err().to_string();
        assert!(
            unknown.contains("no such host") && unknown.contains("is the name right"),
            "{unknown}"
        );
    }

    #[test]
    fn a_taken_port_names_its_process() {
        let address = IpAddr::from([127, 0, 0, 1]);
        let first = listen(Some(address), 0).unwrap();
        let port = first.local_addr().unwrap().port();
        let error = listen(Some(address), port).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
    }
}
