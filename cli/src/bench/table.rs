//! Rows as a table, for people.

use std::fmt::Write as _;

use super::rows::Row;
use crate::output::digits;

/// A Markdown table of `rows`.
pub(super) fn markdown(rows: &[Row]) -> String {
    let mut out = String::from(
        "| measure | netdev | size, B | MTU | QPs | median | min | max | unit | ceiling | ratio |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { key, value, min, max, unit, ceiling, ratio, .. } = row;
        let [value, min, max] = [*value, *min, *max].map(digits);
        let [ceiling, ratio] =
            [ceiling, ratio].map(|value| value.map_or_else(|| "–".to_owned(), digits));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {value} | {min} | {max} | {unit} | {ceiling} | {ratio} |",
            key.measure, key.netdev, key.size, key.mtu, key.qps
        );
    }
    if rows.iter().any(|row| !row.valid) {
        out.push_str("\nNo run was valid: a ceiling was below 2.5 times one iperf3 stream.\n");
    }
    out
}
