//! The model beside the engines: the requests of each end of a connection, and their progress.

use std::collections::VecDeque;

use rocinante_stack::cm::ConnId;
use rocinante_stack::mem::{Access, AtomicOp};
use rocinante_stack::types::{Key, Mtu, Qpn};
use rocinante_stack::verbs::{AhId, QpType, WcOpcode, WcStatus};

use crate::marks::Marks;
use crate::memory::LONGEST;
use crate::windows::Pane;

/// Index of an end among all. The other end of its connection differs only in the lowest bit.
pub(crate) type EndId = usize;

pub(crate) const fn peer(end: EndId) -> EndId {
    end ^ 1
}

/// A range of a host's arena.
pub(crate) type Piece = (u64, u32);

/// The operation of a request, with places in the arena of the peer's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Send {
        imm: Option<[u8; 4]>,
    },
    /// A datagram, with the Q_Key that it carries.
    Datagram {
        to: EndId,
        qkey: u32,
        imm: Option<[u8; 4]>,
    },
    Write {
        at: u64,
        imm: Option<[u8; 4]>,
    },
    Read {
        at: u64,
    },
    Atomic {
        at: u64,
        op: AtomicOp,
    },
    AtomicWrite {
        at: u64,
    },
    Flush,
    /// SEND that invalidates a window; if `wrong`, there is no such window.
    SendInv {
        key: Key,
        wrong: bool,
    },
    /// Bind or invalidate the end's own window: nothing is sent.
    Bind,
    Invalidate,
}

impl Op {
    /// Whether the engine places its data in a receive.
    pub(crate) const fn is_send(self) -> bool {
        matches!(self, Self::Send { .. } | Self::SendInv { .. })
    }

    /// Whether nothing is sent.
    pub(crate) const fn is_local(self) -> bool {
        matches!(self, Self::Bind | Self::Invalidate)
    }
}

/// A posted request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) op: Op,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: u32,
    /// The bytes that it sends.
    pub(crate) data: Vec<u8>,
    /// The place of its result.
    pub(crate) list: Vec<Piece>,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    /// Packets of the stream before this request, and its own packets.
    pub(crate) first: u64,
    pub(crate) packets: u64,
    /// A bad request: it must end with this status, and no part of it may be executed.
    pub(crate) bad: Option<WcStatus>,
    /// Number of its bytes that may be executed all the same: those of a WRITE that may be split,
    /// if only its end is outside.
    pub(crate) overruns: u32,
    /// The key of the window through which it goes.
    pub(crate) through: Option<Key>,
    /// That window shows nothing any more: parts not executed yet must not be executed.
    pub(crate) void: bool,
    /// Other statuses it may end with, because memory or receives have changed since.
    pub(crate) excuses: Vec<WcStatus>,
    /// The value that its atomic found.
    pub(crate) found: Option<u64>,
    /// Bytes of the result that were placed.
    pub(crate) answered: u32,
}

impl Request {
    /// Bytes of its result.
    pub(crate) fn answer_len(&self) -> u32 {
        match self.op {
            Op::Read { .. } => self.len,
            Op::Atomic { .. } => 8,
            _ => 0,
        }
    }

    /// Whether its execution by the peer is invisible: no byte, no completion.
    fn is_silent(&self) -> bool {
        let silent = match self.op {
            Op::Read { .. } | Op::Flush | Op::Bind | Op::Invalidate => true,
            Op::Write { imm, .. } => imm.is_none() && self.len == 0,
            _ => false,
        };
        silent && self.bad.is_none()
    }

    pub(crate) fn immediate(&self) -> Option<[u8; 4]> {
        match self.op {
            Op::Send { imm } | Op::Datagram { imm, .. } | Op::Write { imm, .. } => imm,
            _ => None,
        }
    }
}

/// The requests of one end in one life of its connection, in order.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) generation: u32,
    /// Requests that are not yet both executed and completed, and the number of the oldest.
    requests: VecDeque<Request>,
    base: u64,
    /// Number of the next request that the peer executes, and of its bytes that were placed.
    pub(crate) exec: u64,
    pub(crate) exec_bytes: u32,
    /// Number of the next request to complete.
    pub(crate) popped: u64,
    /// Number of the next datagram to leave.
    pub(crate) left: u64,
    pub(crate) packets: u64,
    /// Packets that left, in order.
    pub(crate) sent: u64,
    /// This number of requests must succeed in the end.
    pub(crate) proof: u64,
    /// Number of requests that the engine reported as retired.
    pub(crate) retired: u64,
    /// No further request completes.
    abandoned: bool,
}

impl Stream {
    pub(crate) fn new(generation: u32) -> Self {
        Self { generation, ..Self::default() }
    }

    /// Number of the next request to be posted.
    pub(crate) fn next(&self) -> u64 {
        self.base + self.requests.len() as u64
    }

    pub(crate) fn outstanding(&self) -> u64 {
        if self.abandoned { 0 } else { self.next() - self.popped }
    }

    pub(crate) fn push(&mut self, request: Request) {
        self.packets += request.packets;
        self.requests.push_back(request);
    }

    fn index(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.base)?).ok()
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Request> {
        self.requests.get(self.index(number)?)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        let index = self.index(number)?;
        self.requests.get_mut(index)
    }

    /// Requests not yet executed or not yet completed.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter()
    }

    /// Requests not yet executed that take a receive.
    pub(crate) fn receives_due(&self) -> u64 {
        let takes = |request: &&Request| {
            request.op.is_send() || matches!(request.op, Op::Write { imm: Some(_), .. })
        };
        let open = (self.exec..self.next()).filter_map(|number| self.get(number));
        open.filter(takes).count() as u64
    }

    /// As [`pending`](Self::pending), mutable.
    pub(crate) fn pending_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.requests.iter_mut()
    }

    /// Skips requests whose execution changes nothing that the model sees. Returns the number of
    /// the first request that it did not skip.
    pub(crate) fn frontier(&mut self) -> u64 {
        while self.exec_bytes == 0 && self.get(self.exec).is_some_and(Request::is_silent) {
            self.exec += 1;
        }
        self.exec
    }

    /// Number of the request with the packet that is `psn` packets behind the stream's first.
    pub(crate) fn at_packet(&self, psn: u64) -> Option<u64> {
        let holds =
            |request: &&Request| (request.first..request.first + request.packets).contains(&psn);
        // Newest first: most packets belong to it.
        let index = self.requests.iter().rev().position(|request| holds(&request))?;
        Some(self.next() - 1 - index as u64)
    }

    /// Request `number` failed or was flushed: its remaining packets do not leave.
    pub(crate) fn skip(&mut self, number: u64) {
        if let Some(request) = self.get(number) {
            self.sent = self.sent.max(request.first + request.packets);
        }
    }

    /// Outstanding requests never complete: their queue pair is gone.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// The request `exec` was executed to its end.
    pub(crate) fn executed(&mut self) {
        self.exec += 1;
        self.exec_bytes = 0;
        self.prune();
    }

    /// Forgets requests that are both executed and completed.
    pub(crate) fn prune(&mut self) {
        while self.base < self.exec.min(self.popped) && self.requests.pop_front().is_some() {
            self.base += 1;
        }
    }
}

/// A posted receive.
#[derive(Debug, Clone)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) list: Vec<Piece>,
    pub(crate) room: u32,
    /// Its memory is not registered, or not with its key.
    pub(crate) bad: bool,
    /// Its place in a shared queue's zone.
    pub(crate) slot: u64,
}

impl Receive {
    /// Whether it cannot hold any message.
    pub(crate) fn is_spoilt(&self) -> bool {
        self.bad || u64::from(self.room) < LONGEST
    }
}

/// The state of an end's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// There is none, or it is not connected.
    Absent,
    Ready,
    /// It is in the error state.
    Broken,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) host: usize,
    /// The index of its stretch in the host's arena.
    pub(crate) index: usize,
    pub(crate) pd: u32,
    /// The value that its queue pair's number is derived from.
    pub(crate) home: u32,
    /// The lower half of its queue pair's number: `home`, unless a connection keeps that number.
    pub(crate) low: u32,
    /// The number of the queue pair that it is connected to.
    pub(crate) dest: u32,
    pub(crate) marks: Marks,
    /// Its connection, if the connection manager makes it.
    pub(crate) conn: Option<ConnId>,
    /// Its queue pair's number, while there is one.
    pub(crate) qpn: Option<Qpn>,
    pub(crate) generation: u32,
    pub(crate) terms: Terms,
    pub(crate) phase: Phase,
    pub(crate) keys: [Option<Key>; 5],
    /// A key that was deregistered.
    pub(crate) stale: Option<Key>,
    /// Its requests in this life, and those in an earlier life that the peer is still in.
    pub(crate) streams: VecDeque<Stream>,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) receives_posted: u64,
    pub(crate) receives_retired: u64,
    pub(crate) receives_popped: u64,
    /// The shared queue of its host for its receives, and the receive that it took and has not
    /// completed.
    pub(crate) srq: Option<usize>,
    pub(crate) taken: Option<Receive>,
    /// Whether its queue pair reported that it takes no more receives.
    pub(crate) last_reached: bool,
    /// Whether its completion queue overflowed, and the queue pair has not reported that yet.
    pub(crate) overrun: bool,
    pub(crate) letters: Letters,
    /// Windows of type 1 and of type 2.
    pub(crate) panes: [Pane; 2],
    /// Why its queue pair may be broken.
    pub(crate) reason: Option<WcStatus>,
    /// Whether it must be checked after this call.
    pub(crate) touched: bool,
    /// Whether the request behind a READ of the window is fenced by it.
    pub(crate) fence: bool,
    /// Number of requests that the peer had executed when something was last posted.
    pub(crate) answered: u64,
    /// Until this time no receives are posted.
    pub(crate) starved_until: u64,
    /// It is in SQD.
    pub(crate) draining: bool,
    /// It is in SQE.
    pub(crate) stopped: bool,
}

impl End {
    pub(crate) fn stream(&self, generation: u32) -> Option<&Stream> {
        self.streams.iter().find(|stream| stream.generation == generation)
    }

    pub(crate) fn stream_mut(&mut self, generation: u32) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|stream| stream.generation == generation)
    }

    pub(crate) fn current(&mut self) -> Option<&mut Stream> {
        self.stream_mut(self.generation)
    }

    /// Receives that break with its queue pair.
    pub(crate) fn receives_held(&self) -> usize {
        self.receives.len() + usize::from(self.taken.is_some())
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.stream(self.generation).map_or(0, Stream::outstanding)
    }
}

/// Further state of a datagram end.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    /// Its address handles, by host.
    pub(crate) handles: Vec<Option<AhId>>,
    /// One that was destroyed.
    pub(crate) stale: Option<AhId>,
    /// Bytes placed of the incoming datagram.
    pub(crate) placed: u32,
    /// Whether it was accepted.
    pub(crate) arrived: bool,
    /// Number of datagrams that must arrive.
    pub(crate) coming: u64,
}

/// A connection, through all its lives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) qp_type: QpType,
    pub(crate) generation: u32,
    pub(crate) terms: Terms,
    /// One of its hosts crashed in its present life, so its queue pairs' numbers may be used again
    /// at once.
    pub(crate) crashed: bool,
    /// The connection manager makes it.
    pub(crate) managed: bool,
    /// Whether a new life is scheduled.
    pub(crate) rejoining: bool,
}

/// The terms of both ends for one life.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) mtu: Mtu,
    /// First PSN of each direction.
    pub(crate) psn: [u32; 2],
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    /// The rights that both ends grant.
    pub(crate) access: Access,
    /// For a reliable connection: mostly short WRITEs that answer each other, few of them signaled.
    pub(crate) terse: bool,
    /// The Q_Key of each end.
    pub(crate) qkey: [u32; 2],
}

/// The place of byte `offset` of a list, and the number of bytes that follow in the same piece.
pub(crate) fn locate(list: &[Piece], offset: u32) -> Option<(u64, u32)> {
    let mut skip = offset;
    for (at, len) in list {
        if skip < *len {
            return Some((at + u64::from(skip), len - skip));
        }
        skip -= len;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(op: Op, len: u32) -> Request {
        Request {
            id: 0,
            op,
            opcode: WcOpcode::Send,
            len,
            data: Vec::new(),
            list: Vec::new(),
            signaled: true,
            solicited: false,
            first: 0,
            packets: 1,
            bad: None,
            overruns: 0,
            through: None,
            void: false,
            excuses: Vec::new(),
            found: None,
            answered: 0,
        }
    }

    #[test]
    fn the_frontier_stops_at_what_can_be_seen_and_at_what_must_not_happen() {
        let mut stream = Stream::new(1);
        stream.push(request(Op::Read { at: 0 }, 100));
        stream.push(request(Op::Write { at: 0, imm: None }, 0));
        stream.push(request(Op::Send { imm: None }, 0));
        assert_eq!(stream.frontier(), 2);
        stream.executed();
        stream
            .push(Request { bad: Some(WcStatus::RemAccessErr), ..request(Op::Read { at: 0 }, 1) });
        assert_eq!(stream.frontier(), 3);
    }

    #[test]
    fn lists_are_walked() {
        let list = [(100, 10), (7, 0), (200, 5)];
        assert_eq!(locate(&list, 3), Some((103, 7)));
        assert_eq!(locate(&list, 10), Some((200, 5)));
        assert_eq!(locate(&list, 15), None);
    }
}
