//! Scatter-gather lists: a range of a message is copied from or to the elements that hold it.

use crate::mem::{AccessError, Checked, Memory, PdId, Sge, Write};

/// Copies `out.len()` bytes of a list, from `offset` on, into `out`.
#[inline(never)]
pub(super) fn gather_parts(
    list: &[Sge],
    offset: u32,
    out: &mut [u8],
    pd: PdId,
    memory: &impl Memory,
) -> Result<(), AccessError> {
    let mut out = out;
    for part in parts(list, offset, out.len()) {
        let source = memory.regions().local_read(pd, &part)?;
        let (now, later) = out.split_at_mut(part.len as usize);
        memory.fetch(source, now)?;
        out = later;
    }
    Ok(())
}

/// Places `src` at `offset` of a scatter list, in ascending order.
#[inline]
pub(crate) fn place(
    list: &[Sge],
    offset: u32,
    src: &[u8],
    pd: PdId,
    memory: &mut impl Memory,
) -> Result<(), AccessError> {
    // An empty `src` places nothing, so no key of the list is checked (as in the walk below).
    if src.is_empty() {
        return Ok(());
    }
    if let [sge] = list {
        // The usual case: one element.
        let part = part_of(sge, offset, src.len())?;
        let target: Checked<Write> = memory.regions().local_write(pd, &part)?;
        return memory.place(target, src);
    }
    // Checks every part before the first is placed.
    for part in parts(list, offset, src.len()) {
        memory.regions().local_write(pd, &part)?;
    }
    let mut src = src;
    for part in parts(list, offset, src.len()) {
        let target = memory.regions().local_write(pd, &part)?;
        let (now, later) = src.split_at(part.len as usize);
        memory.place(target, now)?;
        src = later;
    }
    Ok(())
}

#[inline]
pub(super) fn part_of(sge: &Sge, offset: u32, len: usize) -> Result<Sge, AccessError> {
    let len = u32::try_from(len).map_err(|_| AccessError::Range)?;
    if offset.checked_add(len).is_none_or(|end| end > sge.len) {
        return Err(AccessError::Range);
    }
    let addr = sge.addr.checked_add(u64::from(offset)).ok_or(AccessError::Range)?;
    Ok(Sge { addr, len, lkey: sge.lkey })
}

/// The parts of a list that hold `len` bytes from `offset` on.
pub(super) fn parts(list: &[Sge], offset: u32, len: usize) -> impl Iterator<Item = Sge> {
    let mut skip = offset;
    let mut left = len as u32;
    list.iter().filter_map(move |sge| {
        if skip >= sge.len {
            skip -= sge.len;
            return None;
        }
        let take = left.min(sge.len - skip);
        if take == 0 {
            return None;
        }
        let part = Sge { addr: sge.addr.wrapping_add(u64::from(skip)), len: take, lkey: sge.lkey };
        skip = 0;
        left -= take;
        Some(part)
    })
}
