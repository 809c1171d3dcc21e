//! Namespaces, limits and interfaces that are not the usual ones.

use std::process::{Command, Stdio};

use super::{Done, Running, rocinante, start_command, words};
use rocinante::device::Backend;
use rocinante_lab::{Container, Lab, LabConfig, Netns};
use rocinante_netdev::Interface;
use rocinante_tests::harness::wait_until;
use rocinante_tests::{need, on_backends, on_each_backend, require, skip};

/// The command line of `rocinante`, run by other commands: `unshare --pid`.
fn under(wrapper: &str, line: &str) -> Command {
    let mut all = words(wrapper);
    all.push(env!("CARGO_BIN_EXE_rocinante-under-test").to_owned());
    all.extend(words(line));
    let mut command = rocinante(words(line));
    if !wrapper.is_empty() {
        command = Command::new(&all[0]);
        command.args(&all[1..]).env_remove("ROCINANTE_NETDEV");
    }
    command
}

/// A server and a client, each in its container under its wrapper; the client verifies what comes.
struct Talk {
    server: Running,
    client: Running,
}

impl Talk {
    fn start(
        [there, here]: [&Container; 2],
        [server, client]: [&str; 2],
        port: u16,
        netdev: &str,
    ) -> Self {
        let line = format!("pingpong -e -p {port} --netdev {netdev} -n 300 -s 3000");
        let at = |container: &Container| format!("{line} --bind {}", container.ipv4());
        let server = start_command(there, &mut under(server, &at(there))).that_waits();
        let client = under(client, &format!("{} -c {}", at(here), there.ipv4()));
        Self { server, client: start_command(here, &mut { client }) }
    }

    fn succeeds(self) -> [Done; 2] {
        let client = self.client.finish().succeeded();
        [self.server.finish().succeeded(), client]
    }
}

/// Processes of one address that share nothing else but the user: not the numbers of processes, nor
/// files and their mounts, nor IPC.
fn containers_of_a_pod(netdev: &str) {
    require!(need::machine_root());
    require!(need::program("unshare"));
    const OWN: &str = "unshare --fork --kill-child --pid --mount-proc --ipc --";
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    // Both are process 1 of their namespaces.
    let all = [
        Talk::start([b, b], [OWN, OWN], 18600, netdev),
        Talk::start([b, a], [OWN, ""], 18601, netdev),
        Talk::start([a, b], ["", OWN], 18602, netdev),
        Talk::start([b, b], ["", OWN], 18603, netdev),
    ];
    all.into_iter().for_each(|talk| drop(talk.succeeds()));
}

on_backends! {
    containers_of_a_pod_share_an_address_udp: Udp => containers_of_a_pod("udp");
    containers_of_a_pod_share_an_address_packet: Packet => containers_of_a_pod("packet");
}

/// Clocks of a process are ahead of all others' by more than a day: beside processes whose clocks
/// are not, on the same address and on the other.
fn a_clock_that_is_ahead(netdev: &str) {
    require!(need::machine_root());
    require!(need::program("unshare"));
    if !std::path::Path::new("/proc/self/ns/time").exists() {
        skip!("the kernel has no time namespaces (CONFIG_TIME_NS)");
    }
    const AHEAD: &str =
        "unshare --fork --kill-child --time --monotonic 100000 --boottime 100000 --";
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let clock = |wrapper: &str| {
        let all = words(&format!("{wrapper} cat /proc/uptime"));
        let done = a.output(Command::new(&all[0]).args(&all[1..])).unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        text.split('.').next().unwrap().parse::<u64>().unwrap()
    };
    assert!(clock(AHEAD) >= clock("nice") + 99_000);
    // Slots of an address rest once their process has gone, for as long as another one is there.
    let wait = format!("pingpong -p 18610 --netdev {netdev} --bind {}", b.ipv4());
    let _other = start_command(b, &mut under("", &wait)).that_waits();
    for _ in 0..2 {
        let all = [
            Talk::start([b, b], [AHEAD, ""], 18600, netdev),
            Talk::start([b, b], ["", AHEAD], 18601, netdev),
            Talk::start([b, a], [AHEAD, ""], 18602, netdev),
            Talk::start([b, a], ["", AHEAD], 18603, netdev),
        ];
        all.into_iter().for_each(|talk| drop(talk.succeeds()));
    }
}

on_backends! {
    a_clock_that_is_ahead_is_as_good_udp: Udp => a_clock_that_is_ahead("udp");
    a_clock_that_is_ahead_is_as_good_packet: Packet => a_clock_that_is_ahead("packet");
}

/// A rootless engine's container, whose packets slirp4netns carries.
#[test]
fn behind_a_program_that_translates_addresses_the_cause_is_named() {
    require!(need::machine_root());
    require!(need::program("slirp4netns"));
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let inside = Netns::new().unwrap();
    let mut slirp = Command::new("slirp4netns");
    slirp.args(["--configure", "--mtu=1500", "--netns-type=path", &inside.path(), "tap0"]);
    slirp.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _slirp = a.spawn(&mut slirp).unwrap();
    let has_address = |name| {
        let found = inside.run(|| Interface::by_name(name)).unwrap();
        found.is_ok_and(|it| it.up && !it.addresses.is_empty())
    };
    wait_until("tap0 is there", || has_address("tap0"));
    // Where the server believes the client to be.
    b.netns().ip(&["route", "add", "10.0.2.0/24", "via", &a.ipv4().to_string()]).unwrap();
    let server = start_command(b, &mut under("", "pingpong -p 18620")).that_waits();
    let line = format!("pingpong -p 18620 {}", b.ipv4());
    let mut client = under("", &line);
    client.stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = inside.spawn(&mut client).unwrap();
    let causes = ["no reply on UDP/4791", "tap0 is a tun", "slirp4netns, pasta"];
    Running::of(client).finish().failed(1, &causes);
    server.finish().failed(1, &["something between translates addresses"]);
}

/// Few descriptors, and next to no locked memory. With fewer descriptors than a device takes the
/// error names them.
fn small_limits_are_enough(backend: Backend) {
    require!(need::program("prlimit"));
    const SMALL: &str = "prlimit --nofile=48 --memlock=65536 --";
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    for (port, both) in [(18600, [b, a]), (18601, [b, b])] {
        drop(Talk::start(both, [SMALL, SMALL], port, backend.name()).succeeds());
    }
    let line = format!("pingpong --netdev {backend} --bind {} {}", a.ipv4(), b.ipv4());
    let few = start_command(a, &mut under("prlimit --nofile=16 --", &line)).finish();
    few.failed(1, &["Too many open files", "raise the limit of open files (`ulimit -n`)"]);
}

on_each_backend!(small_limits_are_enough);
