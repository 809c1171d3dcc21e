//! The constants that measurement or taste chose, by policy. Another value breaks no standard and
//! no interface, and a build with another value is correct.
//!
//! Each constant has its unit, its effect, and where it was measured. "Design note" is a file of
//! `docs/design`, "the table" is "What each policy gives" in `docs/performance`. `ENABLED` is the
//! switch of a policy: a build with `false` is without it. Two policies of the table have none,
//! because no single place decides. "Small messages wait for company" is the engine's. "No thread
//! is woken for news that it may learn in time" is the table of `progress/watch.rs`.

/// Acknowledgements leave with the answer (`cork.rs`). Measured: the table, SENDs 6.4 to 6.9
/// µs without and 3.3 to 3.8 with it.
pub(crate) mod cork {
    /// The switch of acknowledgements that wait for the program's next call.
    pub(crate) const ENABLED: bool = true;
    /// Requests that are gathered while others are in flight. More: fewer system calls, later
    /// requests. Not measured by itself.
    pub(crate) const REQUESTS_MAX: u32 = 32;
    /// Datagrams whose acknowledgement may wait for the program's next call: those of a
    /// super-packet, and an acknowledgement. More: the peer's window may wait as well. Less: more
    /// acknowledgements leave alone. Not measured.
    pub(crate) const HELD_MAX: usize = 65;
    /// A larger number waits only for a program that answers, as with a completed receive: the
    /// packets may be a window of a peer that sends no more before it is answered. Effect as above.
    /// Measured: the table, WRITEs of 8 KiB on `udp`.
    pub(crate) const HELD_UNASKED: usize = 2;
}

/// How long the background thread looks for more before it sleeps (`progress/spin.rs`).
/// Measured: the table, a READ on one processor 220 µs before, 8 to 15 with it.
pub(crate) mod spinning {
    use std::time::Duration;

    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// The first spin. More: fewer wake-ups, and more of the processor for an idle device. Not
    /// measured by itself: it is about the cost of a sleep and a wake-up.
    pub(crate) const MIN: Duration = Duration::from_micros(30);
    /// The longest. Effect as above. Not measured by itself.
    pub(crate) const MAX: Duration = Duration::from_micros(200);
    /// Sleeps without a spin, at most, after spins in vain. More: a spin that would help comes back
    /// later. Less: more spins in the peer's way. Not measured.
    pub(crate) const MAX_LEFT_OUT: u32 = 256;
    /// Between a look that found nothing and the next another thread had the processor. More: a
    /// find counts that the spin did not make. Less: a slow look does not count. Not measured.
    pub(crate) const GAP: Duration = Duration::from_micros(5);
}

/// Short turns on the processor (`slice.rs`). Measured: the table, 18 of 18 figures
/// beside 16 busy processes with it, 3 without.
pub(crate) mod short_turns {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Nanoseconds of a turn; the kernel takes 100 µs to 100 ms. More: later after a wake-up.
    /// Measured: the table.
    pub(crate) const TURN_NS: u64 = 100_000;
}

/// How long the background thread leaves the port to the program (`progress/standby.rs`).
/// Measured: the table.
pub(crate) mod standby {
    use std::time::Duration;

    /// The switch of rarer looks at a program that polls steadily. Measured: the table, 3 to 5 % of
    /// bandwidth where both threads share a processor.
    pub(crate) const ENABLED: bool = true;
    /// From one look to the next. More: packets wait longer when the program stops. Less: more
    /// timers, of some 15 µs. Measured: the table.
    pub(crate) const MIN: Duration = Duration::from_micros(500);
    /// The same at most while a program polls without pause. A look may miss that the program
    /// stopped up to [`MIN`] before: 2 ms in all, and a peer waits for as long at least before it
    /// asks again. More: a peer repeats packets. Measured: the table.
    pub(crate) const STEADY_MAX: Duration = Duration::from_micros(1500);
    /// The same at most while a thread of the program sleeps on the port; if nothing happens for so
    /// long, the background thread rests. More: fewer wake-ups of an idle device. Not measured.
    pub(crate) const MAX: Duration = Duration::from_millis(10);
    /// A program that has not driven for so long does not poll just now. More: such a program is
    /// helped later. Less: slow polls count as none. Not measured.
    pub(crate) const MOMENT: Duration = Duration::from_micros(50);
    /// Looks at a program that polls without pause, before it gets more time. More: later. Less:
    /// a program that polls by chance gets it. Not measured.
    pub(crate) const LOOKS: u32 = 4;
    /// Looks at a program that polls too little, before the background thread drives. Effect
    /// likewise. Not measured by itself.
    pub(crate) const MISSED: u32 = 4;
    /// The number of its sleeps for which it does so, before it looks at the program again. A sleep
    /// ends with a packet. More: a program that polls again shares longer. Not measured.
    pub(crate) const NEEDED: u32 = 512;
    /// The background thread was not given the processor if it sleeps longer by this. More: later
    /// help on a busy machine. Less: a slow timer counts. Not measured.
    pub(crate) const LATE: Duration = Duration::from_micros(500);
}

/// Threads that poll in vain while others want their processor (`rivals.rs`). Measured: the
/// table, three pollers on two processors 1.8 Gb/s without and 17.6 with it. No constant was
/// measured by itself, unless it says.
pub(crate) mod rivals {
    use std::time::Duration;

    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// A thread looks at the clock once in this many polls. More: later. Less: dearer polls.
    pub(crate) const LOOK: u32 = 8;
    /// The longest sleep of a thread that polls: it may wait for more than this device. More: that
    /// waits longer. Less: more wake-ups.
    pub(crate) const REST: Duration = Duration::from_micros(200);
    /// Between two looks of a thread that polls all the time, another thread had the processor.
    /// More: short turns of others are missed. Less: more questions to the kernel.
    pub(crate) const GAP: Duration = Duration::from_micros(500);
    /// From one question to the next. More: later. Less: more system calls.
    pub(crate) const PAUSE: Duration = Duration::from_millis(5);
    /// It has rivals if it waited for more than this part of the time in which it could have run.
    /// More: it spins beside rivals. Less: it sleeps for a moment's work of another.
    pub(crate) const SHARE: f64 = 0.125;
    /// If it waited for more than this part, it does not spin at all. Effect likewise.
    pub(crate) const MOST: f64 = 0.5;
    /// How long it spins otherwise. More: it keeps others waiting. Less: a wake-up for each answer.
    pub(crate) const SPIN: Duration = Duration::from_micros(100);
    /// How long it does not spin then. Each time that it is found again soon after doubles that.
    /// More: it spins again later. Less: it asks more often.
    pub(crate) const SPAN_MIN: Duration = Duration::from_millis(100);
    /// The longest. Effect as above.
    pub(crate) const SPAN_MAX: Duration = Duration::from_millis(1600);
}

/// An overloaded receive queue sends CNPs (`shard.rs`). Measured: the table, 64 senders,
/// Jain's index 0.66 to 0.72 without and 0.93 to 0.96 with it.
pub(crate) mod overload {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Eighths filled from which a queue is overloaded, which one peer may not fill. Less: one peer
    /// slows itself down. More: the queue overflows first. Not measured by itself.
    pub(crate) const OVERLOADED_FROM: u32 = 7;
    /// Eighths filled until which it is. More: the sum is smaller and less fair. Measured at 3 and
    /// 4: the table.
    pub(crate) const OVERLOADED_UNTIL: u32 = 2;
}

/// Floods of useless packets (`flood.rs`). Measured: the flood table of SECURITY.md.
pub(crate) mod flood {
    /// Nanoseconds between two of them, if each is looked at when it comes: 50,000 a second. More:
    /// fewer of them are a flood. Not measured by itself.
    pub(crate) const EACH: u64 = 20_000;
    /// Nanoseconds that those which come at once may be ahead of that. More: a flood is noticed
    /// later. Less: a burst is taken for one. Not measured.
    pub(crate) const AHEAD: u64 = 64 * EACH;
    /// Nanoseconds for which the port is left alone once it was read to the end; the kernel's slack
    /// of short sleeps doubles it. That is too little for a window to be closed by it, and less
    /// than a flood of 300,000 a second takes to fill the part of a receive queue that no peer was
    /// promised (an eighth, 32 of the least). More: that part overflows. Less: more wake-ups.
    pub(crate) const PAUSE: u64 = 50_000;
}

/// Turns of the drive loop (`shard.rs`). None was measured by itself; design notes 10 and 11
/// have the loop.
pub(crate) mod shard {
    /// Datagrams read before it is the senders' turn. More: longer runs, later packets.
    pub(crate) const RX_BURST: usize = 256;
    /// Packets written before it is the receivers' turn. Effect likewise.
    pub(crate) const TX_BURST: usize = 1024;
    /// Looks at the port that found something after which a thread that looks all the time needs no
    /// reports of more. More: more reports. Less: reports stop for a program that looks by chance.
    pub(crate) const ARRIVALS: u32 = 4;
    /// A program that polls so often while the background thread sleeps waits in a loop: that takes
    /// some microseconds, and a program that sleeps between does not get there. More: reports stop
    /// later.
    pub(crate) const POLLS: u32 = 16;
    /// Rounds of one call: a caller of `post_send` or `poll_cq` is not kept for ever. More: it is
    /// kept longer.
    pub(crate) const ROUNDS: usize = 4;
    /// Full bursts after which all packets that had arrived when a deadline passed have been read,
    /// unless a receive queue is far larger than those that the backends ask for. A peer that
    /// floods cannot put off a deadline, or another shard's message, for ever. More: for longer.
    pub(crate) const OVERDUE_MAX: u32 = 64;
    /// Nanoseconds between two looks at the port's chores. More: news of neighbours come later.
    pub(crate) const PAUSE_MIN: u64 = 1_000_000;
    /// The same for a program that drives all the time, and so never sleeps until the port has
    /// news. Less: more system calls.
    pub(crate) const PAUSE_MAX: u64 = 1_000_000_000;
    /// Nanoseconds: packets that leave later than this after the engine's time have been held up,
    /// because the thread did not run. More: their timers run meanwhile.
    pub(crate) const HELD_UP: u64 = 1_000_000;
    /// How long the end of the process waits for a lock, and for room in a socket (`exit.rs`).
    /// More: a slower end. Less: acknowledgements stay behind.
    pub(crate) const EXIT_PATIENCE: std::time::Duration = std::time::Duration::from_millis(20);
}

/// Tasks that wait (`provider/wakers.rs`).
pub(crate) mod tasks {
    /// Tasks without a number that wait for one thing. More: those that gave up keep more memory.
    /// Less: those that wait are woken for nothing. Not measured.
    pub(crate) const NAMELESS_MAX: usize = 1024;
    /// A task that has waited for so long may be woken for nothing. Less: more of them live.
    pub(crate) const NAMELESS_AGE: std::time::Duration = std::time::Duration::from_secs(1);
}

/// User memory (`provider/memory`, `host.rs`). Measured: the table.
pub(crate) mod memory {
    /// The switch of copying and summing in one pass. Measured: the table, 1 MiB WRITEs on `udp`
    /// from 0.83 to 0.98 of the baseline.
    pub(crate) const ENABLED: bool = true;
    /// Bytes that are moved word by word, at most: a cache line. More: longer pieces are moved
    /// slowly, but whole words are never torn. Not measured.
    pub(crate) const WORDS_MAX: usize = 64;
    /// Bytes of a packet after which the next is prefetched. Less: whole messages are, in vain. Not
    /// measured by itself.
    pub(crate) const PREFETCH_MIN: usize = 1024;
    /// Nanoseconds without a packet, either way, after which the handler of page faults is looked
    /// at before the next: the program may have set its own. Less: more system calls, also in an
    /// exchange of 64 KiB. A sender whose own packets did not count sent 64 B in lists 3 % more
    /// slowly.
    pub(crate) const PAUSE: u64 = 50_000;
    /// Nanoseconds after which it is looked at in any case. More: a handler of the program's that
    /// replaces ours goes unnoticed for longer. Not measured.
    pub(crate) const WATCHED_MAX: u64 = 1_000_000;
}

/// Room that is there from the beginning, and bounds of what waits. More is more memory, and less
/// allocates, drops or refuses sooner. None was measured, unless it says.
pub(crate) mod room {
    /// Queue pairs that can have staged requests at once without an allocation. Room for all
    /// requests of each would be most of the memory of an idle one, and few ever need it at the
    /// same time.
    pub(crate) const BACKLOGS: usize = 16;
    /// Completions of a burst that are kept without allocation.
    pub(crate) const PENDING: usize = 8192;
    /// Bytes of datagrams between shards, of the size of a receive queue: the thread that takes
    /// them may not have run for a while.
    pub(crate) const MAIL_BYTES: usize = 4 << 20;
    /// Those datagrams.
    pub(crate) const MAIL_DATAGRAMS: usize = 2048;
    /// Events of all kinds that may wait.
    pub(crate) const EVENTS: usize = 1024;
    /// Paths of QP1.
    pub(crate) const PATHS_MAX: usize = 256;
    /// Nanoseconds without a datagram after which such a path is dropped: 2 s, in which an
    /// unanswered message is sent five times.
    pub(crate) const PATH_IDLE: u64 = 2_000_000_000;
}

/// Connections (`wishes.rs`). Not measured.
pub(crate) mod connections {
    use std::time::Duration;

    /// The silence after which the peer of a connection is asked, if neither the program nor the
    /// environment says it. More: a dead one is noticed later. Less: more datagrams.
    pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(10);
}

/// Pages of counters (`publish.rs`). Design note 23; not measured, unless it says.
pub(crate) mod pages {
    /// Nanoseconds between two turns of a shard that is driven. More: later figures. Less: more
    /// work.
    pub(crate) const EVERY_NS: u64 = 10_000_000;
    /// Queue pairs of a turn. More: fresher figures where there are thousands, and longer turns.
    pub(crate) const ROWS_EACH: usize = 64;
}
