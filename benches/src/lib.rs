//! What the benchmarks share. The benchmarks of single layers are in `benches/`, one file per layer:
//!
//! - `wire`: headers and ICRC, no engine.
//!
//! End to end, each backend beside its ceiling: `cargo run --release -p rocinante-benches --bin e2e`.

pub mod ceiling;
pub mod e2e;
pub mod engine;
pub mod figure;
