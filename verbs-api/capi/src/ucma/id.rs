//! Communication ids: the state of each after the program's commands, and the facts that its
//! connection's events change.
//!
//! Three locks, always taken in this order: an id's `held` for a command, the device's, an id's
//! `facts`. Events come while the device is locked, so they touch facts only.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::QpType;

use super::devices::Opened;
use super::event::{AH, Event, File, Group, Kind, Param};
use super::table::Table;
use crate::devices::Found;
use crate::plain::{
    Asked, CmEvent, ConnId, Ended, ListenerId, Owner, PortSpace, QpSide, Reply, Request,
    SidrQueryId, SidrReqId, SidrStatus, Transport, Woken,
};

/// The Q_Key of `RDMA_PS_UDP`, where the program names none (`RDMA_UDP_QKEY`).
const UDP_QKEY: u32 = 0x0123_4567;

/// A communication id.
pub(super) struct Id {
    pub(super) number: u32,
    pub(super) space: PortSpace,
    pub(super) qp_type: QpType,
    pub(super) held: Mutex<Held>,
    pub(super) facts: Mutex<Facts>,
    /// The number of its events that the program has read. Changes only under the lock of its
    /// file's queue.
    pub(super) reported: AtomicU32,
}

/// The state that commands change.
pub(super) struct Held {
    pub(super) phase: Phase,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    /// The device of its local address; none of a wildcard.
    pub(super) found: Option<Found>,
    pub(super) opened: Option<Arc<Opened>>,
    /// Whether it has a port of its own. That of a request is its listener's.
    pub(super) has_port: bool,
    pub(super) reuse: bool,
    /// `RDMA_OPTION_ID_AFONLY`, once it was set or the id has a port.
    pub(super) one_family: Option<bool>,
    pub(super) tos: u8,
    pub(super) ack_timeout: Option<u8>,
    /// The first PSN that its queue pair expects.
    pub(super) psn: Psn,
    /// The Q_Key of its datagrams. 0 in `RDMA_PS_IPOIB`, whose ids have that of a group that IP
    /// over InfiniBand joined: RoCE has none.
    pub(super) qkey: u32,
    pub(super) groups: Vec<Arc<Group>>,
}

/// How far an id has come.
pub(super) enum Phase {
    Idle,
    Bound,
    /// Its next hop is asked for. Without an answer the id is again at its earlier address.
    AddrQuery(Earlier),
    AddrResolved,
    RouteResolved,
    Listening(Vec<(Arc<Opened>, ListenerId)>),
    /// A peer asks for a connection.
    Requested(ConnId),
    /// A peer asks for a queue pair for datagrams.
    Asked(SidrReqId),
    /// It asked for a connection, or accepted one.
    Connected(ConnId),
    /// It asked for a queue pair for datagrams.
    Querying(SidrQueryId),
    /// It answered a question.
    Answered,
    /// Its device is gone.
    Removed,
    Destroyed,
}

/// The address of an id before it was resolved, and its device.
#[derive(Default)]
pub(super) struct Earlier {
    pub(super) local: Option<SocketAddr>,
    pub(super) found: Option<Found>,
    pub(super) opened: Option<Arc<Opened>>,
}

/// The state that events change, and need.
pub(super) struct Facts {
    /// The program's own name for it; 0 until it accepts a request. Before that no event is
    /// reported.
    pub(super) uid: u64,
    pub(super) file: Arc<File>,
    pub(super) is_alive: bool,
    /// Whether its device is gone: that was the last event.
    pub(super) is_removed: bool,
    /// Whether the program can know its number: of a request, once its event was read.
    pub(super) is_told: bool,
    pub(super) backlog: usize,
    pub(super) route: Option<Route>,
    /// The address handle for datagrams to its peer: `struct ib_uverbs_ah_attr`.
    pub(super) ah: [u8; AH],
    /// Whether its connection was established: then its end is followed by that of TIMEWAIT.
    has_ended: bool,
}

/// A queue pair's way to its peer's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) qpn: Qpn,
    /// The first PSN that the peer expects.
    pub(super) psn: Option<Psn>,
    pub(super) mtu: Mtu,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) ack_timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

impl Held {
    /// Whether it is on this device. A wildcard is on none.
    pub(super) fn is_on(&self, device: &Arc<Opened>) -> bool {
        let is_it = |opened: &Arc<Opened>| Arc::ptr_eq(opened, device);
        let is_wildcard = || self.local.is_none_or(|local| local.ip().is_unspecified());
        match &self.phase {
            Phase::Listening(places) => {
                !is_wildcard() && places.iter().any(|(opened, _)| is_it(opened))
            }
            _ => self.opened.as_ref().is_some_and(is_it),
        }
    }
}

impl Id {
    pub(super) fn new(
        number: u32,
        (space, qp_type): (PortSpace, QpType),
        (uid, file): (u64, Arc<File>),
        psn: Psn,
    ) -> Self {
        let held = Held {
            phase: Phase::Idle,
            local: None,
            peer: None,
            found: None,
            opened: None,
            has_port: false,
            reuse: false,
            one_family: None,
            tos: 0,
            ack_timeout: None,
            psn,
            qkey: if space == PortSpace::IpOverIb { 0 } else { UDP_QKEY },
            groups: Vec::new(),
        };
        let facts = Facts {
            uid,
            file,
            is_alive: true,
            is_removed: false,
            is_told: true,
            backlog: 0,
            route: None,
            ah: [0; AH],
            has_ended: false,
        };
        let (held, facts) = (Mutex::new(held), Mutex::new(facts));
        Self { number, space, qp_type, held, facts, reported: AtomicU32::new(0) }
    }

    /// Whether it waits for its next hop.
    pub(super) fn is_querying(&self) -> bool {
        matches!(self.held.lock().phase, Phase::AddrQuery(_))
    }

    pub(super) fn uid(&self) -> u64 {
        self.facts.lock().uid
    }

    pub(super) fn is_of_datagrams(&self) -> bool {
        self.qp_type == QpType::Ud
    }

    /// Its device is gone.
    pub(super) fn tell_removal(self: &Arc<Self>) {
        let mut facts = self.facts.lock();
        facts.tell(self, Kind::DeviceRemoval, 0, Param::default());
        facts.is_removed = true;
    }

    pub(super) fn tell(self: &Arc<Self>, kind: Kind, status: i32, param: Param) {
        self.facts.lock().tell(self, kind, status, param);
    }
}

impl Facts {
    fn tell(&self, id: &Arc<Id>, kind: Kind, status: i32, param: Param) {
        if self.is_alive && !self.is_removed && self.uid != 0 {
            let of = id.clone();
            self.file.push(Event { of, kind, status, param, child: None, group: None });
        }
    }
}

/// Gets the events of a connection, or of a question of ours.
#[derive(Clone)]
pub(super) struct ToId(pub(super) Arc<Id>);

impl std::fmt::Debug for ToId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "id {}", self.0.number)
    }
}

impl Owner for ToId {
    fn put(&self, event: CmEvent) -> Option<Woken> {
        let id = &self.0;
        let mut facts = id.facts.lock();
        let none = Param::default();
        match event {
            CmEvent::Replied { reply, .. } => {
                if let Some(route) = &mut facts.route {
                    take_reply(route, &reply);
                }
                let Reply { side, private, .. } = *reply;
                facts.tell(id, Kind::ConnectResponse, 0, param_of(&side, 0, private));
            }
            CmEvent::Established { .. } => facts.tell(id, Kind::Established, 0, none),
            CmEvent::Rejected { reason, private, .. }
            | CmEvent::Disconnected { ended: Ended::Rejected { reason, private }, .. } => {
                let param = Param { private, ..none };
                facts.tell(id, Kind::Rejected, reason.0.into(), param);
            }
            CmEvent::TimedOut { .. } => {
                facts.tell(id, Kind::Unreachable, -libc::ETIMEDOUT, none);
            }
            CmEvent::Disconnected { ended, .. } => {
                facts.has_ended = true;
                facts.tell(id, Kind::Disconnected, status_of(&ended), none);
            }
            CmEvent::Released { .. } if facts.has_ended => {
                facts.tell(id, Kind::TimewaitExit, 0, none);
            }
            CmEvent::Resolved { qpn, qkey, private, .. } => {
                let param = Param { qpn: qpn.value(), qkey, ah: facts.ah, private, ..none };
                facts.tell(id, Kind::Established, 0, param);
            }
            CmEvent::Unresolved { status, private, .. } => {
                let status = status.map_or(-libc::ETIMEDOUT, |SidrStatus(code)| code.into());
                facts.tell(id, Kind::Unreachable, status, Param { private, ..none });
            }
            _ => {}
        }
        Some(Woken::default())
    }
}

/// Gets the requests to a listener.
pub(super) struct ToListener {
    pub(super) id: Arc<Id>,
    pub(super) local: SocketAddr,
    pub(super) opened: Weak<Opened>,
    pub(super) table: Arc<Table>,
}

impl std::fmt::Debug for ToListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "listener {}", self.id.number)
    }
}

impl Owner for ToListener {
    fn put(&self, event: CmEvent) -> Option<Woken> {
        let has_room = match event {
            CmEvent::Request { conn, request, .. } => self.request(conn, *request),
            CmEvent::Asked { ask, asked, .. } => self.question(ask, *asked),
            _ => true,
        };
        has_room.then(Woken::default)
    }
}

impl ToListener {
    fn request(&self, conn: ConnId, request: Request) -> bool {
        let qp_type = match request.transport {
            Transport::Uc => QpType::Uc,
            _ => QpType::Rc,
        };
        let Request { local, peer, side, private, traffic_class, .. } = request;
        let param = param_of(&side, request.retry_count, private);
        let route = |mtu: Mtu| Route {
            qpn: side.qpn,
            psn: Some(side.psn),
            mtu: request.mtu.min(mtu),
            responder_resources: side.initiator_depth,
            initiator_depth: side.responder_resources,
            ack_timeout: request.ack_timeout,
            retry_count: request.retry_count,
            rnr_retry: side.rnr_retry,
        };
        self.make(qp_type, (local, peer), (Phase::Requested(conn), param), |held, opened| {
            // As the kernel, whose queue pair answers in the class that it was asked in.
            held.tos = traffic_class;
            Some(route(opened.mtu()))
        })
    }

    fn question(&self, ask: SidrReqId, asked: Asked) -> bool {
        let Asked { local, peer, private, .. } = asked;
        let param = Param { private, ..Param::default() };
        self.make(QpType::Ud, (local, peer), (Phase::Asked(ask), param), |_, _| None)
    }

    /// Makes an id for a request, and tells the program. `false` if there is no room.
    fn make(
        &self,
        qp_type: QpType,
        (local, peer): (IpAddr, SocketAddr),
        (phase, param): (Phase, Param),
        route: impl FnOnce(&mut Held, &Opened) -> Option<Route>,
    ) -> bool {
        let facts = self.id.facts.lock();
        let (Some(opened), true) = (self.opened.upgrade(), facts.is_alive) else {
            return false;
        };
        if facts.file.requests(&self.id) >= facts.backlog {
            return false;
        }
        let of = (self.id.space, qp_type);
        let child = self.table.make(of, (0, facts.file.clone()), |held, facts| {
            facts.route = route(held, &opened);
            facts.is_told = false;
            held.phase = phase;
            held.local = Some(opened.scoped(SocketAddr::new(local, self.local.port())));
            held.peer = Some(opened.scoped(peer));
            held.found = Some(opened.found.clone());
            held.opened = Some(opened);
        });
        let Ok(child) = child else { return false };
        facts.file.push(Event {
            of: self.id.clone(),
            kind: Kind::ConnectRequest,
            status: 0,
            param,
            child: Some(child),
            group: None,
        });
        true
    }
}

/// The status of `DISCONNECTED`, as `cma_ib_handler` of `cma.c` has it.
fn status_of(ended: &Ended) -> i32 {
    match ended {
        Ended::Unanswered | Ended::Gone => -libc::ETIMEDOUT,
        Ended::ByPeer | Ended::ByUs | Ended::Stale | Ended::Rejected { .. } => 0,
    }
}

fn take_reply(route: &mut Route, reply: &Reply) {
    let side = &reply.side;
    route.qpn = side.qpn;
    route.psn = Some(side.psn);
    route.responder_resources = side.initiator_depth;
    route.initiator_depth = side.responder_resources;
    route.rnr_retry = side.rnr_retry;
}

/// The peer's side, as this side sees it: the requests that it may begin are those that this side
/// serves.
fn param_of(side: &QpSide, retry_count: u8, private: Vec<u8>) -> Param {
    Param {
        qpn: side.qpn.value(),
        private,
        srq: side.srq,
        responder_resources: side.initiator_depth,
        initiator_depth: side.responder_resources,
        flow_control: side.flow_control,
        retry_count,
        rnr_retry: side.rnr_retry,
        ..Param::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain::RejReason;

    /// What `cma_ib_handler` of `cma.c` says of the end of an established connection: event, status
    /// and the length of private data. Only `DISCONNECTED` is followed by `TIMEWAIT_EXIT`.
    #[test]
    fn the_end_of_a_connection_has_the_kernels_event_and_status() {
        let reason = RejReason(28);
        let private = vec![7; 148];
        let ends = [
            (Ended::ByPeer, Kind::Disconnected, 0, 0),
            (Ended::ByUs, Kind::Disconnected, 0, 0),
            (Ended::Stale, Kind::Disconnected, 0, 0),
            (Ended::Unanswered, Kind::Disconnected, -libc::ETIMEDOUT, 0),
            (Ended::Gone, Kind::Disconnected, -libc::ETIMEDOUT, 0),
            (Ended::Rejected { reason, private }, Kind::Rejected, 28, 148),
        ];
        let table = Table::default();
        let file = Arc::new(File::new().unwrap());
        let [other, id] = [1, 2].map(|uid| {
            table.make((PortSpace::Tcp, QpType::Rc), (uid, file.clone()), |_, _| {}).unwrap()
        });
        let conn = ConnId(Default::default());
        for (ended, kind, status, len) in ends {
            id.facts.lock().has_ended = false;
            let what = format!("{ended:?}");
            let to = ToId(id.clone());
            to.put(CmEvent::Disconnected { conn, ended });
            to.put(CmEvent::Released { conn, qpn: Qpn::new(17) });
            let mut events = file.take(|_| true, &id.reported).0.into_iter();
            let event = events.next().unwrap();
            assert_eq!((event.kind, event.status), (kind, status), "{what}");
            assert_eq!(event.param.private.len(), len, "{what}");
            assert!(Arc::ptr_eq(&event.of, &id), "{what}");
            let exit = events.next().map(|event| (event.kind, event.status));
            let expected = (kind == Kind::Disconnected).then_some((Kind::TimewaitExit, 0));
            assert_eq!(exit, expected, "{what}");
        }
        assert_eq!(other.reported.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}
