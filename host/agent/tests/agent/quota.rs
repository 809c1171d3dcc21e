//! Limits that the programs of a container keep together.

use rocinante_agent::host::SourceFilter;
use rustix::process::Signal;
use serde_json::Value;

use crate::asker::eventually;
use crate::lab::{Host, host_or_skip};
use crate::pages::{answers, begins, got, serving, value};
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
fn programs_of_a_container_have_one_limit_and_two_containers_two() {
    let mut host = host_or_skip!("quota::programs_of_a_container", 2);
    serving(&mut host);
    host.terminate();
    host.configure(&class("hca_handle=2 hca_object=10 mr_bytes=1k", "report"));
    begins(&mut host);
    let [mut one, mut two, mut other] = [0, 0, 1].map(|container| host.asker(container));
    // Before the agent knows the container but by its end.
    answers(&mut one, "device 1 eth0", "device 1");
    answers(&mut one, "charge 1 9 1000", "done");
    answers(&mut one, "charge 0 2 0", "hca_object=10");
    let addresses = [0, 1].map(|container| host.addresses(container)[0]);
    one.granted(addresses[0]);
    other.granted(addresses[1]);
    answers(&mut two, "device 1 eth0", "device 1");
    answers(&mut other, "device 1 eth0", "device 1");
    answers(&mut two, "charge 1 1 0", "done");
    answers(&mut two, "charge 1 0 0", "hca_handle=2");
    answers(&mut two, "charge 0 0 25", "mr_bytes=1024");
    answers(&mut two, "charge 0 1 0", "hca_object=10");
    answers(&mut other, "charge 2 10 1024", "done");
    assert_eq!(used(&host, 0, "hca_object"), [Some(10), Some(10), Some(10), Some(2)]);
    assert_eq!(used(&host, 0, "hca_handle"), [Some(2), Some(2), Some(2), Some(1)]);
    assert_eq!(used(&host, 1, "mr_bytes"), [Some(1024), Some(1024), Some(1024), Some(0)]);
    let (_, said) = host.operator(&["status", "veth0"]);
    assert!(said.contains("  hca_object: 10 of 10, peak 10, 2 refused\n"), "{said}");
    let text = got(&host, "/metrics");
    for (series, count) in [("max", 1024), ("current", 1000), ("peak", 1000), ("events_total", 1)] {
        let series =
            format!("rocinante_rdma_{series}{{container=\"veth0\",resource=\"mr_bytes\"}}");
        assert_eq!(value(&text, &series), Some(count), "{text}");
    }
    // Raised and lowered while they run.
    reload(&host, &class("hca_object=11", "report"));
    answers(&mut two, "charge 0 1 0", "done");
    reload(&host, &class("hca_object=4", "report"));
    answers(&mut two, "charge 0 1 0", "hca_object=4");
    assert_eq!(used(&host, 0, "hca_object"), [Some(4), Some(11), Some(11), Some(3)]);
    // A killed program gives back.
    one.kill();
    eventually("it has given back", || used(&host, 0, "hca_object")[1] == Some(2));
    answers(&mut two, "charge 0 2 0", "done");
    answers(&mut two, "refund 0 1 0", "done");
    answers(&mut two, "charge 0 2 0", "hca_object=4");
    assert_eq!(used(&host, 0, "hca_object"), [Some(4), Some(3), Some(11), Some(4)]);
    // The next agent goes on, with the first configuration.
    host.kill();
    host.start();
    assert_eq!(used(&host, 0, "hca_object"), [Some(10), Some(0), Some(11), Some(4)]);
    assert!(!host.log().iter().any(|line| line.contains("hold more")), "{:?}", host.log());
}

#[test]
fn a_container_that_holds_more_is_reported_or_cut_off() {
    let mut host = host_or_skip!("quota::a_container_that_holds_more", 2);
    host.configure(&class("hca_object=9", "report"));
    host.start();
    let [mut hostile, mut other] = [0, 1].map(|container| host.asker(container));
    let addresses = [0, 1].map(|container| host.addresses(container)[0]);
    hostile.granted(addresses[0]);
    other.granted(addresses[1]);
    // It knows no limits, and has two of each kind of object.
    answers(&mut hostile, "old-device 1 eth0", "device 1");
    answers(&mut hostile, "count 1", "done");
    host.logged(&["hold more", "veth0", "hca_object=10 of 9"]);
    assert_eq!(used(&host, 0, "hca_object")[1], Some(10));
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
