//! The opcodes of the packets of a request.

use crate::verbs::SendOp;
use crate::wire::Opcode;

/// The opcode on a reliable connection of a packet of a SEND or WRITE.
pub(crate) fn data_opcode(op: &SendOp, begins: bool, ends: bool) -> Opcode {
    match (op, begins, ends) {
        (SendOp::Write { imm: None, .. }, true, true) => Opcode::RC_RDMA_WRITE_ONLY,
        (SendOp::Write { .. }, true, true) => Opcode::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE,
        (SendOp::Write { .. }, true, false) => Opcode::RC_RDMA_WRITE_FIRST,
        (SendOp::Write { .. }, false, false) => Opcode::RC_RDMA_WRITE_MIDDLE,
        (SendOp::Write { imm: None, .. }, false, true) => Opcode::RC_RDMA_WRITE_LAST,
        (SendOp::Write { .. }, false, true) => Opcode::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE,
        (SendOp::SendInv { .. }, true, true) => Opcode::RC_SEND_ONLY_WITH_INVALIDATE,
        (SendOp::SendInv { .. }, false, true) => Opcode::RC_SEND_LAST_WITH_INVALIDATE,
        (_, true, false) => Opcode::RC_SEND_FIRST,
        (_, false, false) => Opcode::RC_SEND_MIDDLE,
        (_, true, true) if op.immediate().is_some() => Opcode::RC_SEND_ONLY_WITH_IMMEDIATE,
        (_, true, true) => Opcode::RC_SEND_ONLY,
        (_, false, true) if op.immediate().is_some() => Opcode::RC_SEND_LAST_WITH_IMMEDIATE,
        (_, false, true) => Opcode::RC_SEND_LAST,
    }
}
