use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::*;

/// Two floors, and the root.
const HOUSE: Crate = Crate {
    name: "house",
    root: "src/lib.rs",
    units: &[
        Unit { name: "low", modules: &["low"], uses: &[], tests: Tests::All },
        Unit { name: "strict", modules: &["low::strict"], uses: &[], tests: Tests::AsCode },
        Unit { name: "high", modules: &["high"], uses: &["low"], tests: Tests::All },
        Unit { name: "root", modules: &[ROOT], uses: &["low", "high"], tests: Tests::All },
    ],
    known: &[],
};

/// The crate of these files, of which the first is its root.
fn house(files: &[(&str, &str)]) -> (Vec<Module>, Found) {
    let files: BTreeMap<PathBuf, &str> =
        files.iter().map(|(name, text)| (Path::new("src").join(name), *text)).collect();
    let read = |path: &Path| files.get(path).map(|text| (*text).to_owned());
    let modules = tree::load(Path::new(HOUSE.root), &read).unwrap();
    let found = arrows::find(&modules);
    (modules, found)
}

/// The errors of a house of two floors and a strict room.
fn judged(low: &str, high: &str) -> Vec<String> {
    let low = format!("pub mod strict {{}} {low}");
    let root = "pub mod low; pub mod high;";
    let (modules, found) = house(&[("lib.rs", root), ("low.rs", &low), ("high.rs", high)]);
    HOUSE.judge(&modules, &found)
}

const HIGH: &str =
    "pub struct High; pub trait Climb {} pub fn climb() {} pub mod top { pub struct Top; }";

/// The arrow from `low` to `high` by each of these, and nothing else.
#[track_caller]
fn goes_up(low: &str) {
    let wrong = judged(low, HIGH);
    assert_eq!(wrong.len(), 1, "{low}: {wrong:?}");
    assert!(wrong[0].starts_with("low -> high"), "{low}: {wrong:?}");
    assert!(wrong[0].ends_with("low may not use high"), "{low}: {wrong:?}");
}

#[track_caller]
fn is_right(low: &str, high: &str) {
    assert_eq!(judged(low, high), [""; 0], "{low} | {high}");
}

#[test]
fn an_arrow_down_is_right() {
    is_right("pub struct Low;", "use crate::low::Low; pub struct High(Low);");
    is_right("pub struct Low;", "use super::low; pub struct High(low::Low);");
}

#[test]
fn an_arrow_up_is_reported() {
    for low in [
        "use crate::high::High;",
        "use crate::{high::High};",
        "use super::high;",
        "use crate::high::High as Low;",
        "use crate::high::Climb as _;",
        "fn f() { use crate::high::climb; }",
        "pub struct Low(crate::high::High);",
        "fn f(_: Vec<Option<&crate::high::High>>) {}",
        "fn f() { super::high::climb(); }",
        "fn f() -> impl crate::high::Climb {}",
        "impl crate::high::Climb for () {}",
        "fn f() { assert!(x == crate::high::High); }",
        "fn f() { assert!([(1, crate::high::climb())].is_empty()); }",
        "macro_rules! climb { () => { $crate::high::climb() } }",
        "low! { pub struct Low(pub (crate::high::High, u8)); }",
        "fn f(x: u8) { match x { crate::high::High => {} _ => {} } }",
    ] {
        goes_up(low);
    }
}

#[test]
fn a_renamed_import_leads_where_the_item_is() {
    let low = "use crate::high as attic; fn f() { attic::climb(); }";
    let wrong = judged(low, HIGH);
    assert_eq!(wrong, ["low -> high (crate::high): low may not use high"]);
    let low = "mod a { pub use crate::high::High as Tall; } use self::a::Tall;";
    assert_eq!(
        judged(low, HIGH),
        [
            "low -> high (self::a::Tall): low may not use high",
            "low::a -> high (crate::high::High): low may not use high",
        ]
    );
    let high = "pub use crate::low as cellar; use cellar::Low as Deep; pub struct High(Deep);";
    is_right("pub struct Low;", high);
}

#[test]
fn a_re_export_does_not_hide_the_definer() {
    // `low` takes an item of `high` from `low::strict`: both of them go up.
    let files = [
        ("lib.rs", "pub mod low; pub mod high; pub use low::strict::High;"),
        ("low.rs", "pub mod strict; use self::strict::High; use crate::High as Again;"),
        ("low/strict.rs", "pub use crate::high::High;"),
        ("high.rs", "pub struct High;"),
    ];
    let (modules, found) = house(&files);
    let wrong = HOUSE.judge(&modules, &found);
    assert_eq!(
        wrong,
        [
            "low -> high (self::strict::High): low may not use high",
            "low::strict -> high (crate::high::High): strict may not use high",
        ]
    );
    // And `high` may take an item of `low` from anywhere.
    let high = "pub mod prelude { pub use crate::low::Low; } use prelude::Low; struct High(Low);";
    is_right("pub struct Low;", high);
}

#[test]
fn a_glob_import_leads_to_the_items_that_are_used() {
    goes_up("use crate::high::*; fn f(_: High) {}");
    goes_up("use crate::high::*; fn f() { println!(\"{:?}\", climb()); }");
    goes_up("use super::high::*;"); // Its trait.
    let wrong = judged("pub use crate::high::*;", HIGH);
    assert_eq!(
        wrong,
        [
            "low -> high (crate::high): low may not use high",
            "low -> high::top (crate::high): low may not use high",
        ]
    );
    is_right("use crate::high::*; pub struct Low; fn f(_: Low) {}", "pub struct High;");
    let wrong =
        judged("mod below { use super::*; fn f(_: top::Top) {} } use crate::high::top;", HIGH);
    assert_eq!(
        wrong,
        [
            "low -> high::top (crate::high::top): low may not use high",
            "low::below -> high::top (top::Top): low may not use high",
        ]
    );
}

#[test]
fn the_paths_of_a_macro_end_where_they_end() {
    let wrong = judged("use crate::high::*; low! { f: &climb }", "pub fn climb() {}");
    assert_eq!(wrong, ["low -> high (climb): low may not use high"]);
}

#[test]
fn a_function_with_the_name_of_a_module_is_no_part_of_a_path() {
    let root = "pub fn low() {} pub mod low { pub mod strict {} fn f() { crate::low::f() } }
        pub mod high {}";
    let (modules, found) = house(&[("lib.rs", root)]);
    assert_eq!(HOUSE.judge(&modules, &found), [""; 0]);
}

#[test]
fn variables_other_crates_and_modules_of_other_crates_are_none_of_ours() {
    is_right("use std::sync::Arc; fn f(high: u8) -> u8 { high }", HIGH);
    is_right("use ::high::High; fn f() { ::high::climb(); }", HIGH);
    is_right("extern crate other as high; use self::high::High;", HIGH);
    is_right("fn f() { x.high::<u8>(); assert!(x.high == 1); }", HIGH);
    is_right("pub(in crate::low) struct Low;", HIGH);
    is_right("macro_rules! low { () => { pub(in crate::high) struct Low; } }", HIGH);
    is_right("low! { pub(crate) struct Low(pub(super) u8); }", HIGH);
}

#[test]
fn a_method_is_where_its_impl_is() {
    let wrong = judged("pub struct Low;", "impl crate::low::Low { pub fn climb(&self) {} }");
    assert_eq!(
        wrong,
        ["low -> high (impl crate::low::Low): low may not use high", "a circle: low, high"]
    );
    is_right("pub struct Low; pub trait Go {}", "use crate::low::{Go, Low}; impl Go for Low {}");
}

#[test]
fn a_circle_is_reported() {
    let wrong =
        judged("pub struct Low(crate::high::High);", "pub struct High(*const crate::low::Low);");
    assert_eq!(
        wrong,
        ["low -> high (crate::high::High): low may not use high", "a circle: low, high"]
    );
}

#[test]
fn tests_may_look_up_unless_the_table_says_otherwise() {
    for low in [
        "#[cfg(test)] mod tests { use crate::high::High; }",
        "#[cfg(all(test, not(miri)))] use crate::high::High;",
        "#[cfg(test)] fn f() { crate::high::climb(); }",
        "impl Low { #[cfg(test)] fn f() { crate::high::climb(); } } struct Low;",
        "struct Low { #[cfg(test)] high: crate::high::High }",
        "fn f() { #[cfg(test)] let x = crate::high::climb(); }",
        "mod inner { #[cfg(test)] mod tests { use super::super::super::high::High; } }",
    ] {
        is_right(low, HIGH);
    }
    for low in [
        "#[cfg(not(test))] use crate::high::High;",
        "#[cfg(any(test, loom))] use crate::high::High;",
        "#[cfg(test)] mod tests {} use crate::high::High;",
    ] {
        goes_up(low);
    }
    let two = "#[cfg(test)] mod a {} #[cfg(not(test))] mod a { use crate::high::High; }";
    let wrong = judged(two, HIGH);
    assert_eq!(wrong, ["low::a -> high (crate::high::High): low may not use high"]);
    let files = [
        ("lib.rs", "pub mod low; pub mod high;"),
        ("low.rs", "pub mod strict; #[cfg(test)] mod low_tests;"),
        ("low/low_tests.rs", "use crate::high::High;"),
        ("low/strict.rs", "#[cfg(test)] mod tests { use crate::high::High; }"),
        ("high.rs", "pub struct High;"),
    ];
    let (modules, found) = house(&files);
    assert_eq!(
        HOUSE.judge(&modules, &found),
        ["tests of low::strict::tests -> high (crate::high::High): strict may not use high"]
    );
}

#[test]
fn files_are_found_as_the_compiler_finds_them() {
    let files = [
        ("lib.rs", "pub mod low; #[path = \"attic/up.rs\"] pub mod high;"),
        ("low/mod.rs", "pub mod strict; mod inner { mod deep; #[path = \"x.rs\"] mod other; }"),
        ("low/strict.rs", "mod below; #[path = \"y.rs\"] mod beside;"),
        ("low/y.rs", ""),
        ("low/strict/below.rs", "use crate::high::beside::Beside;"),
        ("low/inner/deep.rs", ""),
        ("low/inner/x.rs", ""),
        ("attic/up.rs", "pub mod beside;"),
        ("attic/beside.rs", "pub struct Beside;"),
    ];
    let (modules, found) = house(&files);
    assert_eq!(
        HOUSE.judge(&modules, &found),
        [
            "low::strict::below -> high::beside (crate::high::beside::Beside): strict may not use high"
        ]
    );
    let names: Vec<_> = modules.iter().map(|module| module.name.as_str()).collect();
    for name in ["low::inner::deep", "low::inner::other"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let lost = tree::load(Path::new("src/lib.rs"), &|path| {
        (path == Path::new("src/lib.rs")).then(|| "mod lost;".to_owned())
    });
    assert!(lost.unwrap_err().contains("lost"), "a missing file is no error");
}

#[test]
fn imports_that_name_themselves_end() {
    is_right("mod error { pub fn error() {} } use error::error; fn f() { error(); }", HIGH);
    is_right("pub use self::a::*; mod a { use super::*; } fn f(_: Nothing) {}", HIGH);
    is_right("use self::b::X as Y; mod b { pub use super::Y as X; } fn f(_: Y) {}", HIGH);
}

#[test]
fn a_new_module_must_be_placed() {
    let (modules, found) = house(&[(
        "lib.rs",
        "pub mod low { pub mod strict {} } pub mod high {} mod new { mod below {} }",
    )]);
    assert_eq!(HOUSE.judge(&modules, &found), ["new has no floor yet: place it in the table"]);
}

#[test]
fn a_known_arrow_must_be_there() {
    const KNOWN: Crate = Crate { known: &[Known { from: "low", to: "high" }], ..HOUSE };
    let root = "pub mod high { pub struct High; }";
    let up = format!("{root} pub mod low {{ pub mod strict {{}} use crate::high::High; }}");
    let (modules, found) = house(&[("lib.rs", &up)]);
    assert_eq!(KNOWN.judge(&modules, &found), [""; 0]);
    let down = format!("{root} pub mod low {{ pub mod strict {{}} }}");
    let (modules, found) = house(&[("lib.rs", &down)]);
    assert_eq!(
        KNOWN.judge(&modules, &found),
        ["the known arrow low -> high is gone: take it out of the table"]
    );
}

#[test]
fn the_table_goes_from_low_to_high() {
    const WRONG: Crate = Crate {
        units: &[
            Unit { name: "low", modules: &["low"], uses: &["high"], tests: Tests::All },
            Unit { name: "high", modules: &["high", "gone"], uses: &["low"], tests: Tests::All },
            Unit { name: "root", modules: &[ROOT], uses: &[], tests: Tests::All },
        ],
        ..HOUSE
    };
    let (modules, found) = house(&[("lib.rs", "pub mod low {} pub mod high {}")]);
    assert_eq!(
        WRONG.judge(&modules, &found),
        [
            "low uses high, which does not stand before it",
            "high has a module gone that is not there",
        ]
    );
}

#[test]
fn the_report_counts_circles_and_arrows() {
    let (modules, found) = house(&[(
        "lib.rs",
        "pub mod low { pub mod strict { use super::A; } pub use self::strict::B; pub struct A; }
         pub mod high { use crate::low::A; mod x { use super::y::Y; } mod y { use super::x::X; } }",
    )]);
    assert_eq!(
        HOUSE.report(&modules, &found),
        "house: 6 modules, 4 in 2 circles; 5 arrows, 2 against the table
  low -> strict: 1  (against the table)
  strict -> low: 1  (against the table)
  high -> low: 1
  circle of 2: low, low::strict
  circle of 2: high::x, high::y\n"
    );
}
