//! Code shared by the benchmarks of single layers. They are in `benches/`, one file each:
//! `cargo bench -p rocinante-benches`. For end-to-end measurements, each backend beside its raw
//! baseline, see `rocinante-bench`.

pub mod engine;
