//! Messages in both directions at once, and messages that may be lost.

use std::time::{Duration, Instant};

use rocinante::exchange::Exchange;

use super::so_far::SoFar;
use super::{PATIENCE, Round};
use crate::measure::{
    BulkOp, BulkResult, FlowPlan, Flowed, Idle, Lane, Lanes, MeasureError, Receive, Result, Until,
};
use crate::perf::test::Test;
use crate::session::join::Target;

/// Messages count as lost after this time without one, once the peer has reported that it sent all.
const LOST: Duration = Duration::from_millis(200);

impl Round<'_> {
    /// The lanes and parameters of SENDs in both directions, or of messages that may be lost;
    /// `None` for other tests.
    pub(super) fn flow(&self) -> Option<(Lanes<'_>, FlowPlan)> {
        let (plan, both) = (self.plan, self.plan.bidirectional);
        let loses = plan.connection.loses();
        if self.test != Test::SendBw || !(both || loses) {
            return None;
        }
        let half = self.mr.len() / 2;
        let lane =
            |(index, qp)| Lane { qp, landing: half, to: self.targets.get(index).map(Target::to) };
        let lanes: Vec<_> = self.qps.iter().map(|qp| &**qp).enumerate().map(lane).collect();
        let taken = self.size + lanes.first().map_or(0, Lane::head);
        let lanes = Lanes {
            ctx: &self.ctx,
            cq: &self.cq,
            channel: self.channel.as_ref(),
            mr: &self.mr,
            lanes,
        };
        let bulk = plan.bulk(BulkOp::Send, self.size, false);
        let sends = both || self.how.client;
        let receive = match (loses, both || !self.how.client) {
            (false, _) => Receive::Marked,
            (true, true) => Receive::Until,
            (true, false) => Receive::No,
        };
        let until = match plan.until(self.size) {
            // The sender says when the time is over.
            Until::Time(_) if !sends => Until::Messages(u64::MAX),
            until => until,
        };
        let what = FlowPlan {
            sends,
            receive,
            size: self.size,
            slots: (half / taken.max(1)).clamp(1, bulk.depth),
            stride: taken,
            depth: bulk.depth,
            recv_depth: plan.rx_depth as usize,
            list: bulk.list,
            signal_every: bulk.signal_every,
            until,
            mark_last: true,
        };
        Some((lanes, what))
    }

    /// Sends, receives, or both. A flow that may lose messages ends when both sides have reported
    /// the number that they sent, and no more arrive.
    pub(super) fn flow_by(
        &self,
        lanes: &Lanes<'_>,
        what: &FlowPlan,
        exchange: &mut Exchange,
        so_far: &mut SoFar,
    ) -> Result {
        // A first poll may find many messages at once, and all of them took time.
        let begin = Instant::now();
        let result = |flowed: &Flowed| {
            let messages = if what.sends { flowed.sent } else { flowed.received };
            BulkResult {
                messages,
                bytes: messages * self.size as u64,
                elapsed: if what.sends { flowed.elapsed } else { begin.elapsed() },
            }
        };
        let loses = self.plan.connection.loses();
        let mut words = Words::default();
        let mut received = 0;
        let idle = |flowed: &Flowed, idle: Duration| {
            if loses && words.are_over(exchange, flowed, idle)? {
                return Ok(Idle::End);
            }
            match idle {
                idle if idle < PATIENCE => Ok(Idle::Wait),
                _ => Err(MeasureError::Silence { what: "message", patience: PATIENCE }),
            }
        };
        let observe = |flowed: &Flowed| {
            received = flowed.received;
            so_far.observe(&result(flowed));
        };
        let flowed = lanes.flow(what, observe, idle)?;
        if !loses {
            so_far.bulk = result(&flowed);
            return Ok(());
        }
        let theirs = words.close(exchange, flowed.sent)?;
        let arrived = tell_number(exchange, "received", received)?;
        so_far.lost = Some(if what.sends {
            flowed.sent.saturating_sub(arrived)
        } else {
            theirs.saturating_sub(received)
        });
        Ok(())
    }
}

/// The words of two sides whose messages may be lost.
#[derive(Debug, Default)]
struct Words {
    said: bool,
    /// Number of messages that the peer sent, once it has reported it.
    theirs: Option<u64>,
}

impl Words {
    /// To be called while no message arrives. Reports the number of messages sent, once all are
    /// sent, and reads the peer's report. Returns whether the missing messages are lost.
    fn are_over(
        &mut self,
        exchange: &mut Exchange,
        flowed: &Flowed,
        idle: Duration,
    ) -> Result<bool> {
        if flowed.all_sent && !self.said {
            self.say(exchange, flowed.sent)?;
        }
        if self.theirs.is_none()
            && let Some(line) = exchange.try_hear()?
        {
            self.theirs = Some(number(exchange, "sent", &line)?);
        }
        let late = |theirs| flowed.received >= theirs || idle >= LOST;
        Ok(self.said && self.theirs.is_some_and(late))
    }

    fn say(&mut self, exchange: &mut Exchange, sent: u64) -> Result {
        self.said = true;
        Ok(exchange.say(&format!("sent {sent}"))?)
    }

    /// Number of messages that the peer sent. Waits for its report.
    fn close(mut self, exchange: &mut Exchange, sent: u64) -> Result<u64> {
        if !self.said {
            self.say(exchange, sent)?;
        }
        match self.theirs {
            Some(theirs) => Ok(theirs),
            None => {
                let line = exchange.hear()?;
                number(exchange, "sent", &line)
            }
        }
    }
}

/// Tells the peer a number, and returns the peer's.
fn tell_number(exchange: &mut Exchange, what: &str, own: u64) -> Result<u64> {
    exchange.say(&format!("{what} {own}"))?;
    let line = exchange.hear()?;
    number(exchange, what, &line)
}

/// The number in the peer's report.
fn number(exchange: &Exchange, what: &str, line: &str) -> Result<u64> {
    let number = line.strip_prefix(what).and_then(|rest| rest.trim_start().parse().ok());
    number.ok_or_else(|| {
        exchange
            .error("it does not report its number of messages: use the same version on both sides")
            .into()
    })
}
