//! Connections by the connection managers, as the programs see them: caller, callee and purpose,
//! the answers, and the progress of each side.

use std::collections::BTreeMap;

use rocinante_stack::cm::{CmConfig, ConnId, ListenerId, QpSide};
use rocinante_stack::types::{Mtu, Qpn};
use rocinante_stack::wire::cm::{CommId, PortSpace, RejReason, ServiceId, Transport, code_to_ns};

use crate::random::Random;

/// Index of a call among all of a round.
pub(crate) type CallId = usize;

/// Ports with listeners; the next port never has one.
pub(crate) const SERVICES: usize = 2;

/// The service of a port.
pub(crate) const fn service(at: usize) -> ServiceId {
    ServiceId::of_port(PortSpace::Tcp, 7000 + at as u16)
}

/// The callee's decision on a call; only calls of the proof have a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    Accept,
    Reject,
    /// There is no listener.
    Nobody,
}

/// A requested connection.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) from: usize,
    /// The life of its host.
    pub(crate) boot: u32,
    pub(crate) to: usize,
    pub(crate) conn: ConnId,
    /// The GUID of its channel adapter.
    pub(crate) guid: u64,
    pub(crate) service: usize,
    pub(crate) side: QpSide,
    pub(crate) transport: Transport,
    pub(crate) mtu: Mtu,
    pub(crate) ack_timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) source_port: u16,
    pub(crate) private: Vec<u8>,
    pub(crate) plan: Option<Plan>,
    /// The end that the call connects, and the life for which it does.
    pub(crate) end: Option<(usize, u32)>,
    pub(crate) accepts: Vec<Accepted>,
    /// Reasons and words of rejections by the callee, and by the caller.
    pub(crate) refusals: [Vec<(RejReason, Vec<u8>)>; 2],
    /// The reason why it ended for the caller before it was established.
    pub(crate) refused: Option<RejReason>,
}

/// An answer to a call. A duplicated request may get two.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) guid: u64,
    pub(crate) boot: u32,
    pub(crate) conn: ConnId,
    pub(crate) side: QpSide,
    pub(crate) private: Vec<u8>,
}

/// How far a side of a connection is, as its program sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It has sent a request.
    Asking,
    /// It has received a request.
    Asked,
    Accepted,
    /// Its request was accepted.
    Replied,
    Established,
}

/// One side of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Talk {
    pub(crate) call: CallId,
    pub(crate) active: bool,
    pub(crate) peer: usize,
    pub(crate) step: Step,
    /// The time of that step.
    pub(crate) since: u64,
    /// Its queue pair; 0 while it has none.
    pub(crate) qpn: Qpn,
    /// The peer's queue pair, communication id and adapter, as far as they are known.
    pub(crate) far_qpn: Qpn,
    pub(crate) far_id: CommId,
    pub(crate) far_guid: u64,
    /// The index of the call's answer.
    pub(crate) accept: Option<usize>,
    pub(crate) listener: Option<ListenerId>,
    /// The program has forgotten it.
    pub(crate) given_up: bool,
    /// The program is ending it.
    pub(crate) leaving: bool,
    /// The program has its end event.
    pub(crate) ended: bool,
    /// The time of the last of these three.
    pub(crate) over_at: u64,
    /// A late copy of another request or reply names the peer's queue pair, as if the peer had
    /// forgotten the connection.
    pub(crate) mistaken: bool,
}

impl Talk {
    pub(crate) fn new(call: CallId, active: bool, peer: usize, step: Step, now: u64) -> Self {
        Self {
            call,
            active,
            peer,
            step,
            since: now,
            qpn: Qpn::default(),
            far_qpn: Qpn::default(),
            far_id: CommId(0),
            far_guid: 0,
            accept: None,
            listener: None,
            given_up: false,
            leaving: false,
            ended: false,
            over_at: 0,
            mistaken: false,
        }
    }

    /// Whether it ends, or has ended.
    pub(crate) const fn is_over(&self) -> bool {
        self.given_up || self.leaving || self.ended
    }

    /// Whether the queue pairs of both sides may have sent: then the number must wait.
    pub(crate) const fn was_open(&self) -> bool {
        matches!(self.step, Step::Accepted | Step::Established)
    }
}

/// A listener of a host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listening {
    pub(crate) id: ListenerId,
    pub(crate) backlog: usize,
}

/// The meaning of an event, for the program that expected it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    Request(CallId),
    Replied,
    Established,
    Ended,
}

/// The programs of a host that use its connection manager.
#[derive(Debug)]
pub(crate) struct CmUsers {
    pub(crate) config: CmConfig,
    /// How often the host has started.
    pub(crate) boot: u32,
    pub(crate) listening: [Option<Listening>; SERVICES],
    pub(crate) talks: BTreeMap<ConnId, Talk>,
    /// Amount of numbers for queue pairs that do not really exist, and the rest of the programs
    /// between two turns.
    pub(crate) numbers: u32,
    pub(crate) pause: u64,
    /// Events of the call that is being judged.
    pub(crate) notices: Vec<(ConnId, Notice)>,
    /// Ended connections of real queue pairs, with programs that do not know it yet: the call, and
    /// whether this side requested it.
    pub(crate) farewells: Vec<(ConnId, CallId, bool)>,
    /// The host's calls of the proof.
    pub(crate) proof: Vec<CallId>,
}

/// The first number of a queue pair that does not really exist.
const FIRST: u32 = 0x10;
/// The upper byte of its engine's queue pair numbers. A second shard's has the next one.
pub(crate) const SLOT: u8 = 3;
/// The upper byte of the numbers of queue pairs that do not really exist. No engine gives them out:
/// one that looks for a free number may try any number of its slot.
const ELSEWHERE: u8 = SLOT + 2;

impl CmUsers {
    pub(crate) fn new(host: usize, crowd: bool, random: &mut Random) -> Self {
        let mut code = |low: u64, high: u64| random.range(low, high) as u8;
        let config = CmConfig {
            ca_guid: host as u64 + 1000,
            response_timeout: code(3, 7),
            packet_lifetime: code(2, 5),
            max_retries: code(2, 8),
            // Long enough for an MRA to lengthen the wait.
            service_timeout: code(8, 11),
            max_connections: random.of(&[40, 1024]),
            ..CmConfig::default()
        };
        // A crowd has more than 40 connections that last.
        let max_connections = if crowd { 1024 } else { config.max_connections };
        let config = CmConfig { max_connections, ..config };
        Self {
            config,
            boot: 0,
            listening: [None; SERVICES],
            talks: BTreeMap::new(),
            numbers: random.of(&[1, 3, 8]),
            pause: random.of(&[20_000, 300_000, 1_000_000]),
            notices: Vec::new(),
            farewells: Vec::new(),
            proof: Vec::new(),
        }
    }

    /// The programs lose all their state.
    pub(crate) fn crash(&mut self) {
        self.talks.clear();
        self.listening = [None; SERVICES];
        self.notices.clear();
        self.farewells.clear();
    }

    /// A number that no connection uses.
    pub(crate) fn free_number(&self, random: &mut Random) -> Option<Qpn> {
        let all =
            (FIRST..FIRST + self.numbers).map(|low| Qpn::new(u32::from(ELSEWHERE) << 16 | low));
        let taken = |qpn: &Qpn| self.talks.values().any(|talk| talk.qpn == *qpn);
        let free: Vec<Qpn> = all.filter(|qpn| !taken(qpn)).collect();
        (!free.is_empty()).then(|| random.of(&free))
    }

    /// Requests that count towards the backlog of a listener.
    pub(crate) fn pending(&self, listener: ListenerId) -> usize {
        let waits = |talk: &&Talk| {
            let open = matches!(talk.step, Step::Asked | Step::Accepted) && !talk.is_over();
            open && talk.listener == Some(listener)
        };
        self.talks.values().filter(waits).count()
    }

    /// Whether a request for this port must be refused because the host or the backlog is full.
    pub(crate) fn is_full(&self, listening: Listening) -> bool {
        self.talks.len() >= self.config.max_connections
            || self.pending(listening.id) >= listening.backlog
    }

    /// Connections with this queue pair of this peer, except those of `call`.
    pub(crate) fn with_peer(&self, peer: usize, qpn: Qpn, call: CallId) -> Vec<(ConnId, &Talk)> {
        let with = |(_, talk): &(&ConnId, &Talk)| {
            (talk.peer, talk.far_qpn) == (peer, qpn) && talk.call != call
        };
        self.talks.iter().filter(with).map(|(conn, talk)| (*conn, talk)).collect()
    }

    /// How long it waits for an answer before it repeats a message, nanoseconds.
    pub(crate) fn interval(&self) -> u64 {
        2 * code_to_ns(self.config.packet_lifetime) + code_to_ns(self.config.response_timeout)
    }

    /// How long it repeats a request without an answer before it gives up, at least, nanoseconds.
    pub(crate) fn asks_for(&self) -> u64 {
        (u64::from(self.config.max_retries) + 1) * self.interval()
    }

    /// How long a program may take to decide, nanoseconds.
    pub(crate) fn patience(&self) -> u64 {
        code_to_ns(self.config.service_timeout)
    }
}

/// Whether a message's private data `told` is the other program's words `said`, followed by zeros.
pub(crate) fn carries(told: &[u8], said: &[u8]) -> bool {
    told.strip_prefix(said).is_some_and(|rest| rest.iter().all(|byte| *byte == 0))
}

/// Words of a program: the numbers of the call and of the answer, and random bytes up to `room`.
pub(crate) fn words(call: CallId, answer: usize, room: usize, random: &mut Random) -> Vec<u8> {
    let mut words = vec![0; 8 + random.index(room - 7)];
    random.fill(&mut words);
    words[..4].copy_from_slice(&(call as u32).to_be_bytes());
    words[4..8].copy_from_slice(&(answer as u32).to_be_bytes());
    words
}

/// The call and the answer in these words.
pub(crate) fn read_words(words: &[u8]) -> Option<(CallId, usize)> {
    let word = |at: usize| words.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
    Some((word(0)? as usize, word(4)? as usize))
}

#[cfg(test)]
mod tests {
    use rocinante_stack::mem::PdId;
    use rocinante_stack::verbs::{CqId, QpType};
    use rocinante_stack::{Engine, EngineConfig, QpInit};

    use super::*;

    #[test]
    fn no_engine_gives_out_the_number_of_a_queue_pair_that_does_not_exist() {
        let mut random = Random::new(1);
        let mut users = CmUsers::new(0, true, &mut random);
        users.numbers = 16;
        let init = QpInit {
            qp_type: QpType::Rc,
            pd: PdId(1),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            sq_sig_all: false,
            cookie: 0,
            context: 0,
        };
        for slot in [SLOT, SLOT + 1] {
            let mut engine = Engine::new(EngineConfig { qpn_slot: slot, ..Default::default() });
            for _ in 0..100 {
                let wanted = users.free_number(&mut random).expect("there are 16");
                let given = engine.create_qp(&init, wanted.value());
                assert!(given.is_some_and(|given| given != wanted), "{given:?}");
            }
        }
    }
}
