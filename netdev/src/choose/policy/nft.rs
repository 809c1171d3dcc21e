//! nftables: chains and rules by nfnetlink (`include/uapi/linux/netfilter/nf_tables.h`).

use std::collections::{HashMap, HashSet};
use std::io;

use super::expression::{self, Context, Effect, be32};
use super::rules::{ADMIN, Audit};
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::query::text;
use crate::kernel::rtnl::socket::{Attributes, NetlinkSocket};

const NETLINK_NETFILTER: isize = 12;
const SUBSYS_NFTABLES: u16 = 10 << 8;
const NEWCHAIN: u16 = SUBSYS_NFTABLES | 3;
const GETCHAIN: u16 = SUBSYS_NFTABLES | 4;
const NEWRULE: u16 = SUBSYS_NFTABLES | 6;
const GETRULE: u16 = SUBSYS_NFTABLES | 7;
/// `struct nfgenmsg`: family, version, resource id.
const GEN_LEN: usize = 4;

const FAMILY_INET: u8 = 1;
const FAMILY_IPV4: u8 = 2;
const FAMILY_NETDEV: u8 = 5;
const FAMILY_IPV6: u8 = 10;

const HOOK_PREROUTING: u32 = 0;
const HOOK_INPUT: u32 = 1;
const HOOK_OUTPUT: u32 = 3;
const HOOK_POSTROUTING: u32 = 4;
const HOOK_INET_INGRESS: u32 = 5;
const HOOK_NETDEV_INGRESS: u32 = 0;
const HOOK_NETDEV_EGRESS: u32 = 1;

/// A chain's identity: family, table and name.
type ChainId = (u8, String, String);

struct Chain {
    id: ChainId,
    hook: Option<Hook>,
    drops: bool,
}

struct Hook {
    number: u32,
    /// The interfaces of a hook that belongs to interfaces; with a `*`, a prefix.
    devices: Vec<String>,
}

struct NftRule {
    handle: u64,
    /// The list of expressions, as the kernel sent it.
    expressions: Vec<u8>,
}

/// Adds the rules on the path of RoCEv2 through `iface`.
pub(super) fn audit(iface: &Interface, audit: &mut Audit) {
    let (chains, rules) = match read() {
        Ok(Some(ruleset)) => ruleset,
        Ok(None) => return,
        Err(e) => return audit.note_unseen("the nft ruleset", || ADMIN.explain(), &e),
    };
    for chain in &chains {
        let Some(place) = chain.hook.as_ref().and_then(|hook| place(chain.id.0, hook, iface))
        else {
            continue;
        };
        if chain.drops {
            audit.found(format!("nft: policy drop of {}", describe(&chain.id)), place.bypassed);
        }
        let mut visited = HashSet::new();
        let mut found = Vec::new();
        walk(&chain.id, &rules, &place.context, &mut visited, &mut found);
        for (id, handle) in found {
            audit.found(format!("nft: rule {handle} in {}", describe(&id)), place.bypassed);
        }
    }
}

/// The base chains at the ingress of an interface, in the calling thread's network namespace: a
/// program at tcx that redirects a frame has them passed by. Error: the kernel's: without
/// `CAP_NET_ADMIN` it does not say.
pub fn nft_at_ingress(interface: &str) -> io::Result<Vec<String>> {
    let mut socket = match NetlinkSocket::open(NETLINK_NETFILTER) {
        Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        socket => socket?,
    };
    let chains = chains(&mut socket)?.into_iter().flatten();
    let is_there = |chain: &Chain| {
        let hook = chain.hook.as_ref().filter(|hook| {
            let of = (chain.id.0, hook.number);
            of == (FAMILY_NETDEV, HOOK_NETDEV_INGRESS) || of == (FAMILY_INET, HOOK_INET_INGRESS)
        });
        hook.is_some_and(|hook| hook.devices.iter().any(|device| is_on(device, interface)))
    };
    Ok(chains.filter(is_there).map(|chain| describe(&chain.id)).collect())
}

/// All base chains and others; `None` if the kernel has no nftables.
fn chains(socket: &mut NetlinkSocket) -> io::Result<Option<Vec<Chain>>> {
    let mut chains = Vec::new();
    let asked = dump(socket, GETCHAIN, NEWCHAIN, |family, attributes| {
        chains.extend(chain_from(family, attributes));
    });
    match asked {
        // There is no such subsystem (or the module cannot be loaded).
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(None),
        asked => asked.map(|()| Some(chains)),
    }
}

fn describe((family, table, chain): &ChainId) -> String {
    let family = match *family {
        FAMILY_INET => "inet",
        FAMILY_IPV4 => "ip",
        FAMILY_IPV6 => "ip6",
        FAMILY_NETDEV => "netdev",
        _ => "other",
    };
    format!("chain {chain} of table {family} {table}")
}

/// A base chain that our datagrams would pass.
struct Place<'a> {
    context: Context<'a>,
    /// Whether a packet socket bypasses it.
    bypassed: bool,
}

/// Whether a hook is on the path of datagrams that start or end here.
fn place<'a>(family: u8, hook: &Hook, iface: &'a Interface) -> Option<Place<'a>> {
    let here = || hook.devices.iter().any(|device| is_on(device, &iface.name));
    let (loopback, ipv6_only) = (iface.loopback, family == FAMILY_IPV6);
    let incoming = Context { arrives_by: Some(iface), leaves_by: None, loopback, ipv6_only };
    let outgoing = Context { arrives_by: None, leaves_by: Some(iface), loopback, ipv6_only };
    let (context, bypassed) = match (family, hook.number) {
        (FAMILY_NETDEV, HOOK_NETDEV_INGRESS) | (FAMILY_INET, HOOK_INET_INGRESS) if here() => {
            (incoming, true)
        }
        (FAMILY_NETDEV, HOOK_NETDEV_EGRESS) if here() => (outgoing, false),
        (FAMILY_INET | FAMILY_IPV4 | FAMILY_IPV6, HOOK_PREROUTING | HOOK_INPUT) => (incoming, true),
        (FAMILY_INET | FAMILY_IPV4 | FAMILY_IPV6, HOOK_OUTPUT | HOOK_POSTROUTING) => {
            (outgoing, true)
        }
        _ => return None,
    };
    Some(Place { context, bypassed })
}

fn is_on(device: &str, name: &str) -> bool {
    device.strip_suffix('*').map_or(device == name, |prefix| name.starts_with(prefix))
}

/// Collects the rules of a chain that could affect us, and of the chains that it jumps to.
fn walk(
    id: &ChainId,
    rules: &HashMap<ChainId, Vec<NftRule>>,
    context: &Context<'_>,
    visited: &mut HashSet<ChainId>,
    found: &mut Vec<(ChainId, u64)>,
) {
    if !visited.insert(id.clone()) {
        return;
    }
    for rule in rules.get(id).map_or(&[][..], Vec::as_slice) {
        match expression::effect(&rule.expressions, context) {
            Effect::None => {}
            Effect::Some => found.push((id.clone(), rule.handle)),
            Effect::Jump(chain) => {
                walk(&(id.0, id.1.clone(), chain), rules, context, visited, found);
            }
        }
    }
}

type Ruleset = (Vec<Chain>, HashMap<ChainId, Vec<NftRule>>);

/// All chains and rules; `None` if the kernel has no nftables.
fn read() -> io::Result<Option<Ruleset>> {
    let mut socket = match NetlinkSocket::open(NETLINK_NETFILTER) {
        Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(None),
        socket => socket?,
    };
    let Some(chains) = chains(&mut socket)? else { return Ok(None) };
    let mut rules: HashMap<ChainId, Vec<NftRule>> = HashMap::new();
    dump(&mut socket, GETRULE, NEWRULE, |family, attributes| {
        if let Some((id, rule)) = rule_from(family, attributes) {
            rules.entry(id).or_default().push(rule);
        }
    })?;
    Ok(Some((chains, rules)))
}

fn dump(
    socket: &mut NetlinkSocket,
    request: u16,
    answer: u16,
    mut each: impl FnMut(u8, &[u8]),
) -> io::Result<()> {
    socket.request(request, true, &[0; GEN_LEN], &mut |kind, payload| {
        if let (true, Some((general, attributes))) = (kind == answer, payload.split_at_checked(4)) {
            each(general[0], attributes);
        }
    })
}

fn chain_from(family: u8, attributes: &[u8]) -> Option<Chain> {
    let (mut table, mut name, mut hook, mut drops) = (None, None, None, false);
    for (kind, value) in Attributes(attributes) {
        match kind {
            1 => table = Some(text(value)),
            3 => name = Some(text(value)),
            4 => hook = hook_from(value),
            5 => drops = be32(value) == Some(0), // NF_DROP
            _ => {}
        }
    }
    Some(Chain { id: (family, table?, name?), hook, drops })
}

fn hook_from(attributes: &[u8]) -> Option<Hook> {
    let mut hook = Hook { number: u32::MAX, devices: Vec::new() };
    for (kind, value) in Attributes(attributes) {
        match kind {
            1 => hook.number = be32(value)?,
            3 => hook.devices.push(text(value)),
            4 => hook.devices.extend(Attributes(value).map(|(kind, name)| match kind {
                2 => format!("{}*", text(name)), // NFTA_DEVICE_PREFIX
                _ => text(name),
            })),
            _ => {}
        }
    }
    Some(hook)
}

fn rule_from(family: u8, attributes: &[u8]) -> Option<(ChainId, NftRule)> {
    let (mut table, mut chain) = (None, None);
    let mut rule = NftRule { handle: 0, expressions: Vec::new() };
    for (kind, value) in Attributes(attributes) {
        match kind {
            1 => table = Some(text(value)),
            2 => chain = Some(text(value)),
            3 => rule.handle = value.first_chunk().map_or(0, |b| u64::from_be_bytes(*b)),
            4 => rule.expressions = value.to_vec(),
            _ => {}
        }
    }
    Some(((family, table?, chain?), rule))
}

/// Parses the payload of a message as a chain and as a rule, and follows that rule.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_payload(family: u8, payload: &[u8]) {
    let attributes = payload.get(4..).unwrap_or_default();
    let _ = chain_from(family, attributes);
    if let Some((_, rule)) = rule_from(family, attributes) {
        for loopback in [false, true] {
            let context =
                Context { arrives_by: None, leaves_by: None, loopback, ipv6_only: family == 10 };
            let _ = expression::effect(&rule.expressions, &context);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_named_as_nft_names_it() {
        let name = |family| describe(&(family, "t".to_owned(), "c".to_owned()));
        for (family, word) in [
            (FAMILY_INET, "inet"),
            (FAMILY_IPV4, "ip"),
            (FAMILY_IPV6, "ip6"),
            (FAMILY_NETDEV, "netdev"),
            (0xff, "other"),
        ] {
            assert_eq!(name(family), format!("chain c of table {word} t"));
        }
    }
}
