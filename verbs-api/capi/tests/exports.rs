//! The library as the linker made it, beside the table of its intended exports.

use std::collections::BTreeMap;
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

/// `name@@NODE`, or `name@NODE` where that is not the default version, and of a variable its length
/// if it can be written to.
fn exported(bytes: &[u8]) -> BTreeMap<String, Option<u64>> {
    let file = Elf::parse(bytes).expect("a shared object");
    let (endian, sections) = (file.endian(), file.elf_section_table());
    let symbols = sections.symbols(endian, bytes, elf::SHT_DYNSYM).expect("dynamic symbols");
    let versions = sections.versions(endian, bytes).expect("versions").expect("some");
    let mut all = BTreeMap::new();
    for (index, symbol) in symbols.enumerate() {
        if symbol.is_undefined(endian) || symbol.st_shndx(endian) == elf::SHN_ABS {
            continue;
        }
        let name = symbols.symbol_name(endian, symbol).expect("a name");
        let name = String::from_utf8_lossy(name);
        let version = versions.version_index(endian, index);
        let node = match versions.version(version.into()).expect("a version") {
            Some(version) => String::from_utf8_lossy(version.name()).into_owned(),
            None => "none".to_owned(),
        };
        let at = if version.is_hidden() { "@" } else { "@@" };
        let section = symbols.symbol_section(endian, symbol, index).expect("a number");
        let section = sections.section(section.expect("a section")).expect("a section");
        let is_writable = section.sh_flags(endian).contains(elf::SHF_WRITE);
        let (is_object, is_function) =
            (symbol.st_type() == elf::STT_OBJECT, symbol.st_type() == elf::STT_FUNC);
        assert!(is_object && is_writable || is_function && !is_writable, "{name}");
        let object = is_object.then(|| symbol.st_size(endian));
        all.insert(format!("{name}{at}{node}"), object);
    }
    all
}

#[test]
fn the_symbols_are_those_of_the_table_and_none_besides() {
    let table = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    let wanted: BTreeMap<String, Option<u64>> = table
        .map(|row| {
            let mut columns = row.split_whitespace();
            let mut next = || columns.next().expect("four columns");
            let (node, name, at, what) = (next(), next(), next(), next());
            let bytes = what.strip_prefix("object:").map(|bytes| bytes.parse().expect("a number"));
            (format!("{name}{at}{node}"), bytes)
        })
        .collect();
    let found = exported(&library());
    let missing: Vec<_> = wanted.iter().filter(|(it, kind)| found.get(*it) != Some(kind)).collect();
    let stray: Vec<_> = found.iter().filter(|(it, kind)| wanted.get(*it) != Some(kind)).collect();
    assert!(missing.is_empty() && stray.is_empty(), "missing {missing:?}, stray {stray:?}");
}

/// A variable that is a function here is written to by a driver, or by a second libibverbs.
#[test]
fn functions_and_variables_are_what_they_are_in_rdma_core() {
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let places = ["/usr/lib", "/lib"].map(|lib| format!("{lib}/{triple}/libibverbs.so.1"));
    let Some(theirs) = places.iter().find_map(|place| std::fs::read(place).ok()) else {
        println!("SKIPPED functions_and_variables_are_what_they_are_in_rdma_core: no libibverbs1");
        return;
    };
    let bytes = library();
    let (ours, theirs) = (exported(&bytes), exported(&theirs));
    let plain = |name: &String| name.replace("@@", "@");
    let ours: BTreeMap<String, Option<u64>> =
        ours.iter().map(|(name, kind)| (plain(name), *kind)).collect();
    let theirs: Vec<_> = theirs.iter().map(|(name, kind)| (plain(name), *kind)).collect();
    assert!(theirs.iter().any(|(_, kind)| kind.is_some()), "it has one variable at least");
    for (name, kind) in theirs {
        assert_eq!(ours.get(&name), Some(&kind), "{name}");
    }
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
    let value = |tag: elf::DynamicTag| {
        use object::read::elf::Dyn as _;
        let entry = entries.iter().find(|entry| entry.tag(endian) == tag)?;
        Some(entry.d_val(endian))
    };
    let soname = u32::try_from(value(elf::DT_SONAME).expect("a name")).expect("an offset");
    assert_eq!(strings.get(soname), Ok(&b"libibverbs.so.1"[..]));
    let flags = value(elf::DT_FLAGS_1).unwrap_or(0);
    assert_ne!(flags & elf::DF_1_NODELETE.0, 0, "{flags:#x}");
}
