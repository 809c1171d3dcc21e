//! The cost of a connection to the network.

use std::time::Duration;

use rocinante_cli::output::{Failure, Result};
use rocinante_lab::{BRIDGE, Chain, Container, Netns, Rule};
use serde_json::Value;

use super::{Figures, in_words, named};
use crate::workers::{Errand, Link, OnDemand, PlaceArgs, Places, Work};

/// The longest time until the first message has arrived, and that of all messages.
const WITHIN: Duration = Duration::from_secs(20);
/// Messages whose packets are counted.
const MESSAGES: u64 = 200;

/// The figures of messages of `size` bytes.
pub(super) fn measure(
    places: &mut Places,
    args: &PlaceArgs,
    work: &Work,
    size: u64,
) -> Result<Figures> {
    places.prepare(Link::NoOffload, 2)?;
    let mut figures = packets(places, work, size)?;
    // Its tables are empty.
    let fresh = Places::of(args, Link::Bridge, 2)?;
    figures.extend(entries(&fresh, work)?);
    Ok(figures)
}

/// Packets and bytes of a message, on a link on which each packet is by itself.
fn packets(places: &Places, work: &Work, size: u64) -> Result<Figures> {
    let container = places.container(Link::NoOffload, 0)?;
    let mut pair = places.on_demand(Link::NoOffload, work, 0)?;
    pair.ready(WITHIN)?.check(work)?;
    let before = Traffic::of(container)?;
    send(&mut pair)?;
    let after = Traffic::of(container)?;
    let each = |now: u64, then: u64| (now - then) as f64 / MESSAGES as f64;
    let bytes = each(after.bytes, before.bytes) - size as f64;
    let packets = each(after.packets, before.packets);
    Ok(named([("packets", packets), ("header_bytes", bytes)]))
}

fn send(pair: &mut OnDemand) -> Result {
    pair.ask(Errand { messages: MESSAGES, millis: WITHIN.as_millis() as u64 });
    let sent = pair.sent(2 * WITHIN)?;
    let sent = sent.ok_or_else(|| Failure::Failed("the messages did not arrive".into()))?;
    match sent.error {
        Some(why) => Err(Failure::Failed(why)),
        None if sent.messages < MESSAGES => {
            Err(Failure::Failed(format!("{} messages of {MESSAGES} arrived", sent.messages)))
        }
        None => Ok(()),
    }
}

/// Packets and bytes of a container's interface, both ways together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Traffic {
    packets: u64,
    bytes: u64,
}

impl Traffic {
    fn of(container: &Container) -> Result<Self> {
        let command = format!("ip -j -s link show dev {}", Container::DEVICE);
        let links = container.netns().json(&command).map_err(in_words)?;
        let traffic = Self::parse(&links);
        traffic.ok_or_else(|| Failure::Failed(format!("{command}: no counters in {links}")))
    }

    fn parse(links: &Value) -> Option<Self> {
        let ways = &links[0]["stats64"];
        let sum = |name: &str| Some(ways["rx"][name].as_u64()? + ways["tx"][name].as_u64()?);
        Some(Self { packets: sum("packets")?, bytes: sum("bytes")? })
    }
}

/// Entries of a connection in tables of the host and of the sender.
fn entries(places: &Places, work: &Work) -> Result<Figures> {
    let (host, container) = (places.lab()?.host(), places.container(Link::Plain, 0)?);
    // A rule that asks for it makes the bridge track connections. Where the kernel cannot, there is
    // no figure.
    let chain = Chain { hook: "prerouting", ..Chain::BRIDGE };
    let tracked = Rule::new(host, &[(chain, "ct state new counter name hits")]);
    let mut pair = places.on_demand(Link::Plain, work, 0)?;
    pair.ready(WITHIN)?.check(work)?;
    send(&mut pair)?;
    let count = |line: &str, is: fn(&Value) -> bool| {
        let listing = container.netns().json(line).map_err(in_words)?;
        Ok::<f64, Failure>(
            listing.as_array().into_iter().flatten().filter(|it| is(it)).count() as f64
        )
    };
    let device = Container::DEVICE;
    let neighbours = count(&format!("ip -j neigh show dev {device}"), |it| it["dst"].is_string())?;
    let addresses = container.netns().json(&format!("ip -j address show dev {device}"));
    let addresses = addresses.map_err(in_words)?;
    let addresses = addresses[0]["addr_info"].as_array().map_or(0, Vec::len);
    let mut figures = named([
        ("neighbours", neighbours),
        ("addresses", addresses as f64),
        ("link_addresses", learnt(host, container)? as f64),
    ]);
    if let (Ok(_rule), Some(count)) = (tracked, tracks(host)?) {
        // One is that of the exchange between the two processes.
        figures.insert("tracked".into(), count.saturating_sub(1) as f64);
    }
    Ok(figures)
}

/// Connections that a namespace tracks. `None` if its kernel cannot.
fn tracks(netns: &Netns) -> Result<Option<u64>> {
    let count = netns.run(|| std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count"));
    Ok(count.map_err(in_words)?.ok().and_then(|count| count.trim().parse().ok()))
}

/// Link-layer addresses that the bridge has learnt from a container.
fn learnt(host: &Netns, container: &Container) -> Result<usize> {
    let end = container.host_end();
    let listing = host.json(&format!("bridge -j fdb show brport {end}")).map_err(in_words)?;
    let is_learnt = |entry: &&Value| entry["master"] == BRIDGE && entry["state"] != "permanent";
    Ok(listing.as_array().into_iter().flatten().filter(is_learnt).count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packets_are_those_of_both_ways() {
        let way = |bytes, packets| json!({"bytes": bytes, "packets": packets, "errors": 9});
        let links = json!([{"ifname": "eth0", "stats64": {"rx": way(10, 2), "tx": way(500, 3)}}]);
        assert_eq!(Traffic::parse(&links), Some(Traffic { packets: 5, bytes: 510 }));
        assert_eq!(Traffic::parse(&json!([{"ifname": "eth0"}])), None);
    }
}
