//! Processes are killed (`kill -9`) while their connections are idle, and no other process is left
//! on their address that could end the connections. The peer asks, and knows.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante::cm::{Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante_lab::{ChildGuard, Lab, LabConfig};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until};
use rocinante_tests::idle::Client;
use rocinante_tests::with_idle_clients;

const PORT: u16 = 7471;
/// The shortest silence that a connection may have.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
const CLIENTS: usize = 4;
const EACH: usize = 2;

with_idle_clients! { the_dead_are_noticed:
    idle_peers_that_were_killed_are_noticed_udp: Udp;
    idle_peers_that_were_killed_are_noticed_packet: Packet;
    idle_peers_that_were_killed_are_noticed_afxdp: Xdp;
}

/// The server, and the clients that it has.
struct Scene<'a> {
    lab: &'a Lab,
    side: &'a Side,
    listener: Listener,
    test: &'a str,
}

impl Scene<'_> {
    /// Starts a client in a container, and accepts its connections.
    fn start(
        &self,
        container: usize,
        keep_alive: Option<Duration>,
    ) -> (ChildGuard, Vec<Connection>) {
        let own = address(self.lab, container, Family::V4);
        let client = Client { own, connections: EACH };
        let mut command = myself(self.test);
        let command = client.prepare(&mut command, &self.listener);
        let mut child = self.lab.container(container).spawn(command).unwrap();
        let params = Params::default().keep_alive(keep_alive);
        let connections = client.accept(&mut child, (self.side, &self.listener), &params);
        (child, connections)
    }

    fn counters(&self) -> rocinante::stats::CmCounters {
        self.side.ctx.cm_counters().unwrap()
    }
}

fn the_dead_are_noticed(backend: Backend, test: &str) {
    let lab = Lab::new(&LabConfig { containers: 3, ..LabConfig::default() }).unwrap();
    let own = address(&lab, 0, Family::V4);
    // On `udp` half of the queue pairs are on another shard than the connection manager.
    let shards = if backend == Backend::Udp { 2 } else { 1 };
    let setup = Setup { shards: Some(shards), ..Setup::new(backend) };
    let side = Side::open(lab.container(0).netns(), own, &setup);
    side.run(|| {
        let listener = Listener::bind(&side.ctx, SocketAddr::new(own, PORT), 16).unwrap();
        let scene = Scene { lab: &lab, side: &side, listener, test };
        // One whose connections are not asked about, one that lives, and those that die at once.
        let (mut unasked, off) = scene.start(1, None);
        let (_living, kept) = scene.start(2, Some(KEEP_ALIVE));
        let (mut dead, lost): (Vec<_>, Vec<_>) =
            (0..CLIENTS).map(|_| scene.start(1, Some(KEEP_ALIVE))).unzip();
        wait_until("the idle are asked", || scene.counters().asked_alive > 0);
        assert!(!lost.iter().flatten().any(Connection::is_disconnected));
        let killed = Instant::now();
        dead.iter_mut().chain([&mut unasked]).for_each(|child| child.signal(Signal::SIGKILL));
        for connection in lost.iter().flatten() {
            connection.wait_disconnected(PATIENCE).unwrap();
        }
        println!(
            "{backend:?}: {} connections known after {:?}",
            lost.len() * EACH,
            killed.elapsed()
        );
        dead.iter_mut().for_each(ChildGuard::kill);
        unasked.kill();
        drop(lost);
        let rest = off.len() + kept.len();
        wait_until("only the others are left", || {
            let held = side.ctx.resources().unwrap();
            (held.qps, held.connections) == (rest, rest)
        });
        let is_over =
            |connections: &[Connection]| connections.iter().any(Connection::is_disconnected);
        assert!(!is_over(&kept), "it answers");
        assert!(!is_over(&off), "nothing asks about them");
        drop(off);
        // A process that follows at the address of the dead says so at once: nothing is silent.
        let (mut first, lost) = scene.start(1, Some(KEEP_ALIVE));
        let before = scene.counters();
        first.signal(Signal::SIGKILL);
        first.kill();
        let (_second, later) = scene.start(1, Some(KEEP_ALIVE));
        for connection in &lost {
            connection.wait_disconnected(PATIENCE).unwrap();
        }
        let after = scene.counters();
        assert!(after.denied + after.stale > before.denied + before.stale, "{before:?} {after:?}");
        assert!(!is_over(&later) && !is_over(&kept));
    });
}
