//! Makes the versioned symbols of the library from `symbols.txt`.
//!
//! rustc writes a version script of its own, which assigns no nodes. So the nodes come from a
//! second script without symbols, and each symbol from a `.symver` directive on a trampoline: lld
//! joins the two.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=symbols.txt");
    let table = std::fs::read_to_string("symbols.txt").expect("symbols.txt is in the crate");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let out = Path::new(&out);
    let (script, exports) = generate(&table);
    let map = out.join("nodes.map");
    std::fs::write(&map, script).expect("OUT_DIR can be written to");
    std::fs::write(out.join("exports.rs"), exports).expect("OUT_DIR can be written to");
    let linker_alone = std::env::var_os("RUSTC_LINKER").is_some_and(|linker| {
        Path::new(&linker).file_stem().is_some_and(|name| name == "rust-lld")
    });
    for argument in [
        "-soname,libibverbs.so.1".to_owned(),
        // Its threads and its functions for atexit(3) outlive a dlclose(3).
        "-z,nodelete".to_owned(),
        format!("--version-script={}", map.display()),
    ] {
        // Without a compiler between, a linker takes its options as they are.
        if linker_alone {
            for word in argument.split(',') {
                println!("cargo::rustc-cdylib-link-arg={word}");
            }
        } else {
            println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
        }
    }
}

/// The version script of the nodes, and the trampolines.
fn generate(table: &str) -> (String, String) {
    let (mut script, mut exports) = (String::new(), String::new());
    let (mut seen, mut before) = (BTreeSet::new(), String::new());
    let rows = table.lines().filter(|line| !line.starts_with('#'));
    for (number, row) in rows.enumerate() {
        let columns: Vec<&str> = row.split_whitespace().collect();
        let &[node, name, at, function] = &columns[..] else {
            panic!("symbols.txt: four columns, not {row:?}")
        };
        if seen.insert(node.to_owned()) {
            writeln!(script, "{node} {{ }}{before};").expect("a string takes all");
            // The private nodes stand alone, as in rdma-core.
            if !node.contains("PRIVATE") {
                before = format!(" {node}");
            } else {
                before.clear();
            }
        }
        let (made, symbol) = (format!("roce_export_{number}"), format!("{name}{at}{node}"));
        match function.strip_prefix("object:") {
            Some(bytes) => writeln!(exports, "object!(\"{made}\", \"{symbol}\", \"{bytes}\");"),
            None => writeln!(exports, "export!(\"{made}\", \"{symbol}\", crate::ffi::{function});"),
        }
        .expect("a string takes all");
    }
    (script, exports)
}
