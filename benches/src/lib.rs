//! What the benchmarks share. The benchmarks themselves are in `benches/`, one file per layer:
//!
//! - `wire`: headers and ICRC, no engine.
#![forbid(unsafe_code)]
