//! This side's part of a measurement.

use rocinante::exchange::Exchange;

use super::so_far::SoFar;
use super::{Round, SPREAD};
use crate::measure::{self, BulkOp, End, Pinging, Result, RoundTrip, Side, Times, Until};
use crate::perf::interval::Timed;
use crate::perf::test::{Atomic, Test};

/// Messages before the measured ones, at most. They fill caches and train predictors, and show that
/// the second side is ready. Large ones need fewer: together they have `SPREAD` bytes.
const WARM_UP: u64 = 100;

impl Round<'_> {
    /// Measures until the end, or fails; `so_far` has the result by then.
    pub(super) fn work(
        &self,
        ends: &[End<'_>],
        exchange: &mut Exchange,
        so_far: &mut SoFar,
    ) -> Result {
        match (self.flow(), self.test.bulk(self.plan.atomic)) {
            (Some((lanes, what)), _) => self.flow_by(&lanes, &what, exchange, so_far)?,
            (None, Some(BulkOp::Send)) if !self.how.client => {
                so_far.bulk =
                    measure::receive_bulk(ends, self.size, |result| so_far.observe(result))?;
            }
            (None, Some(op)) => {
                let inline = self.how.inline.is_some_and(|bytes| self.size <= bytes as usize);
                let what = self.plan.bulk(op, self.size, inline);
                so_far.bulk = measure::bulk(ends, &what, |result| so_far.observe(result))?;
            }
            (None, None) => {
                let (end, mut warm_up) = (&ends[0], measure::histogram());
                let enough = (SPREAD / self.size.max(1)).max(2) as u64;
                let until = Until::Messages(WARM_UP.min(enough));
                self.latency(end, exchange, until, &mut warm_up)?;
                so_far.warm = true;
                let until = self.plan.until(self.size);
                let SoFar { times, meter, .. } = so_far;
                self.latency(
                    end,
                    exchange,
                    until,
                    &mut Timed { all: times, meter: meter.as_ref() },
                )?;
            }
        }
        Ok(())
    }

    fn latency(
        &self,
        end: &End<'_>,
        exchange: &mut Exchange,
        until: Until,
        times: &mut impl Times,
    ) -> Result {
        let side = if self.how.client { Side::First } else { Side::Second };
        match self.test {
            Test::WriteLat => {
                let how = Pinging::Usual;
                measure::write_latency(end, exchange, how, side, self.size, until, times)
            }
            Test::ReadLat => measure::round_trips(end, RoundTrip::Read(self.size), until, times),
            Test::AtomicLat => {
                let what = match self.plan.atomic {
                    Atomic::FetchAdd => RoundTrip::FetchAdd,
                    Atomic::CompareSwap => RoundTrip::CompareSwap,
                };
                measure::round_trips(end, what, until, times)
            }
            _ => measure::send_latency(end, exchange, side, self.size, until, times),
        }
    }
}
