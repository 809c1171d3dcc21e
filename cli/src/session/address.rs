//! Chooses a side's address where none was given, and explains why a TCP port cannot be used.

use std::io::ErrorKind;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, ToSocketAddrs, UdpSocket,
};
use std::time::{Duration, Instant};

use rocinante_netdev::{Interface, ROCE_PORT, Unusable, WhyUnusable, holder};

use super::own::{Own, is_link_local};
use crate::output::{Failure, Result};

/// The local address of packets to `server`: one of `own`, or without that the one of the route.
/// Error: there is no route.
pub fn local(server: SocketAddr, own: Option<&Own>) -> Result<IpAddr> {
    match own {
        Some(own) => Ok(own.towards(server.ip()).unwrap_or_else(|| own.first())),
        None => towards(server),
    }
}

/// The local address of packets to `peer`, whose port does not matter. Error: there is no route.
pub fn towards(mut peer: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    peer.set_port(ROCE_PORT);
    let ask = || {
        // Connecting a UDP socket sends no packet. It only asks the routing table.
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(peer)?;
        let local = socket.local_addr()?.ip();
        // While no other address can be used the kernel names that of loopback.
        if local.is_loopback() && !peer.ip().is_loopback() {
            let why = format!("this machine has no address but {local} that it can use");
            return Err(std::io::Error::new(ErrorKind::AddrNotAvailable, why));
        }
        Ok(local)
    };
    let mut asked = ask();
    if asked.is_err() && peer.is_ipv6() && wait_for(|it| it.address.is_ipv6()) {
        asked = ask();
    }
    asked.map_err(|error| {
        let ip = peer.ip();
        let advice = match peer {
            SocketAddr::V6(v6) if is_link_local(ip) && v6.scope_id() == 0 => format!(
                "a link-local address needs its interface: give {ip}%eth0, or whichever it is"
            ),
            _ => format!("see `ip route get {ip}`, or give --bind"),
        };
        Failure::Failed(format!("no route to {ip}: {error}: {advice}"))
    })
}

/// How long an address may be tentative: five questions, one a second, and the time before them.
const TENTATIVE_MAX: Duration = Duration::from_secs(6);

/// Waits while one of these addresses is tentative, and says so. Returns whether it has waited.
pub fn wait_for(is_one: impl Fn(&Unusable) -> bool) -> bool {
    let end = Instant::now() + TENTATIVE_MAX;
    let mut has_waited = false;
    loop {
        // The code that needs an address reports the error.
        let all = Unusable::all().unwrap_or_default();
        let tentative = |it: &&Unusable| it.why == WhyUnusable::Tentative && is_one(it);
        let Some(it) = all.iter().find(tentative) else { return has_waited };
        if Instant::now() > end {
            return has_waited;
        }
        if !std::mem::replace(&mut has_waited, true) {
            eprintln!("rocinante: waiting: {it}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The server's address. If `bind` is given, the address is of the same family. Error: the name is
/// unknown, or has no such address.
pub fn resolve(host: &str, port: u16, bind: Option<&Own>) -> Result<SocketAddr> {
    let found = (host, port).to_socket_addrs().map_err(|error| unknown(host, &error))?;
    choose(host, &found.collect::<Vec<_>>(), bind)
}

/// The error for a name that is not known.
pub(super) fn unknown(host: &str, error: &std::io::Error) -> Failure {
    let advice = "is the name right? An IP address will do as well";
    Failure::Failed(format!("cannot find {host:?}: {error}: {advice}"))
}

pub(super) fn choose(host: &str, found: &[SocketAddr], bind: Option<&Own>) -> Result<SocketAddr> {
    let failed = |why: String| Failure::Failed(why);
    let first = found.first().ok_or_else(|| failed(format!("{host:?} has no address")))?;
    let Some(bind) = bind else {
        // Loopback has one IPv6 address, which two sides cannot share.
        let other = found.iter().find(|address| address.is_ipv4() && address.ip().is_loopback());
        return Ok(*other.filter(|_| first.ip().is_loopback()).unwrap_or(first));
    };
    found.iter().find(|address| bind.towards(address.ip()).is_some()).copied().ok_or_else(|| {
        failed(format!(
            "{host} is {}, which {} cannot reach: give both of one family, IPv4 or IPv6",
            first.ip(),
            bind.name()
        ))
    })
}

/// The address of the only interface that is up and has one, besides loopback. Error: there is no
/// such interface, or several. The text names them.
pub fn only() -> Result<IpAddr> {
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

/// Listens on `bind`, or on all addresses of both families. Error: the port is taken, or needs a
/// privilege. The text names the process that has it, if that is visible.
pub fn listen(bind: Option<IpAddr>, port: u16) -> Result<TcpListener> {
    let listener = match bind {
        Some(address) => TcpListener::bind(within_zone(address, port)),
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

/// An own address with its zone: a link-local one needs its interface (RFC 4007).
fn within_zone(address: IpAddr, port: u16) -> SocketAddr {
    match address {
        IpAddr::V6(v6) if is_link_local(address) => {
            let zone = Interface::by_address(address).map_or(0, |interface| interface.index);
            SocketAddrV6::new(v6, port, 0, zone).into()
        }
        address => SocketAddr::new(address, port),
    }
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
        assert_eq!(
            towards(SocketAddr::from(([127, 3, 2, 1], 0))).unwrap(),
            IpAddr::from([127, 0, 0, 1])
        );
    }

    #[test]
    fn hosts_are_found_in_the_family_of_the_own_address() {
        let v4 = Own::from(IpAddr::from([127, 0, 0, 1]));
        assert_eq!(resolve("127.0.0.9", 7, Some(&v4)).unwrap(), "127.0.0.9:7".parse().unwrap());
        let mixed = resolve("::1", 7, Some(&v4)).unwrap_err().to_string();
        assert!(mixed.contains("one family"), "{mixed}");
        let unknown = resolve("no such host", 7, None).unwrap_err().to_string();
        assert!(
            unknown.contains("no such host") && unknown.contains("is the name right"),
            "{unknown}"
        );
    }

    #[test]
    fn loopback_is_taken_by_its_many_addresses() {
        let [v6, v4, far] =
            ["[::1]:7", "127.0.0.1:7", "192.0.2.1:7"].map(|text| text.parse().unwrap());
        for (found, wanted) in
            [(vec![v6, v4], v4), (vec![v6], v6), (vec![far, v4], far), (vec![v4], v4)]
        {
            assert_eq!(choose("localhost", &found, None), Ok(wanted));
        }
    }

    #[test]
    fn a_link_local_address_needs_its_interface() {
        let why = towards("[fe80::5]:1".parse().unwrap());
        let why = why.expect_err("no route").to_string();
        assert!(why.contains("give fe80::5%eth0"), "{why}");
        let zone = resolve("fe80::5%lo", 7, None).unwrap();
        assert!(matches!(zone, SocketAddr::V6(v6) if v6.scope_id() > 0), "{zone}");
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
