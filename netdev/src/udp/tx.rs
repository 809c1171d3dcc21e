//! Sending: runs to the kernel, and what to do with its answers.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

use super::UdpPort;
use super::staging::{Run, Staging};
use super::sys::{self, Message};
use crate::kernel::descriptors::Interest;
use crate::port::config::Shards;
use crate::port::contract::{PathId, TxFailure};
use crate::tuning::udp::BULK_RUNS;

/// The transport service of a packet: the upper three bits of the BTH's opcode (IBTA, 9.2.1). Only
/// reliable connections leave by reference: they put up with a datagram that comes twice.
const SERVICE_SHIFT: u32 = 5;
const RC: u8 = 0;

impl UdpPort {
    /// Sends staged runs, oldest first, until none is left or the kernel takes no more.
    pub(super) fn flush_staged(&mut self, mut failed: impl FnMut(TxFailure)) {
        self.staging.close();
        self.note_bulk();
        while let Some(&run) = self.staging.waiting().first() {
            let result = match run.refused {
                None if run.by_reference() => self.send_by_reference(&run),
                None => self.send_runs(),
                Some(errno) => self.send_first_datagram(&run, errno, &mut failed),
            };
            let Err(error) = result else { continue };
            match error.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                libc::EAGAIN => {
                    self.block(self.paths.entry(run.path).socket);
                    return self.reclaim();
                }
                errno => self.refused(&run, errno, &mut failed),
            }
        }
        self.unblock();
        self.reclaim();
    }

    /// See [`Paths::reclaim`](super::paths::Paths::reclaim).
    pub(super) fn reclaim(&mut self) {
        self.paths.reclaim(|path| self.staging.holds(path));
    }

    /// Sends the oldest run and those behind it that leave from the same socket.
    fn send_runs(&mut self) -> io::Result<()> {
        let (paths, staging) = (&self.paths, &self.staging);
        let waiting = staging.waiting();
        let index = paths.entry(waiting[0].path).socket;
        let messages = waiting
            .iter()
            .map(|run| (run, paths.entry(run.path)))
            .take_while(|(run, entry)| {
                entry.socket == index && run.refused.is_none() && !run.by_reference()
            })
            .map(|(run, entry)| Message {
                payload: staging.payload(run),
                dest: &entry.dest,
                by: paths.by(entry),
                segment: if run.segments > 1 { run.segment } else { 0 },
            });
        let sent = sys::send(paths.socket(index), &mut self.scratch, messages)?;
        self.count_sent(sent);
        Ok(())
    }

    /// Counts and removes the oldest `sent` runs.
    fn count_sent(&mut self, sent: usize) {
        for run in &self.staging.waiting()[..sent] {
            self.tx.runs += 1;
            self.tx.datagrams += u64::from(run.segments);
            self.tx.bytes += run.bytes() as u64;
            if !self.offload.as_ref().is_some_and(|offload| offload.takes(run)) {
                self.tx.apart += u64::from(run.segments - 1);
            }
        }
        self.staging.pop(sent);
    }

    /// Finds the paths whose next runs leave by reference: two long ones wait. All datagrams of a
    /// path are for one queue pair, so for one receive queue.
    fn note_bulk(&mut self) {
        let is_bulk = |staging: &Staging, run: &Run| {
            run.is_long() && staging.payload(run).first().is_some_and(|b| b >> SERVICE_SHIFT == RC)
        };
        let staging = &self.staging;
        if staging.waiting().iter().filter(|run| is_bulk(staging, run)).nth(1).is_none() {
            return;
        }
        let mut now = None;
        for at in 0..self.staging.waiting().len() {
            let run = self.staging.waiting()[at];
            let (entry, staging) = (self.paths.entry_mut(run.path), &mut self.staging);
            if is_bulk(staging, &run) && entry.wants_ring(&staging.rings) {
                let now = *now.get_or_insert_with(Instant::now);
                let (address, _) = entry.dest.name.decode();
                let selects = staging.payload(&run).get(usize::from(Shards::SELECTOR));
                let queue = (address, selects.copied().unwrap_or(0));
                entry.ring = staging.rings.of(queue, now).map(|ring| (ring, BULK_RUNS));
            }
        }
    }

    /// Sends the oldest run by reference.
    fn send_by_reference(&mut self, run: &Run) -> io::Result<()> {
        let entry = self.paths.entry(run.path);
        let (dest, by) = (&entry.dest, self.paths.by(entry));
        let socket = self.paths.socket(entry.socket);
        let head = Message { payload: &[], dest, by, segment: run.segment };
        sys::begin_message(socket, &mut self.scratch, head)?;
        let sent = self.staging.end_message(socket, run);
        self.paths.entry_mut(run.path).bulk_run_left();
        if sent? {
            self.tx.by_reference += u64::from(run.segments);
        }
        self.count_sent(1);
        Ok(())
    }

    /// Sends the first datagram of a run that the kernel would not segment.
    fn send_first_datagram(
        &mut self,
        run: &Run,
        errno: i32,
        failed: &mut impl FnMut(TxFailure),
    ) -> io::Result<()> {
        let entry = self.paths.entry(run.path);
        let bytes = run.first_bytes();
        let payload = &self.staging.payload(run)[..bytes];
        let by = self.paths.by(entry);
        let message = Message { payload, dest: &entry.dest, by, segment: 0 };
        sys::send(self.paths.socket(entry.socket), &mut self.scratch, std::iter::once(message))?;
        // Segmentation was the reason for the refusal, not the path itself.
        let v6 = entry.v6;
        self.paths.entry_mut(run.path).segments_max = 1;
        self.tx.runs += 1;
        self.tx.datagrams += 1;
        self.tx.bytes += bytes as u64;
        self.staging.pop_datagram();
        if !v6 && run.segments > 1 {
            // Single datagrams carry IPv4 identification 0; the others were sealed for 1, 2, ….
            self.fail(run.path, run.segments - 1, errno, failed);
        }
        Ok(())
    }

    /// Handles a final refusal of the oldest run, or of its first datagram.
    fn refused(&mut self, run: &Run, errno: i32, failed: &mut impl FnMut(TxFailure)) {
        let entry = self.paths.entry_mut(run.path);
        if errno == libc::EINVAL && entry.dest.name.clear_flow_label() {
            // Flow labels are leased exclusively in this namespace (ipv6(7)): do without.
            return;
        }
        if run.refused.is_none() && run.segments > 1 && is_about_segmentation(errno) {
            self.staging.refuse_first(errno);
        } else {
            self.fail(run.path, run.segments, errno, failed);
        }
    }

    /// Gives up the oldest run, which has `segments` datagrams left.
    fn fail(
        &mut self,
        path: PathId,
        segments: u16,
        errno: i32,
        failed: &mut impl FnMut(TxFailure),
    ) {
        self.staging.pop(1);
        self.tx.failed += u64::from(segments);
        failed(TxFailure { path, datagrams: u32::from(segments), errno });
    }

    /// Records that the kernel's queue for this socket is full: `wait_fd` signals when it has room.
    fn block(&mut self, index: usize) {
        self.tx.blocked += 1;
        if self.blocked == Some(index) {
            return;
        }
        self.unblock();
        let fd = self.paths.socket(index).as_fd();
        let result = if self.in_epoll(index) {
            self.epoll.modify(fd, Interest::ReadWrite)
        } else {
            self.epoll.add(fd, Interest::Write)
        };
        // If memory for the entry is missing, the next flush tries again, at the latest a timer's.
        self.blocked = result.is_ok().then_some(index);
    }

    fn unblock(&mut self) {
        let Some(index) = self.blocked.take() else { return };
        let fd = self.paths.socket(index).as_fd();
        let result = if self.in_epoll(index) {
            self.epoll.modify(fd, Interest::Read)
        } else {
            self.epoll.remove(fd)
        };
        debug_assert!(result.is_ok(), "{result:?}");
    }

    /// Whether the socket is always in the epoll set.
    fn in_epoll(&self, index: usize) -> bool {
        self.receiver.is_watched() && self.paths.is_own(index)
    }
}

/// Whether the error may mean that the kernel cannot segment: no checksum offload on the device
/// (`EIO`), too many segments or, on older kernels, segments larger than the path's MTU (`EINVAL`),
/// no such option.
fn is_about_segmentation(errno: i32) -> bool {
    matches!(errno, libc::EIO | libc::EINVAL | libc::EOPNOTSUPP | libc::ENOPROTOOPT)
}
