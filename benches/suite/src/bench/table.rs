//! Rows as a table.

use std::fmt::Write as _;

use super::rows::Row;
use rocinante_cli::output::digits;

/// A Markdown table of `rows`, followed by `caution` if it is not empty.
pub(super) fn markdown(rows: &[Row], caution: &str) -> String {
    let mut out = String::from(
        "| measure | netdev | size, B | MTU | QPs | median | min | max | unit | baseline | ratio | valid |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { key, value, min, max, unit, baseline, ratio, valid, .. } = row;
        let [value, min, max] = [*value, *min, *max].map(digits);
        let [baseline, ratio] =
            [baseline, ratio].map(|value| value.map_or_else(|| "–".to_owned(), digits));
        let valid = match valid {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "–",
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {value} | {min} | {max} | {unit} | {baseline} | {ratio} | {valid} |",
            key.measure,
            key.name(),
            key.size,
            key.mtu,
            key.qps
        );
    }
    if !caution.is_empty() {
        let _ = write!(out, "\n{caution}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::Key;
    use crate::workers::{Link, Measure};

    #[test]
    fn rows_say_whether_they_are_valid() {
        let key = Key {
            measure: Measure::WriteRate,
            netdev: "udp",
            size: 64,
            mtu: 4096,
            qps: 1,
            link: Link::Plain,
            tcp: None,
        };
        let row = |valid| Row {
            key,
            posting: None,
            value: 2.0,
            min: 1.0,
            max: 3.0,
            unit: "Mop/s",
            baseline: None,
            ratio: None,
            samples: 3,
            valid,
        };
        let table = markdown(&[row(Some(true)), row(Some(false)), row(None)], "Beware.\n");
        let last = |line: &str| line.rsplit('|').nth(1).map(|cell| cell.trim().to_owned());
        let cells: Vec<_> = table.lines().skip(2).take(3).filter_map(last).collect();
        assert_eq!(cells, ["yes", "**no**", "–"]);
        assert!(table.ends_with("\n\nBeware.\n"), "{table}");
        let columns: Vec<usize> =
            table.lines().take(5).map(|line| line.matches('|').count()).collect();
        assert_eq!(columns, [13; 5], "{table}");
    }
}
