//! FLUSH and ATOMIC WRITE.
//!
//! Soft-RoCE requests ATOMIC WRITE like any other operation, but not FLUSH: that needs a `librxe`
//! with `ibv_wr_flush`, which the guest's (rdma-core 44) lacks.

use super::node::{Step, at, opcode_of, signaled};
use super::scenario::Session;
use super::verdict::cannot;
use crate::agent::machine::Kind;
use crate::agent::proto::{LOCAL_WRITE, Op, REMOTE_READ, Send};

/// Global visibility.
const GLOBAL: u8 = 1;

/// ATOMIC WRITE of the eight bytes of the active side's region 0 at `from`: inline, as libraries
/// require.
fn store(wr_id: u64, (remote, rkey): (u64, u32), from: usize) -> Send {
    Send { inline: true, ..signaled(wr_id, Op::AtomicWrite { remote, rkey }, &[at(from, 8)]) }
}

fn flush(wr_id: u64, (remote, rkey): (u64, u32), len: u32, region: bool) -> Send {
    signaled(wr_id, Op::Flush { remote, rkey, len, placement: GLOBAL, region }, &[])
}

/// Posts requests that some libraries do not support.
fn post(s: &mut Session<'_>, list: &[Send]) -> Step {
    s.active.post(list).map_err(|why| {
        let lacks =
            s.active.kind() != Kind::Rocinante && why.contains("does not have this operation");
        if lacks { cannot(why) } else { why }
    })
}

/// Eight bytes at a time, behind WRITEs of all sizes.
pub(super) fn atomic_write(s: &mut Session<'_>) -> Step {
    s.needs_atomic_write()?;
    for (round, len) in s.sizes().into_iter().enumerate() {
        let (id, value) = (2 * round as u64, 0x0102_0304_0506_0708 * (round as u64 + 1));
        s.active.store(0, value)?;
        s.active.fill(at(1024, len), id)?;
        let write = signaled(id, s.passive.write_to(4096, None), &[at(1024, len)]);
        let store = store(id + 1, s.passive.remote(64), 0);
        post(s, &[write.clone(), store.clone()])?;
        s.active.succeeds(id, opcode_of(write.op))?;
        s.active.succeeds(id + 1, opcode_of(store.op))?;
        let is = s.passive.load(64)?;
        s.passive.expect(&is, &value, "the value there")?;
        s.passive.holds(at(4096, len), id)?;
    }
    s.passive.untouched(at(0, 64))?;
    s.passive.untouched(at(72, 64))
}

/// More of them than may be outstanding, between atomics that change the same word: an ATOMIC WRITE
/// executed twice would show.
pub(super) fn atomic_writes_lost(s: &mut Session<'_>) -> Step {
    s.needs_atomic_write()?;
    s.needs_atomics()?;
    let rule = s.lose(false, 15.0)?;
    let (remote, rkey) = s.passive.remote(64);
    for round in 0..60u64 {
        let mut list = Vec::new();
        for id in (0..24).step_by(2) {
            s.active.store(8 * id as usize, 1000 * round + id)?;
            let add = Op::FetchAdd { remote, rkey, add: 1 };
            list.push(store(id, (remote, rkey), 8 * id as usize));
            list.push(signaled(id + 1, add, &[at(1024 + 8 * id as usize, 8)]));
        }
        post(s, &list)?;
        for send in &list {
            s.active.succeeds(send.wr_id, opcode_of(send.op))?;
        }
        for id in (0..24).step_by(2) {
            let was = s.active.load(1024 + 8 * id as usize)?;
            s.active.expect(&was, &(1000 * round + id), "the value that the addition found")?;
        }
        let is = s.passive.load(64)?;
        s.passive.expect(&is, &(1000 * round + 23), "the value there")?;
        if round >= 2 && rule.lost()? >= 3 {
            return Ok(());
        }
    }
    Err("hardly a packet was lost".into())
}

/// The region may be read and not written.
pub(super) fn atomic_write_forbidden(s: &mut Session<'_>) -> Step {
    s.needs_atomic_write()?;
    let region = s.passive.region(4096, LOCAL_WRITE | REMOTE_READ)?;
    post(s, &[store(1, (region.address, region.rkey), 0)])?;
    s.active.ends(1, "REM_ACCESS_ERR").map(drop)
}

/// The region ends in the middle of the word.
pub(super) fn atomic_write_out_of_range(s: &mut Session<'_>) -> Step {
    s.needs_atomic_write()?;
    let region = s.passive.region(4092, s.passive.full())?;
    post(s, &[store(1, (region.address + 4088, region.rkey), 0)])?;
    s.active.ends(1, "REM_ACCESS_ERR").map(drop)
}

/// A range and a whole region, behind WRITEs.
///
/// Soft-RoCE drops them. Its table lacks the payload's offset for this opcode, so it takes the
/// headers for payload, computes the ICRC over them twice, and drops packets with the right one.
pub(super) fn flushes(s: &mut Session<'_>) -> Step {
    s.needs("FLUSH", |node| node.about().flush)?;
    for (round, len) in s.sizes().into_iter().enumerate() {
        let id = 2 * round as u64;
        s.active.fill(at(1024, len), id)?;
        let write = signaled(id, s.passive.write_to(4096, None), &[at(1024, len)]);
        let flush = flush(id + 1, s.passive.remote(4096), len as u32, round % 2 == 1);
        post(s, &[write.clone(), flush.clone()])?;
        s.active.succeeds(id, opcode_of(write.op))?;
        s.passive.holds(at(4096, len), id)?;
        if s.passive.kind() == Kind::SoftRoce {
            s.active.ends(id + 1, "RETRY_EXC_ERR")?;
            s.notice("a FLUSH is not heard: its ICRC is computed in another way");
            return Ok(());
        }
        s.active.succeeds(id + 1, opcode_of(flush.op))?;
    }
    Ok(())
}
