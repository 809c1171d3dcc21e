//! Packet loss between two sides, and a fault of Soft-RoCE under loss: a stuck request.
//!
//! A SEND or WRITE of several packets that is acknowledged while Soft-RoCE retransmits it does not
//! complete (see the table of its departures). If the answer to its last retransmitted packet is
//! then lost, or that packet itself, the request is stuck. Soft-RoCE neither repeats it nor gives
//! it up. The request completes when a later one is acknowledged.
//!
//! So a stuck request is freed by posting a later one, without losses. If the later one had to be
//! retransmitted, the stuck request would go with it, as an empty one. Each case is reported.
//!
//! A request is freed only if the active side is really stuck and the passive side is not at fault.
//! Nothing has come for longer than all repetitions take. A packet was lost, and a part of the
//! posted requests had arrived twice. All of them had arrived before the later one did. A cell
//! frees at most two requests.

use super::node::{PATIENCE_MS, Step, signaled};
use super::scenario::Session;
use super::wire::Losing;
use crate::agent::machine::Kind;
use crate::agent::proto::{Completion, Heard, Opcode, QpState, Send};

/// Longer than all repetitions take.
const SILENCE_MS: u64 = PATIENCE_MS / 5;

/// Losses, and the state of the passive side before the last requests were posted.
pub(super) struct Losses {
    /// From the active side (`true`) or from the passive side, and the percentage.
    of: Vec<(bool, f64)>,
    rules: Vec<Box<dyn Losing>>,
    /// Losses of earlier rules.
    before: Vec<u64>,
    heard: Heard,
    lost: u64,
    /// Number of requests freed.
    freed: u32,
}

/// The most requests of a cell that Soft-RoCE forgets and that another packet sets free. One cell
/// in a hundred has one by chance; more is a fault.
const FREED_MAX: u32 = 2;

impl Losses {
    /// Loses this percentage of the packets of the active side (`true`) or of the passive side.
    pub(super) fn begin(s: &Session<'_>, of: &[(bool, f64)]) -> Step<Self> {
        let (of, before) = (of.to_vec(), vec![0; of.len()]);
        let mut losses =
            Self { of, rules: vec![], before, heard: Heard::default(), lost: 0, freed: 0 };
        losses.resume(s)?;
        Ok(losses)
    }

    /// No losses.
    pub(super) fn none() -> Self {
        let heard = Heard::default();
        Self { of: vec![], rules: vec![], before: vec![], heard, lost: 0, freed: 0 }
    }

    fn resume(&mut self, s: &Session<'_>) -> Step {
        let rules = self.of.iter().map(|(from_active, percent)| s.lose(*from_active, *percent));
        self.rules = rules.collect::<Step<_>>()?;
        Ok(())
    }

    fn pause(&mut self) -> Step {
        for (before, rule) in self.before.iter_mut().zip(&self.rules) {
            *before += rule.lost()?;
        }
        self.rules.clear();
        Ok(())
    }

    /// Packets lost in the direction with fewer losses.
    pub(super) fn least(&self) -> Step<u64> {
        Ok(self.each()?.into_iter().min().unwrap_or(0))
    }

    /// Packets lost in each direction.
    fn each(&self) -> Step<Vec<u64>> {
        let each = self.before.iter().zip(&self.rules);
        each.map(|(before, rule)| Ok(before + rule.lost()?)).collect()
    }

    /// Whether requests may get stuck.
    pub(super) fn may_catch(&self, s: &Session<'_>) -> bool {
        let kinds = (s.active.kind(), s.passive.kind());
        !self.of.is_empty() && kinds == (Kind::SoftRoce, Kind::Rocinante)
    }

    /// Posts requests of the active side. Error: the error of one of the sides.
    pub(super) fn post(&mut self, s: &mut Session<'_>, list: &[Send]) -> Step {
        if self.may_catch(s) {
            self.heard = s.passive.heard()?;
            self.lost = self.each()?.iter().sum();
        }
        s.active.post(list)
    }

    /// Takes the next completion of the active side, which must be the success of `wr_id`. Error:
    /// it is another; or there is none, though the request is not stuck.
    pub(super) fn succeeds(&mut self, s: &mut Session<'_>, wr_id: u64, opcode: Opcode) -> Step {
        if !self.may_catch(s) {
            return s.active.succeeds(wr_id, opcode);
        }
        match next(s)? {
            Some(wc) => s.active.is_success(&wc, wr_id, opcode),
            None => self.free(s, wr_id, opcode),
        }
    }

    /// Frees the stuck request: posts a later one without losses and waits for its acknowledgement.
    fn free(&mut self, s: &mut Session<'_>, wr_id: u64, opcode: Opcode) -> Step {
        let state = s.active.state()?;
        s.active.expect(&state, &QpState::Rts, "the state of the silent side")?;
        let heard = s.passive.heard()?;
        if heard.duplicates == self.heard.duplicates {
            return Err(format!("rxe says nothing, though nothing has come twice: {heard:?}"));
        }
        if self.each()?.iter().sum::<u64>() == self.lost {
            return Err(format!("rxe says nothing, though nothing was lost: {heard:?}"));
        }
        self.freed += 1;
        if self.freed > FREED_MAX {
            return Err(format!("{} requests of rxe's did not complete", self.freed));
        }
        self.pause()?;
        let nothing = signaled(u64::MAX, s.passive.write_to(0, None), &[]);
        s.active.post(&[Send { signaled: false, ..nothing }])?;
        s.active.succeeds(wr_id, opcode)?;
        let gaps = s.passive.heard()?.gaps;
        s.passive.expect(&gaps, &heard.gaps, "the number of packets behind a gap")?;
        s.say("a SEND or WRITE that was acknowledged while it was sent again did not complete");
        self.resume(s)
    }
}

/// The next completion of the active side; `None` if there was none for too long.
fn next(s: &mut Session<'_>) -> Step<Option<Completion>> {
    let mut heard = s.passive.heard()?;
    for _ in 0..PATIENCE_MS / SILENCE_MS {
        if let Some(wc) = s.active.poll(1, SILENCE_MS)?.pop() {
            return Ok(Some(wc));
        }
        let before = std::mem::replace(&mut heard, s.passive.heard()?);
        if heard == before {
            return Ok(None);
        }
    }
    Err(format!("rxe completes nothing, though it goes on asking: {heard:?}"))
}
