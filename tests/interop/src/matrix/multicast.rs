//! Multicast: a datagram to a group reaches each queue pair that is attached to it, and no other.

use std::net::IpAddr;

use super::datagrams::{LOST_MS, QKEY, check_header};
use super::node::{BUFFER, GRH, Step, at};
use super::scenario::Session;
use crate::agent::machine::Kind;
use crate::agent::proto::{Completion, Op, Opcode};

const HALF: usize = BUFFER / 2;
/// Bytes between the receives of two queue pairs.
const APART: usize = 8192;
/// The request of a datagram that may be lost.
const PROBE: u64 = 1000;
/// How long to wait for a datagram that may be lost, in milliseconds: long enough for a slow
/// machine.
const PROBE_MS: u64 = 2000;
/// The destination QPN of datagrams to a group.
const MULTICAST: u32 = 0xff_ffff;

/// Three groups of the scenario's family: the first; one with another Ethernet address; and one
/// with the first one's Ethernet address.
fn groups(s: &Session<'_>) -> [IpAddr; 3] {
    match s.active.address() {
        IpAddr::V4(_) => [[239, 83, 0, 1], [239, 83, 0, 2], [239, 211, 0, 1]].map(IpAddr::from),
        IpAddr::V6(_) => [[0, 0x83, 1], [0, 0x83, 2], [1, 0x83, 1]]
            .map(|[a, b, c]| IpAddr::from([0xff15, 0, 0, 0, 0, a, b, c])),
    }
}

/// SEND to the group of an address handle.
fn to(handle: usize, qkey: u32, imm: Option<u32>) -> Op {
    Op::SendTo { handle, qpn: MULTICAST, qkey, imm }
}

/// A queue pair joins the first group and gets one datagram, which takes its receive `wr_id`. The
/// active side's address handle 1 is for that group. The first datagrams may be lost, because an
/// interface may let the group through late: the guest's programs its filter later, by
/// `virtnet_rx_mode_work`.
fn join(s: &mut Session<'_>, qp: usize, wr_id: u64) -> Step {
    let [group, ..] = groups(s);
    s.passive.attach(qp, group)?;
    for _ in 0..10 {
        s.active.perform(PROBE, to(1, QKEY, None), &[at(0, 8)])?;
        let heard = s.passive.poll(1, PROBE_MS)?;
        if let Some(wc) = heard.first() {
            let found = (wc.wr_id, wc.qpn, wc.status.as_str());
            return s.passive.expect(
                &found,
                &(wr_id, s.passive.qpn_of(qp), "SUCCESS"),
                "the probe",
            );
        }
    }
    Err(format!("datagrams to {group} do not reach its members"))
}

/// Both members get each datagram once, and the third queue pair gets none.
pub(super) fn reaches_members(s: &mut Session<'_>) -> Step {
    let [group, ..] = groups(s);
    s.active.handle(group)?;
    for qp in 0..2 {
        s.passive.receive_on(qp, PROBE, &[at(HALF, GRH + 8)])?;
        join(s, qp, PROBE)?;
    }
    s.passive.attach(1, group)?;
    let sizes = [0, 1, s.mtu() / 2 + 3, s.mtu() - 1, s.mtu()];
    for (round, len) in (0..).zip(sizes) {
        for qp in 0..3 {
            let place = at(HALF + qp * APART, GRH + len);
            s.passive.receive_on(qp, 10 * round + qp as u64, &[place])?;
        }
        let imm = (round % 2 == 0).then_some(0xcafe_0000 | len as u32);
        s.active.fill(at(0, len), round)?;
        s.active.perform(round, to(1, QKEY, imm), &[at(0, len)])?;
        let mut found = s.passive.completions(2)?;
        found.sort_by_key(|wc| wc.wr_id);
        for (qp, wc) in found.iter().enumerate() {
            let wanted = Completion {
                wr_id: 10 * round + qp as u64,
                qpn: s.passive.qpn_of(qp),
                status: "SUCCESS".into(),
                opcode: Opcode::Recv,
                byte_len: (GRH + len) as u32,
                imm,
                invalidated: None,
                source: Some(s.active.qpn()),
            };
            s.passive.expect(wc, &wanted, "the completion")?;
            s.passive.holds(at(HALF + qp * APART + GRH, len), round)?;
            check_header(&s.passive.bytes(at(HALF + qp * APART, GRH))?, s.active.address(), group)?;
        }
    }
    s.passive.quiet(LOST_MS)
}

/// A queue pair that has left gets no more; no member gets datagrams to another group, or with
/// another Q_Key.
pub(super) fn others_are_not_heard(s: &mut Session<'_>) -> Step {
    let groups = groups(s);
    for address in groups {
        s.active.handle(address)?;
    }
    let group = groups[0];
    s.passive.receive(0, &[at(HALF, GRH + 64); 4])?;
    join(s, 0, 0)?;
    let before = s.passive.dropped("qkey")?;
    for (wr_id, (handle, qkey)) in (1..).zip([(2, QKEY), (3, QKEY), (1, QKEY ^ 1)]) {
        s.active.perform(wr_id, to(handle, qkey, None), &[at(0, 64)])?;
    }
    s.passive.quiet(LOST_MS)?;
    let dropped = s.passive.dropped("qkey")? - before;
    if s.passive.kind() == Kind::Rocinante {
        s.passive.expect(&dropped, &1, "the number of drops")?;
    }
    arrives(s, 1)?;
    s.passive.detach(0, group)?;
    s.active.perform(9, to(1, QKEY, None), &[at(0, 64)])?;
    s.passive.quiet(LOST_MS)?;
    join(s, 0, 2)?;
    arrives(s, 3)
}

/// A datagram for the first group goes to the receive `wr_id`.
fn arrives(s: &mut Session<'_>, wr_id: u64) -> Step {
    s.active.fill(at(0, 64), wr_id)?;
    s.active.perform(100 + wr_id, to(1, QKEY, None), &[at(0, 64)])?;
    s.passive.received_from(s.active.qpn(), wr_id, 64, None)?;
    s.passive.holds(at(HALF + GRH, 64), wr_id)
}
