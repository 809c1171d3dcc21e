//! `rdma_set_option(3)`.

use rocinante_stack::verbs::QpType;

use super::id::Phase;
use super::{Answer, Command, Outcome};

impl Command<'_> {
    pub(super) fn set_option(&self) -> Outcome<Answer> {
        /// `RDMA_OPTION_ID`.
        const OF_IDS: u32 = 0;
        const TOS: u32 = 0;
        const REUSEADDR: u32 = 1;
        const AFONLY: u32 = 2;
        const ACK_TIMEOUT: u32 = 3;
        /// The most that the kernel copies (`KMALLOC_MAX_SIZE`), which it does first.
        const LEN_MAX: u32 = 4 << 20;
        let id = self.id(8)?;
        let (level, name, len) = (self.body.u32(12), self.body.u32(16), self.body.u32(20));
        if len > LEN_MAX {
            return Err(libc::EINVAL);
        }
        self.memory.check(self.body.u64(0), len as usize, false)?;
        if level != OF_IDS {
            // Paths are given to InfiniBand's devices only.
            return Err(if level == 1 { libc::EINVAL } else { libc::ENOSYS });
        }
        let wanted = match name {
            TOS | ACK_TIMEOUT => 1,
            REUSEADDR | AFONLY => 4,
            _ => return Err(libc::ENOSYS),
        };
        if len != wanted {
            return Err(libc::EINVAL);
        }
        let value = self.memory.load(self.body.u64(0), wanted as usize)?;
        let is_set = value.iter().any(|byte| *byte != 0);
        let first = value.first().copied().unwrap_or(0);
        let mut held = id.held.lock();
        match name {
            TOS => held.tos = first,
            // An exponent of 4.096 µs, 5 bits, of reliable connections.
            ACK_TIMEOUT if first > 31 || id.qp_type != QpType::Rc => return Err(libc::EINVAL),
            ACK_TIMEOUT => held.ack_timeout = Some(first),
            // As `rdma_set_reuseaddr` and `rdma_set_afonly` of `cma.c`.
            REUSEADDR => match (&held.phase, is_set) {
                (Phase::Idle, _) => held.reuse = is_set,
                (Phase::Listening(_), _) | (_, false) => return Err(libc::EINVAL),
                (_, true) => held.reuse = true,
            },
            _ if !matches!(held.phase, Phase::Idle | Phase::Bound) => return Err(libc::EINVAL),
            _ => held.one_family = Some(is_set),
        }
        // They hold for a port that it has already.
        if let Some(local) = held.local.filter(|_| held.has_port) {
            let _ = self.it.ports.lock().change(id.space, &held.bound(&id, local));
        }
        Ok(Answer::default())
    }
}
