//! Datagrams: the receiver learns the sender, the Q_Key is checked, and datagrams without a fitting
//! receive are dropped.

use std::net::IpAddr;

use super::node::{BUFFER, GRH, Step, at, signaled};
use super::scenario::Session;
use super::unreliable::stopped;
use crate::agent::machine::Kind;
use crate::agent::proto::{Opcode, QpState, Send};

const HALF: usize = BUFFER / 2;
/// The Q_Key of both sides.
pub(super) const QKEY: u32 = 0x1234_5678;
/// How long to wait for a completion that must not come, in milliseconds.
pub(super) const LOST_MS: u64 = 100;

/// Datagrams of all sizes, with immediate and without: length, sender and the header before them.
pub(super) fn send(s: &mut Session<'_>) -> Step {
    let sizes = [0, 1, s.mtu() / 2 + 3, s.mtu() - 1, s.mtu()];
    for (number, len) in (0..).zip(sizes) {
        let imm = (number % 2 == 0).then_some(0xcafe_0000 | len as u32);
        s.active.fill(at(0, len), number)?;
        s.passive.receive(number, &[at(HALF, GRH + len)])?;
        s.active.perform(number, s.active.send_to(0, &s.passive, QKEY, imm), &[at(0, len)])?;
        s.passive.received_from(s.active.qpn(), number, len, imm)?;
        s.passive.holds(at(HALF + GRH, len), number)?;
        check_header(&s.passive.bytes(at(HALF, GRH))?, s.active.address(), s.passive.address())?;
    }
    Ok(())
}

/// Checks that the header is the packet's; over IPv4 it is in the last 20 bytes.
pub(super) fn check_header(header: &[u8], from: IpAddr, to: IpAddr) -> Step {
    const UDP: u8 = 17;
    let ends = (from, to);
    let fine = match ends {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = &header[20..];
            (ip[0], ip[9]) == (0x45, UDP) && ip[12..16] == from.octets() && ip[16..] == to.octets()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            (header[0] >> 4, header[6]) == (6, UDP)
                && header[8..24] == from.octets()
                && header[24..] == to.octets()
        }
        _ => false,
    };
    if fine { Ok(()) } else { Err(format!("the header is not of {ends:?}: {header:02x?}")) }
}

/// A datagram of several pieces, and one posted inline, into receives of several pieces.
pub(super) fn scattered(s: &mut Session<'_>) -> Step {
    let len = s.mtu() / 2 + 7;
    s.active.fill(at(0, len), 3)?;
    let to = s.active.send_to(0, &s.passive, QKEY, None);
    s.passive.receive_scattered(1, &[at(0, GRH), at(64, 9), at(HALF, len)])?;
    s.passive.receive_scattered(2, &[at(128, GRH + 1), at(192, 64)])?;
    s.active.perform(1, to, &[at(0, 5), at(5, 0), at(5, len - 5)])?;
    s.passive.received_from(s.active.qpn(), 1, len, None)?;
    s.passive.holds(at(64, 9), 3)?;
    s.passive.holds_part(at(HALF, len - 9), 3, 9)?;
    s.needs_inline()?;
    s.active.post(&[Send { inline: true, ..signaled(2, to, &[at(0, 33)]) }])?;
    s.active.fill(at(0, 33), 4)?;
    s.active.succeeds(2, Opcode::Send)?;
    s.passive.received_from(s.active.qpn(), 2, 33, None)?;
    s.passive.holds(at(128 + GRH, 1), 3)?;
    s.passive.holds_part(at(192, 32), 3, 1)
}

/// The receiver of a datagram answers it by its completion and header.
pub(super) fn answered(s: &mut Session<'_>) -> Step {
    let Session { active, passive, .. } = s;
    active.fill(at(0, 40), 1)?;
    passive.fill(at(0, 40), 2)?;
    passive.receive(1, &[at(HALF, GRH + 40)])?;
    active.receive(1, &[at(HALF, GRH + 40)])?;
    active.perform(2, active.send_to(0, passive, QKEY, None), &[at(0, 40)])?;
    passive.received_from(active.qpn(), 1, 40, None)?;
    passive.handle_of_last(at(HALF, GRH))?;
    passive.perform(2, passive.send_to(1, active, QKEY, None), &[at(0, 40)])?;
    active.received_from(passive.qpn(), 1, 40, None)?;
    active.holds(at(HALF + GRH, 40), 2)
}

/// A datagram with another Q_Key is dropped.
pub(super) fn wrong_key(s: &mut Session<'_>) -> Step {
    let before = s.passive.dropped("qkey")?;
    s.passive.receive(1, &[at(HALF, GRH + 64)])?;
    s.active.perform(1, s.active.send_to(0, &s.passive, QKEY ^ 1, None), &[at(0, 64)])?;
    s.passive.quiet(LOST_MS)?;
    s.passive.untouched(at(HALF, GRH + 64))?;
    let dropped = s.passive.dropped("qkey")? - before;
    if s.passive.kind() == Kind::Rocinante {
        s.passive.expect(&dropped, &1, "the number of drops")?;
    }
    arrives(s)
}

/// A Q_Key with the highest bit in a request stands for that of the queue pair.
pub(super) fn controlled_key(s: &mut Session<'_>) -> Step {
    s.active.fill(at(0, 64), 1)?;
    s.passive.receive(1, &[at(HALF, GRH + 64)])?;
    s.active.perform(1, s.active.send_to(0, &s.passive, 0x8000_0001, None), &[at(0, 64)])?;
    if s.active.kind() == Kind::SoftRoce {
        // Soft-RoCE sends the request's key: see the table of its departures.
        s.notice("a controlled Q_Key of a request is sent instead of the queue pair's");
        s.passive.quiet(LOST_MS)?;
        return arrives(s);
    }
    s.passive.received_from(s.active.qpn(), 1, 64, None)?;
    s.passive.holds(at(HALF + GRH, 64), 1)
}

/// Datagrams for which no receive is posted are dropped.
pub(super) fn no_receive(s: &mut Session<'_>) -> Step {
    let before = s.passive.dropped("no_receive")?;
    let op = s.active.send_to(0, &s.passive, QKEY, None);
    let list: Vec<Send> = (0..10).map(|id| signaled(id, op, &[at(0, 64)])).collect();
    s.active.post(&list)?;
    for id in 0..10 {
        s.active.succeeds(id, Opcode::Send)?;
    }
    s.passive.quiet(LOST_MS)?;
    let dropped = s.passive.dropped("no_receive")? - before;
    if s.passive.kind() == Kind::Rocinante {
        s.passive.expect(&dropped, &10, "the number of drops")?;
    }
    s.passive.receive(1, &[at(HALF, GRH + 64)])?;
    arrives(s)
}

/// A datagram larger than the receive is dropped.
pub(super) fn too_long(s: &mut Session<'_>) -> Step {
    let before = s.passive.dropped("too_long")?;
    s.passive.receive(1, &[at(HALF, GRH + 64)])?;
    s.active.perform(1, s.active.send_to(0, &s.passive, QKEY, None), &[at(0, 65)])?;
    s.passive.quiet(LOST_MS)?;
    let dropped = s.passive.dropped("too_long")? - before;
    if s.passive.kind() == Kind::Rocinante {
        s.passive.expect(&dropped, &1, "the number of drops")?;
    }
    arrives(s)
}

/// A good datagram of 64 bytes goes to the receive 1.
fn arrives(s: &mut Session<'_>) -> Step {
    s.active.fill(at(0, 64), 9)?;
    s.active.perform(99, s.active.send_to(0, &s.passive, QKEY, None), &[at(0, 64)])?;
    s.passive.received_from(s.active.qpn(), 1, 64, None)?;
    s.passive.holds(at(HALF + GRH, 64), 9)?;
    s.both_in(QpState::Rts)
}

/// As on an unreliable connection: a request that fails locally stops the sending (SQE) and nothing
/// else.
pub(super) fn stops_sending(s: &mut Session<'_>) -> Step {
    let op = s.active.send_to(0, &s.passive, QKEY, None);
    if !stopped(s, op)? {
        return Ok(());
    }
    let Session { active, passive, .. } = s;
    passive.fill(at(0, 9), 5)?;
    active.receive(4, &[at(HALF, GRH + 9)])?;
    passive.perform(4, passive.send_to(0, active, QKEY, None), &[at(0, 9)])?;
    active.received_from(passive.qpn(), 4, 9, None)?;
    active.holds(at(HALF + GRH, 9), 5)?;
    active.modify(QpState::Rts)?;
    passive.receive(1, &[at(HALF, GRH + 64)])?;
    arrives(s)
}
