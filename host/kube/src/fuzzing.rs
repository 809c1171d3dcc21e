//! Entry points for fuzz targets only: words of users, and of schedulers, as functions of bytes.
//! Each panics where something is taken that is beyond its bounds, or is other when it is written
//! and read again.

use rocinante_placement::{Rates, Uplink, demand, place, placed, to_json, uplinks};
use serde_json::{Value, json};

use crate::dra::DRIVER;
use crate::dra::claim::{Claim, Record};
use crate::wire::{Arguments, Binding};

/// The `opaque` parameters of a claim.
pub fn parameters(bytes: &[u8]) {
    const UID: &str = "0f1e2d3c-4b5a";
    let Ok(parameters) = serde_json::from_slice::<Value>(bytes) else { return };
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "n", "uid": UID},
        "spec": {},
        "status": {
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}],
            "allocation": {"devices": {
                "results": [{
                    "request": "r", "driver": DRIVER, "pool": "n1", "device": "ens1",
                    "shareID": "s", "consumedCapacity": {"egress": "3M", "ingress": "1M"},
                }],
                "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
            }},
        },
    });
    let claim: Claim = serde_json::from_value(claim).expect("a claim");
    match Record::read(&claim, UID, "n1") {
        Ok(record) => {
            let text = serde_json::to_vec(&record).expect("JSON");
            assert_eq!(serde_json::from_slice::<Record>(&text).expect("it is read"), record);
            assert_eq!(record.cdi()["devices"].as_array().map(Vec::len), Some(1));
        }
        Err(why) => assert!(why.len() < 512 && !why.contains(char::is_control), "{why:?}"),
    }
}

/// Annotations of pods and of nodes.
pub fn annotation(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(wanted) = demand(text) {
        let nodes = [Uplink::new("ens1", 9_000_000_000), Uplink::new("ens2", 6_000_000_000)];
        if let Ok(places) = place(&nodes, &wanted, 1000) {
            assert_eq!(places.len(), wanted.len());
            for (at, uplink) in nodes.iter().enumerate() {
                let there = places.iter().zip(&wanted).filter(|(place, _)| **place == at);
                let sum = there.fold(Rates::default(), |sum, (_, it)| sum.with(it.min));
                assert!(uplink.free().hold(sum), "{sum:?} at {uplink:?}");
            }
        }
    }
    if let Ok(uplinks_of_node) = uplinks(text) {
        let again = to_json(&uplinks_of_node).and_then(|text| uplinks(&text));
        assert_eq!(again, Ok(uplinks_of_node));
    }
    if let Ok(places) = placed(text) {
        assert_eq!(to_json(&places).and_then(|text| placed(&text)), Ok(places));
    }
}

/// The body of a scheduler's request.
pub fn body(bytes: &[u8]) {
    if let Ok((pod, candidates)) = Arguments::parsed(bytes) {
        let _ = pod.annotation("rdma_interfaces_required").map(demand);
        let fits: Vec<bool> = (0..candidates.names().len()).map(|nth| nth % 2 == 0).collect();
        let filtered = json!(candidates.filtered(&fits));
        let kept = [&filtered["Nodes"]["items"], &filtered["NodeNames"]];
        let kept = kept.iter().filter_map(|it| Some(it.as_array()?.len())).sum::<usize>();
        assert_eq!(kept, fits.len().div_ceil(2));
    }
    let _ = serde_json::from_slice::<Binding>(bytes);
}
