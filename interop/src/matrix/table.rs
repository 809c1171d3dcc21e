//! What became of the cells, as a table.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::cell::Cell;

/// Counts by setting: rows are backend, link and address family, columns who asked.
#[derive(Debug, Default)]
pub struct Table {
    rows: BTreeMap<String, BTreeMap<String, Count>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    passed: usize,
    all: usize,
}

impl Table {
    /// Adds a cell.
    pub fn add(&mut self, cell: &Cell, passed: bool) {
        let [_, requester, backend, link, family, _] = cell.properties();
        let row = self.rows.entry(format!("{backend:<7} {link:<5} {family}")).or_default();
        let count = row.entry(requester).or_default();
        count.all += 1;
        count.passed += usize::from(passed);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        writeln!(f, "backend link  IP   Rocinante asks   Soft-RoCE asks")?;
        for (name, row) in &self.rows {
            let mut line = name.clone();
            for requester in ["ours", "rxe"] {
                let Count { passed, all } = row.get(requester).copied().unwrap_or_default();
                let _ = write!(line, "{:>17}", format!("{passed} of {all}"));
            }
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
