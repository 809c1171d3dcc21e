//! Which processes get a port, and which do not.

use std::process::Command;

use rocinante_lab::{Container, Netns};
use rustix::process::Signal;

use crate::asker::{As, Asker, eventually};
use crate::lab::{Host, host_or_skip};

#[test]
fn a_program_without_rights_gets_a_port() {
    let mut host = host_or_skip!("identity::a_program_without_rights", 2);
    host.start();
    for container in [0, 1] {
        let mut asker = host.asker(container);
        assert_eq!(
            asker.tell("rights"),
            "0000000000000000 Some(Os { code: 1, kind: PermissionDenied, message: \"Operation not permitted\" })"
        );
        let [v4, v6] = host.addresses(container);
        assert!(host.filter(container).is_none(), "nothing is done before it asks");
        asker.granted(v4);
        let allowed = host.may_leave(container);
        assert!(allowed.contains(&v4) && allowed.contains(&v6), "{allowed:?}");
        assert!(!host.addresses(1 - container).iter().any(|other| allowed.contains(other)));
        // Both addresses at once, and another port of the same program.
        let answer = asker.tell(&format!("ask {v4},{v6}"));
        assert!(answer.starts_with("granted"), "{answer}");
    }
}

#[test]
fn the_host_and_interfaces_without_a_host_end_are_refused() {
    let mut host = host_or_skip!("identity::the_host_and_interfaces", 1);
    host.start();
    // The host's own namespace.
    let mut on_host = Asker::start(host.lab.host(), &host.socket(), As::Nobody);
    let refused = on_host.refused("10.77.0.1".parse().unwrap());
    assert!(refused.starts_with("Forbidden") && refused.contains("host"), "{refused}");

    let mut asker = host.asker(0);
    let refused =
        |asker: &mut Asker, interface: u32| asker.tell(&format!("ask 10.77.0.1 {interface}"));
    let lo = refused(&mut asker, 1);
    assert!(lo.contains("Forbidden") && lo.contains("no virtual interface"), "{lo}");
    let none = refused(&mut asker, 4711);
    assert!(none.contains("Interface"), "{none}");
    let netns = host.container(0).netns();
    netns.ip(&["link", "add", "mv0", "link", "eth0", "type", "macvlan"]).expect("a macvlan");
    // A pair inside the container, and one into another container.
    netns.ip(&["link", "add", "in0", "type", "veth", "peer", "name", "in1"]).expect("a veth");
    let other = Netns::new().expect("a namespace");
    let path = other.path();
    let add = ["link", "add", "ot0", "type", "veth", "peer", "name", "ot1", "netns", &path];
    netns.ip(&add).expect("a veth");
    for (name, reason) in
        [("mv0", "is a macvlan"), ("in0", "is one end of a veth"), ("ot0", "beside the host's")]
    {
        let index = netns.run(|| rocinante_netdev::Interface::by_name(name)).expect("entered");
        let refused = refused(&mut asker, index.expect("the interface").index);
        assert!(refused.contains("Forbidden") && refused.contains(reason), "{name}: {refused}");
    }
    // A port could send from each of the interfaces: by the veth into another container, too.
    let refused = asker.refused(host.addresses(0)[0]);
    assert!(refused.starts_with("Forbidden") && refused.contains("ot0"), "{refused}");
    netns.ip(&["link", "del", "ot0"]).expect("deleted");
    // An address that is not its own.
    let answer = asker.tell("ask 10.77.0.99");
    assert!(answer.contains("Interface"), "{answer}");
    asker.granted(host.addresses(0)[0]);
}

/// A port can send from each interface of its namespace, so that each is guarded.
#[test]
fn every_interface_of_a_container_is_guarded() {
    let mut host = host_or_skip!("identity::every_interface", 1);
    let second = |host: &Host, name: &str, inside: &str, address: &str| {
        host.add_interface(0, name, inside);
        host.lab.host().ip(&["link", "set", name, "up"]).expect("up");
        let netns = host.container(0).netns();
        netns.ip(&["address", "add", address, "dev", inside]).expect("added");
        netns.ip(&["link", "set", inside, "up"]).expect("up");
    };
    second(&host, "h20", "eth1", "10.78.0.1/24");
    host.start();
    let allowed = |name: &str| {
        let index = host.index(name);
        let find = || rocinante_agent::host::SourceFilter::find(index).expect("a query");
        let filter = host.lab.host().run(find).expect("entered")?;
        Some(filter.sources().expect("read").expect("sound").addresses)
    };
    let mut asker = host.asker(0);
    asker.granted(host.addresses(0)[0]);
    let second_address = "10.78.0.1".parse().expect("an address");
    assert!(allowed("h20").expect("a program").contains(&second_address));
    assert!(!host.may_leave(0).contains(&second_address));
    // Those that come later, one by one and at once.
    let is_guarded = |name: &str, address: &str| {
        let address = address.parse().expect("an address");
        allowed(name).is_some_and(|allowed| allowed.contains(&address))
    };
    second(&host, "h21", "eth2", "10.79.0.1/24");
    eventually("it is guarded", || is_guarded("h21", "10.79.0.1"));
    host.signal(Signal::STOP);
    for (name, inside, address) in
        [("h22", "eth3", "10.80.0.1"), ("h23", "eth4", "10.81.0.1"), ("h24", "eth5", "10.82.0.1")]
    {
        second(&host, name, inside, &format!("{address}/24"));
    }
    host.signal(Signal::CONT);
    for (name, address) in [("h22", "10.80.0.1"), ("h23", "10.81.0.1"), ("h24", "10.82.0.1")] {
        eventually("each is guarded", || is_guarded(name, address));
    }
}

/// A container that changes its addresses itself keeps those of the moment when the agent knows it,
/// also at an interface that comes later.
#[test]
fn a_later_interface_is_fixed_as_the_first() {
    let mut host = host_or_skip!("identity::a_later_interface", 1);
    host.start();
    let (lab, netns) = (host.lab.host(), host.container(0).netns());
    let [v4, v6] = host.addresses(0);
    Asker::start(netns, &host.socket(), As::Root).granted(v4);
    let veth = ["link", "add", "h30", "type", "veth", "peer", "name", "eth1", "netns"];
    lab.ip(&[&veth[..], &[&netns.path()]].concat()).expect("a veth");
    let index = host.index("h30");
    let filter = || lab.run(|| rocinante_agent::host::SourceFilter::find(index).expect("a query"));
    eventually("it is guarded", || filter().expect("entered").is_some());
    netns.ip(&["address", "add", "10.78.0.1/24", "dev", "eth1"]).expect("added");
    // The news of an address that goes come after that.
    netns.ip(&["address", "del", &format!("{v6}/64"), "dev", "eth0"]).expect("removed");
    eventually("it is followed", || !host.may_leave(0).contains(&v6));
    let sources = filter().expect("entered").expect("a program").sources();
    assert!(sources.expect("read").expect("sound").addresses.is_empty());
}

/// A macvlan of the host's beside the veth, as a second network of a pod is.
#[test]
fn another_way_out_is_refused_or_accepted_as_the_operator_says() {
    let mut host = host_or_skip!("identity::another_way_out", 2);
    let path = host.container(0).netns().path();
    let on_host = |host: &Host, words: &[&str]| host.lab.host().ip(words).expect("an interface");
    on_host(&host, &["link", "add", "card0", "type", "veth", "peer", "name", "card1"]);
    on_host(&host, &["link", "set", "card0", "up"]);
    on_host(&host, &["link", "add", "net1", "link", "card0", "netns", &path, "type", "macvlan"]);
    let of_it = |line: &String| line.contains("forged frames that leave by it are not kept back");
    let [v4, _] = host.addresses(0);
    host.start();
    let refused = host.asker(0).refused(v4);
    assert!(refused.starts_with("Forbidden") && refused.contains("net1"), "{refused}");
    assert!(refused.contains("other_ways_out"), "{refused}");
    assert_eq!(host.filter(0).map(|_| ()), None, "nothing was done");
    host.kill();
    host.configure("other_ways_out = \"accept\"");
    host.start();
    host.asker(0).granted(v4);
    host.asker(0).granted(v4);
    assert!(host.may_leave(0).contains(&v4), "the veth is guarded");
    host.logged(&["not kept back", "veth0", "net1"]);
    // A container with a veth alone has none of it.
    host.asker(1).granted(host.addresses(1)[0]);
    assert_eq!(host.log().iter().filter(|line| of_it(line)).count(), 1, "{:?}", host.log());
    assert!(!host.log().iter().any(|line| line.contains("containers get no ports")));
    let ways = |host: &Host| {
        let status = host.status();
        let of = |container: usize| status["containers"][container]["other_ways_out"].to_string();
        [of(0), of(1)]
    };
    assert_eq!(ways(&host), [r#"["net1"]"#, "[]"]);
    assert!(host.operator(&["status"]).1.contains("other ways out: \"net1\"\n"));
    // One that comes later, and goes.
    on_host(&host, &["link", "add", "net2", "link", "card0", "netns", &path, "type", "macvlan"]);
    host.logged(&["not kept back", "veth0", "net2"]);
    assert_eq!(ways(&host), [r#"["net1","net2"]"#, "[]"]);
    host.container(0).netns().ip(&["link", "del", "net1"]).expect("deleted");
    eventually("it is seen", || ways(&host) == [r#"["net2"]"#, "[]"]);
    // A restarted agent knows it, also one that does not accept it.
    host.kill();
    let command = host.command();
    let text = std::fs::read_to_string(host.config()).expect("a file");
    std::fs::write(host.config(), text.replace("accept", "refuse")).expect("written");
    host.start_as(command);
    assert_eq!(ways(&host), [r#"["net2"]"#, "[]"]);
    host.container(0).netns().ip(&["link", "del", "net2"]).expect("deleted");
    eventually("it is seen", || ways(&host) == ["[]", "[]"]);
    on_host(&host, &["link", "add", "net3", "link", "card0", "netns", &path, "type", "macvlan"]);
    host.logged(&["cannot be kept back", "veth0", "net3"]);
    assert_eq!(ways(&host), [r#"["net3"]"#, "[]"]);
}

/// A message names the cause and a way out of it, whatever made the interface.
#[test]
fn an_interface_without_a_host_end_has_its_cause() {
    let mut host = host_or_skip!("identity::an_interface_without_a_host_end", 2);
    host.start();
    let mut asker = host.asker(0);
    let (netns, on_host) = (host.container(0).netns(), host.lab.host());
    let path = netns.path();
    let in_container = |words: &[&str]| netns.ip(words).expect("an interface");
    // A namespace beside the host's, with these interfaces, from which the container has a veth.
    let beside = |name: &str, more: &[&[&str]]| {
        let other = Netns::new().expect("a namespace");
        more.iter().for_each(|words| other.ip(words).expect("an interface"));
        let add = ["link", "add", "end0", "type", "veth", "peer", "name", name, "netns", &path];
        other.ip(&add).expect("a veth");
        Some(other)
    };
    let of = |netns: &Netns, lower: &str, name: &str| {
        let add = ["link", "add", name, "link", lower, "netns", &path, "type", "macvlan"];
        netns.ip(&add).expect("an interface");
        None
    };
    let vxlan = &["link", "add", "vxlan0", "type", "vxlan", "id", "7", "dstport", "4789"][..];
    let tap = &["tuntap", "add", "tap0", "mode", "tap"][..];
    let bridge = &["link", "add", "br0", "type", "bridge"][..];
    let card = ["link", "add", "card0", "type", "veth", "peer", "name", "card1"];
    on_host.ip(&card).expect("a veth");
    let inner = ["link", "add", "outer0", "type", "veth", "peer", "name", "nested", "netns", &path];
    let make = |name: &str| match name {
        "swarm" => beside(name, &[bridge, vxlan]),
        "rootless" => beside(name, &[bridge, tap]),
        "beside" => beside(name, &[bridge]),
        "mv0" => of(on_host, "card0", name),
        "mv1" => of(host.container(1).netns(), Container::DEVICE, name),
        "nested" => {
            host.container(1).netns().ip(&inner).expect("a veth");
            None
        }
        _ => {
            in_container(tap);
            None
        }
    };
    for (name, cause, way) in [
        ("swarm", "overlay network, as Docker Swarm's", "no overlay"),
        ("rootless", "rootless engine", "engine of root's"),
        ("beside", "beside the host's", "a bridge network"),
        ("nested", "docker in docker", "an agent in the outer container"),
        ("tap0", "slirp4netns or pasta", "a bridge network"),
        ("mv0", "is a macvlan, which has no end on the host", "a bridge network"),
        ("mv1", "a macvlan on the interface of another container", "a bridge network"),
    ] {
        let _other = make(name);
        let index = netns.run(|| rocinante_netdev::Interface::by_name(name)).expect("entered");
        let index = index.expect("the interface").index;
        let refused = asker.tell(&format!("ask 10.77.0.1 {index}"));
        assert!(refused.contains("Forbidden") && refused.contains(name), "{name}: {refused}");
        assert!(refused.contains(cause) && refused.contains(way), "{name}: {refused}");
        // Beside a veth to the host it is named as well.
        let refused = asker.refused(host.addresses(0)[0]);
        let named = format!("leave by {name} cannot be kept back: it ");
        assert!(refused.contains(&named) && refused.contains(cause), "{name}: {refused}");
        assert!(refused.contains("other_ways_out"), "{name}: {refused}");
        in_container(&["link", "del", name]);
    }
    asker.granted(host.addresses(0)[0]);
}

/// A network namespace whose user namespace is two levels below the agent's.
#[test]
fn a_nested_namespace_is_refused() {
    let mut host = host_or_skip!("identity::a_nested_namespace", 1);
    host.start();
    let own = std::env::current_exe().expect("this program");
    let asker_by = |words: &str| {
        let mut command = Command::new("unshare");
        command.args(words.split(' ')).arg(&own);
        Asker::of_command(host.container(0).netns(), &host.socket(), &mut command)
    };
    let user = "--user --map-root-user";
    for (words, reason) in [
        (format!("{user} unshare --net"), "no interface"),
        (format!("{user} unshare {user} unshare --net"), "nested"),
    ] {
        let answer = asker_by(&words).tell("ask 10.77.0.1 2");
        assert!(answer.contains(reason), "{words}: {answer}");
    }
    // In the container's own namespace it does not matter in which user namespace one is.
    let mut asker = asker_by(user);
    asker.granted(host.addresses(0)[0]);
}

#[test]
fn addresses_are_followed_unless_the_container_changes_them_itself() {
    let mut host = host_or_skip!("identity::addresses_are_followed", 2);
    host.start();
    let late = |index: usize| format!("10.77.0.{}", 101 + index);
    let change = |host: &crate::lab::Host, index: usize, how: &str| {
        let address = format!("{}/24", late(index));
        let command = ["address", how, &address, "dev", Container::DEVICE];
        host.container(index).netns().ip(&command).expect("changed");
    };
    let has = |host: &crate::lab::Host, index: usize, address: &str| {
        host.may_leave(index).contains(&address.parse().expect("an address"))
    };
    // The first cannot change its addresses, the second can.
    let mut follows = host.asker(0);
    follows.granted(host.addresses(0)[0]);
    let mut fixed = Asker::start(host.container(1).netns(), &host.socket(), As::Root);
    fixed.granted(host.addresses(1)[0]);
    for index in [0, 1] {
        change(&host, index, "add");
    }
    eventually("the new address", || has(&host, 0, &late(0)));
    assert!(!has(&host, 1, &late(1)));
    let refused = fixed.refused(late(1).parse().unwrap());
    assert!(refused.starts_with("Interface") && refused.contains("later"), "{refused}");
    follows.granted(late(0).parse().unwrap());
    // Both lose the deleted address. A fixed one does not get it back.
    let own = host.addresses(1)[0];
    change(&host, 0, "del");
    eventually("the address is gone", || !has(&host, 0, &late(0)));
    let own_prefix = format!("{own}/24");
    let netns = host.container(1).netns();
    netns.ip(&["address", "del", &own_prefix, "dev", "eth0"]).expect("removed");
    eventually("the address is gone", || !has(&host, 1, &own.to_string()));
    netns.ip(&["address", "add", &own_prefix, "dev", "eth0"]).expect("added");
    assert!(fixed.refused(own).starts_with("Interface"));
    // The Ethernet address likewise.
    let mac = |index: usize| host.filter(index).unwrap().sources().unwrap().unwrap().mac;
    let before = [mac(0), mac(1)];
    for index in [0, 1] {
        let set = ["link", "set", "eth0", "address", "02:00:0a:4d:00:77"];
        host.container(index).netns().ip(&set).expect("set");
    }
    eventually("the new Ethernet address", || mac(0) == [2, 0, 0x0a, 0x4d, 0, 0x77]);
    assert_eq!(mac(1), before[1]);
}

#[test]
fn a_container_that_changes_its_addresses_may_be_refused_or_followed() {
    for (mode, granted) in [("refuse", false), ("follow", true)] {
        let mut host = host_or_skip!("identity::a_container_that_changes", 1);
        host.configure(&format!("self_administered = {mode:?}"));
        host.start();
        let mut root = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
        let answer = root.tell(&format!("ask {}", host.addresses(0)[0]));
        assert_eq!(answer.starts_with("granted"), granted, "{mode}: {answer}");
        if granted {
            let add = ["address", "add", "10.77.0.101/24", "dev", "eth0"];
            host.container(0).netns().ip(&add).expect("added");
            let late = "10.77.0.101".parse().unwrap();
            eventually("it is followed", || host.may_leave(0).contains(&late));
        }
        // One that cannot is not concerned.
        host.asker(0).granted(host.addresses(0)[0]);
    }
}

/// The agent's knowledge of a process is of the moment at which it connected. Before it hands the
/// port over it looks again.
#[test]
fn a_program_that_moves_before_the_answer_is_refused() {
    let mut host = host_or_skip!("identity::a_program_that_moves", 2);
    let elsewhere = host.container(1).netns().path();
    for step in ["identified", "port opened"] {
        host.start_stopping_at(step);
        let mut asker = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
        let address = host.addresses(0)[0];
        assert_eq!(asker.tell(&format!("send-request {address}")), "sent");
        let moved = host.while_it_stops(|| asker.tell(&format!("move {elsewhere}")));
        assert_eq!(moved, "here");
        let answer = asker.tell("hear-answer");
        let expected = "refused Forbidden you moved to another network namespace";
        assert!(answer.starts_with(expected), "{step}: {answer}");
        assert_eq!((host.ports(), host.guarded_rings()), (0, 0), "{step}");
        assert!(host.filter(1).is_none(), "{step}");
        // In its new container it gets that container's ports, and nothing else.
        let refused = asker.refused(address);
        assert!(refused.starts_with("Interface"), "{step}: {refused}");
        host.kill();
    }
}

/// A process connects, gives its connection to another one, and ends.
#[test]
fn a_port_is_for_the_process_that_connected_while_it_lives() {
    let mut host = host_or_skip!("identity::a_port_is_for_the_process", 1);
    for step in ["asked", "identified", "port opened", "answered"] {
        host.start_stopping_at(step);
        let before = host.descriptors();
        let mut asker = host.asker(0);
        asker.tell(&format!("send-request {}", host.addresses(0)[0]));
        let answer = host.while_it_stops(|| {
            assert_eq!(asker.tell("pass-on"), "here");
            asker.kill_first();
            (step == "answered").then(|| asker.tell("hear-answer"))
        });
        match answer {
            None => {
                let answer = asker.tell("hear-answer");
                let expected = "refused Forbidden the process that connected has gone";
                assert!(answer.starts_with(expected), "{step}: {answer}");
            }
            // It was there when the port was handed over. The port stays guarded, as one does that
            // a child has.
            Some(answer) => {
                assert!(answer.starts_with("granted 1 "), "{answer}");
                eventually("its end is seen", || host.descriptors() <= before + 1);
                assert_eq!((host.ports(), host.guarded_rings()), (1, 1));
                assert_eq!(asker.tell("close"), "done");
            }
        }
        eventually(&format!("nothing stays of {step:?}"), || {
            host.descriptors() <= before && (host.ports(), host.guarded_rings()) == (0, 0)
        });
        host.kill();
    }
}

/// Root may send a message in the name of any process. The agent does not listen to that.
#[test]
fn credentials_in_a_message_are_not_read() {
    let mut host = host_or_skip!("identity::credentials_in_a_message", 2);
    host.start();
    let victim = host.asker(1);
    let mut root = Asker::start(host.container(0).netns(), &host.socket(), As::Root);
    let [own, _] = host.addresses(0);
    let [anothers, _] = host.addresses(1);
    let answer = root.tell(&format!("forge {} {anothers}", victim.id()));
    assert!(answer.starts_with("refused Interface"), "{answer}");
    let answer = root.tell(&format!("forge {} {own}", victim.id()));
    assert!(answer.starts_with("granted 1 "), "{answer}");
    assert!(host.filter(0).is_some() && host.filter(1).is_none());
}
