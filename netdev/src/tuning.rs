//! The constants that measurement or taste chose, by policy. Another value breaks no standard and
//! no interface, and a build with another value is correct.
//!
//! Each constant has its unit, its effect, and where it was measured. "Design note" is a file of
//! `docs/design`, "the table" is "What each policy gives" in `docs/performance`. This crate has no
//! large policy that a switch could leave out: the kernel offers super-packets.

/// Sending and receiving on UDP sockets (`udp`). Not measured by themselves.
pub(crate) mod udp {
    use std::time::Duration;

    /// Bytes that one system call should return: they stay in a core's second-level cache until
    /// they are handed up. More: colder. Less: more system calls.
    pub(crate) const BURST_BYTES: usize = 256 * 1024;
    /// While some sockets have paths, those without one are read only once in this many calls.
    /// More: a first packet waits longer. Less: more system calls.
    pub(crate) const IDLE_EVERY: u32 = 16;
    /// A guard without a path to an own address is read once in this many calls, and after a thread
    /// was woken for it. Effect likewise.
    pub(crate) const GUARD_EVERY: u32 = 256;
    /// What other processes hand over is read once in this many calls, and after a thread was woken
    /// for it: few datagrams come so. Effect likewise.
    pub(crate) const NEIGHBOURS_EVERY: u32 = 256;
    /// Bytes that are staged: room for at least four full runs. A new run starts only where a full
    /// one fits. More: fewer system calls, colder memory.
    pub(crate) const ARENA_BYTES: usize = 5 * 65_536;
    /// Bytes of a run that leaves by reference, at least: it costs three system calls. More: fewer
    /// runs leave so.
    pub(crate) const LONG_RUN: usize = 32 * 1024;
    /// The longest runs that a ring holds: 4 MiB. More than are in flight to a receive queue.
    /// More: more memory. Less: colder lines of the receiver's core, and at last datagrams that are
    /// lost.
    pub(crate) const RING_RUNS: usize = 64;
    /// Long runs that a path sends by reference after a flush that had two, of any paths. More: a
    /// message that is alone leaves by reference, which takes longer.
    pub(crate) const BULK_RUNS: u8 = 64;
    /// How long to wait for a message to oneself, in tenths of a second. Less: on a busy machine
    /// the port does without rings.
    pub(crate) const TRIAL_TENTHS: u32 = 20;
    /// How long a ring that is not used keeps its memory, at first. More: for longer. Less: pages
    /// are touched for the first time more often.
    pub(crate) const RING_IDLE: Duration = Duration::from_secs(1);
    /// How long a ring that is not used keeps its memory at most, while others want one. More:
    /// queues that come later send bulk by copies for longer. Less: a hostile peer has more memory
    /// kept, up to all rings each time.
    pub(crate) const RING_IDLE_CROWDED: Duration = Duration::from_secs(256);
    /// From one look at the kernel's announcements of offloads to the next, at least. More: a
    /// change is noticed later.
    pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(500);
    /// Sockets besides those of the own addresses. This many flows are enough to spread over the
    /// links and queues of a network. Further paths share source ports, because otherwise a
    /// thousand connections would need a thousand descriptors.
    pub(crate) const SENDERS_MAX: usize = 32;
    /// Sockets without a path that stay open for the next one, while other paths exist: opening one
    /// costs more than the rest of adding a path. More: more descriptors.
    pub(crate) const IDLE_MAX: usize = 8;
    /// Groups of a port: each has a socket with a buffer. More: more memory.
    pub(crate) const GROUPS_MAX: usize = 256;
    /// Up to this many groups are read directly; with more, one system call first checks whether
    /// any has data. More: a read for each.
    pub(crate) const POLLED_MAX: usize = 1;
    /// How long a port may be held by no process that `/proc` shows, before it counts as in use.
    /// More: opening fails later. Less: it fails while a process ends.
    pub(crate) const UNSEEN_HOLDER_MAX: Duration = Duration::from_secs(2);
    /// How long a process may take to end. Effect likewise.
    pub(crate) const ENDING_HOLDER_MAX: Duration = Duration::from_secs(20);
    /// Other source ports that are tried before the datagrams leave from UDP/4791. More: paths
    /// differ where most ports are taken.
    pub(crate) const SRC_PORT_TRIES: u16 = 16;
    /// Processes that a hint names.
    pub(crate) const NAMED_MAX: usize = 3;
}

/// Sending and receiving by packet sockets (`packet`). Measured: rings of 15, 30, 60 or 128 frames
/// give nothing (the table); the others not.
pub(crate) mod packet {
    /// Bytes that are staged, in the longest runs; a new run starts only where a full one fits, so
    /// that no run is cut short. More: fewer system calls, colder memory.
    pub(crate) const ARENA_RUNS: usize = 6;
    /// Runs at once. Effect likewise.
    pub(crate) const RUNS_MAX: usize = 256;
    /// Slots of the ring of a capture, each of 68 KiB. More: longer pauses of the writer lose
    /// nothing. Less: less memory of the kernel.
    pub(crate) const CAPTURE_FRAMES: u32 = 480;
    /// Bytes of the ring of a capture that has the beginnings of datagrams alone, a power of two of
    /// pages. Effect likewise; more is also colder memory, to which the kernel writes while the
    /// sender waits.
    pub(crate) const CAPTURE_BYTES: u32 = 2 << 20;
    /// A new run has at least this many identifications; if it would need more, it ends there.
    /// More: identifications are skipped. Less: shorter runs.
    pub(crate) const IP_IDS_MIN: u16 = 64;
}

/// Sending and receiving by `AF_XDP` sockets (`xdp`). Not measured.
pub(crate) mod xdp {
    use std::time::Duration;

    /// The fewest chunks for each direction. Less: fewer packets fit than a window has.
    pub(crate) const CHUNKS_MIN: u32 = 64;
    /// The most chunks for each direction. More: more memory that a program may ask for.
    pub(crate) const CHUNKS_MAX: u32 = 1 << 15;
    /// How long to wait until the kernel frees the queue of a closed socket, or of a killed
    /// process. A work queue does that, under the lock of all network configuration (RTNL). More:
    /// opening fails later. Less: it fails although the queue becomes free.
    pub(crate) const QUEUE_RELEASE_MAX: Duration = Duration::from_secs(2);
    /// Bytes of a frame assembled from several chunks; longer ones are dropped. More: more memory.
    pub(crate) const JOINED_MAX: usize = 16 << 10;
    /// The first interval between checks whether sent frames came back. `POLLOUT` is no substitute:
    /// an `AF_XDP` socket reports it while its ring has room, whether or not they do. More: room is
    /// noticed later. Less: more wake-ups.
    pub(crate) const RETRY_FIRST: Duration = Duration::from_micros(100);
    /// The longest. Effect as above.
    pub(crate) const RETRY_LAST: Duration = Duration::from_millis(5);
}

/// Neighbours and routes (`resolve.rs`, `rtnl`, `watch.rs`, `recent.rs`, `ethtool.rs`). Design note
/// 12 has the rules; none was measured, unless it says.
pub(crate) mod routes {
    use std::time::Duration;

    /// From one reading of entries in use to the next. More: changes without an announcement are
    /// noticed later. Less: more system calls.
    pub(crate) const REFRESH: Duration = Duration::from_secs(1);
    /// The first interval between requests for an unresolved neighbour; doubles up to [`REFRESH`].
    /// More: a first packet waits longer.
    pub(crate) const RESOLVE_FIRST: Duration = Duration::from_millis(1);
    /// After this many refreshes in use, a path's route is looked up again. Effect as of
    /// [`REFRESH`].
    pub(crate) const ROUTE_REFRESHES: u32 = 10;
    /// After a refresh because of announcements, announcements are only noted for this many times
    /// its duration. So a program that changes routes without end takes about a tenth of the
    /// sending threads' time. More: less of it, and changes are noticed later.
    pub(crate) const REST_TIMES: u32 = 9;
    /// Neighbours remembered during one round of refreshing; beyond them, each path asks for its
    /// own. More: more memory.
    pub(crate) const KNOWN_MAX: usize = 64;
    /// The minimum rest after a change of the interface: `check_interface` then runs outside the
    /// measured time. Effect as of [`REST_TIMES`].
    pub(crate) const REST_MIN: Duration = Duration::from_millis(1);
    /// Messages per read; the others stay in the queue. More: the thread is kept longer.
    pub(crate) const BURST: usize = 256;
    /// The kernel answers within the request's own system call; only a lost answer makes us wait.
    /// More: for longer.
    pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
    /// Attempts at a dump, if objects change meanwhile. Less: busy hosts fail.
    pub(crate) const DUMP_ATTEMPTS: u32 = 5;
    /// Attempts to see an interface that does not change meanwhile. Effect likewise.
    pub(crate) const ATTEMPTS: usize = 8;
    /// How long an answer about a route holds. More: changes are noticed later. Less: more
    /// questions for connections that begin together.
    pub(crate) const FRESH: Duration = Duration::from_millis(100);
    /// Such answers. More: slower to search.
    pub(crate) const KEPT: usize = 16;
    /// From a request to the driver without an answer to the next, at least. More: a change is
    /// noticed later.
    pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(500);
}

/// Ports that are handed over (`handed`). Design note 23; not measured, unless it says.
pub(crate) mod handed {
    use std::time::Duration;

    /// How long each side waits for the other's message.
    pub const WAIT_MAX: Duration = Duration::from_secs(1);
    /// How long a program waits for ports of `afxdp`: the kernel attaches their program under the
    /// lock of all network configuration, and waits for grace periods meanwhile.
    pub const XDP_WAIT_MAX: Duration = Duration::from_secs(3);
    /// How long a program waits for its turn. More: programs that start together have fast ports,
    /// and begin later where an agent is slow.
    pub(crate) const TURN_MAX: Duration = Duration::from_secs(10);
    /// Frames in the receive ring of a port of `packet` that is handed over, unless the program
    /// asks for another number.
    pub const RING_FRAMES: u32 = 180;
    /// Chunks for each direction of a port of `afxdp`, likewise. More: more memory of the agent's.
    pub(crate) const XDP_CHUNKS: u32 = 256;
    /// How long to ask again for an interface that is in use: a queue is free some time after its
    /// socket was closed. More: opening fails later.
    pub(crate) const IN_USE_MAX: Duration = Duration::from_secs(2);
    /// And how often. More: it is noticed later.
    pub(crate) const IN_USE_PAUSE: Duration = Duration::from_millis(50);
    /// Rules, and reasons why rules are unseen, that a report lists.
    pub(crate) const LISTED_MAX: usize = 8;
    /// Characters of a text.
    pub(crate) const TEXT_MAX: usize = 200;
    /// Bytes of a message of a capture from which on no frame is added. More: an agent works longer
    /// for a container in a millisecond.
    pub(crate) const CAPTURE_ROOM: usize = 64 << 10;
    /// Bytes of frames that wait for the program. More: longer pauses of it lose nothing.
    pub(crate) const CAPTURE_QUEUE_BYTES: usize = 2 << 20;
    /// How long a child process may hold copies of descriptors closed here: from fork to exec
    /// (`kernel/descriptors.rs`). More: closing waits longer for a slow child.
    pub(crate) const COPIES_HELD_MAX: Duration = Duration::from_millis(100);
}

/// Files for programs that look below /sys (`sysfs`). Not measured.
pub(crate) mod sysfs {
    use std::time::Duration;

    /// How long others may write before a process goes on without the directory: one that was
    /// stopped may have it. More: programs start later. Less: on a busy machine, older files.
    pub(crate) const WRITE_PATIENCE: Duration = Duration::from_secs(2);
    /// From one writing of counters, while programs read them, to the next. More: older counters.
    /// Less: more of the processor.
    pub(crate) const EVERY: Duration = Duration::from_secs(1);
    /// How long after the last reader. Exporters are asked every quarter of a minute or so.
    pub(crate) const LATELY: Duration = Duration::from_secs(60);
    /// How long a process may take to answer: it may be stopped, or a child of it have its socket.
    /// More: a look takes longer.
    pub(crate) const ANSWER_PATIENCE: Duration = Duration::from_millis(100);
    /// Ports of namespaces that are gone. More: more memory.
    pub(crate) const PAST_MAX: usize = 64;
}

/// Bounds of reading programs and tables of others (`bpf.rs`, `policy`). More: more memory and
/// time for a host's. Less: rules stay unseen, and the audit reports that. Not measured.
pub(crate) mod reading {
    /// Programs of an interface.
    pub(crate) const PROGRAMS_MAX: usize = 64;
    /// Maps of a program.
    pub(crate) const MAPS_MAX: usize = 8;
    /// Keys of a map.
    pub(crate) const KEYS_MAX: usize = 1 << 16;
    /// Bytes of a table.
    pub(crate) const ENTRIES_MAX: u32 = 1 << 24;
}

/// Processes on one address (`shared`). Design note 24; not measured, unless it says.
pub(crate) mod shared {
    use std::time::Duration;

    /// Frames that the ring of `packet` gets because of neighbours, at least. More: more memory.
    /// Measured: a port that has the traffic to itself does READs half as fast (docs/agent.md).
    pub(crate) const RING_FRAMES_MIN: u32 = 64;
    /// How long a slot rests when its process has gone: twice the longest ACK timeout that a
    /// connection counts. Until then packets of the old process's peers may come. More: more slots.
    pub(crate) const REST: Duration = Duration::from_secs(34);
    /// Slots are used anew before there are more of them than this, and twice those in use. More:
    /// larger rings are divided by more.
    pub(crate) const ROOM_MIN: usize = 16;
    /// How long the leader of a group that has ended may keep its name. More: opening fails later.
    pub(crate) const LEADER_RELEASE_MAX: Duration = Duration::from_secs(2);
    /// From one search for the mailbox of a slot that has none yet to the next. More: later.
    pub(crate) const ASK_EVERY: Duration = Duration::from_millis(100);
    /// After an end, the first and the last pause between two searches for notes. The kernel may
    /// close the connection of a process that dies before it removes its locks. After the last
    /// pause there are searches only while the port could not look. More: peers learn of it later.
    pub(crate) const SEARCH_PAUSES: [Duration; 2] =
        [Duration::from_millis(10), Duration::from_secs(1)];
    /// Processes that a guardian looks after. More: more memory.
    pub(crate) const WARDS_MAX: usize = 1024;
    /// Addresses of each of them. Effect likewise.
    pub(crate) const PLACES_MAX: usize = 64;
    /// Connections that are accepted before anything else is looked at, by a guardian. More: ends
    /// are noticed later.
    pub(crate) const JOINS_MAX: usize = 128;
    /// The same by the leader.
    pub(crate) const LEADER_AT_ONCE: usize = 128;
    /// How long the kernel may take to remove a dead process's locks when its connection is closed.
    /// More: a false alarm lasts longer. Less: an end is missed.
    pub(crate) const SETTLES: Duration = Duration::from_secs(1);
    /// From one look whether others have done what there is to do to the next. More: later.
    pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(10);
    /// Connections of other users that are being closed at a time. More: more threads and
    /// descriptors for such a user. Less: processes cannot join while it goes on.
    pub(crate) const CLOSING_MAX: usize = 32;
    /// How long the end of a thread is waited for that has been asked to end. It may be about to
    /// pause for a second. More: a program whose neighbours mean harm ends later.
    pub(crate) const HELPER_PATIENCE: Duration = Duration::from_secs(3);
    /// How long a lock of the shared file is waited for. A process holds it for some dozens of
    /// system calls. More: opening fails later.
    pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(2);
    /// Bytes of the queue to other processes: hundreds of messages, as far as the system lets it
    /// (`net.core.wmem_max`). Less: more is dropped while they do not run.
    pub(crate) const QUEUE_BYTES: usize = 1 << 20;
    /// Bytes of a mailbox, many times a datagram's. Effect likewise.
    pub(crate) const MAILBOX_BYTES: usize = 1 << 18;
    /// How long a process tries to join. More: opening fails later.
    pub(crate) const JOIN_PATIENCE: Duration = Duration::from_secs(3);
    /// How long it waits for one of the others to answer: any of them may have been stopped just
    /// now. Effect likewise.
    pub(crate) const ANSWER: Duration = Duration::from_millis(500);
}

/// Datagrams that faults hold back. Not measured by themselves.
pub(crate) mod faults {
    use std::time::Duration;

    /// Datagrams that are held back in each direction, at most. More: more memory.
    pub(crate) const HELD_MAX: usize = 65_536;
    /// Their bytes. Effect likewise.
    pub(crate) const HELD_BYTES: usize = 64 << 20;
    /// Bytes of free buffers that are kept for later ones. More: more memory after a burst, and
    /// fewer allocations in the next.
    pub(crate) const SPARE_BYTES: usize = HELD_BYTES / 8;
    /// Reads of the port behind in a burst, at most, while no datagram of them is handed up.
    /// More: a flood of lost datagrams keeps its thread from everything else for longer.
    pub(crate) const READS_MAX: usize = 8;
    /// How long a datagram waits for room in the port behind, from one try to the next.
    pub(crate) const ROOM_AGAIN: Duration = Duration::from_micros(100);
}

/// The simulated network (`sim`).
pub(crate) mod sim {
    /// Bytes that a port takes between two flushes: those of `udp`.
    pub(crate) const TX_BYTES: usize = 5 * 65_536;
}
