//! What the agent says on standard error.

use rocinante_lab::Container;

use crate::asker::{Asker, eventually};
use crate::lab::host_or_skip;

#[test]
fn each_event_of_a_container_is_a_line() {
    let mut host = host_or_skip!("log::each_event", 1);
    host.configure("ports_max = 1");
    host.start();
    host.logged(&["serves version="]);
    let [v4, v6] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.granted(v4);
    let attached = host.logged(&["attached", "container=\"veth0\"", "interface=\"eth0\""]);
    assert!(attached.contains(&v4.to_string()) && attached.contains(&v6.to_string()), "{attached}");
    let granted = host.logged(&["granted", "backend=\"packet\" ports=1 slots="]);
    assert!(granted.contains(&format!("pid={}", asker.id())), "{granted}");
    assert!(asker.refused(v6).starts_with("Busy"));
    host.logged(&["refused", "container=\"veth0\"", "code=busy", "1 ports already"]);
    // It gets an address and loses it.
    let netns = host.container(0).netns();
    netns.ip(&["address", "add", "10.77.0.101/24", "dev", Container::DEVICE]).expect("added");
    host.logged(&["its addresses changed", "gained=[10.77.0.101] lost=[]"]);
    netns.ip(&["address", "del", "10.77.0.101/24", "dev", Container::DEVICE]).expect("removed");
    host.logged(&["its addresses changed", "gained=[] lost=[10.77.0.101]"]);
    // Frames from another are counted, and the sum comes with the end at the latest.
    host.forge(0, &mut asker, 100);
    let forged = host.dropped(0)[3];
    host.terminate();
    host.logged(&["dropped frames", "container=\"veth0\"", &format!("ipv6 {forged}")]);
    // The next agents count on: none logs again the drops that one has logged.
    for (more, told) in [(0, 1), (7, 2), (0, 2)] {
        host.start();
        let before = host.dropped(0)[3];
        host.forge(0, &mut asker, more);
        eventually("they are dropped", || host.dropped(0)[3] == before + more);
        host.terminate();
        let log = host.log();
        let sums: Vec<_> = log.iter().filter(|it| it.contains("dropped frames")).collect();
        assert_eq!(sums.len(), told, "{sums:?}");
        assert!(told == 1 || sums[1].contains("ipv6 7"), "{sums:?}");
    }
}

#[test]
fn the_end_of_a_container_is_a_line() {
    let mut host = host_or_skip!("log::the_end_of_a_container", 1);
    host.start();
    host.asker(0).granted(host.addresses(0)[0]);
    host.lab.host().ip(&["link", "del", host.container(0).host_end()]).expect("deleted");
    host.logged(&["ended", "container=\"veth0\"", "namespace="]);
    let errors = host.log().iter().filter(|line| line.contains("cannot")).count();
    assert_eq!(errors, 0, "{:?}", host.log());
}

#[test]
fn an_answer_that_comes_too_late_is_a_line() {
    let mut host = host_or_skip!("log::an_answer_that_comes_too_late", 1);
    host.configure("requests_per_second = 1");
    let [v4, _] = host.addresses(0);
    // While it waits for its turn.
    host.start();
    host.asker(0).granted(v4);
    let mut others: Vec<Asker> = (0..2).map(|_| host.asker(0)).collect();
    for asker in &mut others {
        assert!(asker.tell(&format!("wait-for {v4}")).starts_with("refused Queued"));
    }
    let last = others.pop().expect("two");
    let pid = format!("pid={}", last.id());
    last.kill();
    let lost = host.logged(&["hung up before its answer", &pid]);
    assert!(lost.contains("waited_ms="), "{lost}");
    assert_eq!(host.status()["containers"][0]["requests"]["lost"], 1);
    host.kill();
    // While its request is worked.
    host.start_stopping_at("port opened");
    let mut asker = host.asker(0);
    let pid = format!("pid={}", asker.id());
    asker.say(&format!("ask {v4}"));
    host.while_it_stops(|| {
        asker.tell("none");
        asker.kill();
    });
    host.logged(&["hung up before its answer", &pid]);
}

/// One container that does all it can to fill the log, while another is served.
#[test]
fn a_hostile_container_writes_ten_lines_a_minute() {
    let mut host = host_or_skip!("log::a_hostile_container", 2);
    host.configure("requests_per_second = 20");
    host.start();
    let mut floods: Vec<Asker> = (0..2).map(|_| host.asker(0)).collect();
    floods[0].granted(host.addresses(0)[0]);
    floods[0].say("flood 3000");
    floods[1].say("flood 1000 10.77.0.200");
    let netns = host.container(0).netns();
    for _ in 0..10 {
        let address = |what: &str| {
            netns.ip(&["address", what, "10.77.0.150/24", "dev", Container::DEVICE]).expect(what);
        };
        address("add");
        address("del");
    }
    // Nonsense, of which most is not looked at.
    (0..20).for_each(|_| drop(floods[0].tell("raw 00")));
    floods[1].hear();
    host.asker(1).granted(host.addresses(1)[0]);
    host.terminate();
    let log = host.log();
    let of = |name: &str| log.iter().filter(|line| line.contains(name)).count();
    assert!(of("container=\"veth0\"") <= 10, "{log:#?}");
    assert_eq!(of("container=\"veth1\""), 2, "{log:#?}");
    let sum = log.iter().find(|line| line.contains("requests more in the last minute"));
    let sum = sum.expect("a sum").split_once("refused ").expect("a number").1;
    let all: u32 = sum.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    assert!(all > 500 && sum.contains("busy "), "{sum}");
}
