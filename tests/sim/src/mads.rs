//! Incoming management datagrams: the model decides on the effects of each before the connection
//! manager gets it.

use rocinante_stack::cm::ConnId;
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::MadHeader;
use rocinante_stack::wire::cm::{CmMessage, CommId, RejReason, Rep, Req};
use rocinante_stack::wire::mad::MAD_LEN;

use crate::check::Verdict;
use crate::network::Packet;
use crate::talk::{CallId, Notice, SERVICES, Step, Talk, read_words, service};
use crate::world::World;

/// Offset of a management datagram in its packet: behind BTH and DETH.
const HEADERS: usize = 20;
/// Length of the IP header before the program's words in a request to a port.
const IP_HEADER: usize = 36;

const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREP: u16 = 0x16;

/// The right effects of a datagram.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// It is damaged, so it has no effect.
    nothing: bool,
    /// The program gets this request; with `None`, it gets no request.
    request: Option<CallId>,
    /// The request may be refused as well.
    optional: bool,
    /// This connection gets this event.
    notices: Option<(ConnId, Notice)>,
    /// These connections end, unless they have ended.
    over: Vec<ConnId>,
    /// The answer has this attribute.
    answer: Option<u16>,
    /// Number of messages with this attribute, or of all kinds, that wait to be sent already.
    waiting: usize,
}

/// Whether a packet is for QP1.
pub(crate) fn is_mad(bytes: &[u8]) -> bool {
    bytes.get(5..8) == Some(&[0, 0, 1])
}

/// Whether a packet for QP1 is a question or an answer of recognition, damaged or not.
fn is_introduction(bytes: &[u8]) -> bool {
    bytes.get(HEADERS + 1).is_some_and(|class| *class != MadHeader::CLASS_CM)
}

impl World<'_> {
    /// The right effects of a packet, if it is for the connection manager.
    pub(crate) fn foresee(&mut self, packet: &Packet) -> Result<Option<Due>, String> {
        let manages = is_mad(&packet.bytes) && !is_introduction(&packet.bytes);
        if !manages || self.hosts[packet.to].engine.is_none() {
            return Ok(None);
        }
        let (at, from) = (packet.to, packet.from);
        self.hosts[at].users.notices.clear();
        let mut due = Due { nothing: packet.harmed, ..Due::default() };
        if !packet.harmed {
            let mad = packet.bytes.get(HEADERS..HEADERS + MAD_LEN).ok_or("a short datagram")?;
            let (_, message) =
                CmMessage::parse(mad).map_err(|error| format!("sent was {error}"))?;
            match message {
                CmMessage::Req(req) => self.foresee_req(at, &req, &mut due)?,
                CmMessage::Rep(rep) => self.foresee_rep(at, from, &rep, &mut due)?,
                CmMessage::Rtu(rtu) => {
                    let known = self.known(at, from, rtu.remote);
                    let fits = |talk: &&Talk| talk.step == Step::Accepted && !talk.is_over();
                    if known.filter(fits).is_some_and(|talk| talk.far_id == rtu.local) {
                        due.notices = Some((ConnId(rtu.remote), Notice::Established));
                    }
                }
                CmMessage::Rej(rej) => {
                    let remote = match rej.remote {
                        CommId(0) => self.asked_by(at, from, rej.local),
                        id => id,
                    };
                    let known = self.known(at, from, remote).filter(|talk| !talk.is_over());
                    let fits = |talk: &Talk| talk.step == Step::Asking || talk.far_id == rej.local;
                    if known.is_some_and(fits) {
                        due.notices = Some((ConnId(remote), Notice::Ended));
                    }
                }
                CmMessage::Dreq(dreq) => match self.known(at, from, dreq.remote) {
                    None => due.answer = Some(DREP),
                    Some(talk) if talk.far_id == dreq.local && talk.step != Step::Asked => {
                        due.answer = Some(DREP);
                        due.over.push(ConnId(dreq.remote));
                    }
                    Some(_) => {}
                },
                CmMessage::Drep(drep) => {
                    let known = self.known(at, from, drep.remote);
                    let fits = |talk: &Talk| talk.far_id == drep.local && talk.leaving;
                    if known.is_some_and(|talk| fits(talk) && !talk.ended && !talk.given_up) {
                        due.notices = Some((ConnId(drep.remote), Notice::Ended));
                    }
                }
                _ => {}
            }
        }
        due.waiting = self.waiting(at, from, due.answer)?;
        Ok(Some(due))
    }

    /// A REQ: known, or refused for a reason, or for the program.
    fn foresee_req(&mut self, at: usize, req: &Req<'_>, due: &mut Due) -> Verdict {
        let words = req.private.get(IP_HEADER..).and_then(read_words);
        let (id, _) = words.ok_or("a request without words was sent")?;
        let from = self.calls[id].from;
        let users = &self.hosts[at].users;
        if let Some(known) = users.talks.values().find(|talk| talk.call == id && !talk.active) {
            if known.step == Step::Accepted && !known.is_over() {
                due.answer = Some(REP);
            }
            if known.is_over() {
                self.calls[id].refusals[0].push((RejReason::STALE_CONNECTION, Vec::new()));
            }
            return Ok(());
        }
        let listening = (0..SERVICES).find(|at| service(*at) == req.service);
        let listening = listening.and_then(|at| users.listening[at]);
        let blockers = self.blockers(at, from, req.qpn, id);
        let refusal = match listening {
            _ if !blockers.is_empty() => {
                let late = self.is_late(from, req.local, self.calls[id].boot);
                self.end_blockers(at, &blockers, (late, req.ca_guid), due);
                Some(RejReason::STALE_CONNECTION)
            }
            None => Some(RejReason::INVALID_SERVICE_ID),
            Some(listening) => {
                self.hosts[at].users.is_full(listening).then_some(RejReason::NO_RESOURCES)
            }
        };
        if self.is_doubtful(at, from, req.qpn, id, req.ca_guid) {
            due.optional = true;
            self.calls[id].refusals[0].push((RejReason::STALE_CONNECTION, Vec::new()));
        }
        match refusal {
            None => due.request = Some(id),
            Some(reason) => {
                due.answer = Some(REJ);
                self.calls[id].refusals[0].push((reason, Vec::new()));
            }
        }
        Ok(())
    }

    /// A REP: to a call that is open, established, or forgotten.
    fn foresee_rep(&mut self, at: usize, from: usize, rep: &Rep<'_>, due: &mut Due) -> Verdict {
        let (id, answer) = read_words(rep.private).ok_or("a reply without words was sent")?;
        let Some(talk) = self.known(at, from, rep.remote) else {
            due.answer = Some(REJ);
            self.calls[id].refusals[1].push((RejReason::INVALID_COMM_ID, Vec::new()));
            return Ok(());
        };
        let conn = ConnId(rep.remote);
        match talk.step {
            Step::Asking if !talk.is_over() => {
                let blockers = self.blockers(at, from, rep.qpn, id);
                if blockers.is_empty() && self.is_doubtful(at, from, rep.qpn, id, rep.ca_guid) {
                    for refusals in &mut self.calls[id].refusals {
                        refusals.push((RejReason::STALE_CONNECTION, Vec::new()));
                    }
                    return Ok(());
                }
                if blockers.is_empty() {
                    due.notices = Some((conn, Notice::Replied));
                    return Ok(());
                }
                due.answer = Some(REJ);
                due.notices = Some((conn, Notice::Ended));
                for refusals in &mut self.calls[id].refusals {
                    refusals.push((RejReason::STALE_CONNECTION, Vec::new()));
                }
                let boot = self.calls[id].accepts.get(answer).map_or(0, |accepted| accepted.boot);
                let late = self.is_late(from, rep.local, boot);
                self.end_blockers(at, &blockers, (late, rep.ca_guid), due);
            }
            Step::Established if talk.accept == Some(answer) && !talk.is_over() => {
                due.answer = Some(RTU);
            }
            _ => {}
        }
        Ok(())
    }

    /// Connections of the host `at` with this queue pair of `from`, which block another one.
    fn blockers(&self, at: usize, from: usize, qpn: Qpn, call: CallId) -> Vec<ConnId> {
        let others = self.hosts[at].users.with_peer(from, qpn, call).into_iter();
        others.filter_map(|(conn, talk)| (!talk.is_over()).then_some(conn)).collect()
    }

    /// Whether a connection of another adapter that is over may block as well.
    fn is_doubtful(&self, at: usize, from: usize, qpn: Qpn, call: CallId, guid: u64) -> bool {
        let others = self.hosts[at].users.with_peer(from, qpn, call);
        others.iter().any(|(_, talk)| talk.is_over() && talk.far_guid != guid)
    }

    /// The same peer uses the queue pair of these connections anew: it has forgotten them.
    fn end_blockers(
        &mut self,
        at: usize,
        blockers: &[ConnId],
        (late, guid): (bool, u64),
        due: &mut Due,
    ) {
        for conn in blockers {
            let Some(talk) = self.hosts[at].users.talks.get_mut(conn) else { continue };
            if talk.far_guid == guid {
                talk.mistaken |= late;
                let refusals = &mut self.calls[talk.call].refusals[usize::from(!talk.active)];
                refusals.push((RejReason::STALE_CONNECTION, Vec::new()));
                due.over.push(*conn);
            }
        }
    }

    /// Whether the sender has given this request up since.
    fn is_late(&self, from: usize, id: CommId, boot: u32) -> bool {
        let users = &self.hosts[from].users;
        users.boot != boot || users.talks.get(&ConnId(id)).is_none_or(Talk::is_over)
    }

    /// The connection of the host `at` with this communication id, if it is with `from`.
    fn known(&self, at: usize, from: usize, id: CommId) -> Option<&Talk> {
        self.hosts[at].users.talks.get(&ConnId(id)).filter(|talk| talk.peer == from)
    }

    /// The communication id of the connection that the peer requested with its own id.
    fn asked_by(&self, at: usize, from: usize, id: CommId) -> CommId {
        let asked =
            |(_, talk): &(&ConnId, &Talk)| (talk.peer, talk.far_id) == (from, id) && !talk.active;
        self.hosts[at].users.talks.iter().find(asked).map_or(CommId(0), |(conn, _)| conn.0)
    }

    /// Number of messages with this attribute, or of all kinds, that wait to be sent to a host.
    fn waiting(&mut self, at: usize, to: usize, answer: Option<u16>) -> Result<usize, String> {
        let to = self.hosts[to].addr;
        let manager = self.manager(at)?;
        let mut all = Vec::new();
        while let Some(transmit) = manager.poll_transmit() {
            all.push(transmit);
        }
        let counts = |transmit: &&rocinante_stack::cm::Transmit| {
            let attribute = u16::from_be_bytes([transmit.mad[16], transmit.mad[17]]);
            answer.is_none_or(|answer| attribute == answer && transmit.remote == to)
        };
        let count = all.iter().filter(counts).count();
        all.into_iter().rev().for_each(|transmit| manager.put_back(transmit));
        Ok(count)
    }

    /// After the datagram was handled: checks its effects.
    pub(crate) fn fulfilled(&mut self, packet: &Packet, due: Option<Due>) -> Verdict {
        let Some(due) = due else { return Ok(()) };
        let (at, from) = (packet.to, packet.from);
        let notices = std::mem::take(&mut self.hosts[at].users.notices);
        let waiting = self.waiting(at, from, due.answer)?;
        if due.nothing {
            let calm = notices.is_empty() && waiting == due.waiting;
            return if calm {
                Ok(())
            } else {
                Err(format!("host {at}: a damaged one: {notices:?}"))
            };
        }
        let requests = notices.iter().filter_map(|(_, notices)| match notices {
            Notice::Request(call) => Some(*call),
            _ => None,
        });
        let requests: Vec<CallId> = requests.collect();
        let refused = due.optional && requests.is_empty();
        if requests != Vec::from_iter(due.request) && !refused {
            return Err(format!("host {at}: {notices:?}, but a request was due: {due:?}"));
        }
        if due.notices.is_some_and(|due| !notices.contains(&due)) {
            return Err(format!("host {at}: {notices:?}, and not {due:?}"));
        }
        for conn in &due.over {
            if self.hosts[at].users.talks.get(conn).is_some_and(|talk| !talk.is_over()) {
                return Err(format!("host {at}: {conn:?} goes on, and had to end: {due:?}"));
            }
        }
        if due.answer.is_some() && waiting <= due.waiting {
            return Err(format!("host {at} does not answer: {due:?}"));
        }
        Ok(())
    }
}
