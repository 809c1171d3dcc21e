//! The library as the linker made it, beside the table of what it should export.

use std::collections::BTreeSet;
use std::path::PathBuf;

use object::elf;
use object::read::elf::{ElfFile64, FileHeader as _, SectionHeader as _, Sym as _};

type Elf<'a> = ElfFile64<'a>;

/// The library that cargo built beside this program.
fn library() -> Vec<u8> {
    let mut path: PathBuf = std::env::current_exe().expect("the path of this program");
    path.set_file_name("librocinante_ibverbs.so");
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// `name@@NODE`, or `name@NODE` where that is not the default version.
fn exported(bytes: &[u8]) -> BTreeSet<String> {
    let file = Elf::parse(bytes).expect("a shared object");
    let (endian, sections) = (file.endian(), file.elf_section_table());
    let symbols = sections.symbols(endian, bytes, elf::SHT_DYNSYM).expect("dynamic symbols");
    let versions = sections.versions(endian, bytes).expect("versions").expect("some");
    let mut all = BTreeSet::new();
    for (index, symbol) in symbols.enumerate() {
        if symbol.is_undefined(endian) || symbol.st_shndx(endian) == elf::SHN_ABS {
            continue;
        }
        let name = symbols.symbol_name(endian, symbol).expect("a name");
        let name = String::from_utf8_lossy(name);
        let version = versions.version_index(endian, index);
        let node = match versions.version(version).expect("a version") {
            Some(version) => String::from_utf8_lossy(version.name()).into_owned(),
            None => "none".to_owned(),
        };
        let at = if version.is_hidden() { "@" } else { "@@" };
        all.insert(format!("{name}{at}{node}"));
    }
    all
}

#[test]
fn the_symbols_are_those_of_the_table_and_none_besides() {
    let table = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    let wanted: BTreeSet<String> = table
        .map(|row| {
            let mut columns = row.split_whitespace();
            let mut next = || columns.next().expect("four columns");
            let (node, name, at) = (next(), next(), next());
            format!("{name}{at}{node}")
        })
        .collect();
    let found = exported(&library());
    let missing: Vec<_> = wanted.difference(&found).collect();
    let stray: Vec<_> = found.difference(&wanted).collect();
    assert!(missing.is_empty() && stray.is_empty(), "missing {missing:?}, stray {stray:?}");
}

/// The nodes follow each other as in libibverbs.map: a program that was linked with a node finds
/// the whole chain before it.
#[test]
fn the_nodes_are_those_of_rdma_core() {
    let bytes = library();
    let file = Elf::parse(&*bytes).expect("a shared object");
    let sections = file.elf_section_table();
    let definitions = sections.gnu_verdef(file.endian(), &*bytes).expect("nodes").expect("some");
    let (mut definitions, link) = definitions;
    let strings = sections.strings(file.endian(), &*bytes, link).expect("strings");
    let mut nodes = Vec::new();
    while let Some((_, mut names)) = definitions.next().expect("a node") {
        let name = names.next().expect("a name").expect("one");
        let name = name.name(file.endian(), strings).expect("a string");
        nodes.push(String::from_utf8_lossy(name).into_owned());
    }
    let numbers =
        ["0", "1", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17"];
    let public = numbers.map(|number| format!("IBVERBS_1.{number}"));
    let private = ["34", "57", "59", "64"].map(|number| format!("IBVERBS_PRIVATE_{number}"));
    let soname = "libibverbs.so.1".to_owned();
    let wanted: Vec<String> = [soname].into_iter().chain(public).chain(private).collect();
    assert_eq!(nodes, wanted);
}

/// The GLIBC nodes that the library needs: it loads where the newest of them is.
#[test]
fn it_needs_no_glibc_after_2_34() {
    let bytes = library();
    let file = Elf::parse(&*bytes).expect("a shared object");
    let sections = file.elf_section_table();
    let needed = sections.gnu_verneed(file.endian(), &*bytes).expect("needs").expect("some");
    let (mut needed, link) = needed;
    let strings = sections.strings(file.endian(), &*bytes, link).expect("strings");
    let mut newest = 0;
    while let Some((_, mut names)) = needed.next().expect("a library") {
        while let Some(name) = names.next().expect("a need") {
            let name = name.name(file.endian(), strings).expect("a string");
            let name = String::from_utf8_lossy(name);
            let Some(minor) = name.strip_prefix("GLIBC_2.") else { continue };
            let minor = minor.split('.').next().and_then(|minor| minor.parse().ok());
            newest = newest.max(minor.expect("a number"));
        }
    }
    assert!((17..=34).contains(&newest), "GLIBC_2.{newest}");
}

#[test]
fn it_has_the_name_of_the_library_that_it_stands_for_and_is_never_unloaded() {
    let bytes = library();
    let file = Elf::parse(&*bytes).expect("a shared object");
    let (endian, header) = (file.endian(), file.elf_header());
    let sections = header.sections(endian, &*bytes).expect("sections");
    let (entries, link) = sections
        .iter()
        .find_map(|section| section.dynamic(endian, &*bytes).expect("the dynamic section"))
        .expect("a dynamic section");
    let strings = sections.strings(endian, &*bytes, link).expect("strings");
    let value = |tag: u32| {
        use object::read::elf::Dyn as _;
        let entry = entries.iter().find(|entry| entry.tag32(endian) == Some(tag))?;
        Some(entry.d_val(endian))
    };
    let soname = u32::try_from(value(elf::DT_SONAME).expect("a name")).expect("an offset");
    assert_eq!(strings.get(soname), Ok(&b"libibverbs.so.1"[..]));
    let flags = u32::try_from(value(elf::DT_FLAGS_1).unwrap_or(0)).expect("flags");
    assert_ne!(flags & elf::DF_1_NODELETE, 0, "{flags:#x}");
}
