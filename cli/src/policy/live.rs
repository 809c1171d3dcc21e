//! `--live`: the rules and shapers on the path of a running container, and the backends that each
//! binds.

pub(crate) mod drops;

use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rocinante_lab::{Chain as Base, LabError, Netns, Rule};
use rocinante_netdev::{Interface, unlisted_rules};
use serde::Serialize;
use serde_json::Value;

use super::agent;
use super::table::{ALL as BINDS, BACKENDS, Effect, NONE as BYPASSED, NOT_AFXDP, UDP_ONLY};
use crate::ending;
use crate::messages::PROBE;

/// Disciplines that an interface has by default, or that only schedule.
const PLAIN: [&str; 6] = ["noqueue", "pfifo_fast", "pfifo", "fq_codel", "mq", "fq"];
/// Datagrams of a probe.
const PROBES: u64 = 10;
/// How long to wait for them at the host's end, and between two looks.
const PROBE_TIME: Duration = Duration::from_secs(1);
const PROBE_PAUSE: Duration = Duration::from_millis(20);

/// A rule or a shaper on the path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Found {
    /// `own` or `host`: the namespace.
    pub(super) place: &'static str,
    /// The rule or shaper, and its place.
    pub(super) what: String,
    /// Its effect on `udp`, `packet` and `afxdp`, if it matches the traffic.
    pub(super) effect: [Effect; 3],
}

/// The rules and shapers on a container's path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Live {
    /// Its interfaces with a host end here: `eth0 veth0`.
    pub(super) links: Vec<String>,
    /// The rules and shapers.
    pub(super) found: Vec<Found>,
    /// Pairs that shadow each other, and sources that could not be read.
    pub(super) warnings: Vec<String>,
    /// Of `--probe`: datagrams sent, and those counted at the host end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) probe: Option<(u64, u64)>,
}

/// Reads the path of the container `name`: a name of `ip netns`, a path, or a process. Changes
/// nothing, unless `probe` names a peer: then one counter, which it removes. Error: there is no
/// such container or it has no interface with a host end in the caller's namespace.
pub(super) fn look(name: &str, probe: Option<IpAddr>) -> Result<Live, String> {
    let open =
        |path: &Path| Netns::open(path).map_err(|error| format!("{}: {error}", path.display()));
    let (own, host) = (open(&place_of(name))?, open(Path::new("/proc/self/ns/net"))?);
    let in_words = |error: LabError| error.to_string();
    let pairs = pairs(&own, &host).map_err(in_words)?;
    if pairs.is_empty() {
        return Err(format!(
            "no interface of {name} has its other end in this namespace: run this in the \
             namespace of its host"
        ));
    }
    let mut live = Live::default();
    for pair in &pairs {
        live.links.push(format!("{} {}", pair.inner, pair.outer));
        let addresses = own.run(|| Interface::by_name(&pair.inner)).map_err(in_words)?;
        let addresses = addresses.map_err(|error| error.to_string())?.addresses;
        live.own(&own, pair, &addresses).map_err(in_words)?;
        live.host(&host, pair, &addresses).map_err(in_words)?;
        let inode = std::fs::metadata(own.path()).map_or(0, |it| it.ino());
        match agent::limits(&pair.outer, inode) {
            Ok(limits) => limits.into_iter().for_each(|(what, whom)| live.add("host", what, whom)),
            Err(error) => live.warnings.push(format!("the agent cannot be asked: {error}")),
        }
    }
    if let Some(peer) = probe {
        live.probe = Some(count_probe(&own, &host, &pairs[0], peer).map_err(in_words)?);
    }
    Ok(live)
}

/// The file of a namespace.
pub(crate) fn place_of(name: &str) -> PathBuf {
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        format!("/proc/{name}/ns/net").into()
    } else if name.contains('/') {
        name.into()
    } else {
        Path::new("/run/netns").join(name)
    }
}

/// The host's end of the first interface of a container that has one in this namespace.
pub(crate) fn host_end(name: &str) -> Option<String> {
    let own = Netns::open(&place_of(name)).ok()?;
    let host = Netns::open(Path::new("/proc/self/ns/net")).ok()?;
    pairs(&own, &host).ok()?.into_iter().next().map(|pair| pair.outer)
}

/// A veth of a container and its host end.
#[derive(Debug, PartialEq, Eq)]
struct Pair {
    inner: String,
    outer: String,
    bridge: Option<String>,
}

fn pairs(own: &Netns, host: &Netns) -> Result<Vec<Pair>, LabError> {
    const LINKS: &str = "ip -j -d link show";
    Ok(joined(&own.json(LINKS)?, &host.json(LINKS)?))
}

/// Joins veths whose ends name each other.
fn joined(own: &Value, host: &Value) -> Vec<Pair> {
    let list = |links: &Value| links.as_array().cloned().unwrap_or_default();
    let veth = |link: &Value| link["linkinfo"]["info_kind"] == "veth";
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let hosts = list(host);
    let mut pairs = Vec::new();
    for inner in list(own).iter().filter(|link| veth(link)) {
        let outer = hosts.iter().filter(|link| veth(link)).find(|outer| {
            outer["ifindex"] == inner["link_index"] && outer["link_index"] == inner["ifindex"]
        });
        let Some(outer) = outer else { continue };
        if let (Some(inner), Some(name)) = (text(&inner["ifname"]), text(&outer["ifname"])) {
            pairs.push(Pair { inner, outer: name, bridge: text(&outer["master"]) });
        }
    }
    pairs
}

/// The addresses of an interface, each with its prefix length.
type Addresses = [(IpAddr, u8)];

/// A base chain of nftables with rules, or with the policy `drop`. Rules that `nft` does not list
/// have this form, too.
#[derive(Debug, PartialEq, Eq)]
struct Chain {
    family: String,
    hook: String,
    /// Of a chain of interfaces; empty if `nft` does not list them.
    devices: Vec<String>,
    /// Its table and its name.
    names: [String; 2],
    what: String,
}

impl Chain {
    /// Its family and hook. A chain of `inet` at ingress is one of interfaces, as all of `netdev`.
    fn place(&self) -> (&str, &str) {
        match (self.family.as_str(), self.hook.as_str()) {
            ("inet", "ingress") => ("netdev", "ingress"),
            place => place,
        }
    }

    fn is_of_interfaces(&self) -> bool {
        self.place().0 == "netdev"
    }
}

/// The base chains of a rule set that may do something.
fn chains(ruleset: &Value) -> Vec<Chain> {
    let items = ruleset["nftables"].as_array().cloned().unwrap_or_default();
    let word = |item: &Value, key: &str| item[key].as_str().unwrap_or_default().to_owned();
    let of = |item: &Value, chain: &Value| {
        ["family", "table"].iter().all(|key| item[*key] == chain[*key])
            && item["chain"] == chain["name"]
    };
    let bases = items.iter().filter_map(|item| item.get("chain")).filter(|c| c["hook"].is_string());
    bases
        .filter_map(|chain| {
            let rules = items.iter().filter_map(|item| item.get("rule")).filter(|r| of(r, chain));
            let rules = rules.count();
            let dropping = chain["policy"] == "drop";
            if rules == 0 && !dropping {
                return None;
            }
            let policy = if dropping { ", policy drop" } else { "" };
            let [family, table, name, hook] =
                ["family", "table", "name", "hook"].map(|key| word(chain, key));
            let what = format!("nft {family} {table} {name} ({hook}): {rules} rules{policy}");
            let devices = match &chain["dev"] {
                Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
                one => Vec::from_iter(one.as_str()),
            };
            let devices = devices.into_iter().map(str::to_owned).collect();
            Some(Chain { family, hook, devices, names: [table, name], what })
        })
        .collect()
}

/// The base chains of a namespace that may do something, with their interfaces.
fn all_chains(netns: &Netns) -> Result<Vec<Chain>, LabError> {
    all_chains_of(netns, &netns.json("nft -j list ruleset")?)
}

/// As [`all_chains`], of the namespace's rule set.
fn all_chains_of(netns: &Netns, ruleset: &Value) -> Result<Vec<Chain>, LabError> {
    let mut chains = chains(ruleset);
    for chain in chains.iter_mut().filter(|c| c.is_of_interfaces() && c.devices.is_empty()) {
        let [table, name] = &chain.names;
        // Unlike the JSON of nft 1.0.6, the text names the interfaces.
        let list = format!("nft list chain {} {table} {name}", chain.family);
        chain.devices = devices(&netns.command(&list)?);
    }
    Ok(chains)
}

/// The interfaces in the text of a chain: `device "a"`, `devices = { a, b }`.
fn devices(chain: &str) -> Vec<String> {
    let hook = chain.lines().find(|line| line.contains("hook")).unwrap_or_default();
    let Some((_, after)) = hook.split_once("device") else { return Vec::new() };
    let names = after.split(" priority").next().unwrap_or_default();
    let names = names.strip_prefix("s =").unwrap_or(names);
    let names = names.split(|c: char| c.is_whitespace() || "{},\"".contains(c));
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

impl Live {
    fn add(&mut self, place: &'static str, what: String, effect: [Effect; 3]) {
        let found = Found { place, what, effect };
        if !self.found.contains(&found) {
            self.found.push(found);
        }
    }

    /// The rules of a namespace that `nft` does not list, on the path of the traffic from and to
    /// these addresses by these interfaces.
    fn unlisted(
        &mut self,
        netns: &Netns,
        place: &'static str,
        interfaces: &[&str],
        addresses: &Addresses,
    ) -> Result<Vec<Chain>, LabError> {
        let mut chains = Vec::new();
        for name in interfaces {
            let read = netns.run(|| {
                let interface = Interface::by_name(name)?;
                let addresses = addresses.to_vec();
                let interface = Interface { addresses, ..interface };
                Ok::<_, std::io::Error>(unlisted_rules(&interface, place == "host"))
            })?;
            let (rules, unread) = read.unwrap_or_else(|error| (vec![], vec![error.to_string()]));
            for rule in rules {
                let names = [String::new(), String::new()];
                let (family, hook) = (rule.family.to_owned(), rule.hook.to_owned());
                chains.push(Chain { family, hook, devices: vec![], names, what: rule.what });
            }
            for what in unread {
                let warning = format!("{place}: {what}");
                if !self.warnings.contains(&warning) {
                    self.warnings.push(warning);
                }
            }
        }
        chains.dedup();
        Ok(chains)
    }

    fn own(&mut self, own: &Netns, pair: &Pair, addresses: &Addresses) -> Result<(), LabError> {
        let mut chains = all_chains(own)?;
        chains.extend(self.unlisted(own, "own", &[&pair.inner], addresses)?);
        for chain in chains {
            let here = !chain.is_of_interfaces() || chain.devices.contains(&pair.inner);
            let effect = match chain.place() {
                ("netdev", "egress") => NOT_AFXDP,
                ("bridge" | "arp", _) | (_, "forward") => continue,
                _ => UDP_ONLY,
            };
            if here {
                self.add("own", chain.what, effect);
            }
        }
        self.disciplines(own, "own", &pair.inner, NOT_AFXDP)?;
        let redirection = self.filters(own, "own", &pair.inner, [UDP_ONLY, NOT_AFXDP])?;
        for device in redirection.iter().flatten() {
            self.disciplines(own, "own", device, UDP_ONLY)?;
        }
        Ok(())
    }

    fn host(&mut self, host: &Netns, pair: &Pair, addresses: &Addresses) -> Result<(), LabError> {
        self.disciplines(host, "host", &pair.outer, BINDS)?;
        let mut redirection = self.filters(host, "host", &pair.outer, [BINDS, BINDS])?;
        redirection = redirection.or(agent_shaper(host, &pair.outer)?.map(|name| vec![name]));
        for device in redirection.iter().flatten() {
            self.disciplines(host, "host", device, BINDS)?;
        }
        let mut uplinks = uplinks(host)?;
        let tunnels = match &pair.bridge {
            Some(bridge) => {
                vxlan_ports(&host.json(&format!("ip -j -d link show master {bridge}"))?)
            }
            None => Vec::new(),
        };
        uplinks.extend(tunnels.iter().cloned());
        uplinks.sort_unstable();
        uplinks.dedup();
        for uplink in uplinks.iter().filter(|uplink| Some(*uplink) != pair.bridge.as_ref()) {
            self.disciplines(host, "host", uplink, BINDS)?;
        }
        let bridged = pair.bridge.is_some();
        let interfaces: Vec<&str> =
            [&pair.outer].into_iter().chain(&uplinks).map(String::as_str).collect();
        let mut chains = all_chains(host)?;
        chains.extend(self.unlisted(host, "host", &interfaces, addresses)?);
        for chain in chains {
            let devices = &chain.devices;
            let effect = match chain.place() {
                ("netdev", "ingress") if devices.contains(&pair.outer) => {
                    if redirection.is_some() {
                        self.warnings.push(format!(
                            "{} is shadowed: the ingress of {} is redirected before it; put the \
                             rule into the family bridge, or on tcx before the redirection",
                            chain.what, pair.outer
                        ));
                        BYPASSED
                    } else {
                        BINDS
                    }
                }
                ("netdev", "egress")
                    if devices.iter().any(|name| *name == pair.outer || uplinks.contains(name)) =>
                {
                    BINDS
                }
                // The host itself sends and receives the packets of VXLAN.
                ("ip" | "ip6" | "inet", hook) if !tunnels.is_empty() && hook != "forward" => {
                    self.add("host", format!("{}, on VXLAN's UDP 4789", chain.what), BINDS);
                    continue;
                }
                ("netdev" | "arp", _) | (_, "input" | "output") => continue,
                // IP does not forward bridged frames.
                ("xfrm", _) if bridged => continue,
                ("bridge", _) if !bridged => continue,
                ("bridge", _) => BINDS,
                (family, _) if bridged && !bridge_nf_call(host, family)? => {
                    self.warnings.push(format!(
                        "{} does not see bridged frames: bridge-nf-call-iptables or \
                         bridge-nf-call-ip6tables is 0",
                        chain.what
                    ));
                    BYPASSED
                }
                _ => BINDS,
            };
            self.add("host", chain.what, effect);
        }
        Ok(())
    }

    /// Adds the disciplines of `device` that do more than schedule.
    fn disciplines(
        &mut self,
        netns: &Netns,
        place: &'static str,
        device: &str,
        effect: [Effect; 3],
    ) -> Result<(), LabError> {
        let listing = netns.json(&format!("tc -j qdisc show dev {device}"))?;
        for qdisc in listing.as_array().into_iter().flatten() {
            let kind = qdisc["kind"].as_str().unwrap_or_default();
            if !kind.is_empty() && !PLAIN.contains(&kind) && !["ingress", "clsact"].contains(&kind)
            {
                self.add(place, format!("tc {kind} on {device}"), effect);
            }
        }
        Ok(())
    }

    /// Adds the filters and programs of `device`. Returns where its ingress is redirected to, if it
    /// is: the devices that send it on.
    fn filters(
        &mut self,
        netns: &Netns,
        place: &'static str,
        device: &str,
        [ingress, egress]: [[Effect; 3]; 2],
    ) -> Result<Option<Vec<String>>, LabError> {
        let qdiscs = netns.json(&format!("tc -j qdisc show dev {device}"))?;
        let clsact = qdiscs.as_array().into_iter().flatten().any(|q| q["kind"] == "clsact");
        let mut redirection = None;
        for (hook, effect) in [("ingress", ingress), ("egress", egress)] {
            // A discipline `ingress` answers for egress, too.
            let listing = match (clsact, hook) {
                (false, "egress") => Value::Null,
                _ => netns.json(&format!("tc -j filter show dev {device} {hook}"))?,
            };
            if listing.as_array().is_some_and(|list| !list.is_empty()) {
                self.add(place, format!("tc filters on {hook} of {device}"), effect);
                if hook == "ingress" {
                    redirection = redirected(&listing);
                }
            }
            let programs = netns.run(|| {
                let index = rocinante_netdev::Interface::by_name(device)?.index;
                rocinante_netdev::tcx_programs(index, hook == "ingress")
            })?;
            match programs {
                Ok(0) => {}
                Ok(n) => self.add(place, format!("tcx {hook} of {device}: {n} programs"), effect),
                Err(error) => self.warnings.push(format!(
                    "the tcx programs on {hook} of {device} cannot be read: {error}"
                )),
            }
        }
        Ok(redirection)
    }
}

/// The device to which the agent's program redirects the ingress of this one, if it does
/// (docs/agent.md).
fn agent_shaper(host: &Netns, outer: &str) -> Result<Option<String>, LabError> {
    host.run(|| {
        let index = Interface::by_name(outer).ok()?.index;
        let name = format!("roce-{index}");
        Interface::by_name(&name).is_ok().then_some(name)
    })
}

/// The devices that these filters redirect to, if one redirects.
fn redirected(filters: &Value) -> Option<Vec<String>> {
    let filters = filters.as_array().into_iter().flatten();
    let actions = filters.filter_map(|filter| filter["options"]["actions"].as_array()).flatten();
    let redirects: Vec<_> = actions.filter(|a| a["mirred_action"] == "redirect").collect();
    let leaving = redirects.iter().filter(|redirect| redirect["direction"] == "egress");
    let devices = leaving.filter_map(|redirect| redirect["to_dev"].as_str()).map(str::to_owned);
    (!redirects.is_empty()).then(|| devices.collect())
}

/// The interfaces of the default routes.
fn uplinks(host: &Netns) -> Result<Vec<String>, LabError> {
    let mut names = Vec::new();
    for family in ["-4", "-6"] {
        let routes = host.json(&format!("ip -j {family} route show default"))?;
        let devices = routes.as_array().into_iter().flatten().filter_map(|r| r["dev"].as_str());
        names.extend(devices.map(str::to_owned));
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// The VXLAN devices among the ports of a bridge, and the devices below them.
fn vxlan_ports(ports: &Value) -> Vec<String> {
    let ports = ports.as_array().into_iter().flatten();
    let tunnels = ports.filter(|port| port["linkinfo"]["info_kind"] == "vxlan");
    let names = tunnels.flat_map(|port| [&port["ifname"], &port["linkinfo"]["info_data"]["link"]]);
    names.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether rules of this family see bridged frames.
fn bridge_nf_call(host: &Netns, family: &str) -> Result<bool, LabError> {
    let names: &[&str] = match family {
        "ip" => &["iptables"],
        "ip6" => &["ip6tables"],
        _ => &["iptables", "ip6tables"],
    };
    host.run(|| {
        names.iter().all(|name| {
            std::fs::read_to_string(format!("/proc/sys/net/bridge/bridge-nf-call-{name}"))
                .is_ok_and(|value| value.trim() == "1")
        })
    })
}

/// Sends datagrams from the container, and counts them at its host end: those sent, those counted.
fn count_probe(
    own: &Netns,
    host: &Netns,
    pair: &Pair,
    peer: IpAddr,
) -> Result<(u64, u64), LabError> {
    let failed = |error: std::io::Error| LabError::Output {
        command: format!("the probe of {peer}"),
        problem: error.to_string(),
    };
    let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = own.run(|| UdpSocket::bind((any, 0)))?.map_err(failed)?;
    let source = socket.local_addr().map_err(failed)?.port();
    // Not at `netdev` ingress, which a redirection to an ifb would shadow.
    let family = if pair.bridge.is_some() { "bridge" } else { "inet" };
    let chain = Base { family, hook: "prerouting", device: None, priority: -500 };
    let from = &pair.outer;
    let rule = format!("iifname {from:?} udp sport {source} udp dport {PROBE} counter name hits");
    let seen = Rule::in_the_place_of(host, "rocinante_probe", &[(chain, &rule)])?;
    let sent = (0..PROBES).filter(|_| socket.send_to(b"probe", (peer, PROBE)).is_ok());
    let sent = sent.count() as u64;
    // The kernel first asks for the neighbour's address.
    let deadline = Instant::now() + PROBE_TIME;
    let mut counted = seen.counter()?.packets;
    while counted < sent && Instant::now() < deadline && ending::check_signal().is_ok() {
        std::thread::sleep(PROBE_PAUSE);
        counted = seen.counter()?.packets;
    }
    seen.remove()?;
    Ok((sent, counted))
}

/// The lines for people.
pub(super) fn lines(live: &Live) -> Vec<String> {
    let mut lines: Vec<String> =
        live.links.iter().map(|link| format!("path: {}", link.replace(' ', " to "))).collect();
    for Found { place, what, effect } in &live.found {
        let effects: Vec<_> = BACKENDS
            .iter()
            .zip(effect)
            .map(|(netdev, effect)| format!("{netdev} {effect}"))
            .collect();
        lines.push(format!("{place:4}  {what}: {}", effects.join(", ")));
    }
    if live.found.is_empty() {
        lines.push("nothing found in nftables, iptables, IPsec and tc".to_owned());
    }
    lines.extend(live.warnings.iter().map(|warning| format!("warning: {warning}")));
    if let Some((sent, counted)) = live.probe {
        lines.push(format!("probe: {sent} datagrams sent, {counted} counted at the host end"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn veths_that_name_each_other_are_joined() {
        let veth = |name: &str, index: u32, link: u32| {
            json!({"ifname": name, "ifindex": index, "link_index": link,
                   "linkinfo": {"info_kind": "veth"}})
        };
        let mut outer = veth("veth7", 9, 2);
        outer["master"] = "br0".into();
        let own = json!([{"ifname": "lo", "ifindex": 1}, veth("eth0", 2, 9), veth("eth1", 3, 4)]);
        let host = json!([veth("other", 4, 5), outer]);
        let due = Pair { inner: "eth0".into(), outer: "veth7".into(), bridge: Some("br0".into()) };
        assert_eq!(joined(&own, &host), [due]);
    }

    #[test]
    fn empty_chains_do_nothing() {
        let chain = |name: &str, policy: &str| {
            json!({"chain": {"family": "inet", "table": "t", "name": name, "hook": "forward",
                             "policy": policy}})
        };
        let rule = json!({"rule": {"family": "inet", "table": "t", "chain": "b", "expr": []}});
        let list = json!({"nftables": [chain("a", "accept"), chain("b", "accept"),
                                       chain("c", "drop"), rule]});
        let found: Vec<_> = chains(&list).into_iter().map(|chain| chain.what).collect();
        assert_eq!(
            found,
            ["nft inet t b (forward): 1 rules", "nft inet t c (forward): 0 rules, policy drop"]
        );
    }

    #[test]
    fn interfaces_of_a_chain_are_read() {
        let chain = |devices: &str| {
            format!(
                "table netdev s {{\n chain f {{\n  type filter hook ingress {devices} priority filter; policy accept;\n"
            )
        };
        assert_eq!(devices(&chain("device \"d0\"")), ["d0"]);
        assert_eq!(devices(&chain("devices = { \"d0\", ens1 }")), ["d0", "ens1"]);
        assert!(devices("table inet s {").is_empty());
    }

    #[test]
    fn redirections_are_read() {
        let filter = |action: &str, direction: &str| {
            let mirred = json!({"kind": "mirred", "mirred_action": action, "direction": direction,
                                "to_dev": "ifb0"});
            json!([{"kind": "u32"}, {"kind": "u32", "options": {"actions": [mirred]}}])
        };
        assert_eq!(redirected(&filter("redirect", "egress")), Some(vec!["ifb0".to_owned()]));
        assert_eq!(redirected(&filter("redirect", "ingress")), Some(vec![]));
        assert_eq!(redirected(&filter("mirror", "egress")), None);
        assert_eq!(redirected(&Value::Null), None);
    }

    #[test]
    fn containers_are_named_three_ways() {
        let of = |name: &str| place_of(name).to_string_lossy().into_owned();
        assert_eq!(
            ["12", "blue", "/run/x"].map(of),
            ["/proc/12/ns/net", "/run/netns/blue", "/run/x"]
        );
    }
}
