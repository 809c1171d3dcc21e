//! The symbols of the library: a trampoline for each row of `symbols.txt`.

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

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
