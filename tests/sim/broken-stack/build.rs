//! Copies the engine's source and plants the bugs in the copy.

use std::path::Path;
use std::{env, fs, io};

include!("bugs.rs");

fn main() -> io::Result<()> {
    let home = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    let source = Path::new(&home).join("../../../stack/src");
    let engine = Path::new(&out).join("engine");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=bugs.rs");
    println!("cargo::rerun-if-changed=build.rs");
    if engine.exists() {
        fs::remove_dir_all(&engine)?;
    }
    copy(&source, &engine)?;
    // `src/lib.rs` already has the lines that must be at the head of a crate.
    let root = engine.join("lib.rs");
    let text = fs::read_to_string(&root)?;
    let is_head = |line: &&str| line.starts_with("//!") || line.starts_with("#![");
    let lines: Vec<&str> = text.lines().filter(|line| !is_head(line)).collect();
    fs::write(&root, lines.join("\n"))?;
    let mut lost = Vec::new();
    for (at, bug) in BUGS.iter().enumerate() {
        let file = engine.join(bug.file);
        let text = fs::read_to_string(&file).unwrap_or_default();
        if text.matches(bug.right).count() == 1 {
            let wrong = bug.wrong.replace("BUG", &format!("crate::broken::on({at})"));
            fs::write(&file, text.replace(bug.right, &wrong))?;
        } else {
            // Not an error: the tests name the bugs that must follow the source, and all else can
            // still be built.
            println!(
                "cargo::warning=tests/sim/broken-stack/bugs.rs: {}: its place in {} has changed",
                bug.name, bug.file
            );
            lost.push(bug.name);
        }
    }
    fs::write(Path::new(&out).join("lost.rs"), format!("&{lost:?}"))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
