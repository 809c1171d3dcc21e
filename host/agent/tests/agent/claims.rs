//! Claims of pods.

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::{fs, io};

use rocinante_agent::control::{self, About};
use rocinante_agent::host::Reason;
use rocinante_lab::Netns;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde_json::{Value, json};

use crate::asker::eventually;
use crate::commands::connected;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};
use crate::own::bytes;
use crate::rates::disciplines;
use crate::reload::reload;
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

/// Claims decide.
const CLAIMED: &str = "default_policy = \"claimed\"\n";

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
    assert_eq!(claimed["uid"], "c");
    // Of each claim a line for each of its pods.
    let pods: Vec<_> = listed.iter().map(|it| it["claimed"]["pod"].as_str()).collect();
    assert_eq!(pods, [Some("p"), Some("q"), Some("q"), None]);
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

/// A listener for RoCEv2, and for another service, at each address of a container.
struct Listener(Vec<(IpAddr, [UdpSocket; 2])>);

impl Listener {
    fn new(host: &Host, container: usize) -> Self {
        let bound = |address, port| {
            let socket = host.container(container).run(|| UdpSocket::bind((address, port)));
            let socket = socket.expect("entered").expect("a socket");
            socket.set_nonblocking(true).expect("set");
            socket
        };
        let of = |it| (it, [4791, 4792].map(|port| bound(it, port)));
        Self(host.addresses(container).into_iter().map(of).collect())
    }

    /// Whether RoCEv2 of a container arrives by IPv4, and by IPv6. The other service always does,
    /// behind it.
    fn hears(&self, host: &Host, container: usize) -> [bool; 2] {
        let mut heard =
            self.0.iter().zip(host.addresses(container)).map(|((to, sockets), from)| {
                let send = |port| UdpSocket::bind((from, 0))?.send_to(b"datagram", (*to, port));
                let sent = || [4791, 4792].map(send).into_iter().collect::<io::Result<Vec<_>>>();
                host.container(container).run(sent).expect("entered").expect("sent");
                let got = |socket: &UdpSocket| socket.recv(&mut [0; 16]).is_ok();
                eventually("the other service's", || got(&sockets[1]));
                got(&sockets[0])
            });
        std::array::from_fn(|_| heard.next().expect("two families"))
    }
}

/// Two pods and a container of no pod, of which claims open one after the other; through restarts,
/// and changes of the configuration.
#[test]
fn where_claims_decide_no_roce_leaves_a_container_without_one() {
    let mut host = host_or_skip!("claims::where_claims_decide", 4);
    let (_far, _) = far(&host);
    host.configure(&[UPLINK, CLAIMED].concat());
    host.start();
    let listener = Listener::new(&host, 3);
    let (open, closed) = ([true; 2], [false; 2]);
    let hears = |host: &Host| [0, 1, 2].map(|container| listener.hears(host, container));
    // Those that it does not know are as they are.
    assert_eq!(hears(&host), [open; 3]);
    assert_eq!(claim(&host, "c", &["p"], [100, 0]), done());
    ["p", "q"].into_iter().enumerate().for_each(|(at, pod)| introduce(&host, at, pod));
    control::introduce(&host.control(), &about(&host, 2)).expect("served");
    assert_eq!(hears(&host), [open, closed, closed]);
    assert_eq!(hears(&host), [open, closed, closed]);
    let count = |host: &Host| [0, 1, 2].map(|at| host.dropped(at)[Reason::Unclaimed as usize]);
    assert_eq!(count(&host), [0, 4, 4]);
    let status = host.status();
    let of = |at: usize| &status["containers"][at];
    assert_eq!([0, 1].map(|at| of(at)["closed"].as_bool()), [None, Some(true)]);
    assert_eq!(of(1)["dropped"]["unclaimed"], 4);
    assert!(host.operator(&["status", "veth1"]).1.contains("closed: no RoCEv2"));
    // A claim opens a pod at once, also one that it has beside another, and closes it.
    assert_eq!(claim(&host, "d", &["q"], [100, 0]), done());
    assert_eq!(hears(&host), [open, open, closed]);
    assert_eq!(claim(&host, "c", &["p", "q"], [100, 0]), done());
    assert_eq!(asked(&host, json!({"command": "unclaim", "name": "d"})), done());
    assert_eq!(hears(&host), [open, open, closed]);
    // The claim is one of the other pod's then.
    assert_eq!(claim(&host, "c", &["q"], [100, 0]), done());
    assert_eq!(hears(&host), [closed, open, closed]);
    // While no agent runs, and with the next.
    host.kill();
    assert_eq!(hears(&host), [closed, open, closed]);
    host.start();
    assert_eq!(hears(&host), [closed, open, closed]);
    assert_eq!(count(&host), [6, 4, 14]);
    for _ in 0..2 {
        reload(&host, UPLINK);
        assert_eq!(hears(&host), [open; 3]);
        assert!(!host.operator(&["status", "veth0"]).1.contains("closed"));
        reload(&host, &[UPLINK, CLAIMED].concat());
        assert_eq!(hears(&host), [closed, open, closed]);
    }
    assert_eq!(asked(&host, json!({"command": "unclaim", "name": "c"})), done());
    assert_eq!(hears(&host), [closed; 3]);
    // The state is lost, and with it claims and pods.
    assert_eq!(claim(&host, "c", &["q"], [100, 0]), done());
    host.kill();
    fs::remove_file(host.state()).expect("removed");
    for _ in 0..2 {
        host.start();
        assert_eq!(hears(&host), [closed, open, closed]);
        host.kill();
    }
    host.start();
    reload(&host, UPLINK);
    assert_eq!(hears(&host), [open; 3]);
    reload(&host, &[UPLINK, CLAIMED].concat());
    assert_eq!(claim(&host, "c", &["p"], [100, 0]), done());
    ["p", "q"].into_iter().enumerate().for_each(|(at, pod)| introduce(&host, at, pod));
    assert_eq!(hears(&host), [open, closed, closed]);
}

/// Whether no RoCEv2 leaves the end with this name; `None` if it is not guarded.
fn is_closed(host: &Host, end: &str) -> Option<bool> {
    let filter = || rocinante_agent::host::SourceFilter::find(host.index(end));
    let filter = host.lab.host().run(filter).expect("entered").expect("a query");
    filter.map(|it| it.sources().expect("read").expect("sound").is_closed)
}

/// A container that administers itself moves its interface where the agent cannot follow it.
#[test]
fn an_interface_that_was_moved_is_closed_as_others() {
    let mut host = host_or_skip!("claims::an_interface_that_was_moved", 1);
    let (_far, _) = far(&host);
    host.configure(UPLINK);
    host.start();
    introduce(&host, 0, "p");
    assert_eq!(is_closed(&host, "veth0"), Some(false));
    let below = Netns::new().expect("a namespace");
    let moves = ["link", "set", "eth0", "netns", &below.path()];
    host.container(0).netns().ip(&moves).expect("moved");
    reload(&host, &[UPLINK, CLAIMED].concat());
    assert_eq!(is_closed(&host, "veth0"), Some(true));
    assert_eq!(claim(&host, "c", &["p"], [100, 0]), done());
    assert_eq!(is_closed(&host, "veth0"), Some(false));
    assert_eq!(asked(&host, json!({"command": "unclaim", "name": "c"})), done());
    assert_eq!(is_closed(&host, "veth0"), Some(true));
}

/// The engine introduces one interface of a pod; the other came before or comes later.
#[test]
fn a_claim_opens_each_interface_of_a_pod() {
    let mut host = host_or_skip!("claims::a_claim_opens_each", 1);
    let (_far, _) = far(&host);
    host.configure(&[UPLINK, CLAIMED].concat());
    host.start();
    host.add_interface(0, "more1", "eth1");
    introduce(&host, 0, "p");
    host.add_interface(0, "more2", "eth2");
    let each = |host: &Host| ["veth0", "more1", "more2"].map(|end| is_closed(host, end));
    eventually("all are known, and closed", || each(&host) == [Some(true); 3]);
    assert_eq!(claim(&host, "c", &["p"], [100, 0]), done());
    assert_eq!(each(&host), [Some(false); 3]);
    host.kill();
    host.start();
    assert_eq!(each(&host), [Some(false); 3]);
    // One that is introduced into a claim that is there already.
    assert!(host.operator(&["release", "--all", "--force"]).0);
    introduce(&host, 0, "p");
    assert_eq!(each(&host), [Some(false); 3]);
    assert_eq!(asked(&host, json!({"command": "unclaim", "name": "c"})), done());
    assert_eq!(each(&host), [Some(true); 3]);
}

/// The introduced interface of a pod goes, and another is there in its place; the other interface
/// of the pod stays.
#[test]
fn an_interface_that_goes_closes_those_that_its_claim_opened() {
    let mut host = host_or_skip!("claims::an_interface_that_goes", 1);
    let (_far, _) = far(&host);
    host.configure(&[UPLINK, CLAIMED].concat());
    host.start();
    let pods = |host: &Host| -> Vec<Value> {
        let all = asked(host, json!({"command": "claims"})).into_iter();
        all.filter(|it| it["claimed"].is_object()).map(|it| it["claimed"]["pod"].clone()).collect()
    };
    assert_eq!(claim(&host, "c", &["p", "q"], [100, 0]), done());
    assert_eq!(pods(&host), [Value::Null]);
    introduce(&host, 0, "p");
    host.add_interface(0, "more1", "eth1");
    eventually("it is open", || is_closed(&host, "more1") == Some(false));
    assert_eq!(pods(&host), ["p"]);
    host.lab.host().ip(&["link", "del", "veth0"]).expect("removed");
    eventually("it is closed", || is_closed(&host, "more1") == Some(true));
    assert_eq!(pods(&host), [Value::Null]);
    assert_eq!(shares(&host).len(), 0);
    // One of the same name, which no engine has introduced.
    host.add_interface(0, "veth0", "eth0");
    eventually("it is known, and closed", || is_closed(&host, "veth0") == Some(true));
    host.kill();
    host.start();
    assert_eq!(["veth0", "more1"].map(|end| is_closed(&host, end)), [Some(true); 2]);
    introduce(&host, 0, "p");
    assert_eq!(["veth0", "more1"].map(|end| is_closed(&host, end)), [Some(false); 2]);
    assert_eq!(pods(&host), ["p"]);
}

/// The introduced interface of a pod is moved to another container, which the agent knows or which
/// is introduced afterwards; the other interface of the pod stays.
#[test]
fn an_interface_that_is_taken_over_closes_those_that_its_claim_opened() {
    let mut host = host_or_skip!("claims::an_interface_that_is_taken", 4);
    let (_far, _) = far(&host);
    host.configure(&[UPLINK, CLAIMED].concat());
    host.start();
    assert_eq!(claim(&host, "c", &["p", "q"], [100, 0]), done());
    for (from, to, pod, is_known) in [(0, 1, "p", true), (2, 3, "q", false)] {
        let [of, more] = ["veth", "more"].map(|it| format!("{it}{from}"));
        host.add_interface(from, &more, "eth1");
        introduce(&host, from, pod);
        let each = || [&of, &more].map(|end| is_closed(&host, end));
        assert_eq!(each(), [Some(false); 2]);
        if is_known {
            introduce(&host, to, "r");
        }
        let path = host.container(to).netns().path();
        let moved = ["link", "set", "eth0", "netns", &path, "name", "eth9"];
        host.container(from).netns().ip(&moved).expect("moved");
        if !is_known {
            introduce(&host, to, "r");
        }
        eventually("both are closed", || each() == [Some(true); 2]);
    }
}

/// The lines of a driver that watches.
struct Watching(OwnedFd);

impl Watching {
    fn new(host: &Host) -> Self {
        let socket = connected(host);
        send(&socket, br#"{"version":1,"command":"watch"}"#, SendFlags::empty()).expect("sent");
        Self(socket)
    }

    /// The next line's uplinks.
    fn uplinks(&self) -> Value {
        let mut bytes = vec![0; 16 << 10];
        let (length, _) = recv(&self.0, &mut bytes[..], RecvFlags::empty()).expect("received");
        let line: Value = serde_json::from_slice(&bytes[..length]).expect("JSON");
        line["agent"]["uplinks"].clone()
    }

    fn has_more(&self) -> bool {
        recv(&self.0, &mut [0_u8; 1][..], RecvFlags::DONTWAIT | RecvFlags::PEEK).is_ok()
    }
}

/// More drivers than connections are served at a time.
#[test]
fn watch_reports_only_uplinks_and_pods() {
    let mut host = host_or_skip!("claims::watch_reports", 3);
    let (_far, _) = far(&host);
    host.configure(UPLINK);
    host.start();
    let all: Vec<Watching> = (0..40).map(|_| Watching::new(&host)).collect();
    let each = |what: &str| {
        let heard: Vec<Value> = all.iter().map(Watching::uplinks).collect();
        assert!(heard.iter().all(|it| *it == heard[0]), "{what}: {heard:?}");
        heard[0].clone()
    };
    let sound = json!([{"interface": "up0", "rate": 1_000_000_000}]);
    assert_eq!(each("at once"), sound);
    introduce(&host, 0, "p");
    assert_eq!(each("a pod"), sound);
    // Another container, a pod again, and a claim.
    control::introduce(&host.control(), &about(&host, 1)).expect("served");
    introduce(&host, 0, "p");
    assert_eq!(claim(&host, "c", &["p"], [100, 0]), done());
    host.lab.host().ip(&["link", "del", "veth1"]).expect("removed");
    eventually("it has ended", || {
        host.status()["containers"].as_array().is_some_and(|it| it.len() == 1)
    });
    assert!(!all.iter().any(Watching::has_more));
    host.lab.host().ip(&["link", "del", "veth0"]).expect("removed");
    assert_eq!(each("its interface goes"), sound);
    introduce(&host, 2, "p");
    assert_eq!(each("it has another"), sound);
    host.lab.host().ip(&["link", "del", "up0"]).expect("removed");
    assert!(each("the uplink goes")[0]["fault"].is_string());
    // After they hang up the agent serves others, and closes a connection that sends more.
    drop(all);
    let odd = Watching::new(&host);
    assert_eq!(odd.uplinks()[0]["interface"], "up0");
    send(&odd.0, b"{}", SendFlags::empty()).expect("sent");
    assert_eq!(recv(&odd.0, &mut [0_u8; 1][..], RecvFlags::empty()).expect("its end").0, 0);
    assert!(!host.status()["agent"].is_null());
}
