//! The public API of the crate `rocinante`, compared with `docs/api.txt`: a commit that changes one
//! changes the other.
//!
//! rustdoc describes a crate as JSON, and the crate `public-api` makes a line of each item. The
//! items that `rocinante` exports from the crates below it are in their JSON. Those of its own
//! parts have the paths by which programs name them. Items with `#[doc(hidden)]` are left out, and
//! so are implementations for all types and of auto traits.

use crate::command::{self, words};
use crate::toolchain::Toolchain;
use crate::{demo, files};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

const SNAPSHOT: &str = "docs/api.txt";
/// JSON of rustdoc has a format for each version, and it is unstable: this one is that of
/// `public-api` in Cargo.toml. `RUSTC_BOOTSTRAP` permits it with a stable compiler.
const VERSION: &str = "1.95.0";
const CRATES: [&str; 6] = [
    "rocinante",
    "rocinante-soft",
    "rocinante-kernel",
    "rocinante-stack",
    "rocinante-wire",
    "rocinante-netdev",
];
/// The crates that are parts of `rocinante`: their items are its own.
const PARTS: [&str; 2] = ["rocinante_soft::", "rocinante_kernel::"];
/// Modules of crates that are re-exports, and where their items are.
const MODULES: [(&str, &str); 2] = [
    ("rocinante_stack::types::", "rocinante_wire::types::"),
    ("rocinante_stack::wire::", "rocinante_wire::"),
];

/// `cargo xtask api [--accept]`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let api = current(&Toolchain::of(VERSION, &[])?)?;
    match args {
        [] => compare(&api),
        ["--accept"] => files::write(SNAPSHOT, &api),
        _ => Err("cargo xtask api [--accept]".into()),
    }
}

/// Compares the API with the snapshot; without the toolchain, returns `name: reason`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    match Toolchain::of(VERSION, &[]) {
        Ok(toolchain) => compare(&current(&toolchain)?).map(|()| vec![]),
        Err(why) if std::env::var_os("CI").is_some() => Err(why),
        Err(why) => Ok(vec![format!("api: no Rust {VERSION}: {why}")]),
    }
}

/// Shows each line that differs.
fn compare(api: &str) -> Result<(), String> {
    let now = demo::target()?.join("api.txt");
    files::write(&now, api)?;
    let mut diff = words("git diff --no-index --exit-code --unified=0");
    command::run(diff.arg(SNAPSHOT).arg(now)).map_err(|_| {
        format!(
            "the public API is not that of {SNAPSHOT}: `cargo xtask api --accept` if that is meant, \
             with a line in CHANGELOG.md"
        )
    })
}

/// The text of the snapshot, as the API is now.
fn current(toolchain: &Toolchain) -> Result<String, String> {
    let mut documents = Vec::new();
    for name in CRATES {
        documents.push(document(toolchain, name)?);
    }
    let (own, below) = documents.split_first().ok_or("no crates")?;
    let json: Value =
        serde_json::from_str(&files::read(own)?).map_err(|error| error.to_string())?;
    let mut exported = exported(&json)?;
    for path in &mut exported {
        for (module, elsewhere) in MODULES {
            if let Some(rest) = path.strip_prefix(module) {
                *path = format!("{elsewhere}{rest}");
            }
        }
    }
    let mut text = format!(
        "# The public API of the crate rocinante, all features, with what it exports of the crates\n\
         # below it. `cargo xtask test` compares it; `cargo xtask api --accept` writes it. Rust {VERSION}.\n\n"
    );
    let mut parts = of_parts(&json)?;
    for line in lines(own)? {
        if !parts.iter().any(|(_, name)| line == format!("pub use {name}")) {
            text += &format!("{line}\n");
        }
    }
    for document in below {
        let is_part = PARTS.iter().any(|part| document.ends_with(part.replace("::", ".json")));
        text += if is_part { "" } else { "\n" };
        for line in lines(document)?.iter().filter(|line| is_of(line, &exported)) {
            text += &format!("{line}\n");
        }
    }
    // The longest first: one path may begin another.
    parts.sort_by_key(|(source, _)| std::cmp::Reverse(source.len()));
    Ok(parts.iter().fold(text, |text, (source, name)| renamed(&text, source, name)))
}

/// The text with a path replaced where it ends.
fn renamed(text: &str, path: &str, name: &str) -> String {
    let mut pieces = text.split(path);
    let mut renamed = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        renamed += if ends_path(piece) { name } else { path };
        renamed += piece;
    }
    renamed
}

/// Whether a path ends before this text.
fn ends_path(rest: &str) -> bool {
    !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_')
}

/// Has rustdoc describe a crate; the path of its JSON.
fn document(toolchain: &Toolchain, name: &str) -> Result<PathBuf, String> {
    let mut target = demo::target()?;
    if !toolchain.is_running() {
        target = target.join("api");
    }
    let wrapper = target.join("rustdoc-unstable");
    // Not in cargo's own environment: build scripts ask for it, so all would be compiled again.
    let rustdoc = toolchain.sysroot()?.join("bin/rustdoc");
    let script = format!("#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec '{}' \"$@\"\n", rustdoc.display());
    files::write(&wrapper, script)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
        .map_err(files::said(&wrapper))?;
    let mut rustdoc = toolchain.cargo("rustdoc --quiet --lib --all-features");
    rustdoc.args(["-p", name, "--", "-Zunstable-options", "--output-format=json"]);
    rustdoc.env("RUSTDOC", wrapper).env("CARGO_TARGET_DIR", &target);
    command::run(&mut rustdoc)?;
    Ok(target.join("doc").join(name.replace('-', "_") + ".json"))
}

fn lines(document: &Path) -> Result<Vec<String>, String> {
    let api = public_api::Builder::from_rustdoc_json(document)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .map_err(|error| format!("{}: {error}", document.display()))?;
    Ok(api.items().map(ToString::to_string).collect())
}

/// The paths in other crates of a crate's exports, such as `rocinante_stack::verbs::SendWr`.
fn exported(json: &Value) -> Result<Vec<String>, String> {
    let items = json["index"].as_object().ok_or("rustdoc names no items")?;
    let sources = items.values().filter_map(|item| item["inner"]["use"]["source"].as_str());
    Ok(sources.filter(|source| source.starts_with("rocinante_")).map(str::to_owned).collect())
}

/// A crate's exports of its parts: the path there, and the path here.
fn of_parts(json: &Value) -> Result<Vec<(String, String)>, String> {
    let (mut all, mut modules) = (Vec::new(), vec![(&json["root"], "rocinante".to_owned())]);
    while let Some((module, path)) = modules.pop() {
        let items = json["index"][module.to_string()]["inner"]["module"]["items"].as_array();
        for id in items.ok_or("rustdoc names no items")? {
            let item = &json["index"][id.to_string()];
            if let Some(name) =
                item["name"].as_str().filter(|_| item["inner"]["module"].is_object())
            {
                modules.push((id, format!("{path}::{name}")));
            }
            let export = &item["inner"]["use"];
            if let (Some(source), Some(name)) = (export["source"].as_str(), export["name"].as_str())
                && PARTS.iter().any(|part| source.starts_with(part))
            {
                all.push((source.to_owned(), format!("{path}::{name}")));
            }
        }
    }
    Ok(all)
}

/// Whether the item of a line is one of `exported`, or a part of one.
fn is_of(line: &str, exported: &[String]) -> bool {
    let after_for = line.starts_with("impl").then(|| line.rsplit_once(" for ")).flatten();
    let subject = after_for.map_or(line, |(_, subject)| subject);
    let Some(at) = subject.find("rocinante_") else { return false };
    exported.iter().any(|path| subject[at..].strip_prefix(path.as_str()).is_some_and(ends_path))
}

#[cfg(test)]
mod tests {
    use super::{is_of, renamed};

    #[test]
    fn a_part_has_the_name_that_programs_know() {
        let text = "fn a::Wc::ok(self) -> a::WcError; a::Wc";
        assert_eq!(renamed(text, "a::Wc", "b::Wc"), "fn b::Wc::ok(self) -> a::WcError; b::Wc");
    }

    #[test]
    fn what_is_exported_is_told_from_what_only_uses_it() {
        let exported = ["rocinante_stack::mem::Access".to_owned()];
        for line in [
            "pub struct rocinante_stack::mem::Access(_)",
            "pub const fn rocinante_stack::mem::Access::bits(self) -> u32",
            "impl core::clone::Clone for rocinante_stack::mem::Access",
            "impl rocinante_stack::mem::Access",
        ] {
            assert!(is_of(line, &exported), "{line}");
        }
        for line in [
            "pub enum rocinante_stack::mem::AccessError",
            "pub rocinante_stack::mem::Bind::access: rocinante_stack::mem::Access",
            "impl core::convert::From<rocinante_stack::mem::Access> for u32",
            "pub mod rocinante_stack::mem",
        ] {
            assert!(!is_of(line, &exported), "{line}");
        }
    }
}
