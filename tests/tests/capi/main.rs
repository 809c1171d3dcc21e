//! C programs on the library that takes the place of `libibverbs.so.1`.

mod calls;
mod programs;
mod settings;
