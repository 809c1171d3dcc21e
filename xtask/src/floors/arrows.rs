//! The arrows between the modules of a crate: from the module that names an item to the module that
//! defines it, by any path.

use std::collections::{BTreeMap, BTreeSet};

use super::tree::{Entry, Kind, Module, Route};

/// An arrow between two modules, by their indices, and a path that makes it.
pub(super) type Arrows = BTreeMap<(usize, usize), String>;

/// The arrows of a crate.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) of_code: Arrows,
    /// Those that only tests make.
    pub(super) of_tests: Arrows,
}

/// The end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Module(usize),
    /// An item of this module.
    Item(usize, Kind),
}

impl End {
    fn module(self) -> usize {
        let (Self::Module(module) | Self::Item(module, _)) = self;
        module
    }
}

/// Resolves each path of each module.
pub(super) fn find(modules: &[Module]) -> Found {
    let paths = Paths { modules };
    let mut found = Found::default();
    for (from, module) in modules.iter().enumerate() {
        for mention in &module.mentions {
            for end in paths.ends(from, &mention.route) {
                found.add(mention.is_test, (from, end.module()), mention.route.to_string());
            }
        }
        for glob in &module.globs {
            for to in paths.definers_of_glob(from, &glob.route, glob.exports) {
                found.add(glob.is_test, (from, to), glob.route.to_string());
            }
        }
        // Methods are part of their type: a call of one names the type alone.
        for mention in &module.extended {
            for end in paths.ends(from, &mention.route) {
                let by = format!("impl {}", mention.route);
                found.add(mention.is_test, (end.module(), from), by);
            }
        }
    }
    let of_code = &found.of_code;
    found.of_tests.retain(|arrow, _| !of_code.contains_key(arrow));
    found
}

impl Found {
    fn add(&mut self, is_test: bool, arrow: (usize, usize), by: String) {
        if arrow.0 != arrow.1 {
            let arrows = if is_test { &mut self.of_tests } else { &mut self.of_code };
            arrows.entry(arrow).or_insert(by);
        }
    }
}

/// Finds the items that paths lead to.
struct Paths<'a> {
    modules: &'a [Module],
}

/// The imports that are being followed: module, name, and the import's place. An import may name
/// itself, such as `use error::error`.
type Trail = Vec<(usize, String, usize)>;

impl Paths<'_> {
    fn ends(&self, from: usize, route: &Route) -> BTreeSet<End> {
        self.follow(from, route, &mut Trail::new())
    }

    fn follow(&self, from: usize, route: &Route, trail: &mut Trail) -> BTreeSet<End> {
        let Some((first, rest)) = route.names.split_first().filter(|_| !route.is_foreign) else {
            return BTreeSet::new();
        };
        let mut ends = match first.as_str() {
            "crate" => BTreeSet::from([End::Module(0)]),
            "self" => BTreeSet::from([End::Module(from)]),
            "super" => BTreeSet::from([End::Module(self.modules[from].parent)]),
            // Variables, parameters, other crates and the prelude are none of ours.
            name => self.member(from, name, !rest.is_empty(), trail).unwrap_or_default(),
        };
        for (at, name) in rest.iter().enumerate() {
            let goes_on = at + 1 < rest.len();
            ends = ends.into_iter().flat_map(|end| self.step(end, name, goes_on, trail)).collect();
        }
        ends
    }

    fn step(&self, end: End, name: &str, goes_on: bool, trail: &mut Trail) -> BTreeSet<End> {
        match end {
            End::Module(module) if name == "super" => {
                BTreeSet::from([End::Module(self.modules[module].parent)])
            }
            // A macro made a module's name that has no visible definition.
            End::Module(module) => self
                .member(module, name, goes_on, trail)
                .unwrap_or_else(|| BTreeSet::from([End::Item(module, Kind::Value)])),
            // An associated item, or a variant.
            item @ End::Item(..) => BTreeSet::from([item]),
        }
    }

    /// The meanings of a name in a module; `None` if it has none. `goes_on` if it is not the last
    /// of its path.
    fn member(
        &self,
        module: usize,
        name: &str,
        goes_on: bool,
        trail: &mut Trail,
    ) -> Option<BTreeSet<End>> {
        let mut meanings = None;
        let entries = self.modules[module].entries.get(name).map_or(&[][..], Vec::as_slice);
        for (place, entry) in entries.iter().enumerate() {
            match entry {
                Entry::Defined(Kind::Value) if goes_on => {}
                Entry::Defined(kind) => add(&mut meanings, [End::Item(module, *kind)]),
                Entry::Module(child) => add(&mut meanings, [End::Module(*child)]),
                Entry::Foreign => add(&mut meanings, []),
                Entry::Import(route) => {
                    let step = (module, name.to_owned(), place);
                    if !trail.contains(&step) {
                        trail.push(step);
                        add(&mut meanings, self.follow(module, route, trail));
                        trail.pop();
                    }
                }
            }
        }
        meanings.or_else(|| self.member_of_globs(module, name, goes_on, trail))
    }

    fn member_of_globs(
        &self,
        module: usize,
        name: &str,
        goes_on: bool,
        trail: &mut Trail,
    ) -> Option<BTreeSet<End>> {
        let mut meanings = None;
        for (place, glob) in self.modules[module].globs.iter().enumerate() {
            let step = (module, format!("{name}*"), place);
            if trail.contains(&step) {
                continue;
            }
            trail.push(step);
            for end in self.follow(module, &glob.route, trail) {
                if let End::Module(of) = end
                    && of != module
                    && let Some(ends) = self.member(of, name, goes_on, trail)
                {
                    add(&mut meanings, ends);
                }
            }
            trail.pop();
        }
        meanings
    }

    /// The modules that a glob import brings names from without naming them: traits, and all that
    /// it exports. The names that the code uses through it are found where they are used.
    fn definers_of_glob(&self, from: usize, route: &Route, exports: bool) -> BTreeSet<usize> {
        let mut definers = BTreeSet::new();
        for end in self.ends(from, route) {
            let End::Module(of) = end else {
                definers.insert(end.module());
                continue;
            };
            let names = self.modules[of].entries.keys();
            let members = names.filter_map(|name| self.member(of, name, false, &mut Trail::new()));
            for member in members.flatten() {
                if exports || matches!(member, End::Item(_, Kind::Trait)) {
                    definers.insert(member.module());
                }
            }
        }
        definers
    }
}

fn add(meanings: &mut Option<BTreeSet<End>>, more: impl IntoIterator<Item = End>) {
    meanings.get_or_insert_default().extend(more);
}

/// The groups of nodes that can reach each other, of two or more.
pub(super) fn circles(
    count: usize,
    arrows: impl Iterator<Item = (usize, usize)>,
) -> Vec<Vec<usize>> {
    let mut reaches = vec![vec![false; count]; count];
    arrows.for_each(|(from, to)| reaches[from][to] = true);
    for over in 0..count {
        let beyond = reaches[over].clone();
        for from in reaches.iter_mut().filter(|from| from[over]) {
            from.iter_mut().zip(&beyond).for_each(|(to, more)| *to |= more);
        }
    }
    let circle = |(node, reached): (usize, &Vec<bool>)| {
        let mates = (0..count).filter(|mate| reached[*mate] && reaches[*mate][node]);
        let circle: Vec<usize> = mates.collect();
        (circle.len() > 1 && circle[0] == node).then_some(circle)
    };
    reaches.iter().enumerate().filter_map(circle).collect()
}
