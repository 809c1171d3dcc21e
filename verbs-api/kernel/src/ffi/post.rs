//! The data path: posting requests and taking completions, without allocation.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use rocinante_soft::model::qp::{PostListError, SendRules};
use rocinante_stack::PostError;
use rocinante_stack::mem::Sge;
use rocinante_stack::verbs::{AhId, RecvWr, SendOp, SendWr};
use rustix::io::Errno;

use super::abi;
use super::objects::{Ah, Cq, Qp, Srq};
use crate::convert;

/// The most requests of one call to the device: one doorbell.
const CHAIN: usize = 32;
/// The most completions of one call.
const BURST: usize = 32;

/// A request in the library's form, and beside it the element of its inline data.
struct Entry<Wr> {
    wr: Wr,
    inline: Option<Sge>,
}

/// The difference between send and receive requests.
trait Request: Sized {
    fn link(&mut self, next: *mut Self);
    fn set_list(&mut self, sge: *const Sge);
}

impl Request for abi::SendWr {
    fn link(&mut self, next: *mut Self) {
        self.next = next;
    }

    fn set_list(&mut self, sge: *const Sge) {
        self.sg_list = sge;
    }
}

impl Request for abi::RecvWr {
    fn link(&mut self, next: *mut Self) {
        self.next = next;
    }

    fn set_list(&mut self, sge: *const Sge) {
        self.sg_list = sge;
    }
}

impl Qp {
    /// Posts send requests in order, to the handles of `ahs` if they are datagrams.
    #[inline]
    pub(crate) fn post_send(
        &self,
        list: &[SendWr<'_>],
        rules: &SendRules,
        ahs: Option<&HashMap<AhId, Ah>>,
    ) -> Result<(), PostListError> {
        match self.post_usual(list, rules, ahs) {
            Err(PostListError { index, error: PostError::Unsupported }) => {
                self.post_rest(index, list, rules, ahs)
            }
            result => result,
        }
    }

    /// Posts from a request on that has no form in `struct ibv_send_wr`.
    #[cold]
    fn post_rest(
        &self,
        mut index: usize,
        list: &[SendWr<'_>],
        rules: &SendRules,
        ahs: Option<&HashMap<AhId, Ah>>,
    ) -> Result<(), PostListError> {
        loop {
            let posted = match &self.extended {
                // SAFETY: the queue pair exists.
                Some(extended) => unsafe { extended.post(&list[index]) },
                None => Err(PostError::Unsupported),
            };
            posted.map_err(|error| PostListError { index, error })?;
            index += 1;
            match self.post_usual(&list[index..], rules, ahs) {
                Ok(()) => return Ok(()),
                Err(refused) => {
                    index += refused.index;
                    if refused.error != PostError::Unsupported {
                        return Err(PostListError { index, error: refused.error });
                    }
                }
            }
        }
    }

    /// Posts requests up to the first without a form in `struct ibv_send_wr`, which it reports as
    /// unsupported.
    fn post_usual(
        &self,
        list: &[SendWr<'_>],
        rules: &SendRules,
        ahs: Option<&HashMap<AhId, Ah>>,
    ) -> Result<(), PostListError> {
        let translate = |wr: &SendWr<'_>| {
            rules.check(wr)?;
            let ah = match wr.op {
                SendOp::SendTo { to, .. } => {
                    let ah = ahs.and_then(|ahs| ahs.get(&to.ah));
                    ah.ok_or(PostError::Refused(Errno::INVAL.raw_os_error()))?.address()
                }
                // The device has no window: otherwise `post_bind` posts the request.
                SendOp::BindMw { .. } => {
                    return Err(PostError::Refused(Errno::INVAL.raw_os_error()));
                }
                _ => 0,
            };
            let (wr, inline) = convert::send_wr(wr, ah).ok_or(PostError::Unsupported)?;
            Ok(Entry { wr, inline })
        };
        // SAFETY: the queue pair exists, and the chain is whole. Its requests name memory by keys,
        // which the device checks. The call reads lists, inline data and address handles; they are
        // borrowed for longer.
        let post =
            |first, bad: &mut _| unsafe { (self.ops.post_send)(self.pointer.as_ptr(), first, bad) };
        post_chains(list, translate, post)
    }

    /// Posts receive requests in order.
    pub(crate) fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let translate = |wr: &RecvWr<'_>| {
            self.caps().check_recv(wr)?;
            Ok(Entry { wr: convert::recv_wr(wr), inline: None })
        };
        // SAFETY: as in `post_send`.
        let post =
            |first, bad: &mut _| unsafe { (self.ops.post_recv)(self.pointer.as_ptr(), first, bad) };
        post_chains(list, translate, post)
    }
}

impl Srq {
    /// Posts receive requests in order.
    pub(crate) fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let translate = |wr: &RecvWr<'_>| {
            if wr.sges.len() > self.max_sge {
                return Err(PostError::TooManySges);
            }
            Ok(Entry { wr: convert::recv_wr(wr), inline: None })
        };
        // SAFETY: as in `Qp::post_send`.
        let post =
            |first, bad: &mut _| unsafe { (self.post_recv)(self.pointer.as_ptr(), first, bad) };
        post_chains(list, translate, post)
    }
}

/// Translates requests and posts them in chains of up to `CHAIN`. The pointers of a chain are valid
/// during the call of `post`.
fn post_chains<From, Wr: Request>(
    list: &[From],
    translate: impl Fn(&From) -> Result<Entry<Wr>, PostError>,
    post: impl Fn(*mut Wr, &mut *mut Wr) -> c_int,
) -> Result<(), PostListError> {
    let mut chain = [const { MaybeUninit::<Entry<Wr>>::uninit() }; CHAIN];
    let mut posted = 0;
    while posted < list.len() {
        let mut count = 0;
        let mut refused = None;
        for (slot, from) in chain.iter_mut().zip(&list[posted..]) {
            match translate(from) {
                Ok(entry) => slot.write(entry),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            };
            count += 1;
        }
        if count > 0 {
            let written = ptr::from_mut(&mut chain[..count]) as *mut [Entry<Wr>];
            // SAFETY: that many entries were just written, and have nothing to drop. `MaybeUninit`
            // has the layout of its contents.
            let entries = unsafe { &mut *written };
            if let Err((index, error)) = post_entries(entries, &post) {
                return Err(PostListError { index: posted + index, error });
            }
        }
        posted += count;
        if let Some(error) = refused {
            return Err(PostListError { index: posted, error });
        }
    }
    Ok(())
}

/// Posts one chain. Fails with the index of the first request that was not posted.
fn post_entries<Wr: Request>(
    entries: &mut [Entry<Wr>],
    post: impl Fn(*mut Wr, &mut *mut Wr) -> c_int,
) -> Result<(), (usize, PostError)> {
    let mut next = ptr::null_mut();
    for entry in entries.iter_mut().rev() {
        entry.wr.link(next);
        if let Some(sge) = &entry.inline {
            entry.wr.set_list(sge);
        }
        next = &raw mut entry.wr;
    }
    let mut bad = ptr::null_mut();
    let result = post(next, &mut bad);
    if result == 0 {
        return Ok(());
    }
    let index = entries.iter().position(|entry| ptr::eq(&raw const entry.wr, bad));
    // Any other pointer is a fault of the library; then no request counts as posted.
    Err((index.unwrap_or(0), convert::post_error(result)))
}

impl Cq {
    /// Passes up to `max` completions to `sink`, oldest first. Returns their number.
    #[inline]
    pub(crate) fn poll(&self, max: usize, mut sink: impl FnMut(&abi::Wc)) -> io::Result<usize> {
        let mut burst = [const { MaybeUninit::<abi::Wc>::uninit() }; BURST];
        // The device fills only the members that belong to a status.
        burst[..max.min(BURST)].iter_mut().for_each(|wc| _ = wc.write(abi::Wc::default()));
        let mut total = 0;
        while total < max {
            let room = (max - total).min(BURST);
            // SAFETY: the queue exists, and the array has room for `room` entries.
            let count = unsafe {
                (self.ops.poll)(self.pointer.as_ptr(), room as c_int, burst.as_mut_ptr().cast())
            };
            let count = match usize::try_from(count) {
                Ok(count) => count,
                // Completions taken before belong to the caller, which will poll again.
                Err(_) if total > 0 => break,
                Err(_) => {
                    return Err(io::Error::other("the device cannot read the completion queue"));
                }
            };
            for wc in &burst[..count.min(room)] {
                // SAFETY: all entries that the call may fill were written before it.
                sink(unsafe { wc.assume_init_ref() });
            }
            total += count;
            if count < room {
                break;
            }
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use rocinante_stack::verbs::SendData;

    use super::*;

    /// The requests that a provider sees: number, and first inline byte.
    type Seen = Vec<(u64, Option<u8>)>;

    /// Posts `count` requests to a provider that refuses request `full` if it comes to it.
    fn post(count: u64, full: u64, bad_pointer: bool) -> (Vec<Seen>, Result<(), PostListError>) {
        let bytes: Vec<u8> = (0..=255).collect();
        let list: Vec<SendWr<'_>> = (0..count)
            .map(|wr_id| {
                SendWr::send(if wr_id % 2 == 0 {
                    SendData::Inline(&bytes[wr_id as usize..][..1])
                } else {
                    SendData::Sges(&[])
                })
                .wr_id(wr_id)
            })
            .collect();
        let translate = |wr: &SendWr<'_>| {
            if wr.wr_id == 90 {
                return Err(PostError::BadAtomic);
            }
            let (wr, inline) = convert::send_wr(wr, 0).unwrap();
            Ok(Entry { wr, inline })
        };
        let calls = RefCell::new(Vec::new());
        let provider = |first: *mut abi::SendWr, bad: &mut *mut abi::SendWr| {
            let mut seen = Seen::new();
            let mut next = first;
            // SAFETY: the chain is as `post_entries` promises.
            while let Some(wr) = unsafe { next.as_ref() } {
                if wr.wr_id == full {
                    *bad = if bad_pointer { ptr::dangling_mut() } else { next };
                    calls.borrow_mut().push(seen);
                    return 12;
                }
                // SAFETY: as above; a list of one element is inline data.
                let byte = (wr.num_sge == 1).then(|| unsafe { *((*wr.sg_list).addr as *const u8) });
                seen.push((wr.wr_id, byte));
                next = wr.next;
            }
            calls.borrow_mut().push(seen);
            0
        };
        let result = post_chains(&list, translate, provider);
        (calls.into_inner(), result)
    }

    #[test]
    fn lists_are_posted_in_order_a_chain_at_a_time() {
        for count in [0, 1, 31, 32, 33, 70] {
            let (calls, result) = post(count, u64::MAX, false);
            assert_eq!(result, Ok(()));
            assert_eq!(calls.len() as u64, count.div_ceil(CHAIN as u64));
            let seen: Seen = calls.concat();
            let expected = (0..count).map(|id| (id, (id % 2 == 0).then_some(id as u8)));
            assert_eq!(seen, expected.collect::<Seen>());
        }
    }

    #[test]
    fn the_first_request_that_was_not_posted_is_named() {
        for full in [0, 1, 31, 32, 50] {
            let (calls, result) = post(70, full, false);
            let index = full as usize;
            assert_eq!(result, Err(PostListError { index, error: PostError::Full }));
            assert_eq!(calls.concat().len(), index);
        }
        // An invalid request stops the list, too; the requests before it are posted.
        let (calls, result) = post(100, u64::MAX, false);
        assert_eq!(result, Err(PostListError { index: 90, error: PostError::BadAtomic }));
        assert_eq!(calls.concat().len(), 90);
    }

    #[test]
    fn a_provider_that_names_nothing_is_taken_to_have_posted_nothing_of_the_chain() {
        let (_, result) = post(70, 40, true);
        assert_eq!(result, Err(PostListError { index: 32, error: PostError::Full }));
    }
}
