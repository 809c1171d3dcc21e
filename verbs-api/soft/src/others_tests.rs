//! Two shards on two ports, driven in turn.

use std::net::IpAddr;
use std::sync::Arc;

use rocinante_netdev::sim::{SimConfig, SimNet, SimPort};
use rocinante_netdev::{AnyPort, PathId, PathSpec, Port};
use rocinante_stack::mem::{Access, PdId};
use rocinante_stack::types::{Mtu, Pkey, Psn, Qpn};
use rocinante_stack::verbs::{CqId, QpState, QpType, RecvWr};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Bth, Opcode};
use rocinante_stack::{Budget, Engine, EngineConfig, PeerAddress, PeerKind, QpAttr, QpInit};

use super::announce::CqShared;
use super::announce_tests::cqe;
use super::faults::FaultWish;
use super::host::Host;
use super::mail::Command;
use super::others::{Common, Others};
use super::router::Router;
use super::shard::Shard;
use super::staging::Staging;
use crate::provider::wakers::Woken;
use crate::tuning::shard::OVERDUE_MAX;

const SRC_PORT: u16 = 0xc000;

/// A device of two shards, and the port of a sender.
struct Bench {
    shards: [Shard; 2],
    sender: SimPort,
    /// From the sender to the port of each shard.
    paths: [PathId; 2],
    /// The mail for each shard.
    boxes: Arc<[Arc<Staging>]>,
}

/// The address of the sender, and those of the shards.
fn address(last: u8) -> [u8; 4] {
    [10, 0, 0, last]
}

impl Bench {
    fn new() -> Self {
        let net = SimNet::new();
        let port = |last| net.port(&[address(last).into()], &SimConfig::default()).unwrap();
        let boxes: Arc<[Arc<_>]> = (0..2).map(|_| Arc::new(Staging::with_mail())).collect();
        let common = Arc::new(Common::default());
        let shards = [0, 1].map(|own| {
            let config = EngineConfig { qpn_slot: own, ..EngineConfig::default() };
            let others = Others::new(own.into(), 0, &boxes, &common);
            let port = AnyPort::from(port(1 + own));
            let router = Router::new(Some(others), None);
            Shard::new("test", Engine::new(config), port, Host::new(1), router)
        });
        let mut sender = port(9);
        let paths = [1, 2].map(|last| {
            let (local, remote) = (IpAddr::from(address(9)), IpAddr::from(address(last)));
            let (src_port, tos, ttl, flow_label) = (SRC_PORT, 0, 64, 0);
            let spec = PathSpec { local, remote, src_port, tos, ttl, flow_label };
            sender.add_path(&spec).unwrap().id
        });
        Self { shards, sender, paths, boxes }
    }

    /// A queue pair of the second shard, for datagrams.
    fn qp(&mut self) -> Qpn {
        let init = QpAttr { qkey: Some(0x1111_1111), ..QpAttr::default() };
        self.qp_of(QpType::Ud, init, QpAttr::default())
    }

    /// A queue pair of the second shard that is connected to the sender, which knows the address of
    /// the first.
    fn connected(&mut self) -> Qpn {
        let [local, remote] = [2, 9].map(|last| IpAddr::from(address(last)));
        let spec = PathSpec { local, remote, src_port: 1, tos: 0, ttl: 64, flow_label: 0 };
        let path = self.shards[1].io.add_path(&spec).unwrap();
        let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
        let init = QpAttr { access: Some(Access::NONE), ..QpAttr::default() };
        let local = address(1).into();
        let ready = QpAttr {
            peer: Some(PeerAddress { local, remote, path, budget, kind }),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(Qpn::new(5)),
            rq_psn: Some(Psn::new(1)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        self.qp_of(QpType::Rc, init, ready)
    }

    fn qp_of(&mut self, qp_type: QpType, init: QpAttr, ready: QpAttr) -> Qpn {
        let as_made = QpInit {
            qp_type,
            pd: PdId(0),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            sq_sig_all: false,
            cookie: 0,
            context: 0,
        };
        let Shard { engine, host, .. } = &mut self.shards[1];
        let qpn = engine.create_qp(&as_made, 77).unwrap();
        let state = Some(QpState::Init);
        let init = QpAttr { state, pkey_index: Some(0), port: Some(1), ..init };
        engine.modify_qp(qpn, &init, host).unwrap();
        let ready = QpAttr { state: Some(QpState::Rtr), ..ready };
        engine.modify_qp(qpn, &ready, host).unwrap();
        qpn
    }

    fn state(&self, qpn: Qpn) -> QpState {
        self.shards[1].engine.query_qp(qpn).unwrap().0
    }

    /// Sends datagrams for a queue pair to the port of a shard, intact or damaged.
    fn send(&mut self, count: usize, shard: usize, qpn: Qpn, whole: bool) {
        self.send_as(Opcode::UD_SEND_ONLY, (count, shard), qpn, whole);
    }

    fn send_as(&mut self, opcode: Opcode, (count, shard): (usize, usize), qpn: Qpn, whole: bool) {
        let bth = Bth::new(opcode, Pkey::DEFAULT, qpn, Psn::new(1)).bytes();
        let (src, dst) = (address(9), address(1 + u8::try_from(shard).unwrap()));
        let ip = IpFields::V4 { src: src.into(), dst: dst.into(), id: 0, flags: DF };
        let mut template = Template::new(&ip, SRC_PORT);
        for _ in 0..count {
            let slot = self.sender.reserve(self.paths[shard], 24).unwrap();
            slot.buf.fill(0);
            slot.buf[..12].copy_from_slice(&bth);
            template.set_id(slot.ip_id, DF);
            template.seal(slot.buf);
            if !whole {
                slot.buf[23] ^= 1;
            }
            self.sender.commit();
            self.sender.flush(|failure| panic!("{failure:?}"));
        }
    }

    /// Another shard leaves a command for the second, which reads it.
    fn command(&mut self, command: Command) {
        self.boxes[1].mail.command(command);
        let Shard { engine, host, router, clock, .. } = &mut self.shards[1];
        assert!(router.read_mail(clock.now(), engine, host));
    }

    /// The second shard has looked at its port, and executes commands.
    fn execute(&mut self, drained: bool) {
        let Shard { engine, host, router, clock, .. } = &mut self.shards[1];
        router.execute(drained, *clock, engine, host);
    }

    fn drops(&self) -> u64 {
        self.shards[1].engine.drops().icrc
    }
}

/// Messages that arrived before a command count; but a peer that keeps the port full cannot delay
/// the end of a connection without limit.
#[test]
fn a_command_is_put_off_while_the_port_is_full_but_not_for_ever() {
    let mut bench = Bench::new();
    for drained_in in [Some(1), Some(5), None] {
        let qpn = bench.qp();
        bench.command(Command::Break(qpn));
        for _ in 1..drained_in.unwrap_or(OVERDUE_MAX) {
            bench.execute(false);
            assert_eq!(bench.state(qpn), QpState::Rtr);
            // A later command waits as long, and does not bring this one nearer.
            bench.command(Command::Release(qpn));
        }
        bench.execute(drained_in.is_some());
        assert_eq!(bench.state(qpn), QpState::Err, "{drained_in:?}");
        bench.execute(true);
    }
}

/// Otherwise the command would later hit the state that the program has set.
#[test]
fn whoever_changes_a_queue_pair_finds_done_what_was_to_be_done_to_it() {
    let mut bench = Bench::new();
    let [other, qpn] = [bench.qp(), bench.qp()];
    // More than two calls read.
    bench.send(3000, 1, qpn, false);
    bench.command(Command::Break(other));
    bench.command(Command::Break(qpn));
    bench.shards[1].drive(false);
    assert_eq!(bench.state(qpn), QpState::Rtr, "an earlier packet counts");
    bench.shards[1].settle(qpn);
    assert_eq!((bench.state(qpn), bench.drops()), (QpState::Err, 3000));
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    let Shard { engine, host, .. } = &mut bench.shards[1];
    engine.modify_qp(qpn, &reset, host).unwrap();
    bench.shards[1].drive(false);
    assert_eq!(bench.state(qpn), QpState::Reset);
}

/// The owner reports the waste to the shard of the receiving port; the owner's own port is not
/// affected.
#[test]
fn a_flood_at_the_wrong_port_is_left_alone_there() {
    let mut bench = Bench::new();
    let qpn = bench.qp();
    let mut flooded = |count, whole| {
        bench.send(count, 0, qpn, whole);
        assert!(bench.shards[0].drive(false), "a packet handed over is no waste yet");
        assert!(bench.shards[1].drive(false));
        // The report counts at the next read of the port.
        bench.shards[0].drive(false);
        assert!(!bench.shards[1].is_flooded());
        bench.shards[0].is_flooded()
    };
    assert!(!flooded(500, true), "good packets are no flood on any shard");
    assert!(!flooded(10, false));
    assert!(flooded(500, false));
    assert_eq!((bench.drops(), bench.shards[0].router.handed_over()), (510, 1010));
}

/// The shard of the queue pair decides on it.
#[test]
fn a_message_at_the_port_of_another_shard_meets_faults() {
    let mut bench = Bench::new();
    let qpn = bench.connected();
    let wish = FaultWish { words: Some("rnr=1".to_owned()), log: None };
    let met = wish.settle().unwrap().unwrap().before(Vec::new(), String::new()).unwrap();
    let faults = met.of_device.unwrap();
    bench.shards.iter_mut().for_each(|shard| shard.meet(&faults));
    let Shard { engine, host, .. } = &mut bench.shards[1];
    engine.post_recv(qpn, &RecvWr { wr_id: 1, sges: &[] }, host).unwrap();
    bench.send_as(Opcode::RC_SEND_ONLY, (1, 0), qpn, true);
    for shard in &mut bench.shards {
        shard.drive(false);
    }
    let engine = &bench.shards[1].engine;
    assert_eq!(engine.counters().send_rnr_err, 1, "{:?}", engine.drops());
}

/// Datagrams that find the owner's box full.
#[test]
fn what_the_owner_has_no_room_for_is_for_nothing() {
    let mut bench = Bench::new();
    let qpn = bench.qp();
    let mut sent = 0;
    while bench.shards[1].router.lost_mail() == 0 {
        assert!(!bench.shards[0].is_flooded() && sent < 10_000);
        bench.send(500, 0, qpn, true);
        sent += 500;
        bench.shards[0].drive(false);
    }
    assert!(bench.shards[0].is_flooded());
}

/// The queue that overflowed may be gone when the command arrives at another shard, and its number
/// reused.
#[test]
fn an_overflow_that_is_told_late_breaks_only_who_uses_that_queue() {
    let mut bench = Bench::new();
    let qpn = bench.qp();
    let tell = |bench: &mut Bench| {
        bench.command(Command::Overflow(CqId(0)));
        bench.execute(true);
        bench.state(qpn)
    };
    assert_eq!(tell(&mut bench), QpState::Rtr, "there is no such queue");
    let cq = Arc::new(CqShared::new(0, 1, None));
    let id = bench.shards[1].host.cqs.insert(|_| cq.clone());
    assert_eq!(id, 0);
    assert_eq!(tell(&mut bench), QpState::Rtr, "it is another");
    cq.push([cqe(false), cqe(false)].into_iter(), &mut Woken::default());
    assert_eq!(tell(&mut bench), QpState::Err);
}
