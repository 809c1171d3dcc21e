//! The plugin as a runtime calls it: variables, a configuration on standard input, a result or an
//! error on standard output (CNI specification 1.1.0). The agent is one that this test plays.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, socket_with,
};
use serde_json::{Value, json};

/// A directory with a control socket.
struct Place {
    dir: PathBuf,
    socket: OwnedFd,
}

impl Place {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("rocinante-cni-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).expect("a directory");
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        let place = Self { dir, socket };
        bind(&place.socket, &SocketAddrUnix::new(place.control()).expect("a path")).expect("bound");
        place
    }

    fn control(&self) -> PathBuf {
        self.dir.join("control.sock")
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
                send(&client, reply.as_bytes(), SendFlags::NOSIGNAL).expect("sent");
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

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

const ALL: [(&str, &str); 3] =
    [("CNI_CONTAINERID", "c0ffee"), ("CNI_NETNS", "/run/n"), ("CNI_IFNAME", "eth0")];

/// Whether the plugin succeeds, and its JSON.
fn call(command: &str, variables: &[(&str, &str)], config: &str) -> (bool, Value) {
    let mut plugin = Command::new(env!("CARGO_BIN_EXE_rocinante-cni"));
    plugin.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", "/opt/cni/bin");
    plugin.envs(variables.iter().copied());
    plugin.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = plugin.spawn().expect("the plugin");
    // It may end before it has read all.
    let _ = child.stdin.take().expect("a pipe").write_all(config.as_bytes());
    let mut said = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    let status = child.wait().expect("it ends");
    assert!(status.code().is_some(), "{command}: {status}");
    let said =
        if said.is_empty() { Value::Null } else { serde_json::from_str(&said).expect(&said) };
    (status.success(), said)
}

const KNOWN: &[&str] = &["{\"introduced\":{\"name\":\"veth0\"}}\n", "{\"done\":{}}\n"];
const REFUSED: &[&str] = &["{\"refused\":{\"reason\":\"it is a macvlan\"}}\n"];

#[test]
fn an_interface_is_introduced_and_the_result_before_is_passed_on() {
    let place = Place::new("add");
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
fn without_an_agent_a_container_waits_unless_that_is_not_required() {
    // Its socket is there, and nothing listens: it was killed.
    let place = Place::new("none");
    let mut config = place.config("1.1.0");
    for (command, code) in [("ADD", 11), ("CHECK", 11), ("STATUS", 50)] {
        let (is_good, said) = call(command, &ALL, &config.to_string());
        assert!(!is_good, "{command}");
        assert_eq!(said["code"], code, "{said}");
        assert!(said["details"].as_str().is_some_and(|it| it.contains("no agent runs")), "{said}");
    }
    config["required"] = false.into();
    let (is_good, said) = call("ADD", &ALL, &config.to_string());
    assert!(is_good && said == config["prevResult"], "{said}");
    for command in ["CHECK", "STATUS"] {
        assert!(call(command, &ALL, &config.to_string()).0, "{command}");
    }
}

#[test]
fn a_refusal_of_the_agent_has_its_reason() {
    let place = Place::new("refused");
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
    let place = Place::new("del");
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

#[test]
fn bad_input_has_the_code_of_the_specification() {
    let place = Place::new("bad");
    let good = place.config("1.1.0");
    let with = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        config.to_string()
    };
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
        ("STATUS", &[], with("control", Value::Null), 7),
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
