//! The wire, the clock, and the events of both sides.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use rocinante_stack::cm::{
    Accept, CmConfig, CmEvent, ConnId, Connect, ConnectionManager, Ended, ListenerId, QpSide,
    SidrQueryId, Transmit,
};
use rocinante_stack::types::{Psn, Qpn, Time};
use rocinante_stack::wire::AliveMad;
use rocinante_stack::wire::cm::{CmMessage, PortSpace, ServiceId, SidrRep, SidrStatus};

/// The two sides: usually A connects and B listens.
pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;

pub(crate) const MS: u64 = 1_000_000;
/// The flight time of a datagram.
pub(crate) const FLIGHT: u64 = MS / 10;
pub(crate) const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);

pub(crate) fn address(side: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, side as u8 + 1).into()
}

pub(crate) struct Net {
    pub(crate) cm: [ConnectionManager; 2],
    /// Events of each side that the test has not taken yet.
    pub(crate) heard: [Vec<CmEvent>; 2],
    pub(crate) now: Time,
    /// While set, all datagrams arrive twice.
    pub(crate) doubles: bool,
    /// While set, all datagrams of a side are lost.
    pub(crate) mute: [bool; 2],
    wire: Vec<(Time, u64, Transmit)>,
    /// Packets that queue pairs of each side have received.
    pub(crate) packets: [BTreeMap<Qpn, u64>; 2],
    /// How often each side had something due.
    pub(crate) wakes: [u64; 2],
    /// All messages sent: the side, and the kind.
    pub(crate) log: Vec<(usize, &'static str)>,
    random: fastrand::Rng,
    sent: u64,
}

pub(crate) fn config(side: usize) -> CmConfig {
    CmConfig { key: [side as u64, 7], ca_guid: side as u64 + 100, ..CmConfig::default() }
}

pub(crate) fn side(qpn: u32) -> QpSide {
    let side = QpSide::new(Qpn::new(qpn), Psn::new(qpn * 7));
    QpSide { responder_resources: 4, initiator_depth: 5, ..side }
}

pub(crate) fn ask(qpn: u32, private: &[u8]) -> Connect<'_> {
    let ends = [A, B].map(address);
    Connect { private, ..Connect::new(ends, SERVICE, 40_000, side(qpn)) }
}

impl Net {
    pub(crate) fn new() -> Self {
        Self::with(config, 1)
    }

    pub(crate) fn with(config: impl Fn(usize) -> CmConfig, seed: u64) -> Self {
        Self {
            cm: [A, B].map(|side| ConnectionManager::new(config(side))),
            heard: [Vec::new(), Vec::new()],
            now: Time(1_000_000_000),
            doubles: false,
            mute: [false; 2],
            wire: Vec::new(),
            packets: [BTreeMap::new(), BTreeMap::new()],
            wakes: [0; 2],
            log: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            sent: 0,
        }
    }

    pub(crate) fn random(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// Collects the datagrams and events of both sides.
    pub(crate) fn collect(&mut self) {
        for side in [A, B] {
            while let Some(transmit) = self.cm[side].poll_transmit() {
                self.log.push((side, name(&transmit)));
                assert_eq!(transmit.local, address(side));
                self.put_on_wire(side, &transmit);
            }
            while let Some(event) = self.cm[side].poll_event() {
                self.heard[side].push(event);
            }
        }
    }

    fn put_on_wire(&mut self, side: usize, transmit: &Transmit) {
        if self.mute[side] {
            return;
        }
        for _ in 0..1 + usize::from(self.doubles) {
            self.sent += 1;
            self.wire.push((self.now.after(FLIGHT), self.sent, *transmit));
        }
    }

    /// Goes to the next arrival or deadline, if it is before `until`. Returns whether there was
    /// one.
    pub(crate) fn step(&mut self, until: Time) -> bool {
        self.collect();
        let arrival = self.wire.iter().map(|(at, ..)| *at).min();
        let timer = self.cm.iter().filter_map(ConnectionManager::poll_timeout).min();
        let Some(next) = [arrival, timer].into_iter().flatten().min().filter(|at| *at <= until)
        else {
            self.now = self.now.max(until.min(Time(u64::MAX - 1)));
            return false;
        };
        self.now = self.now.max(next);
        self.wire.sort_by_key(|(at, order, _)| (*at, *order));
        while self.wire.first().is_some_and(|(at, ..)| *at <= self.now) {
            let (_, _, transmit) = self.wire.remove(0);
            let side = if transmit.remote == address(A) { A } else { B };
            self.cm[side].handle_mad(self.now, transmit.local, transmit.remote, &transmit.mad);
        }
        for side in [A, B] {
            let (now, packets) = (self.now, &self.packets[side]);
            let cm = &mut self.cm[side];
            let was_due = cm.poll_timeout().is_some_and(|due| due <= now);
            self.wakes[side] += u64::from(was_due);
            cm.handle_timeout(now);
            while let Some((conn, qpn)) = cm.poll_look() {
                cm.looked(now, conn, packets.get(&qpn).copied());
            }
        }
        self.collect();
        true
    }

    /// Lets `ms` milliseconds pass.
    pub(crate) fn run(&mut self, ms: u64) {
        let until = self.now.after(ms * MS);
        while self.step(until) {}
    }

    pub(crate) fn take(&mut self, side: usize) -> Vec<CmEvent> {
        self.collect();
        std::mem::take(&mut self.heard[side])
    }

    /// Takes the only event of a side.
    #[track_caller]
    pub(crate) fn one(&mut self, side: usize) -> CmEvent {
        let mut heard = self.take(side);
        assert_eq!(heard.len(), 1, "{heard:?}");
        heard.remove(0)
    }

    /// Messages sent since the last call.
    pub(crate) fn sent(&mut self) -> Vec<(usize, &'static str)> {
        self.collect();
        std::mem::take(&mut self.log)
    }

    pub(crate) fn listen(&mut self, backlog: usize) -> ListenerId {
        self.cm[B].listen(SERVICE, None, backlog).unwrap()
    }

    pub(crate) fn connect(&mut self, qpn: u32) -> ConnId {
        let now = self.now;
        self.cm[A].connect(now, &ask(qpn, b"hello")).unwrap()
    }

    pub(crate) fn accept(&mut self, conn: ConnId, qpn: u32) {
        let (now, accept) =
            (self.now, Accept { side: side(qpn), keep_alive: None, private: b"welcome" });
        self.cm[B].accept(now, conn, &accept).unwrap();
    }

    /// B answers all questions that it has received with this queue pair.
    #[track_caller]
    pub(crate) fn answer(&mut self, qp: (Qpn, u32), private: &[u8]) {
        for event in self.take(B) {
            let CmEvent::Asked { ask, .. } = event else { panic!("{event:?}") };
            self.cm[B].answer(self.now, ask, Ok(qp), private).unwrap();
        }
    }

    /// A request of A that B has received.
    pub(crate) fn asked(&mut self, qpn: u32) -> (ConnId, ConnId) {
        let a = self.connect(qpn);
        self.run(1);
        let CmEvent::Request { conn: b, .. } = self.one(B) else { panic!("no request") };
        (a, b)
    }

    /// An established connection.
    pub(crate) fn connected(&mut self, qpn_a: u32, qpn_b: u32) -> (ConnId, ConnId) {
        let (a, b) = self.asked(qpn_a);
        self.replied(b, qpn_b);
        self.established(a, b);
        (a, b)
    }

    /// B accepts, and A has its reply.
    #[track_caller]
    pub(crate) fn replied(&mut self, b: ConnId, qpn: u32) {
        self.accept(b, qpn);
        self.run(1);
        assert!(matches!(self.one(A), CmEvent::Replied { .. }));
    }

    /// A says that it has the reply, and B hears it.
    #[track_caller]
    pub(crate) fn established(&mut self, a: ConnId, b: ConnId) {
        self.cm[A].establish(a, b"").unwrap();
        self.run(1);
        assert_eq!(self.one(B), CmEvent::Established { conn: b });
    }

    /// A side disconnects, and its peer hears it.
    #[track_caller]
    pub(crate) fn leave(&mut self, side: usize, conn: ConnId) {
        self.cm[side].disconnect(self.now, conn, b"").unwrap();
        self.run(1);
    }

    /// As [`new`](Self::new), with a request that B has received, which listens.
    pub(crate) fn asking() -> (Self, ConnId, ConnId) {
        let mut net = Self::new();
        net.listen(1);
        let (a, b) = net.asked(0x11);
        (net, a, b)
    }

    /// As [`new`](Self::new), with an established connection.
    pub(crate) fn joined() -> (Self, ConnId, ConnId) {
        let mut net = Self::new();
        net.listen(1);
        let (a, b) = net.connected(0x11, 0x22);
        (net, a, b)
    }

    /// The peer has died: a new manager takes its place.
    pub(crate) fn restart(&mut self, side: usize, key: u64) {
        self.cm[side] = ConnectionManager::new(CmConfig { key: [key, key], ..config(side) });
        self.heard[side].clear();
    }

    #[track_caller]
    pub(crate) fn assert_nothing_left(&self) {
        for (side, cm) in self.cm.iter().enumerate() {
            assert_eq!((cm.len(), cm.poll_timeout()), (0, None), "side {side}: {cm:?}");
        }
    }
}

fn name(transmit: &Transmit) -> &'static str {
    match AliveMad::parse(&transmit.mad) {
        Some((_, AliveMad::Question(_))) => return "question",
        Some((_, AliveMad::Answer(..))) => return "answer",
        Some(_) => return "notice",
        None => {}
    }
    match CmMessage::parse(&transmit.mad).expect("a message of ours").1 {
        CmMessage::Req(_) => "REQ",
        CmMessage::Mra(_) => "MRA",
        CmMessage::Rej(_) => "REJ",
        CmMessage::Rep(_) => "REP",
        CmMessage::Rtu(_) => "RTU",
        CmMessage::Dreq(_) => "DREQ",
        CmMessage::Drep(_) => "DREP",
        CmMessage::SidrReq(_) => "SIDR_REQ",
        CmMessage::SidrRep(_) => "SIDR_REP",
        CmMessage::Lap(_) => "LAP",
        CmMessage::Apr(_) => "APR",
    }
}

/// The end of a question without a queue pair. An answer has all its private data.
pub(crate) fn unresolved(
    query: SidrQueryId,
    status: Option<SidrStatus>,
    private: &[u8],
) -> CmEvent {
    let mut private = private.to_vec();
    private.resize(status.map_or(0, |_| SidrRep::PRIVATE_LEN), 0);
    CmEvent::Unresolved { query, status, private }
}

pub(crate) fn disconnected(conn: ConnId, ended: Ended) -> CmEvent {
    CmEvent::Disconnected { conn, ended }
}

pub(crate) fn released(conn: ConnId, qpn: u32) -> CmEvent {
    CmEvent::Released { conn, qpn: Qpn::new(qpn) }
}
