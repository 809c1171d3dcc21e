//! Faults of the network by a seed: the fate of each datagram, decided from bytes and the time.
//!
//! A [`Plan`] is that of a user: words, or a schedule. `Faults` decides by it, for one port. It
//! has no clock and no I/O: the same seed, and the same datagrams at the same times, give the same
//! decisions. By a seed the n-th datagram of a rule draws the same numbers at any time. Faults of
//! the device, which are in the same plan, have [`DeviceFaults`].

mod device;
pub(crate) mod flight;
pub(crate) mod link;
pub(crate) mod log;
pub(crate) mod rng;
mod schedule;
#[cfg(test)]
mod tests;
mod words;

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use device::DeviceRule;
pub use device::{DeviceFaults, Happening, Trouble};
use link::{Fate, Link, LinkConfig, Loss};
use rng::Rng;

/// Ethernet, IPv4 or IPv6, and UDP headers: a rate limiter counts them besides the payload.
const HEADERS: [usize; 2] = [14 + 20 + 8, 14 + 40 + 8];

/// The ECN field of a datagram that met congestion: CE (RFC 3168, section 5).
pub(crate) const CONGESTION: u8 = 3;

/// The most copies of a datagram, by all rules together.
const COPIES: usize = 4;

/// The most rules of a plan.
const RULES_MAX: usize = 64;

/// The most bytes of a schedule.
const SCHEDULE_MAX: u64 = 1 << 20;

/// The longest error, in characters.
const LINE_MAX: usize = 400;

/// The numbers that a word means; none if it means none. The ports know neither opcodes nor verbs.
pub type Names = fn(Word, &str) -> Vec<u8>;

/// The kind of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Opcodes of the BTH.
    Opcode,
    /// A call of the device.
    Verb,
    /// Operations that complete.
    Completion,
    /// The status of a completion that failed.
    Status,
}

/// The way of a datagram through a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It leaves.
    Egress,
    /// It arrives.
    Ingress,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

/// A user's faults: when, of which datagrams, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The seed, if the user gave one.
    pub seed: Option<u64>,
    rules: Vec<Rule>,
    /// As the user wrote it.
    text: String,
}

/// Faults of some datagrams, for some time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Rule {
    /// When it begins, since the port was opened.
    at: Duration,
    /// How long it holds; without an end if that is `None`.
    lasts: Option<Duration>,
    of: Filter,
    config: LinkConfig,
    /// A fault of the device.
    device: Option<DeviceRule>,
    /// The place in a plan whose random numbers it draws, if that is not its own.
    draws: Option<u8>,
}

impl Rule {
    /// The number by which it draws, in this place of its plan.
    fn draws(&self, index: usize) -> u8 {
        self.draws.unwrap_or(index as u8)
    }

    /// Whether it holds at this time.
    fn holds(&self, now: Duration) -> bool {
        let since = now.checked_sub(self.at);
        since.is_some_and(|since| self.lasts.is_none_or(|lasts| since < lasts))
    }
}

/// The datagrams that a rule is for; an empty list stands for all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Filter {
    side: Option<Side>,
    peers: Vec<IpAddr>,
    /// Destination queue pairs.
    qps: Vec<u32>,
    opcodes: Vec<u8>,
}

/// A datagram, as far as a rule looks at it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) side: Side,
    pub(crate) peer: IpAddr,
    pub(crate) payload: &'a [u8],
}

impl Seen<'_> {
    /// The opcode: the first byte of the BTH.
    fn opcode(&self) -> Option<u8> {
        self.payload.first().copied()
    }

    /// The 24 bits of the BTH from this byte.
    fn number(&self, at: usize) -> Option<u32> {
        let bytes = self.payload.get(at..at + 3)?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    /// The destination queue pair.
    fn qp(&self) -> Option<u32> {
        self.number(5)
    }

    fn psn(&self) -> Option<u32> {
        self.number(9)
    }
}

impl Filter {
    fn takes(&self, seen: &Seen<'_>) -> bool {
        fn has<T: PartialEq>(list: &[T], of: Option<T>) -> bool {
            list.is_empty() || of.is_some_and(|of| list.contains(&of))
        }
        self.side.is_none_or(|side| side == seen.side)
            && has(&self.peers, Some(seen.peer))
            && has(&self.qps, seen.qp())
            && has(&self.opcodes, seen.opcode())
    }
}

impl Plan {
    /// Reads a user's faults: words such as `loss=2%,delay=100us,seed=7`, the path of a schedule
    /// that ends in `.toml`, or `off`. Error: one line that says what to change.
    pub fn read(text: &str, names: Names) -> Result<Self, String> {
        let is_file =
            std::path::Path::new(text).extension().is_some_and(|extension| extension == "toml");
        if !is_file {
            return Self::of_words(text, names);
        }
        let read = || {
            let schedule = read_schedule(text).map_err(|error| error.to_string())?;
            Self::of_schedule(&schedule, names)
        };
        let plan = read().map_err(|why| one_line(&format!("the schedule {text}: {why}")))?;
        Ok(Self { text: text.to_owned(), ..plan })
    }

    /// Reads words. Error: as [`read`](Self::read).
    pub fn of_words(text: &str, names: Names) -> Result<Self, String> {
        words::plan(text, names).map_err(|why| one_line(&why))
    }

    /// Reads the text of a schedule. Error: as [`read`](Self::read).
    pub fn of_schedule(text: &str, names: Names) -> Result<Self, String> {
        schedule::plan(text, names).map_err(|why| one_line(&why))
    }

    /// Whether nothing ever happens.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        self.is_harmless_to_datagrams() && !self.has_device_faults()
    }

    /// Whether nothing ever happens to a datagram.
    #[must_use]
    pub fn is_harmless_to_datagrams(&self) -> bool {
        self.rules.iter().all(|rule| rule.config.is_perfect())
    }

    fn has_device_faults(&self) -> bool {
        self.rules.iter().any(|rule| rule.device.as_ref().is_some_and(|it| !it.is_never()))
    }

    /// When each rule begins.
    pub fn beginnings(&self) -> impl Iterator<Item = Duration> {
        self.rules.iter().map(|rule| rule.at)
    }
}

/// The text of a file. Error: it cannot be read, is no regular file, or is too long.
fn read_schedule(path: &str) -> io::Result<String> {
    // A pipe would wait for a writer, and a device might never end.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut text = String::new();
    file.take(SCHEDULE_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > SCHEDULE_MAX {
        return Err(io::Error::other(format!("it has more than {SCHEDULE_MAX} bytes")));
    }
    Ok(text)
}

/// An error as one line that fits a terminal, whatever the user's text has that it quotes.
fn one_line(why: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    why.chars().map(plain).take(LINE_MAX).collect()
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// The decisions of a port.
#[derive(Debug)]
pub(crate) struct Faults {
    rules: Vec<Armed>,
}

/// A rule, with its state for each side.
#[derive(Debug)]
struct Armed {
    rule: Rule,
    /// Its place in the plan.
    number: usize,
    streams: [Stream; 2],
}

/// The datagrams of a rule in one direction.
#[derive(Debug)]
struct Stream {
    link: Link,
    seed: u64,
    /// Those so far, also while the rule did not hold.
    count: u64,
}

/// A port, as its random numbers and its log name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortName {
    /// An address of its device.
    pub(crate) device: IpAddr,
    /// Its number in the device.
    pub(crate) nth: usize,
}

/// The address by which the faults of a device name it: other than one of IPv6, it is the same
/// after the next start.
#[must_use]
pub fn name_of(addresses: &[IpAddr]) -> IpAddr {
    let first = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first());
    first.copied().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

/// The fate of a datagram: its copies, or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decision {
    copies: [Option<Fate>; COPIES],
    /// The last loss.
    pub(crate) loss: Option<Loss>,
    /// The rule of it, counted from 0.
    pub(crate) rule: Option<usize>,
}

impl Decision {
    /// The copies that arrive.
    pub(crate) fn copies(&self) -> impl Iterator<Item = &Fate> {
        self.copies.iter().flatten()
    }

    /// The copies, of which the caller [keeps](Self::keep) those that it has room for.
    pub(crate) fn take_copies(&mut self) -> impl Iterator<Item = Fate> + use<> {
        std::mem::take(&mut self.copies).into_iter().flatten()
    }

    pub(crate) fn keep(&mut self, fate: Fate) {
        if let Some(free) = self.copies.iter_mut().find(|copy| copy.is_none()) {
            *free = Some(fate);
        }
    }

    /// A copy is lost, by no rule.
    pub(crate) fn lose(&mut self, loss: Loss) {
        self.loss = Some(loss);
    }

    /// Whether one unchanged copy arrives at once.
    pub(crate) fn passes(&self, now: Duration) -> bool {
        let [first, rest @ ..] = &self.copies;
        let is_untouched = |fate: &Fate| fate.due <= now && fate.flip.is_none() && !fate.is_marked;
        self.loss.is_none()
            && first.as_ref().is_some_and(is_untouched)
            && rest.iter().all(Option::is_none)
    }
}

impl Faults {
    /// The decisions of a port. Each datagram of a rule has its own random numbers, so its draws
    /// depend on no other datagram and on no time.
    pub(crate) fn new(plan: &Plan, seed: u64, of: PortName) -> Self {
        let arm = |(index, rule): (usize, &Rule)| {
            let stream = |side: Side| {
                let mut rng = Rng::fork(seed, &rng::name(of.device));
                rng = Rng::fork(rng.next(), &[of.nth as u8, rule.draws(index), side as u8]);
                Stream { link: Link::new(rule.config.clone()), seed: rng.next(), count: 0 }
            };
            let streams = [stream(Side::Egress), stream(Side::Ingress)];
            Armed { rule: rule.clone(), number: index, streams }
        };
        let harmful = plan.rules.iter().enumerate().filter(|(_, r)| !r.config.is_perfect());
        Self { rules: harmful.map(arm).collect() }
    }

    /// Decides on a datagram. Rules apply one after the other, each to the copies that the one
    /// before has left.
    pub(crate) fn decide(&mut self, now: Duration, seen: &Seen<'_>) -> Decision {
        let len = seen.payload.len();
        let header = HEADERS[usize::from(seen.peer.is_ipv6())];
        let copies = [Some(Fate::at(now)), None, None, None];
        let mut decision = Decision { copies, loss: None, rule: None };
        for Armed { rule, streams, number } in &mut self.rules {
            if !rule.of.takes(seen) {
                continue;
            }
            let Stream { link, seed, count: nth } = &mut streams[seen.side as usize];
            *nth += 1;
            if !rule.holds(now) {
                continue;
            }
            let mut rng = Rng::fork(*seed, &nth.to_le_bytes());
            let mut copies = [None; COPIES];
            let mut count = 0;
            for fate in decision.take_copies() {
                match link.decide(&mut rng, fate.due, len, header) {
                    Ok((first, second)) => {
                        for next in [Some(first), second].into_iter().flatten() {
                            if count < COPIES {
                                copies[count] = Some(then(&fate, &next));
                                count += 1;
                            }
                        }
                    }
                    Err(loss) => {
                        (decision.loss, decision.rule) = (Some(loss), Some(*number));
                    }
                }
            }
            decision.copies = copies;
        }
        if seen.side == Side::Egress {
            // The path writes the header of an outgoing datagram.
            decision.copies.iter_mut().flatten().for_each(|fate| fate.is_marked = false);
        }
        decision
    }
}

/// The fate of a datagram that two links treat, one after the other.
fn then(first: &Fate, second: &Fate) -> Fate {
    Fate {
        due: second.due,
        // A bit that flips twice would be whole again.
        flip: first.flip.or(second.flip),
        is_late: first.is_late || second.is_late,
        is_marked: first.is_marked || second.is_marked,
    }
}
