//! Objects made for a container go with it, and not before.

use rocinante_lab::Container;
use rustix::fs::OFlags;
use rustix::process::{PidfdFlags, pidfd_open};

use crate::asker::eventually;
use crate::lab::host_or_skip;

#[test]
fn ports_go_when_their_program_closes_them_or_ends() {
    let mut host = host_or_skip!("ends::ports_go", 2);
    host.start();
    let mut first = host.asker(0);
    let mut second = host.asker(1);
    first.granted(host.addresses(0)[0]);
    first.granted(host.addresses(0)[1]);
    second.granted(host.addresses(1)[0]);
    assert_eq!(host.ports(), 3);
    // It only says that it closed them: they stay guarded.
    assert_eq!(first.tell("hang-up"), "done");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(host.ports(), 3);
    first.kill();
    host.has_ports(1);
    assert_eq!(second.tell("close"), "done");
    host.has_ports(0);
    // It closes them some time after it says so, and lives on.
    second.granted(host.addresses(1)[0]);
    assert_eq!(second.tell("hang-up"), "done");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!((host.ports(), second.tell("close").as_str()), (1, "done"));
    host.has_ports(0);
    // The program at the host's end stays as long as the interface.
    assert!(host.filter(0).is_some() && host.filter(1).is_some());
    second.granted(host.addresses(1)[0]);
    host.has_ports(1);
}

/// A port that another process of the container has is not forgotten when the first ends.
#[test]
fn ports_stay_while_a_child_has_them() {
    let mut host = host_or_skip!("ends::ports_stay", 1);
    host.start();
    let mut asker = host.asker(0);
    asker.granted(host.addresses(0)[0]);
    let child = asker.tell("leave-a-child 60");
    let child: u32 = child.parse().unwrap_or_else(|_| panic!("{child}"));
    asker.kill();
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(host.ports(), 1);
    let pid = rustix::process::Pid::from_raw(child.cast_signed()).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is there");
    host.has_ports(0);
}

/// Nor one that a process has in a network namespace which it has made itself: only those of other
/// containers are not searched.
#[test]
fn ports_stay_while_a_process_in_a_namespace_of_its_own_has_them() {
    let mut host = host_or_skip!("ends::ports_stay_while_a_process_in", 2);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    let child = askers[0].tell("leave-a-stranger 60");
    let child: i32 = child.parse().unwrap_or_else(|_| panic!("{child}"));
    let namespace = |id: &str| std::fs::read_link(format!("/proc/{id}/ns/net")).ok();
    let own = namespace(&askers[0].id().to_string());
    eventually("it has left", || {
        let now = namespace(&child.to_string());
        now.is_some() && now != own
    });
    let [first, mut second] = askers;
    first.kill();
    assert_eq!(second.tell("close"), "done");
    host.has_ports(1);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!((host.ports(), host.guarded_rings(), host.slots(0).len()), (1, 1, 1));
    // The next agent finds it, too, and an operator without one.
    host.kill();
    host.start();
    eventually("it is guarded again", || host.guarded_rings() == 1);
    host.kill();
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(!is_good && said.contains("it has open ports"), "{said}");
    host.start();
    let pid = rustix::process::Pid::from_raw(child).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is there");
    host.has_ports(0);
}

#[test]
fn ports_stay_while_a_thread_with_descriptors_of_its_own_has_them() {
    let mut host = host_or_skip!("ends::ports_stay_while_a_thread", 1);
    host.start();
    let mut asker = host.asker(0);
    asker.granted(host.addresses(0)[0]);
    assert_eq!(asker.tell("hide-in-a-thread"), "hidden");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!((host.ports(), host.guarded_rings()), (1, 1));
    // The next agent finds it, and guards its ring where the kernel names threads (Linux 6.9).
    host.kill();
    host.start();
    let names_threads = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());
    if pidfd_open(rustix::thread::gettid(), names_threads).is_ok() {
        eventually("it is guarded again", || host.guarded_rings() == 1);
    }
    assert_eq!(host.ports(), 1);
    asker.kill();
    host.has_ports(0);
}

#[test]
fn a_container_is_forgotten_when_its_interface_goes() {
    let mut host = host_or_skip!("ends::a_container_is_forgotten", 2);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    assert_eq!(host.known(), 2);
    host.lab.host().ip(&["link", "del", host.container(0).host_end()]).expect("deleted");
    eventually("it is forgotten", || host.known() == 1);
    let [mut first, _second] = askers;
    assert!(first.tell("ask 10.77.0.1 2").contains("Interface"));
}

/// A container's processes end, and nothing of the agent's keeps its network alive.
#[test]
fn a_container_that_ends_takes_its_network_along() {
    let mut host = host_or_skip!("ends::a_container_that_ends", 1);
    host.start();
    let container = rocinante_lab::Netns::new().expect("a namespace");
    let add =
        ["link", "add", "h9", "type", "veth", "peer", "name", "eth0", "netns", &container.path()];
    host.lab.host().ip(&add).expect("a veth");
    for (netns, device) in [(host.lab.host(), "h9"), (&container, Container::DEVICE)] {
        netns.ip(&["link", "set", device, "up"]).expect("up");
    }
    container.ip(&["address", "add", "10.79.0.1/24", "dev", "eth0"]).expect("added");
    let mut asker =
        crate::asker::Asker::start(&container, &host.socket(), crate::asker::As::Nobody);
    asker.granted("10.79.0.1".parse().unwrap());
    assert_eq!(host.ports(), 1);
    drop(container);
    asker.kill();
    host.has_ports(0);
    eventually("its veth goes with it", || {
        let links = host.lab.host().json("ip -j link show").expect("listed").to_string();
        !links.contains("\"h9\"") && host.known() == 0
    });
}

#[test]
fn a_host_end_may_be_renamed_and_moved() {
    let mut host = host_or_skip!("ends::a_host_end_may_be_renamed", 2);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    let end = host.container(0).host_end();
    let index = host.index(end);
    for (from, to) in [(end, "other"), ("other", end)] {
        let netns = host.lab.host();
        netns.ip(&["link", "set", from, "down"]).expect("down");
        netns.ip(&["link", "set", from, "name", to, "up"]).expect("renamed");
        assert_eq!(host.index(to), index);
    }
    let late = "10.77.0.101".parse().unwrap();
    host.container(0)
        .netns()
        .ip(&["address", "add", "10.77.0.101/24", "dev", "eth0"])
        .expect("added");
    eventually("it is followed", || host.may_leave(0).contains(&late));
    // Moved to another namespace, it has no end here any more.
    let elsewhere = rocinante_lab::Netns::new().expect("a namespace");
    host.lab.host().ip(&["link", "set", end, "netns", &elsewhere.path()]).expect("moved");
    eventually("it is forgotten", || host.known() == 1);
    let [mut first, mut second] = askers;
    assert!(first.refused(host.addresses(0)[0]).contains("beside the host's"));
    second.granted(host.addresses(1)[0]);
    // The container's end, too: only the addresses permitted before may leave.
    let other = rocinante_lab::Netns::new().expect("a namespace");
    let before = host.may_leave(1);
    host.container(1).netns().ip(&["link", "set", "eth0", "netns", &other.path()]).expect("moved");
    other.ip(&["address", "add", "10.77.0.55/24", "dev", "eth0"]).expect("added");
    other.ip(&["link", "set", "eth0", "up"]).expect("up");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(host.may_leave(1), before);
    let refused = second.tell("ask 10.77.0.2 2");
    assert!(refused.contains("Interface") || refused.contains("Forbidden"), "{refused}");
}
