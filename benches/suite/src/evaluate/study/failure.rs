//! A connection that an event disturbs.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rocinante_cli::output::{Failure, Result};
use rocinante_lab::Changes;

use super::super::experiment::Event;
use super::{Figures, in_words, milliseconds, named};
use crate::workers::{Errand, Link, PlaceArgs, Places, Sent, Work, now};

/// The longest time until the first message has arrived.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// How long messages are sent before the event.
const BEFORE: Duration = Duration::from_millis(100);
/// How long they are sent beside an event that should not disturb them.
const BESIDE: Duration = Duration::from_secs(1);
/// The containers of the two processes, and the place where the second moves to.
const RECEIVER: usize = 1;
const MOVED: usize = 2;

/// The figures of the event with the number `x`, which is an error to the sender within
/// `patience`, or none.
pub(super) fn measure(
    places: &mut Places,
    args: &PlaceArgs,
    work: &Work,
    x: u64,
    patience: Duration,
) -> Result<Figures> {
    let event = Event::of(x).ok_or_else(|| Failure::Failed("there is no such event".into()))?;
    let mut own;
    let places = if event == Event::MovedContainer {
        own = Places::of_a_move(args)?;
        &mut own
    } else {
        places
    };
    let time = if event == Event::RestartedAgent { BESIDE } else { patience };
    places.lab()?;
    let mut running = places.on_demand(Link::Plain, work, 0)?;
    running.ready(STARTS_WITHIN)?.check(work)?;
    running.ask(Errand { messages: u64::MAX, millis: time.as_millis() as u64 });
    sleep(BEFORE);
    let (at, began) = (now(), Instant::now());
    let mut pulled = Changes::default();
    match event {
        Event::KilledPeer => running.kill_second(),
        Event::PulledLink => {
            let lab = places.lab()?;
            let set = |state| format!("ip link set {} {state}", lab.container(1).host_end());
            pulled.make(lab.host(), &set("down"), &set("up")).map_err(in_words)?;
        }
        Event::RestartedAgent => places.restart_agent()?,
        Event::MovedContainer => {
            let lab = places.lab()?;
            let [old, new] = [RECEIVER, MOVED].map(|index| lab.container(index));
            new.take_addresses(old).map_err(in_words)?;
        }
    }
    let restarted = began.elapsed();
    let sent = running.sent(patience)?;
    let waited = match event {
        Event::KilledPeer | Event::MovedContainer => began.elapsed(),
        Event::RestartedAgent => restarted,
        Event::PulledLink => Duration::ZERO,
    };
    let mut repaired = Instant::now();
    pulled.undo().map_err(in_words)?;
    let sent = match sent {
        Some(sent) => sent,
        // A stream goes on once its link is back.
        None => {
            let sent = running.sent(3 * patience)?;
            repaired = Instant::now();
            sent.ok_or_else(|| Failure::Failed("no message and no error any more".into()))?
        }
    };
    drop(running);
    let place = if event == Event::MovedContainer { MOVED } else { RECEIVER };
    let mut again = places.on_demand_at(work, place)?;
    again.ready(STARTS_WITHIN)?.check(work)?;
    Ok(figures(&sent, at, waited + repaired.elapsed()))
}

/// The figures of the messages beside an event at the time `at`, after which new programs worked
/// `again`.
fn figures(sent: &Sent, at: u64, again: Duration) -> Figures {
    let mut figures = named([("again_ms", milliseconds(again))]);
    figures.extend(match sent.error {
        Some(_) => {
            let after = Duration::from_nanos(sent.at.saturating_sub(at));
            named([("errors", 1.0), ("error_ms", milliseconds(after))])
        }
        None => named([("errors", 0.0), ("stall_ms", sent.longest_ms)]),
    });
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_time_and_a_stall_is_no_error() {
        let sent = |error: Option<&str>| Sent {
            messages: 7,
            longest_ms: 40.0,
            error: error.map(str::to_owned),
            at: 9_000_000,
        };
        let again = Duration::from_millis(80);
        let failed = figures(&sent(Some("RETRY_EXC_ERR")), 2_000_000, again);
        assert_eq!(failed, named([("again_ms", 80.0), ("errors", 1.0), ("error_ms", 7.0)]));
        let went_on = figures(&sent(None), 2_000_000, again);
        assert_eq!(went_on, named([("again_ms", 80.0), ("errors", 0.0), ("stall_ms", 40.0)]));
    }
}
