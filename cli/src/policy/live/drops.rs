//! Packets that rules of nftables dropped at a container's end on the host.

use std::collections::BTreeMap;
use std::path::Path;

use rocinante_lab::{LabError, Netns};
use serde_json::Value;

use super::all_chains_of;

/// Keys of `meta` that name an interface.
const INTERFACES: [&str; 4] = ["iif", "iifname", "oif", "oifname"];

/// The packets that rules of this namespace dropped of one container's, by family, table and
/// chain. The rules are those with a counter of their own that name its end on the host, or are in
/// a chain of that end alone: others drop packets of other containers as well. Empty without root
/// or `nft`.
pub(crate) fn dropped(end: &str) -> BTreeMap<String, u64> {
    let read = || -> Result<_, LabError> {
        let host = Netns::open(Path::new("/proc/self/ns/net"))?;
        let ruleset = host.json("nft -j list ruleset")?;
        let chains = all_chains_of(&host, &ruleset)?;
        let own = chains.into_iter().filter(|it| it.devices == [end]);
        let own = own.map(|it| [it.family.as_str(), &it.names[0], &it.names[1]].join(" "));
        Ok(counted(&ruleset, end, &own.collect::<Vec<_>>()))
    };
    read().unwrap_or_default()
}

/// Those of the rules of a rule set, with the chains of the end alone.
fn counted(ruleset: &Value, end: &str, own: &[String]) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    let items = ruleset["nftables"].as_array().into_iter().flatten();
    for rule in items.filter_map(|item| item.get("rule")) {
        let parts = rule["expr"].as_array().map(Vec::as_slice).unwrap_or_default();
        let names_it = |part: &Value| {
            let of = &part["match"];
            let key = of["left"]["meta"]["key"].as_str();
            of["op"] == "==" && of["right"] == end && key.is_some_and(|it| INTERFACES.contains(&it))
        };
        let drops = |part: &Value| ["drop", "reject"].iter().any(|it| part.get(it).is_some());
        let count = parts.iter().find_map(|part| part["counter"]["packets"].as_u64());
        let Some(count) = count.filter(|_| parts.iter().any(drops)) else { continue };
        let names = ["family", "table", "chain"].map(|key| rule[key].as_str().unwrap_or_default());
        let place = names.join(" ");
        if own.contains(&place) || parts.iter().any(names_it) {
            let sum: &mut u64 = all.entry(place).or_default();
            *sum = sum.saturating_add(count);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counters_of_rules_that_drop_the_packets_of_one_end_are_read() {
        let rule = |chain: &str, parts: &[Value]| {
            let rule = json!({"family": "bridge", "table": "t", "chain": chain, "expr": parts});
            json!({"rule": rule})
        };
        let of = |op: &str, key: &str, end: Value| {
            let left = json!({"meta": {"key": key}});
            json!({"match": {"op": op, "left": left, "right": end}})
        };
        let counter = |packets: u64| json!({"counter": {"packets": packets, "bytes": 1}});
        let (drop, reject) = (json!({"drop": null}), json!({"reject": {"type": "tcp reset"}}));
        let end = || of("==", "iifname", "veth1".into());
        let ruleset = json!({"nftables": [
            {"chain": {"family": "bridge", "table": "t", "name": "a", "hook": "forward"}},
            rule("a", &[end(), counter(7), drop.clone()]),
            rule("a", &[of("==", "oif", "veth1".into()), counter(5), reject]),
            // Another end, another test, several ends, no verdict, no counter or one of several.
            rule("b", &[of("==", "iifname", "veth2".into()), counter(1), drop.clone()]),
            rule("b", &[of("!=", "iifname", "veth1".into()), counter(1), drop.clone()]),
            rule("b", &[of("==", "iifname", json!({"set": ["veth1"]})), counter(1), drop.clone()]),
            rule("b", &[end(), counter(1)]),
            rule("b", &[end(), drop.clone()]),
            rule("b", &[end(), json!({"counter": "named"}), drop.clone()]),
            // Whatever passes there is the end's.
            rule("c", &[counter(3), drop]),
        ]});
        let own = ["bridge t c".to_owned()];
        let expected = [("bridge t a", 12), ("bridge t c", 3)];
        let expected = expected.map(|(place, count)| (place.to_owned(), count));
        assert_eq!(counted(&ruleset, "veth1", &own), expected.into());
        assert!(counted(&json!({}), "veth1", &own).is_empty());
    }
}
