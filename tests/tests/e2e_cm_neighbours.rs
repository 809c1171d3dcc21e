//! Processes on one address are killed (`kill -9`) while their connections are idle. The peers
//! learn of it at once, because a neighbour ends the connections; the neighbours' own go on.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::{Key, SendOp};
use rocinante::{OpenOptions, WcStatus};
use rocinante_node::{ChildGuard, Lab, LabConfig, exit_with_parent};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until, wr};
use rocinante_tests::require_backend;

/// Makes a process of this program one that connects and does nothing more: its own address, the
/// survivor's, its name, and its number of connections.
const ROLE: &str = "ROCINANTE_CM_NEIGHBOURS";
const PORT: u16 = 7471;
/// The longest time until the peers know, on a busy machine. Before 7.75 s they ask no silent peer.
const KNOWN: Duration = Duration::from_secs(5);

macro_rules! neighbours {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if let Ok(role) = std::env::var(ROLE) {
                return connect_and_wait(Backend::$backend, &role);
            }
            require_backend!(Backend::$backend);
            peers_are_told(Backend::$backend, stringify!($name));
        }
    )*};
}

neighbours! {
    idle_peers_are_told_of_a_death_udp: Udp;
    idle_peers_are_told_of_a_death_packet: Packet;
}

fn connect_and_wait(backend: Backend, role: &str) {
    exit_with_parent();
    let [own, survivor, name, count] = role.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    let own = own.parse().unwrap();
    let ctx = OpenOptions::new().netdev(backend).open(own).unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).unwrap());
    let side = Side::of(ctx, pd, cq, own);
    let params = Params::default().private_data(name.as_bytes());
    let peer: SocketAddr = survivor.parse().unwrap();
    let connect = |_| {
        let qp = side.qp().build().unwrap();
        Connecting::start(qp, peer, &params).unwrap().wait(PATIENCE).unwrap()
    };
    let _connections: Vec<Connection> = (0..count.parse().unwrap()).map(connect).collect();
    println!("\nconnected");
    loop {
        std::thread::park();
    }
}

/// The survivor, and those that connect to it.
struct Scene<'a> {
    lab: &'a Lab,
    side: &'a Side,
    listener: Listener,
    test: &'a str,
    children: BTreeMap<&'static str, ChildGuard>,
    connections: Vec<(String, Connection)>,
}

impl Scene<'_> {
    /// Starts a process in the first container, and accepts its connections.
    fn start(&mut self, name: &'static str, count: usize) {
        let own = address(self.lab, 0, Family::V4);
        let mut command = myself(self.test);
        command.env(ROLE, format!("{own} {} {name} {count}", self.listener.address()));
        let mut child = self.lab.container(0).spawn(command.stdout(Stdio::piped())).unwrap();
        for _ in 0..count {
            let request = self.listener.request(Some(PATIENCE)).unwrap();
            let qp = self.side.qp().build().unwrap();
            let connecting = request.accept(qp, &Params::default()).unwrap();
            self.connections.push((name.to_owned(), connecting.wait(PATIENCE).unwrap()));
        }
        let mut lines = BufReader::new(child.child_mut().stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "connected"));
        self.children.insert(name, child);
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Connection> {
        self.connections.iter().filter(move |(of, _)| of == name).map(|(_, connection)| connection)
    }

    /// Kills these, and waits until the survivor knows.
    fn kill(&mut self, names: &[&'static str]) {
        for name in names {
            self.children.get_mut(name).unwrap().signal(Signal::SIGKILL);
        }
        let killed = Instant::now();
        for name in names {
            for connection in self.of(name) {
                let left = KNOWN.saturating_sub(killed.elapsed());
                connection
                    .wait_disconnected(left)
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            self.children.remove(name).unwrap().kill();
        }
        println!("{names:?}: known after {:?}", killed.elapsed());
    }

    /// The connections of these processes carry messages, which are acknowledged.
    fn go_on(&self, names: &[&'static str]) {
        for connection in names.iter().flat_map(|name| self.of(name)) {
            assert!(!connection.is_disconnected());
            let op = SendOp::Write { remote: 0, rkey: Key(0), imm: None };
            connection.qp().post_send(&[wr(1, op, &[])]).unwrap();
            self.side.complete(1, WcStatus::Success);
        }
    }
}

fn peers_are_told(backend: Backend, test: &str) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    // The survivor is elsewhere, then on the same address.
    for container in [1, 0] {
        let own = address(&lab, container, Family::V4);
        let side = Side::open(lab.container(container).netns(), own, &Setup::new(backend));
        side.run(|| {
            let listener = Listener::bind(&side.ctx, SocketAddr::new(own, PORT), 16).unwrap();
            let (children, connections) = (BTreeMap::new(), Vec::new());
            let mut scene = Scene { lab: &lab, side: &side, listener, test, children, connections };
            // The first one has the duty, unless the survivor has.
            for (name, count) in [("a", 2), ("b", 3), ("c", 1), ("d", 2), ("e", 1)] {
                scene.start(name, count);
            }
            scene.kill(&["b"]);
            scene.go_on(&["a", "c", "d", "e"]);
            scene.kill(&["a"]);
            scene.go_on(&["c", "d", "e"]);
            // The next ones may follow, and die in the same moment.
            scene.kill(&["c", "d"]);
            scene.go_on(&["e"]);
            let told = scene.connections.iter().filter(|(_, it)| it.is_disconnected()).count();
            assert_eq!(told, 8);
            // The peers' answers came to the process that asked them: it asks no more.
            if container == 0 {
                let left = || side.ctx.resources().unwrap().connections;
                wait_until("it has ended them", || left() == 1);
                let counters = side.ctx.cm_counters().unwrap();
                assert_eq!((counters.ended_for_others, counters.timeouts), (8, 0), "{counters:?}");
            }
            // A later one gets the address as ever.
            scene.start("f", 1);
            scene.go_on(&["e", "f"]);
        });
    }
}
