//! A shard beside neighbours that do not read, or that have gone.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rocinante_netdev::sim::{SimConfig, SimNet};
use rocinante_netdev::{AnyPort, Interface, PortConfig, RxDatagram, RxIpId, Shards, Slots};
use rocinante_stack::cm::{
    Accept, CmConfig, CmEvent, Connect, ConnectionManager, QpSide, Requested,
};
use rocinante_stack::types::{Psn, Qpn, Time};
use rocinante_stack::wire::cm::{CmMessage, CommId, PortSpace, RejReason, ServiceId, SidrStatus};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{AliveMad, MadBytes, Pairs};
use rocinante_stack::{Engine, EngineConfig};

use super::host::Host;
use super::neighbours::Neighbours;
use super::router::Router;
use super::shard::Shard;

/// An address that no other test has, and two processes on it as far as the kernel knows: the
/// leader, and its neighbour.
pub(super) fn neighbours() -> (IpAddr, [Arc<Slots>; 2]) {
    static NEXT: AtomicU8 = AtomicU8::new(64);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    assert!(number >= 64, "more addresses than a process has");
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let here = IpAddr::from([127, number, high, low]);
    let lo = Interface::by_name("lo").unwrap();
    let lease = || Slots::lease(&lo, &[here], &PortConfig::default(), Shards::ONE).unwrap();
    (here, [(); 2].map(|()| Arc::new(lease())))
}

/// Another answer than the neighbour's would be that the connection is not there: the peer would
/// end it.
#[test]
fn what_a_full_mailbox_does_not_take_stays_unanswered() {
    let (here, [first, second]) = neighbours();
    let mut router = Router::new(None, Some(Neighbours::new(&first)));
    let id = |slot: u8| CommId(u32::from(slot) << 24 | 5);
    let mut question = |slot: u8| {
        let mad = AliveMad::Question(Pairs::new([(CommId(7), id(slot))])).emit(1);
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), &mad);
        let datagram = RxDatagram {
            payload: &packet,
            src: [10, 0, 0, 9].into(),
            dst: here,
            src_port: 0xc000,
            ip_id: RxIpId::None,
            tos: None,
        };
        let goes = router.route(&datagram).is_none();
        (goes, router.handed_over(), router.lost_mail())
    };
    let (neighbour, nobody) = (second.first(), second.first() + 1);
    let mut sent = 0;
    let (goes, handed_over, lost) = loop {
        sent += 1;
        let now = question(neighbour);
        if !now.0 || now.2 > 0 || sent > 100_000 {
            break now;
        }
    };
    assert_eq!((goes, handed_over, lost), (true, sent - 1, 1), "of {sent}");
    assert_eq!(question(neighbour), (true, sent - 1, 2));
    assert!(!question(nobody).0 && !question(first.first()).0, "the answer is this process's");
    // A process that has gone does not answer any more.
    drop(second);
    assert_eq!(question(neighbour), (false, sent - 1, 2));
}

/// The DREQ for a process that has gone takes a path, and the port has to find its neighbour.
#[test]
fn a_path_to_the_peer_of_the_dead_has_chores_at_once() {
    let (here, [first, second]) = neighbours();
    let port = SimNet::new().port(&[here], &SimConfig::default()).unwrap();
    let mut engine = Engine::new(EngineConfig::default());
    engine.start_cm(CmConfig { slot: Some(first.first()), ..CmConfig::default() });
    let router = Router::new(None, Some(Neighbours::new(&first)));
    let mut shard = Shard::new("test", engine, AnyPort::from(port), Host::new(1), router);
    shard.hear();
    assert_eq!(shard.io.chores_by(), None, "nothing is left to do");
    let peer = Ipv4Addr::new(10, 0, 0, 9).to_ipv6_mapped().octets();
    let numbers = [u32::from(second.first()) << 24 | 5, 7, 0x200].map(u32::to_be_bytes).concat();
    second.note(here, 1, (&[&peer[..], &numbers].concat().try_into().unwrap(), 0));
    drop(second);
    let end = Instant::now() + Duration::from_secs(20);
    while shard.io.paths() == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
        shard.hear();
    }
    assert_eq!(shard.io.paths(), 1);
    let now = shard.now();
    assert!(shard.io.chores_by().is_some_and(|by| by <= now));
}

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9));

/// A peer's wish for a connection.
fn ask(here: IpAddr, service: ServiceId) -> Connect<'static> {
    Connect::new([PEER, here], service, 9, QpSide::new(Qpn::new(0x11), Psn::new(1)))
}

/// A process has taken a request, or a question, and listens no more; the leader, or a third
/// process, listens for the service now. The repetitions of the peer are not theirs.
#[test]
fn what_a_peer_repeats_goes_to_the_process_that_has_it() {
    let (here, [first, second]) = neighbours();
    let mut leader = Router::new(None, Some(Neighbours::new(&first)));
    let mut goes = |mad: &MadBytes| {
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), mad);
        let (ip_id, tos) = (RxIpId::None, None);
        let (payload, src, dst, src_port) = (&packet[..], PEER, here, 0xc000);
        leader.route(&RxDatagram { payload, src, dst, src_port, ip_id, tos }).is_none()
    };
    let taker = Neighbours::new(&second);
    let slot = Some(second.first());
    let mut cm = ConnectionManager::new(CmConfig { slot, ..CmConfig::default() });
    let mut peer = ConnectionManager::new(CmConfig::default());
    let [tcp, udp] = [PortSpace::Tcp, PortSpace::Udp].map(|space| ServiceId::of_port(space, 7));
    let conn = peer.connect(Time(1), &ask(here, tcp)).unwrap();
    let req = peer.poll_transmit().unwrap().mad;
    peer.resolve(Time(1), (PEER, here), (udp, 9), b"").unwrap();
    let question = peer.poll_transmit().unwrap().mad;
    peer.forget(Time(1), conn);
    let rej = peer.poll_transmit().unwrap().mad;
    let all = [&req, &question, &rej];
    first.listen(tcp.0, None).unwrap();
    first.listen(udp.0, None).unwrap();
    assert_eq!(all.map(&mut goes), [false; 3], "the listener's, and no process's");
    let listener = cm.listen(tcp, None, 1).unwrap();
    let resolver = cm.listen_datagrams(udp, None, 1).unwrap();
    for mad in [&req, &question] {
        cm.handle_mad(Time(1), PEER, here, mad);
    }
    let events = [(); 2].map(|()| cm.poll_event().unwrap());
    let [CmEvent::Request { conn, .. }, CmEvent::Asked { ask, .. }] = events else {
        panic!("{events:?}")
    };
    cm.unlisten(listener, |_| true);
    cm.unlisten_datagrams(Time(1), resolver, |_| true);
    taker.note_connections(&mut cm);
    assert_eq!(all.map(&mut goes), [true; 3]);
    // Its answer to the question may be lost; its refusal of the request ends that.
    cm.answer(Time(1), ask, Err(SidrStatus::REJECT), b"").unwrap();
    cm.reject(conn, RejReason::CONSUMER, b"").unwrap();
    taker.note_connections(&mut cm);
    assert_eq!(all.map(&mut goes), [false, true, false]);
    // The leader has the request, and a neighbour listens for the service now.
    first.unlisten(tcp.0, None);
    second.listen(tcp.0, None).unwrap();
    assert!(goes(&req));
    let requested = Requested::Connection(conn_of(&req)).key();
    first.hold_request((here, PEER), requested, true);
    assert!(!goes(&req) && !goes(&rej));
}

/// The peer's id of a request.
fn conn_of(mad: &MadBytes) -> CommId {
    match CmMessage::parse(&mad[..]) {
        Ok((_, CmMessage::Req(req))) => req.local,
        other => panic!("{other:?}"),
    }
}

/// A peer that died begins anew with the number of its queue pair. The process that has the old
/// connection gets the request, or the reply; others go where they are meant to go.
#[test]
fn a_queue_pair_in_a_connection_leads_to_the_process_that_has_it() {
    let (here, [first, second]) = neighbours();
    let goes = |router: &mut Router, mad: &MadBytes| {
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), mad);
        let (ip_id, tos) = (RxIpId::None, None);
        let (payload, src, dst, src_port) = (&packet[..], PEER, here, 0xc000);
        router.route(&RxDatagram { payload, src, dst, src_port, ip_id, tos }).is_none()
    };
    let manager =
        |key, slot| ConnectionManager::new(CmConfig { key: [key, 3], slot, ..CmConfig::default() });
    let side = |qpn: u32| QpSide::new(Qpn::new(qpn), Psn::new(1));
    let accept = |qpn| Accept { side: side(qpn), keep_alive: None, private: b"" };
    let service = ServiceId::of_port(PortSpace::Tcp, 8);
    // The asker, its connection and its request.
    let asker = |key, slot, ends: [IpAddr; 2], qpn| {
        let mut asker = manager(key, slot);
        let conn = asker.connect(Time(1), &Connect::new(ends, service, 9, side(qpn))).unwrap();
        let request = asker.poll_transmit().unwrap().mad;
        (asker, conn, request)
    };
    let request = |qpn| asker(1, None, [PEER, here], qpn).2;
    // A reply of the peer, to a request of the leader.
    let reply = |qpn| {
        let mut replier = manager(2, None);
        replier.listen(service, None, 1).unwrap();
        let (_, _, request) = asker(4, Some(first.first()), [here, PEER], 0x44);
        replier.handle_mad(Time(1), here, PEER, &request);
        let Some(CmEvent::Request { conn, .. }) = replier.poll_event() else { panic!("none") };
        replier.accept(Time(1), conn, &accept(qpn)).unwrap();
        replier.poll_transmit().unwrap().mad
    };
    let mut leader = Router::new(None, Some(Neighbours::new(&first)));
    first.listen(service.0, None).unwrap();
    // Its neighbour has a connection.
    let neighbour = Neighbours::new(&second);
    let mut cm = manager(5, Some(second.first()));
    cm.listen(service, None, 4).unwrap();
    let connected = |cm: &mut ConnectionManager, qpn: u32| {
        let (mut peer, conn, request) = asker(qpn.into(), None, [PEER, here], qpn);
        cm.handle_mad(Time(1), PEER, here, &request);
        let request = |event| match event {
            CmEvent::Request { conn, .. } => Some(conn),
            _ => None,
        };
        let own = std::iter::from_fn(|| cm.poll_event()).find_map(request).expect("a request");
        cm.accept(Time(1), own, &accept(0x55)).unwrap();
        peer.handle_mad(Time(1), here, PEER, &cm.poll_transmit().unwrap().mad);
        peer.establish(conn, b"").unwrap();
        cm.handle_mad(Time(1), PEER, here, &peer.poll_transmit().unwrap().mad);
        (peer, conn)
    };
    let (mut peer, conn) = connected(&mut cm, 0x11);
    assert!(!goes(&mut leader, &request(0x11)), "there is no note yet");
    neighbour.note_connections(&mut cm);
    for (qpn, leads) in [(0x11, true), (0x12, false)] {
        assert_eq!(goes(&mut leader, &request(qpn)), leads);
        assert_eq!(goes(&mut leader, &reply(qpn)), leads);
        // The neighbour keeps what it gets, and gives the leader its own.
        let mut router = Router::new(None, Some(Neighbours::new(&second)));
        assert_eq!(goes(&mut router, &reply(qpn)), !leads);
    }
    // Once the connection has ended, or the process, nothing leads there.
    peer.disconnect(Time(1), conn, b"").unwrap();
    cm.handle_mad(Time(1), PEER, here, &peer.poll_transmit().unwrap().mad);
    cm.poll_transmit().expect("its answer");
    neighbour.note_connections(&mut cm);
    assert!(!goes(&mut leader, &request(0x11)) && !goes(&mut leader, &reply(0x11)));
    connected(&mut cm, 0x13);
    neighbour.note_connections(&mut cm);
    assert!(goes(&mut leader, &request(0x13)));
    drop((neighbour, second));
    assert!(!goes(&mut leader, &request(0x13)));
}

/// The listener of another process came while a request waited here. A refusal would end the
/// connection that the peer's repetition begins there.
#[test]
fn a_request_that_waited_is_left_to_the_neighbour_that_listens() {
    let (here, [first, second]) = neighbours();
    let services = [1, 2].map(|port| ServiceId::of_port(PortSpace::Tcp, port));
    let mut engine = Engine::new(EngineConfig::default());
    let config = CmConfig { refusal_delay: 5, ..CmConfig::default() };
    engine.start_cm(CmConfig { slot: Some(first.first()), ..config });
    let remote = PEER;
    let mut peer = ConnectionManager::new(config);
    for service in services {
        peer.connect(Time(1), &ask(here, service)).unwrap();
        let sent = peer.poll_transmit().unwrap();
        engine.cm().unwrap().handle_mad(Time(1), remote, here, &sent.mad);
    }
    second.listen(services[0].0, None).unwrap();
    let port = SimNet::new().port(&[here], &SimConfig::default()).unwrap();
    let router = Router::new(None, Some(Neighbours::new(&first)));
    let mut shard = Shard::new("test", engine, AnyPort::from(port), Host::new(1), router);
    assert_eq!(shard.cm().footprint().early, 2);
    shard.drive(false);
    assert_eq!((shard.cm().footprint().early, shard.cm().counters().sent), (0, 1));
}
