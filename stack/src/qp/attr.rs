//! Attributes of a queue pair, and the table of those that each state change needs
//! (`ibv_modify_qp(3)`).

use core::fmt;
use core::net::IpAddr;

use crate::budget::Budget;
use crate::mem::{Access, PdId};
use crate::peer::PeerKind;
use crate::types::{Mtu, Psn, Qpn};
use crate::verbs::{CqId, QpState, QpType, SrqId};

/// The arguments of creation (`struct ibv_qp_init_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInit {
    /// Transport service.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: PdId,
    /// Completion queue of sends.
    pub send_cq: CqId,
    /// Completion queue of receives.
    pub recv_cq: CqId,
    /// The shared receive queue in the place of its own. The depth and elements of its own have no
    /// meaning then.
    pub srq: Option<SrqId>,
    /// Depth of the send queue.
    pub max_send_wr: u32,
    /// Depth of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter-gather elements of a send, at most 255.
    pub max_send_sge: u32,
    /// Scatter-gather elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data of a send.
    pub max_inline_data: u32,
    /// Whether every send makes a completion.
    pub sq_sig_all: bool,
    /// The caller's own value, handed back through [`Completions`](crate::Completions).
    pub cookie: u32,
    /// The program's own value, handed back in each completion.
    pub context: u64,
}

/// The peer: the address vector, with the caller's knowledge of its receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
    /// The caller's name for the path, handed to [`TxSink::send`](crate::TxSink::send).
    pub path: u32,
    /// The capacity of the peer's receive queue; [`Budget::STANDARD`] of a standard peer.
    pub budget: Budget,
    /// Whether the peer is another Rocinante, and the kind of its receive queue.
    pub kind: PeerKind,
}

/// Another path to the peer (`IBV_QP_ALT_PATH`). It is checked, kept and given back; no packet
/// takes it, since no queue pair migrates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AltPath {
    /// The peer's address.
    pub remote: IpAddr,
    /// Index of our address in the GID table.
    pub sgid_index: u8,
    /// Index of the P_Key; only 0 exists.
    pub pkey_index: u16,
    /// Only port 1 exists.
    pub port: u8,
    /// As `IBV_QP_TIMEOUT`.
    pub timeout: u8,
}

/// State of a path migration (`enum ibv_mig_state`). It is kept and given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathMigState {
    /// `IBV_MIG_MIGRATED`.
    Migrated,
    /// `IBV_MIG_REARM`.
    Rearm,
    /// `IBV_MIG_ARMED`.
    Armed,
}

/// Attributes to set (`struct ibv_qp_attr`); the mask is which of them are `Some`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// `IBV_QP_STATE`.
    pub state: Option<QpState>,
    /// `IBV_QP_CUR_STATE`: the state that the queue pair is in. Otherwise the change is refused.
    pub cur_state: Option<QpState>,
    /// `IBV_QP_EN_SQD_ASYNC_NOTIFY`: whether
    /// [`QpEvent::SqDrained`](crate::verbs::QpEvent::SqDrained) is wanted.
    pub sqd_async_notify: Option<bool>,
    /// `IBV_QP_PKEY_INDEX`; only index 0 exists.
    pub pkey_index: Option<u16>,
    /// `IBV_QP_PORT`; only port 1 exists.
    pub port: Option<u8>,
    /// `IBV_QP_ACCESS_FLAGS`: which remote operations the peer may ask for.
    pub access: Option<Access>,
    /// `IBV_QP_QKEY`: the Q_Key that a datagram must carry.
    pub qkey: Option<u32>,
    /// `IBV_QP_AV`.
    pub peer: Option<PeerAddress>,
    /// `IBV_QP_PATH_MTU`.
    pub path_mtu: Option<Mtu>,
    /// `IBV_QP_DEST_QPN`.
    pub dest_qpn: Option<Qpn>,
    /// `IBV_QP_RQ_PSN`: the first PSN that the peer will send.
    pub rq_psn: Option<Psn>,
    /// `IBV_QP_MAX_DEST_RD_ATOMIC`: READs and atomics that the peer may have outstanding.
    pub max_dest_rd_atomic: Option<u8>,
    /// `IBV_QP_MIN_RNR_TIMER`: 5-bit code of the delay asked for when no receive is posted.
    pub min_rnr_timer: Option<u8>,
    /// `IBV_QP_SQ_PSN`: the first PSN to send.
    pub sq_psn: Option<Psn>,
    /// `IBV_QP_MAX_QP_RD_ATOMIC`: READs and atomics that may be outstanding at the peer.
    pub max_rd_atomic: Option<u8>,
    /// `IBV_QP_RETRY_CNT`, 0 to 7: retries when the peer does not answer.
    pub retry_cnt: Option<u8>,
    /// `IBV_QP_RNR_RETRY`, 0 to 7: retries when the peer has no receive posted; 7 means for ever.
    pub rnr_retry: Option<u8>,
    /// `IBV_QP_TIMEOUT`, 0 to 31: 4.096 µs · 2^timeout; 0 means never.
    pub timeout: Option<u8>,
    /// `IBV_QP_ALT_PATH`.
    pub alt_path: Option<AltPath>,
    /// `IBV_QP_PATH_MIG_STATE`.
    pub path_mig_state: Option<PathMigState>,
}

macro_rules! kept {
    ($( $field:ident: $type:ty, )*) => {
        /// The attributes that a queue pair keeps.
        #[derive(Debug, Default)]
        pub(crate) struct Kept {
            $( pub(crate) $field: Option<$type>, )*
            /// Hardly any queue pair has one.
            alt_path: Option<Box<AltPath>>,
        }

        impl Kept {
            /// Takes the values that a change sets.
            pub(crate) fn merge(&mut self, attr: &QpAttr) {
                $( self.$field = attr.$field.or(self.$field); )*
                if let Some(path) = attr.alt_path {
                    self.alt_path = Some(Box::new(path));
                }
            }

            /// All that was set, but for states.
            pub(crate) fn attr(&self) -> QpAttr {
                let alt_path = self.alt_path.as_deref().copied();
                QpAttr { $( $field: self.$field, )* alt_path, ..QpAttr::default() }
            }
        }
    };
}

kept! {
    sqd_async_notify: bool,
    pkey_index: u16,
    port: u8,
    access: Access,
    qkey: u32,
    peer: PeerAddress,
    path_mtu: Mtu,
    dest_qpn: Qpn,
    rq_psn: Psn,
    max_dest_rd_atomic: u8,
    min_rnr_timer: u8,
    sq_psn: Psn,
    max_rd_atomic: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    timeout: u8,
    path_mig_state: PathMigState,
}

/// Why a queue pair cannot be modified. All of them are `EINVAL`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModifyError {
    /// No such queue pair.
    UnknownQp,
    /// The states do not follow each other.
    Transition {
        /// From here.
        from: QpState,
        /// To there.
        to: QpState,
    },
    /// An attribute that the change needs is missing.
    Missing {
        /// The change.
        to: QpState,
        /// The attribute, as `ibv_modify_qp(3)` names it.
        attribute: &'static str,
    },
    /// An attribute that the change does not take.
    NotAllowed {
        /// The change.
        to: QpState,
        /// The attribute.
        attribute: &'static str,
    },
    /// A value out of range.
    Value {
        /// The attribute.
        attribute: &'static str,
        /// The permitted values.
        allowed: &'static str,
    },
}

impl fmt::Display for ModifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownQp => f.write_str("no such queue pair"),
            Self::Transition { from, to } => write!(
                f,
                "a queue pair cannot go from {from} to {to}: RESET, INIT, RTR, RTS follow each \
                 other, RTS and SQD alternate, SQE goes to RTS, and ERR and RESET can be reached from everywhere"
            ),
            Self::Missing { to, attribute } => write!(f, "the change to {to} needs {attribute}"),
            Self::NotAllowed { to, attribute } => {
                write!(f, "the change to {to} does not take {attribute}")
            }
            Self::Value { attribute, allowed } => write!(f, "{attribute} must be {allowed}"),
        }
    }
}

impl core::error::Error for ModifyError {}

/// An attribute of the mask, as a bit.
macro_rules! attributes {
    ($( $bit:ident = $field:ident $name:literal, )*) => {
        #[repr(u32)]
        enum Bit { $( $bit, )* }

        /// Bit and name of every attribute.
        const NAMES: &[(u32, &str)] = &[$( (1 << Bit::$bit as u32, $name), )*];

        impl QpAttr {
            fn mask(&self) -> u32 {
                0 $( | u32::from(self.$field.is_some()) << Bit::$bit as u32 )*
            }

            /// Those of a mask.
            fn only(&self, mask: u32) -> Self {
                Self { $( $field: self.$field.filter(|_| mask & $bit != 0), )* }
            }
        }

        $( #[allow(non_upper_case_globals)] const $bit: u32 = 1 << Bit::$bit as u32; )*
    };
}

attributes! {
    State = state "IBV_QP_STATE",
    CurState = cur_state "IBV_QP_CUR_STATE",
    SqdNotify = sqd_async_notify "IBV_QP_EN_SQD_ASYNC_NOTIFY",
    PkeyIndex = pkey_index "IBV_QP_PKEY_INDEX",
    Port = port "IBV_QP_PORT",
    AccessFlags = access "IBV_QP_ACCESS_FLAGS",
    Qkey = qkey "IBV_QP_QKEY",
    Av = peer "IBV_QP_AV",
    PathMtu = path_mtu "IBV_QP_PATH_MTU",
    DestQpn = dest_qpn "IBV_QP_DEST_QPN",
    RqPsn = rq_psn "IBV_QP_RQ_PSN",
    MaxDestRdAtomic = max_dest_rd_atomic "IBV_QP_MAX_DEST_RD_ATOMIC",
    MinRnrTimer = min_rnr_timer "IBV_QP_MIN_RNR_TIMER",
    SqPsn = sq_psn "IBV_QP_SQ_PSN",
    MaxRdAtomic = max_rd_atomic "IBV_QP_MAX_QP_RD_ATOMIC",
    RetryCnt = retry_cnt "IBV_QP_RETRY_CNT",
    RnrRetry = rnr_retry "IBV_QP_RNR_RETRY",
    Timeout = timeout "IBV_QP_TIMEOUT",
    AltPathTo = alt_path "IBV_QP_ALT_PATH",
    MigState = path_mig_state "IBV_QP_PATH_MIG_STATE",
}

/// From, to, required attributes, further optional attributes.
type Transition = (QpState, QpState, u32, u32);

/// Another path, and when to take it.
const MIGRATION: u32 = AltPathTo | MigState;

// A queue pair can go to RESET and ERR from every state. `transitions.txt` lists and draws the
// tables.

const RC: &[Transition] = &[
    (QpState::Reset, QpState::Init, State | PkeyIndex | Port | AccessFlags, 0),
    (QpState::Init, QpState::Init, 0, State | PkeyIndex | Port | AccessFlags),
    (
        QpState::Init,
        QpState::Rtr,
        State | Av | PathMtu | DestQpn | RqPsn | MaxDestRdAtomic | MinRnrTimer,
        PkeyIndex | AccessFlags | AltPathTo,
    ),
    (
        QpState::Rtr,
        QpState::Rts,
        State | SqPsn | MaxRdAtomic | RetryCnt | RnrRetry | Timeout,
        CurState | AccessFlags | MinRnrTimer | MIGRATION,
    ),
    (QpState::Rts, QpState::Rts, 0, State | CurState | AccessFlags | MinRnrTimer | MIGRATION),
    (QpState::Rts, QpState::Sqd, State, SqdNotify),
    (
        QpState::Sqd,
        QpState::Sqd,
        0,
        State
            | PkeyIndex
            | Port
            | AccessFlags
            | Av
            | MaxDestRdAtomic
            | MinRnrTimer
            | MaxRdAtomic
            | RetryCnt
            | RnrRetry
            | Timeout
            | MIGRATION,
    ),
    (QpState::Sqd, QpState::Rts, State, CurState | AccessFlags | MinRnrTimer | MIGRATION),
];

const UC: &[Transition] = &[
    (QpState::Reset, QpState::Init, State | PkeyIndex | Port | AccessFlags, 0),
    (QpState::Init, QpState::Init, 0, State | PkeyIndex | Port | AccessFlags),
    (
        QpState::Init,
        QpState::Rtr,
        State | Av | PathMtu | DestQpn | RqPsn,
        PkeyIndex | AccessFlags | AltPathTo,
    ),
    (QpState::Rtr, QpState::Rts, State | SqPsn, CurState | AccessFlags | MIGRATION),
    (QpState::Rts, QpState::Rts, 0, State | CurState | AccessFlags | MIGRATION),
    (QpState::Rts, QpState::Sqd, State, SqdNotify),
    (QpState::Sqd, QpState::Sqd, 0, State | PkeyIndex | AccessFlags | Av | MIGRATION),
    (QpState::Sqd, QpState::Rts, State, CurState | AccessFlags | MIGRATION),
    (QpState::Sqe, QpState::Rts, State, CurState | AccessFlags),
];

const UD: &[Transition] = &[
    (QpState::Reset, QpState::Init, State | PkeyIndex | Port | Qkey, 0),
    (QpState::Init, QpState::Init, 0, State | PkeyIndex | Port | Qkey),
    (QpState::Init, QpState::Rtr, State, PkeyIndex | Qkey),
    (QpState::Rtr, QpState::Rts, State | SqPsn, CurState | Qkey),
    (QpState::Rts, QpState::Rts, 0, State | CurState | Qkey),
    (QpState::Rts, QpState::Sqd, State, SqdNotify),
    (QpState::Sqd, QpState::Sqd, 0, State | PkeyIndex | Qkey),
    (QpState::Sqd, QpState::Rts, State, CurState | Qkey),
    (QpState::Sqe, QpState::Rts, State, CurState | Qkey),
];

const fn transitions(qp_type: QpType) -> &'static [Transition] {
    match qp_type {
        QpType::Rc => RC,
        QpType::Uc => UC,
        QpType::Ud => UD,
    }
}

impl QpAttr {
    /// The changes to INIT, RTR and RTS, one after the other, of a queue pair of this type that is
    /// in RESET. Each takes those of these attributes that it needs.
    #[must_use]
    pub fn steps(&self, qp_type: QpType) -> [Self; 3] {
        [QpState::Init, QpState::Rtr, QpState::Rts].map(|to| {
            let mut rows = transitions(qp_type).iter();
            let row = rows.find(|row| row.1 == to && row.0 != to).expect("one leads to it");
            Self { state: Some(to), ..*self }.only(row.2)
        })
    }

    /// The state that the change leads to from `from`, if `ibv_modify_qp(3)` permits it for queue
    /// pairs of this type.
    ///
    /// # Errors
    /// [`ModifyError`] names the attribute that is missing, not allowed or out of range, or says
    /// that the states do not follow each other.
    pub fn check(&self, qp_type: QpType, from: QpState) -> Result<QpState, ModifyError> {
        let to = self.state.unwrap_or(from);
        self.check_values()?;
        if self.cur_state.is_some_and(|is| is != from) {
            let allowed = "the state that the queue pair is in";
            return Err(ModifyError::Value { attribute: "IBV_QP_CUR_STATE", allowed });
        }
        if self.state.is_some() && matches!(to, QpState::Reset | QpState::Err) {
            return self.check_mask(to, State, 0).map(|()| to);
        }
        let Some((_, _, required, optional)) =
            transitions(qp_type).iter().find(|row| (row.0, row.1) == (from, to))
        else {
            return Err(ModifyError::Transition { from, to });
        };
        self.check_mask(to, *required, *optional).map(|()| to)
    }

    /// Whether a queue pair in `from` may take it as its send queue is now: another path to the
    /// peer only when nothing that was begun is on the old one.
    pub(crate) fn check_drained(
        &self,
        from: QpState,
        is_drained: impl FnOnce() -> bool,
    ) -> Result<(), ModifyError> {
        if from != QpState::Sqd || self.peer.is_none() || is_drained() {
            return Ok(());
        }
        let allowed = "set after all requests that were begun are done (IBV_EVENT_SQ_DRAINED)";
        Err(ModifyError::Value { attribute: "IBV_QP_AV", allowed })
    }

    fn check_mask(&self, to: QpState, required: u32, optional: u32) -> Result<(), ModifyError> {
        let mask = self.mask();
        for (bit, attribute) in NAMES {
            if required & bit != 0 && mask & bit == 0 {
                return Err(ModifyError::Missing { to, attribute });
            }
            if mask & bit != 0 && (required | optional) & bit == 0 {
                return Err(ModifyError::NotAllowed { to, attribute });
            }
        }
        Ok(())
    }

    fn check_values(&self) -> Result<(), ModifyError> {
        let small = [
            (self.min_rnr_timer, "IBV_QP_MIN_RNR_TIMER", 31, "0 to 31"),
            (self.timeout, "IBV_QP_TIMEOUT", 31, "0 to 31"),
            (self.retry_cnt, "IBV_QP_RETRY_CNT", 7, "0 to 7"),
            (self.rnr_retry, "IBV_QP_RNR_RETRY", 7, "0 to 7"),
            (self.max_rd_atomic, "IBV_QP_MAX_QP_RD_ATOMIC", 128, "0 to 128"),
            (self.max_dest_rd_atomic, "IBV_QP_MAX_DEST_RD_ATOMIC", 128, "0 to 128"),
        ];
        for (value, attribute, max, allowed) in small {
            if value.is_some_and(|value| value > max) {
                return Err(ModifyError::Value { attribute, allowed });
            }
        }
        if self.pkey_index.is_some_and(|index| index != 0) {
            return Err(ModifyError::Value { attribute: "IBV_QP_PKEY_INDEX", allowed: "0" });
        }
        if self.port.is_some_and(|port| port != 1) {
            return Err(ModifyError::Value { attribute: "IBV_QP_PORT", allowed: "1" });
        }
        if self.peer.is_some_and(|peer| peer.local.is_ipv4() != peer.remote.is_ipv4()) {
            return Err(ModifyError::Value {
                attribute: "IBV_QP_AV",
                allowed: "two addresses of one family",
            });
        }
        match self.alt_path {
            Some(AltPath { port, pkey_index, timeout, .. })
                if port != 1 || pkey_index != 0 || timeout > 31 =>
            {
                Err(ModifyError::Value {
                    attribute: "IBV_QP_ALT_PATH",
                    allowed: "on port 1, with P_Key index 0 and a timeout of 0 to 31",
                })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_needs_the_four_attributes_of_the_manual() {
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::NONE),
            ..QpAttr::default()
        };
        assert_eq!(init.check(QpType::Rc, QpState::Reset), Ok(QpState::Init));
        let without = QpAttr { port: None, ..init };
        let missing = ModifyError::Missing { to: QpState::Init, attribute: "IBV_QP_PORT" };
        assert_eq!(without.check(QpType::Rc, QpState::Reset), Err(missing));
        let more = QpAttr { timeout: Some(14), ..init };
        let extra = ModifyError::NotAllowed { to: QpState::Init, attribute: "IBV_QP_TIMEOUT" };
        assert_eq!(more.check(QpType::Rc, QpState::Reset), Err(extra));
        assert!(matches!(
            init.check(QpType::Rc, QpState::Rts),
            Err(ModifyError::Transition { .. })
        ));
    }

    #[test]
    fn error_and_reset_can_be_reached_from_everywhere() {
        for qp_type in QpType::ALL {
            for from in QpState::ALL {
                for to in [QpState::Err, QpState::Reset] {
                    let attr = QpAttr { state: Some(to), ..QpAttr::default() };
                    assert_eq!(attr.check(qp_type, from), Ok(to));
                }
            }
        }
    }

    /// The tables as text, first for people, then for `dot`.
    fn drawn() -> String {
        use std::fmt::Write;
        let names = |mask: u32| {
            let names = NAMES.iter().filter(|(bit, _)| mask & bit != 0 && *bit != State);
            let list: Vec<_> = names.map(|(_, name)| name.trim_start_matches("IBV_QP_")).collect();
            if list.is_empty() { "-".into() } else { list.join(" ") }
        };
        let mut text = String::new();
        for qp_type in QpType::ALL {
            writeln!(text, "{qp_type}\nfrom   to     needs; takes besides").unwrap();
            for (from, to, required, optional) in transitions(qp_type) {
                let (from, to) = (from.to_string(), to.to_string());
                let (required, optional) = (names(*required), names(*optional));
                writeln!(text, "{from:6} {to:6} {required}; {optional}").unwrap();
            }
            text += "any    RESET  -; -\nany    ERR    -; -\n\n";
        }
        for qp_type in QpType::ALL {
            writeln!(text, "digraph {qp_type} {{").unwrap();
            let table = transitions(qp_type);
            for (from, to, ..) in table {
                writeln!(text, "    {from} -> {to};").unwrap();
            }
            let known = |state: &QpState| {
                *state == QpState::Err || table.iter().any(|(from, ..)| from == state)
            };
            for from in QpState::ALL.iter().filter(|state| known(state)) {
                writeln!(text, "    {from} -> RESET [style=dotted];").unwrap();
                writeln!(text, "    {from} -> ERR [style=dashed];").unwrap();
            }
            text += "}\n";
        }
        text
    }

    #[test]
    fn the_drawing_shows_the_tables() {
        let drawn = drawn();
        assert_eq!(include_str!("transitions.txt"), drawn, "transitions.txt should be:\n{drawn}");
    }

    #[test]
    fn the_state_that_it_is_in_must_be_named_right() {
        let attr = |cur_state| QpAttr { cur_state: Some(cur_state), ..QpAttr::default() };
        for is in [QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe] {
            let checked = attr(is).check(QpType::Uc, QpState::Rts);
            assert_eq!(checked.is_ok(), is == QpState::Rts, "{is}");
        }
        // Not before RTR.
        let early = QpAttr { state: Some(QpState::Rtr), ..attr(QpState::Init) };
        let missing = early.check(QpType::Ud, QpState::Init);
        assert!(matches!(missing, Err(ModifyError::NotAllowed { .. })), "{missing:?}");
    }

    #[test]
    fn another_path_is_checked() {
        let good = AltPath {
            remote: [10, 0, 0, 1].into(),
            sgid_index: 0,
            pkey_index: 0,
            port: 1,
            timeout: 31,
        };
        for (path, is_good) in [
            (good, true),
            (AltPath { port: 0, ..good }, false),
            (AltPath { port: 2, ..good }, false),
            (AltPath { pkey_index: 1, ..good }, false),
            (AltPath { timeout: 32, ..good }, false),
        ] {
            let attr = QpAttr { alt_path: Some(path), ..QpAttr::default() };
            assert_eq!(attr.check(QpType::Rc, QpState::Rts).is_ok(), is_good, "{path:?}");
            assert!(attr.check(QpType::Ud, QpState::Rts).is_err());
        }
    }

    #[test]
    fn values_are_bounded() {
        let attr = QpAttr { retry_cnt: Some(8), ..QpAttr::default() };
        assert!(matches!(attr.check(QpType::Rc, QpState::Rts), Err(ModifyError::Value { .. })));
    }
}
