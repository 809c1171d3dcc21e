//! The files with unsafe code must be exactly those on the committed list, so that a review sees a
//! new one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The committed list.
const LIST: &str = "unsafe-files.txt";

/// Compares the sources with the committed list.
///
/// # Errors
/// The differences.
pub(crate) fn check() -> Result<(), String> {
    let found = found()?;
    let list = fs::read_to_string(LIST).map_err(|error| format!("{LIST}: {error}"))?;
    let listed: BTreeSet<String> = entries(&list);
    let mut wrong: Vec<String> = found
        .difference(&listed)
        .map(|file| format!("{file} has unsafe code: avoid it, or list it"))
        .collect();
    wrong.extend(listed.difference(&found).map(|file| format!("{file} has none: unlist it")));
    if wrong.is_empty() { Ok(()) } else { Err(format!("{LIST}: {}", wrong.join("; "))) }
}

/// Prints the files with unsafe code.
///
/// # Errors
/// A source cannot be read.
pub(crate) fn print() -> Result<(), String> {
    for file in found()? {
        println!("{file}");
    }
    Ok(())
}

fn entries(list: &str) -> BTreeSet<String> {
    list.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

fn found() -> Result<BTreeSet<String>, String> {
    let mut found = BTreeSet::new();
    search(Path::new("."), &mut found).map_err(|error| error.to_string())?;
    Ok(found)
}

fn search(directory: &Path, found: &mut BTreeSet<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
            search(&path, found)?;
        } else if name.ends_with(".rs") && has_unsafe_code(&fs::read_to_string(&path)?) {
            found.insert(path.strip_prefix(".").unwrap_or(&path).display().to_string());
        }
    }
    Ok(())
}

fn has_unsafe_code(source: &str) -> bool {
    let code = without_comments_and_literals(source);
    let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.any(|word| word == "unsafe") || permits_unsafe_code(&code)
}

/// Whether there is an `allow(… unsafe_code …)` or `expect(…)`, and not a `forbid` or `deny`.
fn permits_unsafe_code(code: &str) -> bool {
    code.match_indices("unsafe_code").any(|(at, _)| {
        let before = &code[..at];
        let attribute = before.rfind('(').map_or("", |open| before[..open].trim_end());
        ["allow", "expect", "warn"].iter().any(|level| attribute.ends_with(level))
    })
}

fn without_comments_and_literals(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let skipped = skippable(rest, &code);
        if skipped > 0 {
            code.push(' ');
            rest = &rest[skipped..];
        } else {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    code
}

/// Length of the comment or literal at the start of `rest`; 0 if there is none.
fn skippable(rest: &str, before: &str) -> usize {
    let until = |end: &str, from: usize| {
        rest[from..].find(end).map_or(rest.len(), |at| from + at + end.len())
    };
    if rest.starts_with("//") {
        return until("\n", 2);
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    if rest.starts_with('"') {
        return quoted(rest, '"');
    }
    let in_a_word = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let raw = rest.strip_prefix('r').filter(|_| !in_a_word || before.ends_with(['b', 'c']));
    if let Some(raw) = raw {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            return until(&format!("\"{}", "#".repeat(hashes)), 2 + hashes);
        }
    }
    // A character, and not a lifetime: escaped, or closed after one character.
    let mut after_quote = rest.chars().skip(1);
    if rest.starts_with('\'')
        && (after_quote.next() == Some('\\') || after_quote.next() == Some('\''))
    {
        return quoted(rest, '\'');
    }
    0
}

/// Length of a literal between `quote`s with escapes.
fn quoted(literal: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in literal.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    literal.len()
}

/// Length of a block comment, those nested in it included.
fn block_comment(comment: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(found) = comment[at..].find(['/', '*']) {
        at += found;
        match &comment.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    comment.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_is_found() {
        for source in [
            "fn f() { unsafe { g() } }",
            "unsafe impl Send for A {}",
            "#![allow(unsafe_code)]",
            "#![expect(missing_docs, unsafe_code)]",
            "let quote = '\"'; unsafe {}",
            "fn f<'a>(x: &'a u8) { unsafe {} }",
            "let s = \"a\\\"\"; unsafe {}",
            "let s = br#\"\"#; unsafe {} // \"",
        ] {
            assert!(has_unsafe_code(source), "{source}");
        }
    }

    #[test]
    fn talk_about_unsafe_code_is_not() {
        for source in [
            "#![forbid(unsafe_code)]",
            "// unsafe\nfn f() {}",
            "/* /* unsafe */ unsafe */ fn f() {}",
            "let s = \"unsafe {}\";",
            "let s = r#\"\"unsafe\"\"#;",
            "fn is_unsafe() {}",
            "let c = '\\''; let s = \"unsafe\";",
        ] {
            assert!(!has_unsafe_code(source), "{source}");
        }
    }

    #[test]
    fn the_list_may_have_comments() {
        assert_eq!(entries("# why\n\n a.rs \n"), BTreeSet::from(["a.rs".to_owned()]));
    }
}
