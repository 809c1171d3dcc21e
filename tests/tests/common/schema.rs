//! The JSON of commands, held against the schemas in `docs/schema`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use jsonschema::{Registry, Validator};
use serde_json::Value;

/// Where references between the schemas are resolved: at no server.
const BASE: &str = "json-schema:///";

/// The directory of the schemas.
pub(crate) fn folder() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("docs/schema")).find(|folder| folder.is_dir()).expect("docs")
}

/// The schemas, by their names.
pub(crate) static SCHEMAS: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    let files = std::fs::read_dir(folder()).expect("docs/schema");
    let schema = |file: std::io::Result<std::fs::DirEntry>| {
        let path = file.expect("a file").path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_owned();
        let text = std::fs::read_to_string(&path).expect("a schema");
        (name, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path:?}: {error}")))
    };
    files.map(schema).collect()
});

static VALIDATORS: LazyLock<BTreeMap<&'static str, Validator>> = LazyLock::new(|| {
    let common = &SCHEMAS["common"];
    let registry = Registry::new().add(format!("{BASE}common.json"), common).expect("a schema");
    let registry = registry.prepare().expect("references that lead somewhere");
    let validator = |(name, schema): (&'static String, &Value)| {
        jsonschema::draft202012::meta::validate(schema)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let validator = jsonschema::options()
            .with_base_uri(format!("{BASE}{name}.json"))
            .with_registry(&registry)
            .should_validate_formats(true)
            .build(schema);
        (name.as_str(), validator.unwrap_or_else(|error| panic!("{name}: {error}")))
    };
    SCHEMAS.iter().map(validator).collect()
});

/// The name of an object's schema.
fn name_of(object: &Value) -> &str {
    match object["command"].as_str().unwrap_or_else(|| panic!("no command: {object}")) {
        "decode" if object.get("packet").is_some() => "decode-packet",
        "perf" if object.get("interval").is_some() => "perf-interval",
        "rocinante" => "usage",
        "rocinante-bench" => "bench",
        "rocinante-bench cm" => "bench-cm",
        "rocinante-bench evaluate" => "bench-evaluate",
        "rocinante-sim" => "sim",
        command => command,
    }
}

/// Whether an object is as its schema says, and why not.
pub(crate) fn errors(object: &Value) -> Vec<String> {
    errors_of(name_of(object), object)
}

/// Whether a value is as the schema of this name says, and why not.
pub(crate) fn errors_of(name: &str, object: &Value) -> Vec<String> {
    let validator = VALIDATORS.get(name).unwrap_or_else(|| panic!("docs/schema/{name}.json"));
    let errors = validator.iter_errors(object);
    errors.map(|error| format!("{}: {error}", error.instance_path())).collect()
}

/// Asserts that an object of a command is as `docs/schema` says.
#[track_caller]
pub(crate) fn check(object: &Value) {
    let errors = errors(object);
    let name = name_of(object);
    assert!(errors.is_empty(), "not as docs/schema/{name}.json says: {errors:#?}\n{object}");
}
