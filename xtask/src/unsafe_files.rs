//! The files with unsafe code must be exactly those on the committed list, so that a review sees a
//! new one. The lint `unsafe_code` refuses it where no attribute allows it.

use std::collections::BTreeSet;

use crate::command::{self, words};
use crate::files;

/// The committed list.
const LIST: &str = "unsafe-files.txt";
/// Unsafe code, and attributes that allow it.
const CODE: &str =
    r"\bunsafe( *\{| +(fn|impl|extern|trait)\b|\()|(allow|expect|warn)\([^)]*unsafe_code|\bunsafe$";

/// Compares the sources with the committed list.
pub(crate) fn check() -> Result<(), String> {
    let list = files::read(LIST)?;
    let lines = list.lines().map(str::trim);
    let listed: BTreeSet<&str> =
        lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let found = found()?;
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let new = found.difference(&listed).map(|file| format!("{file} has unsafe code: list it"));
    let gone = listed.difference(&found).map(|file| format!("{file} has none: unlist it"));
    let wrong: Vec<String> = new.chain(gone).collect();
    if wrong.is_empty() { Ok(()) } else { Err(format!("{LIST}: {}", wrong.join("; "))) }
}

/// The files with such a line that is not a comment; untracked ones count.
fn found() -> Result<Vec<String>, String> {
    let mut grep = words("git grep --untracked -E");
    let lines = command::read(grep.args([CODE, "--", "*.rs", ":!xtask/src/unsafe_files.rs"]))?;
    let code = lines.lines().filter_map(|line| line.split_once(':'));
    let code = code.filter(|(_, text)| !text.trim_start().starts_with("//"));
    Ok(code.map(|(file, _)| file.to_owned()).collect())
}
