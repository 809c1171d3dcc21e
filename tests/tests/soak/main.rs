//! A soak over real namespaces. One device has 32 reliable connections to two peers. Each peer is
//! killed every few seconds and comes back, while the host drops one packet of a thousand, and
//! addresses, routes, neighbours and links change. Each byte of each operation is compared. Each
//! connection to a dead peer ends by an error in the time that it promises. In the end nothing more
//! is held than before.
//!
//! `load` has connections with default options, and beside them the number of busy loops in
//! `ROCINANTE_SOAK_HOGS`; nothing else goes wrong there.
//!
//! It takes a few seconds for each backend; `cargo xtask soak [--hogs N] [SECONDS [BACKEND]]` runs
//! longer. The last line has the figures.

mod lane;
mod load;
mod party;
mod process;
mod survivor;
mod trouble;

use std::io::BufRead;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::verbs::SendOp;
use rocinante::{Access, ConnectOptions, Context, OpenOptions, Qp};
use rocinante_lab::exit_with_parent;
use rocinante_tests::alone::alone;
use rocinante_tests::harness::{Harness, Setup, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::running::retried;
use rocinante_tests::{need, on_each_backend, require, test_name};

use self::party::{PATIENCE, Party};
use self::process::Role;
use self::trouble::When;

macro_rules! soak {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if let Some(role) = Role::of_this_process() {
                return role.live(Backend::$backend);
            }
            require!(need::backend(Backend::$backend));
            require!(need::nft());
            require!(need::ethtool());
            let (name, time) = (test_name!(), time(10));
            alone(name, 2 * time + 5 * PATIENCE, || survivor::soak(Backend::$backend, name, time));
        }
    )*};
}

soak! {
    udp: Udp;
    packet: Packet;
    afxdp: Xdp;
}

macro_rules! under_load {
    ($( $name:ident: $backend:ident; )*) => {$(
        #[test]
        fn $name() {
            if let Some(role) = Role::of_this_process() {
                return role.live(Backend::$backend);
            }
            if load::has_a_part(Backend::$backend) {
                return;
            }
            require!(need::backend(Backend::$backend));
            let (name, time) = (test_name!(), time(3));
            let soak = || load::soak(Backend::$backend, name, time, hogs());
            alone(name, 2 * time + 5 * PATIENCE, soak);
        }
    )*};
}

under_load! {
    under_load_udp: Udp;
    under_load_packet: Packet;
    under_load_afxdp: Xdp;
}

on_each_backend!(after_each_change_of_the_network_it_goes_on);

/// With no other trouble: packets in flight during a change, and packets after it, arrive.
fn after_each_change_of_the_network_it_goes_on(backend: Backend) {
    let times = std::env::var("ROCINANTE_SOAK_TIMES").map_or(2, |times| times.parse().unwrap());
    let mut setup =
        Setup::new(backend).may_break(Oracle::Retransmissions, "the network is disturbed");
    setup.connect = ConnectOptions::default().timeout(18);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let mut pair = harness.pair();
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let source = a.pd.allocate(4096, Access::NONE).unwrap();
    let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let mut number = 0;
    let mut post = |pair: &[Qp; 2]| {
        number += 1;
        pair[0].post_send(&[wr(number, op, &[source.sge(0, 4096)])]).unwrap();
        number
    };
    for at in [0, 1] {
        let mut under_way = 0;
        trouble::each(harness.lab(), [at, 1 - at], times, |name, when| {
            let When::Back(after) = when else {
                under_way = post(&pair);
                return true;
            };
            if after > LONGEST {
                println!("{backend}: {name} at {at}: again, because it lasted {after:?}");
                let _ = a.next();
                pair = harness.pair();
                return false;
            }
            let start = Instant::now();
            let next = post(&pair);
            println!("{backend}: {name} at {at}, for {after:?}");
            a.succeed(under_way);
            a.succeed(next);
            println!("{backend}: {name} at {at}: goes on after {:?}", start.elapsed());
            true
        });
    }
}

/// The longest change that is judged: half of the time after which the connection may give up.
const LONGEST: Duration = Duration::from_secs(4);

/// Seconds for each backend.
const TIME: &str = "ROCINANTE_SOAK_SECONDS";

fn time(usual: u64) -> Duration {
    let said = std::env::var(TIME).ok();
    let seconds = said.map_or(usual, |said| said.parse().expect("whole seconds"));
    Duration::from_secs(seconds)
}

/// Busy loops beside the connections with default options.
const HOGS: &str = "ROCINANTE_SOAK_HOGS";

fn hogs() -> u32 {
    std::env::var(HOGS).map_or(0, |said| said.parse().expect("a number of busy loops"))
}

impl Role {
    fn live(&self, backend: Backend) {
        exit_with_parent();
        let ctx = self.open(backend);
        let orders = orders();
        let (mut party, attempts) = Party::ask(&ctx, self);
        let attempts: Vec<_> = attempts.iter().map(u64::to_string).collect();
        say(&format!("ready {}", attempts.join(" ")));
        party.work(|| orders.try_recv().is_ok());
        say("over");
        // Until the survivor has received our last acknowledgement.
        let bye = orders.recv_timeout(PATIENCE);
        assert_eq!(bye.as_deref(), Ok("bye"));
    }

    /// Opens the device; its address may be away at this moment.
    fn open(&self, backend: Backend) -> Context {
        retried(|| OpenOptions::new().netdev(backend).open(self.own.ip()))
    }
}

/// The lines of standard input.
fn orders() -> Receiver<String> {
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    orders
}

/// Starts on a new line: the test harness leaves its own lines unfinished.
fn say(what: &str) {
    println!("\n{what}");
}
