//! Several processes on one address.

use super::{Done, Running, rocinante, start, start_command, words};
use nix::sys::signal::Signal;
use rocinante::cm::Listener;
use rocinante::device::Backend;
use rocinante::{OpenOptions, VerbsError};
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_tests::running::{install, open_to_all};
use rocinante_tests::{need, on_backends, require};
use std::io;
use std::net::IpAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

fn serve(container: &Container, line: &str) -> Running {
    start(container, line).that_waits()
}

/// A server and a client that verifies the received data, each in its container.
struct Talk {
    server: Running,
    client: Running,
}

impl Talk {
    /// The `nth` of several at once. They sleep while they wait: more that spin than there are
    /// processors would have their peers give them up.
    fn start([there, here]: [&Container; 2], nth: usize, netdevs: [&str; 2], rest: &str) -> Self {
        let port = 18600 + nth;
        let [server, client] =
            netdevs.map(|it| format!("pingpong -e -p {port} --netdev {it} {rest}"));
        let server = serve(there, &format!("{server} --bind {}", there.ipv4()));
        let client = format!("{client} -c --bind {} {}", here.ipv4(), there.ipv4());
        Self { server, client: start(here, &client) }
    }

    fn end(self) -> [Done; 2] {
        let client = self.client.finish();
        [self.server.finish(), client]
    }

    fn succeeds(self) {
        self.end().into_iter().for_each(|done| drop(done.succeeded()));
    }
}

/// Four servers on one address, and their clients on another.
fn pairs(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let (both, netdev) = ([lab.container(1), lab.container(0)], backend.name());
    let all = [0, 1, 2, 3].map(|nth| Talk::start(both, nth, [netdev; 2], "-n 400 -s 9000"));
    all.into_iter().for_each(Talk::succeeds);
}

/// A server beside its client.
fn beside(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let (both, netdev) = ([lab.container(0); 2], backend.name());
    for rest in ["-n 300 -s 9000", "-n 300 --cm"] {
        Talk::start(both, 0, [netdev; 2], rest).succeeds();
    }
    let Some(v6) = lab.container(0).ipv6() else { return };
    let line = format!("pingpong --cm --netdev {netdev} --bind {v6}");
    let server = serve(lab.container(0), &line);
    start(lab.container(0), &format!("{line} -n 300 -c {v6}")).finish().succeeded();
    server.finish().succeeded();
}

on_backends! {
    pairs_on_udp: Udp => pairs(Backend::Udp);
    pairs_on_packet: Packet => pairs(Backend::Packet);
    a_server_beside_its_client_on_udp: Udp => beside(Backend::Udp);
    a_server_beside_its_client_on_packet: Packet => beside(Backend::Packet);
}

/// Each process of an address has a backend of its own.
#[test]
fn backends_mix_on_one_address() {
    require!(need::backend(Backend::Packet));
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let mixed = [["packet", "udp"], ["udp", "packet"], ["packet", "packet"], ["udp", "udp"]];
    let mut all = Vec::new();
    for (nth, netdevs) in mixed.into_iter().enumerate() {
        all.push(Talk::start([b, a], 2 * nth, netdevs, "-n 300 -s 3000"));
        // The two sides on one address.
        all.push(Talk::start([a, a], 2 * nth + 1, netdevs, "-n 300 -s 3000"));
    }
    all.into_iter().for_each(Talk::succeeds);
}

/// The memory of the ports on an address does not grow with their number alone, and each announces
/// its budget to its peers.
#[test]
fn a_process_that_joins_has_a_smaller_ring() {
    require!(need::backend(Backend::Packet));
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let b = lab.container(1);
    let has_room_for = |datagrams: u32| {
        let mut devices = rocinante(["devices", "--json"]);
        let done = start_command(b, devices.env("ROCINANTE_NETDEV", "packet")).finish();
        let told = done.succeeded().out;
        assert!(told.contains(&format!("\"rx_budget_datagrams\":{datagrams}")), "{told}");
    };
    let line = |nth| format!("pingpong -p {} --netdev packet --bind {}", 18600 + nth, b.ipv4());
    let mut all = Vec::new();
    for datagrams in [203, 102, 102, 57] {
        has_room_for(datagrams);
        all.push(serve(b, &line(all.len())));
    }
    for (nth, server) in all.into_iter().enumerate() {
        let client = format!("pingpong -e -p {} -n 300 -s 60000 -c {}", 18600 + nth, b.ipv4());
        start(lab.container(0), &format!("{client} --netdev packet")).finish().succeeded();
        server.finish().succeeded();
    }
}

/// An interface has one XDP program: the first process's, which leaves the others' datagrams alone.
/// A process that names `afxdp` beside it gets the next backend, and the reason.
#[test]
fn a_second_process_beside_afxdp_takes_another_backend() {
    require!(need::backend(Backend::Xdp));
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let line = |port: u16, netdev: &str| {
        format!("pingpong -e -p {port} --netdev {netdev} --bind {}", b.ipv4())
    };
    let first = serve(b, &line(18601, "afxdp"));
    let because = format!("not afxdp, because another process on {} has it", b.ipv4());
    // Its clients on the other address have `afxdp`, one after the other.
    let asks_for = |netdev: &str| format!("pingpong -e -p 18602 --netdev {netdev} -n 300 -s 3000");
    let client = format!("{} -c --bind {} {}", asks_for("afxdp"), a.ipv4(), b.ipv4());
    let server = format!("{} --bind {}", asks_for("afxdp"), b.ipv4());
    let second = serve(b, &server);
    start(a, &client).finish().succeeded();
    let said = second.finish().succeeded().err;
    assert!(said.contains(&format!("packet: {because}")), "{said}");
    // Without the right to `packet` it is `udp`, for both reasons.
    let mut command = Command::new("setpriv");
    let program = env!("CARGO_BIN_EXE_rocinante-under-test");
    command.args(["--inh-caps=-all", "--bounding-set=-all", program]).args(words(&server));
    command.env_remove("ROCINANTE_NETDEV").env("ROCINANTE_AGENT", "off");
    let third = start_command(b, &mut command).that_waits();
    start(a, &client).finish().succeeded();
    let said = third.finish().succeeded().err;
    assert!(said.contains(&format!("udp: {because}")), "{said}");
    assert!(said.contains("not packet, because") && said.contains("CAP_NET_RAW"), "{said}");
    // The text for a device that no process opens.
    let mut devices = rocinante(["devices", "-v"]);
    let told = start_command(b, devices.env("ROCINANTE_NETDEV", "afxdp")).finish().succeeded().out;
    assert!(told.contains(&because), "{told}");
    // A program that opens it again, by the same name, has another context of it.
    let twice = || {
        let open = || OpenOptions::new().netdev(Backend::Xdp).open(b.ipv4().into()).unwrap();
        [open(), open()].map(|it| (it.backend(), it.query_device().instead_of))
    };
    assert_eq!(b.run(twice).unwrap(), [(Some(Backend::Packet), Some(Backend::Xdp)); 2]);
    Talk::start([b, a], 2, ["udp"; 2], "-n 300 -s 3000").succeeds();
    Talk::start([b, b], 3, ["udp"; 2], "-n 300 -s 3000").succeeds();
    let client = format!("pingpong -p 18601 --netdev udp -n 300 -c {}", b.ipv4());
    start(a, &client).finish().succeeded();
    let said = first.finish().succeeded().err;
    assert!(said.contains("afxdp: asked for"), "{said}");
    // With it goes the program.
    let next = serve(b, &server);
    start(a, &format!("{} -c {}", asks_for("udp"), b.ipv4())).finish().succeeded();
    let said = next.finish().succeeded().err;
    assert!(said.contains("afxdp: asked for"), "{said}");
}

/// Only a process on the same address makes another backend the choice. Beside any other AF_XDP
/// socket, `afxdp` fails.
#[test]
fn a_foreign_xdp_socket_is_an_error_as_ever() {
    require!(need::backend(Backend::Xdp));
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let b = lab.container(1);
    let [v4, v6] = [b.ipv4().into(), b.ipv6().unwrap().into()];
    let line = |address: IpAddr| format!("pingpong -e --netdev afxdp --bind {address}");
    // It shares the interface, and no address.
    let mut first = serve(b, &line(v4));
    start(b, &line(v6)).finish().failed(1, &["another AF_XDP socket has this queue"]);
    first.child.signal(Signal::SIGTERM);
    let _ = first.finish();
}

/// Of five processes on each address the first dies, which serves all; then another one.
fn deaths(netdev: &str) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    // The two that die would go on for minutes.
    let length = |nth| if nth % 3 == 0 { "-n 5000000 -s 2000" } else { "-n 3000 -s 2000" };
    let mut all: Vec<Talk> =
        (0..5).map(|nth| Talk::start([b, a], nth, [netdev; 2], length(nth))).collect();
    for (nth, killed) in [0, 2].into_iter().enumerate() {
        let mut talk = all.remove(killed);
        talk.server.child.signal(Signal::SIGKILL);
        talk.client.child.signal(Signal::SIGKILL);
        assert_eq!(talk.end().map(|done| done.status), [-1; 2], "they were at work");
        // A request to the connection manager is answered by the process that has followed.
        let begun = Instant::now();
        Talk::start([b, a], 5 + nth, [netdev; 2], "-n 50 --cm").succeeds();
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    all.into_iter().for_each(Talk::succeeds);
}

on_backends! {
    the_others_go_on_when_one_dies_on_udp: Udp => deaths("udp");
    the_others_go_on_when_one_dies_on_packet: Packet => deaths("packet");
}

/// The connection manager of each process is reached by the process that has QP1. It is stopped:
/// the others' queue pairs go on, and those that need no connection manager begin.
#[test]
fn a_process_that_is_stopped_holds_up_no_queue_pair() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let mut first = serve(b, &format!("pingpong -p 18590 --netdev udp --bind {}", b.ipv4()));
    let goes_on = Talk::start([b, a], 0, ["udp"; 2], "-n 3000 -s 2000");
    first.child.signal(Signal::SIGSTOP);
    Talk::start([b, a], 1, ["udp"; 2], "-n 300").succeeds();
    goes_on.succeeds();
    first.child.signal(Signal::SIGCONT);
    start(a, &format!("pingpong -p 18590 --netdev udp -n 50 -c {}", b.ipv4())).finish().succeeded();
    first.finish().succeeded();
}

/// The file that processes share is written within `ulimit -f`, beyond which the kernel would end a
/// program.
#[test]
fn the_limit_of_file_sizes_is_obeyed() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let limited = |container, blocks: u32, line: &str| {
        let program = env!("CARGO_BIN_EXE_rocinante-under-test");
        let mut sh = Command::new("sh");
        sh.args(["-c", &format!("ulimit -f {blocks}; exec {program} {line}")]);
        start_command(container, sh.env_remove("ROCINANTE_NETDEV"))
    };
    let line = format!("pingpong --cm --netdev udp --bind {}", b.ipv4());
    // Of 512 bytes each.
    limited(b, 1, &line).finish().failed(1, &["cannot share", "`ulimit -f`"]);
    let server = limited(b, 100, &line).that_waits();
    let client = format!("pingpong --cm --netdev udp -n 50 -c {}", b.ipv4());
    start(a, &client).finish().succeeded();
    server.finish().succeeded();
    // The second one has a note beyond its own limit, in a file that is as long as ever.
    let mut first = serve(b, &format!("pingpong -p 18590 --netdev udp --bind {}", b.ipv4()));
    let second = limited(b, 8, &line).that_waits();
    start(a, &client).finish().succeeded();
    second.finish().succeeded();
    first.child.signal(Signal::SIGTERM);
    let _ = first.finish();
}

/// Requests come to the process that listens, whichever has QP1; and one listens at a time.
#[test]
fn each_listens_for_itself() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b] = [lab.container(0), lab.container(1)];
    let line = |port: u16| format!("pingpong --cm -p {port} --netdev udp --bind {}", b.ipv4());
    let servers = [18601, 18602, 18603].map(|port| serve(b, &line(port)));
    start(b, &line(18602)).finish().failed(1, &["somebody listens there already"]);
    for port in [18603, 18601, 18602] {
        let client = format!("pingpong --cm -p {port} --netdev udp -n 50 -c {}", b.ipv4());
        start(a, &client).finish().succeeded();
    }
    servers.into_iter().for_each(|server| drop(server.finish().succeeded()));
    // No server listens any more.
    start(a, &format!("pingpong --cm --patience 1 -p 18602 {}", b.ipv4())).finish().failed(1, &[]);
}

/// A refusal keeps nothing of the place that another process has.
#[test]
fn a_refused_listener_may_listen_once_the_other_process_has_ended() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let b = lab.container(0);
    let mut other = serve(b, &format!("pingpong --cm -p 18601 --netdev udp --bind {}", b.ipv4()));
    b.run(|| {
        let ctx = OpenOptions::new().netdev(Backend::Udp).open(b.ipv4().into()).unwrap();
        let listen = || Listener::bind(&ctx, (b.ipv4(), 18601).into(), 4);
        let refused = |listens: Result<Listener, VerbsError>| {
            let kind = io::Error::from_raw_os_error(listens.unwrap_err().errno()).kind();
            assert_eq!(kind, io::ErrorKind::AddrInUse);
        };
        refused(listen());
        refused(listen());
        other.child.signal(Signal::SIGKILL);
        let end = Instant::now() + Duration::from_secs(60);
        let listener = loop {
            match listen() {
                Ok(listener) => break listener,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            thread::sleep(Duration::from_millis(10));
        };
        // Its place is its own, and free after it.
        refused(listen());
        drop(listener);
        drop(listen().unwrap());
    })
    .unwrap();
    let _ = other.finish();
}

#[test]
fn processes_of_another_user_are_told_who_has_the_address() {
    require!(need::machine_root());
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let container = lab.container(0);
    let line = |port: u16| format!("pingpong -p {port} --netdev udp --bind {}", container.ipv4());
    // A copy where every user can run it.
    let folder = open_to_all();
    let program = folder.path().join("rocinante");
    install(Path::new(env!("CARGO_BIN_EXE_rocinante-under-test")), &program, 0o755);
    let other = |line: &str| {
        let mut command = Command::new(&program);
        command.args(words(line)).current_dir("/").uid(NOBODY).gid(NOBODY);
        start_command(container, &mut command)
    };
    let theirs = other(&line(18601)).that_waits();
    let pid = format!("pid {}", theirs.child.id());
    let ours = start(container, &line(18602)).finish();
    ours.failed(1, &["user 65534", &pid, "only processes of one user share one"]);
    // Those of the same user share it.
    other(&format!("{} -n 50 -c {}", line(18601), container.ipv4())).finish().succeeded();
    theirs.finish().succeeded();
    // And the other way round.
    let ours = serve(container, &line(18601));
    let refused = other(&line(18602)).finish();
    let pid = format!("pid {}", ours.child.id());
    refused.failed(1, &["user 0", &pid, "only processes of one user share one"]);
    let mut ours = ours;
    ours.child.signal(Signal::SIGTERM);
    let _ = ours.finish();
}
