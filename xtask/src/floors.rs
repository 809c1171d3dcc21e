//! The direction of dependencies inside `stack`: modules are gathered in units, and a unit uses only
//! units that stand before it in the table.
//!
//! An arrow points from the module that names an item to the module that defines it, so that a
//! re-export on the way hides nothing. Methods are part of their type: an `impl` without a trait
//! counts as an arrow from the type's module to the module of the `impl`.
//!
//! Not seen: the expansion of another crate's macros, and calls through a trait, which are how a
//! lower unit may call a higher one.

mod arrows;
mod tables;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use self::arrows::{Arrows, Found};
use self::tree::Module;

/// A crate, and the floors that its modules are on.
struct Crate {
    /// The crate's directory, which names it in messages.
    name: &'static str,
    root: &'static str,
    /// From the lowest to the highest.
    units: &'static [Unit],
    /// Arrows against the table that are still there.
    known: &'static [Known],
}

/// A unit of a crate: modules that may use each other.
struct Unit {
    name: &'static str,
    /// The modules, with those below them, unless a longer path is another unit's. [`ROOT`] is the
    /// crate's root alone.
    modules: &'static [&'static str],
    /// The other units that its code may use. All of them stand before it.
    uses: &'static [&'static str],
    tests: Tests,
}

/// The units that the tests of a unit may use.
#[derive(PartialEq, Eq)]
enum Tests {
    /// All of the crate: tests often set up a whole device or engine.
    All,
    /// The same as its code.
    AsCode,
}

/// An arrow against the table, from a module to a module.
struct Known {
    from: &'static str,
    to: &'static str,
}

/// The crate's root, in [`Unit::modules`].
const ROOT: &str = "crate";

const CRATES: [&Crate; 1] = [&tables::STACK];

/// Checks the floors of each crate.
///
/// # Errors
/// The arrows that go up, circles between units, and differences from the table.
pub(crate) fn check() -> Result<(), String> {
    let mut wrong = Vec::new();
    for of in CRATES {
        let (modules, found) = read(of)?;
        wrong.extend(
            of.judge(&modules, &found).into_iter().map(|why| format!("{}: {why}", of.name)),
        );
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Prints the arrows between the units of each crate, and the modules in circles.
///
/// # Errors
/// A source cannot be read.
pub(crate) fn print() -> Result<(), String> {
    for of in CRATES {
        let (modules, found) = read(of)?;
        print!("{}", of.report(&modules, &found));
    }
    Ok(())
}

fn read(of: &Crate) -> Result<(Vec<Module>, Found), String> {
    let modules = tree::load(Path::new(of.root), &|path| fs::read_to_string(path).ok())?;
    let found = arrows::find(&modules);
    Ok((modules, found))
}

impl Crate {
    /// The unit of a module.
    fn unit_of(&self, module: &str) -> Option<usize> {
        let module = if module.is_empty() { ROOT } else { module };
        let length = |unit: &Unit| {
            let has = unit.modules.iter().filter(|above| is_in(module, above));
            has.map(|above| above.len()).max()
        };
        let lengths = self.units.iter().map(length).enumerate();
        let best = lengths.filter_map(|(unit, length)| Some((length?, unit))).max()?;
        Some(best.1)
    }

    /// The errors, in words.
    fn judge(&self, modules: &[Module], found: &Found) -> Vec<String> {
        let mut wrong = self.judge_table(modules);
        let (mut used, mut between) = (BTreeSet::new(), BTreeMap::new());
        for (is_test, arrows) in [(false, &found.of_code), (true, &found.of_tests)] {
            for (&(from, to), path) in arrows {
                let (from, to) = (modules[from].name.as_str(), modules[to].name.as_str());
                let (Some(above), Some(below)) = (self.unit_of(from), self.unit_of(to)) else {
                    continue;
                };
                let known = self.known.iter().position(|it| (it.from, it.to) == (from, to));
                if self.permits(above, below, is_test) {
                    if !is_test && above != below {
                        between.insert((above, below), ());
                    }
                } else if let Some(known) = known {
                    used.insert(known);
                } else {
                    let (above, below) = (self.units[above].name, self.units[below].name);
                    let tests = if is_test { "tests of " } else { "" };
                    wrong.push(format!(
                        "{tests}{} -> {} ({path}): {above} may not use {below}",
                        shown(from),
                        shown(to)
                    ));
                    if !is_test {
                        let at = |name| self.units.iter().position(|unit| unit.name == name);
                        between.extend(at(above).zip(at(below)).map(|arrow| (arrow, ())));
                    }
                }
            }
        }
        for circle in arrows::circles(self.units.len(), between.into_keys()) {
            let names: Vec<_> = circle.iter().map(|unit| self.units[*unit].name).collect();
            wrong.push(format!("a circle: {}", names.join(", ")));
        }
        let unused = (0..self.known.len()).filter(|known| !used.contains(known));
        wrong.extend(unused.map(|known| {
            let Known { from, to } = self.known[known];
            format!("the known arrow {from} -> {to} is gone: take it out of the table")
        }));
        wrong
    }

    fn permits(&self, above: usize, below: usize, is_test: bool) -> bool {
        let (unit, below_name) = (&self.units[above], self.units[below].name);
        above == below || unit.uses.contains(&below_name) || is_test && unit.tests == Tests::All
    }

    /// The errors of the table itself.
    fn judge_table(&self, modules: &[Module]) -> Vec<String> {
        let mut wrong = Vec::new();
        for module in modules {
            // One complaint for a module, and none for those below it.
            let above = &modules[module.parent].name;
            if self.unit_of(&module.name).is_none()
                && (above.is_empty() || self.unit_of(above).is_some())
            {
                wrong.push(format!(
                    "{} has no floor yet: place it in the table",
                    shown(&module.name)
                ));
            }
        }
        for (place, unit) in self.units.iter().enumerate() {
            for below in unit.uses {
                if !self.units[..place].iter().any(|unit| unit.name == *below) {
                    wrong.push(format!(
                        "{} uses {below}, which does not stand before it",
                        unit.name
                    ));
                }
            }
            for prefix in unit.modules {
                if *prefix != ROOT && !modules.iter().any(|module| module.name == *prefix) {
                    wrong.push(format!("{} has a module {prefix} that is not there", unit.name));
                }
            }
        }
        wrong
    }

    /// The arrows between units with their numbers, and the circles of modules.
    fn report(&self, modules: &[Module], found: &Found) -> String {
        let is_code = |module: &usize| !modules[*module].is_test;
        let count = (0..modules.len()).filter(is_code).count();
        let circles = arrows::circles(modules.len(), found.of_code.keys().copied());
        let in_circles: usize = circles.iter().map(Vec::len).sum();
        let up = self.against(modules, &found.of_code).len();
        let mut text = format!(
            "{}: {count} modules, {in_circles} in {} circles; {} arrows, {up} against the table\n",
            self.name,
            circles.len(),
            found.of_code.len()
        );
        let mut between = BTreeMap::<_, usize>::new();
        for (from, to) in found.of_code.keys() {
            let units = [from, to].map(|module| self.unit_of(&modules[*module].name));
            if let [Some(from), Some(to)] = units
                && from != to
            {
                *between.entry((from, to)).or_default() += 1;
            }
        }
        for ((from, to), arrows) in between {
            let mark = if self.permits(from, to, false) { "" } else { "  (against the table)" };
            let (from, to) = (self.units[from].name, self.units[to].name);
            let _ = writeln!(text, "  {from} -> {to}: {arrows}{mark}");
        }
        for circle in circles {
            let names: Vec<_> = circle.iter().map(|it| shown(&modules[*it].name)).collect();
            let _ = writeln!(text, "  circle of {}: {}", names.len(), names.join(", "));
        }
        text
    }

    /// The arrows of code against the table.
    fn against(&self, modules: &[Module], arrows: &Arrows) -> Vec<(usize, usize)> {
        let against = arrows.keys().filter(|(from, to)| {
            let units = [from, to].map(|module| self.unit_of(&modules[*module].name));
            matches!(units, [Some(from), Some(to)] if !self.permits(from, to, false))
        });
        against.copied().collect()
    }
}

fn is_in(module: &str, above: &str) -> bool {
    module.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn shown(module: &str) -> &str {
    if module.is_empty() { ROOT } else { module }
}
