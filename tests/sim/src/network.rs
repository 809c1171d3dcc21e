//! The network between the hosts: its faults, and how often they happen.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::features::switches;
use crate::random::Random;

/// Faults of the network, the hosts and the programs, by their names in the report.
macro_rules! faults {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// How often each kind of fault happened.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        #[allow(missing_docs)]
        pub struct Faults {
            $( $(#[$doc])* pub $name: u64, )*
        }

        impl Faults {
            /// Names and counts.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$( (stringify!($name), self.$name), )*].into_iter()
            }

            /// Adds the counts of another run.
            pub fn add(&mut self, other: &Self) {
                $( self.$name += other.$name; )*
            }
        }

        switches! {
            /// Which kinds of faults may happen.
            FaultClasses: $( $name, )*
        }
    };
}

faults! {
    /// A packet was lost.
    drop,
    /// A packet was lost together with those around it.
    burst,
    /// A packet came twice.
    dup,
    /// A packet was overtaken by later ones.
    reorder,
    /// Some bits of a packet were changed, of its headers or of its payload.
    corrupt,
    /// The end of a packet was cut off.
    truncate,
    /// A packet came to another host.
    misroute,
    /// A packet came with a congestion mark.
    congestion,
    /// A packet found a queue full.
    overflow,
    /// A packet could not pass a partition.
    partition,
    /// The sender's own queue was full.
    sink_full,
    /// The port had no room for a long while.
    block,
    /// The sender's kernel refused a packet.
    refused,
    /// A host crashed, and came back with the same queue pair numbers.
    crash,
    /// Another host came back with the address of one that had crashed.
    takeover,
    /// A connection was made again with the starting PSNs of its last life, and other numbers.
    same_psn,
    /// A packet was handed to another shard of its host first.
    wrong_shard,
    /// A host did nothing for a while.
    stall,
    /// A program posted no receives for a while.
    starve,
    /// A region was deregistered with requests outstanding.
    dereg,
    /// A queue pair was destroyed with requests outstanding.
    destroy,
    /// A queue pair was reset with requests outstanding.
    reset,
    /// A program put a queue pair into the error state.
    fail,
    /// A queue pair was drained, and went on.
    drain,
    /// A request was posted that the peer must refuse.
    garbage_remote,
    /// A request was posted with own memory that must be refused.
    garbage_local,
    /// A receive was posted that is too short, or has memory that must be refused.
    garbage_receive,
    /// A call was made that must be refused.
    garbage_call,
    /// A datagram was sent with another Q_Key than its receiver's.
    wrong_qkey,
    /// A completion queue overflowed.
    cq_overflow,
    /// An address handle was destroyed while datagrams named it.
    drop_handle,
    /// A shared receive queue was destroyed, with all queue pairs that used it.
    renew,
    /// All programs slept for so long that ended connections were forgotten.
    night,
}

/// A packet on its way.
#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    /// The sending host, and the host where it arrives.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// The host that it is addressed to.
    pub(crate) dst: usize,
    pub(crate) port: u16,
    pub(crate) id: u16,
    pub(crate) tos: u8,
    /// It was handed to another shard first.
    pub(crate) misled: bool,
    /// It was changed, or arrives at the wrong place: no engine may accept it.
    pub(crate) harmed: bool,
    /// The end that it is for, and the life of the connection in which it left.
    pub(crate) end: Option<usize>,
    pub(crate) generation: u32,
}

/// The faults of the network: each hits one in this number of packets, none for 0.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weather {
    pub(crate) drop: u64,
    pub(crate) burst: u64,
    pub(crate) dup: u64,
    pub(crate) reorder: u64,
    pub(crate) corrupt: u64,
    pub(crate) truncate: u64,
    pub(crate) misroute: u64,
    pub(crate) congestion: u64,
    pub(crate) partition: u64,
    /// Delay in nanoseconds.
    pub(crate) delay: u64,
    /// Nanoseconds per byte in sixteenths, 0 for no limit; and the bytes that may wait in the
    /// queue.
    pub(crate) rate: u64,
    pub(crate) queue: u64,
}

/// The longest delay of a packet, without the queue, nanoseconds.
pub(crate) const LATE_MAX: u64 = 300_000;

impl Weather {
    /// No faults.
    pub(crate) fn calm() -> Self {
        Self { delay: 3_000, ..Self::default() }
    }

    pub(crate) fn storm(random: &mut Random) -> Self {
        Self {
            drop: random.of(&[0, 15, 40, 100, 400]),
            burst: random.of(&[0, 300, 1000]),
            dup: random.of(&[0, 10, 50]),
            reorder: random.of(&[0, 10, 40]),
            corrupt: random.of(&[0, 30, 100]),
            truncate: random.of(&[0, 100, 300]),
            misroute: random.of(&[0, 200]),
            congestion: random.of(&[0, 20]),
            partition: random.of(&[0, 0, 1500]),
            delay: random.of(&[500, 5_000, 40_000]),
            rate: random.of(&[0, 0, 13, 64]),
            queue: random.of(&[6_000, 30_000, 120_000]),
        }
    }

    /// The same with these faults alone.
    pub(crate) fn only(self, faults: &FaultClasses) -> Self {
        let once_in = |on: bool, packets: u64| if on { packets } else { 0 };
        Self {
            drop: once_in(faults.drop, self.drop),
            burst: once_in(faults.burst, self.burst),
            dup: once_in(faults.dup, self.dup),
            reorder: once_in(faults.reorder, self.reorder),
            corrupt: once_in(faults.corrupt, self.corrupt),
            truncate: once_in(faults.truncate, self.truncate),
            misroute: once_in(faults.misroute, self.misroute),
            congestion: once_in(faults.congestion, self.congestion),
            partition: once_in(faults.partition, self.partition),
            // Without a limit of the rate no queue is ever full.
            rate: once_in(faults.overflow, self.rate),
            ..self
        }
    }
}

/// The link from one host to another.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    busy_until: u64,
    burst: u64,
    cut_until: u64,
}

/// An event at some time.
#[derive(Debug)]
pub(crate) enum Event {
    Arrive(Packet),
    /// The program at an end has a turn.
    Work(usize),
    /// The programs at a host that use its connection manager have a turn.
    Turn(usize),
    /// A fault that is not the network's.
    Mishap,
    /// A connection begins a new life.
    Rejoin(usize),
    /// An end joins this life of its connection.
    Join(usize, u32),
    /// A host comes back.
    Restart(usize),
    /// A host goes on.
    Resume(usize),
    /// An end goes on after draining.
    Undrain(usize, u32),
}

/// Events, ordered by time and then by insertion.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    heap: BinaryHeap<Reverse<(u64, u64, Slot)>>,
    order: u64,
}

/// An event, which the order ignores.
#[derive(Debug)]
struct Slot(Event);

impl PartialEq for Slot {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Slot {}

impl PartialOrd for Slot {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Slot {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl Agenda {
    pub(crate) fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.heap.push(Reverse((time, self.order, Slot(event))));
    }

    pub(crate) fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((time, ..))| *time)
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        self.heap.pop().map(|Reverse((_, _, Slot(event)))| event)
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }
}

/// All links.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) weather: Weather,
    links: Vec<Link>,
    hosts: usize,
    /// Whether packets have an identification.
    v4: bool,
}

impl Network {
    pub(crate) fn new(hosts: usize, v4: bool, weather: Weather) -> Self {
        Self { weather, links: vec![Link::default(); hosts * hosts], hosts, v4 }
    }

    /// Ends all faults.
    pub(crate) fn heal(&mut self) {
        self.weather = Weather::calm();
        for link in &mut self.links {
            // Packets that wait in a queue are not overtaken.
            *link = Link { busy_until: link.busy_until, ..Link::default() };
        }
    }

    /// Sends a packet, unless the network loses it. Returns the number of lost packets.
    pub(crate) fn send(
        &mut self,
        now: u64,
        packet: Packet,
        random: &mut Random,
        faults: &mut Faults,
        agenda: &mut Agenda,
    ) -> u64 {
        let weather = self.weather;
        let link = &mut self.links[packet.from * self.hosts + packet.to];
        if random.one_in(weather.partition) {
            link.cut_until = now + random.range(50_000, 3_000_000);
        }
        if now < link.cut_until {
            faults.partition += 1;
            return 1;
        }
        if link.burst == 0 && random.one_in(weather.burst) {
            link.burst = random.range(2, 30);
        }
        if link.burst > 0 {
            link.burst -= 1;
            faults.burst += 1;
            return 1;
        }
        if random.one_in(weather.drop) {
            faults.drop += 1;
            return 1;
        }
        let mut left = now.max(link.busy_until);
        if weather.rate > 0 {
            let waits = link.busy_until.saturating_sub(now);
            if waits * 16 > weather.queue * weather.rate {
                faults.overflow += 1;
                return 1;
            }
            link.busy_until = now + waits + (packet.bytes.len() as u64 + 60) * weather.rate / 16;
            left = link.busy_until;
        }
        let copies = if random.one_in(weather.dup) { 2 } else { 1 };
        faults.dup += copies - 1;
        for _ in 1..copies {
            self.deliver(left, packet.clone(), random, faults, agenda);
        }
        self.deliver(left, packet, random, faults, agenda);
        0
    }

    fn deliver(
        &self,
        left: u64,
        mut packet: Packet,
        random: &mut Random,
        faults: &mut Faults,
        agenda: &mut Agenda,
    ) {
        let weather = &self.weather;
        let mut due = left + weather.delay;
        if random.one_in(weather.reorder) {
            due += random.below(LATE_MAX - weather.delay);
            faults.reorder += 1;
        }
        if random.one_in(weather.congestion) {
            packet.tos |= 3;
            faults.congestion += 1;
        }
        if random.one_in(weather.corrupt) {
            corrupt(&mut packet, self.v4, random);
            faults.corrupt += 1;
        }
        if random.one_in(weather.truncate) {
            packet.bytes.truncate(random.index(packet.bytes.len()));
            packet.harmed = true;
            faults.truncate += 1;
        }
        if self.hosts > 1 && random.one_in(weather.misroute) {
            packet.to = (packet.to + 1 + random.index(self.hosts - 1)) % self.hosts;
            packet.harmed = true;
            faults.misroute += 1;
        }
        agenda.at(due, Event::Arrive(packet));
    }
}

/// Changes one to three bits of the packet or of the headers before it; each ICRC notices that.
fn corrupt(packet: &mut Packet, v4: bool, random: &mut Random) {
    match random.below(8) {
        0 => packet.port ^= 1 << random.below(16),
        1 if v4 => packet.id ^= 1 << random.below(16),
        _ => {
            let bits = packet.bytes.len() as u64 * 8;
            let first = random.below(bits);
            flip(&mut packet.bytes, first);
            for more in [1, 2] {
                if random.one_in(2) {
                    // A bit other than the first two.
                    flip(&mut packet.bytes, (first + more * random.range(16, bits / 3)) % bits);
                }
            }
        }
    }
    packet.harmed = true;
}

/// Changes a bit, but not in the one byte of the BTH that routers may change: the ICRC does not
/// cover it, and nothing here reads it.
fn flip(bytes: &mut [u8], bit: u64) {
    let at = (bit / 8) as usize;
    let at = if at == MUTABLE { at + 1 } else { at };
    bytes[at] ^= 1 << (bit % 8);
}

/// The offset of that byte.
const MUTABLE: usize = 4;
