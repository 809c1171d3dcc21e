//! Blocks of a report, as Markdown and as HTML.

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

/// A part of a report.
#[derive(Debug, Clone)]
pub(in super::super) enum Block {
    /// A heading, and the name by which links find it.
    Heading(&'static str, Option<&'static str>),
    Text(String),
    /// A table of Markdown, from elsewhere, and lines of text after it.
    Markdown(String),
    Table {
        id: Option<String>,
        head: Vec<String>,
        rows: Vec<Vec<Link>>,
    },
    Plot {
        file: String,
        svg: String,
        caption: String,
    },
}

/// The text of a cell, and the part of the report that it leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Link {
    pub(in super::super) text: String,
    pub(in super::super) to: Option<String>,
}

impl Link {
    /// Text alone.
    pub(in super::super) fn none(text: &str) -> Self {
        Self { text: text.to_owned(), to: None }
    }
}

/// The report as Markdown. Plots are files beside it.
pub(super) fn markdown(title: &str, blocks: &[Block]) -> String {
    let cell = |cell: &Link| {
        let text = cell.text.replace('|', "\\|").replace('\n', " ");
        match &cell.to {
            Some(to) => format!("[{text}](#{to})"),
            None => text,
        }
    };
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = format!("# {title}\n");
    for block in blocks {
        out.push('\n');
        match block {
            Block::Heading(text, _) => out.push_str(&format!("## {text}\n")),
            Block::Text(text) => out.push_str(&format!("{text}\n")),
            Block::Markdown(text) => out.push_str(text),
            Block::Table { id, head, rows } => {
                if let Some(id) = id {
                    out.push_str(&format!("<a id=\"{id}\"></a>\n\n"));
                }
                out.push_str(&line(head.clone()));
                out.push_str(&line(head.iter().map(|_| "---".to_owned()).collect()));
                rows.iter().for_each(|row| out.push_str(&line(row.iter().map(cell).collect())));
            }
            Block::Plot { file, caption, .. } => {
                out.push_str(&format!("![{caption}]({file})\n\n{caption}\n"));
            }
        }
    }
    out
}

const STYLE: &str = "
body { font: 15px/1.45 sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #111 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid #ccc; padding: .25em .7em .25em 0; text-align: left;
  vertical-align: top }
figure { margin: 1.5em 0; break-inside: avoid }
figure svg { width: 100%; height: auto }
figcaption { font-size: 13px; color: #444 }
h2 { margin-top: 2em; break-after: avoid }
@media print { body { font-size: 10px; max-width: none; margin: 0 } table { display: table } }
";

/// The report as one file, with the plots inside.
pub(super) fn html(title: &str, blocks: &[Block]) -> String {
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                @for block in blocks { (of(block)) }
            }
        }
    };
    page.into_string()
}

fn of(block: &Block) -> Markup {
    match block {
        Block::Heading(text, id) => markup! { h2 id=[id] { (text) } },
        Block::Text(text) => markup! { p { (text) } },
        Block::Markdown(text) => table(text),
        Block::Table { id, head, rows } => markup! {
            table id=[id] {
                tr { @for cell in head { th { (cell) } } }
                @for row in rows {
                    tr { @for cell in row { td {
                        @match &cell.to {
                            Some(to) => a href={ "#" (to) } { (cell.text) },
                            None => (cell.text),
                        }
                    } } }
                }
            }
        },
        Block::Plot { svg, caption, .. } => markup! {
            figure {
                (PreEscaped(svg))
                figcaption { (caption) }
            }
        },
    }
}

/// A table of Markdown without links, and the lines after it.
fn table(text: &str) -> Markup {
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
        inner.split('|').map(|cell| cell.trim().replace(['`', '*'], "")).collect()
    };
    let is_row = |line: &&str| line.starts_with('|') && !line.starts_with("|---");
    markup! {
        table {
            @for line in text.lines().filter(is_row) {
                tr { @for cell in cells(line) { td { (cell) } } }
            }
        }
        @for line in text.lines().filter(|line| !line.starts_with('|') && !line.is_empty()) {
            p { (line) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> Vec<Block> {
        let to = Some("rows-size".to_owned());
        vec![
            Block::Heading("size", Some("size")),
            Block::Text("a < b & c".into()),
            Block::Table {
                id: Some("rows-size".into()),
                head: vec!["mode".into()],
                rows: vec![vec![Link { text: "<udp|x>".into(), to }]],
            },
            Block::Plot {
                file: "p.svg".into(),
                svg: "<svg width=\"9\"><text>udp</text></svg>".into(),
                caption: "throughput".into(),
            },
            Block::Markdown("| goal | here |\n|---|---|\n| `a` | **missed** |\n\n1 met.\n".into()),
        ]
    }

    #[test]
    fn the_html_is_one_file_with_everything_escaped() {
        let page = html("A study", &blocks());
        for part in [
            "a &lt; b &amp; c",
            "<a href=\"#rows-size\">&lt;udp|x&gt;</a>",
            "<table id=\"rows-size\">",
            "<svg width=\"9\"><text>udp</text></svg>",
            "<td>missed</td>",
            "<p>1 met.</p>",
        ] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        for outside in ["http:", "https:", "src=", "p.svg", "<script"] {
            assert!(!page.contains(outside), "{outside} is in {page}");
        }
    }

    #[test]
    fn the_markdown_has_the_same_blocks() {
        let text = markdown("A study", &blocks());
        for part in ["# A study\n", "| [<udp\\|x>](#rows-size) |", "![throughput](p.svg)", "1 met."]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(text.contains("<a id=\"rows-size\"></a>"));
    }
}
