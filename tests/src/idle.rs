//! Processes that connect and do nothing more, for tests that kill them.
//!
//! Such a process runs the test again, which calls [`be_client`] first.

use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use rocinante::OpenOptions;
use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante_lab::{ChildGuard, exit_with_parent};

use crate::harness::{Backend, PATIENCE, Side, wait_until};

/// Set in such a process: its own address, the server's, and how many connections it makes.
const CLIENT: &str = "ROCINANTE_IDLE_CLIENT";

/// In a process whose command [`Client::prepare`] made: connects, and sleeps until it is killed.
/// Returns at once in any other. Panics if it cannot connect.
pub fn be_client(backend: Backend) {
    let Ok(words) = std::env::var(CLIENT) else { return };
    exit_with_parent();
    let [own, server, count] = words.split(' ').collect::<Vec<_>>()[..] else { panic!("{words}") };
    let own: IpAddr = own.parse().unwrap();
    // On a busy machine an agent may not answer in time.
    let mut opened = None;
    wait_until("the device opens", || {
        opened = OpenOptions::new().netdev(backend).open(own).ok();
        opened.is_some()
    });
    let ctx = opened.unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).unwrap());
    let side = Side::of(ctx, pd, cq, own);
    let peer: SocketAddr = server.parse().unwrap();
    let params = Params::default().keep_alive(None);
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

/// Tests of a function of the backend and the test's name, in which processes of [`be_client`] take
/// part.
#[macro_export]
macro_rules! with_idle_clients {
    ($work:ident: $( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            let backend = $crate::harness::Backend::$backend;
            $crate::idle::be_client(backend);
            $crate::require!($crate::need::backend(backend));
            $work(backend, $crate::test_name!());
        }
    )*};
}

/// A client to be.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// Its address.
    pub own: IpAddr,
    /// How many connections it makes.
    pub connections: usize,
}

impl Client {
    /// Prepares the command that runs the test again. Wait for it by [`accept`](Self::accept).
    pub fn prepare<'a>(&self, command: &'a mut Command, server: &Listener) -> &'a mut Command {
        let Self { own, connections } = self;
        let words = format!("{own} {} {connections}", server.address());
        command.env(CLIENT, words).stdout(Stdio::piped())
    }

    /// Accepts the connections, and returns once the client has them. Panics if it does not
    /// connect.
    pub fn accept(
        &self,
        child: &mut ChildGuard,
        (side, server): (&Side, &Listener),
        params: &Params,
    ) -> Vec<Connection> {
        let accept = |_| {
            let request = server.request(Some(PATIENCE)).unwrap();
            let qp = side.qp().build().unwrap();
            request.accept(qp, params).unwrap().wait(PATIENCE).unwrap()
        };
        let connections = (0..self.connections).map(accept).collect();
        let mut lines = BufReader::new(child.child_mut().stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "connected"));
        connections
    }
}
