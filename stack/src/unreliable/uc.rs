//! The responder of an unreliable connection (IBTA volume 1, 9.8.2 \[M\]; `rxe_resp.c`).
//!
//! It answers nothing. A message with a missing or refused packet is dropped as a whole, which only
//! the counters tell. The receive that it had begun to fill is the next message's.

use super::Qp;
use crate::ingress::SourceCheck;
use crate::mem::Memory;
use crate::peer::PeerId;
use crate::qp::message::{Message, Refusal, Rights, fail};
use crate::shared::Shared;
use crate::srq::Receives;
use crate::tuning::pacing::LATE;
use crate::types::Seq;
use crate::verbs::{Completions, WcStatus};
use crate::wire::{Operation, Packet};

/// Where the peer is, and how far its messages are.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) source: SourceCheck,
    pub(super) receiver: PeerId,
    /// Expected PSN.
    epsn: Seq,
    message: Message,
}

/// The outcome of a packet.
#[derive(Debug)]
enum Outcome {
    Placed,
    /// It came too late, or again.
    Late,
    /// Its message is incomplete.
    Incomplete,
    Refused(Refusal),
}

impl Connection {
    pub(super) fn new(receiver: PeerId, psn: Seq) -> Self {
        Self { source: SourceCheck::default(), receiver, epsn: psn, message: Message::None }
    }

    pub(super) fn expected(&self) -> Seq {
        self.epsn
    }

    /// Takes a request; returns also whether packets before it are missing.
    fn request(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        receives: &mut Receives<'_>,
        memory: &mut impl Memory,
    ) -> (Outcome, bool) {
        let psn = packet.bth().psn.expand(self.epsn);
        if psn < self.epsn && self.epsn - psn < LATE {
            return (Outcome::Late, false);
        }
        let gap = psn != self.epsn;
        // One epoch up at least, so that smaller numbers exist.
        self.epsn = packet.bth().psn.first() + 1;
        if gap || packet.info.place.begins() {
            // The message before cannot become whole any more.
            self.message = Message::None;
        }
        if self.message == Message::None && !packet.info.place.begins() {
            return (Outcome::Incomplete, gap);
        }
        let placed = match packet.info.operation {
            Operation::Send => self.message.send(packet, rights, receives, memory),
            Operation::Write => self.message.write(packet, rights, receives, memory),
            _ => Err(Refusal::Invalid),
        };
        match placed {
            Ok(_) => (Outcome::Placed, gap),
            Err(refusal) => {
                self.message = Message::None;
                (Outcome::Refused(refusal), gap)
            }
        }
    }
}

impl Qp {
    /// A packet from the peer.
    #[inline]
    pub(super) fn handle_request<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let Some(connection) = &mut self.connection else { return };
        let rights = self.core.rights(self.mtu);
        let mut receives = self.core.receives(&mut shared.srqs);
        let (outcome, gap) = connection.request(packet, &rights, &mut receives, host);
        shared.counters.out_of_seq_request += u64::from(gap);
        match outcome {
            Outcome::Placed => {
                let done = receives.done;
                self.core.tally.accepted(&mut shared.counters, packet.payload().len());
                if packet.info.place.ends() {
                    self.core.tally.executed(&mut shared.counters);
                }
                if let Some(received) = done {
                    self.core.complete_recv(&received, host);
                }
            }
            Outcome::Late => shared.counters.duplicate_request += 1,
            Outcome::Incomplete => shared.drops.incomplete += 1,
            Outcome::Refused(Refusal::Invalid) => shared.counters.remote_invalid_request += 1,
            Outcome::Refused(Refusal::Access) => shared.counters.remote_access_errors += 1,
            Outcome::Refused(Refusal::NotReady) => shared.drops.no_receive += 1,
            Outcome::Refused(Refusal::Receive(_, WcStatus::LocLenErr)) => {
                shared.drops.too_long += 1;
            }
            Outcome::Refused(Refusal::Receive(_, status)) => {
                self.fail_receive(status, shared, host);
            }
        }
    }

    /// The oldest receive cannot be placed in, which is our program's mistake: it fails, and the
    /// queue pair with it.
    pub(super) fn fail_receive<H: Completions>(
        &mut self,
        status: WcStatus,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let mut receives = self.core.receives(&mut shared.srqs);
        fail(&mut receives, status);
        if let Some(received) = receives.done {
            self.core.complete_recv(&received, host);
        }
        self.break_down(shared, host);
    }
}
