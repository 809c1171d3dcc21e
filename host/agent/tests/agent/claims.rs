//! Claims of pods.

use std::collections::BTreeMap;

use rocinante_agent::control::{self, About};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde_json::{Value, json};

use crate::asker::eventually;
use crate::commands::connected;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};
use crate::own::bytes;
use crate::rates::disciplines;
use crate::uplinks::{UPLINK, class_of, classes, far};

const MEGA: u64 = 1_000_000;

/// The replies to a command.
fn asked(host: &Host, mut command: Value) -> Vec<Value> {
    command["version"] = 1.into();
    let socket = connected(host);
    send(&socket, command.to_string().as_bytes(), SendFlags::empty()).expect("sent");
    let mut replies = Vec::new();
    loop {
        let mut bytes = vec![0; 16 << 10];
        match recv(&socket, &mut bytes[..], RecvFlags::empty()).expect("received").0 {
            0 => return replies,
            length => replies.push(serde_json::from_slice(&bytes[..length]).expect("JSON")),
        }
    }
}

fn claim(host: &Host, uid: &str, pods: &[&str], share: [u64; 2]) -> Vec<Value> {
    let [rate, ceil] = share.map(|it| it * MEGA);
    let mut share = json!({"uplink": "up0", "rate": rate});
    if ceil > 0 {
        share["ceil"] = ceil.into();
    }
    let claim = json!({"uid": uid, "pods": pods, "shares": [share]});
    asked(host, json!({"command": "claim", "claim": claim}))
}

fn introduce(host: &Host, container: usize, pod: &str) {
    let about = About { pod: Some(pod.into()), ..about(host, container) };
    control::introduce(&host.control(), &about).expect("served");
}

/// Megabits reserved and at most, by the class.
fn shares(host: &Host) -> BTreeMap<String, [u64; 2]> {
    let all = classes(host).into_iter();
    all.map(|(class, [rate, ceil, _])| (class, [rate / MEGA, ceil / MEGA])).collect()
}

fn done() -> Vec<Value> {
    vec![json!({"done": {}})]
}

#[test]
fn a_claim_binds_its_pods_on_its_uplink() {
    let mut host = host_or_skip!("claims::a_claim_binds_its_pods", 3);
    let (_far, _) = far(&host);
    host.configure(UPLINK);
    host.start();
    // The claim comes before its pods have a network, and again.
    assert_eq!(claim(&host, "c", &["p", "q"], [300, 400]), done());
    assert_eq!(claim(&host, "c", &["p", "q"], [300, 400]), done());
    assert_eq!(disciplines(&host, "up0"), ["noqueue 0:"]);
    ["p", "q", "r"].into_iter().enumerate().for_each(|(at, pod)| introduce(&host, at, pod));
    let names = [0, 1, 2].map(|it| class_of(&host, it));
    // Both pods share it.
    assert_eq!(shares(&host)[&names[0]], [300, 400]);
    assert_eq!(shares(&host)["4791:2"], [700, 1000]);
    assert_eq!(shares(&host).len(), 3);
    let limit = Some(400 * MEGA / 8);
    assert_eq!([0, 1, 2].map(|it| bytes(&host, it)[1]), [limit, limit, None]);
    // A claim of a pod that runs; then the first is divided among two that differ.
    assert_eq!(claim(&host, "d", &["q"], [100, 0]), done());
    assert_eq!(shares(&host)[&names[0]], [150, 400]);
    assert_eq!(shares(&host)[&names[1]], [250, 1000]);
    assert_eq!([0, 1].map(|it| bytes(&host, it)[1]), [limit, None]);
    let refused = claim(&host, "e", &["r"], [601, 0]);
    assert!(refused[0]["refused"]["reason"].as_str().is_some_and(|it| it.contains("1.001gbit")));
    // An agent that takes over knows them.
    host.kill();
    host.start();
    assert_eq!(shares(&host)[&names[1]], [250, 1000]);
    let listed = asked(&host, json!({"command": "claims"}));
    let (claimed, address) = (&listed[0]["claimed"], host.addresses(0)[0].to_string());
    assert_eq!((&claimed["uid"], listed.len()), (&"c".into(), 3));
    assert!(claimed["addresses"].as_array().expect("a list").contains(&address.into()));
    assert_eq!(claimed["mac"].as_str().map(str::len), Some(17));
    // It goes while its pods run, also twice; and a pod goes before its claim.
    for _ in 0..2 {
        assert_eq!(asked(&host, json!({"command": "unclaim", "name": "c"})), done());
        assert_eq!(shares(&host)[&names[1]], [100, 1000]);
        assert_eq!(bytes(&host, 0), [None; 2]);
    }
    host.lab.host().ip(&["link", "del", "veth1"]).expect("removed");
    eventually("its share goes", || disciplines(&host, "up0") == ["noqueue 0:"]);
    assert_eq!(asked(&host, json!({"command": "unclaim", "name": "d"})), done());
    assert_eq!(asked(&host, json!({"command": "claims"})), done());
    assert!(asked(&host, json!({"command": "claim"}))[0]["refused"].is_object());
}
