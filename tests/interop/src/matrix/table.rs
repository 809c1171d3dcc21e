//! The results of the cells, as a table.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::cell::Cell;

/// Counts by setting: rows are backend, link and address family, columns the requesting side.
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
        self.count(format!("{backend:<7} {link:<5} {family}"), requester, passed);
    }

    /// Adds a program's cell by its name; the requesting side is the client.
    pub fn add_program(&mut self, name: &str, passed: bool) {
        let mut parts = name.split("::");
        let program = parts.next().unwrap_or_default().to_owned();
        self.count(program, parts.next().unwrap_or_default().to_owned(), passed);
    }

    fn count(&mut self, row: String, requester: String, passed: bool) {
        let count = self.rows.entry(row).or_default().entry(requester).or_default();
        count.all += 1;
        count.passed += usize::from(passed);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        writeln!(f, "{:<28}   Rocinante asks   Soft-RoCE asks", "backend link  IP, or program")?;
        for (name, row) in &self.rows {
            let mut line = format!("{name:<28}");
            for requester in ["ours", "rxe"] {
                let Count { passed, all } = row.get(requester).copied().unwrap_or_default();
                let _ = write!(line, "{:>17}", format!("{passed} of {all}"));
            }
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
