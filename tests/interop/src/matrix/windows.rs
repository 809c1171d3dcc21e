//! Memory windows: the memory that peers reach through them, until when, and their invalidation.

use super::losses::Losses;
use super::node::{BUFFER, Node, Step, at, opcode_of, signaled};
use super::scenario::Session;
use super::verdict::cannot;
use crate::agent::machine::Kind;
use crate::agent::proto::{
    ALL, LOCAL_WRITE, MW_BIND, Op, Opcode, QpState, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE,
    Range, Remote, ZERO_BASED,
};

const HALF: usize = BUFFER / 2;
/// Bytes of the region for windows: region 1 of the passive side.
const SIZE: usize = 16 << 10;
/// All rights that a window can grant.
const REMOTE: u32 = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;

/// Bytes of the region 1.
fn part(offset: usize, len: usize) -> Range {
    Range { region: 1, offset, len }
}

/// WRITE to a byte behind `shown`.
fn write_to(shown: Remote, offset: usize) -> Op {
    Op::Write { remote: shown.address + offset as u64, rkey: shown.rkey, imm: None }
}

/// Makes region 1, and one window of each of these types.
fn prepare(s: &mut Session<'_>, windows: &[u8]) -> Step {
    s.needs("memory windows", |node| node.about().windows == [true; 2])?;
    s.needs_atomics()?;
    s.passive.region(SIZE, LOCAL_WRITE | MW_BIND)?;
    windows.iter().try_for_each(|mw_type| s.passive.window(*mw_type))
}

/// Posts a request to a queue pair of the active side, and waits for its success.
fn perform(s: &mut Session<'_>, qp: usize, op: Op, ranges: &[Range]) -> Step {
    s.active.post_on(qp, &[signaled(1, op, ranges)])?;
    s.active.succeeds(1, opcode_of(op))
}

/// WRITEs `len` bytes through a window, READs them, and changes the first eight by atomics. The
/// first byte of the window is at `offset` of the region.
fn through(s: &mut Session<'_>, qp: usize, shown: Remote, offset: usize, len: usize) -> Step {
    let seed = u64::from(shown.rkey) + qp as u64;
    s.active.fill(at(0, len), seed)?;
    perform(s, qp, write_to(shown, 0), &[at(0, len)])?;
    s.passive.holds(part(offset, len), seed)?;
    let Remote { address: remote, rkey } = shown;
    perform(s, qp, Op::Read { remote, rkey }, &[at(HALF, len)])?;
    s.active.holds(at(HALF, len), seed)?;
    let found = s.active.load(0)?;
    perform(s, qp, Op::FetchAdd { remote, rkey, add: 7 }, &[at(HALF, 8)])?;
    let was = s.active.load(HALF)?;
    s.active.expect(&was, &found, "the value that the addition found")?;
    perform(s, qp, Op::Read { remote, rkey }, &[at(HALF, 8)])?;
    let is = s.active.load(HALF)?;
    s.active.expect(&is, &found.wrapping_add(7), "the value that it left")
}

/// Posts a request of eight bytes, which is refused; no byte changes.
fn refused(s: &mut Session<'_>, qp: usize, op: Op) -> Step {
    let before = s.passive.bytes(part(0, SIZE))?;
    s.active.fill(at(0, 8), 99)?;
    s.active.post_on(qp, &[signaled(2, op, &[at(0, 8)])])?;
    s.active.ends(2, "REM_ACCESS_ERR")?;
    let after = s.passive.bytes(part(0, SIZE))?;
    if before == after { Ok(()) } else { Err("a refused request has changed the region".into()) }
}

/// Invalidates a window, by a request in a send queue of its own side.
fn invalidate(node: &mut Node, qp: usize, rkey: u32) -> Step {
    node.post_on(qp, &[signaled(91, Op::LocalInv { rkey }, &[])])?;
    node.succeeds(91, Opcode::LocalInv)
}

/// A window of type 1 can be bound anew any number of times. All queue pairs of its domain get
/// through it.
pub(super) fn type_1(s: &mut Session<'_>) -> Step {
    prepare(s, &[1])?;
    let len = s.mtu() + 1;
    let first = s.passive.bind(0, 0, part(0, len), REMOTE)?;
    through(s, 0, first, 0, len)?;
    through(s, 1, first, 0, len)?;
    let second = s.passive.bind(1, 0, part(HALF / 4, len), REMOTE)?;
    through(s, 0, second, HALF / 4, len)?;
    if first.rkey == second.rkey {
        return Err(format!("the key of two bindings is {:#x}", first.rkey));
    }
    refused(s, 0, write_to(first, 0))?;
    // A bind of zero bytes unbinds the window.
    let third = s.passive.bind(1, 0, part(0, 0), REMOTE)?;
    refused(s, 1, write_to(Remote { rkey: third.rkey, ..second }, 0))?;
    s.passive.free_window(0)?;
    refused(s, 2, write_to(second, 0))
}

/// A window of type 2 is bound by a work request, and free again once it is invalidated.
pub(super) fn type_2(s: &mut Session<'_>) -> Step {
    prepare(s, &[2, 2])?;
    let mut keys = vec![];
    for (round, len) in s.sizes().into_iter().enumerate() {
        let len = (len + 7) & !7;
        let shown = s.passive.bind(0, 0, part(64 * round, len), REMOTE)?;
        through(s, 0, shown, 64 * round, len)?;
        invalidate(&mut s.passive, 0, shown.rkey)?;
        if keys.contains(&shown.rkey) {
            return Err(format!("the key {:#x} has come twice", shown.rkey));
        }
        keys.push(shown.rkey);
    }
    let last = s.passive.bind(0, 0, part(0, 64), REMOTE)?;
    refused(s, 0, write_to(Remote { rkey: keys[0], ..last }, 0))?;
    // Once by invalidation, and once by deallocation.
    let shown = s.passive.bind(1, 1, part(0, 64), REMOTE)?;
    through(s, 1, shown, 0, 64)?;
    invalidate(&mut s.passive, 1, shown.rkey)?;
    refused(s, 1, write_to(shown, 0))?;
    let shown = s.passive.bind(2, 1, part(0, 64), REMOTE)?;
    through(s, 2, shown, 0, 64)?;
    s.passive.free_window(1)?;
    refused(s, 2, write_to(shown, 0))
}

/// Bytes outside of the window cannot be reached, inside the region or not.
pub(super) fn range(s: &mut Session<'_>) -> Step {
    const FROM: usize = 4096;
    const LEN: usize = 2048;
    prepare(s, &[2; 5])?;
    let start = |shown: Remote| shown.address - FROM as u64;
    // Counted from the region's first byte.
    for (qp, offset) in [FROM - 8, FROM + LEN, FROM + LEN - 4].into_iter().enumerate() {
        let shown = s.passive.bind(qp, qp, part(FROM, LEN), REMOTE)?;
        let op = write_to(Remote { address: start(shown), ..shown }, offset);
        if s.passive.kind() == Kind::SoftRoce {
            // Soft-RoCE checks only that the access is inside the region: see the table of its
            // departures.
            s.notice("a memory window admits the whole region to which it is bound");
            perform(s, qp, op, &[at(0, 8)])?;
        } else {
            refused(s, qp, op)?;
        }
    }
    for (qp, offset) in [(3, SIZE), (4, 0usize.wrapping_sub(8))] {
        let shown = s.passive.bind(qp, qp, part(FROM, LEN), REMOTE)?;
        let remote = start(shown).wrapping_add(offset as u64);
        refused(s, qp, Op::Write { remote, rkey: shown.rkey, imm: None })?;
    }
    Ok(())
}

/// The addresses of a window may begin at zero.
pub(super) fn zero_based(s: &mut Session<'_>) -> Step {
    prepare(s, &[2])?;
    let len = 2 * s.mtu() + 8;
    let shown = s.passive.bind(0, 0, part(64, len), REMOTE | ZERO_BASED)?;
    s.passive.expect(&shown.address, &0, "the address of the first byte")?;
    through(s, 0, shown, 64, len)?;
    through(s, 0, Remote { address: 16, ..shown }, 64 + 16, len - 16)?;
    let beyond = match s.passive.kind() {
        // As above.
        Kind::SoftRoce => SIZE - 64,
        Kind::Rocinante | Kind::Device => len,
    };
    refused(s, 0, write_to(shown, beyond))
}

/// An access that a window does not permit is refused, also if the queue pair permits it.
pub(super) fn forbids(s: &mut Session<'_>) -> Step {
    prepare(s, &[2; 3])?;
    for qp in 0..3 {
        let granted = [REMOTE_READ | REMOTE_ATOMIC, REMOTE_WRITE, REMOTE_WRITE | REMOTE_READ][qp];
        let shown = s.passive.bind(qp, qp, part(0, 64), granted)?;
        let Remote { address: remote, rkey } = shown;
        let (read, write) = (Op::Read { remote, rkey }, write_to(shown, 0));
        let forbidden = [write, read, Op::FetchAdd { remote, rkey, add: 1 }][qp];
        perform(s, qp, [read, write, read][qp], &[at(64, 16)])?;
        refused(s, qp, forbidden)?;
    }
    Ok(())
}

/// A window of type 2 belongs to one queue pair. Only that one gets through it, and only its peer
/// invalidates it.
pub(super) fn of_another(s: &mut Session<'_>) -> Step {
    prepare(s, &[2])?;
    let shown = s.passive.bind(0, 0, part(0, 64), REMOTE)?;
    refused(s, 1, write_to(shown, 0))?;
    through(s, 0, shown, 0, 64)?;
    s.passive.receive_on(2, 5, &[at(HALF, 64)])?;
    perform(s, 2, Op::SendInv { rkey: shown.rkey }, &[at(0, 64)])?;
    if s.passive.kind() == Kind::SoftRoce {
        // See the table of its departures.
        s.notice("a SEND with invalidate takes a window of another queue pair away");
        let wc = s.passive.ends(5, "SUCCESS")?;
        s.passive.expect(&wc.invalidated, &Some(shown.rkey), "the invalidated key")?;
        return refused(s, 0, write_to(shown, 0));
    }
    s.passive.ends(5, "REM_INV_REQ_ERR")?;
    through(s, 0, shown, 0, 64)
}

/// A SEND invalidates a window, and its receiver learns the key.
pub(super) fn send_invalidates(s: &mut Session<'_>) -> Step {
    prepare(s, &[2])?;
    let mut shown = Remote { address: 0, rkey: 0 };
    for (number, len) in (0..).zip([0].into_iter().chain(s.sizes())) {
        shown = s.passive.bind(0, 0, part(0, 64), REMOTE)?;
        let key = taken_away(s, &mut Losses::none(), number, shown, len)?;
        s.passive.expect(&key, &Some(shown.rkey), "the invalidated key")?;
    }
    // Without an invalidation no key is reported.
    s.passive.receive(100, &[at(HALF, 8)])?;
    s.active.perform(100, Op::Send { imm: None }, &[at(0, 8)])?;
    s.passive.received(100, 8, None)?;
    refused(s, 0, write_to(shown, 0))
}

/// A WRITE through a window, and a SEND of `len` bytes that invalidates it. Returns the key in the
/// completion of the receive.
fn taken_away(
    s: &mut Session<'_>,
    losses: &mut Losses,
    number: u64,
    shown: Remote,
    len: usize,
) -> Step<Option<u32>> {
    s.active.fill(at(0, len.max(64)), number)?;
    s.passive.receive(number, &[at(HALF, len)])?;
    let send = Op::SendInv { rkey: shown.rkey };
    let list = [signaled(1, write_to(shown, 0), &[at(0, 64)]), signaled(2, send, &[at(0, len)])];
    losses.post(s, &list)?;
    losses.succeeds(s, 1, Opcode::RdmaWrite)?;
    losses.succeeds(s, 2, Opcode::Send)?;
    let wc = s.passive.ends(number, "SUCCESS")?;
    s.passive.expect(&(wc.opcode, wc.imm), &(Opcode::Recv, None), "opcode and immediate")?;
    s.passive.expect(&(wc.byte_len as usize), &len, "the length")?;
    s.passive.holds(at(HALF, len), number)?;
    s.passive.holds(part(0, 64), number)?;
    Ok(wc.invalidated)
}

/// Only windows of type 2 are invalidated. For any other key the SEND succeeds, and its receiver
/// breaks.
pub(super) fn send_invalidates_nothing(s: &mut Session<'_>) -> Step {
    prepare(s, &[1, 2])?;
    let shown = s.passive.bind(3, 0, part(0, 64), REMOTE)?;
    let other = s.passive.bind(3, 1, part(64, 64), REMOTE)?;
    let ordinary = s.passive.remote(0).1;
    for (qp, rkey) in [shown.rkey, ordinary, other.rkey ^ 0x55].into_iter().enumerate() {
        s.passive.receive_on(qp, 5, &[at(HALF, 64)])?;
        perform(s, qp, Op::SendInv { rkey }, &[at(0, 64)])?;
        s.passive.ends(5, "REM_INV_REQ_ERR")?;
        let state = s.passive.state_of(qp)?;
        s.passive.expect(&state, &QpState::Err, "the state")?;
    }
    through(s, 3, shown, 0, 64)?;
    through(s, 3, other, 64, 64)?;
    let op = s.passive.write_to(0, None);
    perform(s, 3, op, &[at(0, 64)])
}

/// Windows that cannot be bound show nothing.
pub(super) fn unbindable(s: &mut Session<'_>) -> Step {
    prepare(s, &[1, 1, 1, 2, 2, 2])?;
    s.passive.region(SIZE, MW_BIND)?;
    let read_only = Range { region: 2, offset: 0, len: 64 };
    // Outside of its region; in a region that permits no windows; in one that may not be written.
    for (number, range) in [part(SIZE - 32, 64), at(0, 64), read_only].into_iter().enumerate() {
        let (binds, asks) = (2 * number, 2 * number + 1);
        if let Some(shown) = not_bound(s, binds, number, range)? {
            refused(s, asks, write_to(shown, 0))?;
        }
    }
    // Of zero bytes; and bound already.
    not_bound(s, 6, 3, part(0, 0))?;
    let shown = s.passive.bind(7, 4, part(0, 64), REMOTE)?;
    through(s, 7, shown, 0, 64)?;
    not_bound(s, 7, 4, part(0, 64))?;
    // To a region of another domain. The same bind to a region of their own domain succeeds.
    s.passive.foreign_region(64, LOCAL_WRITE | MW_BIND)?;
    s.passive.region(64, LOCAL_WRITE | MW_BIND)?;
    let [foreign, own] = [3, 4].map(|region| Range { region, offset: 0, len: 64 });
    let shown = s.passive.bind(8, 5, own, REMOTE)?;
    perform(s, 8, write_to(shown, 0), &[at(0, 64)])?;
    invalidate(&mut s.passive, 8, shown.rkey)?;
    not_bound(s, 8, 5, foreign).map(drop)
}

/// A bind fails, and breaks its queue pair. Returns the window's new key, if the request was
/// posted.
fn not_bound(s: &mut Session<'_>, qp: usize, window: usize, range: Range) -> Step<Option<Remote>> {
    let node = &mut s.passive;
    let shown = match node.post_bind(qp, window, range, REMOTE) {
        Ok(shown) => shown,
        Err(why) if node.kind() == Kind::Rocinante => return Err(why),
        // Some libraries check at once.
        Err(_) => return Ok(None),
    };
    let wc = node.completions(1)?.remove(0);
    // Soft-RoCE reports one or the other: see the table of its departures.
    let flushed = node.kind() == Kind::SoftRoce && wc.status == "WR_FLUSH_ERR";
    node.expect(&(wc.wr_id, wc.status == "MW_BIND_ERR" || flushed), &(90, true), "the end")?;
    let state = node.state_of(qp)?;
    node.expect(&state, &QpState::Err, "the state")?;
    Ok(Some(shown))
}

/// A region is registered anew, with other rights, and with other memory.
pub(super) fn reregistered(s: &mut Session<'_>) -> Step {
    let old = s.passive.region(SIZE, LOCAL_WRITE | REMOTE_READ)?;
    let read = Op::Read { remote: old.address, rkey: old.rkey };
    perform(s, 0, read, &[at(0, 64)])?;
    let all = s.passive.full() & ALL;
    let anew = match s.passive.rereg(1, Some(all), None) {
        Ok(anew) => anew,
        Err(why) => match s.passive.kind() {
            Kind::Rocinante => return Err(why),
            Kind::Device => return Err(cannot(why)),
            Kind::SoftRoce => {
                // See the table of its departures. A refused change has no effect.
                s.notice("a region cannot be registered anew");
                perform(s, 0, read, &[at(0, 64)])?;
                return refused(s, 0, write_to(old, 0));
            }
        },
    };
    let len = 2 * s.mtu() + 1;
    s.active.fill(at(0, len), 3)?;
    perform(s, 0, write_to(anew, 5), &[at(0, len)])?;
    s.passive.holds(part(5, len), 3)?;
    let known = s.passive.kind() == Kind::Rocinante;
    if known {
        // The memory is the same, and so is the key.
        s.passive.expect(&anew.rkey, &old.rkey, "the key")?;
    }
    let other = s.passive.rereg(1, None, Some(SIZE))?;
    s.passive.untouched(part(0, SIZE))?;
    s.active.fill(at(0, len), 4)?;
    perform(s, 0, write_to(other, 9), &[at(0, len)])?;
    s.passive.holds(part(9, len), 4)?;
    if known { refused(s, 2, write_to(anew, 0)) } else { Ok(()) }
}

/// Each SEND invalidates one window, though packets are lost both ways: a retransmission is not
/// executed again.
pub(super) fn lost(s: &mut Session<'_>) -> Step {
    prepare(s, &[2])?;
    let len = 4 * s.mtu().min(2048) + 5;
    let mut losses = Losses::begin(s, &[(true, 6.0), (false, 15.0)])?;
    for round in 0..100 {
        let shown = s.passive.bind(0, 0, part(0, 64), REMOTE)?;
        let key = taken_away(s, &mut losses, round, shown, len)?;
        s.passive.expect(&key, &Some(shown.rkey), "the invalidated key")?;
        if round >= 2 && losses.least()? >= 3 {
            return Ok(());
        }
    }
    Err("hardly a packet was lost".into())
}
