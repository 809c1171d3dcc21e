//! How long comments and documents may be, and words of comments that make riddles.

use crate::command::{self, words};
use crate::files;
use std::path::Path;

/// The most columns of a line of prose.
const COLUMNS: usize = 100;
/// The most comment lines with one of [`RIDDLES`], of a thousand.
const RIDDLES_MAX: usize = 1;
/// Words in the place of a subject, a number or a field's term.
const RIDDLES: &str = "who, whom, whoever, nobody, somebody, one of us, what is, what are, so many, \
                       so much, told, heard";
/// Documents that are read as a whole: the most lines and the most words.
const DOCUMENTS: [(&str, usize, usize); 2] =
    [("README.md", 150, 1_100), ("ARCHITECTURE.md", 250, 3_500)];

/// Checks comments and documents.
pub(crate) fn check() -> Result<(), String> {
    let sources =
        command::read(&mut words("git ls-files --cached --others --exclude-standard *.rs"))?;
    let (mut wrong, mut comments, mut riddles) = (Vec::new(), 0, Vec::new());
    // A file may be gone before git knows.
    for name in sources.lines().filter(|name| Path::new(name).exists()) {
        let text = files::read(name)?;
        for (number, line) in comment_lines(&text) {
            comments += 1;
            if line.chars().count() > COLUMNS {
                wrong.push(format!("{name}:{number}: more than {COLUMNS} columns"));
            }
            if has_riddle(line) {
                riddles.push(format!("{name}:{number}: {}", line.trim()));
            }
        }
    }
    if riddles.len() * 1_000 > comments * RIDDLES_MAX {
        let found = riddles.len();
        wrong.push(format!("{found} of {comments} comment lines have {RIDDLES}: name the subject"));
        wrong.extend(riddles);
    }
    for (name, lines_max, words_max) in DOCUMENTS {
        let text = files::read(name)?;
        let (lines, words) = (text.lines().count(), text.split_whitespace().count());
        if lines > lines_max || words > words_max {
            wrong.push(format!(
                "{name}: {lines} lines and {words} words, of {lines_max} and {words_max} at most"
            ));
        }
        let long = long_lines(&text).into_iter();
        wrong.extend(long.map(|number| format!("{name}:{number}: more than {COLUMNS} columns")));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// The lines that are comments and nothing else, with their numbers.
fn comment_lines(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(source.lines());
    lines.filter(|(_, line)| line.trim_start().starts_with("//"))
}

fn has_riddle(line: &str) -> bool {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty());
    let words = words.map(str::to_lowercase).collect::<Vec<_>>().join(" ");
    RIDDLES.split(", ").any(|riddle| format!(" {words} ").contains(&format!(" {riddle} ")))
}

/// The numbers of a document's lines that are too long and neither a row of a table nor code, and
/// would not be short without the address of a link.
fn long_lines(text: &str) -> Vec<usize> {
    let mut in_code = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        let exempt = fence || in_code || line.starts_with('|') || line.contains("](");
        if !exempt && line.chars().count() > COLUMNS {
            long.push(number);
        }
    }
    long
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_are_comments_count() {
        let source = "let who = 1; // who\n    // two\n/// three\n//! four\n";
        let lines: Vec<usize> = comment_lines(source).map(|(number, _)| number).collect();
        assert_eq!(lines, [2, 3, 4]);
    }

    #[test]
    fn riddles_are_whole_words() {
        let riddles =
            ["// Who waits", "// whoever: asks", "//! (who)", "// So many", "// one of us."];
        for line in riddles {
            assert!(has_riddle(line), "{line}");
        }
        for line in ["// the whole", "// `who_waits`", "// so few wait", "// one of use"] {
            assert!(!has_riddle(line), "{line}");
        }
    }

    #[test]
    fn tables_links_and_code_may_be_long() {
        let long = "x".repeat(COLUMNS + 1);
        let text =
            format!("{}\n{long}\n|{long}|\n[x]({long})\n```\n{long}\n```\n{long}", "x".repeat(100));
        assert_eq!(long_lines(&text), [2, 8]);
    }
}
