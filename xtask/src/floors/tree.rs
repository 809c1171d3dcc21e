//! The modules of a crate: the items that each defines, its imports, and the paths that it names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use syn::buffer::{Cursor, TokenBuffer};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, Token, UseTree, Visibility};

/// A module.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Its path below the crate's root, such as `soft::core`; empty for the root.
    pub(super) name: String,
    /// The root is its own parent.
    pub(super) parent: usize,
    /// Whether only tests compile it.
    pub(super) is_test: bool,
    /// By name, in every namespace.
    pub(super) entries: BTreeMap<String, Vec<Entry>>,
    pub(super) globs: Vec<Glob>,
    pub(super) mentions: Vec<Mention>,
    /// The types that have an `impl` without a trait here.
    pub(super) extended: Vec<Mention>,
}

/// The meaning of a name in a module.
#[derive(Debug)]
pub(super) enum Entry {
    Module(usize),
    /// An item that this module defines.
    Defined(Kind),
    Import(Route),
    /// Another crate.
    Foreign,
}

/// The kind of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Type,
    Trait,
    /// A function, a constant or a macro: no path goes on behind its name.
    Value,
}

/// `use path::*`.
#[derive(Debug)]
pub(super) struct Glob {
    pub(super) route: Route,
    /// Whether other modules see the names.
    pub(super) exports: bool,
    pub(super) is_test: bool,
}

/// A path that the code names.
#[derive(Debug)]
pub(super) struct Mention {
    pub(super) route: Route,
    pub(super) is_test: bool,
}

/// The names of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) names: Vec<String>,
    /// Whether it begins with `::`, so that its first name is a crate.
    pub(super) is_foreign: bool,
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.names.join("::"))
    }
}

/// Reads a crate from the file of its root. `read` returns the text of a file, if there is one.
///
/// # Errors
/// A file is missing, or is not Rust.
pub(super) fn load(
    root: &Path,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Result<Vec<Module>, String> {
    let mut loader = Loader { read, modules: vec![Module::default()] };
    loader.file(0, root, true)?;
    Ok(loader.modules)
}

struct Loader<'a> {
    read: &'a dyn Fn(&Path) -> Option<String>,
    modules: Vec<Module>,
}

/// Where the files of a module's children are.
struct Place {
    /// The directory that `#[path]` starts from.
    attributes: PathBuf,
    /// The directory of other children.
    children: PathBuf,
}

impl Loader<'_> {
    /// Reads the file of a module. The children of a root, of a `mod.rs` and of a file of `#[path]`
    /// are beside it (`owns_directory`); those of another file are in a directory of its name.
    fn file(&mut self, at: usize, file: &Path, owns_directory: bool) -> Result<(), String> {
        let shown = file.display();
        let text = (self.read)(file).ok_or_else(|| format!("{shown}: there is no such file"))?;
        let source = syn::parse_file(&text).map_err(|error| format!("{shown}: {error}"))?;
        let directory = file.parent().unwrap_or(Path::new("")).to_path_buf();
        let children = if owns_directory { directory.clone() } else { file.with_extension("") };
        self.items(at, &source.items, &Place { attributes: directory, children })
    }

    fn items(&mut self, at: usize, items: &[Item], place: &Place) -> Result<(), String> {
        for item in items {
            match item {
                Item::Mod(module) => self.module(at, module, place)?,
                other => {
                    let is_test = self.modules[at].is_test || is_for_tests(attributes(other));
                    self.define(at, other);
                    let mut reader = Reader { module: &mut self.modules[at], is_test };
                    reader.visit_item(other);
                }
            }
        }
        Ok(())
    }

    fn module(&mut self, at: usize, item: &syn::ItemMod, place: &Place) -> Result<(), String> {
        let name = item.ident.to_string();
        let is_test = self.modules[at].is_test || is_for_tests(&item.attrs);
        let child = self.child(at, &name, is_test);
        if let Some((_, items)) = &item.content {
            let directory = place.children.join(&name);
            let place = Place { attributes: directory.clone(), children: directory };
            return self.items(child, items, &place);
        }
        if let Some(path) = path_attribute(&item.attrs) {
            return self.file(child, &place.attributes.join(path), true);
        }
        let own_file = place.children.join(format!("{name}.rs"));
        if (self.read)(&own_file).is_some() {
            return self.file(child, &own_file, false);
        }
        self.file(child, &place.children.join(name).join("mod.rs"), true)
    }

    /// The child of that name: one for two declarations under opposite conditions.
    fn child(&mut self, at: usize, name: &str, is_test: bool) -> usize {
        let entries = self.modules[at].entries.entry(name.to_owned()).or_default();
        let known = entries.iter().find_map(|entry| match entry {
            Entry::Module(child) => Some(*child),
            _ => None,
        });
        if let Some(child) = known {
            self.modules[child].is_test &= is_test;
            return child;
        }
        let child = self.modules.len();
        self.modules[at].entries.entry(name.to_owned()).or_default().push(Entry::Module(child));
        let above = &self.modules[at].name;
        let name = if above.is_empty() { name.to_owned() } else { format!("{above}::{name}") };
        self.modules.push(Module { name, parent: at, is_test, ..Module::default() });
        child
    }

    /// Notes the names that an item defines. A [`Reader`] notes imports.
    fn define(&mut self, at: usize, item: &Item) {
        let (name, kind) = match item {
            Item::Struct(it) => (&it.ident, Kind::Type),
            Item::Enum(it) => (&it.ident, Kind::Type),
            Item::Union(it) => (&it.ident, Kind::Type),
            Item::Type(it) => (&it.ident, Kind::Type),
            Item::Trait(it) => (&it.ident, Kind::Trait),
            Item::TraitAlias(it) => (&it.ident, Kind::Trait),
            Item::Fn(it) => (&it.sig.ident, Kind::Value),
            Item::Const(it) => (&it.ident, Kind::Value),
            Item::Static(it) => (&it.ident, Kind::Value),
            Item::Macro(it) => match &it.ident {
                Some(name) => {
                    if it.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
                        self.export_macro(at, &name.to_string());
                    }
                    (name, Kind::Value)
                }
                None => return,
            },
            Item::ExternCrate(it) => {
                let name = it.rename.as_ref().map_or(&it.ident, |(_, name)| name);
                self.modules[at].note(&name.to_string(), Entry::Foreign);
                return;
            }
            _ => return,
        };
        self.modules[at].note(&name.to_string(), Entry::Defined(kind));
    }

    /// An exported macro is an item of the crate's root by its path.
    fn export_macro(&mut self, at: usize, name: &str) {
        if at != 0 {
            let route = format!("crate::{}::{name}", self.modules[at].name);
            let names = route.split("::").map(str::to_owned).collect();
            let route = Route { names, is_foreign: false };
            self.modules[0].note(name, Entry::Import(route));
        }
    }
}

impl Module {
    fn note(&mut self, name: &str, entry: Entry) {
        self.entries.entry(name.to_owned()).or_default().push(entry);
    }
}

/// Notes the imports and names of an item.
struct Reader<'a> {
    module: &'a mut Module,
    is_test: bool,
}

impl Reader<'_> {
    fn mention(&mut self, route: Route) {
        self.module.mentions.push(Mention { route, is_test: self.is_test });
    }

    /// Visits something that attributes may reserve for tests.
    fn under(&mut self, attributes: &[Attribute], visit: impl FnOnce(&mut Self)) {
        let outside = self.is_test;
        self.is_test |= is_for_tests(attributes);
        visit(self);
        self.is_test = outside;
    }

    fn import(&mut self, tree: &UseTree, above: &Route, exports: bool) {
        let with = |name: &syn::Ident| {
            let mut route = above.clone();
            // `use a::{self}` imports `a`.
            if name != "self" || route.names.is_empty() {
                route.names.push(name.to_string());
            }
            route
        };
        match tree {
            UseTree::Path(it) => self.import(&it.tree, &with(&it.ident), exports),
            UseTree::Group(it) => {
                it.items.iter().for_each(|tree| self.import(tree, above, exports));
            }
            UseTree::Glob(_) => {
                let is_test = self.is_test;
                self.module.globs.push(Glob { route: above.clone(), exports, is_test });
            }
            UseTree::Name(it) => {
                let route = with(&it.ident);
                let name = route.names.last().cloned().unwrap_or_default();
                self.import_as(&name, route);
            }
            UseTree::Rename(it) => self.import_as(&it.rename.to_string(), with(&it.ident)),
        }
    }

    fn import_as(&mut self, name: &str, route: Route) {
        self.mention(route.clone());
        if name != "_" {
            self.module.note(name, Entry::Import(route));
        }
    }

    /// The paths among the tokens of a macro's arguments or rules.
    fn tokens(&mut self, mut rest: Cursor<'_>) {
        // The token before the current one: a dot makes a name a field or a method.
        let (mut after_dot, mut after_colons) = (false, false);
        loop {
            if let Some((inner, _, _, next)) = rest.any_group() {
                self.tokens(inner);
                (rest, after_dot, after_colons) = (next, false, false);
            } else if let Some((_, next)) = rest.lifetime() {
                (rest, after_dot, after_colons) = (next, false, false);
            } else if let Some((name, next)) = rest.ident() {
                let mut names = vec![name.to_string()];
                rest = next;
                while let Some((name, next)) = colons(rest).and_then(Cursor::ident) {
                    names.push(name.to_string());
                    rest = next;
                }
                if names == ["pub"] {
                    rest = after_scope(rest).unwrap_or(rest);
                } else if !after_dot {
                    self.mention(Route { names, is_foreign: after_colons });
                }
                (after_dot, after_colons) = (false, false);
            } else if let Some(next) = colons(rest) {
                (rest, after_dot, after_colons) = (next, false, true);
            } else if let Some((punct, next)) = rest.punct() {
                (rest, after_dot, after_colons) = (next, punct.as_char() == '.', false);
            } else if let Some((_, next)) = rest.token_tree() {
                (rest, after_dot, after_colons) = (next, false, false);
            } else {
                return;
            }
        }
    }
}

/// The tokens behind the scope of a `pub`, `(in path)` or `(crate)`, if that is next: it names only
/// modules above.
fn after_scope(rest: Cursor<'_>) -> Option<Cursor<'_>> {
    let (inner, _, _, next) = rest.any_group()?;
    let (name, after) = inner.ident()?;
    (name == "in" || after.eof()).then_some(next)
}

/// The tokens behind `::`, if that is next.
fn colons(rest: Cursor<'_>) -> Option<Cursor<'_>> {
    let (first, rest) = rest.punct()?;
    let (second, rest) = rest.punct()?;
    (first.as_char() == ':' && second.as_char() == ':').then_some(rest)
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        self.under(attributes(item), |reader| visit::visit_item(reader, item));
    }

    fn visit_impl_item(&mut self, item: &'a syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(it) => &it.attrs[..],
            syn::ImplItem::Fn(it) => &it.attrs,
            syn::ImplItem::Type(it) => &it.attrs,
            syn::ImplItem::Macro(it) => &it.attrs,
            _ => &[],
        };
        self.under(attributes, |reader| visit::visit_impl_item(reader, item));
    }

    fn visit_field(&mut self, field: &'a syn::Field) {
        self.under(&field.attrs, |reader| visit::visit_field(reader, field));
    }

    fn visit_variant(&mut self, variant: &'a syn::Variant) {
        self.under(&variant.attrs, |reader| visit::visit_variant(reader, variant));
    }

    fn visit_arm(&mut self, arm: &'a syn::Arm) {
        self.under(&arm.attrs, |reader| visit::visit_arm(reader, arm));
    }

    fn visit_local(&mut self, local: &'a syn::Local) {
        self.under(&local.attrs, |reader| visit::visit_local(reader, local));
    }

    fn visit_expr_block(&mut self, block: &'a syn::ExprBlock) {
        self.under(&block.attrs, |reader| visit::visit_expr_block(reader, block));
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty) {
            let mention = Mention { route: route(&of.path), is_test: self.is_test };
            self.module.extended.push(mention);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        let above = Route { names: Vec::new(), is_foreign: item.leading_colon.is_some() };
        self.import(&item.tree, &above, !matches!(item.vis, Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.mention(route(path));
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'a syn::Macro) {
        self.visit_path(&called.path);
        self.tokens(TokenBuffer::new2(called.tokens.clone()).begin());
    }

    /// `pub(in path)` names only modules above.
    fn visit_visibility(&mut self, _: &'a Visibility) {}

    fn visit_attribute(&mut self, _: &'a Attribute) {}
}

fn route(path: &syn::Path) -> Route {
    let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    Route { names, is_foreign: path.leading_colon.is_some() }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::ExternCrate(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::ForeignMod(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::TraitAlias(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Union(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(it) if it.path.is_ident("path") => match &it.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

/// Whether only tests have this: `#[test]`, or a `#[cfg]` that holds in tests alone.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute.parse_args::<Meta>().is_ok_and(|condition| needs_test(&condition))
    })
}

/// Whether a condition of `#[cfg]` implies that this is a test.
fn needs_test(condition: &Meta) -> bool {
    let parts = |list: &syn::MetaList| {
        let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
        parts.map(|parts| parts.into_iter().collect::<Vec<_>>()).unwrap_or_default()
    };
    match condition {
        Meta::Path(path) => path.is_ident("test") || path.is_ident("doctest"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().any(needs_test),
        Meta::List(list) if list.path.is_ident("any") => {
            let parts = parts(list);
            !parts.is_empty() && parts.iter().all(needs_test)
        }
        _ => false,
    }
}
