//! Rules and limits of the host.

use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante_cli::output::{Failure, Result};
use rocinante_lab::{Chain, ChildGuard, Rule, ShaperStats, Tbf};
use serde_json::Value;

use super::super::experiment::{RULES, VERDICTS};
use super::super::plan::Mode;
use super::{Figures, Pairs, in_words, named};
use crate::workers::{Places, Traffic};

/// The control that a quick study tries.
const QUICK: &str = "nft bridge forward";
/// The longest time of all controls.
const LIMIT: Duration = Duration::from_secs(300);
/// Rules on the path, for ports that nothing uses.
const COUNT: u16 = 100;
const FIRST_PORT: u16 = 20_000;
/// Below this rate, in Mb/s, messages are small, so that many pass in the time of a figure.
const SMALL_BELOW: u64 = 1000;
const SMALL: usize = 4096;
/// The container that receives.
const RECEIVER: usize = 1;

/// The figures of the verdicts, of a hundred rules, or of the asked rate `x`.
pub(super) fn measure(
    places: &Places,
    mode: &Mode,
    pairs: &Pairs,
    x: u64,
    quick: bool,
) -> Result<Figures> {
    match x {
        VERDICTS => verdicts(mode, quick),
        RULES => rules(places, pairs),
        mbit => limited(places, pairs, mbit),
    }
}

/// How many controls act as documented. It has labs of its own.
fn verdicts(mode: &Mode, quick: bool) -> Result<Figures> {
    let backend = mode.backend().ok_or_else(|| Failure::Failed("it has no backend".into()))?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["policy-check", "--json", "--netdev", &backend]);
    command.args(["--only", QUICK].iter().filter(|_| quick));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = ChildGuard::spawn(&mut command).and_then(|child| child.wait_with_output(LIMIT));
    let output = output.map_err(in_words)?;
    let text = String::from_utf8_lossy(&output.stdout);
    counted(text.lines().last().unwrap_or_default()).ok_or_else(|| {
        let why = String::from_utf8_lossy(&output.stderr);
        Failure::Failed(format!("policy-check: {}", why.lines().last().unwrap_or("no result")))
    })
}

/// The counts in the result of `policy-check`.
fn counted(json: &str) -> Option<Figures> {
    let report: Value = serde_json::from_str(json).ok()?;
    let count = |name: &str| report[name].as_f64();
    let (total, documented) = (count("total")?, count("documented")?);
    let not_to_be_had = count("not_to_be_had")?;
    Some(named([
        ("controls", total),
        ("as_documented", documented),
        ("not_to_be_had", not_to_be_had),
        ("different", total - documented - not_to_be_had),
    ]))
}

/// The rate of a pair without rules, and behind rules that none of its packets match.
fn rules(places: &Places, pairs: &Pairs) -> Result<Figures> {
    let lab = places.lab()?;
    let free = carried(places, pairs)?;
    let protocol = if pairs.traffic == Traffic::Tcp { "tcp" } else { "udp" };
    let mut rules = String::new();
    for port in FIRST_PORT..FIRST_PORT + COUNT {
        let _ = writeln!(rules, "meta l4proto {protocol} {protocol} dport {port} drop");
    }
    let rules = format!("{rules}counter name hits");
    let rule = Rule::new(lab.host(), &[(Chain::BRIDGE, &rules)]).map_err(in_words)?;
    let ruled = carried(places, pairs)?;
    if rule.counter().map_err(in_words)?.packets == 0 {
        return Err(Failure::Failed("no packet passed the rules".into()));
    }
    rule.remove().map_err(in_words)?;
    Ok(named([("free_gbps", free), ("ruled_gbps", ruled), ("of_free", ruled / free)]))
}

/// The goodput of a pair, in 10⁹ bits per second.
fn carried(places: &Places, pairs: &Pairs) -> Result<f64> {
    let together = pairs.together(places, 1, &mut || Ok(()))?;
    let bytes = together.pairs.first().map_or(0, |pair| pair.bytes);
    if bytes == 0 {
        let why = together.why.unwrap_or_else(|| "the pair carried nothing".into());
        return Err(Failure::Failed(why));
    }
    Ok(gbps(bytes, pairs.seconds))
}

/// The rate that passes a token bucket of this rate towards the receiver.
fn limited(places: &Places, pairs: &Pairs, mbit: u64) -> Result<Figures> {
    let size = if mbit < SMALL_BELOW { SMALL } else { pairs.size };
    let pairs = Pairs { size, traffic: pairs.traffic.clone(), ..*pairs };
    let shaper = places.lab()?.shape(RECEIVER, &Tbf::mbit(mbit as u32)).map_err(in_words)?;
    let mut seen: Vec<(Instant, ShaperStats)> = Vec::new();
    pairs.together(places, 1, &mut || {
        let asked = Instant::now();
        let stats = shaper.stats().map_err(in_words)?;
        seen.push((asked + asked.elapsed() / 2, stats));
        Ok(())
    })?;
    shaper.remove().map_err(in_words)?;
    let [(from, before), (to, after)] = seen[..] else {
        return Err(Failure::Failed("the shaper was not looked at twice".into()));
    };
    let reached = gbps(after.bytes - before.bytes, (to - from).as_secs_f64());
    let drops = (after.drops - before.drops) as f64;
    let of_asked = reached / (mbit as f64 / 1e3);
    Ok(named([("reached_gbps", reached), ("of_asked", of_asked), ("drops", drops)]))
}

fn gbps(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 * 8.0 / seconds / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_control_is_counted_once() {
        let json = r#"{"command":"policy-check","total":46,"documented":40,"not_to_be_had":5}"#;
        let figures = counted(json).unwrap();
        assert_eq!((figures["controls"], figures["as_documented"]), (46.0, 40.0));
        assert_eq!((figures["not_to_be_had"], figures["different"]), (5.0, 1.0));
        for json in ["", "{}", r#"{"total":46}"#, r#"{"error":{"kind":"failed"}}"#] {
            assert_eq!(counted(json), None, "{json}");
        }
    }
}
