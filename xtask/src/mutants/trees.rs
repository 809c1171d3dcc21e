//! The copies to mutate: each has the content of the original, with as few test programs to link as
//! possible.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The tests of the wire that need no other crate of the workspace, and their support modules.
const WIRE_TESTS: [&str; 4] = ["wire_captures", "wire_cm", "wire_hostile", "wire_opcodes"];
const WIRE_SUPPORT: [&str; 2] = ["captures", "snapshot"];
/// A test that would start another program for each mutant returns at once instead.
const NO_PROGRAMS: &str = "\
#[cfg(test)]
macro_rules! require_program { ($program:expr) => { if true { return } } }
#[cfg(test)]
pub(crate) use require_program;
#[cfg(test)]
mod tshark { pub(crate) fn number(_: &str) -> Option<u64> { None } }
";
/// The tests of `verbs-api` that take all descriptors of their process.
const ALONE: &str = "descriptors";
const MANIFESTS: [(&str, &str); 3] = [
    (
        "Cargo.toml",
        "[workspace]\nresolver = \"3\"\nmembers = [\"stack\"]\n\n\
         [profile.dev]\ndebug = false\n\n[profile.dev.package.\"*\"]\nopt-level = 2\n",
    ),
    (
        "stack/crc/Cargo.toml",
        "[package]\nname = \"rocinante-crc\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n\
         [dependencies]\ncrc32fast = \"*\"\n",
    ),
    (
        "stack/Cargo.toml",
        "[package]\nname = \"rocinante-stack\"\nversion = \"0.1.0\"\nedition = \"2024\"\nautotests = false\n\n\
         [dependencies]\ncrc32fast = \"*\"\nrocinante-crc = { path = \"crc\" }\n\n\
         [dev-dependencies]\netherparse = \"*\"\npcap-file = \"*\"\n\
         proptest = { version = \"*\", default-features = false, features = [\"std\"] }\n",
    ),
];

/// The engine, with its tests and those of the wire (`tests/tests/wire_*.rs`) as modules of one
/// test program.
pub(super) fn stack(tree: &Path) -> io::Result<()> {
    for folder in ["stack/crc/src", "stack/src", "stack/tests", "tests/data"] {
        let to = if folder == "tests/data" { "stack/data" } else { folder };
        copy(Path::new(folder), &tree.join(to), &|text| text)?;
    }
    fs::create_dir_all(tree.join(".cargo"))?;
    for file in ["Cargo.lock", ".cargo/mutants.toml"] {
        fs::copy(file, tree.join(file))?;
    }
    for (file, text) in MANIFESTS {
        fs::write(tree.join(file), text)?;
    }
    let mut modules = vec!["extern crate self as rocinante_stack;".to_owned()];
    let mut module = |path: &Path, name: &str| {
        modules.push(format!("#[path = {path:?}]\nmod {name};"));
    };
    let tests = tree.join("stack/tests");
    module(&tests.join("common/mod.rs"), "common");
    let scripts = tests.join("rocinante_scripts");
    copy(Path::new("tests/scripts/src"), &scripts, &|text| {
        text.replace("$crate::", "$crate::rocinante_scripts::")
            .replace(" crate::", " crate::rocinante_scripts::")
    })?;
    module(&scripts.join("lib.rs"), "rocinante_scripts");
    copy(Path::new("stack/tests/common"), &tests.join("common"), &|text| of_scripts(&text))?;
    module(&tests.join("cm/main.rs"), "cm_tests");
    copy(Path::new("stack/tests/cm"), &tests.join("cm"), &|text| {
        text.replace("crate::", "crate::cm_tests::")
    })?;
    for file in files(Path::new("stack/tests"))? {
        let to = tests.join(file.file_name().unwrap_or_default());
        if to.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&file)?;
            let text = text.replace("\nmod common;\n", "\nuse crate::common;\n");
            fs::write(&to, of_scripts(&text))?;
            module(&to, &format!("{}_tests", stem(&to)));
        }
    }
    let support = WIRE_SUPPORT.map(|name| format!("tests/src/{name}.rs"));
    for file in support.into_iter().chain(WIRE_TESTS.map(|name| format!("tests/tests/{name}.rs"))) {
        let to = tests.join(Path::new(&file).file_name().unwrap_or_default());
        fs::write(&to, fs::read_to_string(&file)?.replace("rocinante_tests::", "crate::"))?;
        module(&to, &stem(&to));
    }
    let root = tree.join("stack/src/lib.rs");
    // The engine has no unsafe code, except a test that counts allocations.
    let engine = fs::read_to_string(&root)?.replace("#![forbid(unsafe_code)]", "");
    let modules = modules.iter().map(|module| format!("#[cfg(test)]\n{module}\n"));
    fs::write(root, engine + &modules.collect::<String>() + NO_PROGRAMS)
}

/// Replaces names of the scripts' crate by those of its module here.
fn of_scripts(text: &str) -> String {
    text.replace("rocinante_scripts::each_script!", "crate::each_script!")
        .replace("rocinante_scripts::", "crate::rocinante_scripts::")
}

fn copy(from: &Path, to: &Path, change: &dyn Fn(String) -> String) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target, change)?;
        } else if let Ok(text) = fs::read_to_string(entry.path()) {
            fs::write(target, change(text))?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let mut files: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    files.retain(|path| path.is_file());
    files.sort();
    Ok(files)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// `netdev`: its tests are unit tests already.
pub(super) fn netdev(tree: &Path) -> io::Result<()> {
    workspace(tree, &["netdev"])
}

/// `verbs-api` with its dependencies, its tests as modules of one test program; and the models of
/// what threads share.
pub(super) fn verbs_api(tree: &Path) -> io::Result<()> {
    workspace(
        tree,
        &["stack", "stack/crc", "netdev", "verbs-api", "tests/models", "tests/scripts"],
    )?;
    for tests in ["stack/tests", "verbs-api/tests"] {
        fs::remove_dir_all(tree.join(tests))?;
    }
    let mut modules = String::new();
    let mut module = |file: &Path, name: &str| {
        modules += &format!("#[cfg(test)]\n#[path = {file:?}]\nmod {name};\n");
    };
    let tests = tree.join("verbs-api/src/of_tests");
    copy(Path::new("verbs-api/tests/sim"), &tests.join("sim"), &|text| text)?;
    module(&tests.join("sim/mod.rs"), "sim_of_tests");
    for file in files(Path::new("verbs-api/tests"))? {
        if stem(&file) == ALONE {
            continue;
        }
        let to = tests.join(file.file_name().unwrap_or_default());
        let text = fs::read_to_string(&file)?;
        fs::write(&to, text.replace("\nmod sim;\n", "\nuse crate::sim_of_tests as sim;\n"))?;
        module(&to, &format!("{}_of_tests", stem(&to)));
    }
    let root = tree.join("verbs-api/src/lib.rs");
    let library = fs::read_to_string(&root)?;
    fs::write(root, library + "\n#[cfg(test)]\nextern crate self as rocinante;\n" + &modules)
}

/// A copy of the workspace with these members only.
fn workspace(tree: &Path, members: &[&str]) -> io::Result<()> {
    for member in members {
        copy(Path::new(member), &tree.join(member), &|text| text)?;
    }
    fs::create_dir_all(tree.join(".cargo"))?;
    for file in ["Cargo.lock", ".cargo/mutants.toml"] {
        fs::copy(file, tree.join(file))?;
    }
    let manifest = fs::read_to_string("Cargo.toml")?;
    let (_, rest) = manifest.split_once("\n\n").unwrap_or_default();
    let head = format!("[workspace]\nresolver = \"3\"\nmembers = {members:?}\n");
    fs::write(tree.join("Cargo.toml"), format!("{head}\n{rest}"))
}
