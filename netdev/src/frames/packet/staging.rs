//! Runs of datagrams, collected in one buffer until the kernel gets them.
//!
//! The buffer fills from its start. Each run is room for headers, followed by the payloads of its
//! datagrams back to back, as the kernel wants a super-packet. Only the last run can grow. Once
//! everything has been sent the buffer is used from its start again, so that short bursts stay in
//! the cache.

use crate::frames::resolve::IP_ID_END;
use crate::port::contract::PathId;
use crate::port::headers::{FrameTemplate, HEADERS_MAX};
use crate::tuning::packet::{ARENA_RUNS, RUNS_MAX};

use super::vnet::{self, VNET_LEN};

/// The most payload bytes of a run.
pub(super) const RUN_BYTES_MAX: usize = 65_536;
/// Bytes of the buffer; a new run starts only where a full one fits, so that no run is cut short.
const ARENA_BYTES: usize = ARENA_RUNS * RUN_BYTES_MAX;
/// Payloads begin at multiples of a cache line.
const ALIGN: usize = 64;
/// The most datagrams of a run: a UDP socket sends this number since Linux 6.9, so that receivers
/// expect it, and the identifications end there, too. (Packet sockets have no limit of their own.)
pub(super) const SEGMENTS_MAX: u16 = IP_ID_END;

/// One super-packet, or one datagram.
#[derive(Debug, Clone)]
pub(super) struct FrameRun {
    pub(super) path: PathId,
    template: FrameTemplate,
    /// Where the payload begins in the buffer; the headers end there.
    start: usize,
    pub(super) bytes: usize,
    /// Payload bytes of every datagram but perhaps the last.
    segment: usize,
    pub(super) datagrams: u16,
    ip_id: u16,
    /// If the run is sent as single frames, the number of those already sent.
    pub(super) split: Option<u16>,
}

/// The headers of a single frame, with its virtio header.
pub(super) type HeaderBytes = [u8; VNET_LEN + HEADERS_MAX];

/// Runs waiting to be sent.
pub(super) struct FrameStaging {
    arena: Box<[u8]>,
    runs: Vec<FrameRun>,
    /// Runs before this one are gone.
    first: usize,
    /// Runs before this one have their headers written.
    sealed: usize,
    /// The last run may grow.
    open: bool,
    /// The slot handed out last.
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    len: usize,
    /// The run that it begins; `None` if it continues the last one.
    begins: Option<FrameRun>,
}

/// How large a run may become.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunLimits {
    pub(super) datagrams: u16,
    pub(super) bytes: usize,
}

impl FrameStaging {
    pub(super) fn new() -> Self {
        Self {
            arena: vec![0; ARENA_BYTES].into_boxed_slice(),
            runs: Vec::with_capacity(RUNS_MAX),
            first: 0,
            sealed: 0,
            open: false,
            pending: None,
        }
    }

    /// Whether a datagram of `len` bytes can join the last run: one of the same path and size, or
    /// the run's last. An empty datagram cannot, because it would not be a segment of the run.
    pub(super) fn can_grow(&self, path: PathId, len: usize, limits: RunLimits) -> bool {
        let Some(run) = self.runs.last().filter(|_| self.open) else { return false };
        run.path == path
            && (1..=run.segment).contains(&len)
            && run.datagrams < limits.datagrams
            && run.ip_id + run.datagrams < IP_ID_END
            && run.bytes + len <= limits.bytes
            && run.start + run.bytes + len <= self.arena.len()
    }

    /// Room for `len` bytes in the last run, where it [can grow](Self::can_grow); with the
    /// identification that the datagram will carry.
    pub(super) fn grow(&mut self, len: usize) -> Option<(&mut [u8], u16)> {
        let run = self.runs.last()?;
        // An IPv6 run has no identifications, and its first is 0.
        let ip_id = if run.template.is_ipv6() { 0 } else { run.ip_id + run.datagrams };
        let at = run.start + run.bytes;
        self.pending = Some(Pending { len, begins: None });
        Some((self.arena.get_mut(at..at + len)?, ip_id))
    }

    /// Room for `len` bytes in a new run, if there is any.
    pub(super) fn begin(
        &mut self,
        path: PathId,
        len: usize,
        template: &FrameTemplate,
        ip_id: u16,
    ) -> Option<&mut [u8]> {
        self.pending = None;
        let used = self.runs.last().map_or(0, |run| run.start + run.bytes);
        let start = (used + VNET_LEN + HEADERS_MAX).next_multiple_of(ALIGN);
        if self.runs.len() == RUNS_MAX || start + RUN_BYTES_MAX > self.arena.len() {
            return None;
        }
        let run = FrameRun {
            path,
            template: template.clone(),
            start,
            bytes: 0,
            segment: len,
            datagrams: 0,
            ip_id,
            split: None,
        };
        self.pending = Some(Pending { len, begins: Some(run) });
        Some(&mut self.arena[start..start + len])
    }

    /// Accepts the slot handed out last, and returns its path.
    pub(super) fn commit(&mut self) -> Option<PathId> {
        let Pending { len, begins } = self.pending.take()?;
        if let Some(run) = begins {
            self.runs.push(run);
        }
        let run = self.runs.last_mut()?;
        run.bytes += len;
        run.datagrams += 1;
        self.open = len == run.segment;
        Some(run.path)
    }

    /// Drops the slot handed out last, if it was not committed.
    pub(super) fn discard(&mut self) {
        self.pending = None;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == self.runs.len()
    }

    /// Renames the path of its runs to [`PathId::NONE`]; the last one is not to grow any more.
    pub(super) fn forget(&mut self, path: PathId) {
        self.open = false;
        let runs = self.runs[self.first..].iter_mut();
        runs.filter(|run| run.path == path).for_each(|run| run.path = PathId::NONE);
    }

    /// Whether runs of a path are not gone.
    pub(super) fn holds(&self, path: PathId) -> bool {
        self.runs[self.first..].iter().any(|run| run.path == path)
    }

    /// Writes the headers of all runs that have none yet.
    pub(super) fn seal(&mut self) {
        self.open = false;
        self.pending = None;
        for run in &self.runs[self.sealed..] {
            let headers = run.template.header_len();
            let begin = run.start - headers - VNET_LEN;
            run.write_headers(&mut self.arena[begin..run.start], run.bytes, run.ip_id, run.gso());
        }
        self.sealed = self.runs.len();
    }

    /// The first run that is not gone.
    pub(super) fn front(&mut self) -> Option<&mut FrameRun> {
        self.runs.get_mut(self.first)
    }

    /// The runs not gone that leave whole, up to the first that does not: headers and payload.
    pub(super) fn whole(&self) -> impl Iterator<Item = [&[u8]; 2]> {
        self.runs[self.first..self.sealed].iter().take_while(|run| run.split.is_none()).map(|run| {
            let begin = run.start - run.template.header_len() - VNET_LEN;
            let end = run.start + run.bytes;
            [&self.arena[begin..run.start], &self.arena[run.start..end]]
        })
    }

    /// The frame of the only run that is not gone, if there is one and it leaves whole.
    pub(super) fn only(&self) -> Option<&[u8]> {
        let [run] = self.runs.get(self.first..self.sealed)? else { return None };
        let begin = run.start - run.template.header_len() - VNET_LEN;
        run.split.is_none().then(|| &self.arena[begin..run.start + run.bytes])
    }

    /// The frames of the front run that leave singly and are not gone; headers are written to
    /// `headers`, which bounds their number.
    pub(super) fn singles<'a>(
        &'a self,
        headers: &'a mut [HeaderBytes],
    ) -> impl Iterator<Item = [&'a [u8]; 2]> {
        let run = self.runs.get(self.first);
        let done = run.and_then(|run| run.split).unwrap_or(0);
        headers.iter_mut().zip(done..).map_while(move |(out, index)| {
            let run = run.filter(|run| index < run.datagrams)?;
            let [from, to] = [index, index + 1].map(|count| run.start + run.bytes_of(count));
            let out = &mut out[..VNET_LEN + run.template.header_len()];
            run.write_headers(out, to - from, run.ip_id + index, None);
            Some([&*out, &self.arena[from..to]])
        })
    }

    /// Forgets the front run.
    pub(super) fn pop(&mut self) {
        self.first += 1;
        if self.first >= self.runs.len() {
            self.runs.clear();
            (self.first, self.sealed) = (0, 0);
            self.open = false;
        }
    }
}

impl FrameRun {
    /// The payload bytes of its first `count` datagrams.
    pub(super) fn bytes_of(&self, count: u16) -> usize {
        (usize::from(count) * self.segment).min(self.bytes)
    }

    /// The segment size, if it has more than one datagram.
    fn gso(&self) -> Option<u16> {
        (self.datagrams > 1).then_some(self.segment as u16)
    }

    /// Writes virtio, Ethernet, IP and UDP headers for `payload` bytes; `out` is exactly as long.
    fn write_headers(&self, out: &mut [u8], payload: usize, ip_id: u16, gso: Option<u16>) {
        let template = &self.template;
        // A single IPv4 datagram goes without UDP checksum, as the ICRC covers more.
        let checksum = template.is_ipv6() || gso.is_some();
        let vnet = vnet::outgoing(template.header_len(), template.udp_offset(), checksum, gso);
        out[..VNET_LEN].copy_from_slice(&vnet);
        if checksum {
            template.write_partial(&mut out[VNET_LEN..], payload, ip_id);
        } else {
            template.write(&mut out[VNET_LEN..], payload, ip_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::contract::PathSpec;
    use crate::port::headers::parse_frame;

    const LIMITS: RunLimits = RunLimits { datagrams: 64, bytes: 65_000 };

    fn template() -> FrameTemplate {
        let spec = PathSpec {
            local: "10.0.0.1".parse().expect("address"),
            remote: "10.0.0.2".parse().expect("address"),
            src_port: 0,
            tos: 0,
            ttl: 64,
            flow_label: 0,
        };
        FrameTemplate::new([2; 6], [4; 6], &spec, 49152).expect("one family")
    }

    /// Commits a datagram of `len` bytes of `fill`; returns its identification.
    fn add(staging: &mut FrameStaging, path: u32, len: usize, fill: u8) -> Option<u16> {
        let path = PathId(path);
        staging.discard();
        if staging.can_grow(path, len, LIMITS) {
            let (buf, ip_id) = staging.grow(len)?;
            buf.fill(fill);
            staging.commit();
            return Some(ip_id);
        }
        staging.begin(path, len, &template(), 7)?.fill(fill);
        staging.commit();
        Some(7)
    }

    #[test]
    fn datagrams_of_one_size_and_path_become_one_run() {
        let mut staging = FrameStaging::new();
        let ids: Vec<_> = [100, 100, 40].map(|len| add(&mut staging, 1, len, 9)).into();
        assert_eq!(ids, [Some(7), Some(8), Some(9)]);
        assert_eq!(add(&mut staging, 1, 40, 8), Some(7), "a short one ends its run");
        assert_eq!(add(&mut staging, 2, 40, 7), Some(7), "another path");
        assert_eq!(add(&mut staging, 2, 41, 6), Some(7), "a longer one");
        staging.seal();
        let sizes: Vec<_> = staging.whole().map(|[_, payload]| payload.len()).collect();
        assert_eq!(sizes, [240, 40, 40, 41]);
        let [headers, payload] = staging.whole().next().expect("a run");
        let frame = [&headers[VNET_LEN..], payload].concat();
        let parsed = parse_frame(&frame).expect("valid");
        assert_eq!(parsed.payload, [9; 240]);
        assert_eq!(parsed.headers.ip_id, Some((7, 0x4000)));
    }

    #[test]
    fn an_empty_datagram_is_a_run_of_its_own() {
        let mut staging = FrameStaging::new();
        for len in [0, 0, 100, 100, 0, 100, 0] {
            add(&mut staging, 1, len, 1).expect("room");
        }
        let runs: Vec<_> = staging.runs.iter().map(|run| (run.bytes, run.datagrams)).collect();
        assert_eq!(runs, [(0, 1), (0, 1), (200, 2), (0, 1), (100, 1), (0, 1)]);
        assert!(staging.runs.iter().all(|run| run.gso().is_none_or(|segment| segment > 0)));
    }

    #[test]
    fn a_slot_that_is_not_committed_leaves_no_trace() {
        let mut staging = FrameStaging::new();
        assert_eq!(add(&mut staging, 1, 100, 1), Some(7));
        staging.grow(100).expect("room").0.fill(0xee);
        staging.begin(PathId(2), 9, &template(), 3).expect("room").fill(0xee);
        staging.discard();
        assert_eq!(staging.commit(), None);
        assert_eq!(add(&mut staging, 1, 100, 2), Some(8));
        staging.seal();
        let payloads: Vec<_> = staging.whole().map(|[_, p]| p.to_vec()).collect();
        assert_eq!(payloads, [[vec![1; 100], vec![2; 100]].concat()]);
    }

    #[test]
    fn it_fills_up_and_empties() {
        let mut staging = FrameStaging::new();
        let mut count = 0;
        while add(&mut staging, 1, 4112, 5).is_some() {
            count += 1;
        }
        staging.seal();
        let runs: Vec<_> = staging.whole().map(|[_, payload]| payload.len()).collect();
        assert_eq!(runs, [15 * 4112; 6], "none is cut short by the end of the buffer");
        assert_eq!(count, 6 * 15);
        while staging.front().is_some() {
            staging.pop();
        }
        assert!(staging.is_empty() && add(&mut staging, 1, 4112, 5) == Some(7));
        let mut small = FrameStaging::new();
        let runs = (0..).take_while(|i| add(&mut small, *i, 64, 1).is_some()).count();
        assert_eq!(runs, RUNS_MAX);
    }

    #[test]
    fn a_run_can_leave_as_single_frames() {
        let mut staging = FrameStaging::new();
        for (i, len) in [64, 64, 64, 10].into_iter().enumerate() {
            add(&mut staging, 1, len, i as u8);
        }
        staging.seal();
        staging.front().expect("a run").split = Some(1);
        let mut headers = [[0; VNET_LEN + HEADERS_MAX]; 8];
        let frames: Vec<Vec<u8>> =
            staging.singles(&mut headers).map(|[h, p]| [&h[VNET_LEN..], p].concat()).collect();
        let got: Vec<_> = frames
            .iter()
            .map(|frame| {
                let frame = parse_frame(frame).expect("valid");
                (frame.headers.ip_id, frame.payload.to_vec())
            })
            .collect();
        let want = [(8, 1, 64), (9, 2, 64), (10, 3, 10)]
            .map(|(id, fill, len)| (Some((id, 0x4000)), vec![fill; len]));
        assert_eq!(got, want);
    }
}
