//! Classes of containers: which limits bind which.

use std::process::Command;

use rocinante_agent::control::{self, About};

use crate::asker::Asker;
use crate::introduced::{about, hook_with};
use crate::lab::{Host, host_or_skip};
use crate::reload::reload;

/// The class of a container in the status, and one of its limits.
fn class(host: &Host, container: usize, limit: &str) -> (String, u64) {
    let status = host.status();
    let name = host.container(container).host_end();
    let all = status["containers"].as_array().expect("a list");
    let of = &all.iter().find(|it| it["name"] == name).expect("it is known")["class"];
    let name = of["name"].as_str().expect("a class").to_owned();
    (name, of[limit].as_u64().unwrap_or_default())
}

const BY_NAME: &str = r#"
[[class]]
name = "one"
containers = ["veth0"]
ports_max = 1

[[class]]
name = "two"
containers = ["c0ffee1*", "veth1"]
ports_max = 2
ring_frames_max = 15
"#;

#[test]
fn two_containers_have_the_limits_of_two_classes() {
    let mut host = host_or_skip!("classes::two_containers", 3);
    host.configure(BY_NAME);
    host.start();
    let v4 = [0, 1, 2].map(|it| host.addresses(it)[0]);
    let mut askers = [0, 1, 2].map(|it| host.asker(it));
    askers[0].granted(v4[0]);
    assert!(askers[0].refused(v4[0]).contains("1 ports already"));
    (0..2).for_each(|_| askers[1].granted(v4[1]));
    assert!(askers[1].refused(v4[1]).contains("2 ports already"));
    assert_eq!(host.slots(1), [15, 15]);
    (0..3).for_each(|_| askers[2].granted(v4[2]));
    assert_eq!(class(&host, 0, "ports_max"), ("one".into(), 1));
    assert_eq!(class(&host, 1, "ports_max"), ("two".into(), 2));
    assert_eq!(class(&host, 2, "ports_max"), ("default".into(), 64));
    let (is_good, said) = host.operator(&["status", "veth1"]);
    assert!(is_good && said.contains("  class: \"two\"\n"), "{said}");
    // Other classes hold for the next request, and nonsense changes nothing.
    reload(&host, "[[class]]\nname = \"more\"\nnetworks = [\"0.0.0.0/0\"]\nports_max = 4");
    host.logged(&["was read again", "changed=\"class\""]);
    (0..3).for_each(|_| askers[0].granted(v4[0]));
    assert!(askers[0].refused(v4[0]).contains("4 ports already"));
    assert_eq!(class(&host, 1, "ports_max"), ("more".into(), 4));
    reload(&host, "[[class]]\nname = \"more\"\nports_max = 0");
    host.logged(&["stays as it was", "class \"more\": ports_max is at least 1"]);
    askers[2].granted(v4[2]);
    assert!(askers[2].refused(v4[2]).contains("4 ports already"));
    assert_eq!(class(&host, 2, "ports_max"), ("more".into(), 4));
}

#[test]
fn an_engine_names_a_class_that_is_there() {
    let mut host = host_or_skip!("classes::an_engine_names_a_class", 3);
    let gold = "[[class]]\nname = \"gold\"\nports_max = 1\n";
    let engine = "[[class]]\nname = \"by_engine\"\nengines = [\"te*\"]\nports_max = 2\n";
    host.configure(gold);
    host.configure(engine);
    host.start();
    let path = control::path(&host.state());
    let of = |it: usize, name: &str| About { class: Some(name.into()), ..about(&host, it) };
    let error = control::introduce(&path, &of(0, "silver")).expect_err("there is none");
    assert!(error.to_string().contains("the class \"silver\""), "{error}");
    assert!(host.filter(0).is_none(), "nothing was done");
    control::introduce(&path, &of(0, "gold")).expect("served");
    control::introduce(&path, &about(&host, 1)).expect("served");
    let mut sleep = host.container(2).netns().spawn(Command::new("sleep").arg("60")).expect("it");
    let (is_good, said) =
        hook_with(&host, sleep.id(), r#"{"dev.rocinante.class": "silver"}"#, &["--required"]);
    assert!(!is_good && said.contains("the class \"silver\""), "{said}");
    let (is_good, said) =
        hook_with(&host, sleep.id(), r#"{"dev.rocinante.class": "gold"}"#, &["--required"]);
    assert!(is_good, "{said}");
    sleep.kill();
    assert_eq!(class(&host, 0, "ports_max"), ("gold".into(), 1));
    assert_eq!(class(&host, 1, "ports_max"), ("by_engine".into(), 2));
    assert_eq!(class(&host, 2, "ports_max"), ("gold".into(), 1));
    // A restarted agent knows it.
    host.kill();
    host.start();
    let v4 = host.addresses(0)[0];
    let mut asker = host.asker(0);
    asker.granted(v4);
    assert!(asker.refused(v4).contains("1 ports already"));
    // A class that is taken away is no class of more rights.
    reload(&host, engine);
    let refused = asker.refused(v4);
    assert!(refused.starts_with("Forbidden") && refused.contains("\"gold\""), "{refused}");
    let (_, said) = host.operator(&["status", "veth0"]);
    assert!(said.contains("class: \"gold\", which is not configured"), "{said}");
    let v4 = host.addresses(1)[0];
    let mut other = host.asker(1);
    (0..2).for_each(|_| other.granted(v4));
}

/// One container may ask once in a second, the other as often as all.
#[test]
fn requests_count_by_class() {
    let mut host = host_or_skip!("classes::requests_count", 2);
    // No program asks as often.
    host.configure("requests_per_second = 100000");
    let class = "[[class]]\nname = \"slow\"\ncontainers = [\"veth0\"]\nrequests_per_second = 1";
    host.configure(class);
    host.start();
    let (v4, other) = (host.addresses(0)[0], host.addresses(1)[0]);
    let (mut slow, mut fast) = (host.asker(0), host.asker(1));
    slow.granted(v4);
    // It is known from then on.
    crate::asker::eventually("it asks too often", || {
        slow.tell(&format!("ask {v4}")).contains("too often")
    });
    (0..20).for_each(|_| fast.granted(other));
    // Pages count for themselves.
    let opens = |asker: &mut Asker| {
        let mut keys = 0..100;
        keys.all(|key| asker.tell(&format!("device {key} eth0")).starts_with("device "))
    };
    assert!(!opens(&mut slow) && opens(&mut fast));
}
