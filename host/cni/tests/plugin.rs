//! The plugin as a runtime calls it: variables, a configuration on standard input, a result or an
//! error on standard output (CNI specification 1.1.0). The agent is one that this test plays.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, socket_with,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with a control socket.
struct Place {
    dir: TempDir,
    socket: OwnedFd,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        let place = Self { dir, socket };
        bind(&place.socket, &SocketAddrUnix::new(place.control()).expect("a path")).expect("bound");
        place
    }

    fn control(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    /// Answers one command with these lines, and returns it.
    fn agent(&self, replies: &'static [&'static str]) -> JoinHandle<Value> {
        listen(&self.socket, 1).expect("it listens");
        let socket = self.socket.try_clone().expect("a descriptor");
        std::thread::spawn(move || {
            let client = accept(&socket).expect("a client");
            let mut bytes = [0; 4096];
            let (length, _) = recv(&client, &mut bytes[..], RecvFlags::empty()).expect("a command");
            for reply in replies {
                // The plugin may have hung up after the one before.
                let _ = send(&client, reply.as_bytes(), SendFlags::NOSIGNAL);
            }
            serde_json::from_slice(&bytes[..length]).expect("JSON")
        })
    }

    /// The configuration with a result of the plugins before.
    fn config(&self, version: &str) -> Value {
        let mut address =
            json!({"address": "10.88.7.2/24", "gateway": "10.88.7.1", "interface": 0});
        if version.starts_with("0.") {
            address["version"] = "4".into();
        }
        json!({
            "cniVersion": version, "name": "rdma", "type": "rocinante-cni",
            "control": self.control(),
            "prevResult": {
                "cniVersion": version,
                "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/n"}],
                "ips": [address],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dns": {"nameservers": ["10.88.7.1"]},
            },
        })
    }
}

const ALL: [(&str, &str); 3] =
    [("CNI_CONTAINERID", "c0ffee"), ("CNI_NETNS", "/run/n"), ("CNI_IFNAME", "eth0")];

/// Whether the plugin succeeds, and its JSON.
fn call(command: &str, variables: &[(&str, &str)], config: &str) -> (bool, Value) {
    call_with(command, variables, config.as_bytes())
}

fn call_with(command: &str, variables: &[(&str, &str)], config: &[u8]) -> (bool, Value) {
    let mut plugin = Command::new(env!("CARGO_BIN_EXE_rocinante-cni"));
    plugin.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", "/opt/cni/bin");
    plugin.envs(variables.iter().copied());
    plugin.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = plugin.spawn().expect("the plugin");
    // It may end before it has read all.
    let _ = child.stdin.take().expect("a pipe").write_all(config);
    let done = child.wait_with_output().expect("it ends");
    let (status, said) = (done.status, String::from_utf8(done.stdout).expect("text"));
    let log = String::from_utf8_lossy(&done.stderr);
    assert!([Some(0), Some(1)].contains(&status.code()), "{command}: {status}: {log}");
    assert!(!log.contains("panicked"), "{command}: {log}");
    let said =
        if said.is_empty() { Value::Null } else { serde_json::from_str(&said).expect(&said) };
    (status.success(), said)
}

const KNOWN: &[&str] = &["{\"introduced\":{\"name\":\"veth0\"}}\n", "{\"done\":{}}\n"];
const REFUSED: &[&str] = &["{\"refused\":{\"reason\":\"it is a macvlan\"}}\n"];

#[test]
fn an_interface_is_introduced_and_the_result_before_is_passed_on() {
    let place = Place::new();
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let config = place.config(version);
        let agent = place.agent(KNOWN);
        let (is_good, said) = call("ADD", &ALL, &config.to_string());
        assert!(is_good, "{version}: {said}");
        let asked = agent.join().expect("an agent");
        let about = json!({
            "namespace": "/run/n", "interface": "eth0", "id": "c0ffee", "engine": "cni",
        });
        assert_eq!((&asked["command"], &asked["about"]), (&"introduce".into(), &about));
        assert_eq!(said, config["prevResult"], "{version}");
    }
}

#[test]
fn a_class_is_handed_on() {
    let place = Place::new();
    let mut config = place.config("1.1.0");
    config["class"] = "gold".into();
    let agent = place.agent(KNOWN);
    assert!(call("ADD", &ALL, &config.to_string()).0);
    assert_eq!(agent.join().expect("an agent")["about"]["class"], "gold");
}

/// As containerd and CRI-O name it.
#[test]
fn the_pod_is_handed_on() {
    let place = Place::new();
    let config = place.config("1.1.0").to_string();
    let before = "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b";
    for (args, pod) in [
        (format!("{before};K8S_POD_UID=0f1e-2d"), json!("0f1e-2d")),
        (format!("{before};K8S_POD_UID="), Value::Null),
        (before.to_owned(), Value::Null),
        ("XK8S_POD_UID=7;;=;K".to_owned(), Value::Null),
    ] {
        let agent = place.agent(KNOWN);
        let variables: Vec<_> = ALL.into_iter().chain([("CNI_ARGS", &*args)]).collect();
        assert!(call("ADD", &variables, &config).0);
        assert_eq!(agent.join().expect("an agent")["about"]["pod"], pod, "{args}");
    }
}

/// Keys as the specification's conventions have them, and as containerd writes them.
#[test]
fn rates_are_handed_on() {
    let place = Place::new();
    let most_bits = 8 * u64::from(u32::MAX) - 1;
    for (bandwidth, rates) in [
        (
            json!({"ingressRate": 5_000_000, "ingressBurst": 8000, "egressRate": 7_000_000,
                   "egressBurst": most_bits}),
            json!({"ingress_rate": 5_000_000, "ingress_burst_bits": 8000,
                   "egress_rate": 7_000_000, "egress_burst_bits": most_bits}),
        ),
        (
            json!({"IngressRate": 0, "IngressBurst": 0, "EgressRate": 1_000_000,
                   "EgressBurst": 2_147_483_647}),
            json!({"egress_rate": 1_000_000, "egress_burst_bits": 2_147_483_647}),
        ),
        (
            json!({"ingressRate": 1_000_000_000_000_u64, "ingressBurst": 1, "egressRate": null}),
            json!({"ingress_rate": 1_000_000_000_000_u64, "ingress_burst_bits": 1}),
        ),
        (json!({}), json!({})),
        (Value::Null, Value::Null),
    ] {
        let mut config = place.config("1.0.0");
        config["capabilities"] = json!({"bandwidth": true});
        config["runtimeConfig"] = json!({"bandwidth": bandwidth});
        for command in ["ADD", "CHECK"] {
            let agent = place.agent(KNOWN);
            let (is_good, said) = call(command, &ALL, &config.to_string());
            let asked = agent.join().expect("an agent");
            assert!(is_good, "{said}");
            assert_eq!(asked["about"]["rates"], rates, "{command} {bandwidth}");
        }
    }
}

/// The result has it from version 1.1.0 on, at both ends of the interface and nowhere else.
#[test]
fn an_mtu_is_handed_on_and_is_in_the_result() {
    let place = Place::new();
    for (version, mtu) in [("1.0.0", 1280), ("1.1.0", 4200), ("1.1.0", 65_535)] {
        let mut config = place.config(version);
        config["mtu"] = mtu.into();
        config["prevResult"]["interfaces"] = json!([
            {"name": "br0"}, {"name": "veth0", "sandbox": ""}, {"name": "veth0", "sandbox": "/o"},
            {"name": "eth0"}, {"name": "eth0", "sandbox": "/run/n"},
            {"name": "eth1", "sandbox": "/run/n"},
        ]);
        let agent = place.agent(KNOWN);
        let (is_good, said) = call("ADD", &ALL, &config.to_string());
        assert!(is_good, "{said}");
        assert_eq!(agent.join().expect("an agent")["about"]["mtu"], mtu);
        let mut result = config["prevResult"].clone();
        if version == "1.1.0" {
            result["interfaces"][1]["mtu"] = mtu.into();
            result["interfaces"][4]["mtu"] = mtu.into();
        }
        assert_eq!(said, result);
    }
}

#[test]
fn without_an_agent_a_container_waits_unless_that_is_not_required() {
    // Its socket is there, and nothing listens: it was killed.
    let place = Place::new();
    let mut config = place.config("1.1.0");
    for (command, code) in [("ADD", 11), ("CHECK", 11), ("STATUS", 50)] {
        let (is_good, said) = call(command, &ALL, &config.to_string());
        assert!(!is_good, "{command}");
        assert_eq!(said["code"], code, "{said}");
        assert!(said["details"].as_str().is_some_and(|it| it.contains("no agent runs")), "{said}");
    }
    (config["required"], config["mtu"]) = (false.into(), 4200.into());
    let (is_good, said) = call("ADD", &ALL, &config.to_string());
    assert!(is_good && said == config["prevResult"], "nothing was set: {said}");
    for command in ["CHECK", "STATUS"] {
        assert!(call(command, &ALL, &config.to_string()).0, "{command}");
    }
    // Nor is one that refuses required.
    for (command, expected) in [("ADD", &config["prevResult"]), ("CHECK", &Value::Null)] {
        let agent = place.agent(REFUSED);
        let (is_good, said) = call(command, &ALL, &config.to_string());
        agent.join().expect("an agent");
        assert!(is_good && said == *expected, "{command}: {said}");
    }
}

#[test]
fn a_refusal_of_the_agent_has_its_reason() {
    let place = Place::new();
    for command in ["ADD", "CHECK"] {
        let agent = place.agent(REFUSED);
        let (is_good, said) = call(command, &ALL, &place.config("1.0.0").to_string());
        agent.join().expect("an agent");
        assert!(!is_good && said["code"] == 100, "{said}");
        assert!(said["details"].as_str().is_some_and(|it| it.contains("macvlan")), "{said}");
    }
    let agent = place.agent(KNOWN);
    assert_eq!(call("CHECK", &ALL, &place.config("1.0.0").to_string()), (true, Value::Null));
    assert_eq!(agent.join().expect("an agent")["command"], "check");
}

/// Also twice, first of all, without a namespace, and with an agent that has gone.
#[test]
fn a_container_goes_at_any_time() {
    let place = Place::new();
    let mut config = place.config("1.1.0");
    config.as_object_mut().expect("an object").remove("prevResult");
    for variables in [&ALL[..], &ALL, &[ALL[0], ALL[2]]] {
        assert_eq!(call("DEL", variables, &config.to_string()), (true, Value::Null));
    }
    config["cni.dev/valid-attachments"] = json!([{"containerID": "c0ffee", "ifname": "eth0"}]);
    assert_eq!(call("GC", &[], &config.to_string()), (true, Value::Null));
    let (is_good, said) = call("VERSION", &[], &config.to_string());
    assert!(is_good, "{said}");
    let versions = json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]);
    assert_eq!(said["supportedVersions"], versions);
}

/// All that a result of the plugins before can have in version 1.1.0.
#[test]
fn no_field_of_the_result_before_is_lost() {
    let place = Place::new();
    let mut config = place.config("1.1.0");
    let before = &mut config["prevResult"];
    before["interfaces"] = json!([
        {"name": "rdma0", "mac": "02:00:00:00:00:09", "mtu": 4200},
        {"name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 4200, "sandbox": "/run/n",
         "socketPath": "/run/s", "pciID": "0000:00:1f.6"},
    ]);
    before["ips"] = json!([
        {"address": "10.88.7.2/24", "gateway": "10.88.7.1", "interface": 1},
        {"address": "fd00::2/64", "gateway": "fd00::1", "interface": 1},
    ]);
    before["routes"] = json!([
        {"dst": "0.0.0.0/0", "gw": "10.88.7.1"},
        {"dst": "fd00:1::/64", "gw": "fd00::1", "mtu": 1400, "advmss": 1340, "priority": 3,
         "table": 100, "scope": 0},
    ]);
    before["dns"] = json!({
        "nameservers": ["10.88.7.1", "fd00::1"], "domain": "d", "search": ["s"], "options": ["o"],
    });
    let agent = place.agent(KNOWN);
    let (is_good, said) = call("ADD", &ALL, &config.to_string());
    agent.join().expect("an agent");
    assert!(is_good, "{said}");
    assert_eq!(said, config["prevResult"]);
}

/// An agent that dies at each step, or is another program. The runtime then deletes and adds again.
#[test]
fn an_agent_that_says_half_of_it_is_an_error() {
    let place = Place::new();
    let config = place.config("1.1.0").to_string();
    for replies in [
        &[][..],
        &["{\"introduced\":{\"name\":\"veth0\"}}\n"],
        &["{\"introduced\":{\"na"],
        &["{\"done\":{}}\n"],
        &["\u{1b}[2J"],
        &["[]\n", "{\"done\":{}}\n"],
    ] {
        let agent = place.agent(replies);
        let (is_good, said) = call("ADD", &ALL, &config);
        agent.join().expect("an agent");
        assert!(!is_good && said["code"] == 100, "{replies:?}: {said}");
        assert!(!said.to_string().contains('\u{1b}'), "{said}");
        assert_eq!(call("DEL", &ALL, &config), (true, Value::Null));
        let agent = place.agent(KNOWN);
        assert!(call("ADD", &ALL, &config).0, "{replies:?}");
        agent.join().expect("an agent");
    }
}

/// Puts each of these values into each field of a configuration, at any depth.
fn each_field(config: &Value, values: &[Value], each: &mut dyn FnMut(Value)) {
    let fields: Vec<Value> = match config {
        Value::Object(fields) => fields.keys().map(|key| key.clone().into()).collect(),
        Value::Array(fields) => (0..fields.len()).map(Value::from).collect(),
        _ => Vec::new(),
    };
    for field in fields {
        let at = |config: &mut Value, value: Value| match &field {
            Value::String(key) => config[key] = value,
            at => config[at.as_u64().expect("a place") as usize] = value,
        };
        for value in values {
            let mut changed = config.clone();
            at(&mut changed, value.clone());
            each(changed);
        }
        let inner = match &field {
            Value::String(key) => &config[key],
            at => &config[at.as_u64().expect("a place") as usize],
        };
        each_field(inner, values, &mut |inner| {
            let mut changed = config.clone();
            at(&mut changed, inner);
            each(changed);
        });
    }
}

/// Each ends with a success or with an error of the specification, and no agent is there.
#[test]
fn nonsense_in_any_field_is_an_error_or_nothing() {
    let place = Place::new();
    let mut config = place.config("1.1.0");
    config["required"] = true.into();
    config["mtu"] = 4200.into();
    config["runtimeConfig"] = json!({"bandwidth": {
        "ingressRate": 1_000_000, "ingressBurst": 1, "egressRate": 1_000_000, "egressBurst": 1,
    }});
    config["capabilities"] = json!({"bandwidth": true});
    config["ipam"] = json!({"type": "host-local"});
    config["cni.dev/valid-attachments"] = json!([{"containerID": "c0ffee", "ifname": "eth0"}]);
    let deep = (0..100).fold(Value::Null, |inner, _| json!([inner]));
    let values = [
        Value::Null,
        true.into(),
        (-1).into(),
        1e300.into(),
        "".into(),
        "a/b\u{1b}\n\u{0}".into(),
        "x".repeat(5000).into(),
        json!([{}]),
        json!({"a": 1}),
        deep,
    ];
    let commands = ["ADD", "CHECK", "DEL", "STATUS", "GC"];
    let (mut tried, mut good) = (0, 0);
    let judge = |command: &str, (is_good, said): (bool, Value), config: &dyn std::fmt::Debug| {
        let text = |key: &str| said[key].as_str().is_some_and(|text| !text.is_empty());
        let is_error = said["code"].as_u64().is_some_and(|code| code > 0) && text("msg");
        assert!(is_good != is_error, "{command} {config:?}: {said}");
        assert!(!is_good || command != "ADD", "there is no agent: {config:?}");
    };
    each_field(&config, &values, &mut |config| {
        let command = commands[tried % commands.len()];
        tried += 1;
        // Then a missing agent is none.
        if config["required"] == true {
            let done = call(command, &ALL, &config.to_string());
            good += usize::from(done.0);
            judge(command, done, &config);
        }
    });
    assert!(tried > 300 && good > 20, "{good} of {tried}");
    // Texts that are no JSON, or other JSON.
    let (text, mut random) = (config.to_string().into_bytes(), 1_u64);
    for tried in 0..200 {
        let mut text = text.clone();
        for _ in 0..=tried % 4 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (random >> 33) as usize % text.len();
            match random >> 62 {
                0 => text.truncate(at.max(1)),
                1 => text[at] = (random >> 20) as u8,
                2 => text.insert(at, b"{}[]\",:\\0"[(random >> 20) as usize % 9]),
                _ => drop(text.remove(at)),
            }
            if text.is_empty() {
                text.push(b'{');
            }
        }
        let command = commands[tried % commands.len()];
        // `required` may be another key now.
        if command != "ADD" {
            judge(command, call_with(command, &ALL, &text), &String::from_utf8_lossy(&text));
        }
    }
}

#[test]
fn bad_input_has_the_code_of_the_specification() {
    let place = Place::new();
    let good = place.config("1.1.0");
    let with = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        config.to_string()
    };
    let bandwidth = |value: Value| with("runtimeConfig", json!({"bandwidth": value}));
    let into =
        |rate: Value, burst: Value| bandwidth(json!({"ingressRate": rate, "ingressBurst": burst}));
    let out =
        |rate: Value, burst: Value| bandwidth(json!({"EgressRate": rate, "EgressBurst": burst}));
    let mut alone = good.clone();
    alone.as_object_mut().expect("an object").remove("prevResult");
    for (command, variables, config, code) in [
        ("ADD", &ALL[1..], good.to_string(), 4),
        ("ADD", &ALL[..1], good.to_string(), 4),
        ("ADD", &[ALL[0], ALL[1], ("CNI_IFNAME", "a/b")], good.to_string(), 4),
        ("ADD", &[("CNI_CONTAINERID", "a b"), ALL[1], ALL[2]], good.to_string(), 4),
        ("NONSENSE", &ALL, good.to_string(), 4),
        ("ADD", &ALL, alone.to_string(), 7),
        ("ADD", &ALL, with("control", 7.into()), 7),
        ("ADD", &ALL, with("required", "yes".into()), 7),
        ("ADD", &ALL, with("class", 7.into()), 7),
        ("CHECK", &ALL, with("class", json!(["gold"])), 7),
        ("STATUS", &[], with("control", Value::Null), 7),
        ("ADD", &ALL, with("mtu", "4200".into()), 7),
        ("ADD", &ALL, with("mtu", Value::Null), 7),
        ("ADD", &ALL, with("mtu", 0.into()), 7),
        ("ADD", &ALL, with("mtu", 1279.into()), 7),
        ("CHECK", &ALL, with("mtu", 65_536.into()), 7),
        ("ADD", &ALL, with("mtu", (-4200).into()), 7),
        ("ADD", &ALL, with("mtu", 4200.5.into()), 7),
        ("ADD", &ALL, with("mtu", ((1_u64 << 32) + 4200).into()), 7),
        ("ADD", &ALL, bandwidth("1M".into()), 7),
        ("ADD", &ALL, bandwidth(json!([1, 2, 3, 4])), 7),
        ("ADD", &ALL, into("1M".into(), 8.into()), 7),
        ("ADD", &ALL, into(1_000_000.into(), "8".into()), 7),
        ("ADD", &ALL, out((-1_000_000).into(), 8.into()), 7),
        ("ADD", &ALL, out(1_000_000.into(), (-8).into()), 7),
        ("ADD", &ALL, out(1e6.into(), 8.into()), 7),
        ("ADD", &ALL, into(1_000_000.into(), 0.into()), 7),
        ("ADD", &ALL, into(0.into(), 8.into()), 7),
        ("ADD", &ALL, out(1_000_000.into(), Value::Null), 7),
        ("CHECK", &ALL, out(Value::Null, 8.into()), 7),
        ("ADD", &ALL, into(999_999.into(), 8.into()), 7),
        ("ADD", &ALL, out(1_000_000_000_001_u64.into(), 8.into()), 7),
        ("ADD", &ALL, out(1_000_000.into(), (8 * u64::from(u32::MAX)).into()), 7),
        ("ADD", &ALL, bandwidth(json!({"ingressRate": 0, "IngressRate": 0})), 7),
        ("ADD", &ALL, bandwidth(json!({"shapedSubnets": ["10.0.0.0/8"]})), 2),
        ("ADD", &ALL, with("runtimeConfig", "bandwidth".into()), 6),
        ("ADD", &ALL, with("cniVersion", "0.2.0".into()), 1),
        ("ADD", &ALL, with("cniVersion", "9.0.0".into()), 1),
        ("ADD", &ALL, with("prevResult", "eth0".into()), 6),
        ("ADD", &ALL, "{".to_owned(), 6),
        ("ADD", &ALL, String::new(), 6),
    ] {
        let (is_good, said) = call(command, variables, &config);
        assert!(!is_good, "{command} {variables:?} {config}");
        assert_eq!(said["code"], code, "{command} {variables:?} {config}: {said}");
    }
}
