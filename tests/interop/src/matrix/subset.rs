//! The part of the matrix for each test run: few cells in which all pairs of properties occur.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::cell::{Cell, all};

/// The committed list, one name per line.
pub const LIST: &str = include_str!("../../subset.txt");

type Pair = (usize, String, usize, String);

/// The cells of the committed list. Error: a name on the list is not the name of a cell.
pub fn committed() -> Result<Vec<Cell>, String> {
    let cells = all();
    let find = |name: &str| {
        let cell = cells.iter().find(|cell| cell.name() == name);
        cell.copied().ok_or_else(|| format!("the subset names {name}, which is no cell"))
    };
    LIST.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(find).collect()
}

/// Pairs of properties that occur in the whole matrix and not in `cells`.
#[must_use]
pub fn missing(cells: &[Cell]) -> Vec<String> {
    let covered: BTreeSet<Pair> = cells.iter().flat_map(pairs).collect();
    let wanted: BTreeSet<Pair> = all().iter().flat_map(pairs).collect();
    wanted.difference(&covered).map(|(_, a, _, b)| format!("{a} with {b}")).collect()
}

/// A subset in which each pair of properties occurs. It always takes the cell with the most new
/// pairs next; of several, the one with the least used pairs.
#[must_use]
pub fn cover() -> Vec<Cell> {
    let mut left: Vec<(Cell, Vec<Pair>)> =
        all().into_iter().map(|cell| (cell, pairs(&cell))).collect();
    let mut wanted: BTreeSet<Pair> = left.iter().flat_map(|(_, pairs)| pairs.clone()).collect();
    let mut chosen: Vec<Cell> = Vec::new();
    let mut uses: BTreeMap<Pair, usize> = BTreeMap::new();
    while !wanted.is_empty() {
        let news = |pairs: &[Pair]| pairs.iter().filter(|pair| wanted.contains(*pair)).count();
        left.retain(|(_, pairs)| news(pairs) > 0);
        let used = |pairs: &[Pair]| -> usize {
            pairs.iter().map(|pair| uses.get(pair).copied().unwrap_or(0)).sum()
        };
        let best = left
            .iter()
            .enumerate()
            .max_by_key(|(at, (_, pairs))| (news(pairs), Reverse(used(pairs)), Reverse(*at)));
        let Some((at, _)) = best else { break };
        let (cell, pairs) = left.swap_remove(at);
        for pair in pairs {
            wanted.remove(&pair);
            *uses.entry(pair).or_default() += 1;
        }
        chosen.push(cell);
    }
    let order: Vec<String> = all().iter().map(Cell::name).collect();
    chosen.sort_by_key(|cell| order.iter().position(|name| *name == cell.name()));
    chosen
}

fn pairs(cell: &Cell) -> Vec<Pair> {
    let properties = cell.properties();
    let mut pairs = Vec::new();
    for (i, a) in properties.iter().enumerate() {
        for (j, b) in properties.iter().enumerate().skip(i + 1) {
            pairs.push((i, a.clone(), j, b.clone()));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_properties_occurs_in_the_committed_subset() {
        let subset = committed().unwrap();
        assert_eq!(missing(&subset), [""; 0], "cargo xtask interop --write-subset");
    }

    #[test]
    fn the_subset_names_no_cell_twice() {
        let names: BTreeSet<String> = committed().unwrap().iter().map(Cell::name).collect();
        assert_eq!(names.len(), committed().unwrap().len());
    }
}
