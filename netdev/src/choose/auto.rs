//! Selection of a backend.
//!
//! If the caller names none, [`choose`] takes the best backend that the process may open *and* that
//! bypasses no rule of its own network namespace. That is AF_XDP where the driver has zero-copy,
//! AF_PACKET on a veth, and UDP sockets elsewhere. If the rules cannot be read, it takes UDP. The
//! [`Choice`] says why, and which better backends were tried.
//!
//! A backend that the caller names is taken, or there is an error. The exception is `afxdp` beside
//! another process that has it on one of the addresses: an interface has one XDP program, which
//! leaves other processes' datagrams alone. Then `packet` is taken, else `udp`.
//!
//! Where the process may not open AF_PACKET, or not read the rules, an [`Agent`] is asked: it reads
//! the rules of this namespace with rights of its own, and opens the sockets. For AF_XDP it is
//! asked only if the caller names that: the program switches off offloads of a veth.

#[cfg(test)]
mod beside_tests;
mod features;
#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use crate::choose::any::AnyPort;
use crate::choose::ask::{self, AskError, Asked, shared_sockets};
use crate::choose::policy::{self, Audit, AuditVerdict};
use crate::frames::packet::PacketPort;
use crate::frames::xdp::XdpPort;
use crate::handed::{Agent, Code, Refused};
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::Rtnl;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::{Backend, Capabilities, Port as _};
use crate::port::error::OpenError;
use crate::port::parts::{BackendParts, Parts};
use crate::sharing::Slots;
use crate::udp::UdpPort;

/// The selected backend, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The backend of the port.
    pub backend: Backend,
    /// Why this one, in words that follow its name: `v0 is a veth, and …`.
    pub reason: String,
    /// Better backends that were not taken, and why; best first.
    pub tried: Vec<(Backend, String)>,
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.backend, self.reason)
    }
}

/// Opens a port on `iface` for these own `addresses`. Takes the backend `want`, or the best one if
/// that is `None`. Asks `agent` for a backend that this process may not open.
///
/// A backend named by the caller is taken even if it bypasses rules; the reason then lists them.
/// Error: the wanted backend cannot be opened; without one, not even a UDP socket can.
pub fn choose(
    iface: &Interface,
    addresses: &[IpAddr],
    want: Option<Backend>,
    config: &PortConfig,
    agent: &Agent,
) -> Result<(AnyPort, Choice), OpenError> {
    let (mut ports, choice) =
        choose_shards(iface, addresses, want, config, (Shards::ONE, None), agent)?;
    Ok((ports.pop().expect("one was asked for"), choice))
}

/// As [`choose`], but opens several ports of one backend, which share the addresses; with `slots`
/// also with other processes. If one of those has `afxdp`, or opens it, and `want` names it, the
/// ports are of `packet`, or else of `udp`: [`Choice::tried`] has the wanted one. Error: as
/// [`choose`].
pub fn choose_shards(
    iface: &Interface,
    addresses: &[IpAddr],
    want: Option<Backend>,
    config: &PortConfig,
    (shards, slots): (Shards, Option<&Arc<Slots>>),
    agent: &Agent,
) -> Result<(Vec<AnyPort>, Choice), OpenError> {
    let config = &slots.map_or_else(|| config.clone(), |slots| slots.fitted(config));
    let assemble = |parts: Vec<Parts>| -> Result<Vec<AnyPort>, OpenError> {
        let port = |(nth, parts): (usize, Parts)| {
            let mut port = AnyPort::assemble(parts)?;
            if let Some(slots) = slots {
                port.share(slots.clone(), nth)?;
            }
            Ok(port)
        };
        parts.into_iter().enumerate().map(port).collect()
    };
    // Before it is opened: of two processes that come at once, one learns of the other.
    let take_xdp = || slots.map_or(Ok(()), |slots| slots.take_xdp());
    let open = |backend| {
        if backend == Backend::Xdp {
            take_xdp().map_err(|address| taken(iface, address))?;
        }
        let parts = acquire_from(backend, iface, addresses, config, shards, slots)?;
        let copies = parts.iter().any(copies);
        Ok((assemble(parts)?, copies))
    };
    let ask = |backend, despite_rules| {
        let asked =
            ask::ask(agent, backend, iface, addresses, config, (shards, slots), despite_rules);
        let Asked { parts, audit } = asked?;
        Ok((assemble(parts).map_err(|e| ask::failed(agent, &e))?, audit))
    };
    let ways = Ways { iface, agent, open: &open, ask: &ask };
    let neighbour = if want == Some(Backend::Xdp) { take_xdp().err() } else { None };
    let chosen = match neighbour {
        Some(address) => ways.beside_xdp(address),
        None => ways.choose(want),
    };
    if let Some(slots) = slots
        && !matches!(&chosen, Ok((_, Choice { backend: Backend::Xdp, .. })))
    {
        slots.leave_xdp();
    }
    chosen
}

/// The error of `afxdp` where a neighbour on this address has it.
fn taken(iface: &Interface, address: IpAddr) -> OpenError {
    let what = format!("another process on {address} has {}", iface.name);
    let hint = "an interface has one XDP program: take packet or udp";
    OpenError::os(Backend::Xdp, what, io::Error::from_raw_os_error(libc::EBUSY), hint)
}

/// What [`Slots::lease`] fails with where processes cannot share: no `/proc`, too many descriptors
/// in messages, a kernel without a socket option.
const CANNOT_SHARE: [i32; 3] = [libc::ENOENT, libc::ETOOMANYREFS, libc::ENOPROTOOPT];

/// Takes slots for `count` ports on addresses that other processes of this user may share. Without
/// `/proc`, if the user has too many descriptors in messages, or if the kernel cannot steer
/// datagrams to a process, as some emulators of Linux cannot, the ports share them with none.
/// Error: as [`Slots::lease`].
pub fn lease(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    count: usize,
) -> Result<(Shards, Option<Arc<Slots>>), OpenError> {
    let alone = Shards { count, ..Shards::ONE };
    match Slots::lease(iface, addresses, config, alone) {
        Ok(slots) => {
            let shared = Shards { first: slots.first(), shared: true, ..alone };
            Ok((shared, Some(Arc::new(slots))))
        }
        Err(e) if CANNOT_SHARE.contains(&e.errno()) => Ok((alone, None)),
        Err(e) => Err(e),
    }
}

/// Whether the driver of an AF_XDP socket copies.
fn copies(parts: &Parts) -> bool {
    matches!(parts.manifest().backend, BackendParts::Xdp { zero_copy: false, .. })
}

/// The ways to a port of an interface.
struct Ways<'a> {
    iface: &'a Interface,
    agent: &'a Agent,
    /// Opens a backend with this process's own rights, and says whether the driver copies.
    open: &'a dyn Fn(Backend) -> Result<(Vec<AnyPort>, bool), OpenError>,
    /// Has the agent open it, despite rules that it bypasses or only without; also returns the
    /// agent's view of the rules.
    ask: &'a dyn Fn(Backend, bool) -> Result<(Vec<AnyPort>, Audit), AskError>,
}

impl Ways<'_> {
    /// Opens the wanted backend, or the best one that bypasses no rule.
    fn choose(&self, want: Option<Backend>) -> Result<(Vec<AnyPort>, Choice), OpenError> {
        if let Some(backend) = want {
            return self.named(backend, "asked for");
        }
        let mut tried = Vec::new();
        let (best, why) = best_for(self.iface);
        if best != Backend::Udp {
            match self.open_unless_bypassing(best) {
                Ok((opened, seen_by)) => {
                    let reason =
                        format!("{why}, and it bypasses no rule of this network namespace");
                    let reason = reason + &seen_by;
                    return Ok((opened, Choice { backend: best, reason, tried }));
                }
                Err(obstacle) => tried.push((best, obstacle)),
            }
        }
        let (opened, _) = (self.open)(Backend::Udp)?;
        let reason = match tried.first() {
            None => why,
            Some((backend, obstacle)) => format!("not {backend}, because {obstacle}"),
        };
        Ok((opened, Choice { backend: Backend::Udp, reason, tried }))
    }

    /// Opens this backend, even if it bypasses rules. The reason begins with `why`.
    fn named(&self, backend: Backend, why: &str) -> Result<(Vec<AnyPort>, Choice), OpenError> {
        let (opened, reason) = match (self.open)(backend) {
            // It bypasses nothing, so nothing is read.
            Ok((opened, _)) if backend == Backend::Udp => (opened, why.to_owned()),
            Ok((opened, _)) => (opened, with_bypassed(why, &policy::audit(self.iface), backend)),
            Err(error) if is_denied(&error) => self.instead(error, why)?,
            Err(error) => return Err(error),
        };
        Ok((opened, Choice { backend, reason, tried: Vec::new() }))
    }

    /// Opens the next backend in the place of `afxdp`, which the caller named and a neighbour has.
    fn beside_xdp(&self, address: IpAddr) -> Result<(Vec<AnyPort>, Choice), OpenError> {
        let why =
            format!("another process on {address} has it, and {} has one program", self.iface.name);
        let mut reason = format!("not {}, because {why}", Backend::Xdp);
        let mut tried = vec![(Backend::Xdp, why)];
        let (opened, choice) = match self.named(Backend::Packet, &reason) {
            Ok(chosen) => chosen,
            Err(error) => {
                reason.push_str(&format!("; not {}, because {error}", Backend::Packet));
                tried.push((Backend::Packet, error.to_string()));
                self.named(Backend::Udp, &reason)?
            }
        };
        Ok((opened, Choice { tried, ..choice }))
    }

    /// Asks the agent for a backend that the caller named and may not open; returns the reason too.
    fn instead(&self, error: OpenError, why: &str) -> Result<(Vec<AnyPort>, String), OpenError> {
        let backend = error.backend;
        if !matches!(backend, Backend::Packet | Backend::Xdp) {
            return Err(error);
        }
        match (self.ask)(backend, true) {
            Ok((opened, audit)) => {
                let reason = with_bypassed(why, &audit, backend);
                Ok((opened, format!("{reason}; {}", opened_by(self.agent))))
            }
            Err(AskError::Off) => Err(error),
            Err(AskError::Useless(error)) => Err(error),
            Err(answer) => {
                let hint = format!("{}; {answer}", error.hint);
                Err(OpenError { hint, ..error })
            }
        }
    }

    /// Opens a backend that bypasses hooks, if it bypasses no rule; else returns the obstacle. The
    /// agent is asked for `packet` if this process may not see all rules, or not open it; its list
    /// of rules then counts. Returns words about that, too.
    fn open_unless_bypassing(&self, backend: Backend) -> Result<(Vec<AnyPort>, String), String> {
        let obstacle = match policy::audit(self.iface).verdict(backend) {
            AuditVerdict::Clear => match (self.open)(backend) {
                Ok((_, true)) => {
                    return Err(format!("the driver of {} copies after all", self.iface.name));
                }
                Ok((opened, false)) => return Ok((opened, String::new())),
                Err(error) if is_denied(&error) => error.to_string(),
                Err(error) => return Err(error.to_string()),
            },
            AuditVerdict::Bypasses(rules) => return Err(would_bypass(&rules)),
            AuditVerdict::Unseen(unseen) => format!(
                "it might bypass rules of this network namespace: {}; if there are none, choose \
                 --netdev {backend}",
                list(&unseen)
            ),
        };
        if backend != Backend::Packet {
            return Err(obstacle);
        }
        let (audit, refused) = match (self.ask)(backend, false) {
            Ok((opened, audit)) => match audit.verdict(backend) {
                AuditVerdict::Clear => return Ok((opened, format!("; {}", opened_by(self.agent)))),
                _ => (audit, "it opens what might bypass rules".to_owned()),
            },
            Err(AskError::Off) => return Err(obstacle),
            Err(AskError::Useless(error)) => return Err(error.to_string()),
            Err(AskError::Refused(_, refused)) if is_about_rules(&refused) => {
                let (refused, audit) = *refused;
                (audit.unwrap_or_default(), refused.to_string())
            }
            Err(answer) => return Err(format!("{obstacle}; {answer}")),
        };
        Err(match audit.verdict(backend) {
            AuditVerdict::Bypasses(rules) => format!("{}, says the agent", would_bypass(&rules)),
            AuditVerdict::Unseen(unseen) => {
                format!("it might bypass rules that the agent cannot see either: {}", list(&unseen))
            }
            AuditVerdict::Clear => format!("{obstacle}; the agent refuses: {refused}"),
        })
    }
}

/// Whether the kernel denied something to this process that it may allow to another.
fn is_denied(error: &OpenError) -> bool {
    matches!(error.errno(), libc::EPERM | libc::EACCES)
}

fn opened_by(agent: &Agent) -> String {
    let path = agent.path().unwrap_or(std::path::Path::new("?"));
    format!("opened by the agent at {}", path.display())
}

/// Returns what [`choose_shards`] would choose now, and the capabilities of its port. No traffic is
/// disturbed. AF_XDP is not opened, because that would attach a program to the interface: its
/// capabilities are unknown. Other backends are opened and closed. Error: as [`choose`].
pub fn preview(
    iface: &Interface,
    addresses: &[IpAddr],
    want: Option<Backend>,
    config: &PortConfig,
    agent: &Agent,
) -> Result<(Option<Capabilities>, Choice), OpenError> {
    let (shards, slots) = lease(iface, addresses, config, 1)?;
    let unopened = |why: &str| {
        let reason = format!("{why} (whether it can be opened shows when a device is used)");
        Ok((None, Choice { backend: Backend::Xdp, reason, tried: Vec::new() }))
    };
    if slots.as_ref().is_none_or(|slots| slots.xdp_neighbour().is_none()) {
        if want == Some(Backend::Xdp) {
            return unopened("asked for");
        }
        if let (None, (Backend::Xdp, why)) = (want, best_for(iface))
            && policy::audit(iface).verdict(Backend::Xdp) == AuditVerdict::Clear
        {
            return unopened(&format!("{why}, and it bypasses no rule of this network namespace"));
        }
    }
    let sharing = (shards, slots.as_ref());
    let (ports, choice) = choose_shards(iface, addresses, want, config, sharing, agent)?;
    Ok((Some(ports[0].capabilities().clone()), choice))
}

/// The backend that fits the interface best, and why.
fn best_for(iface: &Interface) -> (Backend, String) {
    let name = &iface.name;
    if iface.loopback {
        return (Backend::Udp, format!("{name} is the loopback interface"));
    }
    let link = Rtnl::open().and_then(|mut rtnl| rtnl.link(iface.index));
    match link.as_ref().map(|link| link.kind.as_deref()) {
        Ok(Some("veth")) => return (Backend::Packet, format!("{name} is a veth")),
        Ok(Some(kind)) => return (Backend::Udp, format!("{name} {}", no_veth(kind))),
        Ok(None) => {}
        Err(e) => return (Backend::Udp, format!("{name} cannot be examined ({e})")),
    }
    match features::has_zero_copy(iface.index) {
        Ok(true) => (Backend::Xdp, format!("the driver of {name} has AF_XDP zero-copy")),
        Ok(false) => (Backend::Udp, format!("the driver of {name} has no AF_XDP zero-copy")),
        Err(e) => (
            Backend::Udp,
            format!("whether the driver of {name} has AF_XDP zero-copy is not known ({e})"),
        ),
    }
}

/// The words about a virtual interface that is no veth, to follow its name.
fn no_veth(kind: &str) -> String {
    const WAY: &str = "a bridge network of the engine's has a veth";
    match kind {
        "tun" => format!("is a tun, {BY_PROGRAM}: {WAY}"),
        "macvlan" | "macvtap" => format!("is a macvlan, which no agent can guard: {WAY}"),
        "ipvlan" | "ipvtap" => format!("is an ipvlan, which no agent can guard: {WAY}"),
        kind => format!("is a {kind}, not a veth"),
    }
}

/// About a tun.
const BY_PROGRAM: &str = "whose packets a program carries (slirp4netns, pasta, a tunnel)";

/// The reason why peers may not reach the addresses of an interface, if a program carries its
/// packets, as slirp4netns and pasta do for containers.
#[must_use]
pub fn carried_by_program(name: &str) -> Option<String> {
    let iface = Interface::by_name(name).ok()?;
    let link = Rtnl::open().and_then(|mut rtnl| rtnl.link(iface.index)).ok()?;
    (link.kind.as_deref() == Some("tun"))
        .then(|| format!("{name} is a tun, {BY_PROGRAM}, and translated addresses do not reach it"))
}

/// Whether the agent refuses because of rules, which it lists.
fn is_about_rules((refused, audit): &(Refused, Option<Audit>)) -> bool {
    matches!(refused.code, Code::Bypasses | Code::Unseen) && audit.is_some()
}

fn would_bypass(rules: &[String]) -> String {
    format!("it would bypass {}", list(rules))
}

fn acquire_from(
    backend: Backend,
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    shards: Shards,
    slots: Option<&Arc<Slots>>,
) -> Result<Vec<Parts>, OpenError> {
    let shared = shared_sockets(backend, addresses, slots)?;
    match backend {
        Backend::Udp => UdpPort::acquire(iface, addresses, config, shards, shared),
        Backend::Packet => PacketPort::acquire(iface, addresses, config, shards, shared),
        Backend::Xdp => XdpPort::acquire(iface, addresses, config, shards, shared),
        Backend::Sim => Err(OpenError::plain(
            backend,
            "the simulator has no interface",
            "choose afxdp, packet or udp",
        )),
    }
}

/// The reason for a backend that is taken even if it bypasses rules, with the rules that it
/// bypasses.
fn with_bypassed(why: &str, audit: &Audit, backend: Backend) -> String {
    match audit.verdict(backend) {
        AuditVerdict::Clear => why.to_owned(),
        AuditVerdict::Bypasses(rules) => format!("{why}; it bypasses {}", list(&rules)),
        AuditVerdict::Unseen(unseen) => {
            format!("{why}; it might bypass rules of this network namespace: {}", list(&unseen))
        }
    }
}

/// The first few items, and the number of the others.
fn list(items: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut text = items.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    if items.len() > SHOWN {
        text.push_str(&format!("; and {} more", items.len() - SHOWN));
    }
    text
}
