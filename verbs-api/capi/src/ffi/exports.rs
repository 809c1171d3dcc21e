//! The symbols of the library: a trampoline for each function of `symbols.txt`, and the variables.

#![allow(unsafe_code)]

use std::arch::global_asm;

#[cfg(target_arch = "x86_64")]
macro_rules! export {
    ($trampoline:literal, $symbol:literal, $function:path) => {
        global_asm!(
            concat!(".globl ", $trampoline),
            concat!(".type ", $trampoline, ",@function"),
            concat!($trampoline, ":"),
            "jmp {function}",
            concat!(".symver ", $trampoline, ",", $symbol),
            function = sym $function,
        );
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! export {
    ($trampoline:literal, $symbol:literal, $function:path) => {
        global_asm!(
            concat!(".globl ", $trampoline),
            concat!(".type ", $trampoline, ",%function"),
            concat!($trampoline, ":"),
            "b {function}",
            concat!(".symver ", $trampoline, ",", $symbol),
            function = sym $function,
        );
    };
}

/// A variable of that number of bytes.
macro_rules! object {
    ($object:literal, $symbol:literal, $bytes:literal) => {
        global_asm!(
            concat!(".pushsection .bss.", $object, ", \"aw\", %nobits"),
            ".p2align 3",
            concat!(".globl ", $object),
            concat!(".type ", $object, ", %object"),
            concat!(".size ", $object, ", ", $bytes),
            concat!($object, ":"),
            concat!(".zero ", $bytes),
            concat!(".symver ", $object, ",", $symbol),
            ".popsection",
        );
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
