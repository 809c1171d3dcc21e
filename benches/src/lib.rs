//! What the benchmarks of single layers share; they are in `benches/`, one file each: `cargo bench -p rocinante-benches`. End to end, each backend
//! beside its raw ceiling: `rocinante bench`.

pub mod engine;
