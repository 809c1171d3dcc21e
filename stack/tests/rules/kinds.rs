//! Every kind of packet that a peer can send to a queue pair, each with a queue pair that would
//! accept it.

use rocinante_stack::mem::Access;
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::{Feth, NakCode, Opcode as Op, Syndrome};

use crate::common::{QKEY, Setup, Solo};
use rocinante_scripts::aeth;

/// A kind of packet, and a queue pair for it.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) qp_type: QpType,
    /// Brings the queue pair into a fitting state.
    prepare: fn(&mut Solo),
    /// The packet, sealed.
    make: fn(&Solo) -> Vec<u8>,
    /// Whether it is a response to a request of ours.
    pub(crate) is_response: bool,
}

impl Kind {
    /// A queue pair that accepts such a packet, and the packet.
    pub(crate) fn ready(&self) -> (Solo, Vec<u8>) {
        let mut solo = self.idle();
        (self.prepare)(&mut solo);
        solo.sent();
        solo.completed();
        let packet = (self.make)(&solo);
        (solo, packet)
    }

    /// The queue pair before any preparation.
    pub(crate) fn idle(&self) -> Solo {
        let access = Access::ALL.with(Access::FLUSH_GLOBAL);
        let mut solo = Solo::new(&Setup { qp_type: self.qp_type, access, ..Setup::script() });
        solo.key = solo.end.host.register(0, solo.setup.arena as u64, access);
        solo
    }
}

const fn request(name: &'static str, make: fn(&Solo) -> Vec<u8>) -> Kind {
    Kind { name, qp_type: QpType::Rc, prepare: receives, make, is_response: false }
}

const fn response(name: &'static str, prepare: fn(&mut Solo), make: fn(&Solo) -> Vec<u8>) -> Kind {
    Kind { name, qp_type: QpType::Rc, prepare, make, is_response: true }
}

const fn unreliable(name: &'static str, qp_type: QpType, make: fn(&Solo) -> Vec<u8>) -> Kind {
    Kind { name, qp_type, prepare: receives, make, is_response: false }
}

fn receives(solo: &mut Solo) {
    for wr_id in 90..92 {
        solo.post_recv(wr_id, &[solo.sge(8192, 2048)]);
    }
}

/// As [`receives`], and with responses sent to a READ of one packet and to an atomic.
fn answered(solo: &mut Solo) {
    receives(solo);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 8)]);
    solo.receive_request(Op::RC_FETCH_ADD, 1, &[&solo.atomic_eth(64, 1, 0)]);
}

fn sends(solo: &mut Solo) {
    solo.sends(1..=4, 10);
}

fn reads(solo: &mut Solo) {
    solo.read(1, 700);
}

fn nak(solo: &Solo, psn: i64, code: NakCode) -> Vec<u8> {
    solo.response(Op::RC_ACKNOWLEDGE, psn, &[&aeth(Syndrome::nak(code), 0)])
}

fn data(solo: &Solo, opcode: Op, psn: i64, len: usize) -> Vec<u8> {
    let header = match opcode {
        Op::RC_RDMA_READ_RESPONSE_MIDDLE => vec![],
        _ => aeth(Syndrome::ACK_UNLIMITED, 0),
    };
    solo.response(opcode, psn, &[&header, &vec![7; len]])
}

fn flush(solo: &Solo) -> Vec<u8> {
    let mut feth = [0; Feth::LEN];
    Feth::new(1, 0).write(&mut feth);
    solo.request(Op::RC_FLUSH, 0, &[&feth, &solo.reth(0, 8)])
}

const DETH: [u8; 8] = {
    let [a, b, c, d] = QKEY.to_be_bytes();
    [a, b, c, d, 0, 0, 0, 0x77]
};

/// All kinds of packets.
pub(crate) const KINDS: [Kind; 33] = [
    request("SEND", |solo| solo.request(Op::RC_SEND_ONLY, 0, &[&[1; 8]])),
    request("SEND, first packet", |solo| solo.request(Op::RC_SEND_FIRST, 0, &[&[1; 256]])),
    request("SEND with immediate", |solo| {
        solo.request(Op::RC_SEND_ONLY_WITH_IMMEDIATE, 0, &[&[9; 4], &[1; 8]])
    }),
    request("WRITE", |solo| solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 8), &[1; 8]])),
    request("WRITE, first packet", |solo| {
        solo.request(Op::RC_RDMA_WRITE_FIRST, 0, &[&solo.reth(0, 300), &[1; 256]])
    }),
    request("WRITE with immediate", |solo| {
        let rest: [&[u8]; 3] = [&solo.reth(0, 8), &[9; 4], &[1; 8]];
        solo.request(Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 0, &rest)
    }),
    request("READ", |solo| solo.request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 700)])),
    request("compare and swap", |solo| {
        solo.request(Op::RC_COMPARE_SWAP, 0, &[&solo.atomic_eth(64, 1, 0)])
    }),
    request("fetch and add", |solo| {
        solo.request(Op::RC_FETCH_ADD, 0, &[&solo.atomic_eth(64, 1, 0)])
    }),
    request("FLUSH", flush),
    request("ATOMIC WRITE", |solo| {
        solo.request(Op::RC_ATOMIC_WRITE, 0, &[&solo.reth(64, 8), &[1; 8]])
    }),
    request("request after a gap", |solo| solo.request(Op::RC_SEND_ONLY, 1, &[&[1; 8]])),
    request("request that is refused", |solo| solo.request(Op::RC_SEND_LAST, 0, &[&[1; 8]])),
    Kind {
        name: "READ again",
        qp_type: QpType::Rc,
        prepare: answered,
        make: |solo| solo.request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 8)]),
        is_response: false,
    },
    Kind {
        name: "atomic again",
        qp_type: QpType::Rc,
        prepare: answered,
        make: |solo| solo.request(Op::RC_FETCH_ADD, 1, &[&solo.atomic_eth(64, 1, 0)]),
        is_response: false,
    },
    response("ACK", sends, |solo| {
        solo.response(Op::RC_ACKNOWLEDGE, 0, &[&aeth(Syndrome::ACK_UNLIMITED, 1)])
    }),
    response("ACK of everything", sends, |solo| {
        solo.response(Op::RC_ACKNOWLEDGE, 3, &[&aeth(Syndrome::ACK_UNLIMITED, 4)])
    }),
    response("RNR NAK", sends, |solo| {
        solo.response(Op::RC_ACKNOWLEDGE, 1, &[&aeth(Syndrome::rnr(12), 1)])
    }),
    response("NAK of a gap", sends, |solo| nak(solo, 1, NakCode::PsnSequenceError)),
    response("NAK invalid request", sends, |solo| nak(solo, 1, NakCode::InvalidRequest)),
    response("NAK access", sends, |solo| nak(solo, 1, NakCode::RemoteAccessError)),
    response("NAK operational", sends, |solo| nak(solo, 1, NakCode::RemoteOperationalError)),
    response("READ response, first", reads, |solo| {
        data(solo, Op::RC_RDMA_READ_RESPONSE_FIRST, 0, 256)
    }),
    response(
        "READ response, middle",
        |solo| {
            reads(solo);
            solo.sent();
            solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[7; 256]);
        },
        |solo| data(solo, Op::RC_RDMA_READ_RESPONSE_MIDDLE, 1, 256),
    ),
    response(
        "READ response, last",
        |solo| {
            reads(solo);
            solo.sent();
            solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[7; 256]);
            solo.receive_data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 1, &[7; 256]);
        },
        |solo| data(solo, Op::RC_RDMA_READ_RESPONSE_LAST, 2, 188),
    ),
    response(
        "READ response, only",
        |solo| _ = solo.read(1, 100),
        |solo| data(solo, Op::RC_RDMA_READ_RESPONSE_ONLY, 0, 100),
    ),
    response("READ response after a gap", reads, |solo| {
        data(solo, Op::RC_RDMA_READ_RESPONSE_LAST, 2, 188)
    }),
    response(
        "result of an atomic",
        |solo| _ = solo.add(1, 0),
        |solo| {
            let rest: [&[u8]; 2] = [&aeth(Syndrome::ACK_UNLIMITED, 1), &[3; 8]];
            solo.response(Op::RC_ATOMIC_ACKNOWLEDGE, 0, &rest)
        },
    ),
    unreliable("UC SEND", QpType::Uc, |solo| solo.request(Op::UC_SEND_ONLY, 0, &[&[1; 8]])),
    unreliable("UC SEND, first packet", QpType::Uc, |solo| {
        solo.request(Op::UC_SEND_FIRST, 0, &[&[1; 256]])
    }),
    unreliable("UC WRITE", QpType::Uc, |solo| {
        solo.request(Op::UC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 8), &[1; 8]])
    }),
    unreliable("datagram", QpType::Ud, |solo| solo.request(Op::UD_SEND_ONLY, 0, &[&DETH, &[1; 8]])),
    unreliable("datagram with immediate", QpType::Ud, |solo| {
        solo.request(Op::UD_SEND_ONLY_WITH_IMMEDIATE, 0, &[&DETH, &[9; 4], &[1; 8]])
    }),
];
