//! From staged runs to the kernel.

use std::io;

use super::staging::{FrameStaging, HeaderBytes, SEGMENTS_MAX};
use super::sys::SEND_MAX;
use super::vnet::VNET_LEN;
use crate::port::contract::{PortStats, TxFailure};
use crate::port::headers::HEADERS_MAX;

/// Takes frames as the kernel does.
pub(super) trait FrameSink {
    /// Takes frames, each from two pieces, in order; returns their number, or the error of the
    /// first.
    fn send<'a>(&mut self, frames: impl Iterator<Item = [&'a [u8]; 2]>) -> io::Result<usize>;

    /// Takes one frame, in one piece.
    fn send_one(&mut self, frame: &[u8]) -> io::Result<()>;
}

/// Gives runs to the kernel.
pub(super) struct Sender {
    /// Headers of frames that leave alone.
    headers: Box<[HeaderBytes]>,
    segments_max: u16,
    /// Whether the interface takes runs as they are.
    pub(super) leaves_whole: bool,
    /// Of runs that the kernel segmented for the interface, all datagrams but the first of each.
    pub(super) apart: u64,
}

/// Whether to go on after an error.
enum Outcome {
    Again,
    Blocked,
}

impl Sender {
    pub(super) fn new(segmentation: bool) -> Self {
        Self {
            headers: vec![[0; VNET_LEN + HEADERS_MAX]; SEND_MAX].into_boxed_slice(),
            segments_max: if segmentation { SEGMENTS_MAX } else { 1 },
            leaves_whole: false,
            apart: 0,
        }
    }

    /// The most datagrams of a run: 1 once the kernel refused to segment.
    pub(super) fn segments_max(&self) -> u16 {
        self.segments_max
    }

    /// Sends all runs, up to the first that the kernel has no room for now. Drops and reports runs
    /// that it refuses for good.
    pub(super) fn send(
        &mut self,
        kernel: &mut impl FrameSink,
        staging: &mut FrameStaging,
        stats: &mut PortStats,
        failed: &mut impl FnMut(TxFailure),
    ) {
        staging.seal();
        while let Some(run) = staging.front() {
            let sent = if run.split.is_some() {
                kernel.send(staging.singles(&mut self.headers))
            } else if let Some(frame) = staging.only() {
                kernel.send_one(frame).map(|()| 1)
            } else {
                kernel.send(staging.whole())
            };
            match sent {
                Ok(frames) => self.sent(staging, frames, stats),
                Err(error) => match refused(staging, &error, stats, failed) {
                    Outcome::Again => {}
                    Outcome::Blocked => return,
                },
            }
        }
    }

    /// Removes the frames that the kernel took: whole runs, or frames of a split one.
    fn sent(&mut self, staging: &mut FrameStaging, frames: usize, stats: &mut PortStats) {
        stats.tx_runs += frames as u64;
        if let Some(run) = staging.front()
            && let Some(before) = run.split
        {
            let done = before + frames as u16;
            run.split = Some(done);
            stats.tx_datagrams += frames as u64;
            stats.tx_bytes += (run.bytes_of(done) - run.bytes_of(before)) as u64;
            if done == run.datagrams {
                // Single frames pass where the run did not: the kernel cannot segment here.
                self.segments_max = 1;
                staging.pop();
            }
            return;
        }
        for _ in 0..frames {
            if let Some(run) = staging.front() {
                stats.tx_datagrams += u64::from(run.datagrams);
                stats.tx_bytes += run.bytes as u64;
                if !self.leaves_whole {
                    self.apart += u64::from(run.datagrams - 1);
                }
            }
            staging.pop();
        }
    }
}

/// Handles the refusal of the first frame.
fn refused(
    staging: &mut FrameStaging,
    error: &io::Error,
    stats: &mut PortStats,
    failed: &mut impl FnMut(TxFailure),
) -> Outcome {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    match errno {
        libc::EINTR => return Outcome::Again,
        libc::EAGAIN => {
            stats.tx_blocked += 1;
            return Outcome::Blocked;
        }
        _ => {}
    }
    let Some(run) = staging.front() else { return Outcome::Again };
    if run.datagrams > 1 && run.split.is_none() && refuses_segmentation(errno) {
        run.split = Some(0);
        return Outcome::Again;
    }
    // ENOBUFS and the like: dropped on the way (a full queueing discipline). The port does not
    // try again: the transport repairs losses, at its own pace.
    let lost = run.datagrams - run.split.unwrap_or(0);
    stats.tx_failed += u64::from(lost);
    failed(TxFailure { path: run.path, datagrams: u32::from(lost), errno });
    staging.pop();
    Outcome::Again
}

/// Whether the run might pass as single frames.
fn refuses_segmentation(errno: i32) -> bool {
    matches!(errno, libc::EINVAL | libc::EMSGSIZE | libc::EIO | libc::EOPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::packet::vnet::{self, Incoming};
    use crate::port::contract::{PathId, PathSpec};
    use crate::port::headers::{FrameTemplate, parse_frame};

    /// A kernel with scripted answers that takes `room` frames in all.
    struct Script {
        answer: fn(Incoming) -> i32,
        room: usize,
        taken: Vec<(Incoming, u16, usize)>,
        stats: PortStats,
    }

    impl Script {
        fn new(answer: fn(Incoming) -> i32, room: usize) -> Self {
            Self { answer, room, taken: Vec::new(), stats: PortStats::default() }
        }
    }

    impl FrameSink for Script {
        fn send<'a>(&mut self, frames: impl Iterator<Item = [&'a [u8]; 2]>) -> io::Result<usize> {
            let mut sent = 0;
            for [headers, payload] in frames {
                let (vnet, ethernet) = headers.split_first_chunk().expect("a virtio header");
                let frame = [ethernet, payload].concat();
                let parsed = parse_frame(&frame).expect("a valid frame");
                let kind = vnet::incoming(vnet);
                let errno = if self.room == 0 { libc::EAGAIN } else { (self.answer)(kind) };
                if errno != 0 && sent == 0 {
                    return Err(io::Error::from_raw_os_error(errno));
                }
                if errno != 0 {
                    break;
                }
                let (id, _) = parsed.headers.ip_id.expect("IPv4");
                self.taken.push((kind, id, parsed.payload.len()));
                self.room -= 1;
                sent += 1;
            }
            Ok(sent)
        }

        fn send_one(&mut self, frame: &[u8]) -> io::Result<()> {
            self.send(std::iter::once(frame.split_at(vnet::VNET_LEN).into())).map(drop)
        }
    }

    fn stage(staging: &mut FrameStaging, path: u32, datagrams: usize) {
        let spec = PathSpec {
            local: "10.0.0.1".parse().expect("address"),
            remote: "10.0.0.2".parse().expect("address"),
            src_port: 0,
            tos: 0,
            ttl: 64,
            flow_label: 0,
        };
        let template = FrameTemplate::new([2; 6], [4; 6], &spec, 49152).expect("one family");
        staging.begin(PathId(path), 100, &template, 10).expect("room");
        staging.commit();
        for _ in 1..datagrams {
            staging.grow(100).expect("room");
            staging.commit();
        }
    }

    fn send(
        sender: &mut Sender,
        kernel: &mut Script,
        staging: &mut FrameStaging,
    ) -> Vec<TxFailure> {
        let mut failures = Vec::new();
        let mut stats = kernel.stats;
        sender.send(kernel, staging, &mut stats, &mut |failure| failures.push(failure));
        kernel.stats = stats;
        failures
    }

    #[test]
    fn runs_that_the_kernel_does_not_segment_leave_as_single_frames() {
        let (mut sender, mut staging) = (Sender::new(true), FrameStaging::new());
        stage(&mut staging, 1, 1);
        stage(&mut staging, 2, 3);
        stage(&mut staging, 3, 2);
        let answer = |kind| if kind == Incoming::Single { 0 } else { libc::EINVAL };
        let mut kernel = Script::new(answer, 3);
        assert_eq!(send(&mut sender, &mut kernel, &mut staging), []);
        assert!(!staging.is_empty() && kernel.stats.tx_blocked == 1, "blocked in mid-run");
        kernel.room = 100;
        assert_eq!(send(&mut sender, &mut kernel, &mut staging), []);
        let ids: Vec<u16> = kernel.taken.iter().map(|(_, id, _)| *id).collect();
        assert_eq!(ids, [10, 10, 11, 12, 10, 11]);
        assert!(kernel.taken.iter().all(|(kind, _, len)| (*kind, *len) == (Incoming::Single, 100)));
        assert_eq!((kernel.stats.tx_datagrams, kernel.stats.tx_runs), (6, 6));
        assert_eq!(sender.segments_max(), 1, "it does not try again");
    }

    #[test]
    fn what_cannot_be_sent_at_all_is_reported_once_and_dropped() {
        let (mut sender, mut staging) = (Sender::new(true), FrameStaging::new());
        stage(&mut staging, 1, 3);
        stage(&mut staging, 2, 1);
        let mut kernel = Script::new(|_| libc::EINVAL, 9);
        let failures = send(&mut sender, &mut kernel, &mut staging);
        let want = [(1, 3), (2, 1)].map(|(path, datagrams)| TxFailure {
            path: PathId(path),
            datagrams,
            errno: libc::EINVAL,
        });
        assert_eq!(failures, want);
        assert!(staging.is_empty() && kernel.stats.tx_failed == 4);
        assert_eq!(sender.segments_max(), SEGMENTS_MAX, "segmentation was not to blame");
    }

    /// The rest of the run counts as lost, and is reported, once.
    #[test]
    fn a_run_that_fails_in_its_middle_counts_each_datagram_once() {
        for taken in 0..5 {
            let (mut sender, mut staging) = (Sender::new(true), FrameStaging::new());
            stage(&mut staging, 1, 5);
            stage(&mut staging, 2, 1);
            let answer = |kind| if kind == Incoming::Single { 0 } else { libc::EMSGSIZE };
            let mut kernel = Script::new(answer, taken);
            assert_eq!(send(&mut sender, &mut kernel, &mut staging), []);
            assert!(!staging.is_empty(), "it is full after {taken}");
            (kernel.answer, kernel.room) = (|_| libc::ENOBUFS, 100);
            let failures = send(&mut sender, &mut kernel, &mut staging);
            let told: Vec<_> = failures.iter().map(|f| (f.path.0, f.datagrams)).collect();
            assert_eq!(told, [(1, 5 - taken as u32), (2, 1)]);
            assert_eq!(kernel.stats.tx_failed, 6 - taken as u64);
            let PortStats { tx_runs, tx_datagrams, tx_bytes, .. } = kernel.stats;
            assert_eq!(
                [tx_runs, tx_datagrams, tx_bytes],
                [1, 1, 100].map(|each| each * taken as u64)
            );
            assert!(staging.is_empty());
        }
    }

    #[test]
    fn a_full_queue_drops_and_is_not_retried() {
        let (mut sender, mut staging) = (Sender::new(true), FrameStaging::new());
        stage(&mut staging, 1, 3);
        let mut kernel = Script::new(|_| libc::ENOBUFS, 9);
        let failures = send(&mut sender, &mut kernel, &mut staging);
        assert_eq!((failures.len(), failures[0].errno), (1, libc::ENOBUFS));
        assert!(staging.is_empty());
    }

    #[test]
    fn many_runs_leave_in_order() {
        let (mut sender, mut staging) = (Sender::new(true), FrameStaging::new());
        (0..150).for_each(|i| stage(&mut staging, i, 1 + i as usize % 3));
        let mut kernel = Script::new(|_| 0, 1000);
        assert_eq!(send(&mut sender, &mut kernel, &mut staging), []);
        let sizes: Vec<usize> = kernel.taken.iter().map(|(_, _, len)| *len).collect();
        assert_eq!(sizes, (0..150).map(|i| 100 * (1 + i % 3)).collect::<Vec<_>>());
    }
}
