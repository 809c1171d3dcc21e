//! The direction of dependencies: arrows only point down, and `stack` and `netdev` are independent.

use crate::command::{self, cargo};
use serde_json::Value;
use std::collections::BTreeMap;

/// Every member of the workspace, with the members it may depend on, tests and examples included.
const MAY_DEPEND_ON: [(&str, &[&str]); 22] = [
    ("rocinante-crc", &[]),
    ("rocinante-stack", &["rocinante-crc"]),
    ("rocinante-netdev", &[]),
    ("rocinante-soft", &["rocinante-crc", "rocinante-stack", "rocinante-netdev"]),
    ("rocinante-kernel", &["rocinante-soft", "rocinante-stack", "rocinante-netdev"]),
    ("rocinante", &["rocinante-soft", "rocinante-kernel", "rocinante-stack", "rocinante-netdev"]),
    ("rocinante-lab", &[]),
    ("rocinante-cli", &["rocinante", "rocinante-stack", "rocinante-netdev", "rocinante-lab"]),
    ("rocinante-agent", &["rocinante-netdev", "rocinante-lab"]),
    ("rocinante-capi", &["rocinante-soft", "rocinante-stack", "rocinante-netdev"]),
    ("rocinante-paths", &[]),
    ("rocinante-dropin", &["rocinante-lab"]),
    ("rocinante-examples", &["rocinante"]),
    ("rocinante-baselines", &["rocinante", "rocinante-stack", "rocinante-netdev"]),
    (
        "rocinante-bench",
        &["rocinante-cli", "rocinante-lab", "rocinante-baselines", "rocinante", "rocinante-netdev"],
    ),
    ("rocinante-scripts", &["rocinante-stack"]),
    ("rocinante-sim", &["rocinante-stack"]),
    (
        "rocinante-tests",
        &[
            "rocinante-agent",
            "rocinante-capi",
            "rocinante-cli",
            "rocinante-bench",
            "rocinante-lab",
            "rocinante",
            "rocinante-stack",
            "rocinante-netdev",
            "rocinante-scripts",
            "rocinante-dropin",
            "rocinante-paths",
        ],
    ),
    (
        "rocinante-interop",
        &[
            "rocinante-tests",
            "rocinante-cli",
            "rocinante-bench",
            "rocinante-lab",
            "rocinante-examples",
            "rocinante",
            "rocinante-stack",
            "rocinante-netdev",
            "rocinante-scripts",
            "rocinante-dropin",
        ],
    ),
    // It compiles files of verbs-api itself.
    ("rocinante-models", &["rocinante-stack"]),
    ("rocinante-benches", &["rocinante-tests", "rocinante-lab", "rocinante", "rocinante-stack"]),
    ("xtask", &[]),
];

/// Arrows that do not point down, but only from a member's tests: the engine's own tests play the
/// scripts to it, and the library's tests need features of it.
const OF_TESTS: [(&str, &str); 3] = [
    ("rocinante-stack", "rocinante-scripts"),
    ("rocinante", "rocinante"),
    ("rocinante-capi", "rocinante"),
];

/// Checks every arrow of the workspace.
///
/// # Errors
/// The arrows that point the wrong way.
pub(crate) fn check() -> Result<(), String> {
    let metadata = command::read(&mut cargo(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata = serde_json::from_str(&metadata).map_err(|error| error.to_string())?;
    let wrong = wrong_arrows(&metadata);
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("dependencies against the order of ARCHITECTURE.md: {}", wrong.join("; ")))
}

fn wrong_arrows(metadata: &Value) -> Vec<String> {
    let allowed = BTreeMap::from(MAY_DEPEND_ON);
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(below) = allowed.get(name) else {
            wrong.push(format!("{name} has no place in it yet"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        for dependency in dependencies {
            let Some(on) = dependency["name"].as_str() else { continue };
            let is_member = packages.iter().any(|package| package["name"] == on);
            let by_a_test = dependency["kind"] == "dev" && OF_TESTS.contains(&(name, on));
            if is_member && !below.contains(&on) && !by_a_test {
                wrong.push(format!("{name} -> {on}"));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn workspace(stack_needs: &str) -> Value {
        json!({"packages": [
            {"name": "rocinante-stack", "dependencies": [{"name": stack_needs, "kind": "dev"}]},
            {"name": "rocinante-netdev", "dependencies": [{"name": "libc", "kind": null}]},
            {"name": "rocinante", "dependencies": [{"name": "rocinante-stack", "kind": null}]},
        ]})
    }

    #[test]
    fn arrows_point_down() {
        assert_eq!(wrong_arrows(&workspace("crc32fast")), [""; 0]);
    }

    #[test]
    fn neither_up_nor_sideways() {
        assert_eq!(wrong_arrows(&workspace("rocinante")), ["rocinante-stack -> rocinante"]);
        assert_eq!(
            wrong_arrows(&workspace("rocinante-netdev")),
            ["rocinante-stack -> rocinante-netdev"]
        );
    }

    #[test]
    fn only_tests_of_the_engine_know_the_scripts() {
        let of = |kind: &str| {
            json!({"packages": [
                {"name": "rocinante-scripts", "dependencies": []},
                {"name": "rocinante-stack", "dependencies": [{"name": "rocinante-scripts", "kind": kind}]},
            ]})
        };
        assert_eq!(wrong_arrows(&of("dev")), [""; 0]);
        assert_eq!(wrong_arrows(&of("build")), ["rocinante-stack -> rocinante-scripts"]);
    }

    #[test]
    fn a_new_member_must_be_placed() {
        let new = json!({"packages": [{"name": "rocinante-new", "dependencies": []}]});
        assert_eq!(wrong_arrows(&new), ["rocinante-new has no place in it yet"]);
    }
}
