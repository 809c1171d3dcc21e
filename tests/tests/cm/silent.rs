//! Peers that die (`kill -9` looks the same from here: silence) at each step of a handshake with a
//! real device, and a flood of requests. The device gives them up in bounded time, keeps nothing of
//! them, and serves others meanwhile.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rocinante::cm::{self, CmFailure, Connecting, Listener, Params};
use rocinante::device::Backend;
use rocinante::{Access, RecvWr, VerbsError};
use rocinante_stack::cm::{CmConfig, CmEvent, Connect, ConnectionManager, QpSide};
use rocinante_stack::types::{Pkey, Psn, Qpn, Time};
use rocinante_stack::wire::cm::{PortSpace, ServiceId};
use rocinante_stack::wire::icrc::{IpFields, Template};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, MadBytes, write_gsi};
use rocinante_stack::wire::{Bth, Opcode, Packet};
use rocinante_tests::harness::{Family, Harness, PATIENCE, Setup, address, wait_until};
use rocinante_tests::{need, require};

const PORT: u16 = 7471;

/// A connection manager driven by hand, in the third container: it sends only its test's messages.
struct Puppet {
    cm: ConnectionManager,
    socket: UdpSocket,
    here: IpAddr,
    device: IpAddr,
    sent: u32,
}

impl Puppet {
    fn new(harness: &Harness) -> Self {
        let lab = harness.lab();
        let (here, device) = (address(lab, 2, Family::V4), harness.sides[1].address);
        let bind = || UdpSocket::bind((here, 4791)).unwrap();
        let socket = lab.container(2).netns().run(bind).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let cm = ConnectionManager::new(CmConfig { key: [1, 2], ca_guid: 3, ..Default::default() });
        Self { cm, socket, here, device, sent: 0 }
    }

    /// Asks the device for a connection.
    fn ask(&mut self, qpn: u32) {
        self.connect(qpn);
        self.speak();
    }

    fn connect(&mut self, qpn: u32) {
        let side = QpSide::new(Qpn::new(qpn), Psn::new(5));
        let service = ServiceId::of_port(PortSpace::Tcp, PORT);
        let ask = Connect::new([self.here, self.device], service, 4000, side);
        self.cm.connect(Time(1_000_000_000), &ask).unwrap();
    }

    /// Sends all pending messages.
    fn speak(&mut self) {
        while let Some(transmit) = self.cm.poll_transmit() {
            self.send(&transmit.mad);
        }
    }

    fn send(&mut self, mad: &MadBytes) {
        let mut packet = self.gsi(mad);
        self.send_packet(&mut packet);
    }

    fn gsi(&mut self, mad: &MadBytes) -> [u8; GSI_PACKET_LEN] {
        self.sent += 1;
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(self.sent), mad);
        packet
    }

    /// Seals the packet and sends it.
    fn send_packet(&self, packet: &mut [u8]) {
        let ip = IpFields::between(self.here, self.device).unwrap();
        Template::new(&ip, 4791).seal(packet);
        self.socket.send_to(packet, (self.device, 4791)).unwrap();
    }

    /// Receives the device's messages until one is an event for the program.
    fn hear(&mut self) -> CmEvent {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = [0; 2048];
        while Instant::now() < deadline {
            if let Some(event) = self.cm.poll_event() {
                return event;
            }
            if let Ok((len, _)) = self.socket.recv_from(&mut bytes) {
                let Ok(packet) = Packet::parse(&bytes[..len]) else { continue };
                let (src, dst) = (self.device, self.here);
                self.cm.handle_mad(Time(2_000_000_000), src, dst, packet.payload());
            }
        }
        panic!("the device says nothing");
    }
}

/// The harness, a puppet as the peer, and a listener.
fn stage() -> (Harness, Puppet, Listener) {
    stage_of(&Setup::new(Backend::Udp))
}

fn stage_of(setup: &Setup) -> (Harness, Puppet, Listener) {
    let harness = Harness::new(&Setup { containers: 3, ..setup.clone() });
    let puppet = Puppet::new(&harness);
    let server = SocketAddr::new(harness.sides[1].address, PORT);
    let listener = Listener::bind(&harness.sides[1].ctx, server, 4).unwrap();
    (harness, puppet, listener)
}

/// The device accepts the puppet.
fn accepted(harness: &Harness, puppet: &mut Puppet, listener: &Listener) -> Connecting {
    puppet.ask(0x1234);
    let request = listener.request(Some(PATIENCE)).unwrap();
    let side = &harness.sides[1];
    let qp = side.qp().build().unwrap();
    side.run(|| request.accept(qp, &Params::default())).unwrap()
}

/// The device has the same number of descriptors as before, and connects the next peer.
fn as_before(harness: &Harness, listener: &Listener) {
    let server = listener.address();
    let all = harness.both(|at, side| {
        let qp = side.qp().build().unwrap();
        if at == 0 {
            cm::connect(qp, server, &Params::default(), PATIENCE).unwrap()
        } else {
            let request = listener.request(Some(PATIENCE)).unwrap();
            request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap()
        }
    });
    drop(all);
}

#[test]
fn dead_after_its_request() {
    require!(need::backend(Backend::Udp));
    let (harness, mut puppet, listener) = stage();
    // Four requests from a peer that falls silent. The backlog is full, and another peer is
    // rejected at once.
    let requests: Vec<_> = (0..4)
        .map(|n| {
            puppet.ask(0x1000 + n);
            listener.request(Some(PATIENCE)).unwrap()
        })
        .collect();
    let server = listener.address();
    let side = &harness.sides[0];
    let begin = Instant::now();
    let qp = side.qp().build().unwrap();
    let refused = side.run(|| cm::connect(qp, server, &Params::default(), PATIENCE));
    assert!(matches!(refused, Err(VerbsError::Cm(CmFailure::Rejected { .. }))), "{refused:?}");
    assert!(begin.elapsed() < Duration::from_secs(20));
    // The program rejects them, and nothing is left of them.
    drop(requests);
    as_before(&harness, &listener);
}

#[test]
fn dead_before_its_rtu() {
    require!(need::backend(Backend::Udp));
    let (harness, mut puppet, listener) = stage();
    let connecting = accepted(&harness, &mut puppet, &listener);
    assert!(matches!(puppet.hear(), CmEvent::Replied { .. }));
    // The REP is repeated 15 times in 6.4 s, and then the peer is given up.
    let begin = Instant::now();
    let side = &harness.sides[1];
    let outcome = side.run(|| connecting.wait(Duration::from_secs(60)));
    assert!(matches!(outcome, Err(VerbsError::TimedOut)), "{outcome:?}");
    assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    assert_eq!(side.ctx.cm_counters().unwrap().repeated, 15);
    as_before(&harness, &listener);
}

#[test]
fn dead_once_it_is_established_and_when_it_is_asked_to_end() {
    require!(need::backend(Backend::Udp));
    let setup = Setup { cm_retries: Some(3), ..Setup::new(Backend::Udp) };
    let (harness, mut puppet, listener) = stage_of(&setup);
    let connecting = accepted(&harness, &mut puppet, &listener);
    let CmEvent::Replied { conn, .. } = puppet.hear() else { panic!() };
    puppet.cm.establish(conn, b"").unwrap();
    puppet.speak();
    let side = &harness.sides[1];
    let connection = side.run(|| connecting.wait(PATIENCE)).unwrap();
    // Neither the DREQ nor its repetitions are answered.
    connection.disconnect().unwrap();
    side.run(|| connection.wait_disconnected(Duration::from_secs(60))).unwrap();
    assert_eq!(side.ctx.cm_counters().unwrap().repeated, 3);
    drop(connection);
    as_before(&harness, &listener);
}

/// Thousands of requests in a second; each looks like a new peer's.
#[test]
fn a_flood_of_requests_harms_nobody_else() {
    require!(need::backend(Backend::Udp));
    let (harness, mut puppet, flooded) = stage();
    let side = &harness.sides[1];
    let other = Listener::bind(&side.ctx, SocketAddr::new(side.address, PORT + 1), 4).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..5_000).for_each(|n| puppet.ask(0x1_0000 + n)));
        for _ in 0..5 {
            as_before(&harness, &other);
        }
    });
    // A request behind the flood is answered once the flood has been read.
    as_before(&harness, &other);
    let counters = side.ctx.cm_counters().unwrap();
    // The program was offered only the requests in the backlog, and the other peers' requests.
    assert_eq!(counters.requests, 4 + 6, "{counters:?}");
    assert!(counters.backlog_overflow > 0 && counters.malformed == 0, "{counters:?}");
    while let Some(request) = flooded.try_request().unwrap() {
        request.reject(b"").unwrap();
    }
    as_before(&harness, &flooded);
}

/// Packets of another partition are only counted: not answered, and not shown to the program. The
/// same packets with our P_Key are.
#[test]
fn another_partition_is_not_answered() {
    require!(need::backend(Backend::Udp));
    // The DREQ at the end is not answered, either.
    let setup = Setup { cm_retries: Some(1), ..Setup::new(Backend::Udp) };
    let (harness, mut puppet, listener) = stage_of(&setup);
    let side = &harness.sides[1];
    let dropped_without_a_word = |puppet: &Puppet, packet: &mut [u8]| {
        let before = side.ctx.counters();
        for (at, pkey) in [0x8001u16, 0x7ffe, 0].into_iter().enumerate() {
            packet[2..4].copy_from_slice(&pkey.to_be_bytes());
            puppet.send_packet(packet);
            let dropped = before.drops.pkey + at as u64 + 1;
            wait_until("it is counted", || side.ctx.counters().drops.pkey == dropped);
        }
        assert_eq!(side.ctx.counters().port.tx_datagrams, before.port.tx_datagrams);
        packet[2..4].copy_from_slice(&Pkey::DEFAULT.0.to_be_bytes());
        puppet.send_packet(packet);
    };
    // A request.
    puppet.connect(0x1234);
    let req = puppet.cm.poll_transmit().unwrap().mad;
    let mut req = puppet.gsi(&req);
    dropped_without_a_word(&puppet, &mut req);
    let request = listener.request(Some(PATIENCE)).unwrap();
    assert_eq!(side.ctx.cm_counters().unwrap().requests, 1);
    // A message on the connection.
    let qp = side.qp().build().unwrap();
    let into = side.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    qp.post_recv(&[RecvWr { wr_id: 9, sges: &[into.sge(0, 64)] }]).unwrap();
    let connecting = side.run(|| request.accept(qp, &Params::default())).unwrap();
    let CmEvent::Replied { conn, reply } = puppet.hear() else { panic!() };
    puppet.cm.establish(conn, b"").unwrap();
    puppet.speak();
    let connection = side.run(|| connecting.wait(PATIENCE)).unwrap();
    let bth = Bth {
        ack_req: true,
        ..Bth::new(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, reply.side.qpn, reply.side.psn)
    };
    let mut send = [0x5a; 12 + 64 + 4];
    send[..12].copy_from_slice(&bth.bytes());
    dropped_without_a_word(&puppet, &mut send);
    side.succeed(9);
    assert_eq!(into.to_vec(0, 64), [0x5a; 64]);
    drop(connection);
}
