//! Random programs over a random wire: every connection ends exactly once on each side, in bounded
//! time, and nothing is left.

use std::collections::BTreeMap;

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::types::Time;
use rocinante_stack::wire::cm::RejReason;

use crate::net::{A, B, Faults, MS, Net};

/// A connection, as far as one side knows it.
#[derive(Debug, Default)]
struct Known {
    established: bool,
    ended: bool,
    released: bool,
}

struct Run {
    net: Net,
    known: [BTreeMap<ConnId, Known>; 2],
    qpn: u32,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut net = Net::with(crate::net::config, seed);
        net.listen(4);
        net.faults = Faults { lost: net.random(40), doubled: net.random(30), late: net.random(50) };
        Self { net, known: [BTreeMap::new(), BTreeMap::new()], qpn: 0x100 }
    }

    /// The programs react to their events, in one way or another, at once or later.
    fn react(&mut self) {
        for side in [A, B] {
            for event in self.net.take(side) {
                self.receive(side, event);
            }
        }
    }

    fn receive(&mut self, side: usize, event: CmEvent) {
        let (now, roll) = (self.net.now, self.net.random(100));
        let known = &mut self.known[side];
        match event {
            CmEvent::Request { conn, .. } => {
                assert_eq!(side, B);
                assert!(known.insert(conn, Known::default()).is_none());
                match roll {
                    0..10 => {
                        self.net.cm[B].reject(conn, RejReason::CONSUMER, b"").unwrap();
                        known.get_mut(&conn).unwrap().ended = true;
                    }
                    // The program sleeps.
                    10..15 => {}
                    15..20 => {
                        self.net.cm[B].forget(now, conn);
                        known.get_mut(&conn).unwrap().ended = true;
                    }
                    _ => {
                        self.qpn += 1;
                        self.net.accept(conn, self.qpn);
                    }
                }
            }
            CmEvent::Replied { conn, .. } => {
                assert_eq!(side, A);
                let it = known.get_mut(&conn).unwrap();
                assert!(!it.ended && !it.established);
                match roll {
                    0..5 => {
                        self.net.cm[A].reject(conn, RejReason::CONSUMER, b"").unwrap();
                        it.ended = true;
                    }
                    5..10 => {}
                    _ => {
                        self.net.cm[A].establish(conn, b"").unwrap();
                        it.established = true;
                    }
                }
            }
            CmEvent::Established { conn } => {
                let it = known.get_mut(&conn).unwrap();
                assert!(side == B && !it.ended && !it.established && !it.released);
                it.established = true;
            }
            CmEvent::Rejected { conn, .. }
            | CmEvent::TimedOut { conn }
            | CmEvent::Disconnected { conn, .. } => {
                let it = known.get_mut(&conn).unwrap();
                assert!(!it.ended && !it.released, "it ended twice");
                it.ended = true;
            }
            CmEvent::Released { conn, .. } => {
                let it = known.get_mut(&conn).unwrap();
                assert!(it.ended && !it.released, "{it:?}");
                it.released = true;
            }
            other => panic!("{other:?}"),
        }
    }

    /// A program acts on its own.
    fn act(&mut self) {
        let now = self.net.now;
        match self.net.random(10) {
            0..4 if self.known[A].len() < 60 => {
                self.qpn += 1;
                self.known[A].insert(self.net.connect(self.qpn), Known::default());
            }
            4..7 => {
                let side = self.net.random(2) as usize;
                let all: Vec<_> = self.known[side].keys().copied().collect();
                if all.is_empty() {
                    return;
                }
                let conn = all[self.net.random(all.len() as u64) as usize];
                if self.net.random(3) > 0 {
                    // Only an established or accepted connection can be disconnected; its event
                    // follows.
                    let _ = self.net.cm[side].disconnect(now, conn, b"");
                } else if !self.known[side][&conn].ended {
                    self.net.cm[side].forget(now, conn);
                    self.known[side].get_mut(&conn).unwrap().ended = true;
                }
            }
            _ => {}
        }
    }
}

#[test]
fn every_connection_ends_once_on_each_side_and_nothing_is_left() {
    let mut established = 0;
    for seed in 0..300 {
        let mut run = Run::new(seed);
        for _ in 0..120 {
            run.act();
            let pause = run.net.random(400) * MS;
            let until = run.net.now.after(pause);
            while run.net.step(until) {
                run.react();
            }
            run.react();
        }
        // All remaining connections are disconnected. The longest wait is for a program that
        // sleeps: 69 s for each attempt of the peer, which gets an MRA.
        for side in [A, B] {
            for conn in run.known[side].iter().filter(|(_, it)| !it.ended).map(|(conn, _)| *conn) {
                let _ = run.net.cm[side].disconnect(run.net.now, conn, b"");
            }
        }
        let until = Time(run.net.now.0 + 1_200_000 * MS);
        while run.net.step(until) {
            run.react();
            for side in [A, B] {
                let alive: Vec<_> = run.known[side]
                    .iter()
                    .filter(|(_, it)| it.established && !it.ended)
                    .map(|(conn, _)| *conn)
                    .collect();
                for conn in alive {
                    let _ = run.net.cm[side].disconnect(run.net.now, conn, b"");
                }
            }
        }
        run.react();
        for (side, known) in run.known.iter().enumerate() {
            established += known.values().filter(|it| it.established).count();
            for (conn, it) in known {
                assert!(it.ended && it.released, "seed {seed}, side {side}: {conn:?} is {it:?}");
            }
        }
        run.net.assert_nothing_left();
    }
    assert!(established > 2_000, "only {established}");
}

#[test]
fn over_a_good_wire_both_sides_agree() {
    for seed in 0..20 {
        let mut net = Net::with(crate::net::config, seed);
        net.listen(1);
        net.faults = Faults { lost: 20, doubled: 20, late: 30 };
        for qpn in 1..20 {
            let a = net.connect(qpn << 4);
            let (mut b, mut done) = (None, [false; 2]);
            let until = net.now.after(60_000 * MS);
            while !(done[A] && done[B]) && net.step(until) {
                for event in net.take(B) {
                    match event {
                        CmEvent::Request { conn, .. } => {
                            b = Some(conn);
                            net.accept(conn, (qpn << 4) + 1);
                        }
                        CmEvent::Established { conn } => done[B] = Some(conn) == b,
                        CmEvent::Released { .. } => {}
                        other => panic!("seed {seed}: {other:?}"),
                    }
                }
                for event in net.take(A) {
                    if let CmEvent::Replied { conn, .. } = event {
                        assert_eq!(conn, a);
                        net.cm[A].establish(a, b"").unwrap();
                        done[A] = true;
                    }
                }
            }
            assert_eq!(done, [true; 2], "seed {seed}");
            let now = net.now;
            net.cm[A].forget(now, a);
            net.run(20_000);
            net.take(A);
            // A late request arrived after its connection was forgotten, and looks like a new one.
            for event in net.take(B) {
                if let CmEvent::Request { conn, .. } = event {
                    net.cm[B].forget(net.now, conn);
                }
            }
            net.run(20_000);
            net.take(B);
            net.assert_nothing_left();
        }
    }
}
