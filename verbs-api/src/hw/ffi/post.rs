//! The data path: requests posted and completions taken, without allocation.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use rocinante_stack::PostError;
use rocinante_stack::mem::Sge;
use rocinante_stack::verbs::{RecvWr, SendWr};

use super::abi;
use super::objects::{Cq, Qp};
use crate::hw::convert;
use crate::qp::PostListError;

/// Requests handed to the device at once: one doorbell.
const CHAIN: usize = 32;
/// Completions taken at once.
const BURST: usize = 32;

/// A request in the library's form, and the element of its inline data, beside it.
struct Entry<Wr> {
    wr: Wr,
    inline: Option<Sge>,
}

/// What differs between requests to send and to receive.
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
    /// Posts send requests in order.
    pub(in crate::hw) fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let translate = |wr: &SendWr<'_>| {
            self.caps.check_send(wr)?;
            let (wr, inline) = convert::send_wr(wr);
            Ok(Entry { wr, inline })
        };
        // SAFETY: the queue pair exists, and the chain is whole. Its requests name memory by keys, which the device
        // checks; lists and inline data are read during the call only, and are borrowed for longer.
        let post =
            |first, bad: &mut _| unsafe { (self.ops.post_send)(self.pointer.as_ptr(), first, bad) };
        post_chains(list, translate, post)
    }

    /// Posts receive requests in order.
    pub(in crate::hw) fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let translate = |wr: &RecvWr<'_>| {
            self.caps.check_recv(wr)?;
            Ok(Entry { wr: convert::recv_wr(wr), inline: None })
        };
        // SAFETY: as in `post_send`.
        let post =
            |first, bad: &mut _| unsafe { (self.ops.post_recv)(self.pointer.as_ptr(), first, bad) };
        post_chains(list, translate, post)
    }
}

/// Translates requests and posts them, as many at once as a chain holds. `post` gets a chain whose pointers are good for the
/// call.
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
            // SAFETY: so many entries were just written; entries have nothing to drop.
            let entries = unsafe { chain[..count].assume_init_mut() };
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

/// Posts one chain; the index of the first request that was not posted, if any.
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
    // A pointer elsewhere would be a fault of the library's: then nothing is known to be posted.
    Err((index.unwrap_or(0), convert::post_error(result)))
}

impl Cq {
    /// Hands up to `max` completions to `sink`, oldest first; returns how many.
    #[inline]
    pub(in crate::hw) fn poll(
        &self,
        max: usize,
        mut sink: impl FnMut(&abi::Wc),
    ) -> io::Result<usize> {
        let mut burst = [const { MaybeUninit::<abi::Wc>::uninit() }; BURST];
        let mut total = 0;
        while total < max {
            let room = (max - total).min(BURST);
            // SAFETY: the queue exists, and the array has room for as many.
            let count = unsafe {
                (self.ops.poll)(self.pointer.as_ptr(), room as c_int, burst.as_mut_ptr().cast())
            };
            let count = match usize::try_from(count) {
                Ok(count) => count,
                // What was taken before is the caller's; it will ask again.
                Err(_) if total > 0 => break,
                Err(_) => {
                    return Err(io::Error::other("the device cannot read the completion queue"));
                }
            };
            for wc in &burst[..count.min(room)] {
                // SAFETY: the call filled the first `count` entries.
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
