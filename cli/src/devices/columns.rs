//! Rows whose cells stand below each other.

use std::fmt;

/// Rows of cells. Columns are as wide as their widest cell; the last one is not filled up.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    rows: Vec<Vec<String>>,
    /// Columns from this one on are aligned right, but for the last.
    numbers_from: usize,
    /// The least widths.
    least: Vec<usize>,
}

impl Columns {
    /// Rows of text.
    pub(crate) fn of_text() -> Self {
        Self { numbers_from: usize::MAX, ..Self::default() }
    }

    /// Rows that begin with text, and go on with numbers below a head.
    pub(crate) fn of_numbers(head: &[&str]) -> Self {
        let rows = vec![head.iter().map(|&word| word.to_owned()).collect()];
        Self { rows, numbers_from: 1, least: Vec::new() }
    }

    pub(crate) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Has columns at least as wide as these.
    pub(crate) fn at_least(&mut self, widths: &[usize]) {
        widths.clone_into(&mut self.least);
    }

    /// The widths of the columns.
    pub(crate) fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(self.least.get(column).copied().unwrap_or(0))
        };
        (0..columns).map(width).collect()
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let columns = widths.len();
        for (n, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths[column];
                if column >= self.numbers_from && column + 1 < columns {
                    line.push_str(&format!("{cell:>width$}  "));
                } else {
                    line.push_str(&format!("{cell:<width$}  "));
                }
            }
            f.write_str(if n == 0 { "" } else { "\n" })?;
            f.write_str(line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_below_each_other() {
        let mut rows = Columns::of_numbers(&["name", "count", "note"]);
        rows.push(["lo", "12345678", "a b"].map(str::to_owned).to_vec());
        rows.push(["eth0", "1", ""].map(str::to_owned).to_vec());
        assert_eq!(rows.to_string(), "name     count  note\nlo    12345678  a b\neth0         1");
    }
}
