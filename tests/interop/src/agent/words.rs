//! Translates the words of scenarios to the API, and back.

use rocinante::verbs::{AsyncEvent, QpEvent, QpType};
use rocinante::{Access, VerbsError, Wc};

use super::proto::{Completion, Service};

type Result<T> = std::result::Result<T, String>;

pub(super) fn access_of(bits: u32) -> Result<Access> {
    Access::from_bits(bits).ok_or_else(|| format!("unknown access {bits:#x}"))
}

pub(super) fn completion(wc: &Wc) -> Completion {
    Completion {
        wr_id: wc.wr_id,
        qpn: wc.qpn.value(),
        status: wc.status.name().to_owned(),
        opcode: wc.opcode,
        byte_len: wc.byte_len,
        imm: wc.imm.map(u32::from_be_bytes),
        invalidated: wc.invalidated.map(|key| key.0),
        source: wc.src_qp.map(|qpn| qpn.value()),
    }
}

/// The type of a queue pair, and its Q_Key; only datagram queue pairs have one.
pub(super) fn service(service: Service) -> (QpType, u32) {
    match service {
        Service::Rc => (QpType::Rc, 0),
        Service::Uc => (QpType::Uc, 0),
        Service::Ud { qkey } => (QpType::Ud, qkey),
    }
}

/// As in `ibv_event_type_str(3)`.
pub(super) fn event_name(event: &AsyncEvent) -> String {
    match event {
        AsyncEvent::Qp { event: QpEvent::CommEst, .. } => "communication established".into(),
        AsyncEvent::Qp { event: QpEvent::Fatal, .. } => {
            "local work queue catastrophic error".into()
        }
        AsyncEvent::Qp { event: QpEvent::ReqErr, .. } => {
            "invalid request local work queue error".into()
        }
        AsyncEvent::Qp { event: QpEvent::AccessErr, .. } => {
            "local access violation work queue error".into()
        }
        AsyncEvent::Qp { event: QpEvent::LastWqeReached, .. } => "last WQE reached".into(),
        AsyncEvent::SrqLimitReached { .. } => "SRQ limit reached".into(),
        other => format!("{other:?}"),
    }
}

/// For `map_err`.
#[allow(clippy::needless_pass_by_value)]
pub(super) fn text(error: VerbsError) -> String {
    error.to_string()
}
