//! `rocinante stat`: from an agent, and from the pages of the same user's processes.

use super::handed::{self, Agent};
use super::{Running, command, rocinante, schema, start_command, start_on_host, words};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_tests::running::retried;
use rocinante_tests::{need, require};
use serde_json::Value;

/// Starts a command line in a container, without rights and without an agent.
fn unprivileged(container: &Container, uid: u32, line: &str) -> Running {
    let program = rocinante(words(line));
    let user = [format!("--reuid={uid}"), format!("--regid={uid}")];
    let mut command = command("setpriv", user.iter().map(String::as_str));
    command.args(["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
    command.arg(program.get_program()).args(program.get_args());
    command.env("ROCINANTE_AGENT", "off");
    start_command(container, &mut command)
}

/// The one container of the last interval.
fn the_one(stat: Running) -> Value {
    let object = stat.finish().succeeded().json();
    schema::check(&object);
    let containers = object["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1, "{object}");
    containers[0].clone()
}

/// The one container that `query` returns, once it is as `enough` wants: while others have the
/// processors, an interval may have no message.
fn until_enough(query: impl Fn() -> Running, enough: impl Fn(&Value) -> bool) -> Value {
    retried(|| {
        let one = the_one(query());
        if enough(&one) { Ok(one) } else { Err(one) }
    })
}

/// A client that writes, beside a server in another container.
fn traffic(start: impl Fn(&Container, &str) -> Running, lab: &Lab) -> [Running; 2] {
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = "perf write-bw --netdev udp -D 600 -s 1K --json";
    let waiting = start(server, line).that_waits();
    let writes = start(client, &format!("{line} {}", server.ipv4())).that_says(" write-bw ");
    [writes, waiting]
}

/// Both sides are seen by their users alone, and the figures are those of the sides.
#[test]
fn a_user_sees_its_own_processes_without_a_right() {
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let sides = traffic(|container, line| unprivileged(container, 65_534, line), &lab);
    let stat = |container, uid, more: &str| {
        unprivileged(container, uid, &format!("stat -i 0.3 -c 2 --json {more}"))
    };
    let takes = sides[1].child.id();
    let above = |value: &Value| value.as_f64() > Some(0.0);
    let writes = until_enough(
        || stat(client, 65_534, &netns_of(&sides[0])),
        |it| above(&it["tx_gbps"]) && above(&it["tx_mops"]),
    );
    assert_eq!((&writes["netdevs"][0], &writes["rx_mops"]), (&"udp".into(), &0.0.into()));
    // By a process of it, and with its queue pair.
    let takes = until_enough(
        || stat(server, 65_534, &format!("{takes} --qps")),
        |it| {
            let qp = &it["queue_pairs"][0];
            above(&it["rx_mops"]) && above(&qp["rx_gbps"]) && above(&qp["rx_mops"])
        },
    );
    assert_eq!(takes["tx_mops"], 0.0, "{takes}");
    let qp = &takes["queue_pairs"][0];
    assert_eq!((&qp["service"], &qp["state"]), (&"RC".into(), &"RTS".into()));
    assert_eq!(qp["peer"], client.ipv4().to_string());
    // Another user sees nothing, and is no error. Its line of text is the head.
    let other = unprivileged(client, 65_533, "stat -i 0.1 -c 1").finish().succeeded();
    assert!(other.out.starts_with("container") && other.out.lines().count() == 1, "{}", other.out);
    assert!(other.err.contains("no process of this user"), "{}", other.err);
    // A signal ends it, and an unknown name.
    let mut endless = unprivileged(client, 65_534, "stat -i 0.1 --qps");
    endless.handles(Signal::SIGINT);
    kill(Pid::from_raw(endless.child.id().cast_signed()), Signal::SIGINT).unwrap();
    endless.says("stopped by SIGINT");
    assert_eq!(endless.finish().status, 130);
    let unknown = unprivileged(client, 65_534, "stat -c 1 --json no-such-container").finish();
    schema::check(&unknown.failed(1, &["no container is called no-such-container"]).json());
}

/// The network namespace of a process, as the kernel writes it.
fn netns_of(of: &Running) -> String {
    let link = std::fs::read_link(format!("/proc/{}/ns/net", of.child.id())).unwrap();
    link.to_str().unwrap().to_owned()
}

#[test]
fn root_sees_all_containers_by_their_agent() {
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let agent = Agent::start(lab.host());
    let _sides = traffic(|container, line| handed::start(container, &agent, line), &lab);
    let stat = |more: &str| {
        let place = agent.state().join("stat.sock");
        let line = format!("stat -i 0.3 -c 1 --json --agent {} {more}", place.display());
        start_on_host(&lab, &line)
    };
    let all = stat("").finish().succeeded().json();
    schema::check(&all);
    let names: Vec<&str> =
        all["containers"].as_array().unwrap().iter().filter_map(|it| it["name"].as_str()).collect();
    let [writes, takes] = [0, 1].map(|index| lab.container(index).host_end());
    assert!(names.contains(&writes) && names.contains(&takes), "{names:?}");
    let one = until_enough(
        || stat(&format!("{takes} --qps")),
        |it| it["rx_gbps"].as_f64() > Some(0.0) && it["queue_pairs"][0].is_object(),
    );
    assert_eq!((one["name"].as_str(), &one["netdevs"][0]), (Some(takes), &"udp".into()));
    assert_eq!(one["queue_pairs"][0]["peer"], lab.container(0).ipv4().to_string());
    stat("no-such").finish().failed(1, &["no container is called no-such", "stat` lists"]);
    // Its directory is root's.
    let mode = std::os::unix::fs::PermissionsExt::mode;
    let socket = std::fs::metadata(agent.state().join("stat.sock")).unwrap().permissions();
    assert_eq!(mode(&socket) & 0o777, 0o600);
    drop(agent);
    let gone = start_on_host(&lab, "stat -c 1 --agent /nowhere/a.sock");
    gone.finish().failed(1, &["no agent answers at /nowhere/a.sock"]);
}
