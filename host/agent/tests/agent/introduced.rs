//! Containers that an engine introduces before they run.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};

use rocinante_agent::control::{self, About};
use rocinante_lab::Netns;

use crate::asker::{As, Asker, eventually};
use crate::lab::{Host, host_or_skip};

/// An engine's word about a container of the lab.
pub(crate) fn about(host: &Host, container: usize) -> About {
    let (interface, id) = (Some("eth0".into()), format!("c0ffee{container}"));
    About { interface, id, ..begins(&host.container(container).netns().path()) }
}

/// The word about one that begins in a namespace.
fn begins(namespace: &str) -> About {
    About {
        namespace: namespace.into(),
        interface: None,
        id: "c0ffee".into(),
        engine: "test".into(),
        pod: None,
        class: None,
        rates: None,
        mtu: None,
    }
}

/// The result of the hook for a process, and its words.
pub(crate) fn hook(host: &Host, pid: u32, more: &[&str]) -> (bool, String) {
    hook_with(host, pid, r#"{"io.container.manager": "libpod"}"#, more)
}

/// As [`hook`], of a container with these annotations.
pub(crate) fn hook_with(host: &Host, pid: u32, annotations: &str, more: &[&str]) -> (bool, String) {
    let mut hook = Command::new(host.command().get_program());
    hook.arg("hook").arg("--config").arg(host.dir().join("agent.toml")).args(more);
    hook.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = hook.spawn().expect("the hook");
    let state = format!(
        r#"{{"ociVersion": "1.0.2", "id": "c0ffee0", "pid": {pid}, "annotations": {annotations}}}"#
    );
    child.stdin.take().expect("a pipe").write_all(state.as_bytes()).expect("written");
    let done = child.wait_with_output().expect("it ends");
    (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
}

/// It changes its addresses before it first asks: of two containers the one that was introduced
/// keeps those that it was given.
#[test]
fn an_introduced_container_keeps_the_addresses_that_it_was_given() {
    let mut host = host_or_skip!("introduced::an_introduced_container", 2);
    host.start();
    let path = control::path(&host.state());
    let name = control::introduce(&path, &about(&host, 0)).expect("served");
    assert_eq!(name.as_deref(), Some("veth0"));
    let given = host.addresses(0);
    assert!(given.iter().all(|own| host.may_leave(0).contains(own)), "before it asks");
    assert!(host.filter(1).is_none());
    let late = |index: usize| format!("10.77.0.10{index}");
    for index in [0, 1] {
        let add = ["address", "add", &format!("{}/24", late(index)), "dev", "eth0"];
        host.container(index).netns().ip(&add).expect("added");
    }
    let start =
        |index: usize| Asker::start(host.container(index).netns(), &host.socket(), As::Root);
    let (mut introduced, mut other) = (start(0), start(1));
    introduced.granted(given[0]);
    other.granted(host.addresses(1)[0]);
    let may_leave = |host: &Host, index: usize| {
        host.may_leave(index).contains(&late(index).parse().expect("an address"))
    };
    assert_eq!((may_leave(&host, 0), may_leave(&host, 1)), (false, true));
    assert!(introduced.refused(late(0).parse().expect("an address")).starts_with("Interface"));
    // A restarted agent does the same, also for programs that ask by the engine's name.
    host.kill();
    host.start();
    assert!(!may_leave(&host, 0));
    let (is_good, said) = host.operator(&["status", "c0ff"]);
    assert!(is_good && said.contains("container: \"c0ffee0\" of \"test\""), "{said}");
    assert!(!said.contains("\"veth1\""), "{said}");
    // The engine's word is the last one.
    assert_eq!(control::introduce(&path, &about(&host, 0)).expect("served"), name);
    introduced.granted(late(0).parse().expect("an address"));
}

/// A pod's containers share a network namespace, and the engine runs its hook for each. One of them
/// may change the addresses.
#[test]
fn another_container_of_the_namespace_lifts_no_pin() {
    let mut host = host_or_skip!("introduced::another_container", 2);
    host.configure("[[class]]\nname = \"gold\"\n");
    host.start();
    // One is pinned as its engine introduced it, the other as it asks.
    let first = About { class: Some("gold".into()), ..about(&host, 0) };
    control::introduce(&control::path(&host.state()), &first).expect("served");
    for it in [0, 1] {
        let netns = host.container(it).netns();
        let mut root = Asker::start(netns, &host.socket(), As::Root);
        root.granted(host.addresses(it)[0]);
        let (before, mac) = (host.may_leave(it), host.mac(it));
        netns.ip(&["address", "add", "10.77.0.100/24", "dev", "eth0"]).expect("added");
        netns.ip(&["link", "set", "eth0", "address", "02:00:00:00:77:77"]).expect("set");
        let another = host.asker(it);
        assert_eq!(hook(&host, another.id(), &["--required"]), (true, String::new()));
        let late = "10.77.0.100".parse().expect("an address");
        assert!(root.refused(late).starts_with("Interface"));
        assert!(host.may_leave(it).iter().all(|own| before.contains(own)), "{before:?}");
        assert_eq!(host.mac(it), mac);
    }
    let status = host.status();
    let class = |it: usize| status["containers"][it]["class"]["name"].clone();
    assert_eq!((class(0), class(1)), ("gold".into(), "default".into()), "{status:#}");
}

/// A network that the engine adds later is no word about the addresses of the first.
#[test]
fn a_second_interface_changes_nothing_of_the_first() {
    let mut host = host_or_skip!("introduced::a_second_interface", 1);
    host.start();
    let path = control::path(&host.state());
    control::introduce(&path, &about(&host, 0)).expect("served");
    let netns = host.container(0).netns();
    netns.ip(&["address", "add", "10.77.0.100/24", "dev", "eth0"]).expect("added");
    let mut root = Asker::start(netns, &host.socket(), As::Root);
    root.granted(host.addresses(0)[0]);
    let add = ["link", "add", "h30", "type", "veth", "peer", "name", "eth1", "netns"];
    host.lab.host().ip(&[&add[..], &[&netns.path()]].concat()).expect("a veth");
    netns.ip(&["address", "add", "10.78.0.1/24", "dev", "eth1"]).expect("added");
    let second = About { interface: Some("eth1".into()), ..about(&host, 0) };
    assert_eq!(control::introduce(&path, &second).expect("served").as_deref(), Some("h30"));
    let own = "10.77.0.100".parse().expect("an address");
    assert!(!host.may_leave(0).contains(&own), "{:?}", host.may_leave(0));
    assert!(root.refused(own).starts_with("Interface"));
}

/// The variable by which this program is a client: the paths of a namespace and a control socket.
const CLIENT: &str = "TEST_INTRODUCES";

/// The client's side.
#[test]
fn client() {
    let Ok(paths) = std::env::var(CLIENT) else { return };
    let (namespace, control) = paths.split_once(' ').expect("two paths");
    let about = begins(namespace);
    let name = control::introduce(control.as_ref(), &about).expect("served");
    assert_eq!(control::is_introduced(control.as_ref(), &about).expect("served"), name);
    assert!(name.is_some());
}

/// As `/var/run` leads to `/run` on a host whose agent has another root.
#[test]
fn a_client_names_a_namespace_through_a_link_below_its_own_root() {
    let mut host = host_or_skip!("introduced::a_client_names", 2);
    host.start();
    let (own, root) = (std::env::current_exe().expect("this program"), host.dir().join("root"));
    std::fs::create_dir(&root).expect("a directory");
    let mount = "mount -t tmpfs none $0 && mkdir $0/run && ln -s $0/run $0/link && touch $0/run/n \
                 && mount --bind $1 $0/run/n && exec $2 --exact introduced::client --nocapture";
    let mut client = Command::new("unshare");
    client.args(["--mount", "sh", "-c", mount]).arg(&root);
    client.arg(host.container(1).netns().path()).arg(own);
    let paths = format!("{}/link/n {}", root.display(), host.control().display());
    let output = client.env(CLIENT, paths).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    assert!(host.filter(1).is_some() && host.filter(0).is_none());
    assert!(!root.join("link").exists(), "the agent does not see it");
}

/// One whose processes cannot change them: they are followed, as an engine may add a network later.
#[test]
fn the_addresses_of_an_introduced_container_are_followed() {
    let mut host = host_or_skip!("introduced::the_addresses", 1);
    host.start();
    control::introduce(&control::path(&host.state()), &about(&host, 0)).expect("served");
    let late: std::net::IpAddr = "10.77.0.100".parse().expect("an address");
    let add = ["address", "add", "10.77.0.100/24", "dev", "eth0"];
    host.container(0).netns().ip(&add).expect("added");
    eventually("it is followed", || host.may_leave(0).contains(&late));
    host.asker(0).granted(late);
}

#[test]
fn the_hook_introduces_the_container_of_a_state() {
    let mut host = host_or_skip!("introduced::the_hook", 2);
    host.command();
    // Without an agent a container begins all the same.
    let asker = host.asker(0);
    let (is_good, said) = hook(&host, asker.id(), &[]);
    assert!(is_good && said.contains("no agent runs at"), "{said}");
    let (is_good, said) = hook(&host, asker.id(), &["--required"]);
    assert!(!is_good && said.contains("no agent runs at"), "{said}");
    host.start();
    assert_eq!(hook(&host, asker.id(), &["--required"]), (true, String::new()));
    let status = host.status();
    let [container] = &status["containers"].as_array().expect("a list")[..] else {
        panic!("{status}");
    };
    assert_eq!((&container["id"], &container["engine"]), (&"c0ffee0".into(), &"libpod".into()));
    assert!(host.filter(0).is_some() && host.filter(1).is_none());
    // A process that has gone, and the host's.
    for (pid, said) in [(4_000_000, "No such file"), (std::process::id(), "host")] {
        let (is_good, heard) = hook(&host, pid, &["--required"]);
        assert!(!is_good && heard.contains(said), "{said}: {heard}");
        let (is_good, heard) = hook(&host, pid, &[]);
        assert!(is_good && heard.contains(said), "{said}: {heard}");
    }
}

#[test]
fn what_is_no_container_is_refused_and_nothing_waits() {
    let mut host = host_or_skip!("introduced::what_is_no_container", 1);
    host.start();
    let path = control::path(&host.state());
    let pipe = host.dir().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().expect("it runs");
    assert!(made.success());
    let alone = Netns::new().expect("a namespace");
    let base = || about(&host, 0);
    let at = |namespace: &str| About { namespace: namespace.into(), ..base() };
    let named = |name: &str| About { interface: Some(name.into()), ..base() };
    let long = "x".repeat(12 << 10);
    for (about, said) in [
        (at("/proc/version"), "no namespace"),
        (at("/nonexistent"), "No such file"),
        (at(""), "no namespace"),
        (at("/proc/self/ns/pid"), "network namespace"),
        (at(&pipe.display().to_string()), "no namespace"),
        (at(&host.lab.host().path()), "host"),
        (at(&alone.path()), "no interface"),
        (About { interface: None, ..at(&alone.path()) }, "no interface"),
        (named("eth7"), "no interface"),
        (named(&long), "no interface"),
        (named("lo"), "no virtual interface"),
    ] {
        let error = control::introduce(&path, &about).expect_err(said).to_string();
        assert!(error.contains(said), "{said}: {error}");
        control::is_introduced(&path, &about).expect_err(said);
    }
    assert!(host.filter(0).is_none());
    control::is_introduced(&path, &base()).expect_err("not yet");
    assert!(control::introduce(&path, &base()).expect("served").is_some());
    assert_eq!(control::is_introduced(&path, &base()).expect("served"), Some("veth0".into()));
    let inode = std::fs::metadata(host.container(0).netns().path()).expect("a file").ino();
    assert_eq!(host.status()["containers"][0]["namespace"], inode);
}
