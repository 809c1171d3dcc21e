//! Only `permit` decides which packets may leave: other files of the engine report events to its
//! state, and do not ask it. `docs/design/20-permit.md` has the rule.

use std::fs;
use std::path::Path;

/// The module that decides.
const HOME: &str = "stack/src/rc/requester/permit/";
/// The state's field, by which others reach it.
const FIELD: &str = "control";
/// The questions that others may ask it, and why the answer decides nothing.
const ANSWERS: [(&str, &str); 8] = [
    ("continues_run", "whether a run that was begun may go on beyond the turn"),
    ("ends_run", "whether a packet is the last of its turn, which asks"),
    ("has_ample", "which packets ask for an acknowledgement"),
    ("in_flight", "the charge that is given back"),
    ("most", "how long lists may become"),
    ("read_request_packets", "how a READ is split when it is posted"),
    ("ready_at", "the timer of the wait for a receive"),
    ("tick", "the timer of pacing"),
];
/// The events: calls that others make, which return nothing or whether it was news.
const EVENTS: [&str; 18] = [
    "begin_turn",
    "drain",
    "forget_rnr",
    "left",
    "on_ack",
    "on_aeth",
    "on_ecn",
    "on_loss",
    "on_lost_responses",
    "on_responses",
    "on_rnr",
    "on_timeout",
    "packet_left",
    "recognised",
    "release",
    "set_max_rd_atomic",
    "set_read_window",
    "take_path",
];
/// Questions about a receiver's credit, which only that module and the receivers themselves ask.
const CREDIT: [&str; 3] = ["fits", "room_for", "spared"];
const RECEIVERS: &str = "stack/src/peer/";

/// Checks the sources of the engine.
///
/// # Errors
/// The calls of questions that only `permit` may ask.
pub(crate) fn check() -> Result<(), String> {
    let mut wrong = Vec::new();
    search(Path::new("stack/src"), &mut wrong).map_err(|error| error.to_string())?;
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("only {HOME} decides what may leave (xtask/src/permit.rs): {}", wrong.join("; ")))
}

fn search(directory: &Path, wrong: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.display().to_string();
        if path.is_dir() {
            search(&path, wrong)?;
        } else if name.ends_with(".rs") && !name.starts_with(HOME) {
            let found = questions(&fs::read_to_string(&path)?, !name.starts_with(RECEIVERS));
            wrong.extend(found.into_iter().map(|call| format!("{name}: {call}")));
        }
    }
    Ok(())
}

/// The calls in `source` of questions that only `permit` may ask; `credit` if those about credit
/// count.
fn questions(source: &str, credit: bool) -> Vec<String> {
    let source = source.split("#[cfg(test)]").next().unwrap_or(source);
    let code: Vec<&str> =
        source.lines().map(|line| line.split("//").next().unwrap_or(line)).collect();
    // A call may be broken over lines.
    let code: String = code.join("\n").split_whitespace().collect();
    let mut found = Vec::new();
    for (at, _) in code.match_indices('(') {
        let Some((before, method)) = code[..at].rsplit_once('.') else { continue };
        let word = |c: char| c.is_alphanumeric() || c == '_';
        if !method.chars().all(word) {
            continue;
        }
        let on_state = before.strip_suffix(FIELD).is_some_and(|owner| !owner.ends_with(word));
        let known = ANSWERS.iter().any(|(name, _)| *name == method) || EVENTS.contains(&method);
        if (on_state && !known) || (credit && CREDIT.contains(&method)) {
            found.push(format!("{method}()"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_asks_is_noticed() {
        for (source, calls) in [
            ("if self.requester.control.cwnd() > 3 {}", vec!["cwnd()"]),
            ("let free = requester\n    .control\n    .window_left();", vec!["window_left()"]),
            ("match peers.get(id).fits(cost) {}", vec!["fits()"]),
            ("control.on_ack(3); control.ready_at(); // control.cwnd()", vec![]),
            ("self.remote_control.cwnd()", vec![]),
        ] {
            assert_eq!(questions(source, true), calls, "{source}");
        }
        assert_eq!(questions("pool.fits(cost)", false), Vec::<String>::new());
    }

    #[test]
    fn what_others_may_call_exists() {
        let root =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../", "stack/src/rc/requester/permit/mod.rs");
        let source = fs::read_to_string(root).expect("the module");
        let answers = ANSWERS.iter().map(|(name, _)| *name);
        for name in answers.chain(EVENTS) {
            assert!(
                source.contains(&format!("fn {name}(")),
                "{name} is gone: take it off the list"
            );
        }
    }
}
