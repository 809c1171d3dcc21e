//! How long the background thread stands aside. The real policy takes many rounds to get from the
//! shortest pause to the longest. Here it takes one round or none, so that few steps lead to each
//! way to stand aside.

use std::time::Duration;

pub use pause::Pause;

/// As the real one, but for the pause.
#[derive(Debug)]
pub(super) struct Standby {
    waited: bool,
}

impl Standby {
    pub(super) const MIN: Duration = Duration::from_micros(500);
    pub(super) const STEADY_MAX: Duration = Duration::from_micros(1500);
    pub(super) const MAX: Duration = Duration::from_millis(10);

    pub(super) fn new() -> Self {
        Self { waited: false }
    }

    pub(super) fn driven(&mut self, _: bool) -> bool {
        self.waited = false;
        false
    }

    pub(super) fn waited(&mut self) {
        self.waited = true;
    }

    pub(super) fn slept(&mut self, _: Duration) {}

    pub(super) fn pause(&self) -> Duration {
        match pause::get() {
            Pause::Short => Self::MIN,
            Pause::Long => Pause::LONG,
            Pause::Rest if self.waited => Self::MAX,
            Pause::Rest => Self::MIN,
        }
    }

    pub(super) fn is_first_look(&self) -> bool {
        true
    }

    pub(super) fn is_steady(&self) -> bool {
        false
    }

    /// No program here watches its memory between polls.
    pub(super) fn moment(&self) -> Option<Duration> {
        None
    }

    pub(super) fn looked(&mut self, _found: bool) {}

    pub(super) fn is_needed(&self) -> bool {
        false
    }
}

mod pause {
    use std::sync::Mutex;
    use std::time::Duration;

    /// How long the background thread stands aside.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Pause {
        /// For so short that no thread needs to wake it.
        Short,
        /// For longer.
        Long,
        /// Until it is woken, while a thread of the program waits.
        Rest,
    }

    loom::lazy_static! {
        /// Not one of loom's types.
        static ref PAUSE: Mutex<Pause> = Mutex::new(Pause::Short);
    }

    impl Pause {
        /// The longer pause.
        pub const LONG: Duration = Duration::from_millis(5);

        /// The background thread stands aside for so long in this model.
        pub fn set(self) {
            *PAUSE.lock().unwrap() = self;
        }
    }

    pub(super) fn get() -> Pause {
        *PAUSE.lock().unwrap()
    }
}
