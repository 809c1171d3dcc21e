//! Processes are killed (`kill -9`) while their connections are idle, and no other process is left
//! on their address that could end the connections. The peer asks, and knows.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rocinante::OpenOptions;
use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante_node::{ChildGuard, Lab, LabConfig, exit_with_parent};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until};
use rocinante_tests::require_backend;

/// Makes a process of this program a client: its own address, the server's, and its number of
/// connections.
const ROLE: &str = "ROCINANTE_CM_GONE";
const PORT: u16 = 7471;
/// The shortest silence that a connection may have.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
const CLIENTS: usize = 4;
const EACH: usize = 2;

macro_rules! gone {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if let Ok(role) = std::env::var(ROLE) {
                return connect_and_wait(Backend::$backend, &role);
            }
            require_backend!(Backend::$backend);
            the_dead_are_noticed(Backend::$backend, stringify!($name));
        }
    )*};
}

gone! {
    idle_peers_that_were_killed_are_noticed_udp: Udp;
    idle_peers_that_were_killed_are_noticed_packet: Packet;
    idle_peers_that_were_killed_are_noticed_afxdp: Xdp;
}

fn connect_and_wait(backend: Backend, role: &str) {
    exit_with_parent();
    let [own, server, count] = role.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    let own = own.parse().unwrap();
    let ctx = OpenOptions::new().netdev(backend).open(own).unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).unwrap());
    let side = Side::of(ctx, pd, cq, own);
    let peer: SocketAddr = server.parse().unwrap();
    let connect = |_| {
        let qp = side.qp().build().unwrap();
        let params = Params::default().keep_alive(None);
        Connecting::start(qp, peer, &params).unwrap().wait(PATIENCE).unwrap()
    };
    let _connections: Vec<Connection> = (0..count.parse().unwrap()).map(connect).collect();
    println!("\nconnected");
    loop {
        std::thread::park();
    }
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
        let mut command = myself(self.test);
        command.env(ROLE, format!("{own} {} {EACH}", self.listener.address()));
        let mut child =
            self.lab.container(container).spawn(command.stdout(Stdio::piped())).unwrap();
        let params = Params::default().keep_alive(keep_alive);
        let accept = |_| {
            let request = self.listener.request(Some(PATIENCE)).unwrap();
            let qp = self.side.qp().build().unwrap();
            request.accept(qp, &params).unwrap().wait(PATIENCE).unwrap()
        };
        let connections = (0..EACH).map(accept).collect();
        let mut lines = BufReader::new(child.child_mut().stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "connected"));
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
