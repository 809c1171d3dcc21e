//! The opcodes of the packets of a request.

use crate::verbs::SendOp;
use crate::wire::Opcode;

/// The opcode on a reliable connection of a packet of a SEND or WRITE.
pub(crate) fn data_opcode(op: &SendOp, begins: bool, ends: bool) -> Opcode {
    let imm = op.immediate().is_some();
    let send = !matches!(op, SendOp::Write { .. });
    if ends && matches!(op, SendOp::SendInv { .. }) {
        return match begins {
            true => Opcode::RC_SEND_ONLY_WITH_INVALIDATE,
            false => Opcode::RC_SEND_LAST_WITH_INVALIDATE,
        };
    }
    match (send, begins, ends, imm) {
        (true, true, true, false) => Opcode::RC_SEND_ONLY,
        (true, true, true, true) => Opcode::RC_SEND_ONLY_WITH_IMMEDIATE,
        (true, true, false, _) => Opcode::RC_SEND_FIRST,
        (true, false, false, _) => Opcode::RC_SEND_MIDDLE,
        (true, false, true, false) => Opcode::RC_SEND_LAST,
        (true, false, true, true) => Opcode::RC_SEND_LAST_WITH_IMMEDIATE,
        (false, true, true, false) => Opcode::RC_RDMA_WRITE_ONLY,
        (false, true, true, true) => Opcode::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE,
        (false, true, false, _) => Opcode::RC_RDMA_WRITE_FIRST,
        (false, false, false, _) => Opcode::RC_RDMA_WRITE_MIDDLE,
        (false, false, true, false) => Opcode::RC_RDMA_WRITE_LAST,
        (false, false, true, true) => Opcode::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE,
    }
}
