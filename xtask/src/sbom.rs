//! The bill of materials of a program: every crate in it, as CycloneDX 1.5 in JSON
//! (<https://cyclonedx.org/docs/1.5/json/>).

use crate::files;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// A package in the output of `cargo tree --prefix=depth --format=" {p}|{l}|{f}"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    depth: usize,
    pub(crate) name: String,
    version: String,
    licence: String,
    pub(crate) features: Vec<String>,
}

impl Line {
    /// Its package URL (<https://github.com/package-url/purl-spec>).
    pub(crate) fn purl(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// Parses the output of `cargo tree`.
pub(crate) fn lines(tree: &str) -> Vec<Line> {
    let line = |line: &str| {
        let (depth, rest) = line.split_once(' ')?;
        let mut parts = rest.split('|');
        let (package, licence) = (parts.next()?, parts.next()?);
        let mut words = package.split(' ');
        let (name, version) = (words.next()?.to_owned(), words.next()?.strip_prefix('v')?);
        let features = parts.next()?.split(',').map(str::to_owned).collect();
        // Before SPDX had operators, a slash was one.
        let licence = licence.replace('/', " OR ");
        Some(Line { depth: depth.parse().ok()?, name, version: version.into(), licence, features })
    };
    tree.lines().filter_map(line).collect()
}

/// The bill of materials of the first package.
pub(crate) fn cyclone_dx(lines: &[Line]) -> Result<String, String> {
    let bom =
        bom(lines, &checksums(&files::read("Cargo.lock")?)).ok_or("cargo tree named no package")?;
    serde_json::to_string_pretty(&bom).map(|text| text + "\n").map_err(|error| error.to_string())
}

fn bom(lines: &[Line], checksums: &BTreeMap<String, String>) -> Option<Value> {
    let whole = lines.first()?;
    let mut components = BTreeMap::new();
    let mut below: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut path: Vec<&Line> = Vec::new();
    for line in lines {
        path.truncate(line.depth);
        if let Some(parent) = path.last() {
            below.entry(parent.purl()).or_default().insert(line.purl());
        }
        path.push(line);
        below.entry(line.purl()).or_default();
        if line.purl() != whole.purl() {
            components.insert(line.purl(), component("library", line, checksums));
        }
    }
    let edges = below.iter().map(|(from, to)| json!({"ref": from, "dependsOn": to}));
    Some(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component("application", whole, checksums)},
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": edges.collect::<Vec<_>>(),
    }))
}

fn component(kind: &str, line: &Line, checksums: &BTreeMap<String, String>) -> Value {
    let mut component = json!({
        "type": kind,
        "bom-ref": line.purl(),
        "name": line.name,
        "version": line.version,
        "purl": line.purl(),
        "licenses": [{"expression": line.licence}],
    });
    if let Some(sum) = checksums.get(&line.purl()) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    component
}

/// The checksums in a `Cargo.lock`, by package URL. Packages of the workspace have none.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let package = |entry: &str| {
        let value = |key: &str| {
            let line = entry.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            line.map(|value| value.trim_matches('"').to_owned())
        };
        Some((format!("pkg:cargo/{}@{}", value("name")?, value("version")?), value("checksum")?))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0 a v1.0.0 (/r/a)|MIT OR Apache-2.0|default\n1 b v2.0.0|MIT/Apache-2.0|\n\
                        2 c v3.0.0 (proc-macro)|MIT|x,y\n1 c v3.0.0 (proc-macro)|MIT|x,y\n";

    #[test]
    fn every_package_is_a_component_once_and_every_edge_is_there() {
        let lock = "version = 4\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\
                    [[package]]\nname = \"b\"\nversion = \"2.0.0\"\nchecksum = \"0b\"\n";
        let bom = bom(&lines(TREE), &checksums(lock)).unwrap();
        let [a, b, c] = ["pkg:cargo/a@1.0.0", "pkg:cargo/b@2.0.0", "pkg:cargo/c@3.0.0"];
        assert_eq!(bom["metadata"]["component"]["bom-ref"], a);
        assert_eq!(bom["components"][0]["purl"], b);
        assert_eq!(bom["components"][0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(bom["components"][0]["hashes"][0]["content"], "0b");
        assert_eq!(bom["components"][1]["purl"], c);
        assert!(bom["components"][1]["hashes"].is_null() && bom["components"][2].is_null());
        let edges = json!([{"ref": a, "dependsOn": [b, c]}, {"ref": b, "dependsOn": [c]},
                           {"ref": c, "dependsOn": []}]);
        assert_eq!(bom["dependencies"], edges);
    }
}
