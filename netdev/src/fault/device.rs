//! Faults of the device: calls that fail, completions that become errors, receives that are not
//! there, events, stalls.
//!
//! As with datagrams, the same calls in the same order meet the same faults. All threads of a
//! program share one count.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::log::FaultLog;
use super::rng::{self, Rng};
use super::words::{chance, each, flag, number};
use super::{Names, Plan, Rule, Seen, Side, Word};

/// The words that make a rule one of the device, each with the words that may join it.
const KINDS: [(&str, &[&str]); 5] = [
    ("verb", &["errno", "nth", "chance"]),
    ("status", &["wc", "nth", "chance", "qp"]),
    ("rnr", &["peer", "qp", "opcode"]),
    ("event", &["wc", "nth", "chance", "qp"]),
    ("stall", &[]),
];

/// The words that belong to those.
const PARTS: [&str; 4] = ["errno", "wc", "nth", "chance"];

/// The errno that a call fails with, unless a rule names another.
const ERRNO: i32 = libc::ENOMEM;

/// The greatest errno of the kernel.
const ERRNO_MAX: u32 = 4095;

const ERRNOS: [(&str, i32); 20] = [
    ("EPERM", libc::EPERM),
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("EBADF", libc::EBADF),
    ("EAGAIN", libc::EAGAIN),
    ("ENOMEM", libc::ENOMEM),
    ("EACCES", libc::EACCES),
    ("EFAULT", libc::EFAULT),
    ("EBUSY", libc::EBUSY),
    ("ENODEV", libc::ENODEV),
    ("EINVAL", libc::EINVAL),
    ("ENFILE", libc::ENFILE),
    ("EMFILE", libc::EMFILE),
    ("ENOSPC", libc::ENOSPC),
    ("ENOSYS", libc::ENOSYS),
    ("EPROTO", libc::EPROTO),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
    ("ENETUNREACH", libc::ENETUNREACH),
    ("ENOBUFS", libc::ENOBUFS),
    ("ETIMEDOUT", libc::ETIMEDOUT),
];

/// The fault of a rule of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceRule {
    what: What,
    /// Only the one with this number, from 1, since the rule began.
    nth: Option<u64>,
    /// In parts per million.
    ppm: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    /// These calls fail.
    Calls { verbs: Vec<u8>, errno: i32 },
    /// Completions of these operations, or of all, get a status; or overrun their queue.
    Completions { kinds: Vec<u8>, status: Option<u8> },
    /// Messages find no receive.
    Unready,
    /// At the beginning of the rule, and at its end.
    Event(Event),
    /// As long as the rule holds.
    Stall,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Fatal,
    Port,
    Gids,
}

/// An event of a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// `IBV_EVENT_DEVICE_FATAL`.
    DeviceFatal,
    /// `IBV_EVENT_PORT_ERR`. The ports lose all datagrams by themselves.
    PortErr,
    /// `IBV_EVENT_PORT_ACTIVE`.
    PortActive,
    /// `IBV_EVENT_GID_CHANGE`.
    GidChange,
    /// Nothing happens in the device until then.
    StallUntil(Duration),
}

impl Happening {
    const fn name(self) -> &'static str {
        match self {
            Self::DeviceFatal => "DEVICE_FATAL",
            Self::PortErr => "PORT_ERR",
            Self::PortActive => "PORT_ACTIVE",
            Self::GidChange => "GID_CHANGE",
            Self::StallUntil(_) => "stall",
        }
    }
}

/// The fault of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// It gets this status.
    Status(u8),
    /// It does not fit into its queue.
    Overrun,
}

impl DeviceRule {
    /// Whether nothing ever happens.
    pub(super) fn is_never(&self) -> bool {
        self.ppm == 0
    }
}

/// The words of a rule of the device, as far as they were read.
#[derive(Debug, Default)]
pub(super) struct Parts {
    what: Option<What>,
    errno: Option<i32>,
    kinds: Vec<u8>,
    nth: Option<u64>,
    ppm: Option<u32>,
}

impl Parts {
    /// Whether a word is one of these.
    pub(super) fn has(key: &str) -> bool {
        Self::is_part(key) || KINDS.iter().any(|(kind, _)| *kind == key)
    }

    /// Whether a word belongs to another, and is no fault alone.
    pub(super) fn is_part(key: &str) -> bool {
        PARTS.contains(&key)
    }

    /// Takes a word. Error: its value makes no sense.
    pub(super) fn set(&mut self, key: &str, value: &str, names: Names) -> Result<(), &'static str> {
        let known = |word: Word, what| {
            let read = |name: &str| Some(names(word, name)).filter(|found| !found.is_empty());
            each(value, read).ok_or(what)
        };
        match key {
            "verb" => {
                let verbs = known(Word::Verb, "calls such as reg_mr, with + between them")?;
                self.what = Some(What::Calls { verbs, errno: ERRNO });
            }
            "status" => {
                const WHAT: &str = "one status of a failure, such as RETRY_EXC_ERR";
                let status = match known(Word::Status, WHAT)?[..] {
                    [status] => Some(status),
                    _ => return Err(WHAT),
                };
                self.what = Some(What::Completions { kinds: Vec::new(), status });
            }
            "rnr" => {
                self.what = Some(What::Unready);
                self.ppm = Some(chance(value)?);
            }
            "event" => {
                self.what = Some(match value {
                    "DEVICE_FATAL" => What::Event(Event::Fatal),
                    "PORT_ERR" => What::Event(Event::Port),
                    "GID_CHANGE" => What::Event(Event::Gids),
                    "CQ_ERR" => What::Completions { kinds: Vec::new(), status: None },
                    _ => return Err("DEVICE_FATAL, PORT_ERR, GID_CHANGE or CQ_ERR"),
                });
            }
            "stall" => {
                self.ppm = Some(if flag(value)? { 1_000_000 } else { 0 });
                self.what = Some(What::Stall);
            }
            "errno" => self.errno = Some(errno(value).ok_or("an errno, such as ENOMEM")?),
            "wc" => {
                let what = "operations, such as send, rdma-write or recv, with + between them";
                self.kinds = known(Word::Completion, what)?;
            }
            "nth" => {
                let nth = value.parse().ok().filter(|nth| *nth > 0);
                self.nth = Some(nth.ok_or("a whole number from 1 up")?);
            }
            _ => self.ppm = Some(chance(value)?),
        }
        Ok(())
    }

    /// Gives the rule its fault of the device, if these are the words of one. Error: they do not go
    /// with the others.
    pub(super) fn finish(&mut self, said: &[String], rule: &mut Rule) -> Result<(), String> {
        let says = |key: &str| said.iter().any(|said| said == key);
        let Some(mut what) = self.what.take() else {
            let part = said.iter().find(|key| Self::is_part(key));
            let why = |part| format!("{part} belongs to verb, status or event=CQ_ERR");
            return part.map_or(Ok(()), |part| Err(why(part)));
        };
        let Some((kind, with)) = KINDS.iter().find(|(kind, _)| says(kind)) else { return Ok(()) };
        let is_timed = matches!(what, What::Event(_));
        let goes = |key: &str| {
            key == *kind || ["at", "for"].contains(&key) || with.contains(&key) && !is_timed
        };
        if let Some(other) = said.iter().find(|key| !goes(key)) {
            return Err(format!("{other} does not go with {kind}: make it a rule of its own"));
        }
        if self.nth.is_some() && says("chance") {
            return Err("nth or chance: not both".into());
        }
        match &mut what {
            What::Calls { errno, .. } => *errno = self.errno.unwrap_or(*errno),
            What::Completions { kinds, .. } => *kinds = std::mem::take(&mut self.kinds),
            What::Stall if rule.lasts.is_none() => {
                return Err("stall: say how long with `for`".into());
            }
            // Nothing passes a port that is down.
            What::Event(Event::Port) => rule.config.is_cut = true,
            What::Unready | What::Event(_) | What::Stall => {}
        }
        let ppm = self.ppm.unwrap_or(1_000_000);
        rule.device = Some(DeviceRule { what, nth: self.nth, ppm });
        Ok(())
    }
}

/// An errno by its name or number.
fn errno(word: &str) -> Option<i32> {
    let named = ERRNOS.iter().find(|(name, _)| *name == word).map(|(_, errno)| *errno);
    let numbered = || number(word).filter(|errno| (1..=ERRNO_MAX).contains(errno));
    named.or_else(|| numbered().and_then(|errno| i32::try_from(errno).ok()))
}

/// The decisions of a device.
#[derive(Debug)]
pub struct DeviceFaults {
    rules: Vec<Armed>,
    log: Option<FaultLog>,
}

#[derive(Debug)]
struct Armed {
    rule: Rule,
    fault: DeviceRule,
    /// Its place in the plan.
    number: usize,
    seed: u64,
    /// The calls, completions or messages that it has counted since it began.
    count: u64,
}

impl Armed {
    /// Whether the next one meets the fault.
    fn strikes(&mut self, now: Duration) -> bool {
        if !self.rule.holds(now) {
            return false;
        }
        self.count += 1;
        let is_next = self.fault.nth.is_none_or(|nth| nth == self.count);
        is_next && Rng::fork(self.seed, &self.count.to_le_bytes()).chance(self.fault.ppm)
    }
}

/// A decision, as the log has it.
struct Done<'a> {
    what: &'static str,
    name: &'a str,
    qp: Option<u32>,
    did: &'a str,
}

impl DeviceFaults {
    /// The decisions for a device with this [name](super::name_of); `None` if it meets no faults.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn new(
        (plan, seed): (&Plan, u64),
        device: IpAddr,
        log: Option<&Path>,
    ) -> io::Result<Option<Self>> {
        if !plan.has_device_faults() {
            return Ok(None);
        }
        let base = Rng::fork(seed, &rng::name(device)).next();
        let arm = |(number, rule): (usize, &Rule)| {
            let fault = rule.device.clone().filter(|fault| !fault.is_never())?;
            // No port has this number.
            let seed = Rng::fork(base, &[u8::MAX, rule.draws(number), 0]).next();
            Some(Armed { rule: rule.clone(), fault, number, seed, count: 0 })
        };
        let rules = plan.rules.iter().enumerate().filter_map(arm).collect();
        let log = log.map(|path| FaultLog::open(path, plan, seed, (device, None))).transpose()?;
        Ok(Some(Self { rules, log }))
    }

    /// Whether some of these calls fail.
    #[must_use]
    pub fn has_calls(&self, verb: u8) -> bool {
        let has = |what: &What| matches!(what, What::Calls { verbs, .. } if verbs.contains(&verb));
        self.rules.iter().any(|armed| has(&armed.fault.what))
    }

    /// Whether some completions meet faults.
    #[must_use]
    pub fn has_completions(&self) -> bool {
        self.rules.iter().any(|armed| matches!(armed.fault.what, What::Completions { .. }))
    }

    /// Whether some messages find no receive.
    #[must_use]
    pub fn has_unready(&self) -> bool {
        self.rules.iter().any(|armed| armed.fault.what == What::Unready)
    }

    /// The events, each with its time and its rule, in order.
    #[must_use]
    pub fn timeline(&self) -> Vec<(Duration, usize, Happening)> {
        let mut all = Vec::new();
        for Armed { rule, fault, number, .. } in &self.rules {
            let (begin, end) = (rule.at, rule.lasts.map(|lasts| rule.at.saturating_add(lasts)));
            let mut add = |at, what| all.push((at, *number, what));
            match (&fault.what, end) {
                (What::Event(Event::Fatal), _) => add(begin, Happening::DeviceFatal),
                (What::Event(Event::Gids), _) => add(begin, Happening::GidChange),
                (What::Event(Event::Port), end) => {
                    add(begin, Happening::PortErr);
                    end.into_iter().for_each(|end| add(end, Happening::PortActive));
                }
                (What::Stall, Some(end)) => add(begin, Happening::StallUntil(end)),
                _ => {}
            }
        }
        all.sort_by_key(|(at, ..)| *at);
        all
    }

    /// Decides on a call: its errno if it fails. All rules count it, and the first that strikes
    /// decides.
    pub fn call(&mut self, now: Duration, (verb, name): (u8, &str)) -> Option<i32> {
        let mut failed = None;
        for armed in &mut self.rules {
            let What::Calls { verbs, errno } = &armed.fault.what else { continue };
            let errno = *errno;
            if verbs.contains(&verb) && armed.strikes(now) {
                failed = failed.or(Some((errno, armed.number, armed.count)));
            }
        }
        let (errno, rule, nth) = failed?;
        let known = ERRNOS.iter().find(|(_, number)| *number == errno);
        let did = known.map_or_else(|| errno.to_string(), |(name, _)| (*name).to_owned());
        self.note(now, rule, nth, &Done { what: "call", name, qp: None, did: &did });
        Some(errno)
    }

    /// Decides on the completion of an operation. `name_of` names a status.
    pub fn completion(
        &mut self,
        now: Duration,
        (kind, name): (u8, &str),
        qp: u32,
        name_of: impl Fn(u8) -> &'static str,
    ) -> Option<Trouble> {
        let mut met = None;
        for armed in &mut self.rules {
            let What::Completions { kinds, status } = &armed.fault.what else { continue };
            let (status, qps) = (*status, &armed.rule.of.qps);
            let is_its = (kinds.is_empty() || kinds.contains(&kind))
                && (qps.is_empty() || qps.contains(&qp));
            if is_its && armed.strikes(now) {
                met = met.or(Some((status, armed.number, armed.count)));
            }
        }
        let (status, rule, nth) = met?;
        let did = status.map_or("CQ_ERR", name_of);
        self.note(now, rule, nth, &Done { what: "completion", name, qp: Some(qp), did });
        Some(status.map_or(Trouble::Overrun, Trouble::Status))
    }

    /// Decides on a packet that needs a receive: whether it finds none.
    pub fn is_unready(&mut self, now: Duration, peer: IpAddr, payload: &[u8]) -> bool {
        let seen = Seen { side: Side::Ingress, peer, payload };
        let mut met = None;
        for armed in self.rules.iter_mut().filter(|armed| armed.fault.what == What::Unready) {
            if armed.rule.of.takes(&seen) && armed.strikes(now) {
                met = met.or(Some((armed.number, armed.count)));
            }
        }
        let Some((rule, nth)) = met else { return false };
        let done = Done { what: "receive", name: "message", qp: seen.qp(), did: "RNR" };
        self.note(now, rule, nth, &done);
        true
    }

    /// Logs an event.
    pub fn happened(&mut self, now: Duration, rule: usize, what: Happening) {
        let name = what.name();
        self.note(now, rule, 1, &Done { what: "event", name, qp: None, did: name });
    }

    fn note(&mut self, now: Duration, rule: usize, nth: u64, done: &Done<'_>) {
        let Some(log) = &mut self.log else { return };
        let Done { what, name, qp, did } = done;
        log.line(json!({
            "us": now.as_micros() as u64,
            "what": what,
            "name": name,
            "nth": nth,
            "qp": qp,
            "rule": rule,
            "did": [did],
        }));
        log.write();
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::names;
    use super::*;

    fn plan(text: &str) -> Result<Plan, String> {
        Plan::of_words(text, names)
    }

    fn faults(text: &str) -> DeviceFaults {
        let device = [10, 0, 0, 1].into();
        let plan = plan(text).expect(text);
        assert!(!plan.is_harmless(), "{text}");
        DeviceFaults::new((&plan, 7), device, None).unwrap().expect(text)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const REG_MR: (u8, &str) = (1, "reg_mr");

    #[test]
    fn words_that_make_no_sense_together_are_refused() {
        for (text, says) in [
            ("verb=fly", "calls such as reg_mr"),
            ("verb=reg_mr,errno=EWHAT", "an errno, such as ENOMEM"),
            ("verb=reg_mr,errno=4096", "an errno"),
            ("verb=reg_mr,nth=0", "a whole number from 1 up"),
            ("verb=reg_mr,nth=-1", "a whole number from 1 up"),
            ("verb=reg_mr,chance=2", "a chance from 0 to 100%"),
            ("verb=reg_mr,nth=1,chance=1%", "not both"),
            ("verb=reg_mr,verb=create_qp", "verb stands twice"),
            ("verb=reg_mr,loss=1%", "loss does not go with verb"),
            ("verb=reg_mr,status=RETRY_EXC_ERR", "status does not go with verb"),
            ("verb=reg_mr,qp=1", "qp does not go with verb"),
            ("status=SUCCESS", "one status of a failure"),
            ("status=RETRY_EXC_ERR,wc=fly", "operations, such as send"),
            ("status=RETRY_EXC_ERR,peer=10.0.0.1", "peer does not go with status"),
            ("rnr=10%,nth=1", "nth does not go with rnr"),
            ("rnr", "a chance"),
            ("event=PORT_ACTIVE", "DEVICE_FATAL, PORT_ERR"),
            ("event=PORT_ERR,nth=1", "nth does not go with event"),
            ("stall", "say how long"),
            ("stall,for=1s,qp=1", "qp does not go with stall"),
            ("stall=2,for=1s", "how long it lasts is `for`"),
            ("nth=1", "nth alone is no fault"),
            ("loss=1%,errno=EIO", "errno belongs to verb"),
            ("loss=1%,wc=send", "wc belongs to verb, status"),
        ] {
            let why = plan(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
        for never in ["rnr=0", "verb=reg_mr,chance=0", "stall=no,for=1s"] {
            let plan = plan(never).unwrap();
            assert!(plan.is_harmless(), "{never}");
            let none = DeviceFaults::new((&plan, 1), [10, 0, 0, 1].into(), None).unwrap();
            assert!(none.is_none(), "{never}");
        }
    }

    #[test]
    fn calls_count_while_their_rule_holds() {
        let mut all = faults("verb=reg_mr+create_qp,nth=2,at=1s,for=1s,errno=22;verb=reg_mr,nth=5");
        assert!(all.has_calls(1) && all.has_calls(2) && !all.has_calls(3));
        assert!(!all.has_completions() && !all.has_unready() && all.timeline().is_empty());
        let mut call = |at: u64, verb| all.call(ms(at), (verb, "a call"));
        assert_eq!([0, 500, 1000].map(|at| call(at, 1)), [None; 3]);
        assert_eq!(call(1500, 2), Some(libc::EINVAL));
        assert_eq!(call(1600, 3), None);
        // The fourth and the fifth of the other rule, and none after it.
        assert_eq!([1700, 2500, 2600, 2700].map(|at| call(at, 1)), [None, Some(ERRNO), None, None]);
        let mut parts = faults("verb=reg_mr,chance=10%");
        let hits = (0..10_000).filter(|_| parts.call(ms(0), REG_MR).is_some()).count();
        assert!((800..1200).contains(&hits), "{hits}");
    }

    #[test]
    fn completions_and_messages_are_those_of_the_rule() {
        let mut all = faults("status=RETRY_EXC_ERR,wc=send,qp=17,nth=2;event=CQ_ERR,wc=recv");
        let mut completes = |kind, qp| all.completion(ms(1), (kind, "KIND"), qp, |_| "STATUS");
        assert_eq!([completes(1, 17), completes(1, 18), completes(2, 17)], [None; 3]);
        assert_eq!(completes(1, 17), Some(Trouble::Status(12)));
        assert_eq!(completes(1, 17), None);
        assert_eq!(completes(11, 1), Some(Trouble::Overrun));
        let mut all = faults("rnr=1,qp=0x11,opcode=send,peer=10.0.0.2,at=1s");
        let packet = |opcode, qp| [opcode, 0, 0, 0, 0, 0, 0, qp, 0, 0, 0, 0];
        let peer = |last| IpAddr::from([10, 0, 0, last]);
        assert!(all.is_unready(ms(1000), peer(2), &packet(0, 0x11)));
        assert!(!all.is_unready(ms(999), peer(2), &packet(0, 0x11)));
        assert!(!all.is_unready(ms(1000), peer(3), &packet(0, 0x11)));
        assert!(!all.is_unready(ms(1000), peer(2), &packet(4, 0x11)));
        assert!(!all.is_unready(ms(1000), peer(2), &packet(0, 0x12)));
        assert!(!all.is_unready(ms(1000), peer(2), &[0]));
    }

    #[test]
    fn events_come_in_the_order_of_their_times() {
        let text = "stall,at=3ms,for=1ms;event=PORT_ERR,at=1ms,for=4ms;event=DEVICE_FATAL,at=9ms;\
                    event=GID_CHANGE";
        assert_eq!(
            faults(text).timeline(),
            [
                (ms(0), 3, Happening::GidChange),
                (ms(1), 1, Happening::PortErr),
                (ms(3), 0, Happening::StallUntil(ms(4))),
                (ms(5), 1, Happening::PortActive),
                (ms(9), 2, Happening::DeviceFatal),
            ]
        );
        // Nothing passes a port that is down, and only then.
        let plan = plan("event=PORT_ERR,at=1s,for=1s").unwrap();
        assert!(!plan.is_harmless_to_datagrams());
        assert!(self::plan("event=GID_CHANGE").unwrap().is_harmless_to_datagrams());
    }
}
