//! Limits that the programs of a container keep together.

use rocinante_agent::host::SourceFilter;
use rustix::process::Signal;
use serde_json::Value;

use crate::asker::eventually;
use crate::lab::{Host, host_or_skip};
use crate::pages::{answers, got, serving, value};
use crate::reload::reload;

/// A class for all containers by the names of their ends.
fn class(rdma_max: &str, exceeded: &str) -> String {
    let lines = "[[class]]\nname = \"few\"\ncontainers = [\"veth*\"]\n";
    format!("{lines}rdma_max = {rdma_max:?}\nrdma_exceeded = {exceeded:?}\n")
}

fn status(host: &Host, container: usize) -> Value {
    let name = host.container(container).host_end();
    let status = host.status();
    let all = status["containers"].as_array().expect("a list");
    all.iter().find(|it| it["name"] == name).expect("it is known").clone()
}

/// The limit of a resource, its use, the peak of that, and refusals.
fn used(host: &Host, container: usize, resource: &str) -> [Option<u64>; 4] {
    let of = &status(host, container)["rdma"][resource];
    ["max", "current", "peak", "events"].map(|name| of[name].as_u64())
}

#[test]
fn a_container_that_holds_more_is_reported_or_cut_off() {
    let mut host = host_or_skip!("quota::a_container_that_holds_more", 2);
    serving(&mut host);
    reload(&host, &class("hca_object=9", "report"));
    let [mut hostile, mut other] = [0, 1].map(|container| host.asker(container));
    let addresses = [0, 1].map(|container| host.addresses(container)[0]);
    hostile.granted(addresses[0]);
    other.granted(addresses[1]);
    // It knows no limits, and has two of each kind of object.
    answers(&mut hostile, "old-device 1 eth0", "device 1");
    answers(&mut hostile, "count 1", "done");
    host.logged(&["hold more", "veth0", "hca_object=10 of 9"]);
    assert_eq!(used(&host, 0, "hca_object"), [Some(9), Some(10), Some(10), Some(0)]);
    // The other container keeps to its own limit.
    answers(&mut other, "device 1 eth0", "device 1");
    answers(&mut other, "charge 1 8 0", "done");
    answers(&mut other, "charge 0 2 0", "hca_object=9");
    let (_, said) = host.operator(&["status", "veth1"]);
    assert!(said.contains("  hca_object: 8 of 9, peak 8, 1 refused\n"), "{said}");
    let text = got(&host, "/metrics");
    for (series, count) in [("max", 9), ("current", 8), ("peak", 8), ("events_total", 1)] {
        let labels = "container=\"veth1\",resource=\"hca_object\"";
        let series = format!("rocinante_rdma_{series}{{{labels}}}");
        assert_eq!(value(&text, &series), Some(count), "{text}");
    }
    hostile.granted(addresses[0]);
    assert!(host.may_leave(0).contains(&addresses[0]));
    reload(&host, &class("hca_object=9", "cut_off"));
    host.logged(&["is cut off", "veth0"]);
    // The log says so before it is done.
    eventually("nothing leaves it", || host.may_leave(0).is_empty());
    assert_eq!(status(&host, 0)["cut_off"], true);
    let refused = hostile.refused(addresses[0]);
    assert!(refused.starts_with("Forbidden") && refused.contains("rdma_max"), "{refused}");
    assert!(host.may_leave(1).contains(&addresses[1]), "another's");
    other.granted(addresses[1]);
    // An interface that comes to it now, of which the agent hears when all is done.
    host.signal(Signal::STOP);
    let (lab, netns) = (host.lab.host(), host.container(0).netns());
    let veth = ["link", "add", "h30", "type", "veth", "peer", "name", "eth1", "netns"];
    lab.ip(&[&veth[..], &[&netns.path()]].concat()).expect("a veth");
    netns.ip(&["address", "add", "10.78.0.1/24", "dev", "eth1"]).expect("added");
    host.signal(Signal::CONT);
    let index = host.index("h30");
    let find = || SourceFilter::find(index).expect("a query");
    let late = || {
        let filter = lab.run(find).expect("entered")?;
        Some(filter.sources().expect("read").expect("sound").addresses)
    };
    let known = || host.status()["containers"].as_array().map(Vec::len);
    eventually("it is known", || known() == Some(3));
    eventually("it is guarded", || late().is_some());
    assert_eq!(late(), Some([].into()), "nothing leaves by it");
    answers(&mut hostile, "close-devices", "done");
    host.logged(&["is cut off no more", "veth0"]);
    let all_of_it = Some(["10.78.0.1".parse().expect("an address")].into());
    eventually("its addresses leave by it", || late() == all_of_it);
    eventually("and by the other one", || host.may_leave(0).contains(&addresses[0]));
    hostile.granted(addresses[0]);
    let lines = host.log().into_iter().filter(|line| line.contains("hold more than they"));
    assert_eq!(lines.count(), 1, "one in a minute: {:?}", host.log());
}
