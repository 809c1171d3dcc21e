//! The words of faults: `loss=2%,delay=100us,seed=7`, and several rules between semicolons.

use std::net::IpAddr;
use std::time::Duration;

use super::device::Parts;
use super::link::Rate;
use super::{Names, Plan, RULES_MAX, Rule, Side, Word};

/// Millionths in a whole.
const MILLION: f64 = 1e6;
/// The longest burst of losses, unless a rule says another.
const BURST: u32 = 16;
/// How late datagrams are at most that others overtake, unless a rule says it.
const LATE: Duration = Duration::from_micros(100);
/// The queue in front of a rate, unless a rule says another.
const QUEUE: u32 = 1 << 20;
/// The longest time that has a meaning here.
const TIME_MAX: Duration = Duration::from_secs(1_000_000);

/// All words of a rule, for the error of an unknown one.
const WORDS: &str = "loss, burst, burst_length, every, dup, reorder, reorder_by, corrupt, ecn, \
                     delay, jitter, rate, queue, mtu, partition, side, peer, qp, opcode, at, for; \
                     verb, errno, status, wc, nth, chance, rnr, event, stall";

pub(super) fn plan(text: &str, names: Names) -> Result<Plan, String> {
    let text = text.trim();
    let mut plan = Plan { seed: None, rules: Vec::new(), text: text.to_owned() };
    if text.is_empty() || text == "off" {
        return Ok(plan);
    }
    for rule in text.split(';') {
        let mut draft = Draft::default();
        for word in rule.split(',').map(str::trim) {
            let (key, value) = match word.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (word, None),
            };
            if key == "seed" {
                let seed = value.and_then(|value| value.parse().ok());
                let seed = seed.ok_or("seed: a whole number from 0 up, such as seed=7")?;
                if plan.seed.replace(seed).is_some() {
                    return Err("seed stands twice: all rules have the same".into());
                }
            } else {
                draft.set(key, value.unwrap_or(""), names)?;
            }
        }
        if !draft.is_empty() {
            add(&mut plan.rules, draft.rule()?)?;
        }
    }
    if plan.rules.is_empty() {
        return Err(format!("{text:?} names no fault, such as loss=2%"));
    }
    Ok(plan)
}

/// Adds a rule, if there is room.
pub(super) fn add(rules: &mut Vec<Rule>, rule: Rule) -> Result<(), String> {
    if rules.len() == RULES_MAX {
        return Err(format!("more than {RULES_MAX} rules"));
    }
    rules.push(rule);
    Ok(())
}

/// A rule as far as it was read.
#[derive(Debug, Default)]
pub(super) struct Draft {
    rule: Rule,
    said: Vec<String>,
    burst_length: Option<u32>,
    reorder_by: Option<Duration>,
    queue: Option<u32>,
    device: Parts,
    has_fault: bool,
}

impl Draft {
    pub(super) fn is_empty(&self) -> bool {
        self.said.is_empty()
    }

    /// Whether the rule has this word.
    pub(super) fn says(&self, key: &str) -> bool {
        self.said.iter().any(|said| said == key)
    }

    /// The rule. Error: it makes no sense as a whole.
    pub(super) fn rule(mut self) -> Result<Rule, String> {
        if !self.has_fault {
            return Err(format!("{} alone is no fault: add one, such as loss=2%", self.said[0]));
        }
        for (part, whole) in
            [("burst_length", "burst"), ("reorder_by", "reorder"), ("queue", "rate")]
        {
            if self.says(part) && !self.says(whole) {
                return Err(format!("{part} belongs to {whole}, which the rule does not have"));
            }
        }
        let Self { device, said, rule, .. } = &mut self;
        device.finish(said, rule)?;
        let config = &mut self.rule.config;
        if config.mark_ppm > 0 && self.rule.of.side == Some(Side::Egress) {
            return Err("ecn marks datagrams that arrive: leave side=egress out".into());
        }
        if config.burst_ppm > 0 {
            config.burst_max = self.burst_length.unwrap_or(BURST);
        }
        if config.reorder_ppm > 0 {
            config.reorder_delay = self.reorder_by.unwrap_or(LATE);
        }
        if let Some(rate) = &mut config.rate {
            rate.queue_bytes = self.queue.unwrap_or(QUEUE);
        }
        Ok(self.rule)
    }

    /// Takes a word and its value, which is empty for a word without one. Error: it is unknown,
    /// stands twice, or its value makes no sense.
    pub(super) fn set(&mut self, key: &str, value: &str, names: Names) -> Result<(), String> {
        let bad = |what: &str| Err(format!("{key}={value}: {what}"));
        if self.says(key) {
            return Err(format!("{key} stands twice in a rule"));
        }
        let Rule { at, lasts, of, config, .. } = &mut self.rule;
        let done = match key {
            _ if Parts::has(key) => self.device.set(key, value, names),
            "loss" => chance(value).map(|ppm| config.drop_ppm = ppm),
            "burst" => chance(value).map(|ppm| config.burst_ppm = ppm),
            "burst_length" => count(value, 1_000_000).map(|most| self.burst_length = Some(most)),
            "every" => count(value, u32::MAX).map(|every| config.every = every),
            "dup" => chance(value).map(|ppm| config.duplicate_ppm = ppm),
            "reorder" => chance(value).map(|ppm| config.reorder_ppm = ppm),
            "reorder_by" => time(value).map(|late| self.reorder_by = Some(late)),
            "corrupt" => chance(value).map(|ppm| config.corrupt_ppm = ppm),
            "ecn" => chance(value).map(|ppm| config.mark_ppm = ppm),
            "delay" => time(value).map(|delay| config.delay = delay),
            "jitter" => time(value).map(|jitter| config.jitter = jitter),
            "rate" => rate(value).map(|bits_per_second| {
                config.rate = Some(Rate { bits_per_second, queue_bytes: 0 });
            }),
            "queue" => size(value).map(|bytes| self.queue = Some(bytes)),
            "mtu" => count(value, 65_535).map(|mtu| config.mtu = Some(mtu)),
            "partition" => flag(value).map(|is_cut| config.is_cut = is_cut),
            "side" => side(value).map(|side| of.side = side),
            // The ports name an IPv4 address as such.
            "peer" => each(value, |peer| Some(vec![peer.parse::<IpAddr>().ok()?.to_canonical()]))
                .map(|peers| of.peers = peers)
                .ok_or("addresses, with + between them"),
            "qp" => each(value, |qp| number(qp).filter(|qp| *qp < 1 << 24).map(|qp| vec![qp]))
                .map(|qps| of.qps = qps)
                .ok_or("numbers of queue pairs, such as 0x11, with + between them"),
            "opcode" => each(value, |word| opcode(word, names))
                .map(|opcodes| of.opcodes = opcodes)
                .ok_or("opcodes, such as 0x11, acknowledge or rdma-write, with + between them"),
            "at" => time(value).map(|time| *at = time),
            "for" => match time(value) {
                Ok(time) if time.is_zero() => Err("a time longer than none"),
                time => time.map(|time| *lasts = Some(time)),
            },
            _ => return Err(format!("{key:?} is no word of a fault: there are {WORDS}, and seed")),
        };
        if let Err(what) = done {
            return bad(what);
        }
        let is_plain = ["side", "peer", "qp", "opcode", "at", "for"].contains(&key);
        self.has_fault |= !is_plain && !Parts::is_part(key);
        self.said.push(key.to_owned());
        Ok(())
    }
}

/// A probability in parts per million: `2%`, `0.02` or `1e-6`.
pub(super) fn chance(value: &str) -> Result<u32, &'static str> {
    const WHAT: &str = "a chance from 0 to 100%, such as 2%, 0.02 or 1e-6";
    let (number, whole) = match value.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (value, 1.0),
    };
    let part = number.parse::<f64>().map_err(|_| WHAT)? / whole;
    if !(0.0..=1.0).contains(&part) {
        return Err(WHAT);
    }
    let ppm = (part * MILLION).round();
    if part > 0.0 && ppm < 1.0 {
        return Err("less than one in a million is never: the least chance is 1e-6");
    }
    Ok(ppm as u32)
}

/// A time: `100us`, `1.5ms`, `2s`.
fn time(value: &str) -> Result<Duration, &'static str> {
    const WHAT: &str = "a time with its unit, ns, us, ms, s or m, such as 100us";
    let end = value.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(value.len());
    let (number, unit) = value.split_at(end);
    let seconds = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        _ if number == "0" && unit.is_empty() => 1.0,
        _ => return Err(WHAT),
    };
    let number: f64 = number.parse().map_err(|_| WHAT)?;
    let time = Duration::try_from_secs_f64(number * seconds).map_err(|_| WHAT)?;
    if time > TIME_MAX { Err("longer than ten days") } else { Ok(time) }
}

/// A whole number from 1 up.
fn count(value: &str, most: u32) -> Result<u32, &'static str> {
    let count = value.parse().ok().filter(|count| (1..=most).contains(count));
    count.ok_or("a whole number from 1 up")
}

/// A rate in bits per second: `10Gbit`, `500Mbit`.
fn rate(value: &str) -> Result<u64, &'static str> {
    const WHAT: &str = "a rate from 1 bit to 1000 Gbit in a second, such as 10Gbit or 500Mbit";
    let number = value.trim_end_matches("/s").trim_end_matches("bit");
    let (number, unit) = match number.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&number[..at], 1e3),
        Some((at, 'm' | 'M')) => (&number[..at], 1e6),
        Some((at, 'g' | 'G')) => (&number[..at], 1e9),
        _ => (number, 1.0),
    };
    let bits = number.parse::<f64>().map_err(|_| WHAT)? * unit;
    if (1.0..=1e12).contains(&bits) && value.contains("bit") { Ok(bits as u64) } else { Err(WHAT) }
}

/// Bytes: `64K`, `1MiB`.
fn size(value: &str) -> Result<u32, &'static str> {
    let end = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    let (number, unit) = value.split_at(end);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        _ => None,
    };
    let bytes = number.parse::<u64>().ok().zip(shift).and_then(|(n, by)| n.checked_mul(1 << by));
    let bytes = bytes.and_then(|bytes| u32::try_from(bytes).ok());
    bytes.filter(|bytes| *bytes > 0).ok_or("bytes, from 1 to 4095M, such as 64K")
}

fn side(value: &str) -> Result<Option<Side>, &'static str> {
    match value {
        "egress" => Ok(Some(Side::Egress)),
        "ingress" => Ok(Some(Side::Ingress)),
        "both" => Ok(None),
        _ => Err("egress, ingress or both"),
    }
}

pub(super) fn flag(value: &str) -> Result<bool, &'static str> {
    match value {
        "" | "true" | "yes" => Ok(true),
        "false" | "no" => Ok(false),
        _ => Err("it has no value: how long it lasts is `for`"),
    }
}

pub(super) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The opcodes of a number, or of a word.
fn opcode(word: &str, names: Names) -> Option<Vec<u8>> {
    match number(word) {
        Some(number) => u8::try_from(number).ok().map(|number| vec![number]),
        None => Some(names(Word::Opcode, word)).filter(|found| !found.is_empty()),
    }
}

/// The values between the `+` of a list; `None` if one is none.
pub(super) fn each<T>(list: &str, read: impl Fn(&str) -> Option<Vec<T>>) -> Option<Vec<T>> {
    let values: Option<Vec<Vec<T>>> = list.split('+').map(read).collect();
    Some(values?.into_iter().flatten().collect())
}
