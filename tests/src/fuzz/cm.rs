//! Management datagrams, mutated or made up, sent to two connection managers in any state.
//!
//! Nothing panics. Their state stays bounded, and one datagram causes few answers. In the end,
//! with the peer gone, nothing is left.

use std::net::IpAddr;

use rocinante_stack::cm::{Accept, CmConfig, CmEvent, ConnId, Connect, ConnectionManager, QpSide};
use rocinante_stack::types::{Psn, Qpn, Time};
use rocinante_stack::wire::cm::{PortSpace, RejReason, ServiceId};
use rocinante_stack::wire::mad::{MAD_LEN, MadBytes};
use rocinante_stack::wire::{Packet, bth};

use super::Input;
use super::common::addr;

const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);
const CONNECTIONS_MAX: usize = 16;

struct Pair {
    sides: [ConnectionManager; 2],
    now: Time,
    conns: [Vec<ConnId>; 2],
    /// The datagrams sent, each with its sender's side.
    seen: Vec<(usize, MadBytes)>,
}

fn address(side: usize) -> IpAddr {
    addr(side as u8 + 1)
}

fn side_of(number: u32) -> QpSide {
    let side = QpSide::new(Qpn::new(2 + number % 1000), Psn::new(number & 0xff_ffff));
    QpSide { responder_resources: 4, initiator_depth: 4, ..side }
}

impl Pair {
    fn new() -> Self {
        let mut sides = [0u64, 1].map(|side| {
            let max_connections = CONNECTIONS_MAX;
            let (key, ca_guid) = ([side, 7], side + 100);
            ConnectionManager::new(CmConfig {
                key,
                ca_guid,
                max_connections,
                ..CmConfig::default()
            })
        });
        for side in &mut sides {
            side.listen(SERVICE, None, 4).expect("a free port");
        }
        Self { sides, now: Time(1_000_000), conns: [Vec::new(), Vec::new()], seen: Vec::new() }
    }

    fn connect(&mut self, side: usize, input: &mut Input<'_>) {
        let ends = [address(side), address(1 - side)];
        let of = side_of(input.u32());
        let (ack_timeout, private) = (input.u8() % 32, input.slice(20));
        let ask = Connect { ack_timeout, private, ..Connect::new(ends, SERVICE, 40_000, of) };
        self.conns[side].extend(self.sides[side].connect(self.now, &ask).ok());
    }

    /// The program of one side calls something on one of its connections.
    fn call(&mut self, side: usize, input: &mut Input<'_>) {
        let known = &self.conns[side];
        let Some(conn) = known.get(usize::from(input.u8()) % known.len().max(1)).copied() else {
            return;
        };
        let (cm, now) = (&mut self.sides[side], self.now);
        let private = input.slice(8);
        let done = match input.u8() % 6 {
            0 | 1 => cm.accept(
                now,
                conn,
                &Accept { side: side_of(input.u32()), keep_alive: None, private },
            ),
            2 => cm.reject(conn, RejReason(u16::from(input.u8())), private),
            3 => cm.establish(conn, private),
            4 => cm.disconnect(now, conn, private),
            _ => {
                cm.forget(now, conn);
                Ok(())
            }
        };
        let _ = done;
    }

    fn events(&mut self, side: usize) {
        while let Some(event) = self.sides[side].poll_event() {
            match event {
                CmEvent::Request { conn, .. } => self.conns[side].push(conn),
                CmEvent::Released { conn, .. } => self.conns[side].retain(|known| *known != conn),
                _ => {}
            }
        }
    }

    /// Gives a datagram to a side. The side's answers are recorded; later steps may deliver them.
    fn hear(&mut self, to: usize, from: IpAddr, mad: &[u8]) {
        self.collect(to);
        self.sides[to].handle_mad(self.now, from, address(to), mad);
        let answers = self.collect(to);
        assert!(answers <= 2, "{answers} answers to one datagram");
        assert!(self.sides[to].len() <= CONNECTIONS_MAX);
        self.events(to);
    }

    fn collect(&mut self, side: usize) -> usize {
        let mut count = 0;
        while let Some(sent) = self.sides[side].poll_transmit() {
            count += 1;
            self.seen.push((side, sent.mad));
        }
        count
    }

    /// Delivers one of the recorded datagrams, mutated or not, to the other side or back to its
    /// sender.
    fn again(&mut self, input: &mut Input<'_>) {
        if self.seen.is_empty() {
            return;
        }
        let newest = self.seen.len() - 1;
        let at = newest - usize::from(input.u8() % 8).min(newest);
        let (side, mut mad) = self.seen[at];
        let changes = input.u8();
        for _ in 0..if changes < 160 { 0 } else { changes % 4 } {
            let byte = usize::from(input.u8());
            mad[byte] = input.u8();
        }
        let to = if changes % 16 == 15 { side } else { 1 - side };
        let from = if changes % 32 == 14 { addr(9) } else { address(1 - to) };
        self.hear(to, from, &mad);
    }

    fn time(&mut self, input: &mut Input<'_>) {
        let next = self.sides.iter().filter_map(ConnectionManager::poll_timeout).min();
        self.now = match (input.u8() % 2, next) {
            (0, Some(next)) => self.now.max(next),
            _ => self.now.after(u64::from(input.u32())),
        };
        for side in [0, 1] {
            self.sides[side].handle_timeout(self.now);
            self.collect(side);
            self.events(side);
        }
    }
}

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut pair = Pair::new();
    let mut steps = 0;
    while !input.is_empty() && steps < 300 {
        steps += 1;
        let side = usize::from(input.u8() % 2);
        match input.u8() % 8 {
            0 => pair.connect(side, &mut input),
            1 | 2 => pair.call(side, &mut input),
            3 => pair.time(&mut input),
            4 if input.u8().is_multiple_of(4) => {
                pair.hear(side, address(1 - side), input.slice(MAD_LEN + 4));
            }
            _ => pair.again(&mut input),
        }
        for side in [0, 1] {
            pair.collect(side);
            pair.events(side);
        }
    }
    end(&mut pair);
}

/// Both programs forget their connections, and nothing arrives any more.
fn end(pair: &mut Pair) {
    for side in [0, 1] {
        for conn in std::mem::take(&mut pair.conns[side]) {
            pair.sides[side].forget(pair.now, conn);
        }
    }
    for _ in 0..10_000 {
        let next = pair.sides.iter().filter_map(ConnectionManager::poll_timeout).min();
        let Some(next) = next else { break };
        pair.now = pair.now.max(next);
        for side in [0, 1] {
            pair.sides[side].handle_timeout(pair.now);
            pair.collect(side);
            pair.events(side);
            // The last request, on which the program has not decided.
            for conn in std::mem::take(&mut pair.conns[side]) {
                pair.sides[side].forget(pair.now, conn);
            }
        }
    }
    let left = [0, 1].map(|side| (pair.sides[side].len(), pair.sides[side].poll_timeout()));
    assert_eq!(left, [(0, None); 2], "the objects left");
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    // Real datagrams, as if they came from somewhere, and arbitrary calls of the programs.
    let mut all: Vec<Vec<u8>> = super::captured()
        .iter()
        .filter(|bytes| bytes.len() > MAD_LEN + bth::LEN)
        .filter_map(|bytes| Packet::parse(bytes).ok().filter(|packet| packet.deth().is_some()))
        .map(|packet| [&[0, 4, 0][..], packet.payload()].concat())
        .collect();
    // Connect, deliver, accept, deliver, establish, deliver, disconnect, deliver.
    let quiet = |to: u8| [to, 5, 0, 0];
    let mut talk = vec![0, 0, 5, 0, 0, 0, 14];
    talk.extend([0; 20]);
    for (side, call) in [(1u8, 0u8), (0, 3), (0, 4)] {
        talk.extend(quiet(side));
        talk.extend([side, 1, 0]);
        talk.extend([0; 8]);
        talk.extend([call, 9, 0, 0, 0]);
    }
    talk.extend(quiet(0));
    all.push(talk);
    all.extend((0..48u64).map(|seed| {
        let mut random = super::Random::new(seed + 5000);
        let len = 100 + random.below(900);
        (0..len).map(|_| random.below(256) as u8).collect()
    }));
    all
}
