//! The JSON of `rocinante-sim` follows `docs/schema`.

#[path = "../../tests/common/schema.rs"]
mod schema;

use std::process::Command;

use serde_json::Value;

/// The last line of the program's output, held against its schema.
fn object(args: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_rocinante-sim")).args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}");
    let out = String::from_utf8(output.stdout).unwrap();
    let object = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    schema::check(&object);
    object
}

#[test]
fn each_kind_of_object_is_as_documented() {
    let run = object(&["--seed", "7", "--steps", "3000"]);
    assert_eq!((&run["schema"], &run["seed"]), (&1.into(), &7.into()));
    assert!(run["digest"].is_string());
    assert_eq!(object(&["--seed", "7", "--steps", "3000"]), run);
    let run = object(&["--seed", "7", "--steps", "3000", "--swarm", "--scarce"]);
    assert!(run["swarm"] == true && run["scarce"] == true);
    assert!(run["omitted"].as_array().is_some_and(|names| !names.is_empty()));
    assert_eq!(run["strangers"], false);
    assert_eq!(object(&["--seed", "7", "--steps", "3000", "--strangers"])["strangers"], true);
    assert!(object(&["--for", "1s", "--seed", "7", "--steps", "3000"])["seeds"].as_u64() > Some(0));
}
