//! The operator's commands.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;

use rocinante_agent::control::{self, About};
use rocinante_netdev::Backend;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with,
};

use crate::asker::eventually;
use crate::introduced::about;
use crate::lab::{Host, host_or_skip};

#[test]
fn the_status_has_what_an_operator_asks_for() {
    let mut host = host_or_skip!("commands::the_status", 2);
    host.configure("ports_max = 2");
    host.start();
    let [v4, v6] = host.addresses(0);
    let (mut asker, mut other) = (host.asker(0), host.asker(1));
    assert!(asker.tell(&format!("ask {v4} 2 30")).starts_with("granted 1 "));
    asker.granted(v6);
    assert!(asker.refused(v4).starts_with("Busy"));
    other.opened(Backend::Xdp, host.addresses(1)[0]);
    host.forge(0, &mut asker, 7);
    let status = host.status();
    let agent = &status["agent"];
    assert_eq!(agent["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&agent["containers"], &agent["ports"]), (&2.into(), &3.into()));
    assert_eq!(agent["requests"]["granted"], 3);
    let [first, second] = &status["containers"].as_array().expect("a list")[..] else {
        panic!("{status}");
    };
    assert_eq!((&first["name"], &second["name"]), (&"veth0".into(), &"veth1".into()));
    let inode = fs::metadata(format!("/proc/{}/ns/net", asker.id())).expect("a process").ino();
    assert_eq!(first["namespace"], inode);
    let addresses = first["addresses"].as_array().expect("a list");
    assert!([v4, v6].iter().all(|own| addresses.contains(&own.to_string().into())), "{first}");
    let ports = &first["ports"][0];
    assert_eq!((&ports["backend"], &ports["ports"]), (&"packet".into(), &2.into()));
    assert_eq!(ports["slots"], 30 + 180);
    assert!(ports["bytes"].as_u64().is_some_and(|bytes| bytes > 12_000_000), "{first}");
    assert_eq!(first["dropped"]["ipv6"], host.dropped(0)[3]);
    assert_eq!(first["dropped"]["arp"], 0);
    let requests = &first["requests"];
    assert_eq!((&requests["granted"], &requests["refused"]["busy"]), (&2.into(), &1.into()));
    let waited = |name: &str| requests["waited"][name].as_u64().expect("a number");
    assert!(waited("p50_us") > 0 && waited("p99_us") <= waited("max_us"), "{requests}");
    assert!(waited("mean_us") <= waited("max_us"), "{requests}");
    assert_eq!(second["ports"][0]["backend"], "afxdp");
    assert_eq!(second["ports"][0]["slots"], 256);
    // One of them, in words; and none.
    let (is_good, said) = host.operator(&["status", "veth0"]);
    assert!(is_good && said.contains("\"veth0\"") && !said.contains("\"veth1\""), "{said}");
    assert!(said.contains("2 packet with 210 slots") && said.contains("busy 1"), "{said}");
    let (is_good, said) = host.operator(&["status", "veth7"]);
    assert!(!is_good && said.contains("no container is called \"veth7\""), "{said}");
    // A restarted agent knows the ports, too.
    host.kill();
    host.start();
    let after = host.status();
    assert_eq!(after["containers"][0]["ports"], first["ports"]);
    assert_eq!(after["containers"][1]["ports"], second["ports"]);
}

#[test]
fn a_released_container_may_ask_again() {
    let mut host = host_or_skip!("commands::a_released_container", 2);
    host.start();
    let mut askers = [host.asker(0), host.asker(1)];
    host.grant_each(&mut askers);
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(!is_good && said.contains("\"veth0\" stays: it has open ports"), "{said}");
    assert!(host.filter(0).is_some());
    askers[0].tell("close");
    host.has_ports(1);
    // Of two, one has ports.
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(!is_good && said.contains("\"veth1\" stays"), "{said}");
    assert!(said.contains("\"veth0\" released") && host.filter(0).is_none(), "{said}");
    assert_eq!(host.state_text()["containers"].as_array().map(Vec::len), Some(1));
    host.logged(&["released", "veth0"]);
    // An address that comes now makes it no one's container again.
    host.container(0)
        .netns()
        .ip(&["address", "add", "10.77.0.9/24", "dev", "eth0"])
        .expect("added");
    askers[0].granted(host.addresses(0)[0]);
    assert!(host.may_leave(0).contains(&"10.77.0.9".parse().expect("an address")));
    let (is_good, said) = host.operator(&["release", "--all", "--force"]);
    assert!(is_good && said.lines().count() == 2, "{said}");
    assert!(host.filter(0).is_none() && host.filter(1).is_none());
    assert_eq!((host.ports(), host.guarded_rings()), (0, 0));
    let (is_good, said) = host.operator(&["release", "veth0"]);
    assert!(!is_good && said.contains("no container"), "{said}");
    askers[1].granted(host.addresses(1)[0]);
}

/// All ends of a container go together: its ports send by each of them.
#[test]
fn a_container_goes_with_all_its_ends() {
    let mut host = host_or_skip!("commands::a_container_goes", 1);
    let path = host.container(0).netns().path();
    let veth = ["link", "add", "second", "type", "veth", "peer", "name", "eth1", "netns", &path];
    host.lab.host().ip(&veth).expect("a veth");
    host.start();
    host.asker(0).granted(host.addresses(0)[0]);
    host.has_ports(0);
    let (is_good, said) = host.operator(&["release", "second"]);
    assert!(is_good && said.lines().count() == 2, "{said}");
    assert!(said.contains("\"second\" released") && said.contains("\"veth0\" released"), "{said}");
    assert!(host.filter(0).is_none());
    // They stay together, too, where no agent runs.
    let mut asker = host.asker(0);
    asker.granted(host.addresses(0)[0]);
    host.kill();
    let (is_good, said) = host.operator(&["release", "second"]);
    assert!(!is_good && said.matches("\" stays: it has open ports").count() == 2, "{said}");
    assert!(host.filter(0).is_some());
    asker.tell("close");
    let (is_good, said) = host.operator(&["release", "second"]);
    assert!(is_good && said.matches("\" released").count() == 2, "{said}");
    assert!(host.filter(0).is_none());
}

/// A beginning that several engines' names have means none of them.
#[test]
fn no_container_is_released_by_the_name_of_another() {
    let mut host = host_or_skip!("commands::no_container_is_released", 4);
    host.start();
    // The engine's name of the last is that of another's end.
    for (container, id) in ["c0ffee", "c0ffee1", "c0ffee12", "veth0"].into_iter().enumerate() {
        let about = About { id: id.into(), ..about(&host, container) };
        control::introduce(&host.control(), &about).expect("served");
    }
    let guarded = |host: &Host| [0, 1, 2, 3].map(|container| host.filter(container).is_some());
    for name in ["c0ff", "c0ffe"] {
        let (is_good, said) = host.operator(&["release", name, "--force"]);
        assert!(
            !is_good && said.contains(&format!("{name:?} means several containers: [")),
            "{said}"
        );
        let named = ["veth0 (test c0ffee)", "veth1 (test c0ffee1)", "veth2 (test c0ffee12)"];
        assert!(named.iter().all(|named| said.contains(named)), "{said}");
        assert!(!said.contains("veth3"), "{said}");
    }
    for name in ["c0f", "", "beef"] {
        let (is_good, said) = host.operator(&["release", name]);
        assert!(!is_good && said.contains("no container is called"), "{name}: {said}");
    }
    assert_eq!(guarded(&host), [true; 4]);
    let (_, said) = host.operator(&["status", "c0ffee"]);
    assert!(said.contains("\"veth0\"") && !said.contains("\"veth1\""), "{said}");
    for (name, left) in [
        ("veth0", [false, true, true, true]),
        ("c0ffee1", [false, false, true, true]),
        ("c0ff", [false, false, false, true]),
        ("veth0", [false; 4]),
    ] {
        let (is_good, said) = host.operator(&["release", name]);
        assert!(is_good && said.lines().count() == 1, "{name}: {said}");
        assert_eq!(guarded(&host), left, "{name}");
    }
}

#[test]
fn nothing_stays_of_an_agent_that_is_removed() {
    let mut host = host_or_skip!("commands::nothing_stays", 2);
    host.start();
    let (mut asker, mut other) = (host.asker(0), host.asker(1));
    asker.granted(host.addresses(0)[0]);
    other.granted(host.addresses(1)[0]);
    // With a socket that no agent serves.
    host.kill();
    assert!(host.control().exists() && host.socket().exists());
    let (is_good, said) = host.operator(&["status"]);
    assert!(!is_good && said.contains("no agent runs"), "{said}");
    asker.tell("close");
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(!is_good && said.contains("\"veth1\" stays: it has open ports"), "{said}");
    assert!(host.filter(0).is_none() && host.filter(1).is_some(), "{said}");
    // What stays is known to the next agent.
    host.start();
    assert_eq!(host.status()["containers"][0]["name"], "veth1");
    host.kill();
    fs::write(host.state(), "{").expect("written");
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(!is_good && said.contains("--force"), "{said}");
    let (is_good, said) = host.operator(&["release", "--all", "--force"]);
    assert!(is_good && said.contains("\"veth1\" released"), "{said}");
    assert!(host.filter(1).is_none());
    assert!(!host.dir().join("s").exists() && !host.dir().join("t").exists(), "no file stays");
    let (is_good, said) = host.operator(&["release", "--all"]);
    assert!(is_good, "nothing is there: {said}");
    // An agent that starts there is as the first.
    host.start();
    asker.granted(host.addresses(0)[0]);
}

/// A container asks without end while it is released again and again.
#[test]
fn a_container_is_released_while_it_asks() {
    let mut host = host_or_skip!("commands::a_container_is_released_while", 2);
    host.configure("requests_per_second = 1000");
    host.start();
    let [v4, _] = host.addresses(0);
    let (mut asker, mut other) = (host.asker(0), host.asker(1));
    other.granted(host.addresses(1)[0]);
    std::thread::scope(|scope| {
        let releases = scope.spawn(|| {
            for _ in 0..10 {
                let (is_good, said) = host.operator(&["release", "--all", "--force"]);
                assert!(is_good, "{said}");
            }
        });
        while !releases.is_finished() {
            let answer = asker.tell(&format!("ask {v4} 2 15"));
            let is_either = answer.starts_with("granted 1 ") || answer.contains("Interface");
            assert!(is_either, "{answer}");
            // No port without the program.
            asker.tell("close");
        }
        releases.join().expect("no panic");
    });
    asker.granted(v4);
    assert!(host.filter(0).is_some());
    host.has_ports(1);
}

pub(crate) fn connected(host: &Host) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.expect("a socket");
    connect(&socket, &SocketAddrUnix::new(host.control()).expect("short")).expect("connected");
    socket
}

#[test]
fn clients_that_do_not_behave_hold_up_neither_the_agent_nor_others() {
    let mut host = host_or_skip!("commands::clients_that_do_not_behave", 1);
    host.start();
    let before = host.descriptors();
    // Noise, and messages that are no command.
    for message in [&b"\0\xff\n"[..], b"{}", b"status", &[b'['; 16_000], &[b' '; 100_000]] {
        let client = connected(&host);
        send(&client, message, SendFlags::empty()).expect("sent");
        let mut bytes = [0; 1024];
        let (length, _) = recv(&client, &mut bytes[..], RecvFlags::empty()).expect("an answer");
        assert!(bytes[..length].starts_with(b"{\"refused\":"), "{message:?}");
    }
    // A command with descriptors.
    let client = connected(&host);
    let (stdin, mut space) = (std::io::stdin(), [std::mem::MaybeUninit::uninit(); 64]);
    let (fds, mut control) = ([stdin.as_fd()], SendAncillaryBuffer::new(&mut space));
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let status = br#"{"version":1,"command":"status"}"#;
    let parts = [std::io::IoSlice::new(status)];
    if sendmsg(&client, &parts, &mut control, SendFlags::empty()).is_ok() {
        let mut bytes = [0; 1024];
        let mut answer = || recv(&client, &mut bytes[..], RecvFlags::empty());
        // The agent hung up without reading; its answer comes next.
        let (length, _) = answer().or_else(|_| answer()).expect("an answer");
        assert!(bytes[..length].starts_with(b"{\"refused\":"));
    }
    // More than there may be, that say nothing; and some that ask and do not read.
    let silent: Vec<OwnedFd> = (0..30).map(|_| connected(&host)).collect();
    host.asker(0).granted(host.addresses(0)[0]);
    drop(silent);
    let deaf: Vec<OwnedFd> = (0..8).map(|_| connected(&host)).collect();
    for client in &deaf {
        send(client, status, SendFlags::empty()).expect("sent");
    }
    assert_eq!(host.status()["agent"]["requests"]["granted"], 1);
    drop((deaf, client));
    host.has_ports(0);
    eventually("no descriptor stays", || host.descriptors() <= before);
}

#[test]
fn the_socket_is_for_the_agents_user_alone() {
    let mut host = host_or_skip!("commands::the_socket_is_for", 1);
    host.start();
    let meta = fs::metadata(host.control()).expect("a socket");
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    // Also where another may connect.
    for (path, mode) in [(host.dir().join("t"), 0o755), (host.control(), 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    }
    let program = host.dir().join("rocinante-agent");
    // By another process: a program that is open for writing, in a child of this one too, does not
    // run.
    let mut copy = Command::new("cp");
    let copied = copy.arg(host.command().get_program()).arg(&program).status();
    assert!(copied.expect("cp").success());
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
    nobody.args(["status", "--config"]).arg(host.config());
    let output = host.lab.host().output(&mut nobody).expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("does not answer"), "{said}");
    assert_eq!(host.status()["agent"]["containers"], 0);
}
