//! The constants of the fronts that taste chose. Another value breaks no standard and no
//! interface, and a build with another value is correct. None was measured. Those of the device in
//! software are in its crate's `tuning.rs`.

/// Waiting for a completion (`cq.rs`).
pub(crate) mod waiting {
    use std::time::Duration;

    /// Polls before it sleeps: some ten milliseconds. More: fewer wake-ups, and more of the
    /// processor.
    pub(crate) const SPINS: u32 = 100_000;
    /// The longest sleep. A completion ends it, and so does a packet. More: fewer wake-ups.
    pub(crate) const NAP: Duration = Duration::from_millis(10);
}

/// The exchange of two programs (`exchange`). They are times in which a person
/// or a machine answers, and bounds of the bytes that a peer sends.
#[cfg(feature = "exchange")]
pub(crate) mod exchange {
    use std::time::Duration;

    /// Bytes of an accepted line. Over a queue pair also the unread bytes from which on the peer
    /// must wait: a side that sends its line reads none meanwhile. More: more memory for a hostile
    /// peer.
    pub(crate) const LINE_MAX: usize = 4 << 20;
    /// For a line from the peer, unless `Exchange::set_patience` sets another, and for the peer to
    /// read one. More: a silent peer is noticed later.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
    /// From one question to the caller whether to go on waiting to the next. More: it waits longer
    /// in vain.
    pub(crate) const ASKED: Duration = Duration::from_millis(200);
    /// Characters of a peer's words that are shown.
    pub(crate) const CHARS_MAX: usize = 500;
    /// Longest single sleep of a wait. More: later. Less: more wake-ups.
    pub(crate) const LOOK: Duration = Duration::from_millis(100);
    /// From one request for a connection to the next. The kernel's connection manager repeats a
    /// request only after more than 4 s, even if it was lost because the peer was not listening
    /// yet. More: later. Less: more requests in vain.
    pub(crate) const ANEW: Duration = Duration::from_secs(1);
    /// A watched peer that is silent for this long gets a probe. More: a dead one is noticed later.
    pub(crate) const PROBE: Duration = Duration::from_secs(1);
    /// From one TCP probe of a silent peer's kernel to the next, of four. Effect as above.
    pub(crate) const TCP_PROBE: Duration = Duration::from_secs(5);
}
