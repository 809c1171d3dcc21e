//! Packets that are lost between two sides, and a request of Soft-RoCE's that is caught by it.
//!
//! A SEND or WRITE of several packets that is acknowledged while Soft-RoCE sends it again does not complete (see the table of its departures). If the
//! answer to the last packet that came again is lost then, or that packet, the request stays where it is: it is neither repeated nor given up, and
//! completes when something behind it is acknowledged. That is what is done here, without losses: if something behind it had to be sent again, the
//! request would go with it, as an empty one. It is said, and only done if who asks is caught indeed and who answers is not at fault: nothing has come
//! for longer than all repetitions take, something was lost and part of what was asked for had come twice, and all of it had come when the next request
//! did; and no more than twice in a cell.

use super::node::{PATIENCE_MS, Step, signaled};
use super::scenario::Session;
use super::wire::Losing;
use crate::agent::machine::Kind;
use crate::agent::proto::{Completion, Heard, Opcode, Send, State};

/// Longer than all repetitions take.
const SILENCE_MS: u64 = PATIENCE_MS / 5;

/// Losses, and what who answers had heard before what was posted last.
pub(super) struct Losses {
    /// From who asks (`true`) or from who answers, and how many percent.
    of: Vec<(bool, f64)>,
    rules: Vec<Box<dyn Losing>>,
    /// What rules that are gone have lost.
    before: Vec<u64>,
    heard: Heard,
    lost: u64,
    /// How often a request was freed.
    freed: u32,
}

/// More requests than this are not caught in one cell by chance: about one cell in a hundred has one.
const FREED_MAX: u32 = 2;

impl Losses {
    /// Loses so many percent of what who asks sends (`true`), or who answers.
    ///
    /// # Errors
    /// As [`lose`](super::Wire::lose).
    pub(super) fn begin(s: &Session<'_>, of: &[(bool, f64)]) -> Step<Self> {
        let (of, before) = (of.to_vec(), vec![0; of.len()]);
        let mut losses =
            Self { of, rules: vec![], before, heard: Heard::default(), lost: 0, freed: 0 };
        losses.resume(s)?;
        Ok(losses)
    }

    /// Nothing is lost.
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

    /// How many packets were lost in the direction in which fewer were.
    ///
    /// # Errors
    /// As [`lost`](Losing::lost).
    pub(super) fn least(&self) -> Step<u64> {
        Ok(self.each()?.into_iter().min().unwrap_or(0))
    }

    /// How many packets were lost in each direction.
    fn each(&self) -> Step<Vec<u64>> {
        let each = self.before.iter().zip(&self.rules);
        each.map(|(before, rule)| Ok(before + rule.lost()?)).collect()
    }

    /// Whether requests may be caught.
    pub(super) fn may_catch(&self, s: &Session<'_>) -> bool {
        let kinds = (s.active.kind(), s.passive.kind());
        !self.of.is_empty() && kinds == (Kind::SoftRoce, Kind::Rocinante)
    }

    /// Posts requests of who asks.
    ///
    /// # Errors
    /// What the sides say.
    pub(super) fn post(&mut self, s: &mut Session<'_>, list: &[Send]) -> Step {
        if self.may_catch(s) {
            self.heard = s.passive.heard()?;
            self.lost = self.each()?.iter().sum();
        }
        s.active.post(list)
    }

    /// Takes the next completion of who asks, which must be the success of `wr_id`.
    ///
    /// # Errors
    /// It is another; or there is none, though the request is not caught.
    pub(super) fn succeeds(&mut self, s: &mut Session<'_>, wr_id: u64, opcode: Opcode) -> Step {
        if !self.may_catch(s) {
            return s.active.succeeds(wr_id, opcode);
        }
        match next(s)? {
            Some(wc) => s.active.is_success(&wc, wr_id, opcode),
            None => self.free(s, wr_id, opcode),
        }
    }

    /// Has something behind the request acknowledged.
    fn free(&mut self, s: &mut Session<'_>, wr_id: u64, opcode: Opcode) -> Step {
        let state = s.active.state()?;
        s.active.expect(&state, &State::Rts, "the state of who says nothing")?;
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
        s.passive.expect(&gaps, &heard.gaps, "what came too early, behind the request,")?;
        s.say("a SEND or WRITE that was acknowledged while it was sent again did not complete");
        self.resume(s)
    }
}

/// The next completion of who asks; nothing if it has said nothing for too long.
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
