//! The state of the background thread: the thread that watches the port, and the events that wake
//! the background thread.
//!
//! All of it is one word, so that a change and the look that decides it are one step. The table
//! below has all changes by other threads; `transitions.txt` draws it. The background thread itself
//! goes to sleep ([`Watch::enter`]) and wakes up ([`Watch::wake_up`]).
//!
//! Two things stay beside the word. The program notes each poll by a plain store, which may lose
//! one: in the word it would take an atomic read-modify-write for each poll. And the time of the
//! next look is in the shard, because it only changes under its lock.

use crate::provider::sync::{AtomicU64, Ordering};

/// The activity of the background thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// It drives, or looks within [`standby::MIN`](crate::tuning::standby::MIN).
    Awake,
    /// It leaves the port to a program that polls without pause, and looks within
    /// [`standby::STEADY_MAX`](crate::tuning::standby::STEADY_MAX).
    CallerPolls,
    /// It leaves the port to a thread that waits on it, and looks within
    /// [`standby::MAX`](crate::tuning::standby::MAX).
    Standby,
    /// The same, and it looks when something is due.
    Resting,
    /// It sleeps on the port until something is due.
    Watching,
}

/// What another thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A deadline is earlier than the next look.
    Earlier,
    /// Something waits for the next call of the program, or is due already.
    Overdue,
    /// The program polls in a loop.
    Polled,
    /// The program asked for an event: it may be about to sleep.
    Armed,
    /// Another shard left mail.
    Mail,
    /// A thread waits on the port.
    Waits,
    /// It waits no more.
    Leaves,
    /// It waits no more, and no other does.
    LastLeaves,
    /// A thread sleeps on several shards.
    Sleeps,
    /// It is awake.
    Wakes,
    /// The device is closed.
    Stop,
}

/// How the background thread is to be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// It need not be.
    No,
    /// Only if a thread waits on the port: nothing else may look soon.
    IfWaited,
    /// When the deadline comes.
    InTime,
    /// After [`standby::MIN`](crate::tuning::standby::MIN): the program is busy, perhaps on the
    /// same processor.
    Soon,
    /// At once.
    Now,
}

const STATES: [State; 5] =
    [State::Awake, State::CallerPolls, State::Standby, State::Resting, State::Watching];
const EVENTS: [Event; 11] = [
    Event::Earlier,
    Event::Overdue,
    Event::Polled,
    Event::Armed,
    Event::Mail,
    Event::Waits,
    Event::Leaves,
    Event::LastLeaves,
    Event::Sleeps,
    Event::Wakes,
    Event::Stop,
];

/// For each event and state, in the order of [`EVENTS`] and [`STATES`]: the next state, and how the
/// background thread is woken.
const TABLE: [[(State, Call); STATES.len()]; EVENTS.len()] = {
    use Call::{IfWaited, InTime, No, Now, Soon};
    use State::{Awake as A, CallerPolls as C, Resting as R, Standby as S, Watching as W};
    [
        [(A, No), (C, No), (S, No), (R, InTime), (W, InTime)],
        [(A, No), (C, No), (A, Soon), (A, Soon), (A, Soon)],
        [(A, No), (C, No), (S, No), (R, No), (A, Soon)],
        [(A, No), (A, Soon), (S, No), (R, No), (W, No)],
        [(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],
        [(A, No), (C, No), (S, No), (R, No), (W, No)],
        [(A, No), (C, No), (S, No), (R, No), (W, No)],
        [(A, No), (C, No), (S, No), (A, Now), (W, No)],
        [(A, Now), (A, Now), (A, Now), (R, No), (W, No)],
        [(A, No), (C, No), (S, No), (R, No), (W, No)],
        [(A, Now), (A, Now), (A, Now), (A, Now), (A, Now)],
    ]
};

/// A value of the word.
///
/// Bits 0 to 7 are the state, 8 and 9 flags; 16 to 39 count the threads that wait on the port, 40
/// to 63 those that sleep on several shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View(u64);

/// The program has asked for an event since the background thread looked last.
const WANTS_EVENT: u64 = 1 << 8;
const STOPPED: u64 = 1 << 9;
const WAITER: u64 = 1 << 16;
const SLEEPER: u64 = 1 << 40;

impl View {
    #[inline]
    pub(super) fn state(self) -> State {
        STATES[(self.0 & 0xff) as usize % STATES.len()]
    }

    /// Whether nothing but a call makes it look within a moment.
    #[inline]
    pub(super) fn is_asleep(self) -> bool {
        self.0 & 0xff >= State::Standby as u64
    }

    /// Whether threads of the program wait on the port.
    #[inline]
    pub(super) fn is_waited(self) -> bool {
        self.0 & (SLEEPER - WAITER) != 0
    }

    /// Whether threads of the program sleep on several shards.
    #[inline]
    pub(super) fn is_slept_on(self) -> bool {
        self.0 >= SLEEPER
    }

    #[inline]
    pub(super) fn wants_event(self) -> bool {
        self.0 & WANTS_EVENT != 0
    }

    pub(super) fn is_stopped(self) -> bool {
        self.0 & STOPPED != 0
    }

    fn with(self, state: State) -> Self {
        Self(self.0 & !0xff | state as u64)
    }

    /// The word after an event, and how the background thread is woken.
    fn after(self, event: Event) -> (Self, Call) {
        let (state, call) = TABLE[event as usize][self.state() as usize];
        let call = match call {
            Call::IfWaited if self.is_waited() => Call::Now,
            Call::IfWaited => Call::No,
            call => call,
        };
        let Self(word) = self.with(state);
        let word = match event {
            Event::Armed => word | WANTS_EVENT,
            Event::Waits => word + WAITER,
            Event::Leaves | Event::LastLeaves => word - WAITER,
            Event::Sleeps => word + SLEEPER,
            Event::Wakes => word - SLEEPER,
            Event::Stop => word | STOPPED,
            Event::Earlier | Event::Overdue | Event::Polled | Event::Mail => word,
        };
        (Self(word), call)
    }

    /// Whether the background thread may go to sleep in that state. Its descriptor reports the
    /// events that call it; this covers the conditions without an event.
    fn permits(self, state: State) -> bool {
        match state {
            State::Awake | State::Watching => true,
            State::CallerPolls => !self.wants_event(),
            State::Standby | State::Resting => self.is_waited(),
        }
    }
}

/// The word.
#[derive(Debug)]
pub(super) struct Watch(AtomicU64);

impl Watch {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(State::Awake as u64))
    }

    #[inline]
    pub(super) fn view(&self) -> View {
        View(self.0.load(Ordering::Relaxed))
    }

    /// Another thread does something. Returns how to wake the background thread.
    pub(super) fn on(&self, event: Event) -> Call {
        let mut call = Call::No;
        self.change(|view| {
            let event = match event {
                Event::Leaves if view.0 & (SLEEPER - WAITER) == WAITER => Event::LastLeaves,
                event => event,
            };
            let (next, how) = view.after(event);
            call = how;
            Some(next)
        });
        call
    }

    /// The background thread goes to sleep. Returns whether it may.
    pub(super) fn enter(&self, state: State) -> bool {
        self.change(|view| view.permits(state).then(|| view.with(state)))
    }

    /// The background thread is awake.
    pub(super) fn wake_up(&self) {
        self.change(|view| Some(view.with(State::Awake)));
    }

    /// Whether the program has asked for an event since this was asked last.
    pub(super) fn take_wants_event(&self) -> bool {
        self.change(|view| view.wants_event().then_some(View(view.0 & !WANTS_EVENT)))
    }

    fn change(&self, mut next: impl FnMut(View) -> Option<View>) -> bool {
        let next = |word| next(View(word)).map(|view| view.0);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// The table as text, first for people, then for `dot`.
    fn drawn() -> String {
        let mut text = String::from("event      ");
        let line = |text: &mut String, cells: [String; STATES.len()]| {
            let row: String = cells.iter().map(|cell| format!(" {cell:<22}")).collect();
            writeln!(text, "{}", row.trim_end()).unwrap();
        };
        line(&mut text, STATES.map(|state| format!("{state:?}")));
        for (event, row) in EVENTS.iter().zip(TABLE) {
            write!(text, "{:<11}", format!("{event:?}")).unwrap();
            line(
                &mut text,
                std::array::from_fn(|at| match (STATES[at], row[at]) {
                    (from, (to, Call::No)) if from == to => "-".into(),
                    (_, (to, call)) => format!("{to:?}, {call:?}"),
                }),
            );
        }
        text += "\ndigraph watch {\n";
        for state in STATES.iter().skip(1) {
            writeln!(text, "    Awake -> {state:?} [style=dotted];").unwrap();
            writeln!(text, "    {state:?} -> Awake [style=dotted];").unwrap();
        }
        for (event, row) in EVENTS.iter().zip(TABLE) {
            for (from, (to, call)) in STATES.iter().zip(row) {
                if *from != to {
                    writeln!(text, "    {from:?} -> {to:?} [label=\"{event:?}, {call:?}\"];")
                        .unwrap();
                }
            }
        }
        text + "}\n"
    }

    #[test]
    fn the_drawing_shows_the_table() {
        let drawn = drawn();
        assert_eq!(include_str!("transitions.txt"), drawn, "transitions.txt should be:\n{drawn}");
    }

    #[test]
    fn rows_and_columns_are_in_the_order_of_the_values() {
        assert!((0..).zip(STATES).all(|(at, state)| state as usize == at));
        assert!((0..).zip(EVENTS).all(|(at, event)| event as usize == at));
    }

    #[test]
    fn threads_are_counted_and_the_last_to_leave_wakes_a_thread_that_rests() {
        let watch = Watch::new();
        assert!(!watch.enter(State::Resting) && !watch.enter(State::Standby));
        assert_eq!([Event::Waits; 2].map(|event| watch.on(event)), [Call::No; 2]);
        assert!(watch.enter(State::Resting));
        assert_eq!(watch.on(Event::Leaves), Call::No);
        assert!(watch.view().is_waited() && watch.view().state() == State::Resting);
        assert_eq!(watch.on(Event::Leaves), Call::Now);
        assert!(!watch.view().is_waited() && watch.view().state() == State::Awake);
        assert_eq!(watch.on(Event::Waits), Call::No);
        let states = [State::CallerPolls, State::Standby, State::Resting, State::Watching];
        let calls = states.map(|state| {
            assert!(watch.enter(state));
            watch.on(Event::Sleeps)
        });
        // Another thread watches the port, and this one when it is awake.
        assert_eq!(calls, [Call::Now, Call::Now, Call::No, Call::No]);
        assert!(watch.view().is_slept_on());
        assert_eq!([Event::Wakes; 4].map(|event| watch.on(event)), [Call::No; 4]);
        assert!(!watch.view().is_slept_on() && watch.view().is_waited());
    }

    #[test]
    fn a_program_that_wants_an_event_is_not_left_alone() {
        let watch = Watch::new();
        assert!(watch.enter(State::CallerPolls) && !watch.view().is_asleep());
        assert_eq!(watch.on(Event::Armed), Call::Soon);
        assert_eq!(watch.on(Event::Armed), Call::No);
        assert!(!watch.enter(State::CallerPolls));
        assert!(watch.take_wants_event() && !watch.take_wants_event());
        assert!(watch.enter(State::CallerPolls));
    }

    #[test]
    fn mail_wakes_a_thread_that_sleeps_or_does_not_look_for_one_that_waits() {
        for (state, call) in STATES.into_iter().zip([Call::No, Call::No, Call::Now, Call::Now]) {
            let watch = Watch::new();
            watch.on(Event::Waits);
            assert!(watch.enter(state));
            watch.change(|view| Some(View(view.0 - WAITER)));
            assert_eq!(watch.on(Event::Mail), call, "{state:?}");
            watch.on(Event::Waits);
            watch.enter(State::Awake);
            assert_eq!(watch.on(Event::Mail), Call::Now);
        }
    }

    #[test]
    fn the_end_of_the_device_wakes_it() {
        let watch = Watch::new();
        assert!(watch.enter(State::Watching));
        assert_eq!(watch.on(Event::Stop), Call::Now);
        assert!(watch.view().is_stopped());
    }
}
