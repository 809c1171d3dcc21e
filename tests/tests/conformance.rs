//! `docs/conformance.md`: each row names code that exists and a test that exists. Likewise the
//! links of the tour and of the design notes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A table with fewer rows was not read, or was cut.
const ROWS_MIN: usize = 120;
/// Likewise the links of the tour and of the design notes.
const LINKS_MIN: usize = 60;

struct Row {
    id: String,
    rule: String,
    source: String,
    code: Vec<(String, String)>,
    tests: Vec<(String, String)>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The cells of a line of a table, unless it is a header.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    let cells: Vec<&str> = inner.split('|').map(str::trim).collect();
    let header = cells[0] == "id" || cells.iter().all(|cell| cell.chars().all(|c| c == '-'));
    (!header).then_some(cells)
}

/// `file#item` in backticks, separated by commas.
fn references(id: &str, cell: &str) -> Vec<(String, String)> {
    cell.split(", ")
        .map(|reference| {
            let bare = reference.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
            let (file, item) = bare
                .and_then(|bare| bare.split_once('#'))
                .unwrap_or_else(|| panic!("{id}: {reference:?} is not `file#item`"));
            (file.to_owned(), item.to_owned())
        })
        .collect()
}

fn rows() -> Vec<Row> {
    let path = root().join("docs/conformance.md");
    let text = fs::read_to_string(&path).expect("the table");
    let tables = text.lines().filter_map(cells);
    tables
        .map(|cells| {
            let [id, rule, source, code, tests] = cells[..] else {
                panic!("{cells:?}: five cells, without a bar inside")
            };
            Row {
                id: id.into(),
                rule: rule.into(),
                source: source.into(),
                code: references(id, code),
                tests: references(id, tests),
            }
        })
        .collect()
}

/// Source files; each is read once.
#[derive(Default)]
struct Files(BTreeMap<PathBuf, String>);

impl Files {
    /// The text of `file`: below the root if it begins with a crate, else below `base`.
    fn text(&mut self, id: &str, base: &str, file: &str) -> &str {
        let whole = root().join(file);
        let path = if whole.is_file() { whole } else { root().join(base).join(file) };
        self.0.entry(path).or_insert_with_key(|path| {
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{id}: {file}: {error}"))
        })
    }
}

/// Whether `text` has `word` after one of `before`, as a whole word.
fn defines(text: &str, before: &[&str], word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    before.iter().any(|before| {
        let wanted = format!("{before}{word}");
        text.match_indices(&wanted).any(|(at, _)| {
            let free = !text[..at].ends_with(is_word);
            free && !text[at + wanted.len()..].starts_with(is_word)
        })
    })
}

const KEYWORDS: [&str; 7] = ["fn ", "struct ", "enum ", "const ", "static ", "trait ", "type "];

/// Whether `text` defines `item`: a name, or one behind a type that has an `impl` there.
fn has_item(text: &str, item: &str) -> bool {
    let (of, name) = item.rsplit_once("::").map_or((None, item), |(a, b)| (Some(a), b));
    let of_it = of.is_none_or(|of| {
        text.lines().any(|line| line.starts_with("impl") && defines(line, &[""], of))
    });
    of_it && defines(text, &KEYWORDS, name)
}

#[test]
fn each_rule_has_code() {
    let mut files = Files::default();
    let mut wrong = Vec::new();
    for row in rows() {
        for (file, item) in &row.code {
            let text = files.text(&row.id, "stack/src", file);
            if !has_item(text, item) {
                wrong.push(format!("{}: {file} does not define {item}", row.id));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_rule_has_a_test() {
    let mut files = Files::default();
    let mut wrong = Vec::new();
    for row in rows() {
        for (file, name) in &row.tests {
            let text = files.text(&row.id, "stack/tests", file);
            // A script outside of the list of `each_script!` would be dead code, which clippy
            // refuses.
            if file.starts_with("tests/scripts/src/") {
                if !text.contains(&format!("\npub(crate) fn {name}(t: &mut Talk<'_>) -> Step {{")) {
                    wrong.push(format!("{}: {file} has no script {name}", row.id));
                }
                continue;
            }
            let wanted = format!("fn {name}(");
            let marked = text.find(&wanted).is_some_and(|at| {
                // The attribute is right above, perhaps with another one.
                let mut above = text[..at].trim_end().lines().rev().take(3);
                above.any(|line| line.trim() == "#[test]")
            });
            if !marked {
                wrong.push(format!("{}: {file} has no test {name}", row.id));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn rows_are_whole_and_their_sources_are_of_a_known_kind() {
    let rows = rows();
    assert!(rows.len() >= ROWS_MIN, "only {} rows", rows.len());
    let mut ids = BTreeSet::new();
    let known = [
        "[M]",
        ".c",
        ".h",
        "(3)",
        "(7)",
        "captures",
        "tshark",
        "ours",
        "rdmavt",
        "hfi1",
        "rdma-hw.cc",
    ];
    for Row { id, rule, source, .. } in &rows {
        assert!(ids.insert(id.clone()), "{id} stands twice");
        assert!(rule.len() > 15, "{id}: {rule:?} says nothing");
        assert!(known.iter().any(|kind| source.contains(kind)), "{id}: what is {source:?}?");
        // A clause needs the source in which it was seen.
        let clause = source.split([' ', ',', ';']).any(|word| {
            let mut letters = word.chars();
            matches!(letters.next(), Some('C' | 'o'))
                && letters.next().is_some_and(|c| c.is_ascii_digit())
                && word.contains('-')
        });
        let seen = source.contains("cited by") || source.contains("quoted by");
        assert!(!clause || seen, "{id}: {source:?} cites a clause, but not where it was seen");
    }
}

/// The tour and the design notes, by their paths below the root.
fn guides() -> Vec<String> {
    let notes = fs::read_dir(root().join("docs/design")).expect("the design notes");
    let names = notes.map(|entry| entry.expect("a design note").file_name());
    let notes = names.map(|name| format!("docs/design/{}", name.to_string_lossy()));
    notes.chain(["docs/tour.md".to_owned()]).collect()
}

/// The links in backticks, as `path#Item`.
fn links(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter_map(|link| link.split_once('#')).filter(|(file, _)| file.ends_with(".rs"))
}

#[test]
fn each_link_of_the_tour_and_the_design_notes_names_code() {
    let mut files = Files::default();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for guide in guides() {
        let text = fs::read_to_string(root().join(&guide)).expect("a document");
        for (file, item) in links(&text) {
            count += 1;
            if !has_item(files.text(&guide, "", file), item) {
                wrong.push(format!("{guide}: {file} does not define {item}"));
            }
        }
    }
    assert!(count >= LINKS_MIN, "only {count} links");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_document_that_is_linked_to_exists() {
    let mut wrong = Vec::new();
    let others = ["ARCHITECTURE.md", "docs/glossary.md"].map(String::from);
    for guide in guides().into_iter().chain(others) {
        let path = root().join(&guide);
        let text = fs::read_to_string(&path).expect("a document");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let file = target.split('#').next().unwrap_or(target);
            if !path.with_file_name(file).exists() {
                wrong.push(format!("{guide}: {target} does not exist"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Code in backticks, in documents and in comments, such as `rc/mod.rs`: the end of a path.
#[test]
fn each_file_of_code_that_is_named_exists() {
    let mut files = Vec::new();
    files_below(&root(), &[".rs", ".md"], &mut files);
    let (mut wrong, mut count) = (Vec::new(), 0);
    for path in &files {
        let text = fs::read_to_string(path).expect("a file");
        let is_code = path.extension().is_some_and(|end| end == "rs");
        let lines = text.lines().filter(|line| !is_code || line.trim_start().starts_with("//"));
        for named in lines.flat_map(|line| line.split('`').skip(1).step_by(2)) {
            let named = named.split('#').next().unwrap_or(named);
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            if !named.ends_with(".rs") || !named.chars().all(is_path) {
                continue;
            }
            count += 1;
            if !files.iter().any(|file| file.ends_with(named)) {
                wrong.push(format!("{}: {named}", path.display()));
            }
        }
    }
    assert!(count >= 300, "only {count} files");
    assert!(wrong.is_empty(), "there are no such files:\n{}", wrong.join("\n"));
}

/// All files below a folder whose names end in one of these.
fn files_below(folder: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.ends_with("target") || path.ends_with(".git") {
            continue;
        }
        if path.is_dir() {
            files_below(&path, ends, found);
        } else if ends.iter().any(|end| path.to_string_lossy().ends_with(end)) {
            found.push(path);
        }
    }
}

/// The lines of each block of Rust in comments of the documentation or in Markdown.
fn examples(text: &str) -> Vec<Vec<&str>> {
    let (mut all, mut open): (Vec<Vec<&str>>, Option<Option<Vec<&str>>>) = (Vec::new(), None);
    for line in text.lines() {
        let line = line.trim_start();
        let line = line.strip_prefix("//!").or_else(|| line.strip_prefix("///")).unwrap_or(line);
        let line = line.strip_prefix(' ').unwrap_or(line);
        match (line.strip_prefix("```"), &mut open) {
            (Some(words), None) => {
                let is_rust = matches!(words, "" | "no_run" | "rust" | "rust,no_run");
                open = Some(is_rust.then(Vec::new));
            }
            (Some(_), Some(_)) => all.extend(open.take().flatten()),
            (None, Some(Some(lines))) => lines.push(line),
            (None, _) => {}
        }
    }
    all
}

/// An example that is copied as rustdoc shows it compiles: it has a `main`, and hides nothing but
/// the line that gives a test addresses of its own.
#[test]
fn each_example_is_a_whole_program() {
    const OWN_ADDRESSES: [&str; 2] = [
        "let (here, there) = rocinante::doc::addresses();",
        "let (here, _) = rocinante::doc::addresses();",
    ];
    let mut files = vec![root().join("README.md")];
    files_below(&root().join("verbs-api/src"), &[".rs", ".md"], &mut files);
    let (mut count, mut wrong) = (0, Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).expect("a source");
        for example in examples(&text) {
            count += 1;
            let hidden = example.iter().filter_map(|line| line.trim_start().strip_prefix("# "));
            let hides = hidden.map(str::trim).find(|line| !OWN_ADDRESSES.contains(line));
            if let Some(line) = hides {
                wrong.push(format!("{}: an example hides {line:?}", file.display()));
            }
            if !example.iter().any(|line| line.contains("fn main() -> ")) {
                wrong.push(format!("{}: an example without main: {example:#?}", file.display()));
            }
        }
    }
    assert!(count >= 19, "only {count} examples");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_limit_is_explained() {
    let text = fs::read_to_string(root().join("docs/operations.md")).expect("a document");
    for limit in rocinante::stats::Limit::ALL {
        assert!(text.contains(&format!("\n| `{}` | ", limit.name())), "{}", limit.name());
    }
}
