//! Connections, and what their queue pairs need.

use std::ffi::c_int;
use std::sync::Arc;

use rocinante_soft::model::qp::ConnectOptions;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::QpType;

use super::devices::Opened;
use super::event::AH;
use super::id::{Held, Id, Phase, Route, ToId};
use super::words::{In, Out, errno};
use super::{Answer, Command, Outcome};
use crate::abi::mask;
use crate::convert;
use crate::plain::{
    Accept, Connect, Manager as _, QpSide, RejReason, ServiceId, SidrStatus, Transport,
};

/// The errno where there is no Q_Key, as of `cma_set_default_qkey` of `cma.c` on RoCE.
const NO_QKEY: std::ffi::c_int = libc::ENODEV;

/// `struct rdma_ucm_conn_param`.
struct Params {
    side: QpSide,
    qkey: u32,
    private: Vec<u8>,
    retry_count: u8,
    is_given: bool,
}

/// Where its parts are.
fn params(body: In<'_>, at: usize, held: &Held) -> Outcome<Params> {
    let qpn = body.u32(at);
    let is_given = body.u8(at + 271) != 0;
    if is_given && qpn > Qpn::MULTICAST.value() {
        return Err(libc::EINVAL);
    }
    let side = QpSide {
        qpn: Qpn::new(qpn),
        psn: held.psn,
        responder_resources: body.u8(at + 266),
        initiator_depth: body.u8(at + 267),
        rnr_retry: body.u8(at + 270).min(7),
        flow_control: body.u8(at + 268) != 0,
        srq: body.u8(at + 265) != 0,
        announced: None,
    };
    let private = body.private(at + 8, body.u8(at + 264));
    let retry_count = body.u8(at + 269).min(7);
    Ok(Params { side, qkey: body.u32(at + 4), private, retry_count, is_given })
}

impl Id {
    /// Its device, which this opens if it is not open yet.
    pub(super) fn open<'a>(
        &self,
        held: &'a mut Held,
        it: &Arc<super::Ucma>,
    ) -> Outcome<&'a Arc<Opened>> {
        if held.opened.is_none() {
            let found = held.found.as_ref().ok_or(libc::EINVAL)?;
            held.opened = Some(it.open_device(found, true)?);
        }
        held.opened.as_ref().ok_or(libc::EINVAL)
    }
}

impl Held {
    /// `struct ib_uverbs_ah_attr` of the path to the peer, or to a multicast group.
    pub(super) fn ah(&self, to: std::net::IpAddr) -> Outcome<[u8; AH]> {
        let opened = self.opened.as_ref().ok_or(libc::EINVAL)?;
        let local = self.local.ok_or(libc::EINVAL)?.ip();
        let options = ConnectOptions::default();
        let out = Out::default()
            .bytes(&convert::gid(to))
            // flow label
            .u32(0)
            .u8(opened.gid_index(local)?)
            .u8(options.hop_limit)
            .u8(self.tos)
            .u8(0)
            // dlid, sl, src_path_bits, static_rate
            .u16(0)
            .u8(0)
            .u8(0)
            .u8(0)
            // is_global, port_num
            .u8(1)
            .u8(1)
            .u8(0);
        out.0.try_into().map_err(|_| libc::EINVAL)
    }
}

impl Command<'_> {
    pub(super) fn connect(&self) -> Outcome<Answer> {
        let id = self.id(272)?;
        let mut held = id.held.lock();
        let Params { side, private, retry_count, is_given, .. } = params(self.body, 0, &held)?;
        let (Phase::RouteResolved, true) = (&held.phase, is_given) else {
            return Err(libc::EINVAL);
        };
        let opened = id.open(&mut held, self.it)?.clone();
        let (local, peer) = held.local.zip(held.peer).ok_or(libc::EINVAL)?;
        let service = ServiceId::of_port(id.space, peer.port());
        let sink = Arc::new(ToId(id.clone()));
        if id.is_of_datagrams() {
            id.facts.lock().ah = held.ah(peer.ip())?;
            let way = (local.ip(), peer.ip());
            let query = opened.device.resolve_into(way, (service, local.port()), &private, sink);
            held.phase = Phase::Querying(query.map_err(|error| {
                id.facts.lock().ah = [0; AH];
                errno(&error)
            })?);
            return Ok(Answer::default());
        }
        let (ack_timeout, mtu) = (held.ack_timeout(), opened.mtu());
        id.facts.lock().route = Some(Route {
            qpn: Qpn::default(),
            psn: None,
            mtu,
            responder_resources: side.responder_resources,
            initiator_depth: side.initiator_depth,
            ack_timeout,
            retry_count,
            rnr_retry: side.rnr_retry,
        });
        let ask = Connect {
            local: local.ip(),
            remote: peer.ip(),
            service,
            source_port: local.port(),
            side,
            transport: if id.qp_type == QpType::Uc { Transport::Uc } else { Transport::Rc },
            mtu,
            ack_timeout,
            retry_count,
            traffic_class: held.tos,
            hop_limit: ConnectOptions::default().hop_limit,
            keep_alive: None,
            private: &private,
        };
        let conn = opened.device.connect_into(&ask, sink).map_err(|error| {
            id.facts.lock().route = None;
            errno(&error)
        })?;
        held.phase = Phase::Connected(conn);
        Ok(Answer::default())
    }

    /// Accepts a request. Without parameters: the queue pair that asked is ready.
    pub(super) fn accept(&self) -> Outcome<Answer> {
        let id = self.id(280)?;
        let mut held = id.held.lock();
        let Params { side, qkey, private, is_given, .. } = params(self.body, 8, &held)?;
        let opened = held.opened.clone().ok_or(libc::EINVAL)?;
        let device = &opened.device;
        match (&held.phase, is_given) {
            (Phase::Connected(conn), false) => {
                device.establish(*conn).map_err(|error| errno(&error))?;
            }
            (Phase::Requested(conn), true) => {
                let conn = *conn;
                // Its events are the program's from now on.
                id.facts.lock().uid = self.body.u64(0);
                let accept = Accept { side, keep_alive: None, private: &private };
                let accepted = device.accept_into(conn, &accept, Arc::new(ToId(id.clone())));
                accepted.map_err(|error| {
                    id.facts.lock().uid = 0;
                    // The peer would wait: as the kernel does.
                    let _ = device.reject(conn, RejReason::CONSUMER, &[]);
                    errno(&error)
                })?;
                if let Some(route) = &mut id.facts.lock().route {
                    route.responder_resources = side.responder_resources;
                    route.initiator_depth = side.initiator_depth;
                }
                held.phase = Phase::Connected(conn);
            }
            (Phase::Asked(ask), true) => {
                let ask = *ask;
                let qkey = if qkey == 0 { held.qkey } else { qkey };
                let with = if qkey == 0 { Err(SidrStatus::REJECT) } else { Ok((side.qpn, qkey)) };
                device.answer(ask, with, &private).map_err(|error| {
                    let _ = device.answer(ask, Err(SidrStatus::REJECT), &[]);
                    errno(&error)
                })?;
                held.phase = Phase::Answered;
                if qkey == 0 {
                    return Err(NO_QKEY);
                }
                id.facts.lock().uid = self.body.u64(0);
                held.qkey = qkey;
            }
            _ => return Err(libc::EINVAL),
        }
        Ok(Answer::default())
    }

    pub(super) fn reject(&self) -> Outcome<Answer> {
        /// The kernel takes one more reason than that of the program: an option that the queue
        /// pairs do not share (`IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED`).
        const OPTION: u16 = 35;
        let reason = match self.body.u8(5) {
            0 => RejReason::CONSUMER,
            reason => RejReason(reason.into()),
        };
        if ![RejReason::CONSUMER, RejReason(OPTION)].contains(&reason) {
            return Err(libc::EINVAL);
        }
        let id = self.id(0)?;
        let held = id.held.lock();
        let private = self.body.private(8, self.body.u8(4));
        let device = &held.opened.as_ref().ok_or(libc::EINVAL)?.device;
        let rejected = match &held.phase {
            Phase::Requested(conn) | Phase::Connected(conn) => {
                device.reject(*conn, reason, &private)
            }
            Phase::Asked(ask) => device.answer(*ask, Err(SidrStatus::REJECT), &private),
            _ => return Err(libc::EINVAL),
        };
        rejected.map_err(|error| errno(&error))?;
        Ok(Answer::default())
    }

    /// Ends a connection. Its queue pair is the program's affair. As the kernel's, it succeeds
    /// where there is none to end: one that is not established, or that has ended; a request; and
    /// of datagrams.
    pub(super) fn disconnect(&self) -> Outcome<Answer> {
        let id = self.id(0)?;
        let held = id.held.lock();
        match (&held.phase, &held.opened) {
            (Phase::Connected(conn), Some(opened)) => {
                let ended = opened.device.disconnect(*conn).map_err(|error| errno(&error));
                ended.or_else(|error| if error == libc::EINVAL { Ok(()) } else { Err(error) })?;
            }
            (Phase::Requested(_) | Phase::Asked(_) | Phase::Querying(_) | Phase::Answered, _) => {}
            _ => return Err(libc::EINVAL),
        }
        Ok(Answer::default())
    }

    /// `IBV_EVENT_COMM_EST` on the queue pair of a connection.
    pub(super) fn notify(&self) -> Outcome<Answer> {
        const COMM_EST: u32 = 4;
        let id = self.id(0)?;
        let held = id.held.lock();
        let (Phase::Connected(conn), Some(opened)) = (&held.phase, &held.opened) else {
            return Err(libc::EINVAL);
        };
        if self.body.u32(4) != COMM_EST {
            return Err(libc::EINVAL);
        }
        opened.device.cm_message_arrived(*conn);
        Ok(Answer::default())
    }

    /// The attributes that take the id's queue pair to a state.
    pub(super) fn init_qp_attr(&self) -> Outcome<Answer> {
        const LEN: usize = 144;
        self.needs(LEN)?;
        let id = self.id(8)?;
        let mut held = id.held.lock();
        let state = self.body.u32(12);
        let route = id.facts.lock().route;
        let attr = match (state, route) {
            (1, _) if id.is_of_datagrams() && held.qkey == 0 => return Err(NO_QKEY),
            (1, route) => Attr::init(&id, &held, route.as_ref()),
            (2 | 3, Some(route)) if !id.is_of_datagrams() => {
                let psn = route.psn.ok_or(libc::EINVAL)?;
                id.open(&mut held, self.it)?;
                let peer = held.peer.ok_or(libc::EINVAL)?;
                let ah = held.ah(peer.ip())?;
                let rc = id.qp_type == QpType::Rc;
                let both = Attr {
                    ah,
                    path_mtu: convert::mtu_code(route.mtu).cast_unsigned(),
                    rq_psn: held.psn.value(),
                    sq_psn: psn.value(),
                    dest: route.qpn.value(),
                    responder_resources: route.responder_resources,
                    initiator_depth: route.initiator_depth,
                    timeout: held.ack_timeout.unwrap_or(route.ack_timeout),
                    retry_count: route.retry_count,
                    rnr_retry: route.rnr_retry,
                    state,
                    ..Attr::default()
                };
                both.to(rc)
            }
            _ => return Err(libc::EINVAL),
        };
        Ok(self.answer(attr.out().until(LEN)))
    }
}

/// `struct ib_uverbs_qp_attr`.
#[derive(Default)]
struct Attr {
    mask: c_int,
    state: u32,
    path_mtu: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest: u32,
    access: u32,
    ah: [u8; AH],
    initiator_depth: u8,
    responder_resources: u8,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
}

/// The sender's delay before it tries again where no receive is posted: 655.36 ms, as the kernel
/// has it (`cm_init_qp_rtr_attr`). Programs allow few tries and rely on the long delay.
const MIN_RNR_TIMER: u8 = 0;

impl Attr {
    fn init(id: &Id, held: &Held, route: Option<&Route>) -> Self {
        /// Remote WRITE, and READ and atomics.
        const WRITES: u32 = 1 << 1;
        const READS: u32 = 1 << 2 | 1 << 3;
        let base = mask::STATE | mask::PKEY_INDEX | mask::PORT;
        if id.is_of_datagrams() {
            let mask = base | mask::QKEY;
            return Self { mask, state: 1, qkey: held.qkey, ..Self::default() };
        }
        // Before there is a connection nothing is allowed.
        let access = match route {
            Some(route) if route.responder_resources > 0 => WRITES | READS,
            Some(_) => WRITES,
            None => 0,
        };
        Self { mask: base | mask::ACCESS_FLAGS, state: 1, access, ..Self::default() }
    }

    /// RTR or RTS.
    fn to(mut self, rc: bool) -> Self {
        self.mask = mask::STATE;
        if self.state == 2 {
            self.mask |= mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
            self.mask |= if rc { mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER } else { 0 };
        } else {
            self.mask |= mask::SQ_PSN;
            let timers = mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
            self.mask |= if rc { timers } else { 0 };
        }
        self
    }

    fn out(&self) -> Out {
        const NO_CAPS: usize = 20;
        Out::default()
            .u32(self.mask.cast_unsigned())
            .u32(self.state)
            // cur_qp_state
            .u32(0)
            .u32(self.path_mtu)
            // path_mig_state: MIGRATED
            .u32(0)
            .u32(self.qkey)
            .u32(self.rq_psn)
            .u32(self.sq_psn)
            .u32(self.dest)
            .u32(self.access)
            .bytes(&self.ah)
            .zeroes(AH + NO_CAPS)
            // pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining
            .u16(0)
            .u16(0)
            .u16(0)
            .u8(self.initiator_depth)
            .u8(self.responder_resources)
            .u8(MIN_RNR_TIMER)
            // port_num
            .u8(1)
            .u8(self.timeout)
            .u8(self.retry_count)
            .u8(self.rnr_retry)
    }
}
