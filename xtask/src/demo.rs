//! The demo: built for release, then run.

use crate::command::{self, Shown, cargo};
use crate::{setup, test};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `cargo xtask demo ARGS`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    setup::packages(setup::DEMO);
    command::become_it(Command::new(build()?).arg("demo").args(args))
}

/// Runs the demo as a test: it must succeed. Returns the skipped parts, each `name: reason`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let rocinante = build()?;
    let Shown { ok, stdout, .. } = command::show(Command::new(rocinante).args(["demo", "--json"]))?;
    if !ok {
        return Err("the demo failed".into());
    }
    let last = stdout.last().map_or("", String::as_str);
    let report = serde_json::from_str(last)
        .map_err(|error| format!("the demo's last line is not JSON: {error}"))?;
    skips(&report)
}

/// Builds the command line for release; its path.
pub(crate) fn build() -> Result<PathBuf, String> {
    // Everything but the result goes to standard error: standard output is the demo's.
    command::run(&mut cargo("build --release --quiet -p rocinante-cli"))?;
    Ok(target()?.join("release/rocinante"))
}

/// The workspace's target directory.
pub(crate) fn target() -> Result<PathBuf, String> {
    let metadata = test::metadata()?;
    let target = metadata["target_directory"].as_str().ok_or("cargo names no target directory")?;
    Ok(Path::new(target).to_owned())
}

/// The parts that the demo skipped, as `name: reason`; an error if it reports a backend as not ok,
/// or ran none.
fn skips(report: &Value) -> Result<Vec<String>, String> {
    let list = |key: &str| report[key].as_array().map_or(&[][..], Vec::as_slice);
    let text = |value: &Value| value.as_str().unwrap_or("(no reason given)").to_owned();
    if list("backends").is_empty() {
        return Err("the demo ran on no backend".into());
    }
    let mut skips: Vec<String> = list("skipped")
        .iter()
        .map(|skip| format!("demo::{}: {}", text(&skip["netdev"]), text(&skip["why"])))
        .collect();
    for backend in list("backends") {
        let name = text(&backend["netdev"]);
        if backend["ok"] != true {
            return Err(format!("the demo succeeded, but its report says that {name} is not ok"));
        }
        if backend["policy"].is_null() {
            skips.push(format!("demo::{name}::policy: {}", text(&backend["policy_why"])));
        }
    }
    Ok(skips)
}

#[cfg(test)]
mod tests {
    use super::skips;
    use serde_json::json;

    #[test]
    fn what_the_demo_leaves_out_is_a_skip() {
        let report = json!({
            "backends": [{"netdev": "udp", "ok": true, "policy": {"counted_skbs": 5}},
                         {"netdev": "packet", "ok": true, "policy": null, "policy_why": "no nft"}],
            "skipped": [{"netdev": "afxdp", "why": "needs root"}]
        });
        assert_eq!(
            skips(&report).unwrap(),
            ["demo::afxdp: needs root", "demo::packet::policy: no nft"]
        );
    }

    #[test]
    fn a_report_of_nothing_is_no_success() {
        assert!(skips(&json!({"backends": [], "skipped": []})).is_err());
        assert!(skips(&json!({"backends": [{"netdev": "udp", "ok": false}]})).is_err());
    }
}
