//! The constants that measurement or taste chose, by policy. Another value breaks no standard and
//! no interface, and a build with another value is correct.
//!
//! Each constant has its unit, its effect, and where it was measured. "Design note" is a file of
//! `docs/design`, "the table" is "What each policy gives" in `docs/performance`. `ENABLED` is the
//! switch of a policy: a build with `false` is without it.

/// Small messages wait for company, so that super-packets are filled
/// (`rc/requester/permit/batching.rs`). Measured: the table, 7 % of 64 KiB WRITEs on `afxdp`.
pub(crate) mod batching {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Runs in flight from which on a message waits. More: less waits, and runs are shorter. Less:
    /// the receiver may run dry meanwhile. Not measured: one is on its way, and one is
    /// acknowledged.
    pub(crate) const RUNS_IN_FLIGHT: u32 = 2;
    /// A window of fewer runs is filled to its last packet. More: small windows are better used.
    /// Less: their runs are longer. Not measured.
    pub(crate) const RUNS_OF_WINDOW: u32 = 4;
}

/// Which packets ask for an acknowledgement (`rc/requester/ack_policy.rs`). Measured: the table,
/// half a round trip of 64 B WRITEs is 4 to 12 % shorter.
pub(crate) mod ack_requests {
    use super::probes::PATIENCE_NS;

    /// The switch of small messages that answer and do not ask.
    pub(crate) const ENABLED: bool = true;
    /// Of small messages that answer, one in this number asks. More: fewer acknowledgements, and
    /// room is given back later. Measured with 8 alone: the table.
    pub(crate) const EVERY: u32 = 8;
    /// Nanoseconds between two answers within which they need not ask: the last of [`EVERY`] asks
    /// in half the time of the probe then. At a lower rate the probe would ask for each. Not
    /// measured: it follows from the two.
    pub(crate) const SOON_NS: u64 = PATIENCE_NS / 2 / EVERY as u64;
    /// Bytes of a message that costs little when the probe sends it again. More: longer messages
    /// need not ask. Not measured.
    pub(crate) const BYTES_MAX: u32 = 256;
    /// An acknowledgement timeout in nanoseconds that is not over before a probe is answered. Less:
    /// a retry may be spent although nothing was lost. Not measured.
    pub(crate) const TIMEOUT_NS_MIN: u64 = 4 * PATIENCE_NS;
    /// A long message asks this often in a congestion window. More: steadier, and more
    /// acknowledgements. Not measured.
    pub(crate) const TIMES_OF_WINDOW: u32 = 4;
    /// Packets of a long message between two that ask, at most. More: fewer acknowledgements, and
    /// room at the peer is given back in larger pieces. Not measured.
    pub(crate) const INTERVAL_MAX: u32 = 32;
}

/// Messages of one packet are planned in runs (`rc/requester/burst.rs`). Measured: the table, a
/// WRITE of 64 bytes from 2,414 to 1,259 instructions, both sides.
pub(crate) mod message_runs {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
}

/// Whole runs wait for shared credit (`CreditAccount::withholds`). Measured: the table, 64 queue
/// pairs 0.34 to 0.50 of one queue pair's rate without, 0.69 to 1.30 with it.
pub(crate) mod shared_credit {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Runs in flight from which on a run waits until all of it fits. Less: credit may come back
    /// too late to wait for. Not measured.
    pub(crate) const RUNS_IN_FLIGHT: u32 = 2;
    /// Runs that the queue must hold. Less: the wait leaves a good part of a small queue empty. Not
    /// measured.
    pub(crate) const RUNS_HELD: u32 = 4;
}

/// Receiver credit (`peer`).
pub(crate) mod credit {
    /// Datagrams of any size that a peer holds that announced nothing. More: faster, until its
    /// queue overflows. Not measured: between two Rocinantes recognition replaces it (design note
    /// 22).
    pub(crate) const STANDARD_DATAGRAMS: u32 = 16;
    /// Nanoseconds until a response is overdue, twice as long at most. Its peer is dead, or a
    /// packet was lost: the credit that it reserves must not block others. More: they wait longer.
    /// Less: slow responses come to a queue that gave their room away. Not measured.
    pub(crate) const EXPECTED_NS: u64 = 100_000_000;
}

/// A queue takes more where runs are long (`peer/stretch.rs`, `peer/runs.rs`,
/// `peer/confidence.rs`). Measured: the table, 1 MiB WRITEs on `packet` at a path MTU of 1024
/// from 0.70 to 0.83 of the baseline.
pub(crate) mod long_runs {
    /// The switch of the larger queue. Our own ring still charges READ responses by places, see
    /// `Peers::charge_of_answer`.
    pub(crate) const ENABLED: bool = true;
    /// Eighths of the datagrams of a run that a place counts as. More: the queue takes more, and
    /// overflows sooner when runs become shorter. Not measured: a quarter to spare.
    pub(crate) const PLACE_EIGHTHS: u32 = 6;
    /// Most times its budget that a queue of places is taken to hold. Effect as above. Not
    /// measured by itself: [`ENOUGH`] bounds long packets before.
    pub(crate) const PLACES_TIMES: u32 = 4;
    /// Bytes of payload in flight to one receiver, ten full super-packets. More is no faster, but
    /// colder in the caches of both. Measured: the table, "Tried, and gave nothing".
    pub(crate) const ENOUGH: u64 = 640 * 1024;
    /// Runs that count as recent: older ones count half, and less. More: steadier. Less: a change
    /// of the path is followed sooner. Not measured.
    pub(crate) const RECENT: u64 = 64;
    /// Most datagrams of a run that are believed. More: a wrong report counts more. Not measured:
    /// a kernel makes super-packets of at most this many.
    pub(crate) const DATAGRAMS_MAX: u32 = 128;
    /// Datagrams of a run beyond which [`PLACE_EIGHTHS`] follow no more. More: the estimate changes
    /// more often, for nothing while [`PLACES_TIMES`] is 4. Not measured.
    pub(crate) const LENGTH_MAX: u64 = 8;
    /// The next datagrams may take a third more places each than the recent ones. More: fewer
    /// losses where runs become shorter. Less: more responses in flight. Not measured.
    pub(crate) const MARGIN: (u64, u64) = (4, 3);
    /// Most eighths of its budget that a socket's memory is taken to hold. More: overflows sooner
    /// when runs become shorter. Measured at 7/4 alone: small buffers on `udp` at a path MTU
    /// of 4096 from 0.83 to 0.91 of the baseline.
    pub(crate) const EIGHTHS_MAX: u64 = 14;
    /// Bytes that a socket is charged for a super-packet beside its own. More: a socket is taken to
    /// hold less. Measured on Linux 6.18: 15 datagrams of 4112 bytes take 62,900.
    pub(crate) const RUN_COST: u64 = 1280;
    /// Bytes to which the length of datagrams is rounded down. More: the estimate changes less
    /// often. Less: it is more precise. Not measured.
    pub(crate) const BYTES_STEP: u32 = 128;
    /// Packets without a loss that restore the confidence. The number doubles each time that the
    /// confidence is lost again. More: a path that takes super-packets apart loses less often.
    /// Less: a path that does not is fast again sooner. Not measured: the simulator judges it.
    pub(crate) const STABLE_PACKETS: u32 = 1 << 20;
    /// Most times [`STABLE_PACKETS`] that are needed. More: attempts become rarer. Not measured.
    pub(crate) const TIMES_MAX: u32 = 1 << 10;
    /// At first this part of [`STABLE_PACKETS`] is enough. More: full speed sooner. Not measured.
    pub(crate) const FIRST_PART: u32 = 1 << 10;
}

/// The longest run that leaves at once, unless the port says another (`RunLimits`).
pub(crate) mod runs {
    /// Bytes: the longest super-packet that Linux sends. More is not sent. Less: more
    /// super-packets. Measured: shorter first runs give nothing (the table).
    pub(crate) const BYTES: u32 = 65_470;
    /// Packets. Later kernels take more. Measured: a longer wait for more was not found to pay.
    pub(crate) const PACKETS: u32 = 64;
}

/// The READ window, and the requests into which a READ is cut
/// (`rc/requester/permit/read_window.rs`). Measured: the table, 1.90 Gb/s through a bottleneck
/// of 2 Gb/s with it, 0.62 to 0.95 without.
pub(crate) mod read_window {
    /// The switch of the window. READs are cut without it, too.
    pub(crate) const ENABLED: bool = true;
    /// Bytes of a request that is answered by less than a full run and three packets. More: fewer
    /// requests, and more at once through a bottleneck. Not measured: a super-packet's payload.
    pub(crate) const FEW_BYTES: u32 = 61_440;
    /// Packets of such a request. Effect as above. Not measured.
    pub(crate) const FEW_PACKETS: u32 = 60;
    /// Most full runs of a response: of nine super-packets eight are full then. More: fewer short
    /// runs, and more at once. Not measured by itself.
    pub(crate) const RUNS_MAX: u32 = 8;
    /// Requests for which there shall be room: while one is answered another is in flight, and the
    /// room of a third is being given back. More: shorter requests. Not measured.
    pub(crate) const UNDER_WAY: u32 = 3;
    /// Parts of a packet by which the window grows for each that comes: one after a loss, all of
    /// them before. More: slower growth after a loss. Not measured by itself.
    pub(crate) const PARTS: u32 = 64;
    /// Packets without a loss after which the last loss is forgotten: 4 GiB of 4096 bytes each.
    /// More: short requests for longer. Less: more losses in a bottleneck. Not measured.
    pub(crate) const CALM: i32 = 1 << 20;
    /// Requests of few packets that are expected to be in flight in spite of losses. More: faster
    /// on long paths, more losses in a bottleneck. Not measured by itself.
    pub(crate) const LEAST: u32 = 16;
}

/// WRITEs of a few packets are split into messages of one (`rc/requester/split.rs`). Measured:
/// the table, WRITEs of 8 KiB from 13.9 to 52.6 Gb/s on `udp`.
pub(crate) mod split {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Super-packets of the split WRITE, and those of the whole one that they must not exceed. A
    /// larger ratio splits longer WRITEs, which gain less and grow by 16 bytes a packet. Not
    /// measured by itself: design note 05 has the lengths.
    pub(crate) const SAVES: (u64, u64) = (9, 10);
}

/// Probes of a silent peer (`rc/clock.rs`).
pub(crate) mod probes {
    /// Nanoseconds of silence before which a peer is not probed: it may only be busy. More: a lost
    /// last packet is repaired later. Less: peers that wait for a processor are probed in vain. Not
    /// measured by itself: `stack/tests/goodput/goodput.txt` judges it.
    pub(crate) const PATIENCE_NS: u64 = 2_000_000;
    /// Round trips of silence, if that is longer. Effect as above. Not measured: RFC 8985 takes
    /// two.
    pub(crate) const ROUND_TRIPS: u64 = 4;
    /// Probes after which the time between two no longer doubles: from 2 ms to 0.5 s. More: a dead
    /// peer costs less. Less: one that comes back is found sooner. Not measured.
    pub(crate) const DOUBLINGS: u32 = 8;
}

/// Selective repeat (`rc/reorder.rs`, `rc/requester/recovery`). Measured: the table, from 19.2
/// to 70.8 % of the goodput at 1 % loss.
pub(crate) mod selective_repeat {
    /// The switch.
    pub(crate) const ENABLED: bool = true;
    /// Newly held packets that are worth a report on their own. More: fewer reports, and losses are
    /// repaired later. Not measured by itself: `stack/tests/goodput/goodput.txt` judges it.
    pub(crate) const NEWS: u32 = 32;
    /// Fewer are, where another packet is missing before them. Effect and measurement as above.
    pub(crate) const GAP_NEWS: u32 = 8;
    /// Places for which a queue pair keeps the memory when it holds nothing. More: more memory.
    /// Less: more allocations after a loss. Not measured.
    pub(crate) const PLACES_KEPT: usize = 64;
}

/// Going back to a lost packet (`rc/requester/recovery`).
pub(crate) mod go_back {
    /// Packets that may follow a retransmission that was lost, the first time; half of them each
    /// further time. More: more sent in vain. Less: a longer pause after the repair. Not measured
    /// by itself: `stack/tests/goodput/goodput.txt` judges it.
    pub(crate) const BEHIND: u64 = 8;
}

/// The congestion window (`rc/congestion`). Measured: `stack/tests/goodput/goodput.txt`, which each
/// test run compares. No constant was measured by itself.
pub(crate) mod congestion {
    /// Packets of the smallest window. More: a bottleneck that holds less loses for ever. Less: no
    /// packet shows the loss of another.
    pub(crate) const WINDOW_MIN: u32 = 2;
    /// Packets that may leave at once although they are paced. More: more is lost behind a loss.
    /// Less: more turns.
    pub(crate) const FIRST: u32 = 8;
    /// Steps in which the paced window opens. More: smoother, and more wake-ups.
    pub(crate) const STEPS: u64 = 16;
    /// Nanoseconds of a round trip that is worth pacing. Less: more wake-ups than packets.
    pub(crate) const PACED_NS: u64 = 50_000;
    /// The window grows by one part in this per round trip. More: a lossy shaper is probed gently.
    /// Less: a clear path is full sooner, now in a dozen round trips.
    pub(crate) const GROWTH: u32 = 16;
    /// The largest window, in multiples of the packets that get through between two losses.
    /// Go-back-N reaches `RUNS` parts in `RUNS + 1` of its best rate then. More: closer to that
    /// rate, and more sent in vain.
    pub(crate) const RUNS: u32 = 4;
    /// Nanoseconds for which the shortest round trip counts. More: a path that became longer looks
    /// like a full queue. Less: a full queue becomes usual.
    pub(crate) const MEMORY_NS: u64 = 10_000_000_000;
    /// Times that are remembered. A queue pair that sends more often than this in a round trip is
    /// measured less often. More: more memory for each queue pair in use.
    pub(crate) const TURNS: usize = 64;
}

/// Congestion notifications (`rc/congestion/ecn.rs`). The values are DCQCN's (Zhu et al., 2015).
pub(crate) mod ecn {
    /// Nanoseconds from one notification to the next. More: slower to react. Less: more packets.
    /// Not measured: DCQCN's.
    pub(crate) const PACE_NS: u64 = 50_000;
    /// A round trip moves the share of marked ones by one part in this. More: steadier, slower to
    /// react. Not measured by itself: the table has the shares of 64 senders.
    pub(crate) const GAIN: u32 = 16;
}

/// The lists of work in flight (`rc/requester/lists.rs`).
pub(crate) mod in_flight {
    /// Queue pairs that keep theirs when they have nothing in flight. More: more memory. Less:
    /// more of them fetch the lists for each request. Not measured.
    pub(crate) const KEEPERS: usize = 16;
}

/// Packets that no peer acknowledges (`pacing`, `unreliable`). Measured: the table.
pub(crate) mod pacing {
    /// Nanoseconds that a receiver gets for a packet: 2 to 2.5 times the measured need, because its
    /// processor has other work. Less: more is lost. Measured: the table; 3.1 and 2.0 million
    /// packets of 64 and 1,024 bytes in a second.
    pub(crate) const PACKET_NS: u32 = 800;
    /// Nanoseconds that it gets for 1,024 bytes of payload besides. Effect and measurement as
    /// above: 1.2 million packets of 4,096 bytes in a second.
    pub(crate) const KIB_NS: u32 = 300;
    /// Bytes of the queue that any receiver is taken to have: a socket of Linux with its default
    /// buffer (`net.core.rmem_default`). More: more at once, of which more is lost. Not measured.
    pub(crate) const QUEUE_BYTES: u32 = 212_992;
    /// Nanoseconds for a datagram that a receiver may announce, at least. Less: a forged
    /// announcement floods more. Not measured: no sender is faster.
    pub(crate) const PACKET_NS_MIN: u32 = 50;
    /// Nanoseconds that packets may wait for others to leave with. More: fewer system calls, later
    /// packets. Not measured by itself.
    pub(crate) const BATCH_NS: u64 = 50_000;
    /// PSNs behind the expected one within which a packet was overtaken, or is a duplicate, and is
    /// dropped. Further behind, the peer has begun anew. More: a new beginning is noticed less
    /// often. Less: a late packet destroys a message. Not measured.
    pub(crate) const LATE: u64 = 1024;
}

/// The probes of recognition (`recognition`). Design note 22 has the bounds; none of them was
/// measured: they are memory and datagrams that an unknown peer may cost.
pub(crate) mod recognition {
    /// Nanoseconds after which a peer is probed again, and for which a reply is believed. More:
    /// another peer at the address is known later. Less: more probes.
    pub(crate) const PAUSE: u64 = 600_000_000_000;
    /// Peers that are remembered. More: more memory. Less: beyond it peers stay unknown.
    pub(crate) const PEERS_MAX: usize = 4096;
    /// Datagrams that wait to be sent. More: more memory. Less: more replies are dropped.
    pub(crate) const TX_MAX: usize = 256;
    /// Nanoseconds until another attempt where datagrams wait. More: later replies. Less: more
    /// wake-ups.
    pub(crate) const SOON: u64 = 1_000_000;
    /// Probes that are answered at once. More: more datagrams for a forged sender.
    pub(crate) const ANSWERS: u32 = 256;
    /// Nanoseconds until one more is answered. Effect as above.
    pub(crate) const ANSWER_NS: u64 = 1_000_000;
}

/// The connection manager (`cm`). Design note 16 has the bounds; none was measured, unless it says.
pub(crate) mod cm {
    /// Questions without an answer, a second apart, after which a silent peer counts as gone.
    pub const ASKS: u8 = 3;
    /// Nanoseconds: the shortest period of silence after which a peer is asked. Less: more
    /// datagrams for each idle connection.
    pub(crate) const PERIOD_MIN: u64 = 1_000_000_000;
    /// Nanoseconds: the longest, 100 years. It keeps sums of times in range.
    pub(crate) const PERIOD_MAX: u64 = 3_155_760_000_000_000_000;
    /// Nanoseconds that a peer has to answer a question. More: a dead one is found later. Less: a
    /// busy one counts as dead.
    pub(crate) const PATIENCE: u64 = 1_000_000_000;
    /// Questions leave at multiples of this part of a period, up to one part early rather than
    /// late. More: more deadlines. Less: idle connections share more of them, and ask earlier.
    pub(crate) const ASKS_GRID: u64 = 8;
    /// A connection in use is looked at after one to two of these parts of a period; and the side
    /// that requested it asks one part later than the other. More: more looks, and more precise.
    pub(crate) const LOOKS_GRID: u64 = 20;
    /// Notices that are sent at once. More: more datagrams for a forged sender.
    pub(crate) const NOTICES: u32 = 64;
    /// Nanoseconds until one more notice is sent. Effect as above.
    pub(crate) const NOTICE_NS: u64 = 10_000_000;
    /// Damaged packets for queue pairs that do not exist whose ICRC is checked at once. More: more
    /// work for a forged sender. Less: damaged packets keep notices from whole ones.
    pub(crate) const DAMAGED: u32 = 4096;
    /// Nanoseconds until one more is checked: 50 000 a second, some percent of a processor. Effect
    /// as above.
    pub(crate) const DAMAGED_NS: u64 = 20_000;
    /// Answers about datagram services that are kept; one more discards the oldest. More: more
    /// memory. Less: a repeated question reaches the program again.
    pub(crate) const ANSWERS_MAX: usize = 1024;
    /// Nanoseconds that an answer is kept: 60 s, in which Linux asks 15 times. Effect as above.
    pub(crate) const ANSWER_KEPT: u64 = 60_000_000_000;
    /// Factor on the usual time that the peer is asked to wait for an RTU, as a power of two. More:
    /// a vanished peer holds its place for longer.
    pub(crate) const A_WHILE: u8 = 4;
    /// Datagrams that wait to be sent. More: more memory. Less: floods drop answers sooner.
    pub(crate) const TX_MAX: usize = 4096;
    /// Listeners of each kind, and open questions. More: more memory.
    pub(crate) const SERVICES_MAX: usize = 65_536;
    /// Requests and questions that wait for a listener. More: more memory. Less: a burst is refused
    /// early.
    pub(crate) const EARLY_MAX: usize = 64;
    /// The longest ACK timeout of a peer that counts, a code: 17 s. More: TIMEWAIT holds places for
    /// longer. Less: a late packet may meet a new connection.
    pub(crate) const ACK_TIMEOUT_MAX: u8 = 22;
    /// The shortest, a code: 67 ms, as long as packets live on any network of ours. Effect as
    /// above.
    pub(crate) const ACK_TIMEOUT_MIN: u8 = 14;
    /// Connections of a device, by default. More: more memory for a flood of requests.
    pub(crate) const CONNECTIONS_MAX: usize = 16_384;
}

/// Bounds and turns of the engine (`engine.rs`, `shared.rs`, `groups.rs`).
pub(crate) mod engine {
    /// Nanoseconds after the last packet arrived that plain acknowledgements may wait for packets
    /// that leave with them: far less than the time after which a peer asks again.
    // More: more of them find company. Less: peers that wait for one go on sooner. Measured: the
    // table, "acknowledgements leave with the answer".
    pub const ACK_DELAY_NS: u64 = 1_000_000;
    /// Nanoseconds by which a deadline is met late that count as a device without a driver. More:
    /// short waits for a processor stay unseen. Less: each late wake-up of the kernel counts. Not
    /// measured.
    pub(crate) const LATE_NS: u64 = 1_000_000;
    /// Queue pairs and kept queue pair numbers together, of 65,536 numbers. More: a number is used
    /// again sooner. Not measured.
    pub(crate) const QPNS: usize = 65_000;
    /// Queue pairs of an engine, by default. More: memory for their places. Not measured.
    pub(crate) const QPS: u32 = 16_384;
    /// Unacknowledged packets of a queue pair, by default. More: longer paths are filled, with more
    /// memory for each queue pair in use. Not measured.
    pub(crate) const WINDOW_MAX: u32 = 512;
    /// Unconnected senders whose way of counting identifications is remembered (`ingress.rs`).
    /// More: more memory. Less: more packets are tried both ways.
    pub(crate) const SOURCES_MAX: usize = 128;
    /// Packets in all reorder buffers, by default. More: memory that peers can make us take, 4132
    /// bytes each. Less: more goes again after a loss. Not measured.
    pub(crate) const REORDER_PACKETS_MAX: u32 = 2048;
    /// Packets that a queue pair sends in its turn, by default. More: longer runs, others wait
    /// longer. Not measured.
    pub(crate) const QUANTUM: u32 = 64;
    /// Most groups of a device.
    // More: more memory.
    pub const GROUPS_MAX: usize = 256;
    /// Most queue pairs of a group: each of them gets a copy of a datagram.
    // More: one datagram costs more.
    pub const MEMBERS_MAX: usize = 1024;
}
