//! The table in `docs/dropin.md`: the command's last results.

use crate::Outcome;
use crate::table::{NETDEVS, Row, rows};

/// Where the table begins and ends in the document.
const MARKS: [&str; 2] = ["<!-- table -->\n", "<!-- end of table -->\n"];

/// The document with the table of these outcomes. Error: the document has no marks.
pub fn with_table(document: &str, outcomes: &[Outcome]) -> Result<String, String> {
    let (before, rest) = document.split_once(MARKS[0]).ok_or("no mark of a table")?;
    let (_, after) = rest.split_once(MARKS[1]).ok_or("no mark of the table's end")?;
    Ok([before, MARKS[0], &table(outcomes), MARKS[1], after].concat())
}

/// The command lines of the document's table.
#[must_use]
pub fn listed(document: &str) -> Vec<String> {
    let table = document.split_once(MARKS[0]).map_or("", |(_, rest)| rest);
    let table = table.split_once(MARKS[1]).map_or("", |(table, _)| table);
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    rows.map(str::to_owned).collect()
}

/// The command lines of all rows, once each, in their order.
#[must_use]
pub fn commands() -> Vec<String> {
    let mut commands: Vec<String> = rows().iter().map(command).collect();
    commands.dedup();
    commands
}

fn command(row: &Row) -> String {
    format!("{} {}", row.program, row.mode).trim_end().to_owned()
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!("\n| program | {} |\n|---|---|---|---|\n", NETDEVS.join(" | "));
    for line in commands() {
        let of =
            |netdev| outcomes.iter().find(|o| command(&o.row) == line && o.row.netdev == netdev);
        let cells = NETDEVS.map(|netdev| match of(netdev).map(|outcome| &outcome.result) {
            Some(Ok(())) => "yes".into(),
            Some(Err(why)) => format!("no: {}", why.replace(['|', '<'], "/")),
            None => String::new(),
        });
        text += &format!("| `{line}` | {} |\n", cells.join(" | "));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_every_row() {
        let document = include_str!("../../../docs/dropin.md");
        assert_eq!(listed(document), commands(), "run `cargo xtask dropin --accept`");
    }

    #[test]
    fn a_table_says_what_works_and_why_not() {
        let row = |netdev| rows().into_iter().find(|row| row.netdev == netdev).unwrap();
        let outcomes = [
            Outcome { row: row("udp"), result: Ok(()) },
            Outcome { row: row("afxdp"), result: Err("a | b".into()) },
        ];
        let document = with_table("a\n<!-- table -->\nold\n<!-- end of table -->\nz\n", &outcomes);
        let document = document.unwrap();
        assert!(document.starts_with("a\n<!-- table -->\n\n| program |"), "{document}");
        assert!(document.ends_with("<!-- end of table -->\nz\n"), "{document}");
        assert!(document.contains("| `ibv_devices` | yes |  |  |\n"), "{document}");
        assert!(document.contains(" |  | no: a / b |\n"), "{document}");
        assert_eq!(listed(&document), commands());
    }
}
