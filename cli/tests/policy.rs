//! `rocinante policy-check`: the matrix with its rules and without them, and the document.

use std::process::{Command, Stdio};
use std::sync::Mutex;

use rocinante_cli::policy::table::{Action, BACKENDS, CONTROLS, Effect, Group, Mark};
use rocinante_node::Availability;
use serde_json::Value;

/// The matrix measures rates: one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

/// The report of a check with these options, and its exit code. `None`, with a line that says why,
/// where no lab can be made.
fn check(test: &str, args: &[&str]) -> Option<(Value, Option<i32>)> {
    let _alone = MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let available = Availability::probe();
    if let Err(why) = available.lab.and(available.nft).and(available.tc) {
        eprintln!("SKIPPED policy::{test}: {why}");
        return None;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante"));
    command.args(["policy-check", "--json"]).args(args).stdin(Stdio::null());
    let output = command.stderr(Stdio::inherit()).output().expect("the program starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let report = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    Some((report, output.status.code()))
}

#[test]
fn every_cell_is_as_documented() {
    let Some((report, code)) = check("every_cell_is_as_documented", &[]) else { return };
    let cells = report["cells"].as_array().expect("cells");
    for cell in cells {
        assert_ne!(cell["verdict"], "differs", "{cell:#}");
    }
    assert_eq!((code, cells.len(), &report["total"]), (Some(0), 102, &102.into()));
    let documented = cells.iter().filter(|cell| cell["verdict"] == "as-documented").count();
    assert_eq!(report["documented"], documented);
    assert!(documented >= 60, "only {documented} cells were tried");
}

/// Without its rule, a cell fails by what its traffic does, not only for want of a counter.
#[test]
fn without_its_rule_each_cell_fails() {
    let args = ["--without-rules"];
    let Some((report, code)) = check("without_its_rule_each_cell_fails", &args) else { return };
    assert_eq!((code, &report["documented"]), (Some(1), &0.into()));
    for cell in report["cells"].as_array().expect("cells") {
        if cell["verdict"] == "not-to-be-had" {
            continue;
        }
        let control = CONTROLS.iter().find(|control| cell["control"] == control.name);
        let control = control.expect("a control of the table");
        let why = cell["why"].to_string();
        let traffic = match control.action {
            _ if cell["expected"] == "bypassed" => "there is no",
            Action::Drop(_) => "the WRITE ended in SUCCESS",
            Action::Limit(_) => "of the rate came through",
            Action::Mark(Mark::Mtu) => "4096 ended in SUCCESS",
            Action::Mark(_) => "no packet had the mark",
        };
        assert!(why.contains(traffic), "{cell:#}");
    }
}

#[test]
fn the_options_choose_cells() {
    let args = ["--all", "--only", "bridge forward", "--netdev", "udp"];
    let Some((report, code)) = check("the_options_choose_cells", &args) else { return };
    assert_eq!((code, &report["total"]), (Some(0), &4.into()), "{report:#}");
    let of = |key: &str| -> Vec<String> {
        let cells = report["cells"].as_array().expect("cells");
        cells.iter().map(|cell| cell[key].as_str().expect("a word").to_owned()).collect()
    };
    assert_eq!(of("netdev"), ["udp"; 4]);
    assert_eq!(of("family"), ["ipv4", "ipv4", "ipv6", "ipv6"]);
    let Some((_, code)) = check("the_options_choose_cells", &["--only", "no such control"]) else {
        return;
    };
    assert_eq!(code, Some(1), "nothing was tried");
}

/// The table of the document is the one of the code.
#[test]
fn the_document_has_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/netfilter.md");
    let document = std::fs::read_to_string(path).expect("the document");
    let head = BACKENDS.map(|netdev| format!("`{netdev}`")).join(" | ");
    let head = format!("| kind | control | {head} |");
    let table = document.lines().skip_while(|line| **line != *head).skip(2);
    let rows: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    let due = CONTROLS.map(|control| {
        let kind = match control.group {
            Group::Drop => "drops",
            Group::Rate => "limits a rate",
            Group::Mark => "marks",
            Group::Pair => "two at once",
            Group::Own => "own namespace",
        };
        let effects = control.expected.map(|effect: Effect| effect.to_string()).join(" | ");
        format!("| {kind} | {} | {effects} |", control.name)
    });
    assert_eq!(rows, due);
}
