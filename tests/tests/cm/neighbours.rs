//! Processes on one address are killed (`kill -9`) while their connections are idle. The peers
//! learn of it at once, because a neighbour ends the connections; the neighbours' own go on.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use nix::sys::signal::Signal;
use rocinante::WcStatus;
use rocinante::cm::{Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::{Key, SendOp};
use rocinante_lab::{ChildGuard, Lab, LabConfig};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until, wr};
use rocinante_tests::idle::Client;
use rocinante_tests::with_idle_clients;

const PORT: u16 = 7471;

with_idle_clients! { peers_are_told:
    idle_peers_are_told_of_a_death_udp: Udp;
    idle_peers_are_told_of_a_death_packet: Packet;
}

/// The survivor, and those that connect to it.
struct Scene<'a> {
    lab: &'a Lab,
    side: &'a Side,
    listener: Listener,
    test: &'a str,
    children: BTreeMap<&'static str, ChildGuard>,
    connections: Vec<(&'static str, Connection)>,
}

impl Scene<'_> {
    /// Starts a process in the first container, and accepts its connections.
    fn start(&mut self, name: &'static str, count: usize) {
        let client = Client { own: address(self.lab, 0, Family::V4), connections: count };
        let mut command = myself(self.test);
        let command = client.prepare(&mut command, &self.listener);
        let mut child = self.lab.container(0).spawn(command).unwrap();
        // No questions to silent peers: they know it by a neighbour alone.
        let params = Params::default().keep_alive(None);
        let accepted = client.accept(&mut child, (self.side, &self.listener), &params);
        self.connections.extend(accepted.into_iter().map(|connection| (name, connection)));
        self.children.insert(name, child);
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Connection> {
        self.connections.iter().filter(move |(of, _)| *of == name).map(|(_, connection)| connection)
    }

    /// Kills these, and waits until the survivor knows.
    fn kill(&mut self, names: &[&'static str]) {
        for name in names {
            self.children.get_mut(name).unwrap().signal(Signal::SIGKILL);
        }
        let killed = Instant::now();
        for name in names {
            for connection in self.of(name) {
                connection
                    .wait_disconnected(PATIENCE)
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
            // The first one is the leader, unless the survivor is.
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
            assert_eq!(scene.connections.iter().filter(|(_, it)| it.is_disconnected()).count(), 8);
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
